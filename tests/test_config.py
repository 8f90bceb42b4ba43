"""What a configuration accepts, refuses and remembers."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from pamm import PammConfig, PammError
from pamm.config import METHODS


def test_the_default_is_what_costs_least_and_the_papers_form_has_its_recommendation() -> None:
    assert PammConfig() == PammConfig("sampled", 2 / 3, fp8=True)
    config = PammConfig("pamm")
    assert (config.ratio, config.tolerance) == (1 / 512, None)


@pytest.mark.parametrize(
    "given", [{"ratio": "1/128"}, {"tolerance": 0.5}, {"directions": 8}], ids=str
)
def test_a_number_without_the_method_it_is_for_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(
        PammError, match=r"is (1/128|0\.5|8), but what it means depends on the method"
    ):
        PammConfig(**given)


@pytest.mark.parametrize("method", [name for name in METHODS if name != "pamm"])
def test_a_tolerance_for_a_method_without_one_is_refused(method: str) -> None:
    assert PammConfig(method, tolerance=math.inf).tolerance is None
    with pytest.raises(
        PammError, match=f"tolerance is 0.5, which method 'pamm' alone has.*{method}"
    ):
        PammConfig(method, tolerance=0.5)


@pytest.mark.parametrize("method", [name for name in METHODS if name != "sampled"])
def test_directions_for_a_method_without_them_are_refused(method: str) -> None:
    assert PammConfig(method).directions is None
    with pytest.raises(
        PammError, match=f"directions is 8, which method 'sampled' alone has.*{method}"
    ):
        PammConfig(method, directions=8)


@pytest.mark.parametrize("method", ["exact", "recompute"])
def test_a_ratio_for_a_method_without_one_is_refused(method: str) -> None:
    config = PammConfig(method)
    assert config.ratio is None
    assert config.generators(40) == 40
    assert PammConfig.from_dict(config.to_dict()) == config
    assert dataclasses.replace(config, seed=1) == PammConfig(method, seed=1)
    with pytest.raises(PammError, match=f"ratio is 0.125, .* leave it out with '{method}'"):
        PammConfig(method, 1 / 8)


def test_the_method_of_a_configuration_can_be_replaced() -> None:
    assert dataclasses.replace(PammConfig(), method="pamm", ratio=1 / 8) == PammConfig(
        "pamm", 1 / 8
    )


@pytest.mark.parametrize("directions", [-1, 0.5, "64", True])
def test_bad_directions_say_what_is_allowed(directions: object) -> None:
    with pytest.raises(PammError, match="give a whole number, 0 or above"):
        PammConfig("sampled", directions=directions)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["1/128", "0.0078125", 1 / 128])
def test_ratio_is_read_from_fractions_and_numbers(text: str | float) -> None:
    assert PammConfig("pamm", text).ratio == 1 / 128  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ratio", "tokens", "k"),
    [
        (1 / 512, 32768, 64),
        (1 / 512, 32769, 65),
        (1 / 512, 100, 1),
        (0.1, 30, 3),  # 0.1 * 30 is 3.0000000000000004 in floating point
        (1.0, 17, 17),
        (0.999, 3, 3),
        (1 / 128, 1, 1),
        (1e-9, 5, 1),
        (0.5, 0, 0),
    ],
)
def test_number_of_generators(ratio: float, tokens: int, k: int) -> None:
    assert PammConfig("pamm", ratio).generators(tokens) == k


@pytest.mark.parametrize("ratio", [0, -0.1, 2, math.nan, math.inf, "one", "1/0", True])
def test_bad_ratio_says_what_is_allowed(ratio: object) -> None:
    with pytest.raises(PammError, match="above 0 and at most 1, such as 1/512"):
        PammConfig("pamm", ratio)  # type: ignore[arg-type]


@pytest.mark.parametrize("tolerance", [-1, math.nan, "wide", True])
def test_bad_tolerance_says_what_is_allowed(tolerance: object) -> None:
    with pytest.raises(PammError, match="0 or above, or None"):
        PammConfig("pamm", tolerance=tolerance)  # type: ignore[arg-type]


def test_infinite_tolerance_is_none() -> None:
    assert PammConfig("pamm", tolerance=math.inf) == PammConfig("pamm", tolerance=None)


def test_bad_method_lists_the_methods() -> None:
    with pytest.raises(
        PammError, match="'svd'; choose one of pamm, subspace, uniform_crs, compact, recompute"
    ):
        PammConfig(method="svd")


@pytest.mark.parametrize("seed", [-1, 1.5, "a", True])
def test_bad_seed(seed: object) -> None:
    with pytest.raises(PammError, match="whole number"):
        PammConfig(seed=seed)  # type: ignore[arg-type]


def test_is_frozen_and_hashable() -> None:
    config = PammConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.ratio = 0.5  # type: ignore[misc]
    assert hash(config) == hash(PammConfig())


@pytest.mark.parametrize("name", ["config.json", "config.yaml", "config.yml"])
@pytest.mark.parametrize("tolerance", [None, 0.25])
def test_round_trip_through_files(tmp_path: Path, name: str, tolerance: float | None) -> None:
    config = PammConfig("pamm", ratio=1 / 3, tolerance=tolerance, seed=1 << 40)
    config.save(tmp_path / name)
    assert PammConfig.load(tmp_path / name) == config


def test_a_person_may_write_a_fraction(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("method: pamm\nratio: 1/256\ntolerance: .inf\n")
    assert PammConfig.load(tmp_path / "config.yaml") == PammConfig("pamm", 1 / 256)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.yaml", "raito: 0.1", "no key 'raito'; did you mean 'ratio'"),
        ("config.yaml", "- 1", "holds list"),
        ("config.json", "{", "not valid JSON"),
        ("config.yaml", "a: [", "not valid YAML"),
        ("config.toml", "a = 1", "must end in .json, .yaml or .yml"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(PammError, match=message):
        PammConfig.load(tmp_path / name)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(PammError, match=r"cannot read .*No such file"):
        PammConfig.load(tmp_path / "none.yaml")


@pytest.mark.parametrize("values", [None, "pamm"])
def test_what_is_no_mapping_is_refused(values: object) -> None:
    with pytest.raises(PammError, match=r"the PAMM configuration is .*; give a mapping"):
        PammConfig.from_dict(values)  # type: ignore[arg-type]


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "pamm.json"
    with pytest.raises(PammError, match=f"cannot write {path}: No such file or directory"):
        PammConfig().save(path)
