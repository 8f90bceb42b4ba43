"""Bad input through the command line: one message, exit code 2, no traceback, nothing changed."""

import itertools
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner, Result

from pamm import extras
from pamm.cli import app
from pamm.recipes.finetuning.glue.settings import GlueConfig
from pamm.recipes.finetuning.vlm.settings import VlmConfig
from pamm.recipes.pretraining.settings import PretrainConfig
from pamm.recipes.studies.study import Study
from tests.recipes.helpers import config


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(each) for each in arguments])


def write(folder: Path, **changes: Any) -> Path:
    """A file of a run that works, but for ``changes``."""
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config(folder).to_dict() | changes))
    return path


def check_refused(result: Result, *parts: str) -> None:
    message = " ".join(result.stderr.split())
    assert result.exit_code == 2, message
    assert "Traceback" not in result.output
    for part in parts:
        assert part in message


def test_help_loads_no_framework_and_names_the_commands() -> None:
    code = (
        "import sys; sys.argv = ['pamm', '--help']\n"
        "from pamm.cli import main\n"
        "try: main()\n"
        "finally: assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "demo" in done.stdout
    assert "pretrain" in done.stdout


def test_no_metavar_is_the_name_of_its_option() -> None:
    """typer 0.27.0 to 0.27.3 would take the metavar for the name: ``--MODEL``."""
    commands: list[Any] = [typer.main.get_command(app)]
    options = []
    for command in commands:
        commands += getattr(command, "commands", {}).values()
        options += [each for each in command.params if each.param_type_name == "option"]
    assert {"model", "config"} <= {option.name for option in options}
    for option in options:
        names = {name.lstrip("-").upper() for name in (option.name, *option.opts)}
        assert option.metavar not in names, option.opts


def test_without_arguments_help_is_shown() -> None:
    assert "Usage" in call().output


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["demos"], "demos"),
        (["demo", "--nam", "x"], "--nam"),
        (["pretrain"], "--config"),
    ],
)
def test_usage_errors(arguments: list[str], part: str) -> None:
    check_refused(call(*arguments), part)


@pytest.mark.parametrize(
    ("command", "read"),
    [
        ("pretrain", PretrainConfig.from_dict),
        ("ablate", lambda values: Study(**values)),
        ("finetune glue", GlueConfig.from_dict),
        ("finetune vlm", VlmConfig.from_dict),
    ],
)
def test_the_example_in_the_help_is_valid_and_shown_whole(
    command: str, read: Callable[[Any], object]
) -> None:
    found: Any = typer.main.get_command(app)
    for name in command.split():
        found = found.commands[name]
    example = found.help.partition("\b\n")[2]
    assert read(yaml.safe_load(example))
    shown = call(*command.split(), "--help").stdout
    assert "".join(example.split()) in "".join(shown.split())


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["ablate", "none.yaml"], "cannot read none.yaml"),
        (["analyze", "none"], "none holds no model"),
        (["report", "none"], "no such folder: none"),
    ],
)
def test_a_bad_path(tmp_path: Path, arguments: list[str], part: str) -> None:
    check_refused(call(*arguments, "--output", tmp_path / "out"), part)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"arms": {"a": {"ratio": 0}}}, ["ratio is 0", "above 0 and at most 1", "1/512"]),
        ({"arms": {"a": {"ratio": 2}}}, ["ratio is 2", "above 0 and at most 1"]),
        ({"arms": {"a": {"ratio": float("nan")}}}, ["ratio is nan", "above 0 and at most 1"]),
        ({"arms": {"a": {"tolerance": -0.5}}}, ["tolerance is -0.5", "0 or above"]),
        ({"stesp": 3}, ["no key 'stesp'", "did you mean 'steps'", "Allowed:"]),
        ({"model": {"hidden_sise": 3}}, ["no key 'hidden_sise'", "did you mean 'hidden_size'"]),
        ({"steps": -1}, ["steps is -1", "1 or above"]),
        ({"batch_size": 10**6}, ["one step takes", "Give more text"]),
        ({"text": "none.txt"}, ["no such file or folder: none.txt", "Give the path"]),
        ({"tokenizer": "./none"}, ["cannot load the tokenizer './none'"]),
    ],
)
def test_a_bad_value(tmp_path: Path, change: dict[str, Any], parts: list[str]) -> None:
    path = write(tmp_path, **change)
    check_refused(call("pretrain", "--config", path, "--output", tmp_path / "runs"), *parts)
    assert not list(tmp_path.glob("runs/*/config.yaml"))


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "the text is empty"),
        (b"\n \n", "the text is empty"),
        (b"caf\xe9", "not UTF-8"),
    ],
)
def test_an_empty_or_unreadable_text(tmp_path: Path, content: bytes, part: str) -> None:
    path = write(tmp_path)
    (tmp_path / "text.txt").write_bytes(content)
    check_refused(call("pretrain", "--config", path, "--output", tmp_path / "runs"), part)


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("none.yaml", None, ["cannot read", "none.yaml"]),
        ("run.toml", "", ["run.toml", ".json, .yaml or .yml"]),
        ("run.yaml", "a: [", ["run.yaml is not valid YAML"]),
        ("run.json", "{", ["run.json is not valid JSON"]),
        ("run.yaml", "- a\n", ["run.yaml holds list", "key: value"]),
        ("run.yaml", "", ["run.yaml holds NoneType"]),
        ("run.yaml", "name: a\n", ["lacks text, model, arms, steps, lr"]),
    ],
)
def test_a_bad_file(tmp_path: Path, name: str, content: str | None, parts: list[str]) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    check_refused(call("pretrain", "--config", tmp_path / name), *parts)


