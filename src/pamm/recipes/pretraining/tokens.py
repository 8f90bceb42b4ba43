"""From text to blocks of tokens: train or load a tokenizer, pack everything in one mapped array.

In the run folder: ``tokenizer.json``, ``tokens.bin`` (those to train on, then those to validate
on) and ``tokens.json``, which is written last and says what they were made of. Until then
``tokens.bin.partial`` has what is done, and ``preparing.json`` says how much that is.
"""

import contextlib
import hashlib
import itertools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers
import torch
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.utils.data import Dataset

from pamm.errors import PammError, said
from pamm.recipes.console import Advance, progress_bar
from pamm.recipes.files import read_json, write_json, write_text
from pamm.recipes.pretraining.settings import PretrainConfig
from pamm.recipes.text.hub import hub_texts, is_hub
from pamm.recipes.text.read import find_files, read_texts

END_OF_TEXT = "<|endoftext|>"
_ENDS = (END_OF_TEXT, "<eos>", "</s>", "<|end_of_text|>")  # in files that do not say which it is
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


def prepare(config: PretrainConfig, folder: Path, console: Console, begun: bool = False) -> Tokens:
    """Tokenise the run's text into ``folder``, or take what an earlier call left there.

    One that was killed left what it had done: the texts of that are read again, not tokenised.

    Args:
        config: text, tokenizer, and how many tokens there must be at least.
        folder: of the tokens.
        console: shows the progress.
        begun: whether something was trained on the tokens in ``folder``; then they stay.

    Raises:
        PammError: if the text is missing, unreadable, too short for one batch, or another than
            the one this run began with.
    """
    texts = _Texts(config.text, config.steps * config.tokens_per_step)
    held_out = _Texts(config.validation, config.eval_sequences * config.sequence_length)
    if texts.limit and not config.validation:
        raise PammError(
            "text is streamed from the hub, and nothing of it is held out. Give validation, too."
        )
    fingerprint = _fingerprint(config, texts, held_out)
    made = folder / "tokens.json"
    known = made.exists() and read_json(made)["fingerprint"] == fingerprint
    if known and (folder / "tokens.bin").exists():
        return Tokens.open(folder)
    if begun and not known:
        raise PammError(
            f"the text of the run in {folder} has changed since it began, so its arms would train "
            "on different data. Give the run another name, or put the text back."
        )

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer, end_of_text = _tokenizer(config, texts, folder, console)
    vocabulary = tokenizer.get_vocab_size()
    dtype = np.dtype(np.uint16 if vocabulary <= 1 << 16 else np.uint32)
    partial, state = folder / "tokens.bin.partial", folder / "preparing.json"
    made_of = f"{fingerprint} {tokenizers.__version__} {end_of_text} {tokenizer.to_str()}"
    made_of = hashlib.sha256(made_of.encode()).hexdigest()
    done = _done_before(state, partial, made_of, dtype.itemsize)
    bar = progress_bar(console, "tokenising the text", texts.size + held_out.size)
    with partial.open("ab") as out, bar as advance:
        out.truncate(sum(done["tokens"]) * dtype.itemsize)
        for number, each in enumerate((texts, held_out)):
            before = done["texts"][number], done["tokens"][number]
            for read, numbers in _encode(tokenizer, end_of_text, each, *before, advance):
                out.write(np.array(numbers, dtype=dtype).tobytes())
                out.flush()
                os.fsync(out.fileno())  # before the file that says they are there
                done["texts"][number] += read
                done["tokens"][number] += len(numbers)
                write_json(state, done)
    counts = done["tokens"]
    total, validation = sum(counts), counts[1] or int(counts[0] * _HELD_OUT)
    _check_length(config, total - validation, validation, texts.limit)
    values = {
        "fingerprint": fingerprint,
        "dtype": dtype.name,
        "train_tokens": total - validation,
        "validation_tokens": validation,
        "vocabulary": vocabulary,
        "end_of_text": end_of_text,
    }
    if begun and values != read_json(made):
        raise PammError(
            f"the text of the run in {folder} gives other tokens now than when it began; another "
            "version of tokenizers, perhaps. Give the run another name."
        )
    os.replace(partial, folder / "tokens.bin")
    write_json(made, values)
    state.unlink()
    return Tokens.open(folder)


class _Texts:
    """Texts of files, and of data sets on the hub up to the number of tokens that is needed."""

    def __init__(self, names: tuple[str, ...], needed: int) -> None:
        self.files = find_files([name for name in names if not is_hub(name)])
        self.hub = [name for name in names if is_hub(name)]
        self.limit = needed if self.hub else None
        """Tokens to stop at; ``None`` takes all."""
        self.size = self.limit or sum(file.stat().st_size for file in self.files)
        """Of the progress bar: tokens if there is a limit, else bytes of files."""

    def read(self, advance: Advance = lambda _: None) -> Iterator[str]:
        """One after the other; ``advance`` is told bytes of files unless there is a limit."""
        yield from read_texts(self.files, (lambda _: None) if self.limit else advance)
        for name in self.hub:
            yield from hub_texts(name)


