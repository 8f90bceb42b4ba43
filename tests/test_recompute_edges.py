"""Computing X again where backward is unlike forward: other strides, autocast, weights, order."""

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import pamm
from pamm.recomputation import Recomputation

METHODS = pytest.mark.parametrize("method", ["recompute", "sampled"])


class Projections(nn.Module):
    """q, k and v that read a norm, behind a layer."""

    def __init__(self, norm: nn.Module, n: int = 8, bias: bool = True) -> None:
        super().__init__()
        self.before, self.norm, self.is_checkpointed = nn.Linear(n, n), norm, False
        self.q, self.k, self.v = (nn.Linear(n, n, bias) for _ in range(3))

    def attention(self, x: Tensor) -> Tensor:
        return torch.softmax(self.q(x) @ self.k(x).mT, -1) @ self.v(x)

    def forward(self, h: Tensor) -> Tensor:
        x = self.norm(self.before(h))
        if self.is_checkpointed:
            return checkpoint(self.attention, x, use_reentrant=False)  # type: ignore[return-value]
        return self.attention(x)


class Scale(nn.Module):
    """Keeps the strides of what it gets."""

    def __init__(self, n: int = 8) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(n))

    def forward(self, h: Tensor) -> Tensor:
        return h * self.weight


class Product(Scale):
    """``torch.prod`` is in fp32 under autocast on the CPU."""

    def forward(self, h: Tensor) -> Tensor:
        return h / torch.prod(1 + h.abs(), -1, keepdim=True) * self.weight


class Steps(Scale):
    """An RMSNorm in operations of its own: several tensors are kept for its backward."""

    def forward(self, h: Tensor) -> Tensor:
        return self.weight * (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6))


def twins(model: nn.Module, x: Tensor, method: str = "recompute") -> tuple[nn.Module, nn.Module]:
    """The model as it is, and converted."""
    ratio = 1.0 if method == "sampled" else None
    converted = copy.deepcopy(model)
    pamm.convert(converted, pamm.PammConfig(method, ratio), example=x)  # type: ignore[arg-type]
    return model, converted


def assert_same_gradients(models: tuple[nn.Module, nn.Module]) -> None:
    exact, ours = (dict(model.named_parameters()) for model in models)
    for name, parameter in exact.items():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, ours[name].grad), name  # type: ignore[arg-type]


def test_x_has_its_strides_again_whatever_hooks_made_of_the_norms_input() -> None:
    class Columns(nn.Module):
        """Reads column-major rows, as of a convolution."""

        def __init__(self) -> None:
            super().__init__()
            self.norm = Scale()
            self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, h: Tensor) -> Tensor:
            x = self.norm(h * 1)
            return self.q(x) * self.k(x) + self.v(x)

    h = torch.randn(8, 5).t().requires_grad_()
    models = twins(Columns(), h)
    for model in models:
        # Not the weights': the product with a weight in another layout has other last bits.
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda kept: kept.contiguous() if kept.shape == h.shape else kept, lambda kept: kept
        )
        with hooks:
            loss = model(h).square().sum()
        loss.backward()
    assert_same_gradients(models)


@METHODS
def test_x_is_made_again_under_the_autocast_of_forward(method: str) -> None:
    x = torch.randn(2, 32, 8)
    models = twins(Projections(Product()), x, method)
    for model in models:
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
        y.float().square().sum().backward()
    assert_same_gradients(models)


@METHODS
@pytest.mark.parametrize("of", ["norm", "q"])
def test_a_weight_that_changes_before_backward_is_an_error(method: str, of: str) -> None:
    x = torch.randn(2, 5, 8)
    for model in twins(Projections(nn.LayerNorm(8)), x, method):
        loss = model(x).square().sum()
        with torch.no_grad():
            model.get_submodule(of).weight.mul_(2)  # type: ignore[operator,union-attr]
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@METHODS
def test_a_norms_weight_that_changes_is_an_error_where_autograd_keeps_none(method: str) -> None:
    """h has no gradient here, so that nothing but the recomputation needs the weight."""
    x = torch.randn(2, 5, 8)
    model = twins(Projections(Steps()), x, method)[1]
    model.before.requires_grad_(False)  # type: ignore[union-attr]
    loss = model(x).square().sum()
    with torch.no_grad():
        model.norm.weight.mul_(3)  # type: ignore[operator,union-attr]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@METHODS
