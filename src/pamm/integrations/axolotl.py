"""Axolotl: a plugin, and its key in the YAML file.

.. code-block:: yaml

    plugins: [pamm.integrations.axolotl.PammPlugin]
    # Also include, exclude, targets and widen, as for pamm.convert.
    pamm: {method: pamm, ratio: 1/512}
"""

from typing import Any

from axolotl.integrations.base import BasePlugin  # pyright: ignore[reportMissingImports]
from pydantic import BaseModel, field_validator

from pamm.config import PammConfig
from pamm.errors import PammError
from pamm.integrations.transformers import PammCallback

SELECT = ("include", "exclude", "targets", "widen")
"""Keys that are arguments of ``pamm.convert``, not fields of ``PammConfig``."""


class PammArgs(BaseModel):
    """The keys that the plugin adds to Axolotl's."""

    pamm: dict[str, Any] = {}
    """The fields of ``PammConfig``, and what selects layers; the defaults of those left out."""

    @field_validator("pamm")
    @classmethod
    def _is_config(cls, values: dict[str, Any]) -> dict[str, Any]:
        _callback(values)  # a PammError is a ValueError, which Axolotl shows
        return values


def _callback(values: dict[str, Any]) -> PammCallback:
    select = {name: values[name] for name in SELECT if name in values}
    config = {name: value for name, value in values.items() if name not in SELECT}
    return PammCallback(PammConfig.from_dict(config), **select)


class PammPlugin(BasePlugin):
    """Gives Axolotl's trainer a ``PammCallback``."""

    def get_input_args(self) -> str:
        """Where Axolotl finds the keys."""
        return f"{PammArgs.__module__}.{PammArgs.__name__}"

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[Any]:
        """The callback converts the model when the trainer is made, adapters included.

        Raises:
            PammError: if Axolotl computes q, k and v in a fused function of its own.
        """
        if cfg.get("lora_qkv_kernel"):
            raise PammError(
                "lora_qkv_kernel computes q, k and v in a fused function that keeps X itself, "
                "around the layers that PAMM converts. Set lora_qkv_kernel: false."
            )
        return [_callback(dict(cfg.get("pamm") or {}))]
