"""What ``convert`` did: groups converted, groups skipped and why, and what each one will hold."""

import dataclasses
import io
from collections.abc import Iterable
from fractions import Fraction

import torch
from rich.console import Console
from rich.table import Table

from pamm.compressors import compressor
from pamm.config import PammConfig
from pamm.naming import merge_names, pattern
from pamm.sampling import directions


@dataclasses.dataclass(frozen=True)
class ConvertedGroup:
    """One input and the layers that read it."""

    name: str
    layers: tuple[str, ...]
    """Full names."""
    in_features: int
    out_features: tuple[int, ...]
    dtype: torch.dtype
    """Of what is kept in place of X."""
    copies: tuple[torch.dtype, ...]
    """Of every copy of X that exact training keeps."""
    config: PammConfig
    confirmed: bool = True
    """Whether a forward pass showed that nothing else keeps X; else by names alone."""
    source: str | None = None
    """The module that can make X again, if there is one."""

    def exact_bytes(self, tokens: int) -> int:
        """Bytes of X, which exact training keeps once for the whole group, or a copy of it for
        each adapter of another dtype.
        """
        return tokens * self.in_features * sum(dtype.itemsize for dtype in self.copies)

    def held_bytes(self, tokens: int) -> int:
        """Bytes kept in place of X, once for the whole group."""
        return compressor(self.config).state_bytes(tokens, self.in_features, self.dtype)

    def paper_bytes(self, tokens: int) -> int | None:
        """The paper's count: generators for each layer by itself, 8 bytes a token; for method
        ``"pamm"`` alone, ``None`` for others.
        """
        if self.config.method != "pamm":
            return None
        k = self.config.generators(tokens)
        return len(self.out_features) * k * self.in_features * self.dtype.itemsize + 8 * tokens


@dataclasses.dataclass(frozen=True)
class SkippedGroup:
    """Layers that looked like a group and were left alone."""

    name: str
    layers: tuple[str, ...]
    """Full names."""
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
    problem: str | None = None
    """Why no forward pass could confirm the groups, if so."""

    def computing_in(self, dtype: torch.dtype) -> "Report":
        """The same under autocast, where X is compressed after its cast."""
        groups = (dataclasses.replace(group, dtype=dtype) for group in self.converted)
        return dataclasses.replace(self, converted=tuple(groups))

    def exact_bytes(self, tokens: int) -> int:
        """Bytes of all inputs X of the converted groups."""
        return sum(group.exact_bytes(tokens) for group in self.converted)

    def held_bytes(self, tokens: int) -> int:
        """Bytes kept in their place."""
        return sum(group.held_bytes(tokens) for group in self.converted)

    def paper_bytes(self, tokens: int) -> int | None:
        """The same in the paper's counting, which is for method ``"pamm"``; ``None`` for others."""
        if self.config.method != "pamm":
            return None
        return sum(group.paper_bytes(tokens) or 0 for group in self.converted)

    def table(self, tokens: int = 32_768) -> str:
        """A table for one forward pass over ``tokens`` tokens; equal groups share a line."""
        config = self.config
        settings = config.method
        if not config.is_exact:
            settings += f", ratio {format_ratio(config.ratio)}"
        if config.tolerance is not None:
            settings += f", tolerance {config.tolerance:g}"
        if config.directions:
            most = config.directions
            used = sorted({directions(most, group.in_features) for group in self.converted})
            settings += f", {' and '.join(map(str, used))} directions"
            settings += f" (of {most}: a quarter of X's features at most)" * (used != [most])
        if config.method == "sampled":
            settings += ", in 8 bits where the GPU can" if config.fp8 else ", not in 8 bits"
        table = Table(
            title=f"pamm: {len(self.converted)} groups converted ({settings}); bytes for "
            f"{tokens:,} tokens in one forward pass",
            title_justify="left",
        )
        table.add_column("group", min_width=55, overflow="fold")
        for name in ("groups", "in -> out", "exact", "held", "saved", "paper's count"):
            table.add_column(name, justify="right", no_wrap=True)
        for alike in self._alike():
            group, count = alike[0], len(alike)
            exact, held = count * group.exact_bytes(tokens), count * group.held_bytes(tokens)
            paper = group.paper_bytes(tokens)
            table.add_row(
                merge_names([each.name for each in alike]).replace("[", "\\["),
                str(count),
                f"{group.in_features} -> {_format_widths(group.out_features)}",
                format_bytes(exact),
                format_bytes(held),
                f"{1 - held / exact:.2%}" if exact else "",
                "" if paper is None else format_bytes(count * paper),
            )
        console = Console(file=io.StringIO(), width=140)
        console.print(table)
        for name, reason in merge_skipped(self.skipped):
            console.print(f"skipped {name}: {reason}", markup=False, highlight=False)
        for note in self._unconfirmed():
            console.print(note, markup=False, highlight=False)
        lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
        return "\n".join(line.rstrip() for line in lines)

    def __str__(self) -> str:
        return self.table()

    def _alike(self) -> list[list[ConvertedGroup]]:
        lines: dict[object, list[ConvertedGroup]] = {}
        for group in self.converted:
            key = (
                pattern(group.name),
                group.in_features,
                group.out_features,
                group.dtype,
                group.copies,
            )
            lines.setdefault(key, []).append(group)
        return list(lines.values())

    def _unconfirmed(self) -> list[str]:
        if self.problem:
            return [f"groups found by names alone, not confirmed by a forward pass: {self.problem}"]
        names: dict[str, list[str]] = {}
        for group in self.converted:
            if not group.confirmed:
                names.setdefault(pattern(group.name), []).append(group.name)
        return [
            f"{merge_names(alike)} by names alone: the forward pass that confirms groups did not "
            "run them"
            for alike in names.values()
        ]


def merge_skipped(skipped: Iterable[SkippedGroup]) -> list[tuple[str, str]]:
    """Names and reasons, of all blocks together."""
    lines: dict[tuple[str, str], list[SkippedGroup]] = {}
    for group in skipped:
        lines.setdefault((pattern(group.name), pattern(group.reason)), []).append(group)
    return [
        (merge_names([each.name for each in alike]), merge_names([each.reason for each in alike]))
        for alike in lines.values()
    ]


def _format_widths(widths: tuple[int, ...]) -> str:
    """'16+8+8', and '24 x 16' for many equal ones."""
    if len(widths) > 4 and len(set(widths)) == 1:
        return f"{len(widths)} x {widths[0]}"
    return "+".join(map(str, widths))


def format_bytes(count: float) -> str:
    """1536 -> '1.50 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:,.0f} B" if unit == "B" else f"{count:,.2f} {unit}"
        count /= 1024
    raise AssertionError


def format_ratio(ratio: float) -> str:
    """0.0078125 -> '1/128', 0.6666666666666666 -> '2/3'."""
    share = Fraction(ratio).limit_denominator(1 << 20)
    is_short = share.numerator == 1 < share.denominator or 1 < share.denominator < 10
    return str(share) if is_short else f"{ratio:g}"
