"""Text that every machine has: Python's own documentation, and its standard library's docstrings.

About 2 MB of technical English. The same on every machine with the same version of Python.
"""

import ast
import hashlib
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from pamm.errors import PammError
from pamm.recipes.console import Advance

_LEFT_OUT = {
    *("site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3"),
    *("ensurepip", "encodings", "turtledemo", "pydoc_data"),  # repetitive, or not prose
}


def module_files() -> list[Path]:
    """Source files of the standard library whose docstrings are read."""
    root = Path(sysconfig.get_path("stdlib"))
    files = (file.relative_to(root) for file in root.rglob("*.py"))
    kept = sorted(f for f in files if not _LEFT_OUT.intersection(f.parts))
    if not kept:
        raise PammError(f"no source of Python's standard library in {root}; it is the demo's text.")
    return [root / file for file in kept]


def python_text(files: list[Path], advance: Advance = lambda _: None) -> str:
    """All documents as JSON lines, in an order that mixes the topics and never changes.

    One document for each module, with its docstrings, and one for each topic of ``help()``.

    Args:
        files: of ``module_files``.
        advance: called with 1 after each file; parsing them takes some seconds.
    """
    from pydoc_data.topics import topics

    documents = [f"{title}\n\n{body}" for title, body in topics.items()]
    for file in files:
        if docstrings := list(_docstrings(file)):
            documents.append("\n\n".join([file.stem, *docstrings]))
        advance(1)
    documents.sort(key=lambda text: hashlib.sha256(text.encode()).digest())
    return "".join(json.dumps({"text": text}) + "\n" for text in documents)


def _docstrings(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_bytes())):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if text := ast.get_docstring(node):
            yield f"{getattr(node, 'name', '')}\n{text}".lstrip()
