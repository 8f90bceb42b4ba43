"""Fine-tunings in the report: what ``pamm finetune`` left, beside the paper's tables."""

import base64
from pathlib import Path

import pytest
from rich.table import Table as RichTable

from pamm.config import PammConfig
from pamm.errors import PammError
from pamm.recipes.finetuning.glue.settings import GlueConfig
from pamm.recipes.finetuning.glue.tasks import TASKS
from pamm.recipes.finetuning.results import show_results
from pamm.recipes.finetuning.vlm.settings import VlmArm, VlmConfig
from pamm.recipes.report import finetunings, tables
from pamm.recipes.report.collect import collect
from pamm.recipes.report.overview import write_overview
from pamm.recipes.settings import Arm
from tests.recipes.helpers import quiet
from tests.recipes.report.test_overview import cells

GLUE = {
    "cola": ("matthews", {"exact": 0.5, "pamm-1/128": 0.4}),
    "mrpc": ("f1", {"exact": 0.9, "pamm-1/128": 0.92}),
}


def fine_tuned_on_glue(folder: Path, name: str = "glue") -> None:
    """What ``pamm finetune glue`` leaves in ``folder / name``."""
    made = GlueConfig(
        name=name, model="models/an-encoder", data="hub", tasks=tuple(GLUE),
        arms=(Arm("exact", PammConfig("exact")), Arm("pamm-1/128", PammConfig("pamm", 1 / 128))),
    )  # fmt: skip
    rows = [
        {
            "task": task, "arm": arm, "metric": metric, "mean": mean, "spread": 0.01, "seeds": 3,
            "lr": 1e-5, "lr_factor": 1.0, "held_bytes": 1024, "device": "GPU",
        }
        for task, (metric, means) in GLUE.items() for arm, mean in means.items()
    ]  # fmt: skip
    pictures = {"scores.png": b"scores of " + name.encode()}
    (folder / name).mkdir(parents=True)
    (folder / name / "config.yaml").write_text(made.to_yaml())
    show_results(folder / name, rows, RichTable(), "", pictures, quiet())


def fine_tuned_on_images(folder: Path) -> None:
    """What ``pamm finetune vlm`` leaves in ``folder / "vlm"``."""
    made = VlmConfig(
        name="vlm", model="small-pixtral", data="drawn",
        arms=(VlmArm("exact", PammConfig("exact")), VlmArm("pamm", PammConfig("pamm", 1 / 128))),
    )  # fmt: skip
    common = {
        "spread": None, "weighted_f1": {"mean": 0.5, "spread": None}, "seeds": 1, "lr": 1e-3,
        "lr_at_edge": False, "before": None, "exact_bytes": 2_000_000, "device": "cpu",
    }  # fmt: skip
    towers = {name: {"generators": count} for name, count in (("language", 3), ("vision", 7))}
    none = {name: {"generators": None} for name in towers}
    rows = [
        {**common, "arm": "exact", "mean": 0.25, "held_bytes": 2_000_000, "towers": none},
        {**common, "arm": "pamm", "mean": 0.75, "held_bytes": 500_000, "towers": towers},
    ]
    pictures = {name: name.encode() for name in ("f1.png", "confusion-pamm.png")}
    (folder / "vlm").mkdir(parents=True)
    (folder / "vlm/config.yaml").write_text(made.to_yaml())
    show_results(folder / "vlm", rows, RichTable(), "", pictures, quiet())


def test_the_papers_lines_on_glue_stand_below_ours(tmp_path: Path) -> None:
    fine_tuned_on_glue(tmp_path)
    study = collect([tmp_path]).finetunings["glue"]
    made = cells(finetunings.table(study))
    assert list(made) == [
        *("exact", "pamm-1/128"),
        *("paper: full fine-tuning", "paper: PAMM 1/128", "paper: PAMM 1/256"),
    ]
    assert made["pamm-1/128"] == {
        "arm": "pamm-1/128", "held, most": "1.00 KiB", "cola (matthews)": "40.00 ± 1.00",
        "mrpc (f1)": "92.00 ± 1.00", "mean": "66.00",
    }  # fmt: skip
    assert made["paper: full fine-tuning"] == {
        "arm": "paper: full fine-tuning", "held, most": "288.00 MiB", "cola (matthews)": "62.24",
        "mrpc (f1)": "91.30", "mean": "76.77",
    }  # fmt: skip


