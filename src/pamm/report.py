"""What ``convert`` did: groups converted, groups skipped and why, and what each one will hold."""

import dataclasses
import io
import re

import torch
from rich.console import Console
from rich.table import Table

from pamm.compressors import compressor
from pamm.config import PammConfig


@dataclasses.dataclass(frozen=True)
class ConvertedGroup:
    """One input and the layers that read it."""

    name: str
    in_features: int
    out_features: tuple[int, ...]
    dtype: torch.dtype
    config: PammConfig

    def exact_bytes(self, tokens: int) -> int:
        """Bytes of X, which exact training keeps once for the whole group."""
        return tokens * self.in_features * self.dtype.itemsize

    def held_bytes(self, tokens: int) -> int:
        """Bytes kept in place of X, once for the whole group."""
        return compressor(self.config).state_bytes(tokens, self.in_features, self.dtype)

    def paper_bytes(self, tokens: int) -> int:
        """The paper's count for PAMM: generators for each layer by itself, 8 bytes a token."""
        k = self.config.generators(tokens)
        return len(self.out_features) * k * self.in_features * self.dtype.itemsize + 8 * tokens


@dataclasses.dataclass(frozen=True)
class SkippedGroup:
    """Layers that looked like a group and were left alone."""

    name: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Report:
    """The outcome of ``pamm.convert``; printing it gives a table.

    Bytes depend on how many tokens a device sees in one forward pass: ``held_bytes(tokens)`` and
    ``exact_bytes(tokens)`` give them for any number, ``table(tokens)`` prints them.
    """

    config: PammConfig
    converted: tuple[ConvertedGroup, ...]
    skipped: tuple[SkippedGroup, ...]

    def exact_bytes(self, tokens: int) -> int:
        """Bytes of all inputs X of the converted groups."""
        return sum(group.exact_bytes(tokens) for group in self.converted)

    def held_bytes(self, tokens: int) -> int:
        """Bytes kept in their place."""
        return sum(group.held_bytes(tokens) for group in self.converted)

    def paper_bytes(self, tokens: int) -> int:
        """The same in the paper's counting: three sets of generators, 8 bytes a token."""
        return sum(group.paper_bytes(tokens) for group in self.converted)

    def table(self, tokens: int = 32_768) -> str:
        """A table for one forward pass over ``tokens`` tokens; equal groups share a line."""
        config = self.config
        settings = f"{config.method}, ratio {format_ratio(config.ratio)}"
        if config.tolerance is not None:
            settings += f", tolerance {config.tolerance:g}"
        table = Table(
            title=f"pamm: {len(self.converted)} groups converted ({settings}); bytes for "
            f"{tokens:,} tokens in one forward pass",
            title_justify="left",
        )
        table.add_column("group", min_width=55, overflow="fold")
        for name in ("groups", "in -> out", "exact", "held", "saved", "paper's count"):
            table.add_column(name, justify="right", no_wrap=True)
        is_pamm = config.method == "pamm"
        for alike in self._alike():
            group, count = alike[0], len(alike)
            exact, held = count * group.exact_bytes(tokens), count * group.held_bytes(tokens)
            table.add_row(
                merge_names([each.name for each in alike]).replace("[", "\\["),
                str(count),
                f"{group.in_features} -> {'+'.join(map(str, group.out_features))}",
                format_bytes(exact),
                format_bytes(held),
                f"{1 - held / exact:.2%}" if exact else "",
                format_bytes(count * group.paper_bytes(tokens)) if is_pamm else "",
            )
        console = Console(file=io.StringIO(), width=140)
        console.print(table)
        for name, reason in self._skipped():
            console.print(f"skipped {name}: {reason}", markup=False, highlight=False)
        lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
        return "\n".join(line.rstrip() for line in lines)

    def __str__(self) -> str:
        return self.table()

    def _alike(self) -> list[list[ConvertedGroup]]:
        lines: dict[object, list[ConvertedGroup]] = {}
        for group in self.converted:
            key = (_pattern(group.name), group.in_features, group.out_features, group.dtype)
            lines.setdefault(key, []).append(group)
        return list(lines.values())

    def _skipped(self) -> list[tuple[str, str]]:
        lines: dict[tuple[str, str], list[str]] = {}
        for group in self.skipped:
            lines.setdefault((_pattern(group.name), group.reason), []).append(group.name)
        return [(merge_names(names), reason) for (_, reason), names in lines.items()]


def merge_names(names: list[str]) -> str:
    """``layers.0.attn``, ``layers.1.attn``, ... as ``layers.{0..1}.attn``."""
    numbers = [re.findall(r"(?<=\.)\d+(?=\.)", name) for name in names]
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


def format_bytes(count: float) -> str:
    """1536 -> '1.50 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:,.0f} B" if unit == "B" else f"{count:,.2f} {unit}"
        count /= 1024
    raise AssertionError


def format_ratio(ratio: float) -> str:
    """0.0078125 -> '1/128'."""
    return f"1/{1 / ratio:.0f}" if ratio < 1 and (1 / ratio).is_integer() else f"{ratio:g}"


def _pattern(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
