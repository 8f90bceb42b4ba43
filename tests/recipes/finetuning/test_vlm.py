"""Fine-tuning on images: drawing, folders, questions, settings, a run from end to end."""

import dataclasses
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from typer.testing import CliRunner

import pamm
from pamm.cli import app
from pamm.errors import PammError
from pamm.recipes.files import read_json_lines
from pamm.recipes.finetuning.vlm.drawn_images import PATTERNS, draw, draw_folder
from pamm.recipes.finetuning.vlm.finetune import VlmPlan, check, finetune_vlm
from pamm.recipes.finetuning.vlm.image_folder import read_images
from pamm.recipes.finetuning.vlm.model import convert_towers, load, vision_tower
from pamm.recipes.finetuning.vlm.questions import IGNORED, ImageRows, Questions, question
from pamm.recipes.finetuning.vlm.results import markdown
from pamm.recipes.finetuning.vlm.settings import VlmArm, VlmConfig
from pamm.recipes.finetuning.vlm.training import train_run
from pamm.recipes.report.overview import write_overview
from pamm.recipes.stop import Stop
from tests.recipes.helpers import StopAfter, quiet

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

ROOT = Path(__file__).parents[3]
TINY = {
    "vision_config": {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "image_size": 32, "patch_size": 8,
    },
    "text_config": {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    },
}  # fmt: skip
EXACT = pamm.PammConfig("exact")
OURS = pamm.PammConfig("pamm", 1 / 16)


def config(folder: Path, **changes: Any) -> VlmConfig:
    """A tiny Pixtral, and two classes in ``folder`` that differ in brightness."""
    model, data = folder / "tiny.yaml", folder / "data"
    if not data.exists():
        model.write_text(yaml.safe_dump(TINY))
        for name, level in (("bright sky", 200), ("dark sky", 50)):
            (data / name).mkdir(parents=True)
            for i in range(10):
                made = np.full((32, 32, 3), level + i, dtype=np.uint8)
                Image.fromarray(made).save(data / name / f"{i}.png")
    made = VlmConfig(
        name="tiny",
        model=str(model),
        data=str(data),
        arms=(
            VlmArm("exact", EXACT),
            VlmArm("pamm", OURS, vision=pamm.PammConfig("pamm", 1 / 8)),
        ),
        lrs=(3e-3,),
        epochs=2.0,
        batch_size=4,
        precision="fp32",
        seeds=(0, 1),
    )
    return dataclasses.replace(made, **changes)


class TestDrawing:
    def test_the_same_numbers_give_the_same_files(self, tmp_path: Path) -> None:
        for name, seed in (("one", 0), ("two", 0), ("other", 1)):
            draw_folder(tmp_path / name, train=2, validation=1, side=16, seed=seed)
        files = sorted(p.relative_to(tmp_path / "one") for p in (tmp_path / "one").rglob("*.png"))
        assert len(files) == 3 * len(PATTERNS) >= 3 * 6
        contents = {
            name: [(tmp_path / name / file).read_bytes() for file in files]
            for name in ("one", "two", "other")
        }
        assert contents["one"] == contents["two"] != contents["other"]
        assert len(set(contents["one"])) == len(files)

    def test_directions_are_what_their_names_say(self) -> None:
        down, right = ({}, {})
        for name in ("horizontal", "vertical"):
            images = [
                draw(f"{name} stripes", np.random.default_rng(i)).astype(float).mean(2)
                for i in range(10)
            ]
            down[name], right[name] = (
                sum((np.diff(image, axis=axis) ** 2).mean() for image in images) for axis in (0, 1)
            )
        assert down["horizontal"] > 1.5 * right["horizontal"]
        assert right["vertical"] > 1.5 * down["vertical"]


