"""The operations and converted models under torch.compile.

Run by itself, without the shape checks of jaxtyping, which the compiler cannot trace.
"""

import copy

import pytest
import torch
from torch import library
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import pamm
from pamm import fp8, ops, sampling
from pamm.nn import groups
from tests.helpers import Model, saved_bytes, saved_tensors

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CONFIG = pamm.PammConfig("pamm", 1 / 8)

# The compiler warns of its own deprecated parts.
pytestmark = pytest.mark.filterwarnings("default")
DTYPES = (torch.float32, torch.bfloat16)


def sample(dtype: torch.dtype, tolerance: float | None) -> tuple[object, ...]:
    x = torch.randn(60, 24, device=DEVICE, dtype=dtype)
    return x, torch.randperm(60, device=DEVICE)[:7], tolerance, "auto"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tolerance", [None, 0.5])
def test_ops_pass_opcheck(dtype: torch.dtype, tolerance: float | None) -> None:
    compress = sample(dtype, tolerance)
    library.opcheck(torch.ops.pamm.compress.default, compress)
    compressed = torch.ops.pamm.compress.default(*compress)
    gradient = torch.randn(60, 16, device=DEVICE, dtype=dtype)
    library.opcheck(torch.ops.pamm.weight_grad.default, (gradient, *compressed, "auto"))
    state = torch.tensor([0, 1, 2], device=DEVICE)
    for op in (torch.ops.pamm.draw.default, torch.ops.pamm.draw_next.default):
        library.opcheck(op, (state, 0, 60, 7, "auto"))
    library.opcheck(torch.ops.pamm.encode.default, (compress[0], 10, "auto"))
    codes, size, _ = torch.ops.pamm.encode.default(compress[0], 10, "auto")
    library.opcheck(torch.ops.pamm.decode.default, (codes, size, 10, 24, "auto"))


@pytest.mark.parametrize("k", [0, 3])
def test_sample_passes_opcheck(k: int) -> None:
    x, g = torch.randn(60, 16, device=DEVICE), torch.randn(60, 24, device=DEVICE)
    offset = torch.rand(1, dtype=torch.float64, device=DEVICE)
    whole = sampling.whole(x, torch.randn(16, k, device=DEVICE), g) if k else (None, None, None)
    library.opcheck(
        torch.ops.pamm.sample.default, (g, x, sampling.sizes(g), 7, offset, *whole, "auto")
    )


@pytest.mark.parametrize(
    ("k", "n", "c"), [(0, 64, 30), (0, 72, 30), (3, 64, 30), (3, 72, 30), (0, 72, 60)]
)
def test_sample_fp8_passes_opcheck(k: int, n: int, c: int) -> None:
    x, g = torch.randn(60, n, device=DEVICE), torch.randn(60, 80, device=DEVICE)
    x, g = x.bfloat16(), g.bfloat16()
    offset = torch.rand(1, dtype=torch.float64, device=DEVICE)
    basis = torch.randn(n, k, device=DEVICE).bfloat16()
    whole = sampling.whole(x, basis, g) if k else (None, None, None)
    arguments = (g, x, sampling.sizes(g), fp8.largest(x), c, offset, *whole, "auto")
    library.opcheck(torch.ops.pamm.sample_fp8.default, arguments)


@pytest.mark.parametrize(("ratio", "directions"), [(2 / 3, 0), (2 / 3, 4), (1, 0)])
def test_rows_in_8_bits_compile(
    monkeypatch: pytest.MonkeyPatch, ratio: float, directions: int
) -> None:
    """Of widths that the multiplication wants padded."""
    monkeypatch.setattr(fp8, "is_served", lambda device, dtype: True)  # as on a GPU that can
    config = pamm.PammConfig("sampled", ratio, directions=directions)
    eager, target = converted(config), converted(config)
    compiled = torch.compile(target, fullgraph=True)
    x = torch.randn(2, 20, 16, device=DEVICE)
    gradients = []
    for model in (eager, compiled):
        with torch.autocast(DEVICE.type, torch.bfloat16):
            y = model(x)
        y.float().square().sum().backward()
    for one, other in zip(eager.parameters(), target.parameters(), strict=True):
        assert one.grad is not None
        gradients.append((one.grad, other.grad))
    # What bf16 rounds otherwise before it, 8 bits may round to another number.
    assert all(torch.allclose(a, b, atol=0.2 * float(a.abs().max())) for a, b in gradients)  # type: ignore[arg-type]