def test_the_papers_means_on_glue_are_of_its_scores() -> None:
    rows = [
        {"task": t, "arm": "ours", "metric": task.metric, "mean": 0, "spread": 0, "held_bytes": 0}
        for t, task in TASKS.items()
    ]
    made = cells(finetunings.glue_table(rows))
    means = {arm: line["mean"] for arm, line in made.items() if arm != "ours"}
    assert means == {
        "paper: full fine-tuning": "86.28",
        "paper: PAMM 1/128": "86.11",
        "paper: PAMM 1/256": "86.18",
    }


def test_the_papers_memory_on_glue_is_of_the_generators_alone() -> None:
    """b = 16 x 512 tokens in 12 layers of width 768, fp32: exact 4 b n a layer, PAMM 3 k n 4."""
    exact, *compressed = (row["memory_mb"] for row in tables.paper()["glue"]["rows"])
    assert exact * 2**20 == 12 * 4 * 8192 * 768
    for memory, k in zip(compressed, (64, 32), strict=True):
        assert memory == pytest.approx(12 * 3 * k * 768 * 4 / 2**20, abs=0.005)


def test_the_papers_lines_on_images_stand_below_ours(tmp_path: Path) -> None:
    fine_tuned_on_images(tmp_path)
    made = cells(finetunings.table(collect([tmp_path]).finetunings["vlm"]))
    assert made["pamm"]["macro F1"] == "75.00"
    assert (made["pamm"]["k"], made["pamm"]["saved %"]) == ("3 + 7", "75.00")
    theirs = made["paper: LoRA + PAMM 1/128"]
    assert {key: value for key, value in theirs.items() if value} == {
        "arm": "paper: LoRA + PAMM 1/128", "macro F1": "97.27 ± 0.27",
        "weighted F1": "97.37 ± 0.22", "seeds": "3", "k": "4 + 2", "saved %": "97.65",
    }  # fmt: skip
    columns = made["exact"].keys()
    assert all(row.keys() <= columns for row in tables.paper()["vlm"]["rows"])


def test_fine_tunings_are_on_the_page_with_their_pictures(tmp_path: Path) -> None:
    fine_tuned_on_glue(tmp_path / "one")
    fine_tuned_on_glue(tmp_path / "two")
    fine_tuned_on_images(tmp_path / "one")
    out = tmp_path / "docs"
    written = write_overview([tmp_path / "one", tmp_path / "two"], out)
    page, text = ((out / f"results.{kind}").read_text() for kind in ("html", "md"))
    for title in (
        "glue: an-encoder on GLUE", "glue (2): an-encoder on GLUE", "vlm: small-pixtral on drawn"
    ):  # fmt: skip
        assert f"<h2>{title}</h2>" in page
        assert f"## {title}\n" in text
    pictures = {path.name: path.read_bytes() for path in written[2:]}
    assert pictures == {
        "glue-scores.png": b"scores of glue", "glue-2-scores.png": b"scores of glue",
        "vlm-f1.png": b"f1.png", "vlm-confusion-pamm.png": b"confusion-pamm.png",
    }  # fmt: skip
    for name, content in pictures.items():
        assert f"({name})" in text
        assert base64.b64encode(content).decode() in page
    assert "| paper: full fine-tuning | 288.00 MiB | 62.24 | 91.30 | 76.77 |" in text
    assert "<td>paper: LoRA + PAMM 1/512</td><td>96.91 ± 0.15</td>" in page
    assert "30 epoch(s), on GPU. ± is the standard deviation" in text
    assert "1 epoch(s), on cpu. F1 in %" in text
    assert "models/an-encoder" not in page + text  # a path of one machine


def test_rows_without_a_configuration_are_somebody_elses(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text('{"a": 1}\n')
    (tmp_path / "study.yaml").write_text("sampler: of another program\n")
    with pytest.raises(PammError, match="no results of pamm"):
        collect([tmp_path])
