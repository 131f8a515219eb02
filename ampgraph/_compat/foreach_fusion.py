"""A mend of Inductor's fusion of lists: kernels for GPUs run the parts side by side.

Tried on torch 2.11 (on a GPU), 2.13 (on a CPU) and 2.14 (compiled for a GPU, not run).

Inductor fuses what makes a tensor into one part of such a kernel, although other parts of it read the tensor
too: they read memory that is not written yet. Seen on an H200 with torch 2.11: the number that says whether a
step is skipped, made in one part, and read in the parts of all parameters.

Torch 2.11 also tries to reorder the loops of such a kernel, and raises an assertion if a part is fused.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

_lock = threading.RLock()


def compiling_lists_soundly(backend: Callable) -> Callable:
    """Returns a backend of ``torch.compile`` that compiles with the mend, at later calls, too."""

    def compiling(graph_module: torch.fx.GraphModule, inputs: list, **options: Any) -> Any:
        with sound_foreach_fusion():
            return backend(graph_module, inputs, **options)

    return compiling


@contextlib.contextmanager
def sound_foreach_fusion() -> Iterator[None]:
    """Inductor fuses into a kernel over lists only what one part of it reads, and keeps its loops."""
    from torch._inductor import config
    from torch._inductor.scheduler import ForeachKernelSchedulerNode as Kernel

    def only_reader(self: Any, producer: Any) -> Any:
        made = {buffer.get_name() for buffer in producer.get_outputs()}
        readers = [part for part in self.snodes if any(r.name in made for r in part.read_writes.reads)]
        return readers[0] if len(readers) == 1 else None

    def stay(*_: Any) -> bool:
        return False

    parts = mock.patch.object(Kernel, "get_consumer_subnode_for", only_reader)
    loops = mock.patch.object(Kernel, "reorder_loops_by_dep_pair", stay)
    with _lock, parts, loops, config.patch(post_grad_custom_post_pass=_marked(config)):
        yield


def _marked(config: Any) -> Any:
    """Returns a pass that changes nothing: its name is in the key of Inductor's cache."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    given = config.post_grad_custom_post_pass

    class Marked(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            if given is not None:
                given(graph)

        def uuid(self) -> Any:
            own = "ampgraph: sound fusion of lists, 1"
            return own if given is None else (own, given.uuid())

    if given is not None and not isinstance(given, CustomGraphPass):  # Inductor then caches nothing
        return given
    return Marked()
