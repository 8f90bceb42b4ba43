"""``pamm plan``: the memory of a training step, converted and not, and what fits."""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable
from fractions import Fraction

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pamm.analysis.inspect import NAMES, check_sizes, compressed, find
from pamm.analysis.inspection import described
from pamm.analysis.meta_model import Source, checkpoint, precision, step
from pamm.config import PammConfig
from pamm.errors import PammError
from pamm.report import SkippedGroup, format_bytes, format_ratio, merge_skipped

RATIOS = tuple(1 / 2**power for power in range(4, 11))
"""What PAMM's ratio is chosen from, 1/16 to 1/1024."""
MOST_GENERATORS = 256
"""More of them make the segment sum slower than it need be (see DESIGN.md)."""
USABLE = 0.95
"""Of the device's memory: CUDA itself and fragments of the allocator take the rest."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one training step with AdamW, fused, whose states have the weights' dtype."""

    weights: int
    optimizer: int
    saved: int
    """Kept from forward until backward."""
    peak: int
    """The most at a time; gradients and what lives shortly included."""
    tokens: int
    """Rows of the inputs of q, k and v, at most."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """The outcome of ``plan``; print it with rich."""

    model: str
    batch: int
    dtype: str
    config: PammConfig
    exact: Memory
    converted: Memory
    memory: int | None = None
    """Of the device; ``None`` if not given. What follows is for this memory."""
    batch_exact: int = 0
    """The largest that fits; 0 if not even 1 does."""
    batch_converted: int = 0
    ratio: float | None = None
    """To choose, with PAMM: the largest with which as many fit as with the smallest, and no
    slower. ``None`` with other methods, and where none fits."""
    skipped: tuple[SkippedGroup, ...] = ()
    """Groups that are not converted, and why."""

    @property
    def advice(self) -> str:
        """In plain words."""
        less, kept = self.exact.peak - self.converted.peak, self.exact.saved - self.converted.saved
        method = self.config.method
        if less > 0:
            share = f"{less / self.exact.peak:.1%}"
            lines = [f"{method} lowers the peak by {format_bytes(less)} ({share})."]
        elif kept > 0:
            lines = [
                f"{method} does not lower the peak of this step: it comes at the end of backward, "
                "when the gradients of all weights are there and nothing is kept any more."
            ]
        else:
            lines = [f"{method} frees nothing in this step."]
            lines += [f"{name}: {reason}." for name, reason in merge_skipped(self.skipped)]
            return " ".join(lines)
        if self.memory is not None and not max(self.batch_exact, self.batch_converted):
            lines.append("Not even one sequence fits.")
        elif self.memory is not None and self.batch_converted == self.batch_exact:
            lines.append("No larger batch fits with it.")
        if self.ratio is not None:
            tokens = self.converted.tokens // self.batch * self.batch_converted
            chosen = dataclasses.replace(self.config, ratio=self.ratio)
            lines.append(
                f"Choose ratio {format_ratio(self.ratio)}: {chosen.generators(tokens)} generators "
                f"for {tokens:,} tokens. More would take time or room, fewer would only make the "
                "gradient worse."
            )
        elif method == "sampled" and self.batch_converted:
            lines.append("It takes the same memory with any ratio.")
        return " ".join(lines)

    def __rich__(self) -> RenderableType:
        table = Table(
            title=f"{self.model}: {self.dtype}, batch {self.batch}, {self.exact.tokens:,} "
            f"tokens, AdamW (fused)",
            title_justify="left",
            caption="One device; without the libraries' own workspaces (cuBLAS takes 32 MiB on an "
            "H100). Sharding is not counted.",
            caption_justify="left",
        )
        table.add_column("")
        for name in ("exact", described(self.config)):
            table.add_column(name, justify="right")
        for name, field in (
            ("weights", "weights"),
            ("optimizer's states", "optimizer"),
            ("kept for backward", "saved"),
            ("peak of the step", "peak"),
        ):
            table.add_row(
                name, *(format_bytes(getattr(each, field)) for each in (self.exact, self.converted))
            )
        if self.memory is not None:
            largest = (
                str(each or "none fits") for each in (self.batch_exact, self.batch_converted)
            )
            table.add_row(f"largest batch in {USABLE:.0%} of {format_bytes(self.memory)}", *largest)
        return Group(table, Text(self.advice, "bold"))


def plan(
    name: str,
    *,
    batch: int = 1,
    seq: int = 2048,
    dtype: str = "bf16",
    config: PammConfig | None = None,
    memory: str | None = None,
    checkpointing: bool = False,
    targets: str | Iterable[str] = "attention",
    widen: bool = False,
) -> Plan:
    """Predict a training step's memory from the model's configuration; see ``inspect``.

    Args:
        name: on the hub, or of a folder or a configuration file.
        batch: sequences in one forward pass of one device.
        seq: tokens in each.
        dtype: as for ``inspect``.
        memory: of the device, such as ``"24GB"``. GB are counted as 2**30 bytes, as on the cards'
            boxes.
        checkpointing: with full activation checkpointing.
        config, targets, widen: as for ``pamm.convert``, with the same defaults.

    Raises:
        PammError: as ``inspect``; or if ``memory`` cannot be read.
    """
    config, how = config or PammConfig(), precision(dtype)
    check_sizes(batch=batch, seq=seq)
    room = None if memory is None else parse_memory(memory)
    source = Source.load(name)
    model = source.build(how.weights)
    report = find(model, config, targets, widen)
    if checkpointing and not checkpoint(model, how):
        raise PammError(f"{type(model).__name__} does not know activation checkpointing.")
    own = [*model.parameters(), *model.buffers()]
    weights = sum(tensor.numel() * tensor.element_size() for tensor in own)
    trained = [p.numel() * p.element_size() for p in model.parameters() if p.requires_grad]
    optimizer = 2 * sum(trained)

    members = [name for group in (*report.converted, *report.skipped) for name in group.layers]

    @functools.cache
    def predict(batch: int, config: PammConfig | None) -> Memory:
        groups = [] if config is None else compressed(report, how, config)
        run = step(model, how, batch, seq, groups)
        tokens = max(run.rows.get(layer, 0) for layer in members)
        return Memory(weights, optimizer, run.saved, weights + optimizer + run.peak, tokens)

    found = Plan(
        type(model).__name__,
        batch,
        NAMES[dtype],
        config,
        predict(batch, None),
        predict(batch, config),
        skipped=report.skipped,
    )
    if room is None:
        return found

    def peak(config: PammConfig | None, batch: int) -> int:
        return predict(batch, config).peak

    found = dataclasses.replace(
        found,
        memory=room,
        batch_exact=largest(functools.partial(peak, None), USABLE * room),
        batch_converted=largest(functools.partial(peak, config), USABLE * room),
    )
    if config.method != "pamm":  # whose ratio is what a person would choose by memory
        return found
    ratios = [dataclasses.replace(config, ratio=ratio) for ratio in RATIOS]
    best = largest(functools.partial(peak, ratios[-1]), USABLE * room)
    few = [
        each
        for each in ratios
        if best and each.generators(predict(best, ratios[-1]).tokens) <= MOST_GENERATORS
    ]
    chosen = next((each for each in few if peak(each, best) <= USABLE * room), ratios[-1])
    return dataclasses.replace(found, ratio=chosen.ratio if found.batch_converted else None)


def largest(size: Callable[[int], int], room: float) -> int:
    """The largest number whose size is within ``room``, 0 if that of 1 is not.

    Sizes grow, mostly along a line: where it leads is looked at first.

    Examples:
        >>> largest(lambda number: 100 + 10 * number, 475)
        37
    """
    if size(1) > room:
        return 0
    low, high = 1, 2
    while size(high) <= room:
        slope = (size(high) - size(low)) / (high - low)
        ahead = int((room - size(high)) / slope) + 1 if slope else high
        low, high = high, high + min(ahead, 15 * high)
    halve = False  # every second time, lest a bend keep the other guess at one end
    while high - low > 1:
        part = 1 / 2 if halve else (room - size(low)) / (size(high) - size(low))
        guess = min(max(low + int(part * (high - low)), low + 1), high - 1)
        low, high = (guess, high) if size(guess) <= room else (low, guess)
        halve = not halve
    return low


def parse_memory(text: str) -> int:
    """``"24GB"`` in bytes.

    Examples:
        >>> parse_memory("1.5 GiB")
        1610612736
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT])(?:i?B)?\s*", text, re.IGNORECASE)
    if not found or float(found[1]) <= 0:
        raise PammError(f"memory is {text!r}; give a number with a unit, such as 24GB.")
    return int(Fraction(found[1]) * 1024 ** ("KMGT".index(found[2].upper()) + 1))
