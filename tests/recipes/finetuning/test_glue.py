"""Fine-tuning on GLUE: files, settings, what is tuned and chosen, a run from end to end."""

import dataclasses
import os
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import BertConfig, BertModel, BertTokenizer
from typer.testing import CliRunner

from pamm.cli import app
from pamm.config import PammConfig
from pamm.errors import ArmFailedError, PammError
from pamm.recipes.commit import commit
from pamm.recipes.files import read_json_lines, write_json
from pamm.recipes.finetuning import runs as module
from pamm.recipes.finetuning.glue.finetune import GluePlan, finetune_glue
from pamm.recipes.finetuning.glue.results import markdown
from pamm.recipes.finetuning.glue.settings import GlueConfig
from pamm.recipes.finetuning.glue.tasks import TASKS, Task, read_tsv
from pamm.recipes.finetuning.glue.training import padding_share, train_run
from pamm.recipes.report.overview import write_overview
from pamm.recipes.settings import Arm
from pamm.recipes.stop import Stop
from tests.recipes.helpers import WORDS, StopAfter, quiet


def config(folder: Path, **changes: Any) -> GlueConfig:
    """A tiny encoder and two tasks in ``folder``."""
    torch.manual_seed(0)
    model = folder / "encoder"
    if not model.exists():
        vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
        tokenizer = BertTokenizer(vocab={word: i for i, word in enumerate(vocabulary)})
        tokenizer.model_max_length = 64
        tokenizer.save_pretrained(model)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        made = BertConfig(vocab_size=len(vocabulary), num_attention_heads=2, **sizes)
        BertModel(made).save_pretrained(model)
    for task in ("cola", "stsb"):
        (folder / "data" / task).mkdir(parents=True, exist_ok=True)
        for split, count in (("train", 40), ("validation", 20)):
            lines = [_line(task, i) for i in range(count)]
            head = "sentence\tlabel" if task == "cola" else "sentence1\tsentence2\tscore"
            (folder / "data" / task / f"{split}.tsv").write_text("\n".join([head, *lines]) + "\n")
    made = GlueConfig(
        name="tiny",
        model=str(model),
        data=str(folder / "data"),
        tasks=("cola", "stsb"),
        arms=(
            Arm("exact", PammConfig(method="exact")),
            Arm("pamm-1/16", PammConfig("pamm", 1 / 16)),
        ),
        lrs=(1e-3,),
        lr_factors=(1.0,),
        factor_task="cola",
        epochs=2.0,
        batch_size=8,
        batch_sizes={"cola": 16},
        precision="fp32",
        seeds=(0, 1),
    )
    return dataclasses.replace(made, **changes)


def _line(task: str, number: int) -> str:
    words = " ".join(WORDS[(number * 3 + j) % len(WORDS)] for j in range(3 + number % 9))
    return f"{words}\t{number % 2}" if task == "cola" else f"{words}\ta fox\t{number % 5:.1f}"


def finish(plan: GluePlan, score: dict[tuple[float, float], float]) -> list[str]:
    """Write results as if all that can be trained had been; returns what that was."""
    done = []
    while todo := plan.to_do():
        for run in todo:
            run.folder.mkdir(parents=True)
            write_json(run.folder / "result.json", {"score": score[run.lr, run.lr_factor]})
            done.append(f"{run.task} {run.arm.folder} {run.lr:g} x{run.lr_factor:g} s{run.seed}")
    return done


class TestFiles:
    def test_the_last_column_is_the_label(self, tmp_path: Path) -> None:
        path = tmp_path / "train.tsv"
        path.write_text('sentence1\tsentence2\tscore\nsay "a\tb\t4.4\n')
        rows = read_tsv(path, TASKS["stsb"])
        assert rows.texts == [('say "a', "b")]
        assert rows.labels == [4.4]

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("", "no header line"),
            ("text\tlabel\na\t1\n", "has the columns text, label; it needs sentence"),
            ("sentence\tlabel\na\t2\n", "line 2 of .* a class below 2"),
            ("sentence\tlabel\na\t1\nb\n", "line 3 of"),
            ("sentence\tlabel\na\tb\t1\n", "line 2 of"),
            ("sentence\tlabel\na\tnan\n", "line 2 of"),
            ("sentence\tlabel\n", "no rows"),
        ],
    )
    def test_what_is_wrong_with_a_file(self, tmp_path: Path, text: str, says: str) -> None:
        path = tmp_path / "train.tsv"
        path.write_text(text)
        with pytest.raises(PammError, match=says):
            read_tsv(path, Task(("sentence",), "matthews"))

    def test_a_missing_file_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(PammError, match=r"cannot read .*mrpc.*No such file"):
            finetune_glue(config(tmp_path, tasks=("mrpc",)), tmp_path / "runs", quiet())
        assert not (tmp_path / "runs").exists()


