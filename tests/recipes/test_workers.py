"""Which worker sees which GPU."""

import pytest

from pamm.recipes import workers as module


@pytest.mark.parametrize(
    ("visible", "count", "workers", "expected"),
    [
        (None, 0, None, [None]),
        (None, 0, 3, [None, None, None]),
        (None, 2, None, ["0", "1"]),
        ("4,6", 2, None, ["4", "6"]),
        (None, 2, 3, ["0", "1", "0"]),
    ],
)
def test_there_is_a_worker_for_each_gpu(
    monkeypatch: pytest.MonkeyPatch,
    visible: str | None,
    count: int,
    workers: int | None,
    expected: list[str | None],
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    assert module._devices(workers) == expected
