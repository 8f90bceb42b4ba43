"""What ``pamm inspect`` found, as tables and a verdict."""

import dataclasses

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pamm.config import PammConfig
from pamm.naming import group_name, merge_names, pattern
from pamm.report import SkippedGroup, format_bytes, format_ratio, merge_skipped

WORTH = (0.03, 0.10)
"""Shares of what is kept for backward: to free less is not worth it, to free more is."""


@dataclasses.dataclass(frozen=True)
class InspectedGroup:
    """One group, in bytes of one training step."""

    name: str
    rows: int
    """Tokens that its input has; 0 if it did not run."""
    input_bytes: int
    """Of X and its copies; in a converted group as far as nobody else keeps them."""
    held_bytes: int | None
    """Kept in its place; ``None`` if the group is not converted."""
    block_bytes: int
    """All that its block keeps; 0 if it is in no block, or in several."""
    others: tuple[str, ...]
    """Who else keeps X."""
    widened: bool = False
    """Whether it takes ``widen`` to convert it."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """One way to train the model; bytes kept for backward."""

    name: str
    exact: int
    converted: int
    weight_copies: int
    """Part of both: autocast's copies of weights."""
    widened: int | None = None
    """As ``converted``, with ``widen``; where that makes no difference, ``None``."""

    @property
    def share(self) -> float:
        """Of the kept bytes, the share that goes."""
        return self.share_without(self.converted)

    def share_without(self, left: int) -> float:
        """The share that goes if these bytes are left."""
        return max(0.0, 1 - left / self.exact) if self.exact else 0.0


@dataclasses.dataclass(frozen=True)
class Inspection:
    """The outcome of ``inspect``; print it with rich."""

    model: str
    parameters: int
    batch: int
    tokens: int
    """Rows of the inputs, at most."""
    dtype: str
    config: PammConfig
    groups: tuple[InspectedGroup, ...]
    """Those that are not converted included."""
    settings: tuple[Setting, ...]
    """The first one is the one asked for."""
    skipped: tuple[SkippedGroup, ...]
    only_kept: int = 0
    """How many more groups methods would convert that keep something of X."""

    @property
    def verdict(self) -> str:
        """Whether to convert the model, in plain words."""
        now, best = self.settings[0], max(self.settings, key=lambda each: each.share)
        saved, method = now.exact - now.converted, self.config.method
        frees = f"{method} frees nothing"
        if saved > 0:
            frees = f"{method} frees {format_bytes(saved)} ({now.share:.1%})"
        lines = [
            f"{_worth(now.share)} With {now.name}, {frees} of {format_bytes(now.exact)} kept for "
            "backward."
        ]
        others = sorted({name for group in self.groups for name in group.others})
        if others and not saved > 0:
            lines.append(f"X stays because of {group_name(others)}.")
        if now.widened is not None:
            lines.append(
                f"With --widen these are converted too: {format_bytes(now.exact - now.widened)} "
                f"({now.share_without(now.widened):.1%}) would go."
            )
        if best.share > 2 * now.share and best.share >= WORTH[0]:
            lines.append(f"The most would go with {best.name}: {best.share:.1%}.")
        if self.only_kept:
            count = f"{self.only_kept} group{'s' * (self.only_kept > 1)}"
            lines.append(
                "--method subspace and pamm, which keep something of X, would convert "
                f"{count} more."
            )
        if any(each.share or each.widened for each in self.settings):
            lines.append(_price(method))
        return " ".join(lines)

    def __rich__(self) -> RenderableType:
        return Group(self._groups(), "", self._settings(), "", f"[bold]{self.verdict}[/bold]")

    def _groups(self) -> RenderableType:
        table = Table(
            title=f"{self.model}: {self.parameters / 1e6:,.1f}M parameters, {self.dtype}, "
            f"batch {self.batch}, {self.tokens:,} tokens, {described(self.config)}",
            title_justify="left",
            caption="X: the input that only these layers keep, its copies included. Held: kept in "
            "its place. Each for one group."
            + " The norm that makes X again keeps its input alone: what else it kept goes too."
            * self.config.recomputes,
            caption_justify="left",
        )
        table.add_column("group", overflow="fold")
        for name in ("groups", "X", "held", "X of its block", "X of the step", "also kept by"):
            table.add_column(name, justify="left" if name == "also kept by" else "right")
        alike: dict[object, list[InspectedGroup]] = {}
        for group in self.groups:
            key = dataclasses.replace(group, name=pattern(group.name), others=())
            alike.setdefault((key, len(group.others)), []).append(group)
        for same in alike.values():
            table.add_row(*self._row(same))
        skipped = [f"skipped {name}: {reason}" for name, reason in merge_skipped(self.skipped)]
        return Group(table, *map(Text, skipped))

    def _row(self, same: list[InspectedGroup]) -> list[str]:
        group, count = same[0], len(same)
        held = "stays" if group.held_bytes is None else format_bytes(group.held_bytes)
        notes = [name.rpartition(".")[2] or name for name in group.others]
        if group.widened:
            notes.append("(with --widen)")
        if not group.rows:
            notes.append("(not run)")
        return [
            merge_names([each.name for each in same]).replace("[", "\\["),
            str(count),
            format_bytes(group.input_bytes),
            held,
            _percent(group.input_bytes, group.block_bytes),
            _percent(group.input_bytes * count, self.settings[0].exact),
            ", ".join(notes),
        ]

    def _settings(self) -> RenderableType:
        table = Table(title="The same step in other settings", title_justify="left")
        table.add_column("setting")
        widened = any(each.widened is not None for each in self.settings)
        columns = ["kept for backward", f"with {self.config.method}", "freed"]
        for name in columns + ["with --widen", "freed"] * widened:
            table.add_column(name, justify="right")
        for each in self.settings:
            copies = each.weight_copies
            note = f"\n(of it {format_bytes(copies)} are copies of weights)" if copies else ""
            cells = [each.name + note, format_bytes(each.exact)]
            for left in (each.converted, each.widened):
                if left is not None:
                    cells += [format_bytes(left), f"{each.share_without(left):.1%}"]
            table.add_row(*cells)
        return table


def described(config: PammConfig) -> str:
    """A method, with its ratio and directions if it has them."""
    if config.is_exact:
        return config.method
    directions = f" and up to {config.directions} directions" if config.directions else ""
    return f"{config.method} with ratio {format_ratio(config.ratio)}{directions}"


def _price(method: str) -> str:
    if method == "exact":
        return "The gradient stays exact: the group shares one cast of X, and that is all."
    if method == "recompute":
        return (
            "The gradient stays exact; the price is the norm's arithmetic, once more in backward."
        )
    price = "The price is an approximate weight gradient of these layers."
    if method == "sampled":
        return f"{price} --method recompute frees no less, with an exact one."
    return f"{price} Where a norm makes X, --method recompute frees no less, with an exact one."


def _worth(share: float) -> str:
    if share < WORTH[0]:
        return "Not worth it for memory."
    if share < WORTH[1]:
        return "A small saving."
    return "Worth trying."


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else ""
