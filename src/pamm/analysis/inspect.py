"""``pamm inspect``: what a model keeps for backward, how much of it PAMM frees, and the verdict."""

import dataclasses
import importlib.util
import re

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import nn

from pamm.analysis.dry_run import Compressed, DryRun
from pamm.analysis.memory import group_layers
from pamm.analysis.meta_model import PRECISIONS, Precision, Source, checkpoint, precision, step
from pamm.config import PammConfig
from pamm.errors import PammError
from pamm.integrations.lora import add_lora
from pamm.report import ConvertedGroup, Report, format_bytes, format_ratio, merge_names
from pamm.surgery import convert, revert

Layers = dict[str, list[str]]
"""Names of layers, by the name of their group."""


@dataclasses.dataclass(frozen=True)
class InspectedGroup:
    """One group, in bytes of one training step."""

    name: str
    in_features: int
    rows: int
    """Tokens that its input has; 0 if it did not run."""
    input_bytes: int
    """Of X and its copies, as far as nobody else keeps them: what would be freed."""
    held_bytes: int
    """Kept in its place."""
    block_bytes: int
    """All that its block keeps."""
    others: tuple[str, ...]
    """Who else keeps X."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """One way to train the model; bytes kept for backward."""

    name: str
    exact: int
    pamm: int
    weight_copies: int
    """Part of both: autocast's copies of weights."""

    @property
    def share(self) -> float:
        """Of the kept bytes, the share that goes."""
        return max(0.0, 1 - self.pamm / self.exact) if self.exact else 0.0


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
    settings: tuple[Setting, ...]
    """The first one is the one asked for."""
    skipped: tuple[tuple[str, str], ...]

    @property
    def verdict(self) -> str:
        """Whether to use PAMM here, in plain words."""
        now, best = self.settings[0], max(self.settings, key=lambda each: each.share)
        saved = now.exact - now.pamm
        frees = "PAMM frees nothing"
        if saved > 0:
            frees = f"PAMM frees {format_bytes(saved)} ({now.share:.1%})"
        lines = [
            f"{_worth(now.share)} With {now.name}, {frees} of {format_bytes(now.exact)} kept for "
            "backward."
        ]
        if best.share > 2 * now.share and best.share >= WORTH[0]:
            lines.append(f"The most would go with {best.name}: {best.share:.1%}.")
        keepers = sorted({name for group in self.groups for name in group.others})
        if keepers and not saved > 0:
            lines.append(f"X stays because {merge_names(keepers)} keep it too.")
        lines.append(
            "The price is an approximate weight gradient of these layers. Where a norm makes X, "
            "computing it again in backward frees the same memory with an exact one."
        )
        return " ".join(lines)

    def __rich__(self) -> RenderableType:
        return Group(self._groups(), "", self._settings(), "", f"[bold]{self.verdict}[/bold]")

    def _groups(self) -> RenderableType:
        ratio = format_ratio(self.config.ratio)
        table = Table(
            title=f"{self.model}: {self.parameters / 1e6:,.1f}M parameters, {self.dtype}, "
            f"batch {self.batch}, {self.tokens:,} tokens, {self.config.method} with ratio {ratio}",
            title_justify="left",
            caption="X: the input that only these layers keep, its copies included. Held: kept in "
            "its place. Each for one group.",
            caption_justify="left",
        )
        table.add_column("group", overflow="fold")
        for name in ("groups", "X", "held", "X of its block", "X of the step", "also kept by"):
            table.add_column(name, justify="left" if name == "also kept by" else "right")
        alike: dict[object, list[InspectedGroup]] = {}
        for group in self.groups:
            key = dataclasses.replace(group, name=_pattern(group.name), others=())
            alike.setdefault((key, len(group.others)), []).append(group)
        step = self.settings[0].exact
        for same in alike.values():
            group, count = same[0], len(same)
            others = ", ".join(name.rpartition(".")[2] or name for name in group.others)
            table.add_row(
                merge_names([each.name for each in same]).replace("[", "\\["),
                str(count),
                format_bytes(group.input_bytes),
                format_bytes(group.held_bytes),
                _percent(group.input_bytes, group.block_bytes),
                _percent(group.input_bytes * count, step),
                others or ("" if group.rows else "(not run)"),
            )
        skipped = dict.fromkeys(f"skipped {_pattern(n)}: {why}" for n, why in self.skipped)
        return Group(table, *map(Text, skipped))

    def _settings(self) -> RenderableType:
        table = Table(title="The same step in other settings", title_justify="left")
        table.add_column("setting")
        for name in ("kept for backward", "with PAMM", "freed"):
            table.add_column(name, justify="right")
        for each in self.settings:
            copies = each.weight_copies
            note = f"\n(of it {format_bytes(copies)} are copies of weights)" if copies else ""
            table.add_row(
                each.name + note,
                format_bytes(each.exact),
                format_bytes(each.pamm),
                f"{each.share:.1%}",
            )
        return table