class TestFolder:
    def test_a_folder_is_divided_alike_each_time(self, tmp_path: Path) -> None:
        data = config(tmp_path).data
        train, validation = read_images(data, 0.2)
        assert read_images(data, 0.2)[0] == train
        assert train.classes == validation.classes == ("bright sky", "dark sky")
        assert (train.labels.count(0), validation.labels.count(0)) == (8, 2)
        assert not set(train.paths) & set(validation.paths)

    def test_a_divided_folder_stays_divided(self, tmp_path: Path) -> None:
        draw_folder(tmp_path, train=2, validation=1, side=16)
        train, validation = read_images(tmp_path, 0.5)
        assert (len(train.paths), len(validation.paths)) == (2 * len(PATTERNS), len(PATTERNS))
        assert {path.parts[-3] for path in validation.paths} == {"validation"}

    @pytest.mark.parametrize(
        ("files", "share", "says"),
        [
            ({}, 0.2, "No such file"),
            ({"a/1.png": True}, 0.2, "1 folder"),
            ({"a/1.png": True, "b/notes.txt": False}, 0.2, "b has no images"),
            ({"a/1.png": True, "b/1.png": False}, 0.2, "1.png is no image"),
            ({"a/1.png": True, "b/1.png": True}, 0.2, "leaves none to train on"),
            (
                {"train/a/1.png": True, "train/b/1.png": True,
                 "validation/a/1.png": True, "validation/c/1.png": True}, 0.2, "has not: c",
            ),
        ],
    )  # fmt: skip
    def test_what_is_refused(
        self, tmp_path: Path, files: dict[str, bool], share: float, says: str
    ) -> None:
        for name, is_image in files.items():
            path = tmp_path / "data" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if is_image:
                Image.new("RGB", (8, 8)).save(path)
            else:
                path.write_text("no image")
        with pytest.raises(PammError, match=says):
            read_images(tmp_path / "data", share)

    def test_images_are_drawn_once_and_wholly(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plan = VlmPlan(config(tmp_path, data="drawn"), tmp_path / "runs/tiny")
        calls = []

        def few(folder: Path) -> None:
            calls.append(folder)
            draw_folder(folder, train=1, validation=1, side=16)
            if len(calls) == 1:
                raise OSError("disk full")

        monkeypatch.setattr("pamm.recipes.finetuning.vlm.drawn_images.draw_folder", few)
        with pytest.raises(OSError, match="disk full"):
            check(plan)
        assert not list((tmp_path / "runs").iterdir())
        for _ in range(2):
            check(plan)
        assert len(calls) == 2
        assert [path.name for path in (tmp_path / "runs").iterdir()] == ["drawn-images"]


class TestQuestions:
    def made(self, folder: Path) -> tuple[Any, Questions, ImageRows]:
        chosen = config(folder)
        images, _ = read_images(chosen.data, 0.2)
        processor, _ = load(chosen, images.classes, bf16=False)
        return processor, Questions(processor, images.classes, None), ImageRows(images, True)

    def test_the_loss_is_on_the_answer_alone(self, tmp_path: Path) -> None:
        processor, questions, rows = self.made(tmp_path)
        batch = questions([rows[0], rows[8]])
        assert batch["input_ids"].shape == batch["attention_mask"].shape == batch["labels"].shape
        words = processor.tokenizer.convert_ids_to_tokens
        for row, name in ((0, "bright sky"), (1, "dark sky")):
            labels = batch["labels"][row]
            is_answer = labels != IGNORED
            assert torch.equal(labels[is_answer], batch["input_ids"][row][is_answer])
            assert words(labels[is_answer].tolist()) == [*name.split(), "</s>"]
        prompt = batch["input_ids"][0, :-3].tolist()
        assert prompt.count(processor.image_token_id) == 16  # patches
        asked = processor.tokenizer(question(("bright sky", "dark sky")))["input_ids"]
        assert prompt[-len(asked) :] == asked

    def test_answers_of_other_lengths_are_padded_behind(self, tmp_path: Path) -> None:
        processor, _, rows = self.made(tmp_path)
        questions = Questions(processor, ("bright sky", "dark"), None)
        batch = questions([rows[0], rows[8]])
        assert batch["attention_mask"][:, -2:].tolist() == [[1, 1], [1, 0]]
        assert batch["labels"][1, -1] == IGNORED
        assert batch["labels"][1, -2] == questions.end

    def test_only_names_can_be_spelt(self, tmp_path: Path) -> None:
        _, questions, _ = self.made(tmp_path)
        (bright, sky, end), (dark, _, _) = questions.answers
        assert questions.next_tokens([]) == [bright, dark]
        assert questions.next_tokens([dark]) == [sky]
        assert questions.next_tokens([dark, sky, end]) == [end]
        assert questions.class_of([dark, sky, end, questions.pad]) == 1
        assert questions.class_of([sky, dark, end]) == -1

    def test_a_chat_template_is_used(self, tmp_path: Path) -> None:
        processor, _, rows = self.made(tmp_path)
        processor.chat_template = (
            "<s>{% for part in messages[0].content %}{% if part.type == 'image' %}<image>"
            "{% else %}{{ part.text }}{% endif %}{% endfor %}"
        )
        batch = Questions(processor, ("bright sky", "dark sky"), None)([rows[0]])
        ids = batch["input_ids"][0].tolist()
        assert ids[0] == processor.tokenizer.bos_token_id
        assert ids.count(ids[0]) == 1

    def test_images_are_scaled(self, tmp_path: Path) -> None:
        processor, _, rows = self.made(tmp_path)
        batch = Questions(processor, ("bright sky", "dark sky"), 16)([rows[0]])
        assert batch["pixel_values"].shape == (1, 3, 16, 16)

    def test_names_with_the_same_tokens_are_refused(self, tmp_path: Path) -> None:
        processor, _, _ = self.made(tmp_path)
        with pytest.raises(PammError, match="same tokens for two of: unknown, strange"):
            Questions(processor, ("unknown", "strange"), None)


class TestSettings:
    def test_the_papers_run(self) -> None:
        made = VlmConfig.load("paper-vlm")
        assert made.lora == {"r": 128, "lora_alpha": 128}
        assert made.image_size is not None
        patches = (made.image_size // 16) ** 2
        arms = {arm.name: arm for arm in made.arms}
        for name, vision, language in (("1/128", 2, 4), ("1/512", 1, 1)):
            towers = arms[f"lora+pamm-{name}"].towers  # type: ignore[attr-defined]
            assert towers["vision"].generators(patches) == vision
            assert towers["language"].generators(patches + 250) == language

    @pytest.mark.parametrize("name", ["small-vlm", ROOT / "benchmarks/studies/vlm-drawn.yaml"])
    def test_the_small_runs(self, name: str | Path) -> None:
        made = VlmConfig.load(name)
        assert made.from_scratch is not None
        assert {arm.config.method for arm in made.arms} == {"exact", "pamm", "subspace"}

    def test_a_file_reads_back(self, tmp_path: Path) -> None:
        made = config(tmp_path, lora={"r": 4})
        assert VlmConfig.from_dict(yaml.safe_load(made.to_yaml())) == made

    def test_what_the_towers_share_is_written_once(self) -> None:
        arm = VlmArm.from_dict(
            "a", {"method": "pamm", "ratio": "1/512", "vision": {"ratio": "1/128"}, "lr": 1}, 0
        )
        assert (arm.towers["language"].ratio, arm.towers["vision"].ratio) == (1 / 512, 1 / 128)
        assert arm.lr == 1
        half = VlmArm.from_dict("a", {"method": "exact", "vision": {"method": "pamm"}}, 0)
        assert not half.is_exact
        assert VlmArm.from_dict("a", half.to_dict(), 0) == half
        values = {"method": "pamm", "ratio": "1/512", "vision": {"method": "exact"}}
        assert VlmArm.from_dict("a", values, 0).vision == EXACT
        values = {"method": "sampled", "fp8": False, "vision": {"method": "subspace"}}
        assert VlmArm.from_dict("a", values, 0).vision == pamm.PammConfig("subspace")
        values = {"method": "pamm", "ratio": "1/512"}
        strict = values | {"vision": {"method": "pamm", "tolerance": 0.5}}
        assert VlmArm.from_dict("a", strict, 0).vision == pamm.PammConfig("pamm", 1 / 512, 0.5)

    @pytest.mark.parametrize("method", ["exact", "recompute"])
    def test_a_factor_is_searched_where_either_tower_approximates(
        self, tmp_path: Path, method: str
    ) -> None:
        half = VlmArm.from_dict("a", {"method": method, "vision": {"method": "pamm"}}, 0)
        whole = VlmArm.from_dict("b", {"method": method}, 0)
        made = config(tmp_path, arms=(half, whole), lr_factors=(1, 2))
        found = {(run.arm.name, run.lr_factor) for run in VlmPlan(made, tmp_path / "runs").to_do()}
        assert found == {("a", 1), ("a", 2), ("b", 1)}

    @pytest.mark.parametrize("key", ["lr", "lr_factor", "targets"])
    def test_what_the_towers_cannot_have_apart_is_refused(self, key: str) -> None:
        with pytest.raises(PammError, match=f"vision of arm 'a' has no key '{key}'"):
            VlmArm.from_dict("a", {"method": "pamm", "vision": {key: 1}}, 0)

    def test_gate_and_up_are_refused(self, tmp_path: Path) -> None:
        arm = VlmArm.from_dict("a", {"method": "sampled", "targets": "mlp"}, 0)
        with pytest.raises(PammError, match=r"targets of arm 'a' is 'mlp'; leave it out"):
            config(tmp_path, arms=(arm,))

    @pytest.mark.parametrize(
        ("key", "value", "says"),
        [
            ("accumulation", 0, "accumulation is 0"),
            ("image_size", 4, "image_size is 4"),
            ("validation_share", 1.0, "below 1"),
            ("lora", {"rank": 4}, "lora has no key 'rank'"),
            ("lora", 4, "write {r: 128"),
            ("lora", {"r": 0}, "r of lora is 0"),
            ("lrs", (), "one or more"),
        ],
    )
    def test_what_is_refused(self, tmp_path: Path, key: str, value: Any, says: str) -> None:
        with pytest.raises(PammError, match=says):
            config(tmp_path, **{key: value})

    @pytest.mark.parametrize(
        ("part", "key", "value", "says"),
        [
            ("vision_config", "patch_size", None, "patch_size of the vision_config is None"),
            ("vision_config", "num_attention_heads", 0, "no Pixtral that can be built"),
            ("audio_config", "hidden_size", 30, "no key 'audio_config'"),
        ],
    )
    def test_files_that_are_no_pixtral(
        self, tmp_path: Path, part: str, key: str, value: Any, says: str
    ) -> None:
        made = config(tmp_path)
        file = {**TINY, part: {**TINY.get(part, {}), key: value}}
        Path(made.model).write_text(yaml.safe_dump(file))
        with pytest.raises(PammError, match=says):
            load(made, ("a", "b"), bf16=False)


class TestTowers:
    @pytest.mark.parametrize("lora", [None, {"r": 4}])
    def test_each_tower_has_its_own_ratio(self, tmp_path: Path, lora: Any) -> None:
        made = config(tmp_path, lora=lora)
        images, _ = read_images(made.data, 0.2)
        processor, model = load(made, images.classes, bf16=False)
        rows = ImageRows(images, True)
        batch = Questions(processor, images.classes, None)([rows[0]])
        report = convert_towers(model, made.arms[1].towers, batch)  # type: ignore[attr-defined]
        ratios = {group.name: group.config.ratio for group in report.converted}
        prefix = vision_tower(model)
        assert [r for name, r in ratios.items() if name.startswith(prefix)] == [1 / 8, 1 / 8]
        assert [r for name, r in ratios.items() if not name.startswith(prefix)] == [1 / 16]
        assert all(group.confirmed for group in report.converted)

    def test_one_tower_alone(self, tmp_path: Path) -> None:
        made = config(tmp_path)
        processor, model = load(made, ("bright sky", "dark sky"), bf16=False)
        images, _ = read_images(made.data, 0.2)
        batch = Questions(processor, images.classes, None)([ImageRows(images, True)[0]])
        report = convert_towers(model, {"language": EXACT, "vision": OURS}, batch)
        assert len(report.converted) == 2

    def test_a_model_without_eyes_is_refused(self) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, vocab_size=8, **sizes))
        with pytest.raises(PammError, match="no vision tower"):
            vision_tower(model)


