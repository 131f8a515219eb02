"""A mend of Inductor's fusion of lists (torch 2.11 to 2.15): kernels for GPUs run the parts side by side.

Inductor fuses what makes a tensor into one part of such a kernel, although other parts of it read the tensor
too: they read memory that is not written yet. Seen on an H200 with torch 2.11: the number that says whether a
step is skipped, made in one part, and read in the parts of all parameters.

Torch 2.11 also tries to reorder the loops of such a kernel, and raises an assertion if a part is fused.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

_lock = threading.RLock()


@contextlib.contextmanager
def sound_foreach_fusion() -> Iterator[None]:
    """Inductor fuses into a kernel over lists only what one part of it reads, and keeps its loops."""
    from torch._inductor.scheduler import ForeachKernelSchedulerNode as Kernel

    def only_reader(self: Any, producer: Any) -> Any:
        made = {buffer.get_name() for buffer in producer.get_outputs()}
        readers = [part for part in self.snodes if any(r.name in made for r in part.read_writes.reads)]
        return readers[0] if len(readers) == 1 else None

    def stay(*_: Any) -> bool:
        return False

    parts = mock.patch.object(Kernel, "get_consumer_subnode_for", only_reader)
    loops = mock.patch.object(Kernel, "reorder_loops_by_dep_pair", stay)
    with _lock, parts, loops:
        yield
