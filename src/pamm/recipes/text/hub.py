"""Texts of data sets on the hub, streamed: ``hub:NAME``, ``hub:NAME:CONFIG:SPLIT``."""

from collections.abc import Iterator
from typing import Any

from pamm.errors import PammError, said
from pamm.extras import require

_PREFIX = "hub:"


def is_hub(name: str) -> bool:
    """Whether ``name`` is a data set of the hub, and no file."""
    return name.startswith(_PREFIX)


def hub_texts(name: str) -> Iterator[str]:
    """The texts of a data set, in its own order, from the column ``text``.

    Args:
        name: ``hub:NAME``, ``hub:NAME:CONFIG`` or ``hub:NAME:CONFIG:SPLIT``, with the split
            ``train`` if left out; the paper's is ``hub:allenai/c4:en``. Only data: no code from the
            hub runs.

    Raises:
        PammError: if there is no such data set, or it has no column ``text``.
    """
    require("train", "datasets")
    import datasets

    repository, config, split, *rest = [*name.removeprefix(_PREFIX).split(":"), "", ""][:4]
    if not repository or any(rest):
        raise PammError(
            f"text is {name!r}; write hub:NAME, hub:NAME:CONFIG or hub:NAME:CONFIG:SPLIT."
        )
    try:
        rows: Any = datasets.load_dataset(
            repository, config or None, split=split or "train", streaming=True
        )
        for row in rows:
            if not isinstance(text := row.get("text"), str):
                raise PammError(f"{name} has no text in a column 'text'; it has {', '.join(row)}.")
            if text.strip():
                yield text
    except PammError:
        raise
    except Exception as error:  # of many kinds: names, connections, formats
        raise PammError(f"cannot read {name}: {said(error)}.") from error
