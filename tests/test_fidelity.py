import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import pamm
from pamm.fidelity import watch
from pamm.recompute import group_layers
from tests.helpers import Model, pamm_layers

X = (2, 32, 16)
NAME = "layers.{}.attention.{{q_proj,k_proj,v_proj}}"


def converted(method: str = "pamm", ratio: float | None = 1 / 8, **changes: object) -> Model:
    torch.manual_seed(0)
    model = Model()
    ratio = None if method == "exact" else ratio
    config = pamm.PammConfig(method, ratio, **changes)  # type: ignore[arg-type]
    pamm.convert(model, config, example=torch.zeros(X))
    return model


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    names = [name for layers in group_layers(model).values() for name in layers]
    return {name: model.get_parameter(f"{name}.weight").grad.clone() for name in names}  # type: ignore[union-attr]


def test_cosine_and_error_are_those_of_the_gradients() -> None:
    model, x = converted(), torch.randn(X)
    with watch(model, ["layers.0.*"]) as watched:
        model(x).square().sum().backward()
    made = gradients(model)
    pamm.revert(model)
    model.zero_grad()
    model(x).square().sum().backward()
    names = [f"layers.0.attention.{each}_proj" for each in "qkv"]
    approximate = torch.cat([made[name].flatten() for name in names])
    exact = torch.cat([model.get_parameter(f"{n}.weight").grad.flatten() for n in names])  # type: ignore[union-attr]
    metrics, name = watched.metrics(), NAME.format(0)
    expected = torch.cosine_similarity(approximate, exact, dim=0).item()
    assert metrics[f"cosine/{name}"] == pytest.approx(expected, abs=1e-5)
    error = ((approximate - exact).norm() / exact.norm()).item()
    assert metrics[f"relative_error/{name}"] == pytest.approx(error, abs=1e-5)
    lost = (exact @ (exact - approximate) / (exact @ exact)).item()
    assert metrics[f"lost/{name}"] == pytest.approx(lost, abs=1e-5)
    assert f"cosine/{NAME.format(1)}" not in metrics


def test_lost_tells_bias_from_noise() -> None:
    """The mean over steps, of the same batch: other tokens and generators each time."""
    mean: dict[str, dict[str, float]] = {}
    for method, ratio in (("pamm", 1 / 8), ("sampled", 1 / 4)):
        model, seen = converted(method=method, ratio=ratio), []
        torch.manual_seed(0)
        x = torch.randn(X)
        for step in range(40):
            pamm.seek(model, step)
            with watch(model) as watched:
                model(x).square().sum().backward()
            seen.append(watched.metrics())
        keys = ("relative_error", "lost")
        mean[method] = {k: sum(s[f"{k}/{NAME.format(1)}"] for s in seen) / 40 for k in keys}
    assert abs(mean["sampled"]["lost"]) < 0.1 < 0.4 < mean["sampled"]["relative_error"]
    assert mean["pamm"]["lost"] > 0.5


def test_each_layer_has_numbers_of_its_own() -> None:
    model, x = converted(), torch.randn(X)
    names = [f"layers.0.attention.{each}_proj" for each in "qkv"]
    with watch(model, ["layers.0.attention.[qv]_proj"]) as watched:
        model(x).square().sum().backward()
    made = gradients(model)
    pamm.revert(model)
    model.zero_grad()
    model(x).square().sum().backward()
    metrics = watched.metrics()
    for name in (names[0], names[2]):
        exact = model.get_parameter(f"{name}.weight").grad
        cosine = torch.cosine_similarity(made[name].flatten(), exact.flatten(), dim=0).item()  # type: ignore[union-attr]
        assert metrics[f"cosine/{name}"] == pytest.approx(cosine, abs=1e-5)
        error = ((made[name] - exact).norm() / exact.norm()).item()  # type: ignore[union-attr, operator]
        assert metrics[f"relative_error/{name}"] == pytest.approx(error, abs=1e-5)
    assert len(metrics) == 2 + 2 * 3  # nothing of k, nor of the group


