"""What an arm measured, and the table that compares the arms."""

import dataclasses
import math
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table

from pamm.recipes.files import METRICS, RESULT, read_json, read_json_lines
from pamm.recipes.pretraining.settings import PretrainConfig
from pamm.report import format_bytes


@dataclasses.dataclass(frozen=True)
class ArmResult:
    """One arm, when it is finished. Bytes are those of converted layers' inputs in one pass.

    Args:
        name: of the arm.
        folder: in the run folder.
        method: of the configuration; ``exact`` is the model as it is.
        validation_loss: at the end; ``None`` if it is not finite.
        perplexity: exp of it.
        tokens_per_second: median over steps, without the first ones.
        held_bytes: measured with saved-tensor hooks.
        predicted_bytes: by the formula.
        paper_bytes: by the paper's counting, for its own method only.
        peak_bytes: of the process, or of tensors on a CUDA device.
        steps: done.
        tokens: seen.
        parameters: of the model.
        groups: converted groups of the model (q/k/v, or gate/up).
        lr: peak learning rate.
        lr_factor: on it, for q, k and v.
        precision: of the arithmetic.
        processes: that trained it together, each on a device of its own.
        device: name.
        device_type: ``cuda`` or ``cpu``.
        versions: of pamm and what it ran on; ``commit`` of its source, ``None`` if not known.
        sharing: trainings that took turns on the device: its speed counts only where it is 1.
            ``None`` if not known.
    """

    name: str
    folder: str
    method: str
    validation_loss: float | None
    perplexity: float | None
    tokens_per_second: float
    held_bytes: int
    predicted_bytes: int
    paper_bytes: int | None
    peak_bytes: int
    steps: int
    tokens: int
    parameters: int
    groups: int
    lr: float
    lr_factor: float
    precision: str
    processes: int
    device: str
    device_type: str
    versions: dict[str, str | None]
    sharing: int | None = None


def perplexity(loss: float) -> float:
    """exp(loss); infinite where that is too large for a float."""
    return math.exp(loss) if loss < 700 else math.inf


def read_results(config: PretrainConfig, folder: Path) -> list[ArmResult]:
    """Results of the finished arms, in the order of the configuration."""
    paths = [folder / arm.folder / RESULT for arm in config.arms]
    return [ArmResult(**read_json(path)) for path in paths if path.exists()]


def read_metrics(config: PretrainConfig, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Lines of every arm's metrics, by its name."""
    return {arm.name: read_json_lines(folder / arm.folder / METRICS) for arm in config.arms}


COLUMNS = (
    "arm",
    "validation perplexity",
    "against exact",
    "tokens/s",
    "held, measured",
    "held, predicted",
    "paper's counting",
    "saved",
    "process peak",
)
_ARMS_A_TABLE = 4


def rows(results: list[ArmResult]) -> list[tuple[str, ...]]:
    """The cells of the comparison under ``COLUMNS``, as text.

    "Against exact" is the relative difference of perplexity: +5 % is worse by a twentieth.
    "Saved" is against the bytes that the exact arm holds.
    """
    exact = next((result for result in results if result.method == "exact"), None)
    return [
        (
            result.name,
            "not finite" if result.perplexity is None else f"{result.perplexity:,.2f}",
            _difference(result, exact),
            f"{result.tokens_per_second:,.0f}",
            format_bytes(result.held_bytes),
            format_bytes(result.predicted_bytes),
            "" if result.paper_bytes is None else format_bytes(result.paper_bytes),
            _saved(result, exact),
            format_bytes(result.peak_bytes),
        )
        for result in results
    ]


def tables(results: list[ArmResult]) -> Group:
    """The comparison for a terminal: a column for each arm, and never more than 80 characters."""
    made = []
    for start in range(0, len(results), _ARMS_A_TABLE):
        part = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        part.add_column(no_wrap=True)
        names, *lines = zip(*rows(results)[start : start + _ARMS_A_TABLE], strict=True)
        for name in names:
            part.add_column(name, justify="right", overflow="fold")
        for title, cells in zip(COLUMNS[1:], lines, strict=True):
            part.add_row(title, *cells)
        made.append(part)
    return Group(*made)


def _difference(result: ArmResult, exact: ArmResult | None) -> str:
    if exact is None or result is exact or None in (result.perplexity, exact.perplexity):
        return ""
    assert result.perplexity is not None
    assert exact.perplexity is not None
    return f"{result.perplexity / exact.perplexity - 1:+.1%}"


def _saved(result: ArmResult, exact: ArmResult | None) -> str:
    if exact is None or result is exact:
        return ""
    return f"{1 - result.held_bytes / exact.held_bytes:.1%}"
