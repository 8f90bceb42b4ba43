import json
import lzma
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from pamm.errors import PammError
from pamm.recipes.text.read import find_files, read_texts

TEXTS = ["first text", "zweiter Text, mit Ümlauten", "third\nof two lines"]


def jsonl(texts: list[str]) -> str:
    return "".join(json.dumps({"text": text, "other": 1}) + "\n" for text in texts)


def write(path: Path, texts: list[str]) -> Path:
    """A file of the kind that its name says."""
    if path.name.endswith(".parquet"):
        pyarrow.parquet.write_table(pyarrow.table({"n": [1] * len(texts), "text": texts}), path)
    elif path.name.endswith(".xz"):
        path.write_bytes(lzma.compress(jsonl(texts).encode()))
    else:
        path.write_text(jsonl(texts), encoding="utf-8")
    return path


def read(*paths: Path) -> list[str]:
    return list(read_texts(find_files([str(path) for path in paths])))


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.xz", "a.parquet", "A.JSONL"])
def test_records_are_read_in_order(tmp_path: Path, name: str) -> None:
    assert read(write(tmp_path / name, TEXTS)) == TEXTS


def test_empty_texts_and_lines_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(jsonl(["one"]) + "\n" + jsonl(["", "  ", "two"]))
    assert read(path) == ["one", "two"]


def test_a_txt_file_is_one_text(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\n\nthree")
    assert read(path) == ["one\r\ntwo\n\nthree"]


def test_a_large_txt_file_comes_in_pieces_that_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("".join(f"line {i}\n" for i in range(200_000)))
    pieces = read(path)
    assert len(pieces) > 1
    assert "".join(pieces) == path.read_text()
    assert all(piece.endswith("\n") for piece in pieces)


def test_a_folder_is_searched_deeply_and_in_sorted_order(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    write(tmp_path / "b" / "2.jsonl", ["two"])
    write(tmp_path / "b" / "1.parquet", ["one"])
    write(tmp_path / "a.jsonl.xz", ["zero"])
    (tmp_path / "notes.md").write_text("not read")
    assert read(tmp_path) == ["zero", "one", "two"]


def test_advance_counts_the_bytes_of_the_files(tmp_path: Path) -> None:
    files = [write(tmp_path / name, TEXTS * 500) for name in ("a.jsonl", "b.jsonl.xz")]
    counted: list[int] = []
    list(read_texts(files, counted.append))
    assert sum(counted) == sum(file.stat().st_size for file in files)
    assert len(counted) > 2


def check_error(paths: list[Path], *parts: str) -> None:
    with pytest.raises(PammError) as caught:
        read(*paths)
    for part in parts:
        assert part in str(caught.value)


def test_a_missing_path(tmp_path: Path) -> None:
    check_error([tmp_path / "none.txt"], "no such file or folder", "none.txt")


def test_another_suffix(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x")
    check_error([tmp_path / "a.csv"], "a.csv", ".txt, .jsonl, .jsonl.xz or .parquet")


def test_a_folder_without_text_says_which_suffixes_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x")
    check_error([tmp_path], "no text in the folder", ".txt, .jsonl, .jsonl.xz or .parquet")


def test_invalid_json_names_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(jsonl(["fine", "fine"]) + '{"text": \n')
    check_error([tmp_path / "a.jsonl"], "a.jsonl, line 3", "not valid JSON")


@pytest.mark.parametrize("line", ['{"body": "x"}', '["x"]', '{"text": 3}'])
def test_a_record_without_text_names_file_and_line(tmp_path: Path, line: str) -> None:
    (tmp_path / "a.jsonl").write_text(jsonl(["fine"]) + line + "\n")
    check_error([tmp_path / "a.jsonl"], "a.jsonl, line 2", '{"text": "..."}')


def test_undecodable_bytes_name_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("fine\nfine\nMünchen".encode("latin-1"))
    check_error([tmp_path / "a.txt"], "a.txt, line 3", "not UTF-8", "0xfc")


def test_a_cut_xz_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl.xz", TEXTS * 1000)
    path.write_bytes(path.read_bytes()[:-20])
    check_error([path], "not a complete xz file")


def test_parquet_without_the_column_or_not_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"], "id": [1]}), path)
    check_error([path], "no column 'text'", "body, id")
    path.write_text("no parquet at all, but long enough to look at")
    check_error([path], "not valid parquet")
    pyarrow.parquet.write_table(pyarrow.table({"text": [1, 2]}), path)
    check_error([path], "column 'text'", "int")
