"""What a pre-training run is: one frozen object, read from and written to YAML or JSON."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import yaml

from pamm.config import check_fields, read_mapping, whole_number
from pamm.errors import PammError
from pamm.recipes.settings import Arm, folder_name, number, positive, shipped

PRECISIONS = ("auto", "bf16", "fp32")
ATTENTIONS = ("sdpa", "eager", "flash_attention_2")


@dataclasses.dataclass(frozen=True)
class PretrainConfig:
    """A pre-training run: one text, one model, several arms that differ in nothing else.

    Args:
        name: of the run; its folder in the output folder.
        text: files or folders to train on (txt, jsonl, jsonl.xz, parquet), or data sets of the hub,
            ``hub:NAME``, ``hub:NAME:CONFIG`` or ``hub:NAME:CONFIG:SPLIT``. Those are streamed, and
            no further than the run needs, so that no text is seen twice.
        validation: the same for validation; without it the last 5 % of the text is held out.
        tokenizer: a folder or a name that ``AutoTokenizer`` loads, or a ``tokenizer.json``. Without
            it a byte-level BPE is trained on the text. The paper's is ``google-t5/t5-base``.
        vocabulary: size of the BPE that is trained.
        model: keys of ``transformers.LlamaConfig``; or the path of a JSON or YAML file with them,
            which is read at once; or llama-60m, llama-350m, llama-1b or llama-7b.
        arms: what is compared; see ``Arm``.
        sequence_length: tokens in a sequence.
        batch_size: sequences in one forward pass on one device.
        global_batch: sequences in one step, over all devices and forward passes: a multiple of
            ``batch_size``, which is the default.
        steps: optimizer steps. Warm-up takes the first tenth, then a cosine falls to a tenth.
        lr: peak learning rate of AdamW.
        lr_factor: of the weights trained by PAMM (``pamm.param_groups``).
        weight_decay: of matrices.
        beta2: of AdamW, how much of its mean of squares stays at a step; 0.95 bears larger rates.
        max_grad_norm: gradients are scaled down to this norm.
        precision: ``"bf16"`` (autocast; weights in fp32), ``"fp32"``, or ``"auto"``: bf16 on CUDA.
        attention: ``"sdpa"``, ``"eager"``, or ``"flash_attention_2"`` where that is installed.
        compile: whether blocks, one by one, and the loss run under ``torch.compile``.
        activation_checkpointing: whether blocks are computed again in backward.
        fsdp: whether several processes share weights and optimizer (FSDP2), or have copies (DDP).
        eval_every: steps between two validations; there is one at the end too.
        eval_sequences: how many validation sequences, at most.
        save_every: steps between two checkpoints.
        seed: of weights, batches and draws; the same for all arms.

    Raises:
        PammError: if a value is outside what is allowed.
    """

    name: str
    text: tuple[str, ...]
    model: dict[str, Any] | str
    arms: tuple[Arm, ...]
    steps: int
    lr: float
    validation: tuple[str, ...] = ()
    tokenizer: str | None = None
    vocabulary: int = 4096
    sequence_length: int = 256
    batch_size: int = 8
    global_batch: int | None = None
    lr_factor: float = 1.0
    weight_decay: float = 0.0
    beta2: float = 0.999
    max_grad_norm: float = 1.0
    precision: str = "auto"
    attention: str = "sdpa"
    compile: bool = False
    activation_checkpointing: bool = False
    fsdp: bool = False
    eval_every: int = 100
    eval_sequences: int = 128
    save_every: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        folder_name("name", self.name)
        for key, least in (
            ("steps", 1),
            ("vocabulary", 257),  # 256 bytes and the end of a text
            ("sequence_length", 2),
            ("batch_size", 1),
            ("eval_every", 1),
            ("eval_sequences", 1),
            ("save_every", 1),
            ("seed", 0),
        ):
            whole_number(key, getattr(self, key), least)
        for key in ("lr", "lr_factor", "max_grad_norm"):
            object.__setattr__(self, key, positive(key, getattr(self, key)))
        for key, allowed in (("precision", PRECISIONS), ("attention", ATTENTIONS)):
            if getattr(self, key) not in allowed:
                raise PammError(
                    f"{key} is {getattr(self, key)!r}; choose one of {', '.join(allowed)}."
                )
        if self.attention == "flash_attention_2" and self.precision == "fp32":
            raise PammError(
                "attention is 'flash_attention_2', which computes in bf16, and precision is fp32. "
                "Change one of them."
            )
        for key in ("compile", "activation_checkpointing", "fsdp"):
            if not isinstance(getattr(self, key), bool):
                raise PammError(f"{key} is {getattr(self, key)!r}; give true or false.")
        if self.global_batch is not None:
            whole_number("global_batch", self.global_batch, least=1)
        self.accumulation(processes=1)
        object.__setattr__(self, "weight_decay", number(self.weight_decay))
        if not 0 <= self.weight_decay < math.inf:
            raise PammError(f"weight_decay is {self.weight_decay!r}; give a number, 0 or above.")
        object.__setattr__(self, "beta2", number(self.beta2))
        if not 0 <= self.beta2 < 1:
            raise PammError(f"beta2 is {self.beta2!r}; give a number from 0 to below 1.")
        for key in ("text", "validation"):
            object.__setattr__(self, key, _paths(key, getattr(self, key)))
        if not self.text:
            raise PammError("text names no file; give at least one file or folder to train on.")
        if self.tokenizer is not None and not isinstance(self.tokenizer, str):
            raise PammError(f"tokenizer is {self.tokenizer!r}; give a folder or a name.")
        if isinstance(self.model, str):
            object.__setattr__(self, "model", read_mapping(shipped("models", self.model)))
        if not isinstance(self.model, dict):
            raise PammError(
                f"model is {self.model!r}; write 'key: value' lines of a LlamaConfig, or the path "
                "of a JSON file."
            )
        folders = [arm.folder for arm in self.arms]
        if not folders or len(set(folders)) < len(folders):
            raise PammError(
                f"arms are {[arm.name for arm in self.arms]}; give at least one, and names that "
                f"differ as folders ({', '.join(folders)})."
            )

    @property
    def sequences_per_step(self) -> int:
        """Sequences that one optimizer step sees, on all devices."""
        return self.batch_size if self.global_batch is None else self.global_batch

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step sees, on all devices."""
        return self.sequence_length * self.sequences_per_step

    @property
    def tokens_per_pass(self) -> int:
        """Tokens that one forward pass on one device sees: the b of every compression."""
        return self.sequence_length * self.batch_size

    def accumulation(self, processes: int) -> int:
        """Forward passes of each process in one step.

        Raises:
            PammError: if the step cannot be divided evenly.
        """
        passes, rest = divmod(self.sequences_per_step, self.batch_size * processes)
        if rest or not passes:
            raise PammError(
                f"global_batch is {self.sequences_per_step}; {processes} process(es) with a "
                f"batch_size of {self.batch_size} need a multiple of {self.batch_size * processes}."
            )
        return passes

    def lr_of(self, arm: Arm) -> float:
        """Peak learning rate of an arm."""
        return self.lr if arm.lr is None else arm.lr

    def lr_factor_of(self, arm: Arm) -> float:
        """Factor on it for q, k and v. The run's is for weights with an approximate gradient."""
        if arm.lr_factor is not None:
            return arm.lr_factor
        return self.lr_factor if arm.approximates else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for YAML."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return values | {
            "text": list(self.text),
            "validation": list(self.validation),
            "arms": {arm.name: arm.to_dict() for arm in self.arms},
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "PretrainConfig":
        """Inverse of ``to_dict``; an unknown key or a missing one is an error."""
        check_fields(cls, values, "the run's configuration")
        arms, seed = values["arms"], values.get("seed", 0)
        if not isinstance(arms, dict):
            raise PammError(
                f"arms is {arms!r}; write one line for each arm, such as exact: {{method: exact}}."
            )
        whole_number("seed", seed, least=0)
        made = tuple(Arm.from_dict(name, arm, seed) for name, arm in arms.items())
        return cls(**{**values, "arms": made})

    def to_yaml(self) -> str:
        """Text of a file that ``load`` reads."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)

    @classmethod
    def load(cls, path: str | Path) -> "PretrainConfig":
        """Read a YAML or JSON file, or one that comes with the package, by its name."""
        path = shipped("runs", path)
        try:
            return cls.from_dict(read_mapping(path))
        except PammError as error:
            raise error if str(path) in str(error) else PammError(f"{path}: {error}") from error


def _paths(name: str, value: object) -> tuple[str, ...]:
    """A tuple of paths, from one path or from several."""
    paths = (value,) if isinstance(value, str) else value
    if not isinstance(paths, list | tuple) or not all(isinstance(path, str) for path in paths):
        raise PammError(f"{name} is {value!r}; give a file or a folder, or a list of them.")
    return tuple(paths)
