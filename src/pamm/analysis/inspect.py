"""``pamm inspect``: what a model keeps for backward, and how much of it a conversion frees."""

import dataclasses
import importlib.util
import math
import re
from collections.abc import Iterable

from torch import nn

from pamm.analysis.dry_run import Compressed, DryRun
from pamm.analysis.inspection import InspectedGroup, Inspection, Setting
from pamm.analysis.meta_model import PRECISIONS, Precision, Source, checkpoint, precision, step
from pamm.config import PammConfig, whole_number
from pamm.errors import PammError
from pamm.integrations.lora import add_lora
from pamm.nn import is_conv1d
from pamm.report import ConvertedGroup, Report, SkippedGroup
from pamm.surgery import refuse_nothing, survey

NAMES = {
    "bf16": "bf16 weights",
    "bf16-amp": "fp32 weights, bf16 autocast",
    "fp16-amp": "fp32 weights, fp16 autocast",
    "fp32": "fp32",
}

_MOST_TOKENS = 1 << 27  # whose ids are real numbers in memory: 1 GiB


def inspect(
    name: str,
    *,
    batch: int = 1,
    seq: int = 2048,
    dtype: str = "bf16",
    config: PammConfig | None = None,
    targets: str | Iterable[str] = "attention",
    widen: bool = False,
) -> Inspection:
    """Look at a model of Transformers by its configuration; needs neither weights nor a GPU.

    Args:
        name: on the hub, or of a folder or a configuration file.
        batch: sequences in one forward pass of one device.
        seq: tokens in each; images have their own size.
        dtype: ``"bf16"``, ``"fp32"``, or ``"bf16-amp"`` and ``"fp16-amp"`` for fp32 weights under
            autocast.
        config, targets, widen: as for ``pamm.convert``, with the same defaults. Without ``widen``
            the outcome says what it would bring.

    Raises:
        PammError: if the configuration cannot be read, the model has no such layers or cannot run.
    """
    config, how = config or PammConfig(), precision(dtype)
    check_sizes(batch=batch, seq=seq)
    source = Source.load(name)
    model = source.build(how.weights)
    report = find(model, config, targets, widen)
    wider = find(model, config, targets, widen=True)
    if len(wider.converted) <= len(report.converted):
        wider = None
    exact = step(model, how, batch, seq)

    def setting(name: str, model: nn.Module, how: Precision, *ways: Report) -> Setting:
        exact = step(model, how, batch, seq)
        left = [step(model, how, batch, seq, compressed(each, how)).saved for each in ways]
        return Setting(name, exact.saved, left[0], exact.weight_copies, *left[1:])

    ways = (report,) if wider is None else (report, wider)
    settings = [
        setting(NAMES[each], source.build(PRECISIONS[each].weights), PRECISIONS[each], *ways)
        for each in dict.fromkeys((dtype, "bf16", "bf16-amp"))
    ]
    again = source.build(how.weights)
    if checkpoint(again, how):
        settings.append(setting(f"{NAMES[dtype]}, activation checkpointing", again, how, *ways))
    adapted = _adaptable(model, report)
    if adapted and importlib.util.find_spec("peft"):
        bf16 = PRECISIONS["bf16"]
        for fp32, adapters in ((True, "fp32 adapters (PEFT's default)"), (False, "bf16 adapters")):
            lora = source.build(bf16.weights)
            add_lora(lora, adapted, fp32)
            name, way = f"LoRA on these layers, {adapters}", find(lora, config, targets)
            settings.append(setting(name, lora, bf16, way))
    return Inspection(
        type(model).__name__,
        sum(parameter.numel() for parameter in model.parameters()),
        batch,
        max(exact.rows.get(each, 0) for group in _all(report) for each in group.layers),
        NAMES[dtype],
        config,
        tuple(_groups(exact, report, wider, how)),
        tuple(settings),
        report.skipped,
        _only_kept(model, report, targets, widen),
    )


def check_sizes(**sizes: int) -> None:
    """Raise unless all are 1 or more, and the tokens that they make few enough to have ids."""
    for name, size in sizes.items():
        whole_number(name, size, least=1)
    if (tokens := math.prod(sizes.values())) > _MOST_TOKENS:
        raise PammError(
            f"{' x '.join(sizes)} is {tokens:,} tokens; give no more than {_MOST_TOKENS:,}."
        )


def find(
    model: nn.Module,
    config: PammConfig,
    targets: str | Iterable[str],
    widen: bool = False,
) -> Report:
    """What would be converted, and what would not; the model is as before.

    Raises:
        NothingToConvertError: if the model has no layers with such names.
    """
    report = survey(model, config, targets=targets, widen=widen)
    if not report.skipped:
        refuse_nothing(model, targets, report)
    return report


def compressed(
    report: Report, how: Precision, config: PammConfig | None = None
) -> list[Compressed]:
    """The groups, for a dry run of the unconverted model; with ``config`` for their own."""
    groups = [_as_computed(group, how) for group in report.converted]
    if config is not None:
        groups = [dataclasses.replace(group, config=config) for group in groups]
    return [
        Compressed(
            frozenset(group.layers),
            group.held_bytes,
            group.source if group.config.recomputes else None,
        )
        for group in groups
    ]


def _only_kept(model: nn.Module, report: Report, targets: str | Iterable[str], widen: bool) -> int:
    """How many groups are skipped for no other reason than that X cannot be made again."""
    if not (report.config.recomputes and report.skipped):
        return 0
    kept = survey(model, PammConfig("subspace"), targets=targets, widen=widen)
    return len(kept.converted) - len(report.converted)


def _all(report: Report) -> list[ConvertedGroup | SkippedGroup]:
    return [*report.converted, *report.skipped]


def _adaptable(model: nn.Module, report: Report) -> list[str]:
    """The layers of these groups that PEFT can put LoRA on."""
    names = [name for group in _all(report) for name in group.layers]
    layers = {name: model.get_submodule(name) for name in names}
    return [n for n, layer in layers.items() if isinstance(layer, nn.Linear) or is_conv1d(layer)]


def _groups(
    run: DryRun, report: Report, wider: Report | None, how: Precision
) -> Iterable[InspectedGroup]:
    known = {group.name for group in report.converted}
    more = [] if wider is None else [each for each in wider.converted if each.name not in known]
    for group in report.converted:
        yield _group(run, group, _as_computed(group, how))
    for skipped in report.skipped:
        yield _group(run, skipped, None)
    for group in more:
        yield dataclasses.replace(_group(run, group, _as_computed(group, how)), widened=True)


def _as_computed(group: ConvertedGroup, how: Precision) -> ConvertedGroup:
    """Under autocast X is compressed after its cast."""
    return dataclasses.replace(group, dtype=how.compute)


def _group(
    run: DryRun, group: ConvertedGroup | SkippedGroup, computed: ConvertedGroup | None
) -> InspectedGroup:
    layers = set(group.layers)
    rows = max(run.rows.get(layer, 0) for layer in layers)
    blocks = {found and found[1] for found in map(re.compile(r"(.*?\.\d+)\.").match, layers)}
    (block,) = blocks if len(blocks) == 1 else (None,)  # k and v of a whole decoder have none
    return InspectedGroup(
        group.name,
        rows,
        run.read(layers) if computed is None else run.freed(layers),
        None if computed is None else computed.held_bytes(rows) if rows else 0,
        run.below(block) if block else 0,
        tuple(sorted(run.others(layers))),
    )
