"""Parameter groups: the paper trains PAMM's weights at a reduced learning rate."""

import math
from numbers import Real
from typing import Any

from torch import Tensor, nn

from pamm.compressors import Recompute
from pamm.errors import PammError
from pamm.nn import check_model, is_pamm
from pamm.surgery import is_converted


def param_groups(
    model: nn.Module, *, lr: float, lr_factor: float, weight_decay: float = 0.0
) -> list[dict[str, Any]]:
    """Groups for an optimizer: weights with a compressed input get ``lr * lr_factor``.

    The paper pre-trains with ``lr_factor=0.25`` and fine-tunes with 2 or 4; 1 treats all alike.
    Vectors (biases, norm scales) are not decayed, matrices are. Biases of converted layers have
    exact gradients and keep ``lr``, and so do weights of method ``"recompute"``; those of
    ``"exact"``, the control in comparisons, are reduced. Schedulers that scale every group keep the
    factor.

    Args:
        model: converted or not; an unconverted one has no reduced group.
        lr: learning rate, above 0.
        lr_factor: of the weights trained by PAMM, above 0.
        weight_decay: of matrices, 0 or above.

    Returns:
        Up to four groups with keys params, lr, weight_decay and name; empty ones are left out,
        frozen parameters too, and a parameter used twice appears once.

    Raises:
        PammError: if a number is none, or out of range; or for a factor where ``"recompute"`` makes
            all gradients exact.

    Examples:
        >>> [group["lr"] for group in param_groups(nn.Linear(2, 2), lr=1.0, lr_factor=0.25)]
        [1.0, 1.0]
    """
    check_model(model)
    check_positive("lr", lr)
    check_positive("lr_factor", lr_factor)
    if not (_is_number(weight_decay) and weight_decay >= 0):
        raise PammError(f"weight_decay is {weight_decay!r}; give a number, 0 or above.")

    reduced = reduced_weights(model, "lr_factor", lr_factor)
    split: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for parameter in model.parameters():  # yields each parameter once
        if parameter.requires_grad:
            key = (id(parameter) in reduced, parameter.ndim >= 2)
            split.setdefault(key, []).append(parameter)
    return [
        {
            "params": parameters,
            "lr": lr * lr_factor if is_reduced else lr,
            "weight_decay": weight_decay if is_matrix else 0.0,
            "name": f"{'pamm' if is_reduced else 'other'}_{'decay' if is_matrix else 'no_decay'}",
        }
        for (is_reduced, is_matrix), parameters in sorted(split.items(), reverse=True)
    ]


def reduced_weights(model: nn.Module, name: str, factor: float) -> set[int]:
    """Ids of the weights that the factor of this name is for."""
    layers = [module for module in model.modules() if is_pamm(module)]
    found = {id(m.weight) for m in layers if not isinstance(m.pamm_group.method, Recompute)}
    if factor != 1 and not found and is_converted(model):
        raise PammError(
            f"{name} is {factor:g}, and there is no weight that it is for: with method 'recompute' "
            "all gradients are exact. Set it to 1."
        )
    return found


def check_positive(name: str, value: object) -> None:
    """Refuse what is no number above 0."""
    if not (_is_number(value) and 0 < value < math.inf):  # type: ignore[operator]
        raise PammError(f"{name} is {value!r}; give a number above 0.")


def _is_number(value: object) -> bool:
    """Whether it is one; compiled optimizers take rates as tensors."""
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, Real) and not isinstance(value, bool)
