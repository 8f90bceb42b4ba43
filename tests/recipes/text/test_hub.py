import dataclasses
import gzip
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, T5TokenizerFast

from pamm.errors import PammError
from pamm.recipes.pretraining.model import llama_config
from pamm.recipes.pretraining.settings import PretrainConfig
from pamm.recipes.pretraining.tokens import prepare
from pamm.recipes.pretraining.training import train_arm
from pamm.recipes.stop import Stop
from pamm.recipes.text.hub import hub_texts
from tests.recipes.helpers import config, lines, quiet, text

DOCUMENTS = {
    split: [f"the {text(30 + number)}" for number in range(count)]
    for split, count in (("train", 40), ("validation", 8))
}


def as_c4(folder: Path) -> Path:
    """As the data set lies on the hub: two configurations, each split in several files."""
    card = ["---", "configs:"]
    for name in ("en", "en.noblocklist"):
        card += [f"- config_name: {name}", "  data_files:"]
        card += [
            f"  - {{split: {split}, path: {name}/c4-{split}.*.json.gz}}" for split in DOCUMENTS
        ]
        (folder / name).mkdir(parents=True)
        for split, documents in DOCUMENTS.items():
            half = len(documents) // 2
            for number, part in enumerate((documents[:half], documents[half:])):
                path = folder / name / f"c4-{split}.{number:05}-of-00002.json.gz"
                with gzip.open(path, "wt", encoding="utf-8") as file:
                    for document in part:
                        row = {"text": document, "timestamp": "2019", "url": "http://a.org"}
                        file.write(json.dumps(row) + "\n")
    (folder / "README.md").write_text("\n".join([*card, "---", ""]))
    return folder


def as_t5(folder: Path) -> Path:
    """A unigram tokenizer of T5's class, with its special tokens."""
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()  # type: ignore[assignment]
    special = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=100, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    made.train_from_iterator(DOCUMENTS["train"], trainer)
    pieces = json.loads(made.to_str())["model"]["vocab"]
    T5TokenizerFast(vocab=[tuple(piece) for piece in pieces], extra_ids=0).save_pretrained(folder)
    return folder


@pytest.fixture
def data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A data set as on the hub, but in a folder."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "data"
    folder.mkdir()
    for split, count in (("train", 30), ("validation", 5)):
        rows = [json.dumps({"text": f"{number} {text(200)}"}) for number in range(count)]
        (folder / f"{split}.jsonl").write_text("\n".join(rows))
    return f"hub:{folder}"


def test_texts_come_in_order(data_set: str) -> None:
    assert [each.split()[0] for each in hub_texts(f"{data_set}::validation")] == list("01234")


def test_as_much_is_read_as_the_run_needs(tmp_path: Path, data_set: str) -> None:
    made = config(tmp_path, text=(data_set,), validation=(f"{data_set}::validation",))
    tokens = prepare(made, tmp_path / "run", quiet())
    assert len(tokens.train) == 6 * 4 * 16
    assert len(tokens.validation) == 4 * 16
    longer = config(tmp_path, text=made.text, validation=made.validation, steps=10)
    assert len(prepare(longer, tmp_path / "run", quiet()).train) == 10 * 4 * 16
    with pytest.raises(PammError, match="not repeated"):
        prepare(config(tmp_path, **(vars(made) | {"steps": 10**4})), tmp_path / "run", quiet())


def test_the_papers_run_on_files_laid_out_as_its_data_and_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C4 in configurations of compressed JSON lines, a T5 tokenizer, the run that comes along."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    made = PretrainConfig.load("paper-60m")
    assert made.text == ("hub:allenai/c4:en:train",)
    assert made.tokenizer == "google-t5/t5-base"
    c4, t5 = as_c4(tmp_path / "c4"), as_t5(tmp_path / "t5")
    small = dataclasses.replace(
        made,
        text=tuple(name.replace("allenai/c4", str(c4)) for name in made.text),
        validation=tuple(name.replace("allenai/c4", str(c4)) for name in made.validation),
        tokenizer=str(t5),
        model=config(tmp_path).model,
        arms=made.arms[-1:],
        compile=False,
        **{"steps": 2, "sequence_length": 16, "batch_size": 4, "global_batch": 8},
        eval_sequences=4,
    )
    tokens = prepare(small, tmp_path / "run", quiet())
    tokenizer = AutoTokenizer.from_pretrained(t5)
    assert isinstance(tokenizer, T5TokenizerFast)
    assert tokens.end_of_text == tokenizer.eos_token_id == 1
    texts = tokenizer.decode(tokens.train).split("</s>")
    assert [each.split()[0] for each in texts] == ["the" for _ in texts]
    assert texts[0] == DOCUMENTS["train"][0]
    assert len(tokens.train) == 2 * 8 * 16, "streamed, and no further than the run needs"
    assert llama_config(small, tokens).eos_token_id == 1

    arm = small.arms[0]
    assert train_arm(small, arm, tmp_path / "run" / arm.folder, tokens, quiet(), Stop())
    assert lines(tmp_path / "run" / arm.folder)[-1]["eval_loss"] is not None


@pytest.mark.parametrize("name", ["hub:", "hub:a:b:c:d", "hub:/no/such/folder"])
def test_names_that_are_refused(name: str) -> None:
    with pytest.raises(PammError, match=name):
        list(hub_texts(name))


def test_validation_must_be_named(tmp_path: Path, data_set: str) -> None:
    with pytest.raises(PammError, match="nothing of it is held out"):
        prepare(config(tmp_path, text=(data_set,)), tmp_path / "run", quiet())
