"""The linear layer and the functional layer: exact where exactness is promised."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import pamm
from pamm import PammConfig, PammError, Stream
from tests.helpers import exact_config, saved_bytes, saved_tensors, strided, tensor_with_finaliser
from tests.tolerances import assert_implementation_error

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
COARSE = PammConfig("pamm", 1 / 8)
SHARES = [PammConfig(m, r) for m in ("pamm", "uniform_crs", "compact") for r in (1 / 8, 0.1)]


def gradients(
    function: object, x: Tensor, weight: Tensor, bias: Tensor | None, grad: Tensor
) -> tuple[Tensor, ...]:
    """y, dx, dW, dbias."""
    x = x.detach().requires_grad_()
    leaves = [x, weight, *([] if bias is None else [bias])]
    y = function(x, weight, bias)  # type: ignore[operator]
    return (y.detach(), *torch.autograd.grad(y, leaves, grad))


def strides(tensor: Tensor) -> list[int]:
    """Of the axes where they mean something."""
    return [stride for stride, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("layout", ["plain", "transposed", "sliced", "expanded"])
@pytest.mark.parametrize("shape", [(12,), (5, 12), (2, 5, 12), (2, 3, 5, 12), (1, 12), (1, 1, 12)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forward_input_and_bias_gradients_are_those_of_linear_bit_for_bit(
    dtype: torch.dtype, shape: tuple[int, ...], layout: str, has_bias: bool
) -> None:
    x = strided(shape, layout, dtype)
    weight = torch.randn(7, 12, dtype=dtype, requires_grad=True)
    bias = torch.randn(7, dtype=dtype, requires_grad=True) if has_bias else None
    grad = strided((*shape[:-1], 7), layout, dtype)

    def ours(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return pamm.linear(x, weight, bias, config=COARSE, stream=Stream())

    expected = gradients(F.linear, x, weight, bias, grad)
    actual = gradients(ours, x, weight, bias, grad)
    for number, name in ((0, "y"), (1, "dx"), *([(3, "dbias")] if has_bias else [])):
        assert torch.equal(actual[number], expected[number]), name
        assert strides(actual[number]) == strides(expected[number]), name
    assert actual[2].shape == weight.shape
    assert actual[2].is_contiguous()
    assert actual[2].dtype == dtype


@pytest.mark.parametrize("shape", [(6,), (5, 6), (2, 3, 6)])
def test_gradcheck_of_input_and_bias_always_and_weight_when_every_row_is_a_generator(
    shape: tuple[int, ...],
) -> None:
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(4, dtype=torch.float64, requires_grad=True)

    def with_ratio(config: PammConfig) -> object:
        return lambda x, w, b: pamm.linear(x, w, b, config=config, stream=Stream())

    every = with_ratio(exact_config())
    assert torch.autograd.gradcheck(every, (x, weight, bias))  # type: ignore[arg-type]
    few = with_ratio(PammConfig("pamm", 0.2, tolerance=0.5))
    fixed = weight.detach()

    def of_input_and_bias(x: Tensor, b: Tensor) -> Tensor:
        w = fixed.clone().requires_grad_()  # the compressed path, W not being checked
        return few(x, w, b)  # type: ignore[operator]

    assert torch.autograd.gradcheck(of_input_and_bias, (x, bias))


def test_gradcheck_fails_for_the_weight_when_rows_are_approximated() -> None:
    """The check above can fail: with one generator the weight gradient is not exact."""
    x = torch.randn(8, 6, dtype=torch.float64)
    weight = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    config = PammConfig("pamm", 1 / 8)
    assert not torch.autograd.gradcheck(
        lambda w: pamm.linear(x, w, config=config, stream=Stream()), weight, raise_exception=False
    )


@pytest.mark.parametrize("method", ["pamm", "uniform_crs", "exact"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weight_gradient_with_every_row_kept_is_the_exact_one(
    dtype: torch.dtype, method: str
) -> None:
    x, weight = torch.randn(3, 40, 12).to(dtype), torch.randn(7, 12).to(dtype)
    grad = torch.randn(3, 40, 7).to(dtype)
    config = PammConfig(method, None if method == "exact" else 1.0)  # type: ignore[arg-type]

    def ours(x: Tensor, weight: Tensor, bias: None) -> Tensor:
        return pamm.linear(x, weight, bias, config=config, stream=Stream())

    weight.requires_grad_()
    expected = gradients(F.linear, x, weight, None, grad)[2]
    actual = gradients(ours, x, weight, None, grad)[2]
    truth = grad.flatten(0, -2).double().T @ x.flatten(0, -2).double()
    assert_implementation_error(actual, expected, truth)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_autocast_gives_what_linear_gives(dtype: torch.dtype, has_bias: bool) -> None:
    x = torch.randn(2, 20, 12, requires_grad=True)
    weight = torch.randn(7, 12, requires_grad=True)
    bias = torch.randn(7, requires_grad=True) if has_bias else None
    leaves = [x, weight, *([bias] if bias is not None else [])]
    with torch.autocast("cpu", dtype):
        expected = F.linear(x, weight, bias)
        actual = pamm.linear(x, weight, bias, config=exact_config(), stream=Stream())
    assert actual.dtype == expected.dtype == dtype
    assert torch.equal(actual, expected)
    grad = torch.randn_like(expected)
    exact = torch.autograd.grad(expected, leaves, grad)
    ours = torch.autograd.grad(actual, leaves, grad)
    assert [g.dtype for g in ours] == [torch.float32] * len(leaves)
    assert torch.equal(ours[0], exact[0])
    truth = grad.flatten(0, 1).double().T @ x.detach().to(dtype).flatten(0, 1).double()
    assert_implementation_error(ours[1].to(dtype), exact[1].to(dtype), truth)
    if has_bias:
        assert torch.equal(ours[2], exact[2])


def test_sums_stay_in_fp32_when_backward_runs_under_autocast() -> None:
    """Autocast would round the similarities and B~ to bf16 if it reached the operations."""
    x, b = torch.randn(300, 12), torch.randn(300, 7)
    compressed = pamm.compress(x, COARSE)
    product = pamm.approx_matmul(compressed, b)
    with torch.autocast("cpu", torch.bfloat16):
        under = pamm.compress(x, COARSE)
        assert all(torch.equal(a, b) for a, b in zip(under, compressed, strict=True))
        assert torch.equal(pamm.approx_matmul(compressed, b), product)


@pytest.mark.parametrize(
    "config",
    [
        PammConfig("pamm", 0.1, tolerance=0.5),
        *SHARES,
        PammConfig("exact"),
    ],
    ids=str,
)
def test_exactly_the_predicted_bytes_are_saved(config: PammConfig) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(4, 100, 12, dtype=dtype, requires_grad=True)
        weight = torch.randn(7, 12, dtype=dtype, requires_grad=True)
        with saved_tensors() as saved:
            pamm.linear(x, weight, config=config, stream=Stream())
        predicted = pamm.compressors.compressor(config).state_bytes(400, 12, dtype)
        assert saved_bytes(saved, [weight]) == predicted


def test_target_of_the_held_bytes() -> None:
    """r = 1/512 of 32,768 tokens of 512 bf16 features: X is 32 MiB, the paper keeps 448 KiB."""
    method = pamm.compressors.compressor(PammConfig("pamm", 1 / 512))
    assert method.state_bytes(32_768, 512, torch.bfloat16) <= 170_000


def test_x_is_freed_when_the_caller_drops_it() -> None:
    x, freed = tensor_with_finaliser((64, 12))
    weight = torch.randn(7, 12, requires_grad=True)
    y = pamm.linear(x, weight, config=COARSE, stream=Stream())
    assert not freed
    del x
    assert freed, "something still holds the storage of x"
    y.sum().backward()


def test_plain_linear_keeps_x() -> None:
    """The test above can fail."""
    x, freed = tensor_with_finaliser((64, 12))
    y = F.linear(x, torch.randn(7, 12, requires_grad=True))
    del x
    assert not freed
    del y
    assert freed


def test_no_temporary_in_backward_grows_with_tokens_times_features() -> None:
    """n is far above m and k, so a (tokens, n) tensor would stand out."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                self.elements = max(self.elements, out.untyped_storage().nbytes() // out.itemsize)
            return out

    x = torch.randn(1000, 512)  # needs no gradient: dx has that size
    weight = torch.randn(4, 512, requires_grad=True)
    y = pamm.linear(x, weight, config=PammConfig("pamm", 1 / 100), stream=Stream())
    grad = torch.ones_like(y)
    with Largest() as largest:
        y.backward(grad)
    assert 0 < largest.elements < 1000 * 512 // 10


