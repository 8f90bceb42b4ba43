"""``pamm report``: all results on one page, beside the paper's; HTML, and Markdown for the docs."""

import base64
import dataclasses
import re
from pathlib import Path

from pamm.extras import require
from pamm.recipes.files import write_text
from pamm.recipes.report import finetunings
from pamm.recipes.report.collect import Found, Outcome, collect
from pamm.recipes.report.tables import (
    bound_table,
    by_source,
    is_shape_study,
    missing_table,
    results_table,
    scaling_table,
    shape_table,
    throughput_table,
    tuning_table,
)
from pamm.recipes.table import Table


@dataclasses.dataclass
class Section:
    """A part of the page, in order: text, tables, pictures."""

    title: str
    text: list[str] = dataclasses.field(default_factory=list)
    tables: list[Table] = dataclasses.field(default_factory=list)
    pictures: dict[str, bytes] = dataclasses.field(default_factory=dict)
    """PNG files, by a name that says what is on them."""


def write_overview(folders: list[Path], output: Path) -> list[Path]:
    """Write ``results.html``, which needs no other file, ``results.md`` and its pictures.

    Args:
        folders: of runs, studies, fine-tunings and analyses, to any depth.
        output: folder of what is written.

    Raises:
        PammError: if there are no results.
    """
    require("train", "jinja2")
    require("plots", "matplotlib")
    from pamm.recipes.pages import template

    sections = _sections(collect(folders))
    output.mkdir(parents=True, exist_ok=True)
    encoded = {
        name: base64.b64encode(picture).decode()
        for section in sections
        for name, picture in section.pictures.items()
    }
    page = template("report/overview.html").render(sections=sections, encoded=encoded)
    paths = [output / "results.html", output / "results.md"]
    write_text(paths[0], page)
    write_text(paths[1], _markdown(sections))
    for section in sections:
        for name, picture in section.pictures.items():
            paths.append(output / f"{_slug(name)}.png")
            paths[-1].write_bytes(picture)
    return paths


def _sections(found: Found) -> list[Section]:
    sections = [
        Section(
            "How to read this",
            [
                "Tables have the paper's numbers beside ours. The paper trained on C4, for more "
                "steps; where our text, steps or batches differ, perplexities cannot be compared "
                "with the paper's, only differences from exact training can. ± is the standard "
                "deviation over seeds. 'edge' marks a learning rate at the end of the grid it was "
                "chosen from: the best one may lie beyond.",
            ],
        )
    ]
    for source, outcomes in by_source(found.outcomes).items():
        sections.append(_source(source, outcomes, found))
    if found.outcomes:
        tables = (throughput_table, scaling_table, missing_table)
        made = [table(found.outcomes) for table in tables]
        notes = [
            "Tokens per second of whole training steps in the recipe, validation left out; left "
            "empty where several trainings shared a GPU. pamm bench measures speed by itself."
        ]
        sections.append(Section("Throughput, and what was not run", notes, made))
    for name, study in found.finetunings.items():
        sections.append(
            Section(
                finetunings.title(name, study),
                finetunings.text(study),
                [finetunings.table(study)],
                finetunings.pictures(name, study),
            )
        )
    for name, (folder, analysis) in found.analyses.items():
        pictures = {
            f"{name} {path.stem}": path.read_bytes() for path in sorted(folder.glob("*.png"))
        }
        text = [
            f"On {analysis['checkpoint']}, {analysis['tokens']:,} tokens, {analysis['draws']} "
            f"draws for each error, {analysis['device']}. The bound of Lemma 2 is for delta = "
            f"{analysis['delta']}."
        ]
        title = f"Analysis: {name}"
        sections.append(Section(title, text, [bound_table(analysis)], pictures))
    return sections


def _source(source: str, outcomes: list[Outcome], found: Found) -> Section:
    from pamm.recipes.report.pictures import pictures

    first = outcomes[0]
    config, shapes = first.config, is_shape_study(outcomes)
    step = "" if shapes else f" of {config.tokens_per_step:,} tokens"
    section = Section(
        f"{source}: LLaMA {first.size}",
        [
            f"{config.steps:,} steps{step}, "
            f"{config.tokens_per_pass:,} tokens in one forward pass, on {first.device}. "
            + (
                "Each row at the best learning rate of the same grid."
                if first.tuned
                else "The learning rate was not tuned here."
            )
        ],
    )
    progress = found.studies.get(source)
    if progress and progress.left:
        section.text.append(
            f"Not finished: {progress.left} training(s) of this study can begin, and others may "
            "follow. A row is of the seeds it says."
        )
    section.tables.append(shape_table(outcomes) if shapes else results_table(outcomes))
    if progress and not shapes:
        section.tables.append(tuning_table(outcomes, progress))
    section.pictures = pictures(source, outcomes, progress.tuning if progress else {})
    return section


def _markdown(sections: list[Section]) -> str:
    lines = ["# Results", "", "Made by `pamm report`. Do not edit."]
    for section in sections:
        lines += ["", f"## {section.title}"]
        for text in section.text:
            lines += ["", text]
        for table in filter(lambda table: table.rows, section.tables):
            lines += ["", f"**{table.title}**", "", table.markdown().rstrip()]
        for name in section.pictures:
            lines += ["", f"![{name}]({_slug(name)}.png)"]
    return "\n".join(lines) + "\n"


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
