"""The private random stream: uniform, without replacement, reproducible, and private."""

import collections
import math
import pickle
import random
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing

from pamm import PammError, Stream
from pamm.stream import check_step
from tests.tolerances import SMALLEST_P

CPU = torch.device("cpu")


def chi_square_p(counts: list[int], expected: float) -> float:
    """Upper tail of the chi-square statistic, by the Wilson-Hilferty normal approximation."""
    degrees = len(counts) - 1
    statistic = sum((count - expected) ** 2 / expected for count in counts)
    z = ((statistic / degrees) ** (1 / 3) - 1 + 2 / (9 * degrees)) / math.sqrt(2 / (9 * degrees))
    return 0.5 * math.erfc(z / math.sqrt(2))


@pytest.mark.parametrize("tokens", [*range(1, 20), 100, 257, 1000, 32768, 99991])
def test_rows_are_in_range_and_distinct(tokens: int) -> None:
    for k in {1, (tokens + 1) // 2, tokens}:
        index = Stream(seed=5, name="a").draw(tokens, k, CPU)
        assert len(index.unique()) == k
        assert 0 <= index.min() <= index.max() < tokens


def test_more_rows_than_there_are_cannot_be_drawn() -> None:
    for draw in (Stream().draw, Stream().draw_again):
        with pytest.raises(PammError, match="k is 8, of 4 rows"):
            draw(4, 8, torch.device("cpu"))


def test_drawing_nothing_from_nothing() -> None:
    assert Stream().draw(0, 0, CPU).shape == (0,)


@pytest.mark.parametrize(("tokens", "k"), [(2, 1), (4, 2), (5, 2), (6, 3), (7, 2), (9, 1), (8, 2)])
def test_every_subset_is_equally_likely(tokens: int, k: int) -> None:
    stream, draws = Stream(seed=0, name="subsets"), 4_000
    seen = collections.Counter(
        tuple(sorted(stream.draw(tokens, k, CPU).tolist())) for _ in range(draws)
    )
    subsets = math.comb(tokens, k)
    counts = list(seen.values()) + [0] * (subsets - len(seen))
    assert chi_square_p(counts, draws / subsets) > SMALLEST_P


@pytest.mark.parametrize(("tokens", "k"), [(200, 20), (4096, 32)])
def test_every_row_is_equally_likely(tokens: int, k: int) -> None:
    stream, draws = Stream(seed=0, name="rows"), 2_000
    counts = torch.zeros(tokens)
    for _ in range(draws):
        counts[stream.draw(tokens, k, CPU)] += 1
    assert chi_square_p(counts.tolist(), draws * k / tokens) > SMALLEST_P


def test_chi_square_can_fail() -> None:
    """A stream that never drew the last row would be caught."""
    counts = [int(12_000 / 9)] * 9 + [0]
    assert chi_square_p(counts, 12_000 / 10) < SMALLEST_P


def test_global_random_state_is_neither_read_nor_changed() -> None:
    torch.manual_seed(1)
    random.seed(1)
    before = torch.get_rng_state(), random.getstate()
    one = Stream(seed=3).draw(1000, 10, CPU)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    torch.manual_seed(2)
    assert torch.equal(one, Stream(seed=3).draw(1000, 10, CPU))


def test_seed_name_and_position_each_change_the_draw() -> None:
    draws = [
        Stream(seed=3, name="a").draw(10**6, 8, CPU),
        Stream(seed=4, name="a").draw(10**6, 8, CPU),
        Stream(seed=3 + (1 << 32), name="a").draw(10**6, 8, CPU),
        Stream(seed=3, name="b").draw(10**6, 8, CPU),
    ]
    stream = Stream(seed=3, name="a")
    stream.draw(10**6, 8, CPU)
    draws.append(stream.draw(10**6, 8, CPU))
    stream.seek(1)
    draws.append(stream.draw(10**6, 8, CPU))
    assert len({tuple(draw.tolist()) for draw in draws}) == len(draws)


def test_ranks_draw_different_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Stream().draw(10**6, 8, CPU)
    monkeypatch.setattr("pamm.stream._rank", lambda: 1)
    assert not torch.equal(first, Stream().draw(10**6, 8, CPU))


def test_seek_makes_the_draw_a_function_of_the_step() -> None:
    straight, resumed = Stream(seed=1), Stream(seed=1)
    history = []
    for step in range(4):
        straight.seek(step)
        history.append([straight.draw(500, 5, CPU) for _ in range(3)])
    resumed.seek(3)
    for expected in history[3]:
        assert torch.equal(resumed.draw(500, 5, CPU), expected)


@pytest.mark.parametrize(
    "step", [np.int32(5), np.uint8(5), torch.tensor(5, dtype=torch.int32)], ids=repr
)
def test_a_step_may_be_any_integer(step: Any) -> None:
    stream = Stream()
    stream.seek(check_step(step))
    assert stream.position == 5 << 32


@pytest.mark.parametrize("step", [True, 2.5, torch.tensor(2.5), np.int32(-1), "2"], ids=repr)
def test_what_is_no_step_is_refused(step: Any) -> None:
    with pytest.raises(PammError, match="give the number of the training step"):
        check_step(step)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Stream(seed=-1), "seed is -1; give a whole number"),
        (lambda: Stream(backend="Torch"), "backend is 'Torch'; choose one of auto, triton, torch"),
        (lambda: Stream().draw(8, 9, CPU), "k is 9, of 8 rows; draw 0 or more"),
        (lambda: Stream().draw(8, -1, CPU), "k is -1, of 8 rows; draw 0 or more"),
    ],
)
def test_a_stream_says_what_it_takes(call: Callable[[], object], message: str) -> None:
    with pytest.raises(PammError, match=message):
        call()


def test_a_copy_in_shared_memory_draws_by_itself() -> None:
    stream = Stream(seed=3)
    # What torch.multiprocessing does with the arguments of a process.
    other = pickle.loads(ForkingPickler.dumps(stream))
    for _ in range(3):
        other.draw(8, 3, CPU)
    assert (stream.position, other.position) == (0, 3)