def test_parameters_that_stand_in_for_one_call_are_refused_in_backward(method: str) -> None:
    x = torch.randn(2, 5, 8)
    model = twins(Projections(nn.RMSNorm(8)), x, method)[1]
    others = {name: nn.Parameter(1.5 * p.detach()) for name, p in model.named_parameters()}
    loss = torch.func.functional_call(model, others, (x,)).square().sum()
    with pytest.raises(RuntimeError, match="not those of the forward pass"):
        loss.backward()


@METHODS
@pytest.mark.parametrize("training", [True, False])
def test_a_norm_may_be_called_by_keyword(method: str, training: bool) -> None:
    x = torch.randn(2, 5, 8)
    for model in twins(Projections(nn.LayerNorm(8)), x, method):
        model.train(training)
        assert torch.equal(model.norm(input=x), model.norm(x))  # type: ignore[operator]


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h: Tensor, weight: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(h, weight)
        return h * weight

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
        h = ctx.saved_tensors[0]
        weight = ctx.saved_tensors[1]
        return grad * weight, (grad * h).sum((0, 1))


class ReadTwice(Scale):
    """Its backward unpacks what is saved twice."""

    def forward(self, h: Tensor) -> Tensor:
        return _Twice.apply(h, self.weight)  # type: ignore[no-any-return]


@METHODS
def test_a_norm_that_reads_what_it_saved_twice_is_told(method: str) -> None:
    x = torch.randn(2, 5, 8)
    model = twins(Projections(ReadTwice()), x, method)[1]
    with pytest.raises(RuntimeError, match=r"read twice.*exclude"):
        model(x).sum().backward()


class OfDomain(nn.Module):
    """A norm for each domain: which one it is, is said from outside. It notes down what it did."""

    def __init__(self, n: int = 8) -> None:
        super().__init__()
        self.weight, self.domain = nn.Parameter(torch.rand(2, n)), 0
        self.scale: Tensor | None = None
        self.mean, self.calls, self.sum = torch.zeros(()), 0, torch.zeros(())

    def forward(self, h: Tensor) -> Tensor:
        self.mean, self.calls = h.mean(), self.calls + 1
        self.sum += h.detach().sum()
        y = h * self.weight[self.domain]
        return y if self.scale is None else y * self.scale


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [("domain", 0, 1), ("scale", torch.tensor(2.0), torch.tensor(3.0)), ("scale", None, 2.0)],
)
@METHODS
def test_a_norm_is_made_again_with_what_it_was_told(
    method: str, name: str, first: object, second: object
) -> None:
    h = torch.randn(2, 5, 8)
    models = twins(Projections(OfDomain()), h, method)
    for model in models:
        losses = []
        for value in (first, second, first):
            setattr(model.norm, name, value)
            losses.append(model(h).square().sum())
        setattr(model.norm, name, None if name == "scale" else 0)
        sum(losses).backward()  # type: ignore[union-attr]
        assert getattr(model.norm, name) is None or name == "domain"
        assert model.norm.calls == 3
    assert_same_gradients(models)


