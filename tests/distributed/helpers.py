"""Two processes that train together over gloo."""

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

RANKS = 2


def run(task: Callable[[int], Any], folder: Path) -> list[Any]:
    """What ``task(rank)`` returned on each rank; an error of one is an error here.

    Begin few: most of their time is imports.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.start_processes(_begin, (task, port, str(folder)), nprocs=RANKS, start_method="spawn")
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(RANKS)]


def _begin(rank: int, task: Callable[[int], Any], port: int, folder: str) -> None:
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
    }
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=RANKS)
    try:
        torch.save(task(rank), Path(folder) / f"{rank}.pt")
    finally:
        torch.distributed.destroy_process_group()
