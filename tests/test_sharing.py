"""One compression for each group and forward pass, and never a stale one."""

import copy
import gc
import pickle
import threading

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pamm
from pamm.nn import groups
from tests.helpers import (
    NAMES,
    Attention,
    Model,
    counted_compressions,
    pamm_layers,
    saved_bytes,
    saved_tensors,
    tensor_with_finaliser,
)

CONFIG = pamm.PammConfig("pamm", 1 / 8)


@pytest.fixture
def attention() -> Attention:
    attention = Attention()
    pamm.convert(attention, CONFIG)
    return attention


def project(attention: Attention, x: Tensor, names: tuple[str, ...] = NAMES) -> list[Tensor]:
    return [getattr(attention, name)(x) for name in names]


def test_one_compression_serves_q_k_and_v(attention: Attention) -> None:
    with counted_compressions(groups(attention)) as shapes:
        attention(torch.randn(2, 20, 16)).sum().backward()
    assert shapes == [(40, 16)]


def test_the_group_saves_one_state(attention: Attention) -> None:
    x = torch.randn(40, 16)
    with saved_tensors() as saved:
        outputs = project(attention, x)
    predicted = groups(attention)[0].method.state_bytes(40, 16, torch.float32)
    assert saved_bytes(saved, list(attention.parameters())) == predicted
    del outputs


def test_gradients_use_the_same_draw_for_all_three(attention: Attention) -> None:
    """The weight gradients of equal layers under equal output gradients are equal."""
    x = torch.randn(40, 16)
    for y in project(attention, x):
        y.backward(torch.ones(40, 16))
    q, k, v = (getattr(attention, name).weight.grad for name in NAMES)
    assert torch.equal(q, k)
    assert torch.equal(q, v)


def test_a_second_forward_of_the_same_tensor_draws_anew(attention: Attention) -> None:
    x = torch.randn(40, 16)
    with counted_compressions(groups(attention)) as shapes:
        first, second = project(attention, x), project(attention, x)
    assert len(shapes) == 2
    torch.stack(first).sum().backward()
    before = attention.q_proj.weight.grad.clone()
    torch.stack(second).sum().backward()
    assert not torch.equal(attention.q_proj.weight.grad - before, before)


def test_two_forwards_before_one_backward(attention: Attention) -> None:
    """Both graphs hold their own state; the gradients are those of two separate passes."""
    one, two = torch.randn(40, 16), torch.randn(40, 16)
    outputs = [sum(y.sum() for y in project(attention, x)) for x in (one, two)]
    sum(outputs).backward()  # type: ignore[union-attr]
    together = attention.k_proj.weight.grad.clone()

    pamm.seek(attention, 0)
    attention.zero_grad()
    for x in (one, two):
        sum(y.sum() for y in project(attention, x)).backward()  # type: ignore[union-attr]
    assert torch.equal(attention.k_proj.weight.grad, together)


def test_an_in_place_change_between_q_and_k_is_noticed(attention: Attention) -> None:
    x = torch.randn(40, 16)
    with counted_compressions(groups(attention)) as shapes:
        attention.q_proj(x)
        x.mul_(2)
        attention.k_proj(x)
        attention.v_proj(x)
    assert len(shapes) == 2


def test_an_equal_but_different_tensor_is_not_the_same_x(attention: Attention) -> None:
    x = torch.randn(40, 16)
    with counted_compressions(groups(attention)) as shapes:
        attention.q_proj(x)
        attention.k_proj(x.clone())
        attention.v_proj(x.view(40, 16))
    assert len(shapes) == 3


def test_a_new_tensor_at_the_address_of_a_dead_one_is_not_the_same_x(attention: Attention) -> None:
    memory = np.ones((400, 16), np.float32)
    x = torch.from_numpy(memory)
    attention.q_proj(x)
    address = x.data_ptr()
    del x
    with counted_compressions(groups(attention)) as shapes:
        other = torch.from_numpy(memory)
        assert other.data_ptr() == address
        attention.k_proj(other)
    assert len(shapes) == 1


def test_a_change_of_autocast_between_q_and_k_is_noticed(attention: Attention) -> None:
    x = torch.randn(40, 16)
    with counted_compressions(groups(attention)) as shapes:
        attention.q_proj(x)
        with torch.autocast("cpu", torch.bfloat16):
            assert attention.k_proj(x).dtype == torch.bfloat16
    assert len(shapes) == 2