@METHODS
def test_what_a_norm_was_told_must_not_be_written_to(method: str) -> None:
    h = torch.randn(2, 5, 8)
    _, ours = twins(Projections(OfDomain()), h, method)
    ours.norm.scale = torch.tensor(2.0)
    y = ours(h).square().sum()
    ours.norm.scale.fill_(3.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_no_graph_is_held_by_what_a_norm_notes_down() -> None:
    h = torch.randn(2, 5, 8)
    _, ours = twins(Projections(Scale()), h)
    ours.norm.register_forward_hook(lambda m, _, out: setattr(m, "captured", out))

    def alive() -> int:
        gc.collect()
        return sum(type(each) is Recomputation for each in gc.get_objects())

    before = alive()
    for _ in range(4):
        ours(h).square().sum().backward()
    assert alive() - before <= 1


class Moody(Scale):
    """Does more when it is called a second time."""

    calls = 0

    def forward(self, h: Tensor) -> Tensor:
        Moody.calls += 1
        return super().forward(h if Moody.calls < 2 else h * h)


@pytest.mark.parametrize("parametrized", [False, True])
@METHODS
def test_a_norm_that_computes_something_else_in_backward_is_told(
    method: str, parametrized: bool
) -> None:
    h = torch.randn(2, 5, 8)
    _, ours = twins(Projections(Moody()), h, method)
    if parametrized:
        parametrize.register_parametrization(ours.norm, "weight", nn.Identity())  # type: ignore[arg-type]
    Moody.calls = 0
    with pytest.raises(RuntimeError, match="Moody computes something else in backward"):
        ours(h).square().sum().backward()


@METHODS
def test_x_is_freed_past_full_backward_hooks(method: str) -> None:
    h = torch.randn(3, 20, 8, requires_grad=True)
    models = twins(Projections(Scale()), h, method)
    kept = []
    for model in models:
        for part in model.modules():
            part.register_full_backward_hook(lambda *_: None)
        with Alive() as alive:
            y = model(h)
            kept.append(alive.bytes())
        y.square().sum().backward()
    assert_same_gradients(models)
    assert kept[0] - kept[1] > 0.9 * h.nbytes


@METHODS
def test_copies_in_threads_are_refused(method: str) -> None:
    """What DataParallel does in training; it needs GPUs."""
    _, ours = twins(Projections(Scale()), torch.randn(2, 5, 8), method)
    for part in (ours.norm, ours.q):
        with pytest.raises(pamm.PammError, match="one process for each GPU"):
            part._replicate_for_data_parallel()  # type: ignore[operator]
        with torch.no_grad():
            assert type(part._replicate_for_data_parallel()) is type(part)  # type: ignore[operator]


@METHODS
def test_gradients_of_some_parameters_and_then_of_all(method: str) -> None:
    x = torch.randn(2, 5, 8)
    models = twins(nn.Sequential(*(Projections(Steps()) for _ in range(2))), x, method)
    for model in models:
        loss = model(x).square().sum()
        some = [model[1].norm.weight, model[1].q.weight]  # type: ignore[index]
        torch.autograd.grad(loss, some, retain_graph=True)
        torch.autograd.grad(loss, some[1:], retain_graph=True)
        loss.backward()
    assert_same_gradients(models)


@METHODS
def test_two_passes_of_which_only_the_attention_is_checkpointed(method: str) -> None:
    x = torch.randn(2, 5, 8)
    models = twins(Projections(nn.LayerNorm(8)), x, method)
    for model in models:
        model.is_checkpointed = True  # type: ignore[assignment]
        (model(x).sum() + model(2 * x).square().sum()).backward()
    assert_same_gradients(models)


@METHODS
def test_other_weights_for_one_call_are_those_of_the_gradient(method: str) -> None:
    x = torch.randn(2, 5, 8)
    gradients = []
    for model in twins(Projections(nn.RMSNorm(8)), x, method):
        others = {name: (1.5 * p).detach().requires_grad_() for name, p in model.named_parameters()}
        torch.func.functional_call(model, others, (x,)).square().sum().backward()
        gradients.append({name: other.grad for name, other in others.items()})
    for name, exact in gradients[0].items():
        assert torch.equal(exact, gradients[1][name]), name  # type: ignore[arg-type]


@METHODS
def test_a_norm_that_is_sharded_by_itself_keeps_x(method: str) -> None:
    """Backward finds its weights sharded; one process is enough to see it."""
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    x = torch.randn(2, 5, 8)
    exact, model = twins(Projections(nn.LayerNorm(8)), x, method)
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))  # also where there is a GPU
        fsdp.fully_shard(model.norm, mesh=mesh)
        fsdp.fully_shard(model, mesh=mesh)
        for each in (exact, model):
            each(x).square().sum().backward()
        for parameter, other in zip(exact.parameters(), model.parameters(), strict=True):
            assert torch.equal(parameter.grad, other.grad.full_tensor())  # type: ignore[union-attr]
    finally:
        torch.distributed.destroy_process_group()


def test_x_goes_once_its_readers_have_run() -> None:
    """Also where the module that made it needs nothing for its own backward."""

    class Shift(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            return h + 1

    x = torch.randn(2, 5, 8)
    _, model = twins(Projections(Shift()), x)

    model(x).sum().backward()
    gc.collect()
    alive = [t for t in gc.get_objects() if type(t) is Tensor and t.shape == x.shape]
    assert all(t is x for t in alive)


def test_tensors_without_an_address_are_told_apart() -> None:
    """On ``meta``, and of no tokens, each has the address 0."""
    model = Projections(nn.LayerNorm(8))
    pamm.convert(model, pamm.PammConfig("recompute"), example=torch.randn(2, 5, 8))
    model(torch.empty(2, 0, 8)).sum().backward()
    assert all(p.grad is not None and p.grad.eq(0).all() for p in model.parameters())
    model.to("meta")
    model.zero_grad()
    model(torch.empty(2, 5, 8, device="meta")).sum().backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())


