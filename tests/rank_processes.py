"""Ranks in processes of their own, forked from a server that has imported what they need."""

import contextlib
import faulthandler
import multiprocessing
import os
import socket
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
import torch.multiprocessing

IMPORTED_ONCE = (
    *("pytest", "peft", "tree_rl.models", "tree_rl.training", "tree_rl.benchmark.against_verl.engines"),
    *("tree_rl.tree.partition.solver", "tree_rl.verl_plugin.engine.engine", "verl.workers.utils.losses"),
)
"""Importing them costs more than a test's ranks do. Modules of tests are not among them: the server finds none."""


def free_port() -> int:
    """A port below those that the system hands out itself: those may be taken again before the ranks listen."""
    for port in range(20_000 + os.getpid() * 37 % 10_000, 32_000):
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port
    raise OSError("no free port between 20000 and 32000")


def start_ranks(main: Callable[..., None], world: int, *arguments: Any) -> None:
    """Run `main(rank, world, *arguments)` in one process per rank and wait; a rank's error is raised here."""
    # A fork of a process that has asked for GPUs could not use them.
    method = "spawn" if torch.cuda.is_available() else "forkserver"
    # One server serves all tests of this process: whichever starts it, it imports what the others have imported too.
    multiprocessing.set_forkserver_preload([name for name in IMPORTED_ONCE if name in sys.modules])
    torch.multiprocessing.start_processes(main, args=(world, *arguments), nprocs=world, start_method=method)


def run_ranks(
    main: Callable[..., Any], world: int, *arguments: Any, backend: str = "gloo", seconds: float = 280.0
) -> list[Any]:
    """Run `main(rank, *arguments)` in one process per rank; what each returned. A rank's error is raised here.

    The ranks are a process group; where one fails, the others wait for it so many seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        start_ranks(_run_rank, world, main, arguments, backend, seconds, free_port(), folder)
        return [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(world)]


def _run_rank(
    rank: int,
    world: int,
    main: Callable[..., Any],
    arguments: tuple[Any, ...],
    backend: str,
    seconds: float,
    port: int,
    folder: str,
) -> None:
    faulthandler.enable()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    if "nccl" in backend:
        torch.cuda.set_device(rank)
    torch.distributed.init_process_group(backend, rank=rank, world_size=world, timeout=timedelta(seconds=seconds))
    torch.save(main(rank, *arguments), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()