class TestSettings:
    def test_the_papers_run(self) -> None:
        made = GlueConfig.load("paper-glue")
        assert (made.epochs, made.batch_of("rte"), made.batch_of("cola")) == (30, 16, 32)
        assert made.lrs == (1e-5, 2e-5, 3e-5)
        assert made.lr_factors == (1, 2, 4, 8)
        assert set(made.tasks) == set(TASKS)
        assert len(made.seeds) == 3

    def test_the_committed_study(self) -> None:
        studies = Path(__file__).parents[3] / "benchmarks/studies"
        made = GlueConfig.load(studies / "glue-minilm.yaml")
        assert {arm.config.generators(16 * 128) for arm in made.arms} >= {16, 8, 1}

    def test_a_file_reads_back(self, tmp_path: Path) -> None:
        made = config(tmp_path)
        assert GlueConfig.from_dict(yaml.safe_load(made.to_yaml())) == made

    @pytest.mark.parametrize(
        ("key", "value", "says"),
        [
            ("name", "../out", "names a folder"),
            ("tasks", ("wnli",), "no task 'wnli'; choose from cola"),
            ("tasks", (), "one or more"),
            ("epochs", 0, "epochs is 0"),
            ("seeds", (0, 0), "none twice"),
            ("lrs", (-1.0,), "above 0"),
            ("skip_padding", 1, "true or false"),
            ("precision", "fp16", "choose one of"),
            ("weight_decay", True, "weight_decay is True"),
            ("arms", (), "at least one"),
            ("arms", (Arm("a", PammConfig(), targets="mlp"),), "targets of arm 'a' is 'mlp'"),
        ],
    )
    def test_what_is_refused(self, tmp_path: Path, key: str, value: Any, says: str) -> None:
        with pytest.raises(PammError, match=says):
            config(tmp_path, **{key: value})

    def test_an_unknown_key_is_refused(self, tmp_path: Path) -> None:
        values = config(tmp_path).to_dict() | {"epoch": 3}
        with pytest.raises(PammError, match="did you mean 'epochs'"):
            GlueConfig.from_dict(values)


class TestPlan:
    def test_the_factor_is_chosen_once_and_the_rate_on_each_task(self, tmp_path: Path) -> None:
        made = config(tmp_path, lrs=(1e-5, 2e-5), lr_factors=(1, 2))
        plan = GluePlan(made, tmp_path / "runs")
        score = {(1e-5, 1): 0.1, (2e-5, 1): 0.2, (1e-5, 2): 0.4, (2e-5, 2): 0.3}
        done = finish(plan, score)
        assert len(done) == len(set(done)) == 4 + 2 * (2 + 1) + (1 + 2 + 1)
        assert "stsb exact 2e-05 x1 s1" in done
        assert not any("exact" in name and "x2" in name for name in done)
        assert "stsb pamm-1-16 1e-05 x2 s1" in done
        assert not any(name.startswith("stsb pamm") and "x1" in name for name in done)

    def test_an_arm_with_a_factor_of_its_own_is_not_tuned_in_it(self, tmp_path: Path) -> None:
        arm = Arm("pamm", PammConfig(), lr=5e-5, lr_factor=4)
        made = config(tmp_path, arms=(arm,), lrs=(1e-5, 2e-5), lr_factors=(1, 2), tasks=("stsb",))
        done = finish(GluePlan(made, tmp_path / "runs"), {(5e-5, 4): 0.5})
        assert done == ["stsb pamm 5e-05 x4 s0", "stsb pamm 5e-05 x4 s1"]

    def test_the_table_says_what_is_below_the_spread_of_full_fine_tuning(self) -> None:
        row = {"task": "cola", "metric": "matthews", "held_bytes": 1024, "spread": 0.01}
        exact = row | {"arm": "exact", "mean": 0.5}
        below = row | {"arm": "pamm", "mean": 0.4, "within_exact": False}
        text = markdown([exact, below])
        assert "| exact | 1.00 KiB | 50.00 ± 1.00 | 50.00 |" in text
        assert "| 40.00 ± 1.00 * |" in text


@pytest.mark.parametrize(
    ("lengths", "share"), [([4, 4, 4, 4], 0.0), ([1, 3], 1 / 3), ([2, 2, 2], 0.0)]
)
def test_share_of_padding(lengths: list[int], share: float) -> None:
    assert padding_share(lengths, size=2, seed=0) == pytest.approx(share)


