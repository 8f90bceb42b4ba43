"""Every example in a docstring, in README and in docs/ runs."""

import doctest
import importlib
import re
from pathlib import Path

import pytest
import torch

import pamm

SOURCE = Path(pamm.__file__).parent
PROJECT = SOURCE.parents[1]
MODULES = [
    ".".join(("pamm", *file.relative_to(SOURCE).with_suffix("").parts))
    for file in sorted(SOURCE.rglob("*.py"))
    if ">>>" in file.read_text(encoding="utf-8")
]
TEXTS = [PROJECT / "README.md", *sorted((PROJECT / "docs").rglob("*.md"))]
PAGES = [page for page in TEXTS if "```python" in page.read_text(encoding="utf-8")]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name: str) -> None:
    module = importlib.import_module(name)
    finder = doctest.DocTestFinder(exclude_empty=True)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    names = {**vars(module), "torch": torch}
    tests = finder.find(module, name, globs=names)
    assert any(test.examples for test in tests)
    for test in tests:
        runner.run(test)
    assert runner.failures == 0


def blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_of_pages_run_one_after_the_other(page: Path, tmp_path: Path) -> None:
    names: dict[str, object] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        for block in blocks(page):
            exec(compile(block, str(page), "exec"), names)  # a block that raises fails the test
    assert names.keys() > {"__builtins__"}, "no block of this page was found"


def test_the_readme_has_python_blocks() -> None:
    assert PROJECT / "README.md" in PAGES


def test_the_reference_has_every_public_name() -> None:
    listed = re.findall(
        r"^::: (pamm\.\S+)$", (PROJECT / "docs/reference.md").read_text(), re.MULTILINE
    )
    for name in pamm.__all__:
        assert any(f"{each}.".startswith(f"pamm.{name}.") for each in listed), name