def test_project_passes_opcheck() -> None:
    x, carried = torch.randn(60, 24, device=DEVICE).bfloat16(), torch.eye(24, 6, device=DEVICE)
    drawn = torch.randperm(24, device=DEVICE)[:3]
    library.opcheck(torch.ops.pamm.project.default, (x, carried, drawn))


def test_refresh_passes_opcheck() -> None:
    """Its mutations are declared; its count is read, so it cannot be traced with symbols."""
    carried, x = torch.eye(24, 7, device=DEVICE), torch.randn(60, 24, device=DEVICE)
    passes = torch.zeros(1, dtype=torch.int64)
    library.opcheck(torch.ops.pamm.refresh.default, (carried, passes, x))


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


@pytest.fixture
def compressions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list with one entry for each X compressed while the test runs."""
    seen: list[int] = []
    original = ops.plain.compress

    def counting(x: torch.Tensor, index: torch.Tensor, tolerance: float | None) -> object:
        seen.append(len(x))
        return original(x, index, tolerance)

    monkeypatch.setattr(ops.plain, "compress", counting)
    return seen


def converted(config: pamm.PammConfig = CONFIG, width: int = 16) -> Model:
    torch.manual_seed(0)
    model = Model(width).to(DEVICE)
    example = torch.randn(2, 20, width, device=DEVICE) if config.recomputes else None
    pamm.convert(model, config, example=example)
    return model


def step(
    model: torch.nn.Module, target: Model, number: int, tokens: int = 20
) -> list[torch.Tensor]:
    """One training step of ``model``; gradients of ``target``, whose parameters it uses."""
    pamm.seek(target, number)
    target.zero_grad()
    width = target.head.in_features
    x = torch.randn(2, tokens, width, generator=torch.Generator().manual_seed(number)).to(DEVICE)
    model(x).square().sum().backward()
    return [parameter.grad.clone() for parameter in target.parameters()]


@pytest.mark.parametrize("method", ["pamm", "subspace", "uniform_crs", "compact"])
def test_a_compiled_model_gets_the_gradients_of_the_eager_one(method: str) -> None:
    config = pamm.PammConfig(method, ratio=1 / 8)
    eager, target = converted(config), converted(config)
    compiled = torch.compile(target, fullgraph=True)
    for number in range(3):
        for one, other in zip(
            step(eager, eager, number), step(compiled, target, number), strict=True
        ):
            assert torch.allclose(one, other, atol=1e-4)


@pytest.mark.parametrize("method", ["pamm", "subspace"])
def test_no_recompilation_over_ten_steps_and_one_for_a_changed_length(method: str) -> None:
    counter = CompileCounterWithBackend("inductor")
    target = converted(pamm.PammConfig(method, ratio=1 / 8))
    compiled = torch.compile(target, fullgraph=True, backend=counter)
    for number in range(10):
        step(compiled, target, number)
    assert counter.frame_count == 1
    for tokens in (24, 32, 36, 20):
        step(compiled, target, 10, tokens)
    assert counter.frame_count == 2


@pytest.mark.parametrize("method", ["pamm", "subspace", "uniform_crs", "compact", "sampled"])
def test_models_of_several_ratios_compile_in_one_process(method: str) -> None:
    """Once a number has changed, the compiler makes a symbol of it."""
    for ratio in (1 / 8, 1 / 2, 3 / 8):
        config = pamm.PammConfig(method, ratio=ratio)
        eager, target = converted(config, width=64), converted(config, width=64)
        compiled = torch.compile(target, fullgraph=True, backend="aot_eager")
        for tokens in (20, 24):
            one, other = step(eager, eager, 0, tokens), step(compiled, target, 0, tokens)
            assert all(torch.allclose(*pair, atol=1e-4) for pair in zip(one, other, strict=True))


@pytest.mark.skipif(DEVICE.type == "cuda", reason="counts calls of the plain path")
def test_a_compiled_group_compresses_once(compressions: list[int]) -> None:
    target = converted()
    compiled = torch.compile(target, fullgraph=True)
    for number in range(3):
        compressions.clear()
        step(compiled, target, number)
        assert compressions == [40, 40]  # two blocks


def test_every_compiled_step_draws_anew_also_without_seek() -> None:
    target = converted()
    compiled = torch.compile(target, fullgraph=True)
    x = torch.randn(2, 20, 16, device=DEVICE)
    seen = []
    for _ in range(3):
        target.zero_grad()
        compiled(x).square().sum().backward()
        seen.append(target.layers[0].attention.q_proj.weight.grad.clone())
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])
    assert groups(target)[0].stream.position == 3


def test_a_partly_frozen_group_still_draws_anew() -> None:
    target = converted()
    for layer in target.layers:
        layer.attention.q_proj.requires_grad_(False)
    compiled = torch.compile(target, fullgraph=True)
    x = torch.randn(2, 20, 16, device=DEVICE)
    seen = []
    for _ in range(2):
        target.zero_grad()
        compiled(x).square().sum().backward()
        seen.append(target.layers[0].attention.k_proj.weight.grad.clone())
    assert not torch.equal(*seen)


class Readers(torch.nn.Module):
    """Three layers that read one X, called in an order of their own."""

    def __init__(self, order: tuple[str, ...]) -> None:
        super().__init__()
        self.order = order
        for name in ("query", "key", "value"):
            self.add_module(name, torch.nn.Linear(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.get_submodule(name)(x) for name in self.order])


@pytest.mark.skipif(DEVICE.type == "cuda", reason="counts calls of the plain path")
@pytest.mark.parametrize(
    ("order", "off"),
    [
        (("query", "key", "value"), None),
        (("key", "value", "query"), None),
        (("key", "value"), None),
        (("query", "key", "value"), "query"),
    ],
)
def test_whichever_reader_comes_first_draws(
    order: tuple[str, ...], off: str | None, compressions: list[int]
) -> None:
    """Once in a forward pass, if q is called last, or not at all, or in eval mode."""
    torch.manual_seed(0)
    eager = Readers(order)
    target = copy.deepcopy(eager)
    for model in (eager, target):
        pamm.convert(model, CONFIG)  # by names alone
        if off:
            model.get_submodule(off).eval()
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(target, fullgraph=True, backend=counter)
    for number in range(4):
        x = torch.randn(40, 16, generator=torch.Generator().manual_seed(number))
        for model, run in ((eager, eager), (target, compiled)):
            model.zero_grad()
            compressions.clear()
            run(x).square().sum().backward()
            assert compressions == [40]
        for one, other in zip(eager.parameters(), target.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None)
            assert one.grad is None or torch.allclose(one.grad, other.grad, atol=1e-4)
    assert groups(target)[0].stream.position == 4
    # Once more where a reader that trains is not called: then a pass ends only with the next one.
    assert counter.frame_count == (1 if len(order) == 3 else 2)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="counts calls of the plain path")
def test_one_draw_also_after_a_change_of_who_takes_part(compressions: list[int]) -> None:
    target = Readers(("query", "key", "value"))
    pamm.convert(target, CONFIG)
    compiled = torch.compile(target, fullgraph=True, backend="aot_eager")
    passes = 0
    for change in (
        lambda: target.query.eval(),
        lambda: target.query.train(),
        lambda: target.query.requires_grad_(False),
        lambda: target.query.requires_grad_(True),
    ):
        change()
        for _ in range(2):
            compressions.clear()
            compiled(torch.randn(40, 16)).square().sum().backward()
            passes += 1
            assert compressions == [40]
            assert groups(target)[0].stream.position == passes


@pytest.mark.skipif(DEVICE.type == "cuda", reason="counts calls of the plain path")
def test_a_partly_frozen_group_in_a_checkpoint_compiles(compressions: list[int]) -> None:
    target = Readers(("query", "key", "value"))
    pamm.convert(target, CONFIG)
    target.query.requires_grad_(False)

    def run(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(target, x, use_reentrant=False)  # type: ignore[return-value]

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for passes in (1, 2):
        compiled(torch.randn(40, 16, requires_grad=True)).square().sum().backward()
        assert groups(target)[0].stream.position == passes


def test_recomputing_compiles_and_is_exact() -> None:
    torch.manual_seed(0)
    exact = Model().to(DEVICE)
    target = copy.deepcopy(exact)
    x = torch.randn(2, 20, 16, device=DEVICE)
    pamm.convert(target, pamm.PammConfig("recompute"), example=x)
    compiled = torch.compile(target, fullgraph=True)
    for number in range(2):
        torch.manual_seed(number)
        x = torch.randn(2, 20, 16, device=DEVICE)
        for model, own in ((exact, exact), (compiled, target)):
            own.zero_grad()
            model(x).square().sum().backward()
        for one, other in zip(exact.parameters(), target.parameters(), strict=True):
            assert torch.allclose(one.grad, other.grad, atol=1e-4)


class RMSNorm(torch.nn.Module):
    """As models of Transformers write it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def test_a_compiled_norm_is_made_again_without_another_sum() -> None:
    """What it keeps of X is one number a token, as exact training does besides X."""
    target = Model(layers=1).to(DEVICE)
    target.layers[0].norm, target.layers[0].mlp_norm = RMSNorm(), torch.nn.Identity()
    x = torch.randn(2, 20, 16, device=DEVICE).requires_grad_()
    pamm.convert(target, pamm.PammConfig("recompute"), example=x)
    compiled = torch.compile(target, fullgraph=True)
    compiled(x).sum().backward()
    with saved_tensors() as saved:
        compiled(x)
    assert sum(tensor.shape == (2, 20, 1) for tensor in saved) == 1
    plain = torch.compile(copy.deepcopy(target), fullgraph=True)
    pamm.revert(plain._orig_mod)
    with saved_tensors() as exact:
        plain(x)
    kept, before = (sum(t.numel() for t in tensors) for tensors in (saved, exact))
    assert kept <= before - x.numel()