def test_a_source_that_another_part_reads_may_be_taken_back() -> None:
    x = torch.randn(2, 5, 8)
    models = twins(Projections(nn.LayerNorm(8)), x)
    assert pamm.revert(models[1].norm) == 0  # type: ignore[arg-type]
    for model in models:
        model(x).square().sum().backward()
    assert_same_gradients(models)


@pytest.mark.parametrize("add", [torch.Tensor.add, torch.Tensor.add_])
def test_a_norms_input_that_is_written_to_afterwards_is_refused(
    add: Callable[[Tensor, Tensor], Tensor],
) -> None:
    class Residual(Projections):
        def forward(self, h: Tensor) -> Tensor:
            h = self.before(h)
            return add(h, self.attention(self.norm(h)))

    convert = lambda: pamm.convert(  # noqa: E731
        Residual(nn.LayerNorm(8)), pamm.PammConfig("recompute"), example=torch.randn(2, 5, 8)
    )
    if add is torch.Tensor.add:
        assert convert().converted
    else:
        with pytest.raises(pamm.NothingToConvertError, match="takes what is written to afterwards"):
            convert()


@METHODS
def test_under_autocast_each_weight_is_cast_once(method: str) -> None:
    class Count(TorchDispatchMode):
        casts = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.casts += func is torch.ops.aten._to_copy.default and args[0].shape == (8, 8)
            return func(*args, **(kwargs or {}))

    x = torch.randn(2, 5, 8)
    for model in twins(Projections(nn.LayerNorm(8)), x, method):
        with torch.autocast("cpu", torch.bfloat16), Count() as count:
            model(x)
        assert count.casts == 4  # q, k, v and the layer in front


class Alive(TorchDispatchMode):
    """The memory of all tensors that operations inside made."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                self.made.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        return made

    def bytes(self) -> int:
        """Of those that are still there."""
        return sum(size for storage, size in self.made.values() if not storage.expired())


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("layout", ["transposed", "sliced"])
@METHODS
def test_x_that_does_not_lie_evenly_is_freed_too(
    method: str, layout: str, bias: bool, autocast: bool
) -> None:
    """F.linear copies such an X for each of its readers, and keeps the copies (AIMv2)."""

    class Every(Scale):
        def forward(self, h: Tensor) -> Tensor:
            return (h * self.weight)[..., ::2]

    n = 16 if layout == "sliced" else 8
    model = Projections(Every(n) if layout == "sliced" else Scale(n), bias=bias)
    model.before = nn.Identity()
    h = torch.randn(3, n, 20).mT.requires_grad_()  # as a convolution gives it
    models = twins(model, h, method)
    kept = []
    for each in models:
        with Alive() as alive, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = each(h)
            kept.append(alive.bytes())
        y.float().square().sum().backward()
    assert_same_gradients(models)
    one = 3 * 20 * 8 * (2 if autocast else 4)
    assert kept[0] - kept[1] > 2.9 * one


@METHODS
def test_in_a_checkpointed_part_no_cast_of_a_weight_is_kept(method: str) -> None:
    """The hooks of checkpointing get what the layers save besides X."""
    x = torch.randn(1, 4, 64)
    models = twins(Projections(Scale(64), 64), x, method)
    kept = []
    for each in models:
        each.is_checkpointed = True  # type: ignore[assignment]
        with Alive() as alive:
            with torch.autocast("cpu", torch.bfloat16):
                y = each(x)
            kept.append(alive.bytes())
        y.float().square().sum().backward()
    assert_same_gradients(models)
    assert kept[1] < kept[0] + 64 * 64 * 2


class Queries(Projections):
    """Learned queries, which the norm reads as they are."""

    def __init__(self, norm: nn.Module, n: int = 8) -> None:
        super().__init__(norm, n)
        del self.before
        self.queries = nn.Parameter(torch.randn(5, n))

    def forward(self, h: Tensor) -> Tensor:
        return self.attention(self.norm(self.queries)) * h.mean()


@METHODS
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm, Steps])
def test_a_norm_of_a_parameter_is_made_again(norm: Callable[[int], nn.Module], method: str) -> None:
    x = torch.randn(2, 5, 8)
    models = twins(Queries(norm(8)), x, method)
    for model in models:
        model(x).square().sum().backward()
    assert_same_gradients(models)
