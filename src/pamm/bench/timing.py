"""Timing of several variants of the same work: interleaved, in one process, by medians."""

import statistics
import time
from collections.abc import Callable, Iterator

import torch

Mark = Callable[[str], None]
"""Called by the work measured at the end of each phase, with the phase's name."""


class Clock:
    """Marks in time: events on the device's queue on CUDA, the host's clock elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[str, float | torch.cuda.Event]] = []
        self("start")

    def __call__(self, phase: str) -> None:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((phase, event))
        else:
            self._marks.append((phase, time.perf_counter()))

    def phases_ms(self) -> dict[str, float]:
        """Milliseconds of each phase, and of all as ``total``. Waits for the device."""
        if self._cuda:
            torch.cuda.synchronize()
        phases: dict[str, float] = {}
        for (_, start), (name, end) in zip(self._marks, self._marks[1:], strict=False):
            if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
                elapsed = start.elapsed_time(end)
            else:
                elapsed = 1e3 * (end - start)  # type: ignore[operator]
            phases[name] = phases.get(name, 0.0) + elapsed
        return {**phases, "total": sum(phases.values())}


def interleave(
    arms: dict[str, Callable[[Mark], None]],
    device: torch.device,
    repeats: int,
    warmup: int,
    between: Callable[[], None] = lambda: None,
) -> dict[str, dict[str, float]]:
    """Median milliseconds of every phase of every arm.

    The arms take turns, so that a change of clocks or of load meets all of them. On CUDA nothing
    waits for the device between repeats: the queue stays full, as in training.

    Args:
        arms: work to measure, which calls its argument at the end of each phase.
        device: on which it runs.
        repeats: measurements of each arm.
        warmup: runs of each arm before.
        between: called after every repeat, to show progress.
    """
    clocks: dict[str, list[Clock]] = {name: [] for name in arms}
    for turn in range(warmup + repeats):
        for name, work in arms.items():
            clock = Clock(device)
            work(clock)
            if turn >= warmup:
                clocks[name].append(clock)
        between()
    return {name: _medians([clock.phases_ms() for clock in clocks[name]]) for name in arms}


def _medians(samples: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(sample[name] for sample in samples) for name in samples[0]}


def peaks(work: Callable[[], None], device: torch.device) -> Iterator[tuple[str, int]]:
    """The most memory allocated and reserved while ``work`` runs; nothing off CUDA.

    It has run before by then: kernels are compiled, and the optimizer has its state.
    """
    for _ in range(2):
        work()
    if device.type != "cuda":
        return
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize()
    yield "peak_allocated_bytes", torch.cuda.max_memory_allocated(device)
    yield "peak_reserved_bytes", torch.cuda.max_memory_reserved(device)
