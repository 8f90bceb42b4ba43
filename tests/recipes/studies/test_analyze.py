import math
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from pamm.cli import app
from pamm.config import METHODS
from pamm.errors import PammError
from pamm.recipes.pretraining.tokens import prepare
from pamm.recipes.studies import analyze as module
from pamm.recipes.studies.analyze import NEAR, RATIOS, TOLERANCES, analyze, read_analysis
from tests.recipes.helpers import config, quiet, text

KINDS = {
    *("pca", "error-ratio", "error-tolerance", "error-methods"),
    *("energy", "coverage", "bound", "complexity"),
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A model of a run, and the run's tokens beside it."""
    (tmp_path / "text.txt").write_text(text(30_000))
    made = config(tmp_path)
    prepare(made, tmp_path / "runs/tiny", quiet())
    folder = tmp_path / "runs/tiny/exact/checkpoint-6"
    llama = LlamaConfig(
        **made.model,  # type: ignore[arg-type]
        vocab_size=made.vocabulary,
        max_position_embeddings=16,
    )
    LlamaForCausalLM(llama).save_pretrained(folder)
    return folder


def test_a_checkpoint_on_the_text_of_its_run(checkpoint: Path, tmp_path: Path) -> None:
    output = tmp_path / "analysis"
    arguments = ["analyze", str(checkpoint), "--tokens", "512", "--draws", "2", "--layer", "1"]
    done = CliRunner().invoke(app, [*arguments, "--output", str(output)])
    assert done.exit_code == 0, done.output
    assert {path.name for path in output.glob("*.png")} == {f"layer-1-{k}.png" for k in KINDS}

    made = read_analysis(output)
    assert made["tokens"] == 512
    assert len(made["errors"]) == len(RATIOS) * len(TOLERANCES) * 3
    assert {row["projection"] for row in made["errors"]} == {"q_proj", "k_proj", "v_proj"}
    assert {row["layer"] for row in made["errors"]} == {1}
    for row in made["errors"]:
        assert row["total"] ** 2 == pytest.approx(row["bias"] ** 2 + row["noise"] ** 2, rel=1e-4)
    assert {row["method"] for row in made["methods"]} == set(METHODS) - {"exact", "recompute"}

    assert [row["part"] for row in made["energy"]] == ["x", "q_proj", "k_proj", "v_proj"]
    for row in made["energy"]:
        assert row["energy"] == sorted(row["energy"])
        assert row["energy"][-1] == pytest.approx(1)

    coverage = {(row["ratio"], row["tolerance"]): row["coverage"] for row in made["coverage"]}
    for ratio in RATIOS:
        over = [coverage[ratio, tolerance] for tolerance in TOLERANCES]
        assert over == sorted(over), "more tolerance covers more"
        assert over[0] == pytest.approx(math.ceil(512 * ratio) / 512)
        assert over[-1] == 1
    assert [row["tolerance"] for row in made["bound"]] == list(NEAR)
    for row in made["bound"]:
        assert row["k_bound"] == pytest.approx(512 / row["n_min"] * math.log(512 / 0.05))
        assert row["curve_coverage"][-1] == 1
    for row in made["complexity"]:
        assert row["gamma"] == pytest.approx(512 * 96 / (row["k"] * (512 + 96)))
        assert row["exact_us"] > 0

    # What was written is enough for every picture but PCA's: nothing of the model is left here.
    alone = tmp_path / "alone"
    alone.mkdir()
    (output / "analysis.json").rename(alone / "analysis.json")
    done = CliRunner().invoke(app, ["analyze", str(alone)])
    assert done.exit_code == 0, done.output
    pictures = {path.name: path.read_bytes() for path in alone.glob("*.png")}
    assert pictures.keys() == {f"layer-1-{kind}.png" for kind in KINDS - {"pca"}}
    for name, picture in pictures.items():
        assert picture == (output / name).read_bytes()


def test_a_text_of_ones_own(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RATIOS", (1 / 32,))
    monkeypatch.setattr(module, "TOLERANCES", (None,))
    (tmp_path / "other.txt").write_text("dog fox " * 3000)
    made = analyze(
        checkpoint,
        tmp_path / "out",
        quiet(),
        text=[str(tmp_path / "other.txt")],
        tokens=600,
        draws=2,
    )
    assert made["tokens"] == 592, "whole sequences"
    assert made["layers"] == [0, 1]


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"layers": [2]}, "this model has 0 to 1"),
        ({"checkpoint": "none"}, "holds no model"),
        ({"text": ["none.txt"]}, "no such file"),
        ({"tokenizer": "./none", "text": ["text.txt"]}, "cannot load the tokenizer"),
        ({"tokens": 10**6, "text": ["short.txt"]}, "give more text"),
    ],
)
def test_what_is_refused(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict, part: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("the quick brown fox")
    arguments = {"checkpoint": checkpoint, "tokens": 512} | change
    with pytest.raises(PammError, match=part):
        analyze(Path(arguments.pop("checkpoint")), tmp_path / "out", quiet(), **arguments)
    assert not (tmp_path / "out").exists()