def test_under_autocast_the_group_compresses_once_and_saves_no_cast_of_x() -> None:
    """Exact training saves a bf16 copy of X for each of q, k and v here."""
    attention = Attention()
    x = torch.randn(40, 16, requires_grad=True) * 1  # autocast caches the casts of leaves
    with torch.autocast("cpu", torch.bfloat16), saved_tensors() as exact:
        kept = project(attention, x)
    pamm.convert(attention, CONFIG)
    with (
        torch.autocast("cpu", torch.bfloat16),
        saved_tensors() as compressed,
        counted_compressions(groups(attention)) as shapes,
    ):
        also_kept = project(attention, x)
    assert len(shapes) == 1
    weights = 3 * 16 * 16 * 2  # the bf16 casts of W, which both save
    assert saved_bytes(exact, []) == 3 * 40 * 16 * 2 + weights
    predicted = groups(attention)[0].method.state_bytes(40, 16, torch.bfloat16)
    assert saved_bytes(compressed, []) == predicted + weights
    del kept, also_kept


def test_cross_attention_shares_between_the_readers_of_the_other_tensor(
    attention: Attention,
) -> None:
    x, encoder = torch.randn(10, 16), torch.randn(30, 16)
    with counted_compressions(groups(attention)) as shapes:
        attention.q_proj(x)
        attention.k_proj(encoder)
        attention.v_proj(encoder)
    assert shapes == [(10, 16), (30, 16)]


def test_a_group_of_which_only_some_layers_run_lets_go_when_x_dies(attention: Attention) -> None:
    """Layers that share another layer's keys call only q."""
    x, freed = tensor_with_finaliser((40, 16))
    attention.q_proj(x)
    group = groups(attention)[0]
    assert group._currents.of
    del x
    assert freed
    assert not group._currents.of


def test_nothing_is_held_after_the_last_reader(attention: Attention) -> None:
    x = torch.randn(40, 16)
    outputs = project(attention, x)
    group = groups(attention)[0]
    assert not group._currents.of
    del outputs


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copied_model_shares_within_itself_only(attention: Attention, copied: object) -> None:
    attention.q_proj(torch.randn(40, 16))  # leaves a current state, which is not copied
    twin = copied(attention)  # type: ignore[operator]
    assert len(groups(twin)) == 1
    assert groups(twin)[0] is not groups(attention)[0]
    with counted_compressions(groups(twin)) as shapes:
        project(twin, torch.randn(40, 16))
    assert len(shapes) == 1
    # It continues the same stream.
    x = torch.randn(40, 16)
    for model in (attention, twin):
        model.zero_grad()
        pamm.seek(model, 5)
        model(x).sum().backward()
    assert torch.equal(attention.q_proj.weight.grad, twin.q_proj.weight.grad)


def test_threads_do_not_share_a_state(attention: Attention) -> None:
    """Two forward passes may run at the same time."""
    x = torch.randn(40, 16)
    attention.q_proj(x)  # k and v of this thread are still to come
    others: list[object] = []
    thread = threading.Thread(target=lambda: others.append(attention.k_proj(x).grad_fn))
    with counted_compressions(groups(attention)) as count:
        thread.start()
        thread.join()
        assert len(count) == 1, "the other thread compresses for itself"
        attention.k_proj(x)
        assert len(count) == 1, "and this one goes on with what it has"
    assert others[0] is not None


def test_no_reference_cycle_keeps_activations_alive() -> None:
    model = Model()
    pamm.convert(model, CONFIG)
    gc.collect()
    gc.disable()
    try:
        x, freed = tensor_with_finaliser((2, 20, 16))
        model(x).sum().backward()
        del x
        assert freed
    finally:
        gc.enable()


def test_one_attention_used_by_several_layers_compresses_once_for_each() -> None:
    """ALBERT applies one block many times."""
    block = Attention()
    model = nn.Sequential(block, block, block)
    pamm.convert(model, CONFIG)
    assert len(pamm_layers(model)) == 3
    with counted_compressions(groups(model)) as shapes:
        model(torch.randn(2, 20, 16)).sum().backward()
    assert len(shapes) == 3
