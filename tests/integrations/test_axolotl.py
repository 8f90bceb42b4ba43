"""Axolotl's plugin, where Axolotl is installed; it is too large for the usual environment."""

from pathlib import Path

import pytest
import yaml

import pamm
from tests.helpers import pamm_layers
from tests.integrations.test_transformers import llama, trainer

pytest.importorskip("axolotl.integrations.base", reason="Axolotl is not installed")

from axolotl.integrations.base import PluginManager
from axolotl.utils.dict import DictDefault

from pamm.integrations.axolotl import PammArgs, PammPlugin


def test_axolotl_loads_the_plugin_by_the_name_in_its_file() -> None:
    manager = PluginManager.get_instance()
    manager.register("pamm.integrations.axolotl.PammPlugin")
    assert manager.get_input_args() == ["pamm.integrations.axolotl.PammArgs"]


def test_the_callback_converts_the_model(tmp_path: Path) -> None:
    model = llama()
    (callback,) = PammPlugin().add_callbacks_pre_trainer(
        DictDefault({"pamm": {"method": "pamm", "ratio": "1/8", "targets": ["attention", "mlp"]}}),
        model,
    )
    trainer(tmp_path, callback, model).train()
    assert callback.config == pamm.PammConfig("pamm", 1 / 8)
    assert len(pamm_layers(model)) == 10  # q, k, v, gate and up of two blocks


def test_the_example_has_keys_that_the_plugin_takes() -> None:
    example = Path(__file__).parents[2] / "examples" / "axolotl.yaml"
    values = yaml.safe_load(example.read_text())
    assert values["plugins"] == ["pamm.integrations.axolotl.PammPlugin"]
    (callback,) = PammPlugin().add_callbacks_pre_trainer(DictDefault(values), llama())
    assert PammArgs(**{"pamm": values["pamm"]})
    assert callback.config.ratio == 1 / 128


def test_a_wrong_key_is_refused_when_the_file_is_read() -> None:
    with pytest.raises(ValueError, match="did you mean 'ratio'"):
        PammArgs(pamm={"rato": 1})


def test_the_fused_kernel_is_refused() -> None:
    with pytest.raises(pamm.PammError, match="lora_qkv_kernel: false"):
        PammPlugin().add_callbacks_pre_trainer(DictDefault({"lora_qkv_kernel": True}), llama())
