"""Which of the processes that torchrun or ``accelerate launch`` started this one is."""

import os


def rank() -> int:
    """Number of this process, from 0; 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def processes() -> int:
    """How many there are, on all hosts; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))
