"""Which of the processes that torchrun or ``accelerate launch`` started this one is."""

import os


def rank() -> int:
    """Number of this process, from 0; 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def processes() -> int:
    """How many there are, on all hosts; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def ignore_launcher() -> None:
    """Forget all else that ``accelerate launch`` says, or the file of ``accelerate config``.

    Its precision, compiling and sharding would take the place of what the run's configuration says,
    and no result would tell.
    """
    how = ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_DYNAMO_", "ACCELERATE_USE_", "FSDP_")
    for name in [name for name in os.environ if name.startswith(how)]:
        del os.environ[name]