def test_names_are_those_of_the_model_inside_a_wrapper() -> None:
    wrapper = nn.DataParallel(converted()).train()
    with watch(wrapper, ["layers.1.attention.k_proj"]) as watched:
        wrapper.module(torch.randn(X)).sum().backward()
    assert "cosine/layers.1.attention.k_proj" in watched.metrics()


def test_watching_changes_no_gradient_and_leaves_nothing_behind() -> None:
    x = torch.randn(X)
    watched, plain = converted(), converted()
    methods = [group.method for group in pamm.nn.groups(watched)]
    with watch(watched, ["*"]):
        watched(x).sum().backward()
    plain(x).sum().backward()
    for one, other in zip(watched.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]
    assert [group.method for group in pamm.nn.groups(watched)] == methods
    assert all(layer.pamm_watcher is None for layer in pamm_layers(watched))


def test_held_bytes_are_those_of_the_report() -> None:
    model = Model()
    report = pamm.convert(model, pamm.PammConfig("pamm", 1 / 8))
    with watch(model) as watched:
        model(torch.randn(X)).sum().backward()
    assert watched.metrics()["held_bytes"] == report.held_bytes(64)
    assert watched.metrics()["dropped_share"] == 0


@pytest.mark.parametrize("changes", [{"tolerance": 0.0}, {"method": "uniform_crs"}])
def test_rows_that_are_dropped_are_counted(changes: dict[str, object]) -> None:
    model = converted(**changes)
    with watch(model) as watched:
        model(torch.randn(X)).sum().backward()
    assert watched.metrics()["dropped_share"] == pytest.approx(1 - 1 / 8, abs=1e-6)


@pytest.mark.parametrize("method", ["subspace", "compact", "sampled", "exact"])
def test_other_methods_drop_none(method: str) -> None:
    model = converted(method=method)
    with watch(model) as watched:
        model(torch.randn(X)).square().sum().backward()
    assert watched.metrics()["dropped_share"] == 0
    assert 0 < watched.metrics()[f"cosine/{NAME.format(1)}"] < 1 + 1e-6


@pytest.mark.parametrize("method", ["exact", "sampled"])
def test_layers_that_run_twice_before_backward_compare_each_pass(method: str) -> None:
    model = converted(method=method, ratio=1.0)
    with watch(model) as watched:
        (model(torch.randn(X)) + model(torch.randn(X))).square().sum().backward()
    assert watched.metrics()[f"cosine/{NAME.format(1)}"] == pytest.approx(1.0)


def test_the_middle_group_is_compared_unless_others_are_chosen() -> None:
    model = converted(ratio=1.0)
    with watch(model) as watched:
        model(torch.randn(X)).sum().backward()
    assert watched.metrics()[f"cosine/{NAME.format(1)}"] == pytest.approx(1.0)
    assert watched.metrics()[f"relative_error/{NAME.format(1)}"] == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers_compare_the_pass_that_counts(reentrant: bool) -> None:
    model = converted(ratio=1.0)
    x = torch.randn(X, requires_grad=True)
    with watch(model, ["layers.0.*"]) as watched:
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    assert watched.metrics()[f"cosine/{NAME.format(0)}"] == pytest.approx(1.0)


def test_under_autocast() -> None:
    model = converted(ratio=1.0)
    with watch(model) as watched:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randn(X)).float().square().sum()
        loss.backward()
    assert watched.metrics()[f"cosine/{NAME.format(1)}"] == pytest.approx(1.0, abs=1e-3)


def test_nothing_ran() -> None:
    with watch(converted()) as watched:
        pass
    assert watched.metrics() == {}


def test_a_pattern_without_groups_is_an_error() -> None:
    with (
        pytest.raises(pamm.PammError, match=r"no group is named like layers\.9\.\*; there are"),
        watch(converted(), ["layers.9.*"]),
    ):
        pass


def test_where_all_gradients_are_exact_the_error_says_so() -> None:
    model = Model()
    pamm.convert(model, pamm.PammConfig("recompute"), example=torch.zeros(X))
    with pytest.raises(pamm.PammError, match=r"nothing to watch.*are exact"), watch(model):
        pass


def test_an_unconverted_model_is_an_error() -> None:
    with pytest.raises(pamm.PammError, match=r"call pamm\.convert"), watch(Model()):
        pass
