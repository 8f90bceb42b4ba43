"""The benchmarks measure what they say, and their command line refuses what it cannot do."""

import json
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from typer.testing import CliRunner

from pamm.analysis import plots
from pamm.bench.arms import make_arms
from pamm.bench.model import SIZES, build
from pamm.bench.op import METHODS, Shape, bench_op, block
from pamm.bench.paper import PaperPamm
from pamm.bench.records import append
from pamm.bench.report import write_report
from pamm.bench.timing import interleave
from pamm.cli import app
from pamm.config import PammConfig
from pamm.errors import PammError
from pamm.nn import groups
from pamm.recompute import recomputed_groups
from pamm.report import format_ratio
from tests.tolerances import relative_error

CPU = torch.device("cpu")
CONFIG = PammConfig("pamm", 1 / 16)
OFFERED = "choose from exact, pamm, paper, subspace, uniform_crs, compact."


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_arms_share_their_parameters_and_nothing_else() -> None:
    model = block(Shape(64, 8, 8), CPU, torch.float32)
    arms = make_arms(model, CONFIG, ("exact", "pamm", "paper"))
    for arm in arms.values():
        for one, other in zip(model.parameters(), arm.parameters(), strict=True):
            assert one is other
    assert [len(groups(arm)) for arm in arms.values()] == [0, 1, 3]
    assert all(isinstance(group.method, PaperPamm) for group in groups(arms["paper"]))


def test_the_papers_operations_give_what_ours_give() -> None:
    """Other rows are drawn; with every row drawn both are exact."""
    x, g = torch.randn(200, 12), torch.randn(200, 5)
    paper = PaperPamm(PammConfig("pamm", 1.0))
    product = paper.weight_grad(paper.compress(x, lambda *_: x), g)
    assert relative_error(product, g.T @ x) < 1e-5


def test_op_counts_the_bytes_that_each_arm_holds() -> None:
    records = bench_op(
        Shape(128, 16, 8), CONFIG, CPU, torch.float32, ("exact", "pamm", "paper"), repeats=2
    )
    held = {record["arm"]: record["held_bytes"] for record in records}
    assert held["exact"] == 128 * 16 * 4
    assert held["pamm"] == 8 * 16 * 4 + 128 * (4 + 1) + 4
    assert held["paper"] == 3 * (8 * 16 * 4 + 128 * (4 + 8))
    for record in records:
        assert record["total_ms"] > 0
        assert record["forward_ms"] > 0
        assert record["backward_ms"] > 0


@pytest.mark.parametrize("name", METHODS)
def test_op_times_every_method_that_it_offers(name: str) -> None:
    records = bench_op(Shape(64, 16, 8), CONFIG, CPU, torch.float32, (name,), repeats=1)
    assert [record["arm"] for record in records] == [name]


def test_arms_take_turns() -> None:
    order = []

    def work(name: str) -> object:
        def run(mark: object) -> None:
            order.append(name)
            mark("only")  # type: ignore[operator]

        return run

    medians = interleave({name: work(name) for name in "ab"}, CPU, repeats=3, warmup=1)  # type: ignore[arg-type]
    assert "".join(order) == "abababab"
    assert set(medians) == {"a", "b"}
    assert set(medians["a"]) == {"only", "total"}