@pytest.mark.parametrize("name", ["run.yaml", "run.json"])
@pytest.mark.parametrize("command", [["pretrain", "--config"], ["ablate"]])
def test_a_file_that_is_no_text(tmp_path: Path, name: str, command: list[str]) -> None:
    (tmp_path / name).write_bytes(b"\x8f\xff\x00")
    check_refused(call(*command, tmp_path / name), f"{name} is not text in UTF-8")


def test_a_run_folder_of_another_configuration_keeps_every_byte(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "tiny"
    (folder / "exact").mkdir(parents=True)
    (folder / "config.yaml").write_text(config(tmp_path).to_yaml())
    (folder / "exact" / "result.json").write_text("precious")
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    path = write(tmp_path, seed=7, arms={"exact": {"method": "exact"}})
    result = call("pretrain", "--config", path, "--output", tmp_path / "runs")
    check_refused(result, "another configuration", "arms", "seed (0 there, 7 now)", "another name")
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_the_demo_refuses_a_folder_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "thesis.tex").write_text("precious")
    check_refused(call("demo", "--output", tmp_path), "thesis.tex", "Choose another name")
    check_refused(call("demo", "--output", tmp_path, "--name", "a/b"), "name is 'a/b'")
    assert [path.name for path in tmp_path.rglob("*")] == ["demo", "thesis.tex"]


def test_an_output_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    result = call("pretrain", "--config", write(tmp_path), "--output", tmp_path / "file" / "runs")
    check_refused(result, "cannot write in", "Not a directory", "another output folder")


def test_a_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = extras.importlib.util.find_spec

    def without_tokenizers(name: str) -> Any:
        return None if name == "tokenizers" else find(name)

    monkeypatch.setattr(extras.importlib.util, "find_spec", without_tokenizers)
    result = call("pretrain", "--config", write(tmp_path), "--output", tmp_path / "runs")
    check_refused(result, "this needs tokenizers", 'pip install "pamm-torch[train]"')
    assert not (tmp_path / "runs").exists()


def test_paragraphs_of_help_are_as_wide_as_the_terminal() -> None:
    for command in (["pretrain"], ["plan"], ["bench", "model"], ["finetune", "glue"]):
        said = call(*command, "--help").output
        lines = [line.strip() for line in said.split("╭")[0].splitlines()]
        example = lines.index("name: first") if "name: first" in lines else len(lines)
        for line, following in itertools.pairwise(lines[:example]):
            # Where a line ends, the first word of the next one has no room.
            fits = following and len(f"{line} {following.split()[0]}") <= 76
            assert not (line and fits), (line, following)
    assert "\n arms:\n   exact: {method: exact}" in re.sub(
        " +\n", "\n", call("pretrain", "--help").output
    )


@pytest.mark.parametrize(
    ("command", "place", "notice"),
    [
        (["ablate", "study.yaml"], "pamm.recipes.studies.study.Study.load", "goes on from here"),
        (["inspect", "llama"], "pamm.analysis.inspect.inspect", "stopped\n"),
    ],
)
def test_what_was_stopped_goes_on_where_it_can(
    command: list[str], place: str, notice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(place, stop)
    result = call(*command)
    assert result.exit_code == 130
    assert result.stderr.endswith(f"{notice}\n" if notice[-1] != "\n" else notice)
