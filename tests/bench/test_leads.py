"""benchmarks/leads.py: prototypes that are what they are called."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pamm import reference

SCRIPT = Path(__file__).parents[2] / "benchmarks/leads.py"
TOKENS, K = 200, 20

# Of torch.jit, when it is imported.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture
def leads(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(SCRIPT.parent))  # as Python does for a script
    return runpy.run_path(str(SCRIPT))


@pytest.fixture
def matrices() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(TOKENS, 32), torch.randn(TOKENS, 16), torch.randperm(TOKENS)[:K]


def error(made: Tensor, x: Tensor, g: Tensor) -> float:
    return float((made - x.T @ g).norm() / (x.T @ g).norm())


def test_the_plain_form_is_the_papers(leads: dict[str, Any], matrices: Any) -> None:
    x, g, index = matrices
    expected = reference.approx_matmul(reference.compress(x, index), g)
    torch.testing.assert_close(leads["plain"](x, g, index), expected, atol=1e-4, rtol=1e-4)


def test_more_generators_a_row_leave_less(leads: dict[str, Any], matrices: Any) -> None:
    x, g, index = matrices
    rests = [error(leads["pursuit"](x, g, index, terms=terms), x, g) for terms in (1, 4, 100)]
    assert rests[0] > rests[1] > rests[2]
    # What lies in the span of the generators is all there after many.
    basis = torch.linalg.qr(x[index].T)[0]
    assert rests[2] == pytest.approx(error(basis @ (basis.T @ (x.T @ g)), x, g), rel=0.01)


def test_a_part_for_each_feature_is_exact(leads: dict[str, Any], matrices: Any) -> None:
    x, g, index = matrices
    assert error(leads["parts"](x, g, index, number=32), x, g) < 1e-5


def test_alpha_keeps_the_norm_of_each_row(leads: dict[str, Any], matrices: Any) -> None:
    x, _, index = matrices
    rows = leads["norm"](x, torch.eye(TOKENS), index).T
    torch.testing.assert_close(rows.norm(dim=1), x.norm(dim=1))


def test_a_common_mean_is_exact(leads: dict[str, Any], matrices: Any) -> None:
    _, g, index = matrices
    x = torch.randn(32).expand(TOKENS, 32)
    assert error(leads["mean"](x, g, index), x, g) < 1e-5


def test_refined_generators_fit_better(leads: dict[str, Any], matrices: Any) -> None:
    x, _, index = matrices
    eye = torch.eye(TOKENS)
    plain, refined = (leads[form](x, eye, index) for form in ("plain", "refined"))
    assert error(refined, x, eye) < error(plain, x, eye)


def test_blocks_are_exact_in_turn_and_nothing_else_changes(leads: dict[str, Any]) -> None:
    torch.manual_seed(0)
    linear, exact = nn.Linear(32, 16, bias=False), nn.Linear(32, 16, bias=False)
    exact.load_state_dict(linear.state_dict())
    linear.__class__ = leads["LeadLinear"]
    linear.begin({"form": "plain", "share": 0.1, "rotating": 2}, block=0)  # type: ignore[operator]
    is_exact = []
    for _ in range(4):
        x = torch.randn(2, 50, 32).bfloat16()
        for layer in (linear, exact):
            layer.zero_grad()
            given = x.clone().requires_grad_()
            y = layer(given) if layer is linear else layer.bfloat16()(given)
            y.square().sum().backward()
            layer.made = y.detach(), given.grad, layer.weight.grad.clone()  # type: ignore
        for one, other in zip(linear.made[:2], exact.made[:2], strict=True):  # type: ignore
            assert torch.equal(one, other)
        exact.float().load_state_dict(linear.state_dict(), strict=False)
        difference = linear.made[2] - exact.made[2].float()  # type: ignore
        is_exact.append(bool(difference.norm() < 0.01 * exact.made[2].float().norm()))  # type: ignore
    assert is_exact == [True, False, True, False]


def test_trainings_that_are_there_are_drawn(leads: dict[str, Any], tmp_path: Path) -> None:
    results = tmp_path / "leads.jsonl"
    runs = [({"arm": "exact"}, 20.0), ({"arm": "q alone", "lead": {"form": "plain"}}, 25.0)]
    lines = [json.dumps({"run": run, "perplexity": perplexity}) for run, perplexity in runs]
    results.write_text("\n".join(lines) + "\n")
    leads["plot"](results, tmp_path / "leads.png")
    assert (tmp_path / "leads.png").stat().st_size > 10_000
