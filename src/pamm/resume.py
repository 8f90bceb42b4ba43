"""What a resumed run needs to be the one that was interrupted: its draws, and what groups carry."""

from collections import Counter
from collections.abc import Mapping

from torch import Tensor, nn

from pamm.errors import PammError
from pamm.nn import check_model, groups, is_trained
from pamm.stream import check_step
from pamm.surgery import is_converted


def seek(model: nn.Module, step: int) -> None:
    """Position the draws of every group at the beginning of training step ``step``.

    Call it before each step and a resumed run draws what the uninterrupted one would have drawn
    (``pamm.integrations.transformers.PammCallback`` does). Without it draws follow one another
    from the conversion on. Directions it does not restore: :func:`restore_carried` does.

    Raises:
        PammError: if the model is not converted or the step is negative.
    """
    check_model(model)
    number = check_step(step)
    found = groups(model)
    if not (any(is_trained(group.layers) for group in found) or is_converted(model)):
        raise PammError("this model has no PAMM layers; call pamm.convert(model) first.")
    for group in found:
        group.stream.seek(number)


def carried(model: nn.Module) -> dict[str, Tensor]:
    """The tensors that groups carry from step to step: the very ones, to be saved.

    ``"subspace"`` and ``"sampled"`` carry directions, if there are any. They are not in the
    state_dict, whose keys stay those of the exact model. ``PammCallback`` saves them beside each
    checkpoint; :func:`restore_carried` gives them back. Groups of one name (of parts that were
    converted apart, or copied) are numbered in the order of the model's modules.

    Examples:
        >>> import pamm
        >>> model = nn.ModuleDict({name: nn.Linear(8, 8) for name in ("query", "key", "value")})
        >>> report = pamm.convert(model, pamm.PammConfig("subspace"))
        >>> sorted(carried(model))
        ['{query,key,value}.axes', '{query,key,value}.passes']
    """
    check_model(model)
    tensors: dict[str, Tensor] = {}
    seen: Counter[str] = Counter()
    for group in groups(model):
        seen[group.name] += 1
        number = f" {seen[group.name]}" if seen[group.name] > 1 else ""
        for name, tensor in group.method.carried().items():
            tensors[f"{group.name}{number}.{name}"] = tensor
    return tensors


def restore_carried(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Give the groups back what they carried when ``saved`` was made from :func:`carried`.

    Raises:
        PammError: if they carry other things now: groups or shapes differ. Nothing is changed then.

    Examples:
        >>> import pamm
        >>> model = nn.ModuleDict({name: nn.Linear(8, 8) for name in ("query", "key", "value")})
        >>> report = pamm.convert(model, pamm.PammConfig("subspace"))
        >>> saved = {name: tensor.clone() for name, tensor in carried(model).items()}
        >>> restore_carried(model, saved)
    """
    tensors = carried(model)
    if not isinstance(saved, Mapping) or not all(isinstance(t, Tensor) for t in saved.values()):
        raise PammError(
            f"saved is {type(saved).__name__}; give tensors by name, as pamm.carried(model) did. "
            "Read a file first."
        )
    given, needed = ({n: tuple(t.shape) for n, t in each.items()} for each in (saved, tensors))
    if given != needed:
        name = next(n for n in {**needed, **given} if given.get(n) != needed.get(n))
        raise PammError(
            f"what was carried does not belong to this model's groups: {name} is "
            f"{given.get(name, 'missing')} where it was saved and {needed.get(name, 'missing')} "
            "here. Convert with the method, ratio and layers of the run that saved it; to change "
            "them, begin a new run from its weights."
        )
    for name, tensor in tensors.items():
        tensor.copy_(saved[name])