@pytest.mark.parametrize("method", ["pamm", "recompute", "sampled"])
def test_x_that_does_not_lie_evenly_is_not_kept_in_a_compiled_graph(method: str) -> None:
    """Nor a copy of it, which its readers need."""
    exact = Model(layers=1).to(DEVICE)
    exact.layers[0].norm = RMSNorm()
    x = torch.randn(2, 16, 20, device=DEVICE).mT.requires_grad_()
    kept = []
    for model in (exact, copy.deepcopy(exact)):
        if model is not exact:
            pamm.convert(model, pamm.PammConfig(method), example=x.detach())
        compiled = torch.compile(model, fullgraph=True)
        compiled(x).sum().backward()
        with saved_tensors() as saved:
            compiled(x)
        kept.append(saved_bytes(saved, list(model.parameters())))
    assert kept[0] - kept[1] > x.nbytes * 0.7


@pytest.mark.parametrize("directions", [0, 4])
def test_sampling_compiles_draws_what_eager_draws_and_keeps_no_x(directions: int) -> None:
    config = pamm.PammConfig("sampled", ratio=1 / 2, directions=directions)
    x = torch.randn(2, 20, 16, device=DEVICE)
    kept, models = {}, {}
    for name in ("exact", "eager", "compiled"):
        torch.manual_seed(0)
        target = Model(layers=3).to(DEVICE)
        if name != "exact":
            pamm.convert(target, config, example=x)
        model = target if name == "eager" else torch.compile(target, fullgraph=True)
        model(x).sum().backward()
        with saved_tensors() as saved:
            y = model(x)
        kept[name] = sum(tensor.numel() for tensor in saved)
        models[name] = model, target
        del y
    # The first block's input needs no gradient, so that its X is kept.
    held = 2 * (x.numel() - directions * x.shape[-1])
    assert kept["compiled"] <= kept["exact"] - held
    for number in range(3):
        one, other = (step(*models[name], number) for name in ("eager", "compiled"))
        assert all(torch.allclose(*pair, atol=1e-4) for pair in zip(one, other, strict=True))


