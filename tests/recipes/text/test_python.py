import json

from pamm.recipes.text.python import module_files, python_text


def test_docstrings_and_topics_become_documents_in_a_fixed_order() -> None:
    files = [file for file in module_files() if file.name in ("textwrap.py", "heapq.py")]
    counted: list[int] = []
    made = python_text(files, counted.append)
    documents = [json.loads(line)["text"] for line in made.splitlines()]
    wrapped = next(text for text in documents if text.startswith("textwrap\n"))
    assert "Text wrapping and filling." in wrapped
    assert "TextWrapper\nObject for wrapping/filling text." in wrapped
    assert any("lambda" in text.splitlines()[0] for text in documents)
    assert made == python_text(files)
    assert len(counted) == 2
    assert len(documents) > 50


def test_files_of_tests_and_of_installed_packages_are_left_out() -> None:
    names = {part for file in module_files() for part in file.parts}
    assert "json" in names
    assert not names & {"test", "site-packages", "idlelib"}
