"""What a fine-tuning of a vision-language model is."""

import dataclasses
from typing import Any, ClassVar, Self

from pamm.config import PammConfig, check_keys, read_mapping, whole_number
from pamm.errors import PammError
from pamm.recipes.finetuning.settings import FinetuneConfig
from pamm.recipes.settings import Arm, positive, shipped

DRAWN = "drawn"
LORA_KEYS = ("r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "use_dora", "bias")
_OF_A_METHOD = ("ratio", "tolerance", "directions", "fp8")


@dataclasses.dataclass(frozen=True)
class VlmArm(Arm):
    """An arm whose vision tower may keep its inputs in another way than the rest.

    Written as an arm, with what differs in the vision tower under ``vision``:
    ``{method: pamm, ratio: 1/512, vision: {ratio: 1/128}}``.

    Args:
        vision: of the vision tower; ``None`` takes ``config``.
    """

    vision: PammConfig | None = None

    @property
    def towers(self) -> dict[str, PammConfig]:
        """How inputs are kept in the language model and in the vision tower."""
        return {"language": self.config, "vision": self.vision or self.config}

    @property
    def is_exact(self) -> bool:
        """Whether the model stays as it is."""
        return all(config.method == "exact" for config in self.towers.values())

    @property
    def approximates(self) -> bool:
        """Whether some gradient is approximate, in either tower."""
        return not all(config.is_exact for config in self.towers.values())

    def to_dict(self) -> dict[str, Any]:
        """Plain values; what the vision tower shares with the rest is left out."""
        values = super().to_dict()
        if self.vision is None or self.vision == self.config:
            return values
        return {**values, "vision": self.vision.to_dict()}

    @classmethod
    def from_dict(cls, name: str, values: object, seed: int) -> Self:
        """Inverse of ``to_dict``."""
        if not isinstance(values, dict) or "vision" not in values:
            made = Arm.from_dict(name, values, seed)
            return cls(name, made.config, made.lr, made.lr_factor, made.targets)
        common = {key: value for key, value in values.items() if key != "vision"}
        if not isinstance(values["vision"], dict):
            raise PammError(
                f"vision of arm {name!r} is {values['vision']!r}; write {{ratio: 1/128}}."
            )
        keys = [field.name for field in dataclasses.fields(PammConfig)]
        check_keys(values["vision"], keys, f"vision of arm {name!r}")  # rates are the arm's
        made = Arm.from_dict(name, common, seed)
        if values["vision"].get("method", made.config.method) != made.config.method:
            # The other one's numbers mean nothing to it.
            common = {key: common[key] for key in common if key not in _OF_A_METHOD}
        vision = Arm.from_dict(name, {**common, **values["vision"]}, seed)
        return cls(name, made.config, made.lr, made.lr_factor, made.targets, vision.config)


@dataclasses.dataclass(frozen=True, kw_only=True)
class VlmConfig(FinetuneConfig):
    """Fine-tunings of one image-text-to-text model on images by class, tuned alike, with seeds.

    Each image becomes a question that lists the classes; the answer is the class's name. The loss
    is on the answer alone. A prediction is the answer that greedy decoding gives when it may only
    spell the names: always one of the classes, for the price of a few tokens an image. Rates are
    chosen with the first seed by the macro F1 of the validation images, in which arms are compared.

    Args, besides those of ``FinetuneConfig``:
        model: a name on the hub or a folder, with a processor; or a YAML or JSON file with keys of
            ``LlavaConfig``, or ``small-pixtral``: a Pixtral with random weights and a tokenizer
            made of the question's words.
        data: a folder with CLASS/*.jpg, or with train/CLASS and validation/CLASS; or ``drawn``.
        lora: keys of ``peft.LoraConfig``; q, k and v of both towers without ``target_modules``.
            ``None`` trains all weights.
        image_size: pixels of each side, to which images are scaled; ``None`` leaves the scaling to
            the processor (a model of a file: its own ``image_size``).
        validation_share: of a folder's images, where they are not divided.
        batch_size: images in one forward pass on a device.
        accumulation: forward passes in a step.
    """

    lrs: tuple[float, ...] = (1e-4,)
    lr_factors: tuple[float, ...] = (1.0,)
    epochs: float = 1.0
    batch_size: int = 1
    accumulation: int = 1
    lora: dict[str, Any] | None = None
    image_size: int | None = None
    validation_share: float = 0.2

    arm: ClassVar[type[Arm]] = VlmArm

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_number("accumulation", self.accumulation, least=1)
        if self.image_size is not None:
            whole_number("image_size", self.image_size, least=8)
        share = positive("validation_share", self.validation_share)
        if share >= 1:
            raise PammError(f"validation_share is {share:g}; give a number below 1.")
        object.__setattr__(self, "validation_share", share)
        for arm in self.arms:
            if not isinstance(arm, VlmArm):
                raise PammError(f"arm {arm.name!r} is {type(arm).__name__}; give a VlmArm.")
        if self.lora is None:
            return
        if not isinstance(self.lora, dict):
            raise PammError(f"lora is {self.lora!r}; write {{r: 128, lora_alpha: 128}}, or null.")
        check_keys(self.lora, list(LORA_KEYS), "lora")
        whole_number("r of lora", self.lora.get("r", 8), least=1)

    @property
    def from_scratch(self) -> dict[str, Any] | None:
        """Keys of ``LlavaConfig`` if the model is made of a file; else None."""
        path = shipped("models", self.model, or_on_the_hub=True)
        is_file = path.suffix.lower() in (".json", ".yaml", ".yml")
        return read_mapping(path) if is_file else None