def test_the_functional_layer_compiles() -> None:
    stream = pamm.Stream()
    weight = torch.randn(8, 16, device=DEVICE, requires_grad=True)

    @torch.compile(fullgraph=True)
    def layer(x: torch.Tensor) -> torch.Tensor:
        return pamm.linear(x, weight, config=CONFIG, stream=stream)

    x = torch.randn(40, 16, device=DEVICE)
    eager = pamm.Stream()
    for _ in range(2):
        (ours,) = torch.autograd.grad(layer(x).square().sum(), weight)
        y = pamm.linear(x, weight, config=CONFIG, stream=eager)
        (expected,) = torch.autograd.grad(y.square().sum(), weight)
        assert torch.allclose(ours, expected, atol=1e-4)


@pytest.mark.parametrize(
    ("method", "dtype"),
    [
        ("pamm", torch.float16),
        ("pamm", torch.bfloat16),
        ("subspace", torch.bfloat16),
        ("sampled", torch.bfloat16),
    ],
)
def test_compiles_under_autocast(method: str, dtype: torch.dtype) -> None:
    target = converted(pamm.PammConfig(method, ratio=1 / 4))
    compiled = torch.compile(target, fullgraph=True)
    with torch.autocast(DEVICE.type, dtype):
        y = compiled(torch.randn(2, 20, 16, device=DEVICE))
    y.float().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in target.parameters())