@pytest.mark.filterwarnings("default")  # the profiler has some of its own
def test_command_line_writes_records_and_a_report(tmp_path: Path) -> None:
    results = tmp_path / "results" / "all.jsonl"
    fast = ("--results", str(results), "--device", "cpu")
    for layout in ("separate", "fused"):
        run("bench", "op", "--shape", "64,8,8", "--layout", layout, "--repeats", "2", *fast)
    run("bench", "model", "--model", "tiny", "--repeats", "1", "--layers", "1", *fast)
    run("bench", "breakdown", "--model", "tiny", "--repeats", "1", "--layers", "1", *fast)
    records = [json.loads(line) for line in results.read_text().splitlines()]
    assert [record["benchmark"] for record in records] == (
        ["op"] * 6 + ["model"] * 4 + ["breakdown"] * 9
    )
    assert all(record["device"] and record["torch"] == torch.__version__ for record in records)
    arms = [record["arm"] for record in records if record["benchmark"] == "model"]
    assert arms == ["exact", "sampled", "pamm", "paper"]  # pamm.convert's default is among them
    parts = [r for r in records if r["benchmark"] == "breakdown"]
    for direction in ("forward", "backward"):
        rows = {r["part"]: r["ms"] for r in parts if r["pass"] == direction}
        assert rows["total"] == pytest.approx(sum(rows.values()) - rows["total"])
        assert rows["total"] > 0
        seen = ("draw", "similarity + assign") if direction == "forward" else ("segment sum",)
        assert all(rows[part] > 0 for part in seen)

    run("bench", "report", str(results.parent), "--output", str(tmp_path / "docs"))
    page = (tmp_path / "docs" / "benchmarks.md").read_text()
    assert "| 64 x 8 -> 3 x 8 | 1 | fused |" in page
    assert (tmp_path / "docs" / "speed.png").read_bytes().startswith(b"\x89PNG")