@pytest.mark.slow
def test_a_run_through_the_command_line(tmp_path: Path) -> None:
    made = config(tmp_path)
    (tmp_path / "glue.yaml").write_text(made.to_yaml())
    command = ["finetune", "glue", "--config", str(tmp_path / "glue.yaml")]
    out = CliRunner().invoke(app, [*command, "--output", str(tmp_path / "runs")])
    assert out.exit_code == 0, out.output
    folder = tmp_path / "runs/tiny"
    rows = read_json_lines(folder / "results.jsonl")
    assert [(row["task"], row["arm"], row["seeds"]) for row in rows] == [
        (task, arm, 2) for task in ("cola", "stsb") for arm in ("exact", "pamm-1/16")
    ]
    assert all(row["spread"] is not None for row in rows)
    for exact, compressed in (rows[:2], rows[2:]):
        # Two blocks that each keep X in fp32, once for q, k and v.
        assert exact["held_bytes"] == 2 * exact["held_tokens"] * 32 * 4
        assert compressed["held_bytes"] == compressed["predicted_bytes"] < exact["held_bytes"] / 4
    assert (folder / "scores.png").read_bytes().startswith(b"\x89PNG")
    assert "pamm-1/16" in (folder / "table.md").read_text()
    assert GlueConfig.load(folder / "config.yaml") == made
    assert not list(folder.glob("runs/*/*/*/checkpoint-*"))

    write_overview([tmp_path / "runs"], tmp_path / "docs")
    report = (tmp_path / "docs/results.md").read_text().splitlines()
    ours = (folder / "table.md").read_text().partition("\n\n")[0].splitlines()
    assert len(ours) == 4
    assert set(ours) <= set(report)

    results = {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/*/*/result.json")}
    (tmp_path / "encoder").rename(tmp_path / "gone")  # nothing is left that would need it
    again = finetune_glue(dataclasses.replace(made, seeds=(0,)), tmp_path / "runs", quiet())
    assert [row["seeds"] for row in again] == [1] * 4
    assert all(path.stat().st_mtime_ns == at for path, at in results.items())
    with pytest.raises(PammError, match="another configuration; these differ: epochs"):
        finetune_glue(dataclasses.replace(made, epochs=3), tmp_path / "runs", quiet())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--task", "wnli"), "no task 'wnli'"),
        (("--config", "none.yaml"), "cannot read none.yaml"),
        (("--data", "nowhere", "--task", "mrpc"), "cannot read nowhere/"),
    ],
)
def test_what_the_command_refuses(
    tmp_path: Path, options: tuple[str, ...], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out = CliRunner().invoke(app, ["finetune", "glue", *options])
    assert out.exit_code == 2
    assert says in out.output
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(("method", "step"), [("pamm", 5), ("pamm", 7), ("subspace", 7)])
def test_a_stopped_run_ends_where_it_would_have_ended(
    tmp_path: Path, method: str, step: int
) -> None:
    arm = Arm("kept", PammConfig(method=method), lr_factor=2)
    made = config(tmp_path, arms=(arm,), tasks=("stsb",), seeds=(0,))
    whole, broken = (GluePlan(made, tmp_path / name).to_do()[0] for name in ("whole", "broken"))
    assert train_run(made, whole, Stop())
    assert not train_run(made, broken, StopAfter(step))  # an epoch has 5
    assert not (broken.folder / "result.json").exists()
    assert train_run(made, broken, Stop())
    kept = ("checkpoint-10/model.safetensors", "result.json")
    assert all((whole.folder / n).read_bytes() == (broken.folder / n).read_bytes() for n in kept)


def test_a_model_that_cannot_be_loaded_is_found_before_the_first_training(tmp_path: Path) -> None:
    made = config(tmp_path)
    (tmp_path / "encoder/model.safetensors").unlink()
    with pytest.raises(PammError, match=r"cannot load .*encoder .*no file named"):
        finetune_glue(made, tmp_path / "runs", quiet())
    assert not (tmp_path / "runs").exists()


def test_a_launcher_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(PammError, match="without torchrun"):
        finetune_glue(config(tmp_path), tmp_path / "runs", quiet())


def test_a_diverged_run_has_no_score_and_is_not_chosen(tmp_path: Path) -> None:
    plan = GluePlan(config(tmp_path, lrs=(1e-3, 1.0)), tmp_path / "runs")
    finish(plan, {(1e-3, 1): 0.1, (1.0, 1): None})  # type: ignore[dict-item]
    assert {run.lr for run in plan.final("cola", plan.config.arms[0])} == {1e-3}


@pytest.mark.slow
def test_a_loss_that_is_not_finite_scores_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")  # the configuration decides
    made = config(tmp_path, lrs=(1e12,), tasks=("cola",), seeds=(0,))
    run = GluePlan(made, tmp_path / "runs").to_do()[0]
    assert train_run(made, run, Stop())
    assert run.result is not None
    assert run.result["score"] is None
    assert run.result["versions"]["commit"] == commit()
    assert "ACCELERATE_MIXED_PRECISION" not in os.environ


def test_what_failed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = config(tmp_path)

    def fail(name: str, folder: Path, workers: int | None) -> None:
        for run in GluePlan(made, folder).to_do():
            run.folder.mkdir(parents=True, exist_ok=True)
            (run.folder / "failed.txt").write_text("Traceback\nRuntimeError: out of memory.\n")

    monkeypatch.setattr(module, "work", fail)
    with pytest.raises(ArmFailedError, match=r"4 trainings failed.*: out of memory\. The same"):
        finetune_glue(made, tmp_path / "runs", quiet())


@pytest.mark.slow
def test_the_example(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = config(tmp_path)
    path = Path(__file__).parents[3] / "examples/finetune_glue.py"
    main = runpy.run_path(str(path))["main"]
    main(made.model, made.data, tasks=("stsb",), output=tmp_path / "runs")
    assert "stsb pamm-1/128 pearson" in capsys.readouterr().out
