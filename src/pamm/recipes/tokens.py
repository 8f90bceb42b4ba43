"""From text to blocks of tokens: train or load a tokenizer, pack everything in one mapped array.

In the run folder: ``tokenizer.json``, ``tokens.bin`` (those to train on, then those to validate
on) and ``tokens.json``, which is written last and says what they were made of.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.utils.data import Dataset

from pamm.errors import PammError
from pamm.recipes.console import progress_bar
from pamm.recipes.files import read_json, write_json, write_text
from pamm.recipes.settings import PretrainConfig
from pamm.recipes.text import find_files, read_texts

END_OF_TEXT = "<|endoftext|>"
_BPE_CHARACTERS = 32 << 20  # a BPE is trained on no more than this much of the text
_HELD_OUT = 0.05
_BATCH_CHARACTERS = 1 << 21


class Tokens(NamedTuple):
    """The run's tokens, mapped from disk."""

    train: np.ndarray
    validation: np.ndarray
    vocabulary: int
    end_of_text: int | None

    @classmethod
    def open(cls, folder: Path) -> "Tokens":
        """Those that ``prepare`` left in a run folder."""
        made = read_json(folder / "tokens.json")
        array = np.memmap(folder / "tokens.bin", dtype=made["dtype"], mode="r")
        split = made["train_tokens"]
        return cls(array[:split], array[split:], made["vocabulary"], made["end_of_text"])


class Blocks(Dataset[dict[str, Tensor]]):
    """Blocks of ``length`` tokens that follow one another; a rest too short for one is left out.

    Args:
        tokens: one array of token numbers.
        length: of a block.
        at_most: how many blocks, evenly spread over the array; ``None`` takes them all.
    """

    def __init__(self, tokens: np.ndarray, length: int, at_most: int | None = None) -> None:
        count = len(tokens) // length
        taken = count if at_most is None else min(count, at_most)
        self._tokens, self._length = tokens, length
        self._starts = [length * (number * count // taken) for number in range(taken)]

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = self._starts[index]
        block = torch.from_numpy(self._tokens[start : start + self._length].astype(np.int64))
        return {"input_ids": block, "labels": block}


def prepare(config: PretrainConfig, folder: Path, console: Console) -> Tokens:
    """Tokenise the run's text into ``folder``, or take what an earlier call left there.

    Raises:
        PammError: if the text is missing, unreadable, too short for one batch, or another than
            the one this run began with.
    """
    train_files, validation_files = find_files([*config.text]), find_files([*config.validation])
    fingerprint = _fingerprint(config, train_files, validation_files)
    made = folder / "tokens.json"
    if made.exists() and read_json(made)["fingerprint"] == fingerprint:
        return Tokens.open(folder)
    if (folder / "config.yaml").exists():
        raise PammError(
            f"the text of the run in {folder} has changed since it began, so its arms would train "
            "on different data. Give the run another name, or put the text back."
        )

    tokenizer, end_of_text = _tokenizer(config, train_files, folder, console)
    vocabulary = tokenizer.get_vocab_size()
    dtype = np.dtype(np.uint16 if vocabulary <= 1 << 16 else np.uint32)
    counts = []
    partial = folder / "tokens.bin.partial"
    with partial.open("wb") as out:
        size = sum(file.stat().st_size for file in [*train_files, *validation_files])
        with progress_bar(console, "tokenising the text", size) as advance:
            for files in (train_files, validation_files):
                texts = read_texts(files, advance)
                counts.append(_encode(tokenizer, end_of_text, texts, dtype, out))
    total, validation = sum(counts), counts[1] or int(counts[0] * _HELD_OUT)
    _check_length(config, total - validation, validation)
    os.replace(partial, folder / "tokens.bin")
    values = {
        "fingerprint": fingerprint,
        "dtype": dtype.name,
        "train_tokens": total - validation,
        "validation_tokens": validation,
        "vocabulary": vocabulary,
        "end_of_text": end_of_text,
    }
    write_json(made, values)
    return Tokens.open(folder)


def _tokenizer(
    config: PretrainConfig, files: list[Path], folder: Path, console: Console
) -> tuple[Tokenizer, int | None]:
    """The tokenizer, and the number of the token that ends a text."""
    if config.tokenizer is None:
        with console.status(f"training a tokenizer of {config.vocabulary:,} tokens"):
            tokenizer = train_bpe(read_texts(files), config.vocabulary)
        end_of_text = tokenizer.token_to_id(END_OF_TEXT)
    else:
        tokenizer, end_of_text = _load_tokenizer(config.tokenizer)
    write_text(folder / "tokenizer.json", tokenizer.to_str())
    return tokenizer, end_of_text


def train_bpe(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """A byte-level BPE: every text can be written in it, and read back unchanged.

    Raises:
        PammError: if there is no text.
    """
    kept = list(_head(texts, _BPE_CHARACTERS))
    if not kept:
        raise PammError("the text is empty. Give at least one file with text in it.")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(kept, trainer)
    return tokenizer


def _load_tokenizer(name: str) -> tuple[Tokenizer, int | None]:
    from transformers import AutoTokenizer

    try:
        loaded: Any = AutoTokenizer.from_pretrained(name)
    except Exception as error:  # of many kinds, by what is wrong with the folder or the name
        reason = str(error).strip().splitlines()[0]
        raise PammError(
            f"cannot load the tokenizer {name!r}: {reason} Give a folder or a name that "
            "AutoTokenizer loads, or leave tokenizer out to train one."
        ) from error
    if not loaded.is_fast:
        raise PammError(f"the tokenizer {name!r} has no fast form, which tokenising needs.")
    return loaded.backend_tokenizer, loaded.eos_token_id


def _encode(
    tokenizer: Tokenizer,
    end_of_text: int | None,
    texts: Iterable[str],
    dtype: np.dtype[Any],
    out: Any,
) -> int:
    """Append the tokens of ``texts`` to a file; returns how many."""
    count = 0
    for batch in _batches(texts):
        numbers: list[int] = []
        for encoded in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
            numbers += encoded.ids
            if end_of_text is not None:
                numbers.append(end_of_text)
        out.write(np.array(numbers, dtype=dtype).tobytes())
        count += len(numbers)
    return count


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch, size = [], 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _head(texts: Iterable[str], characters: int) -> Iterator[str]:
    for text in texts:
        yield text
        characters -= len(text)
        if characters <= 0:
            return


def _check_length(config: PretrainConfig, train: int, validation: int) -> None:
    if not train + validation:
        raise PammError("the text is empty. Give at least one file with text in it.")
    batch = config.sequence_length * config.batch_size * config.gradient_accumulation
    if train < batch:
        raise PammError(
            f"the text has {train:,} tokens to train on, and one step takes {batch:,} "
            "(sequence_length x batch_size x gradient_accumulation). Give more text or less of "
            "these."
        )
    if validation < config.sequence_length:
        raise PammError(
            f"the validation text has {validation:,} tokens, less than one sequence of "
            f"{config.sequence_length}. Give more text or a shorter sequence_length."
        )


def _fingerprint(config: PretrainConfig, train: list[Path], validation: list[Path]) -> str:
    """Of what the tokens are made of: contents of files, not their names or times."""
    digest = hashlib.sha256(f"{config.tokenizer} {config.vocabulary} {len(train)}".encode())
    for file in [*train, *validation]:
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()
