"""benchmarks/harm.py: its numbers tell what is lost from what is merely noisy."""

import dataclasses
import runpy
from pathlib import Path

import pytest
import torch
from matplotlib.axes import Axes

import pamm

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks/harm.py"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit, when it is imported
def test_bias_is_lost_and_noise_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(SCRIPT.parent))  # as Python does for a script
    compare = runpy.run_path(str(SCRIPT))["compare"]
    torch.manual_seed(0)
    exact = [1 + torch.randn(20_000) for _ in range(16)]
    halved = compare((e / 2, e) for e in exact)
    assert abs(halved["lost"] - 0.5) < 1e-3
    assert halved["noise"] < 1e-3
    assert halved["1 - cosine"] < 1e-3
    assert abs(halved["lost at once"] - 0.5) < 1e-3
    noisy = compare((e + torch.randn(20_000), e) for e in exact)
    assert abs(noisy["lost"]) < 0.02
    assert abs(noisy["lost at once"]) < 0.02
    # 16 variances of the noise against 16^2 of the mean and 16 of e's own
    assert abs(noisy["noise"] - 16 / (16**2 + 16)) < 0.01
    assert abs(noisy["relative error"] - 0.5**0.5) < 0.01
    assert noisy["update lost"] > 0.1  # the noise makes Adam's step shorter


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_every_number_is_set_against_what_the_study_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The full and the smaller rate of one configuration are two points above one another."""
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    harm = runpy.run_path(str(SCRIPT))
    drawn: list[tuple[list[float], list[float]]] = []
    original = Axes.plot

    def plot(self: Axes, x: list[float], y: list[float], *args: object, **keys: object) -> object:
        drawn.append((x, y))
        return original(self, x, y, *args, **keys)  # type: ignore[arg-type]

    monkeypatch.setattr(Axes, "plot", plot)
    folder = ROOT / "benchmarks/results/h200/studies/60m"
    study = harm["Study"].load(folder / "study.yaml")
    numbers = dict.fromkeys(harm["NUMBERS"], 0.5)
    config = pamm.PammConfig("pamm", 1 / 512)
    record = {"cell": "pamm 1/512", "config": config.to_dict(), **numbers}
    harm["plot"]([record], study, folder)
    *alone, together = drawn
    assert len(alone) == len(harm["ALONE"])
    for x, y in alone:
        assert x == [0.5, 0.5]
        assert y == pytest.approx([45.4, 26.0], abs=0.1)
    assert together == (0.5, 0.5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_as_many_batches_are_measured_as_it_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And no others, of however much text there is."""
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    harm = runpy.run_path(str(SCRIPT))["measure"].__globals__
    text = torch.zeros(257 * 40, dtype=torch.int16)
    for name in ("train", "validation"):
        torch.save(text, tmp_path / f"{name}.pt")
    taken: list[int] = []
    monkeypatch.setitem(harm, "train", lambda run, data: ({"perplexity": 1.0}, harm["build"](
        harm["SIZES"]["tiny"], data.vocabulary, 0
    )))  # fmt: skip
    monkeypatch.setitem(
        harm, "gradients", lambda model, data, rows: taken.append(len(rows)) or torch.ones(3)
    )
    folder = ROOT / "benchmarks/results/h200/studies/60m"
    study = harm["Study"].load(folder / "study.yaml")
    cells = {name: study.cells[name] for name in ("exact", "pamm 1/512")}
    study = dataclasses.replace(study, cells=cells)
    harm["measure"](study, harm["Data"](tmp_path), tmp_path / "harm.jsonl", "tiny", 1)
    assert taken == [1] * (harm["BATCHES"] + harm["WARM"] + harm["BATCHES"])
