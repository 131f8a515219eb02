"""Processes with a gloo group between them, for tests of distributed training."""

from __future__ import annotations

import datetime
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing import Pipe, current_process
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .forks import Fork

SIZE = 2
SECONDS = 120


class Ranks:
    """Runs top-level functions ``f(rank, *args)`` on all ranks at once; processes live from test to test."""

    def __init__(self, size: int = SIZE, imports: Sequence[str] = ()) -> None:
        """Starts nothing yet. ``imports`` are modules that the functions import, read once for all ranks."""
        self._size = size
        self._imports = imports
        self._processes: list[Fork] = []

    def run(self, function: Callable, *args: Any) -> list[Any]:
        """Returns what each rank returned.

        Raises:
            RuntimeError: A rank raised or did not answer; the message has every rank's traceback.
        """
        if not self._processes:
            self._start()
        for connection in self._connections:
            connection.send((function, args))
        answers = [c.recv() if c.poll(SECONDS) else ("no answer", None) for c in self._connections]
        failures = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(answers) if text]
        if failures:
            self.stop()
            raise RuntimeError("\n".join(failures))
        return [result for _, result in answers]

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        self._connections = []
        for rank in range(self._size):
            ours, theirs = Pipe()
            arguments = (bytes(current_process().authkey), rank, self._size, store)
            self._processes.append(Fork(_serve, *arguments, pipe=theirs.fileno(), imports=self._imports))
            self._connections.append(ours)
            theirs.close()

    def stop(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.kill()
        if self._processes:
            self._folder.cleanup()
        self._processes = []


def _serve(pipe: int, key: bytes, rank: int, size: int, store: str) -> None:
    current_process().authkey = key  # tensors travel as shared memory
    connection = Connection(pipe)
    torch.set_num_threads(1)
    # A test that falls back to another capture says nothing of the one it names.
    warnings.filterwarnings("error", ".*captured just in time instead")
    timeout = datetime.timedelta(seconds=SECONDS // 2)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=size, timeout=timeout)
    while True:
        function, args = connection.recv()
        torch.manual_seed(0)
        try:
            connection.send(("", function(rank, *args)))
        except Exception:
            connection.send((traceback.format_exc(), None))


def gathered(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Returns every rank's tensor."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.detach().contiguous())
    return parts
