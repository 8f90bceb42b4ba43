"""LoRA by PEFT under torch.compile: no graph break, PEFT's output, one compression."""

from collections.abc import Iterator

import pytest
import torch

import pamm
from tests.helpers import exact_config, saved_tensors
from tests.tolerances import assert_implementation_error

pytest.importorskip("peft")
from tests.test_adapters import BLOCKS, TOKENS, WIDTH, ids, lora, step

# The compiler warns of its own deprecated parts.
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def test_compiled_as_a_whole() -> None:
    plain, model = lora(), lora()
    pamm.convert(model, exact_config())
    expected, truth = step(plain)
    for each in (plain, model):
        each.compile(backend="aot_eager", fullgraph=True)
    (logits, gradients), (_, same_dtype) = step(model), step(plain)
    assert torch.equal(logits, expected)
    for name, gradient in gradients.items():
        assert_implementation_error(gradient, same_dtype[name], truth[name])


@pytest.mark.parametrize("method", ["recompute", "sampled"])
def test_pefts_fp32_copy_of_an_x_that_is_made_again_is_not_kept(method: str) -> None:
    copies = {}
    for name in ("plain", method):
        model = lora()
        model.enable_input_require_grads()  # else the first X depends on no weight, and is kept
        if name != "plain":
            pamm.convert(model, pamm.PammConfig(method))
        for block in model.get_base_model().model.layers:
            block.compile(backend="aot_eager", fullgraph=True)
        with saved_tensors() as saved:
            model(input_ids=ids())
        shape = (TOKENS, WIDTH)
        copies[name] = sum(t.shape == shape and t.dtype == torch.float32 for t in saved)
    assert copies == {"plain": BLOCKS, method: 0}


def test_an_adapter_added_later() -> None:
    model = lora()
    pamm.convert(model, exact_config())
    model.compile(backend="aot_eager", fullgraph=True)
    step(model)
    model.add_adapter("other", model.peft_config["default"])
    model.set_adapter("other")
    with torch.no_grad():
        model.eval()(ids())
    assert all("other" in n for n in step(model.train())[1])
