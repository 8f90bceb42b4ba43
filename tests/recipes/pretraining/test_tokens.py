import contextlib
import dataclasses
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from pamm.errors import PammError
from pamm.recipes.files import read_json, write_json
from pamm.recipes.pretraining import tokens
from pamm.recipes.pretraining.settings import PretrainConfig
from pamm.recipes.pretraining.tokens import END_OF_TEXT, Blocks, prepare, train_bpe
from tests.recipes.helpers import config, quiet, text


def test_a_trained_tokenizer_writes_every_text_and_reads_it_back() -> None:
    tokenizer = train_bpe([text()], 300)
    anything = " Grüße, 世界!\n\tno\u00a0such word \U0001f600"
    assert tokenizer.decode(tokenizer.encode(anything).ids) == anything
    assert tokenizer.get_vocab_size() == 300
    assert tokenizer.token_to_id(END_OF_TEXT) == 0
    assert len(tokenizer.encode(text(100)).ids) < 0.6 * len(text(100))


def test_tokens_are_those_of_the_text(tmp_path: Path) -> None:
    made = prepare(config(tmp_path), tmp_path, quiet())
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    together = np.concatenate([made.train, made.validation])
    assert tokenizer.decode(together.tolist()) == text()
    assert together[-1] == made.end_of_text
    assert together.dtype == np.uint16
    assert len(made.validation) == int(0.05 * len(together))
    assert made.vocabulary == 300


def test_a_text_of_its_own_for_validation(tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("a lazy fox mix " * 20)
    made = prepare(config(tmp_path, validation=(str(tmp_path / "other.txt"),)), tmp_path, quiet())
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.decode(made.validation.tolist()) == "a lazy fox mix " * 20
    assert tokenizer.decode(made.train.tolist()) == text()


def test_a_second_call_reads_what_the_first_left(tmp_path: Path) -> None:
    run = config(tmp_path)
    prepare(run, tmp_path, quiet())
    before = (tmp_path / "tokens.bin").stat().st_mtime_ns
    prepare(run, tmp_path, quiet())
    assert (tmp_path / "tokens.bin").stat().st_mtime_ns == before
    assert not list(tmp_path.glob("*.partial"))


def test_another_text_is_tokenised_anew_before_the_run_begins_and_refused_after(
    tmp_path: Path,
) -> None:
    run = config(tmp_path)
    first = len(prepare(run, tmp_path, quiet()).train)
    (tmp_path / "text.txt").write_text(text(5000))
    assert len(prepare(run, tmp_path, quiet()).train) > first

    (tmp_path / "text.txt").write_text(text(6000))
    before = (tmp_path / "tokens.bin").read_bytes()
    with pytest.raises(PammError, match="has changed since it began"):
        prepare(run, tmp_path, quiet(), begun=True)
    assert (tmp_path / "tokens.bin").read_bytes() == before


def test_a_tokenizer_from_a_folder(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path / "tokenizer"
    PreTrainedTokenizerFast(
        tokenizer_object=train_bpe([text()], 280), eos_token=END_OF_TEXT
    ).save_pretrained(folder)
    made = prepare(config(tmp_path, tokenizer=str(folder)), tmp_path, quiet())
    assert (made.vocabulary, made.end_of_text) == (280, 0)


def tokenizer_file(folder: Path, *special: str) -> str:
    """One that has none but these special tokens."""
    made = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    made.add_special_tokens([*special])
    path = folder / "tokenizer.json"
    made.save(str(path))
    return str(path)


@pytest.mark.parametrize(
    ("special", "end"), [(("<done>",), 1), (("<s>", "</s>"), 2), (("<pad>", "<eos>"), 2)], ids=str
)
def test_a_tokenizer_from_a_file(tmp_path: Path, special: tuple[str, ...], end: int) -> None:
    made = config(tmp_path, tokenizer=tokenizer_file(tmp_path, *special))
    tokens = prepare(made, tmp_path / "run", quiet())
    assert tokens.end_of_text == end
    assert [*tokens.train, *tokens.validation].count(end) == 1
    moved = tmp_path / "elsewhere"
    (tmp_path / "tokenizer.json").rename(moved.with_suffix(".json"))
    again = dataclasses.replace(made, tokenizer=f"{moved}.json")
    prepare(again, tmp_path / "run", quiet(), begun=True)  # the same contents are the same file


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (None, ["no such file"]),
        ("{", ["cannot load the tokenizer", "tokenizer.json"]),
        (("<a>", "<b>"), ["which token ends a text", "<|endoftext|>"]),
    ],
)
def test_tokenizer_files_that_are_refused(
    tmp_path: Path, content: str | tuple[str, ...] | None, parts: list[str]
) -> None:
    path = tmp_path / "tokenizer.json"
    if isinstance(content, str):
        path.write_text(content)
    elif content is not None:
        tokenizer_file(tmp_path, *content)
    with pytest.raises(PammError) as caught:
        prepare(config(tmp_path, tokenizer=str(path)), tmp_path / "run", quiet())
    for part in parts:
        assert part in str(caught.value)


def test_tokens_that_are_gone_are_made_again_if_they_would_be_the_same(tmp_path: Path) -> None:
    made = config(tmp_path)
    first = prepare(made, tmp_path / "run", quiet())
    (tmp_path / "run/tokens.bin").unlink()
    again = prepare(made, tmp_path / "run", quiet(), begun=True)
    assert np.array_equal(again.train, first.train)

    (tmp_path / "run/tokens.bin").unlink()
    values = read_json(tmp_path / "run/tokens.json")
    write_json(tmp_path / "run/tokens.json", values | {"train_tokens": 1})
    with pytest.raises(PammError, match="gives other tokens now"):
        prepare(made, tmp_path / "run", quiet(), begun=True)