WORTH = (0.03, 0.10)
"""Shares of what is kept for backward, below which PAMM is not worth it, and above which it is."""


def _worth(share: float) -> str:
    if share < WORTH[0]:
        return "Not worth it for memory."
    if share < WORTH[1]:
        return "A small saving."
    return "Worth trying."


NAMES = {
    "bf16": "bf16 weights",
    "bf16-amp": "fp32 weights, bf16 autocast",
    "fp16-amp": "fp32 weights, fp16 autocast",
    "fp32": "fp32",
}


def inspect(
    name: str,
    *,
    batch: int = 1,
    seq: int = 2048,
    dtype: str = "bf16",
    config: PammConfig | None = None,
) -> Inspection:
    """Look at a model of Transformers by its configuration; needs neither weights nor a GPU.

    Args:
        name: on the hub, or of a folder or a configuration file.
        batch: sequences in one forward pass of one device.
        seq: tokens in each; images have their own size.
        dtype: ``"bf16"``, ``"fp32"``, or ``"bf16-amp"`` and ``"fp16-amp"`` for fp32 weights under
            autocast.
        config: how inputs would be kept.

    Raises:
        PammError: if the configuration cannot be read, the model has no groups or cannot run.
    """
    config, how = config or PammConfig(), precision(dtype)
    check_sizes(batch=batch, seq=seq)
    source = Source.load(name)
    model = source.build(how.weights)
    report, layers = find(model, config)
    exact = step(model, how, batch, seq)
    groups = [_group(exact, found, set(layers[found.name]), how) for found in report.converted]

    def setting(name: str, model: nn.Module, how: Precision, layers: Layers) -> Setting:
        exact = step(model, how, batch, seq)
        pamm = step(model, how, batch, seq, compressed(report, layers, how))
        return Setting(name, exact.saved, pamm.saved, exact.weight_copies)

    settings = [
        setting(NAMES[each], source.build(PRECISIONS[each].weights), PRECISIONS[each], layers)
        for each in dict.fromkeys((dtype, "bf16", "bf16-amp"))
    ]
    again = source.build(how.weights)
    if checkpoint(again, how):
        settings.append(setting(f"{NAMES[dtype]}, activation checkpointing", again, how, layers))
    if importlib.util.find_spec("peft"):
        bf16 = PRECISIONS["bf16"]
        for fp32, adapters in ((True, "fp32 adapters (PEFT's default)"), (False, "bf16 adapters")):
            lora = source.build(bf16.weights)
            reads = add_lora(lora, [each for names in layers.values() for each in names], fp32)
            moved = {group: [reads[each] for each in names] for group, names in layers.items()}
            settings.append(setting(f"LoRA on these layers, {adapters}", lora, bf16, moved))
    return Inspection(
        type(model).__name__,
        sum(parameter.numel() for parameter in model.parameters()),
        batch,
        max(group.rows for group in groups),
        NAMES[dtype],
        config,
        tuple(groups),
        tuple(settings),
        tuple((group.name, group.reason) for group in report.skipped),
    )


def check_sizes(**sizes: int) -> None:
    """Raise unless all are 1 or more."""
    for name, size in sizes.items():
        if size < 1:
            raise PammError(f"{name} is {size}; give a number, 1 or above.")


def find(model: nn.Module, config: PammConfig) -> tuple[Report, Layers]:
    """The groups that would be converted, and their layers; the model is as before."""
    report = convert(model, config)
    layers = group_layers(model)
    revert(model)
    return report, layers


def compressed(
    report: Report, layers: Layers, how: Precision, config: PammConfig | None = None
) -> list[Compressed]:
    """The groups, for a dry run of the unconverted model; with ``config`` in place of their own."""
    found = [_as_computed(group, how) for group in report.converted]
    if config is not None:
        found = [dataclasses.replace(group, config=config) for group in found]
    return [Compressed(frozenset(layers[group.name]), group.held_bytes) for group in found]


def _as_computed(group: ConvertedGroup, how: Precision) -> ConvertedGroup:
    """Under autocast X is compressed after its cast."""
    return dataclasses.replace(group, dtype=how.compute)


def _group(run: DryRun, found: ConvertedGroup, layers: set[str], how: Precision) -> InspectedGroup:
    rows = max(run.rows.get(layer, 0) for layer in layers)
    block = re.match(r"(.*?\.\d+)\.", found.name)
    return InspectedGroup(
        found.name,
        found.in_features,
        rows,
        run.freed(layers),
        _as_computed(found, how).held_bytes(rows) if rows else 0,
        run.below(block.group(1)) if block else run.saved,
        tuple(sorted(run.others(layers))),
    )


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else ""


def _pattern(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