def test_compiles_with_activation_checkpointing() -> None:
    from torch.utils.checkpoint import checkpoint

    eager, target = converted(), converted()
    x = torch.randn(2, 20, 16, device=DEVICE)

    def run(model: Model, x: torch.Tensor) -> torch.Tensor:
        for layer in model.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return model.head(x)

    compiled = torch.compile(run, fullgraph=True)
    compiled(target, x).square().sum().backward()
    eager(x).square().sum().backward()
    for (name, one), other in zip(eager.named_parameters(), target.parameters(), strict=True):
        if "q_proj.weight" not in name and "k_proj" not in name and "v_proj" not in name:
            assert torch.allclose(one.grad, other.grad, atol=1e-4), name
        assert other.grad.isfinite().all()


def test_copies_of_a_compiled_model_are_independent() -> None:
    target = converted()
    compiled = torch.compile(target, fullgraph=True)
    step(compiled, target, 0)
    twin = copy.deepcopy(target)
    step(compiled, target, 1)
    assert groups(twin)[0].stream.position == 1


@pytest.mark.skipif(DEVICE.type == "cuda", reason="counts calls of the plain path")
def test_a_compiled_group_encodes_and_refreshes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    original = ops.subspace.encode
    monkeypatch.setattr(
        ops.subspace, "encode", lambda z, drawn: (seen.append(len(z)), original(z, drawn))[1]
    )
    target = converted(pamm.PammConfig("subspace"))
    compiled = torch.compile(target, fullgraph=True)
    for number in range(3):
        seen.clear()
        step(compiled, target, number)
        assert seen == [40, 40]  # two blocks
        assert [int(group.method.passes) for group in groups(target)] == [number + 1] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["pamm", "subspace"])
def test_cuda_graphs_run_and_draw_anew(method: str) -> None:
    target = converted(pamm.PammConfig(method, ratio=1 / 8))
    compiled = torch.compile(target, fullgraph=True, mode="reduce-overhead")
    x = torch.randn(2, 20, 16, device=DEVICE)
    seen = []
    for _ in range(6):
        torch.compiler.cudagraph_mark_step_begin()
        target.zero_grad()
        compiled(x).square().sum().backward()
        seen.append(target.layers[0].attention.q_proj.weight.grad.clone())
    assert len({tuple(grad.flatten().tolist()) for grad in seen}) == 6


def test_blocks_compiled_one_by_one_share_their_graph() -> None:
    """As trainers do for long models: what differs between blocks must not be a constant."""
    counter = CompileCounterWithBackend("aot_eager")
    torch.manual_seed(0)
    target = Model(layers=4).to(DEVICE)
    pamm.convert(target, CONFIG)
    for layer in target.layers:
        layer.compile(fullgraph=True, backend=counter)
    for number in range(2):
        step(target, target, number)
    assert counter.frame_count == 2  # the first block's input needs no gradient
    grads = [layer.attention.q_proj.weight.grad for layer in target.layers]
    assert all(grad.norm() > 0 for grad in grads)