@pytest.mark.slow
def test_a_run_through_the_command_line(tmp_path: Path) -> None:
    made = config(tmp_path)
    (tmp_path / "vlm.yaml").write_text(made.to_yaml())
    command = ["finetune", "vlm", "--config", str(tmp_path / "vlm.yaml")]
    out = CliRunner().invoke(app, [*command, "--output", str(tmp_path / "runs")])
    assert out.exit_code == 0, out.output
    folder = tmp_path / "runs/tiny"
    exact, compressed = read_json_lines(folder / "results.jsonl")
    assert [exact["arm"], compressed["arm"]] == ["exact", "pamm"]
    assert exact["mean"] == exact["weighted_f1"]["mean"] == 1  # dark is not bright
    assert exact["confusion"] == [[4, 0], [0, 4]]  # two images of each class, two seeds
    language, vision = compressed["towers"]["language"], compressed["towers"]["vision"]
    assert vision["held_tokens"] == 4 * 16
    assert (language["generators"], vision["generators"]) == (
        -(-language["held_tokens"] // 16), 8,
    )  # fmt: skip
    # X of two blocks of the vision tower and one of the language model, in fp32.
    assert vision["exact_bytes"] == 2 * 64 * 32 * 4
    assert language["exact_bytes"] == language["held_tokens"] * 32 * 4
    for tower in (language, vision):
        assert tower["held_bytes"] == tower["predicted_bytes"] < tower["exact_bytes"] / 2
    assert exact["held_bytes"] == exact["exact_bytes"] == compressed["exact_bytes"]
    for name in ("f1.png", "confusion-exact.png", "confusion-pamm.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
    assert "| pamm |" in (folder / "table.md").read_text()
    assert VlmConfig.load(folder / "config.yaml") == made
    assert not list(folder.glob("runs/*/*/*/checkpoint-*"))

    write_overview([tmp_path / "runs"], tmp_path / "docs")
    report = (tmp_path / "docs/results.md").read_text().splitlines()
    ours = (folder / "table.md").read_text().partition("\n\n")[0].splitlines()
    assert len(ours) == 4
    assert set(ours) <= set(report)

    again = finetune_vlm(dataclasses.replace(made, seeds=(0,)), tmp_path / "runs", quiet())
    assert [row["seeds"] for row in again] == [1, 1]
    with pytest.raises(PammError, match="another configuration; these differ: image_size"):
        finetune_vlm(dataclasses.replace(made, image_size=16), tmp_path / "runs", quiet())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "lora"), [("pamm", {"r": 4}), ("exact", None), ("subspace", None)]
)
def test_a_stopped_run_ends_where_it_would_have_ended(
    tmp_path: Path, method: str, lora: Any
) -> None:
    arm = VlmArm("kept", pamm.PammConfig(method), lr_factor=2)
    made = config(tmp_path, arms=(arm,), seeds=(0,), lora=lora)
    whole, broken = (VlmPlan(made, tmp_path / name).to_do()[0] for name in ("whole", "broken"))
    assert train_run(made, made.data, whole, Stop())
    assert not train_run(made, made.data, broken, StopAfter(3))  # an epoch has 4
    assert not (broken.folder / "result.json").exists()
    assert train_run(made, made.data, broken, Stop())
    weights = "adapter_model.safetensors" if lora else "model.safetensors"
    for name in (f"checkpoint-8/{weights}", "result.json"):
        assert (whole.folder / name).read_bytes() == (broken.folder / name).read_bytes()


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    made = config(tmp_path, batch_size=2, seeds=(0,), lora={"r": 4})
    (tmp_path / "vlm.yaml").write_text(made.to_yaml())
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "pamm")
    options = ("--config", str(tmp_path / "vlm.yaml"), "--output", str(tmp_path / "runs"))
    done = subprocess.run(
        [sys.executable, *launcher, "finetune", "vlm", *options], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "runs/tiny"
    rows = read_json_lines(folder / "results.jsonl")
    assert [(row["arm"], row["steps"]) for row in rows] == [("exact", 8), ("pamm", 8)]
    assert all(sum(map(sum, row["confusion"])) == 4 for row in rows)
    assert done.stdout.count("macro F1") >= 3  # one line a run, one table
    assert not list(folder.glob("runs/*/*/*/checkpoint-*"))


@pytest.mark.slow
def test_lora_on_a_saved_model(tmp_path: Path) -> None:
    made = config(tmp_path)
    processor, model = load(made, ("bright sky", "dark sky"), bf16=False)
    for part in (processor, model):
        part.save_pretrained(tmp_path / "saved")  # type: ignore[operator]
    made = config(
        tmp_path, model=str(tmp_path / "saved"), lora={"r": 4}, epochs=1, seeds=(0,), image_size=32
    )
    rows = finetune_vlm(made, tmp_path / "runs", quiet())
    before = rows[0]["before"]
    assert sum(map(sum, before["confusion"])) == 4
    assert "| before training |" in markdown(rows)
    # A of (4, 32) for q, k and v of three blocks; B of two towers, whose k and v have other widths.
    assert rows[0]["trained_parameters"] == 4 * (9 * 32 + 6 * 32 + 32 + 16 + 16)


@pytest.mark.slow
def test_a_loss_that_is_not_finite_scores_nothing(tmp_path: Path) -> None:
    made = config(tmp_path, lrs=(1e20,), arms=(VlmArm("exact", EXACT),), seeds=(0,))
    run = VlmPlan(made, tmp_path / "runs").to_do()[0]
    assert train_run(made, made.data, run, Stop())
    assert run.result is not None
    assert run.result["score"] is None
    rows = VlmPlan(made, tmp_path / "runs").rows()
    assert "not finite" in markdown(rows)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--data", "nowhere"), "cannot read nowhere"),
        (("--config", "none.yaml"), "cannot read none.yaml"),
        (("--config", "small-vlm", "--model", "none.yaml", "--data", "nowhere"), "none.yaml"),
    ],
)
def test_what_the_command_refuses(
    tmp_path: Path, options: tuple[str, ...], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out = CliRunner().invoke(app, ["finetune", "vlm", *options])
    assert out.exit_code == 2
    assert says in out.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("missing", "says"),
    [("", "cannot load .*none"), ("model.safetensors", "no file named"), ("lora", "PEFT says")],
)
def test_a_model_that_cannot_be_trained_is_found_before_the_first_training(
    tmp_path: Path, missing: str, says: str
) -> None:
    made = config(tmp_path)
    saved, lora = tmp_path / "none", {"target_modules": ["none"]} if missing == "lora" else None
    if missing:
        for part in load(made, ("bright sky", "dark sky"), bf16=False):
            part.save_pretrained(saved)  # type: ignore[operator]
        (saved / missing).unlink(missing_ok=True)
    made = dataclasses.replace(made, model=str(saved), lora=lora)
    with pytest.raises(PammError, match=says) as refused:
        finetune_vlm(made, tmp_path / "runs", quiet())
    assert ".." not in str(refused.value)
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_the_example(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = config(tmp_path)
    main = runpy.run_path(str(ROOT / "examples/finetune_vlm.py"))["main"]
    main(made.model, made.data, output=tmp_path / "runs")
    assert "lora+pamm macro F1" in capsys.readouterr().out