def test_the_help_of_op_offers_what_it_times() -> None:
    result = CliRunner().invoke(app, ["bench", "op", "--help"], env={"COLUMNS": "200"})
    option = " ".join(result.output.replace("│", " ").partition("--arms")[2].split())
    offered, _, others = option.partition(" sampled and recompute need")
    assert all(name in offered for name in METHODS)
    assert "bench model" in others


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("op", "--shape", "12,4"), "write TOKENS,IN,OUT"),
        (("op", "--shape", "0,4,4"), "whole numbers above 0"),
        (("op", "--layout", "packed"), "separate or fused"),
        (("op", "--dtype", "int8"), "choose float32, bfloat16"),
        (("op", "--arms", "exact,fast"), "choose from exact, pamm, paper"),
        (("op", "--arms", "fast"), OFFERED),
        (("op", "--arms", "exact:1/2"), OFFERED),
        (("op", "--arms", ","), OFFERED),
        (("op", "--arms", "exact,sampled:1/4"), "pamm bench model --arms exact,sampled:1/4."),
        (("op", "--arms", "recompute"), "recompute would need a norm that makes X again"),
        (("op", "--arms", "pamm+pamm"), "pamm bench model --arms exact,pamm+pamm."),
        (("op", "--ratio", "2"), "above 0 and at most 1"),
        (("op", "--device", "tpu"), "choose cuda, cpu or auto"),
        (("model", "--model", "3B"), "choose one of 60M, 350M, 1B, 7B"),
        (("breakdown", "--model", "tiny", "--arm", "exact"), "choose pamm or paper"),
        (("report", "nowhere"), "no .jsonl file in nowhere"),
    ],
)
def test_bad_arguments_exit_with_2(arguments: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_sizes_are_those_of_the_paper() -> None:
    shapes = {name: (s.hidden, s.ffn, s.heads, s.layers) for name, s in SIZES.items()}
    assert shapes["60M"] == (512, 1376, 8, 8)
    assert shapes["350M"] == (1024, 2736, 16, 24)
    assert shapes["1B"] == (2048, 5461, 32, 24)
    assert shapes["7B"] == (4096, 11008, 32, 32)
    parameters = sum(p.numel() for p in build(SIZES["60M"], CPU, torch.float32).parameters())
    assert 5.5e7 < parameters < 6.5e7


def test_a_report_compares_arms_of_one_run(tmp_path: Path) -> None:
    """A later run of two arms leaves the third one's ratio as it was measured."""
    shape = {
        "benchmark": "op",
        "device": "x",
        "layout": "fused",
        "tokens": 8,
        "n": 8,
        "m": 8,
        "k": 1,
    }
    times = {"forward_ms": 1.0, "backward_ms": 1.0, "held_bytes": 0}
    runs = (("old", {"exact": 4.0, "paper": 8.0}), ("new", {"exact": 2.0, "pamm": 1.0}))
    for commit, arms in runs:
        append(
            tmp_path / "all.jsonl",
            [
                {**shape, **times, "arm": arm, "total_ms": total, "commit": commit}
                for arm, total in arms.items()
            ],
        )
    write_report(tmp_path, tmp_path / "docs")
    page = (tmp_path / "docs" / "benchmarks.md").read_text()
    ratios = {row.split(" | ")[4]: row.split(" | ")[8] for row in page.splitlines() if "x 8" in row}
    assert ratios == {"exact": "1.000", "pamm": "2.000", "paper": "0.500"}


def test_the_picture_shows_each_method_as_it_is_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = {"benchmark": "model", "device": "x", "model": "1B", "layers": 1, "tokens": 8}
    case |= {"compiled": True, "commit": "one", "tokens_per_s": 1.0, "total_ms": 2.0}
    own = ["recompute", "recompute+recompute", f"sampled:{format_ratio(PammConfig().ratio)}"]
    others = ["sampled:1/3", "sampled:1/2", "subspace:1/8", "exact+sampled:2/3"]
    before = ["sampled:1/2:16bit"]
    arms = ["exact", *own, *others, *before]
    append(tmp_path / "all.jsonl", [case | {"arm": arm} for arm in arms])
    shown: dict[str, dict[str, float]] = {}
    monkeypatch.setattr(plots, "speed_bars", lambda bars: shown.update(bars) or Figure())
    write_report(tmp_path, tmp_path / "docs")
    (bars,) = shown.values()
    assert sorted(bars) == sorted([*own, *before])


@pytest.mark.parametrize(
    "names",
    [
        (),
        ("fast",),
        ("exact", "recompute:1/8"),
        ("subspace:",),
        ("pamm+mlp",),
        ("paper+exact",),
        ("exact+exact+exact",),
        ("subspace:1/8:4",),
    ],
)
def test_an_unknown_arm_is_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(PammError, match="choose from exact"):
        make_arms(block(Shape(8, 8, 8), CPU, torch.float32), CONFIG, names)


def test_other_methods_have_ratios_of_their_own() -> None:
    model = block(Shape(64, 96, 8), CPU, torch.float32)
    arms = make_arms(model, CONFIG, ("pamm", "subspace", "subspace:1/2", "pamm:1/2"))
    configs = [groups(arm)[0].method.config for arm in arms.values()]  # type: ignore[attr-defined]
    assert [config.method for config in configs] == ["pamm", "subspace", "subspace", "pamm"]
    assert [config.ratio for config in configs] == [CONFIG.ratio, 3 / 8, 1 / 2, 1 / 2]


def test_an_arm_of_a_model_may_have_directions_and_convert_gate_and_up() -> None:
    model = build(SIZES["tiny"], CPU, torch.float32)
    names = ("recompute+recompute", "sampled:1/4:16bit", "exact+sampled:1/4:16", "recompute+pamm")
    arms = make_arms(model, CONFIG, names)
    recomputed = [len(recomputed_groups(arm)) for arm in arms.values()]
    assert recomputed == [4, 2, 2, 2]  # two layers
    configs = [[group.method.config for group in groups(arm)] for arm in arms.values()]  # type: ignore[attr-defined]
    assert configs == [
        [],
        2 * [PammConfig("sampled", 1 / 4, fp8=False, seed=CONFIG.seed)],
        2 * [PammConfig("sampled", 1 / 4, directions=16, seed=CONFIG.seed)],
        2 * [CONFIG],
    ]
    assert all("mlp" in name for name in recomputed_groups(arms["exact+sampled:1/4:16"]))
