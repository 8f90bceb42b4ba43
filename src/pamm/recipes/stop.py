"""Asks a training process to stop cleanly. Imports nothing slow: it listens from the start."""

import os
import signal


class Stop:
    """Remembers that this process was asked to end.

    The first SIGINT or SIGTERM asks, and so does the end of the process that started this one. A
    second signal ends the process at once.
    """

    def __init__(self) -> None:
        self._signalled = False
        self._parent = os.getppid()

    def listen(self) -> None:
        """Take over SIGINT and SIGTERM."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    @property
    def asked(self) -> bool:
        """Whether to stop after the current step."""
        return self._signalled or os.getppid() != self._parent

    def _on_signal(self, number: int, frame: object) -> None:
        self._signalled = True
        signal.signal(number, signal.SIG_DFL)
