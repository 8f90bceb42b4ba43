"""Full names of layers: many written short, ``layers.{0..11}.attn.{q_proj,k_proj}``; chosen."""

import fnmatch
import re
from collections.abc import Callable, Iterable
from typing import Any

from pamm.errors import PammError

Selector = str | Iterable[str] | Callable[[str], bool] | None
"""Of names: a pattern, several, or a function."""

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def bare(name: str) -> str:
    """The name without what ``torch.compile`` of the model, or of a block, puts into it."""
    return name.replace("_orig_mod.", "")


def group_name(layers: Iterable[str]) -> str:
    """One name for layers that read one input.

    Examples:
        >>> group_name(["a.0.q", "a.0.k"]), group_name(["a.0.k", "a.0.v", "a.1.k", "a.1.v"])
        ('a.0.{q,k}', 'a.{0..1}.{k,v}')
        >>> group_name(["a.0.attn.q", "a.0.mlp.fc1"])
        'a.0.{attn.q,mlp.fc1}'
        >>> group_name(["a.0.q.lora_A.default", "a.0.k.lora_A.default"])
        'a.0.{q,k}.lora_A.default'
    """
    children: dict[str, list[str]] = {}
    for layer in layers:
        parent, _, child = f".{layer}".rpartition(".")
        children.setdefault(parent, []).append(child)
    alike: dict[object, list[str]] = {}
    for parent, names in children.items():
        alike.setdefault((pattern(f"{parent}."), *names), []).append(parent)
    texts = []
    for parents in alike.values():
        merged = merge_names([f"{parent}." for parent in parents])
        texts.append(merged.removeprefix(".") + _listed(children[parents[0]]))
    common = _common_prefix(texts)
    if len(texts) == 1:
        return texts[0]
    rest = [text.removeprefix(common) for text in texts]
    ending = _common_ending(rest)
    rest = [re.sub(r"^\{([^{}]*)\}$", r"\1", text.removesuffix(ending)) for text in rest]
    return common + _listed(rest) + ending


def patterns(argument: str, given: object) -> list[str]:
    """One pattern of names, or several, as a list; an error if it is none."""
    several = isinstance(given, Iterable) and not isinstance(given, str)
    found: list[Any] = list(given) if several else [given]  # type: ignore[arg-type]
    if not all(isinstance(each, str) for each in found):
        raise PammError(
            f"{argument} is {given!r}; give a pattern of names, such as 'model.layers.*', or "
            "several."
        )
    return found


def selector(argument: str, given: Selector) -> Selector:
    """The same, its patterns a list; an error if it is none."""
    return given if given is None or callable(given) else patterns(argument, given)


def selected(name: str, include: Selector, exclude: Selector) -> bool:
    """Whether a layer of this name is in ``include``, if there is one, and not in ``exclude``."""
    name = bare(name)
    return (include is None or _matches(name, include)) and not (
        exclude is not None and _matches(name, exclude)
    )


def _matches(name: str, selector: Selector) -> bool:
    if callable(selector):
        return bool(selector(name))
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in selector or ())


def merge_names(names: list[str]) -> str:
    """``layers.0.attn``, ``layers.1.attn``, ... as ``layers.{0..1}.attn``; texts as well."""
    numbers = [_NUMBER.findall(name) for name in names]
    merged = names[0]
    for position in range(len(numbers[0])):
        values = sorted({int(number[position]) for number in numbers})
        if len(values) > 1:
            whole = values == list(range(values[0], values[-1] + 1))
            text = f"{values[0]}..{values[-1]}" if whole else ",".join(map(str, values))
            matches = list(re.finditer(r"(?<=\.)[^.]+(?=\.)", merged))
            spans = [m for m in matches if m.group().isdigit() or m.group().startswith("{")]
            start, end = spans[position].span()
            merged = f"{merged[:start]}{{{text}}}{merged[end:]}"
    return merged


def pattern(name: str) -> str:
    """The name with a star for each number: equal for the same layer of all blocks."""
    return _NUMBER.sub("*", name)


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{{{','.join(names)}}}"


def _common_prefix(names: list[str]) -> str:
    """Of whole parts, with the dot after them."""
    if len(names) == 1:
        return ""
    parts = [name.split(".") for name in names]
    length = 0
    while len({tuple(part[: length + 1]) for part in parts}) == 1:
        length += 1
    return "".join(f"{part}." for part in parts[0][:length])


def _common_ending(names: list[str]) -> str:
    """Of whole parts, with the dot before them; something is left of each name."""
    if len(names) == 1:
        return ""
    parts = [name.split(".")[::-1] for name in names]
    length = 0
    while length + 1 < min(map(len, parts)) and len({part[length] for part in parts}) == 1:
        length += 1
    return "".join(f".{part}" for part in reversed(parts[0][:length]))
