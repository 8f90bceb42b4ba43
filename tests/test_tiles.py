"""Tiles: the first candidate serves until a file says what was faster on this GPU."""

import json
from pathlib import Path

import pytest
import torch

from pamm.bench import tune as bench_tune
from pamm.errors import PammError
from pamm.kernels import tiles

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tiles, "gpu", lambda device: "some GPU")
    tiles.chosen.cache_clear()
    tiles.tile.cache_clear()


@pytest.mark.parametrize("kernel", tiles.CANDIDATES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [1, 32, 200, 4096])
def test_the_first_candidate_is_the_default(kernel: str, k: int, dtype: torch.dtype) -> None:
    candidates = tiles.CANDIDATES[kernel](k, dtype)
    assert len(candidates) <= 4
    assert tiles.tile(kernel, k, dtype, CPU) == candidates[0]
    assert tiles.tile(kernel, k, dtype, CUDA) == candidates[0]


def test_what_was_tuned_on_this_gpu_is_used() -> None:
    best = tiles.CANDIDATES["assign"](64, torch.bfloat16)[1]
    tiles.chosen(CUDA)[tiles.key("assign", 60, torch.bfloat16)] = best
    bench_tune._save(CUDA)
    tiles.chosen.cache_clear()
    assert tiles.tile("assign", 33, torch.bfloat16, CUDA) == best
    assert tiles.tile("assign", 65, torch.bfloat16, CUDA) != best
    assert tiles.tile("assign", 64, torch.bfloat16, CPU) != best


def test_other_gpus_keep_their_choices() -> None:
    path = tiles.cache_file()
    path.parent.mkdir()
    path.write_text(json.dumps({"other GPU": {"assign": {"BLOCK_T": 1}}}))
    bench_tune._save(CUDA)
    assert json.loads(path.read_text()) == {
        "other GPU": {"assign": {"BLOCK_T": 1}},
        "some GPU": {},
    }


@pytest.mark.parametrize("text", ["no JSON", "[]", '{"some GPU": {"assign": {"BLOCK_T": "x"}}}'])
def test_a_broken_file_is_named(text: str) -> None:
    tiles.cache_file().parent.mkdir()
    tiles.cache_file().write_text(text)
    with pytest.raises(PammError, match="delete it"):
        tiles.tile("assign", 64, torch.bfloat16, CUDA)
