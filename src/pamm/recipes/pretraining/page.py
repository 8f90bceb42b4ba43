"""The report of a run: pictures, and one HTML file that needs no other."""

import base64
import os
from pathlib import Path
from typing import Any

from pamm.analysis import plots
from pamm.recipes.files import write_text
from pamm.recipes.pages import template
from pamm.recipes.pretraining.results import COLUMNS, ArmResult, read_metrics, rows
from pamm.recipes.pretraining.settings import PretrainConfig
from pamm.recipes.pretraining.tokens import Blocks, Tokens

Points = list[tuple[int, float]]


def write_report(
    config: PretrainConfig, folder: Path, results: list[ArmResult], lr_note: str = ""
) -> list[Path]:
    """Write ``loss.png``, ``memory.png`` and ``report.html``; returns their paths.

    Args:
        config: of the run.
        folder: of the run.
        results: of its arms, at least one.
        lr_note: where the learning rate is from, for the report.
    """
    metrics = read_metrics(config, folder)
    training = {arm: _points(lines, "loss") for arm, lines in metrics.items()}
    validation = {arm: _points(lines, "eval_loss") for arm, lines in metrics.items()}
    pictures = {
        "loss": plots.png(plots.loss_curves(training, validation, config.tokens_per_step)),
        "memory": plots.png(plots.memory_bars({each.name: each.held_bytes for each in results})),
    }
    written = []
    for name, picture in pictures.items():
        written.append(folder / f"{name}.png")
        partial = folder / f"{name}.png.partial"
        partial.write_bytes(picture)
        os.replace(partial, written[-1])

    first = results[0]
    validated = Blocks(
        Tokens.open(folder).validation, config.sequence_length, config.eval_sequences
    )
    page = template("pretraining/page.html").render(
        config=config,
        first=first,
        columns=COLUMNS,
        rows=rows(results),
        same_rates=len({(each.lr, each.lr_factor) for each in results}) == 1,
        lr_note=lr_note,
        validated=len(validated),
        cuda=first.device_type == "cuda",
        yaml=config.to_yaml(),
        **{name: base64.b64encode(picture).decode() for name, picture in pictures.items()},
    )
    written.append(folder / "report.html")
    write_text(written[-1], page)
    return written


def _points(lines: list[dict[str, Any]], key: str) -> Points:
    return [(line["step"], line[key]) for line in lines if line.get(key) is not None]
