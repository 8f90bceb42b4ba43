import pytest
import torch

import pamm
from pamm.analysis.fidelity import (
    Recorded,
    energy,
    find_groups,
    gradient_errors,
    principal_plane,
    record,
)
from pamm.config import PammConfig
from pamm.nn import PammLinear
from tests.helpers import Model


def test_what_is_recorded_gives_the_gradients_of_training() -> None:
    model = Model(layers=2)
    parts = torch.randn(2, 3, 10, 16)
    groups = find_groups(model)
    assert len(groups) == 2
    assert not any(isinstance(module, PammLinear) for module in model.modules())
    recorded = record(
        model, groups, [lambda part=part: model(part).square().mean() for part in parts]
    )
    assert all(parameter.grad is None for parameter in model.parameters())
    (sum(model(part).square().mean() for part in parts) / 2).backward()
    for name, layers in groups.items():
        for layer in layers:
            grad = recorded[name].grads[layer.rpartition(".")[2]]
            expected = model.get_submodule(layer).weight.grad
            assert torch.allclose(grad.T @ recorded[name].x, expected, atol=1e-6)


def test_a_converted_model_is_refused_and_stays_converted() -> None:
    model = Model()
    pamm.convert(model, PammConfig("pamm"))
    with pytest.raises(pamm.PammError, match=r"call pamm\.revert first"):
        find_groups(model)
    assert any(isinstance(module, PammLinear) for module in model.modules())


def test_hooks_are_gone_afterwards() -> None:
    model, x = Model(), torch.randn(3, 16)
    groups = find_groups(model)
    with pytest.raises(ZeroDivisionError):
        record(model, groups, [lambda: 1 / 0])  # type: ignore[list-item,return-value]
    before = record(model, groups, [lambda: model(x).sum()])
    assert all(len(part.x) == 3 for part in before.values())


def recorded() -> Recorded:
    x = torch.randn(8, 12)[torch.arange(400) % 8] + 0.3 * torch.randn(400, 12)
    return Recorded(x, {"q": x @ torch.randn(12, 5), "k": torch.randn(400, 7)})


def test_an_unbiased_method_has_noise_alone_and_a_biased_one_both() -> None:
    part = recorded()
    sampled = gradient_errors(part, PammConfig("uniform_crs", ratio=1 / 20), draws=200)["q"]
    approximate = gradient_errors(part, PammConfig("pamm", 1 / 20), draws=200)["q"]
    assert sampled.bias < 0.15 * sampled.noise
    assert approximate.bias > 0.15 * approximate.noise
    for error in (sampled, approximate):
        assert error.total**2 == pytest.approx(error.bias**2 + error.noise**2)


def test_noise_falls_with_the_root_of_what_is_kept() -> None:
    part = recorded()
    few, many = (
        gradient_errors(part, PammConfig("compact", ratio=ratio), draws=200)["k"].total
        for ratio in (1 / 12, 1 / 3)
    )
    assert few / many == pytest.approx(2, rel=0.15)


def test_exact_has_no_error() -> None:
    for error in gradient_errors(recorded(), PammConfig("exact"), draws=2).values():
        assert error.total == 0


def test_energy_tells_few_directions_and_few_tokens() -> None:
    x = torch.randn(64, 2) @ torch.randn(2, 16)
    even, one = torch.ones(64, 3), torch.zeros(64, 3)
    one[5] = 1
    found = energy(Recorded(x, {"even": even, "one": one}), (1 / 64, 1 / 8, 1 / 2, 1.0))
    assert found["x"][1:] == pytest.approx([1, 1, 1])
    assert found["x"][0] < 0.999
    assert found["even"] == pytest.approx([1 / 64, 1 / 8, 1 / 2, 1])
    assert found["one"] == pytest.approx([1, 1, 1, 1])


def test_sampling_by_size_has_less_noise_than_an_even_draw_and_no_bias() -> None:
    size = torch.randn(512, 1).abs() ** 3
    recorded = Recorded(torch.randn(512, 12), {"q": size * torch.randn(512, 9)})
    by_size, even = (
        gradient_errors(recorded, PammConfig(method, 1 / 4), draws=400)["q"]
        for method in ("sampled", "uniform_crs")
    )
    assert by_size.noise < even.noise / 2
    assert by_size.bias < by_size.noise / 4


def test_the_plane_is_that_of_the_largest_variance() -> None:
    x = torch.randn(500, 6) * torch.tensor([1.0, 9.0, 1.0, 4.0, 1.0, 1.0]) + 3
    projection = principal_plane(x, PammConfig("pamm", 1 / 10))
    assert projection.x.std(0).tolist() == pytest.approx([9, 4], rel=0.15)
    assert projection.explained[0] > projection.explained[1] > 0.1
    # Every row that a generator stands for lies on that generator's line, in the plane too.
    f = projection.assignment
    cluster = projection.approximation[f == f.mode().values]
    assert torch.linalg.matrix_rank(cluster - cluster[0], tol=1e-3) <= 1