class Killed(BaseException):
    """Nothing catches it."""


def tokenised(
    run: PretrainConfig, to: Path, patch: pytest.MonkeyPatch, at_most: int | None = None
) -> int:
    """Batches that ``prepare`` tokenises until it is done, or killed as it begins another one."""
    of_texts, done = tokens._batches, 0

    def batches(texts: Iterable[str]) -> Iterator[list[str]]:
        nonlocal done
        for each in of_texts(texts):
            if done == at_most:
                raise Killed
            done += 1
            yield each

    with patch.context() as within, contextlib.suppress(Killed):
        within.setattr(tokens, "_batches", batches)
        prepare(run, to, quiet())
    return done


@pytest.fixture(params=["files", "hub"])
def long_run(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> PretrainConfig:
    """With several batches of text to train on, and of text to validate on."""
    monkeypatch.setattr(tokens, "_BATCH_CHARACTERS", 1000)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "data").mkdir()
    for split in ("train", "validation"):
        rows = [{"text": f"{split} {n} {text(n)}" if n % 7 else " "} for n in range(40)]
        file = tmp_path / f"data/{split}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    name = f"hub:{tmp_path}/data::{{}}" if request.param == "hub" else f"{tmp_path}/data/{{}}.jsonl"
    names = [(name.format(split),) for split in ("train", "validation")]
    special = tokenizer_file(tmp_path, "<done>")
    made = config(tmp_path, text=names[0], validation=names[1], tokenizer=special)
    return dataclasses.replace(made, eval_sequences=30)


def left_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_kills_while_preparing_lose_no_tokens_and_change_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, long_run: PretrainConfig
) -> None:
    every = tokenised(long_run, tmp_path / "straight", monkeypatch)
    assert every > 4
    folder = tmp_path / "killed"
    for _ in range(every - 1):
        assert tokenised(long_run, folder, monkeypatch, at_most=1) == 1
        assert not (folder / "tokens.json").exists()
        with (folder / "tokens.bin.partial").open("ab") as file:
            file.write(b"half of a batch")
    assert tokenised(long_run, folder, monkeypatch) == 1, "nothing is done twice"
    assert left_in(folder) == left_in(tmp_path / "straight")


@pytest.mark.parametrize("lost", ["tokens", "count", "tokenizer"])
def test_what_a_kill_left_is_made_anew_where_it_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, long_run: PretrainConfig, lost: str
) -> None:
    folder = tmp_path / "killed"
    assert tokenised(long_run, folder, monkeypatch, at_most=3) == 3
    if lost == "tokens":
        os.truncate(folder / "tokens.bin.partial", 100)
    elif lost == "count":
        (folder / "preparing.json").write_text("")
    else:
        tokenizer_file(tmp_path, "<over>", "</s>")
    every = tokenised(long_run, tmp_path / "straight", monkeypatch)
    assert tokenised(long_run, folder, monkeypatch) == every
    assert left_in(folder) == left_in(tmp_path / "straight")


def test_a_tokenizer_that_cannot_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    run = config(tmp_path, tokenizer=str(tmp_path / "empty"))
    with pytest.raises(PammError, match="cannot load the tokenizer"):
        prepare(run, tmp_path, quiet())


def test_a_tokenizer_that_would_run_its_own_code(tmp_path: Path) -> None:
    """It is refused, and nobody is asked."""
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "code.py").write_text("raise SystemExit('ran')\n")
    auto_map = {"AutoTokenizer": ["code.Own", None]}
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": auto_map}))
    with pytest.raises(PammError, match=r"cannot load the tokenizer .*contains custom code"):
        prepare(config(tmp_path, tokenizer=str(folder)), tmp_path, quiet())


def test_texts_too_short_or_empty(tmp_path: Path) -> None:
    run = config(tmp_path, batch_size=10_000)
    with pytest.raises(PammError, match="one step takes 160,000"):
        prepare(run, tmp_path, quiet())
    with pytest.raises(PammError, match="less than one sequence of 2000"):
        prepare(dataclasses.replace(run, batch_size=1, sequence_length=2000), tmp_path, quiet())
    (tmp_path / "text.txt").write_text("  \n")
    with pytest.raises(PammError, match="the text is empty"):
        prepare(config(tmp_path), tmp_path, quiet())
    assert not (tmp_path / "tokens.json").exists()


def test_blocks_follow_one_another_and_do_not_overlap() -> None:
    blocks = Blocks(np.arange(103, dtype=np.uint16), 10)
    assert len(blocks) == 10
    rows = torch.stack([blocks[index]["input_ids"] for index in range(10)])
    assert torch.equal(rows.flatten(), torch.arange(100))
    assert torch.equal(blocks[3]["labels"], blocks[3]["input_ids"])


def test_a_bounded_number_of_blocks_is_spread_evenly() -> None:
    blocks = Blocks(np.arange(1000, dtype=np.uint32), 10, at_most=4)
    assert [blocks[index]["input_ids"][0].item() for index in range(4)] == [0, 250, 500, 750]
    assert len(Blocks(np.arange(30, dtype=np.uint32), 10, at_most=4)) == 3