def _tokenizer(
    config: PretrainConfig, texts: _Texts, folder: Path, console: Console
) -> tuple[Tokenizer, int | None]:
    """The tokenizer, and the number of the token that ends a text."""
    if config.tokenizer is None:
        with console.status(f"training a tokenizer of {config.vocabulary:,} tokens"):
            tokenizer = train_bpe(texts.read(), config.vocabulary)
        end_of_text = tokenizer.token_to_id(END_OF_TEXT)
    else:
        tokenizer, end_of_text = load_tokenizer(config.tokenizer)
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


def load_tokenizer(name: str) -> tuple[Tokenizer, int | None]:
    """A tokenizer and the number of its token that ends a text.

    Args:
        name: what ``AutoTokenizer`` loads; or a file of ``tokenizers``, whose only special token
            ends texts, or the one of ``_ENDS`` that it has.

    Raises:
        PammError: if it cannot be loaded.
    """
    from transformers import AutoTokenizer

    if is_file(name):
        return _tokenizer_file(name)
    try:
        loaded: Any = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # of many kinds, by what is wrong with the folder or the name
        raise PammError(
            f"cannot load the tokenizer {name!r}: {said(error)}. Give a folder or a name that "
            "AutoTokenizer loads, or leave tokenizer out to train one."
        ) from error
    if not loaded.is_fast:
        raise PammError(f"the tokenizer {name!r} has no fast form, which tokenising needs.")
    return loaded.backend_tokenizer, loaded.eos_token_id


def is_file(name: str) -> bool:
    """Whether a tokenizer's name is that of a file."""
    return name.endswith(".json")


def _tokenizer_file(name: str) -> tuple[Tokenizer, int]:
    try:
        tokenizer = Tokenizer.from_file(name)
    except Exception as error:  # of one kind only, for files that lack and files that are wrong
        raise PammError(f"cannot load the tokenizer {name!r}: {error}.") from error
    added = tokenizer.get_added_tokens_decoder()
    special = {token.content: number for number, token in added.items() if token.special}
    ends = list(special) if len(special) == 1 else [end for end in _ENDS if end in special]
    if not ends:
        raise PammError(
            f"the tokenizer {name!r} does not say which token ends a text: none of its special "
            f"ones is {', '.join(_ENDS)}. Give a folder that AutoTokenizer loads."
        )
    return tokenizer, special[ends[0]]


def _done_before(state: Path, partial: Path, made_of: str, width: int) -> dict[str, Any]:
    """Numbers of texts and tokens, to train on and to validate on, that a call before came to.

    None if it was with another text or tokenizer, or if not all of its tokens are there.
    """
    with contextlib.suppress(OSError, ValueError):  # there was no call, or the disk lost its file
        done = read_json(state)
        if done["made_of"] == made_of and partial.stat().st_size >= sum(done["tokens"]) * width:
            return done
    return {"made_of": made_of, "texts": [0, 0], "tokens": [0, 0]}


def _encode(
    tokenizer: Tokenizer,
    end_of_text: int | None,
    texts: _Texts,
    read: int,
    count: int,
    advance: Advance,
) -> Iterator[tuple[int, list[int]]]:
    """How many texts, and their tokens: batches of them, up to the limit of tokens.

    Goes on behind the first ``read`` texts, which gave ``count`` tokens and are read once more.
    """
    if texts.limit is not None:
        advance(count)
    if count == texts.limit:
        return
    for batch in _batches(itertools.islice(texts.read(advance), read, None)):
        numbers: list[int] = []
        for encoded in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
            numbers += encoded.ids
            if end_of_text is not None:
                numbers.append(end_of_text)
        if texts.limit is not None:
            numbers = numbers[: texts.limit - count]
            advance(len(numbers))
        count += len(numbers)
        yield len(batch), numbers
        if count == texts.limit:
            return


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


def _check_length(config: PretrainConfig, train: int, validation: int, limit: int | None) -> None:
    if not train + validation:
        raise PammError("the text is empty. Give at least one file with text in it.")
    batch = config.tokens_per_step
    if limit is not None and train < limit:
        raise PammError(
            f"the text has {train:,} tokens and the run takes {limit:,} (steps x global_batch x "
            "sequence_length), but text from the hub is not repeated. Give more text or less steps."
        )
    if train < batch:
        raise PammError(
            f"the text has {train:,} tokens to train on, and one step takes {batch:,} "
            "(sequence_length x global_batch). Give more text or less of these."
        )
    if validation < config.sequence_length:
        raise PammError(
            f"the validation text has {validation:,} tokens, less than one sequence of "
            f"{config.sequence_length}. Give more text or a shorter sequence_length."
        )


def _fingerprint(config: PretrainConfig, texts: _Texts, held_out: _Texts) -> str:
    """Of what the tokens are made of: contents of files, not their names or times."""
    tokenizer = config.tokenizer
    read = [*texts.files, *held_out.files]
    if tokenizer is not None and is_file(tokenizer):
        if not Path(tokenizer).is_file():
            raise PammError(f"no such file: {tokenizer}. Give a tokenizer that is there.")
        tokenizer, read = "", [*read, Path(tokenizer)]
    made_of = [tokenizer, config.vocabulary, len(texts.files)]
    for each in (texts, held_out):
        made_of += [*each.hub, each.limit] if each.hub else []
    digest = hashlib.sha256(" ".join(map(str, made_of)).encode())
    for file in read:
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()
