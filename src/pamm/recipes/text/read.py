"""Read a user's text: txt, jsonl, jsonl.xz and parquet; files or folders."""

import json
import lzma
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from pamm.errors import PammError
from pamm.extras import require
from pamm.recipes.console import Advance

SUFFIXES = (".txt", ".jsonl", ".jsonl.xz", ".parquet")
_PIECE = 1 << 20  # a .txt file is passed on in pieces of whole lines, about a million characters


def find_files(paths: list[str]) -> list[Path]:
    """The readable files among ``paths``; folders are searched to any depth, in sorted order.

    Raises:
        PammError: if a path does not exist, has another suffix, or holds no readable file.
    """
    files = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*") if _suffix(file) and file.is_file())
            if not inside:
                raise PammError(f"no text in the folder {path}: no file ends in {_allowed()}.")
            files += inside
        elif not path.exists():
            raise PammError(f"no such file or folder: {path}. Give the path of a text to train on.")
        elif not _suffix(path):
            raise PammError(f"cannot read {path}: its name must end in {_allowed()}.")
        else:
            files.append(path)
    return files


def read_texts(files: list[Path], advance: Advance = lambda _: None) -> Iterator[str]:
    """The texts of ``files``, one after the other.

    A line of JSON or a row of parquet gives one text, from its field ``text``. A ``.txt`` file is
    one, or several pieces of whole lines if it is large. Empty ones are left out.

    Args:
        files: as ``find_files`` gives them.
        advance: called with the number of bytes read since the last call.

    Raises:
        PammError: names the file and the line of whatever cannot be read.

    Examples:
        >>> for text in read_texts(find_files(["book.txt"])):  # doctest: +SKIP
        ...     print(len(text))
    """
    for file in files:
        try:
            with file.open("rb") as raw:
                done = 0
                for text in _READERS[_suffix(file)](raw, file):
                    if text.strip():
                        yield text
                    position = raw.tell()
                    advance(position - done)
                    done = position
        except OSError as error:
            raise PammError(f"cannot read {file}: {error.strerror}.") from error


def _read_txt(raw: BinaryIO, file: Path) -> Iterator[str]:
    piece, size = [], 0
    for _, line in _lines(raw, file):
        piece.append(line)
        size += len(line)
        if size >= _PIECE:
            yield "".join(piece)
            piece, size = [], 0
    yield "".join(piece)


def _read_jsonl(raw: BinaryIO, file: Path) -> Iterator[str]:
    for number, line in _lines(raw, file):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise PammError(f"{file}, line {number}: not valid JSON ({error}).") from error
        if not isinstance(record, dict) or not isinstance(record.get("text"), str):
            raise PammError(
                f'{file}, line {number}: no text; every line must be like {{"text": "..."}}.'
            )
        yield record["text"]


def _read_jsonl_xz(raw: BinaryIO, file: Path) -> Iterator[str]:
    try:
        with lzma.open(raw) as stream:
            yield from _read_jsonl(stream, file)  # type: ignore[arg-type]
    except (lzma.LZMAError, EOFError) as error:
        raise PammError(f"{file} is not a complete xz file: {error}") from error


def _read_parquet(raw: BinaryIO, file: Path) -> Iterator[str]:
    require("train", "pyarrow")
    import pyarrow
    import pyarrow.parquet

    try:
        table: Any = pyarrow.parquet.ParquetFile(raw)
        if "text" not in table.schema_arrow.names:
            names = ", ".join(table.schema_arrow.names)
            raise PammError(f"{file} has no column 'text'; its columns are: {names}.")
        for batch in table.iter_batches(batch_size=1024, columns=["text"]):
            for value in batch.column(0).to_pylist():
                if not isinstance(value, str | None):
                    raise PammError(f"column 'text' of {file} holds {type(value).__name__}.")
                yield value or ""
    except pyarrow.ArrowException as error:
        raise PammError(f"{file} is not valid parquet: {error}") from error


def _lines(raw: BinaryIO, file: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines, decoded one by one so that an error can name its line."""
    for number, line in enumerate(raw, start=1):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")  # the byte order mark of Windows editors
        try:
            yield number, line.decode()
        except UnicodeDecodeError as error:
            raise PammError(
                f"{file}, line {number}: not UTF-8 (byte 0x{error.object[error.start]:02x}). "
                "Convert the file to UTF-8."
            ) from error


_READERS: dict[str, Callable[[BinaryIO, Path], Iterator[str]]] = {
    ".txt": _read_txt,
    ".jsonl": _read_jsonl,
    ".jsonl.xz": _read_jsonl_xz,
    ".parquet": _read_parquet,
}


def _suffix(file: Path) -> str:
    """Which of ``SUFFIXES`` the name ends in, or ''."""
    return next((suffix for suffix in SUFFIXES if file.name.lower().endswith(suffix)), "")


def _allowed() -> str:
    return f"{', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"