def test_frozen_weight_or_no_grad_is_plain_linear() -> None:
    x, weight = torch.randn(30, 12, requires_grad=True), torch.randn(7, 12)
    stream = Stream()
    with saved_tensors() as saved:
        pamm.linear(x, weight, config=COARSE, stream=stream)
    assert saved_bytes(saved, [weight]) == 0
    weight.requires_grad_()
    for context in (torch.no_grad(), torch.inference_mode()):
        with context, saved_tensors() as saved:
            y = pamm.linear(x, weight, config=COARSE, stream=stream)
        assert not saved
        assert not y.requires_grad
    assert torch.equal(stream.draw(100, 5, x.device), Stream().draw(100, 5, x.device))


def test_output_may_be_changed_in_place() -> None:
    """Models scale queries in place; the output must not be a view that autograd guards."""
    layouts = ((30, 12), "plain"), ((2, 15, 12), "plain"), ((2, 15, 12), "transposed"), ((12,), "")
    for shape, layout in layouts:
        x = strided(shape, layout, torch.float32).requires_grad_()
        weight, bias = torch.randn(8, 12, requires_grad=True), torch.randn(8, requires_grad=True)
        y = pamm.linear(x, weight, bias, config=COARSE, stream=Stream())
        y.mul_(2)
        z = y.view(*shape[:-1], 2, 4)
        z[..., 0, :].add_(1)
        z.sum().backward()
        assert torch.equal(bias.grad, torch.full((8,), 2.0 * (x.numel() // 12)))


def test_double_backward_is_refused_and_not_silently_wrong() -> None:
    x, weight = torch.randn(30, 12, requires_grad=True), torch.randn(7, 12, requires_grad=True)
    y = pamm.linear(x, weight, config=COARSE, stream=Stream())
    (grad,) = torch.autograd.grad(y.pow(2).sum(), weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_a_weight_changed_before_backward_is_noticed() -> None:
    x, weight = torch.randn(30, 12, requires_grad=True), torch.randn(7, 12, requires_grad=True)
    y = pamm.linear(x, weight, config=COARSE, stream=Stream())
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


class TestEdgeCases:
    """Inputs at the border; the weight gradient goes through ``pamm.linear``."""

    @staticmethod
    def weight_gradient(
        x: Tensor, grad: Tensor, config: PammConfig = COARSE
    ) -> tuple[Tensor, Tensor]:
        weight = torch.randn(grad.shape[-1], x.shape[-1], dtype=x.dtype, requires_grad=True)
        y = pamm.linear(x, weight, config=config, stream=Stream())
        y.backward(grad)
        assert weight.grad is not None
        return weight.grad, grad.T @ x

    @pytest.mark.parametrize(
        "config",
        [
            PammConfig("pamm", 1 / 8, 0.0),
            PammConfig("pamm", 1 / 8, 0.5),
            *SHARES,
            PammConfig("exact"),
        ],
        ids=str,
    )
    def test_empty_batch_gives_zero_gradients(self, config: PammConfig) -> None:
        grad, _ = self.weight_gradient(torch.randn(0, 12), torch.randn(0, 7), config)
        assert torch.equal(grad, torch.zeros(7, 12))

    def test_one_row_is_its_own_generator(self) -> None:
        grad, exact = self.weight_gradient(torch.randn(1, 12), torch.randn(1, 7))
        assert torch.allclose(grad, exact)

    @pytest.mark.parametrize("tolerance", [None, 0.0, 0.5])
    def test_zero_rows_have_coefficient_zero_and_count_as_kept(
        self, tolerance: float | None
    ) -> None:
        compressed = pamm.compress(
            torch.zeros(40, 12), PammConfig("pamm", 0.1, tolerance=tolerance)
        )
        assert compressed.coefficients.eq(0).all()
        if tolerance != 0:
            assert compressed.normalization.item() == 1

    def test_duplicate_rows_are_represented_exactly(self) -> None:
        x = torch.randn(1, 12).expand(40, 12)
        grad, exact = self.weight_gradient(x, torch.randn(40, 7))
        assert torch.allclose(grad, exact, atol=1e-4)

    @pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
    @pytest.mark.parametrize("tolerance", [None, 0.5, 1.0])
    @pytest.mark.parametrize("where", ["x", "grad"])
    def test_nan_and_inf_reach_the_weight_gradient(
        self, bad: float, tolerance: float | None, where: str
    ) -> None:
        for row in range(16):  # a generator or not
            x, grad = torch.randn(16, 12), torch.randn(16, 7)
            (x if where == "x" else grad)[row, 3] = bad
            config = PammConfig("pamm", 1 / 4, tolerance=tolerance)
            assert not self.weight_gradient(x, grad, config)[0].isfinite().all()

    def test_more_generators_asked_for_than_rows(self) -> None:
        assert PammConfig("pamm", 1.0).generators(3) == 3
        grad, exact = self.weight_gradient(torch.randn(3, 12), torch.randn(3, 7), exact_config())
        assert torch.allclose(grad, exact, atol=1e-5)

    @pytest.mark.parametrize("scale", [6e4, 1e3, 1e-3, 1e-6])
    def test_huge_and_tiny_scales_in_fp16(self, scale: float) -> None:
        """Sums of squares and of gradients leave fp16 at these scales; the result need not."""
        x = (torch.rand(64, 12) * scale).half()
        grad = (torch.randn(64, 7) / max(scale, 1)).half()
        ours, exact = self.weight_gradient(x, grad, exact_config())
        truth = grad.double().T @ x.double()
        assert ours.isfinite().all()
        assert_implementation_error(ours, exact, truth)
        ours, _ = self.weight_gradient(x, grad)
        assert ours.isfinite().all()


def test_compress_and_approx_matmul_refuse_what_they_cannot_take() -> None:
    compress, approx_matmul = (inspect.unwrap(f) for f in (pamm.compress, pamm.approx_matmul))
    with pytest.raises(PammError, match="Flatten leading axes"):
        compress(torch.randn(2, 3, 4))
    with pytest.raises(PammError, match="floating-point matrix"):
        compress(torch.ones(3, 4, dtype=torch.int64))
    with pytest.raises(PammError, match="the config says 'exact'"):
        compress(torch.randn(3, 4), PammConfig("exact"))
    compressed = compress(torch.randn(30, 4))
    for b in (torch.randn(29, 4), torch.randn(30), torch.randn(30, 4).double()):
        with pytest.raises(PammError, match=r"torch.float32 matrix of 30 rows"):
            approx_matmul(compressed, b)
    for a in ([[1.0]], torch.randn(3, 4).numpy()):
        with pytest.raises(PammError, match=f"got {type(a).__name__}"):
            compress(a)
    with pytest.raises(PammError, match=r"config is 0\.25; give a PammConfig"):
        compress(torch.randn(3, 4), 0.25)
    with pytest.raises(PammError, match=r"stream is 3; give a pamm.Stream"):
        compress(torch.randn(3, 4), stream=3)
    with pytest.raises(PammError, match=r"what pamm.compress made of A.* got torch.float32"):
        approx_matmul(torch.randn(30, 4), compressed)


@pytest.mark.parametrize("trained", [True, False])
def test_linear_refuses_a_method_by_its_name_and_no_stream(trained: bool) -> None:
    linear, x = inspect.unwrap(pamm.linear), torch.randn(3, 4)
    weight = torch.randn(2, 4, requires_grad=trained)
    with pytest.raises(PammError, match="config is 'pamm'; give a PammConfig"):
        linear(x, weight, config="pamm", stream=Stream())
    with pytest.raises(PammError, match=r"stream is None; give a pamm.Stream"):
        linear(x, weight, config=COARSE, stream=None)
    with pytest.raises(PammError, match=r"method 'sampled' .* which a function cannot"):
        linear(x, weight, config=PammConfig(), stream=Stream())


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize(
    ("x", "got"),
    [
        ([[1.0] * 4], "got list"),
        (torch.tensor(1.0), r"got torch.float32 of shape \(\)"),
        (torch.ones(3, 4, dtype=torch.int64), "got torch.int64"),
        (torch.ones(3, 5), r"got torch.float32 of shape \(3, 5\)"),
    ],
)
def test_linear_refuses_what_is_no_rows_of_its_width(x: object, got: str, trained: bool) -> None:
    linear, weight = inspect.unwrap(pamm.linear), torch.randn(2, 4, requires_grad=trained)
    with pytest.raises(PammError, match=f"rows of 4 features, as weight has; {got}"):
        linear(x, weight, config=COARSE, stream=Stream())


@pytest.mark.parametrize("duplicates", [False, True])
def test_tolerance_zero_is_uniform_crs(duplicates: bool) -> None:
    """The same draw gives the same weight gradient, up to rounding."""
    x, weight = torch.randn(200, 12), torch.randn(7, 12, requires_grad=True)
    if duplicates:
        x[100:] = x[:100]
    gradient = torch.randn(200, 7)
    results = [
        gradients(
            lambda x, w, b, config=config: pamm.linear(x, w, b, config=config, stream=Stream()),
            x,
            weight,
            None,
            gradient,
        )[2]
        for config in (
            PammConfig("pamm", 1 / 8, tolerance=0.0),
            PammConfig("uniform_crs", ratio=1 / 8),
        )
    ]
    assert torch.allclose(*results, rtol=1e-5, atol=1e-4)


def test_general_product_of_a_transposed_matrix_with_another() -> None:
    a, b = torch.randn(60, 7), torch.randn(60, 5)
    assert torch.allclose(
        pamm.approx_matmul(pamm.compress(a, exact_config()), b), a.T @ b, atol=1e-4
    )
    few = pamm.compress(a, PammConfig("pamm", 0.1), stream=Stream(seed=2))
    reconstructed = few.coefficients[:, None] * few.generators[few.assignment.long()]
    assert torch.allclose(pamm.approx_matmul(few, b), reconstructed.T @ b, atol=1e-4)
