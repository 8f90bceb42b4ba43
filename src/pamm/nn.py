"""``nn.Linear`` whose weight gradient comes from a compressed input."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from pamm.functional import cast_like_autocast, linear_from_state
from pamm.sharing import Group


class PammLinear(nn.Linear):
    """An ``nn.Linear`` that keeps a compressed input for its weight gradient.

    y = x W.T + bias, dx and dbias are those of ``nn.Linear`` bit for bit; dW is approximate. Made
    by ``pamm.convert``, which swaps the class of an existing layer: Parameters, hooks, device,
    state_dict keys and optimizers already built stay as they are.

    With the layer in eval mode, its weight frozen or gradients off, it is plain ``nn.Linear``.
    """

    pamm_group: Group
    pamm_member: int

    @staticmethod
    def adopt(layer: nn.Linear, group: Group, member: int) -> None:
        """Turn ``layer`` into a ``PammLinear`` in place, as number ``member`` of ``group``."""
        layer.__class__ = PammLinear
        layer.pamm_group, layer.pamm_member = group, member  # type: ignore[assignment]

    def release(self) -> None:
        """Turn this layer back into a plain ``nn.Linear`` in place."""
        del self.pamm_group, self.pamm_member
        self.__class__ = nn.Linear  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, input: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch m"]:
        """x W.T + bias."""
        if not (self.training and self.weight.requires_grad and torch.is_grad_enabled()):
            return F.linear(input, self.weight, self.bias)
        x, weight, bias = cast_like_autocast(input, self.weight, self.bias)
        state = self.pamm_group.state(self.pamm_member, input, x)
        return linear_from_state(x, weight, bias, self.pamm_group.method, state)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "PammLinear":
        """``.to(device)`` takes the group along: a compiled layer would notice it move later."""
        super()._apply(fn, recurse)
        self.pamm_group.move(self.weight.device)
        return self

    def extra_repr(self) -> str:
        """Shapes, and which group it is in: printing the model shows what was converted."""
        return f"{super().extra_repr()}, group={self.pamm_group.name}"


def groups(model: nn.Module) -> list[Group]:
    """The groups of a converted model, each once, in the order of its modules."""
    found = {id(m.pamm_group): m.pamm_group for m in model.modules() if isinstance(m, PammLinear)}
    return list(found.values())
