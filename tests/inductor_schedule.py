"""The kernels that Inductor schedules for a training step, and their bytes; compiles and runs nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._guards import TracingContext
from torch._inductor import compile_fx as inductor
from torch._inductor import config, ir, scheduler
from torch._inductor.debug import DebugContext
from torch._inductor.dependencies import StarDep, WeakDep
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V


class Kernel(NamedTuple):
    """One kernel: its name, the bytes that it reads and writes, and whether Inductor generates its code."""

    name: str
    bytes: int
    is_generated: bool


@dataclass
class Schedule:
    """The kernels of a step.

    Attributes:
        forward: Kernels of the forward.
        backward: Kernels of the backward, if there is one.
        saved: Bytes of the tensors that the forward saves for the backward; inputs and parameters excluded.
    """

    forward: list[Kernel] = field(default_factory=list)
    backward: list[Kernel] = field(default_factory=list)
    saved: int = 0

    @property
    def bytes(self) -> tuple[int, int]:
        """Bytes of forward and backward."""
        return sum(k.bytes for k in self.forward), sum(k.bytes for k in self.backward)


class _ScheduledError(Exception):
    """Ends a compilation when all graphs are scheduled."""


def scheduled(function: Callable, *args: Any) -> Schedule:
    """Returns the kernels that Inductor schedules for a call; with gradients, also those of its backward."""
    found = Schedule()

    def inner_compile(graph_module: fx.GraphModule, example_inputs: Any, **options: Any) -> Callable:
        is_backward = bool(options.get("is_backward"))
        if is_backward:
            found.saved = _saved(graph_module)
        kernels = _kernels(graph_module, example_inputs, is_backward)
        (found.backward if is_backward else found.forward).extend(kernels)
        return _never_run

    def backend(graph_module: fx.GraphModule, example_inputs: Any) -> Callable:
        return inductor.compile_fx(graph_module, example_inputs, inner_compile=inner_compile)

    torch._dynamo.reset()
    eagerly = functorch_config.patch(force_non_lazy_backward_lowering=True, enable_autograd_cache=False)
    with eagerly, config.patch(force_disable_caches=True):
        try:
            torch.compile(function, backend=backend, fullgraph=True)(*args)
        except _ScheduledError:
            return found
    raise AssertionError("Inductor compiled no graph")


def _never_run(inputs: list) -> None:
    raise _ScheduledError


_never_run._boxed_call = True  # type: ignore[attr-defined]


def _saved(backward: fx.GraphModule) -> int:
    inputs = backward.graph.find_nodes(op="placeholder")
    saved = [n.meta.get("val") for n in inputs if not n.name.startswith(("primals", "tangents"))]
    return sum(t.numel() * t.element_size() for t in saved if isinstance(t, torch.Tensor))


def _kernels(graph_module: fx.GraphModule, example_inputs: Any, is_backward: bool) -> list[Kernel]:
    """Lowers and fuses a graph as Inductor does before it generates code."""
    inductor.view_to_reshape(graph_module)
    with torch.no_grad():
        mode = inductor.fake_tensor_prop(graph_module, example_inputs)
    inductor._recursive_record_original_output_strides(graph_module)
    with V.set_fake_mode(mode):
        inductor._recursive_post_grad_passes(graph_module, is_inference=False)
    shapes = inductor.shape_env_from_inputs(example_inputs)
    graph = GraphLowering(
        graph_module, example_inputs=example_inputs, shape_env=shapes, is_backward=is_backward
    )
    with V.set_debug_handler(DebugContext()), V.set_fake_mode(mode), V.set_graph_handler(graph):
        graph.run(*example_inputs)
        if not is_backward:
            _report_strides(graph)
        graph.init_wrapper_code()
        graph._update_scheduler()
        return [_kernel(node) for node in graph.scheduler.nodes if _is_kernel(node)]


def _report_strides(graph: GraphLowering) -> None:
    """Tells AOTAutograd the layouts of the forward's outputs, in which the backward gets what is saved.

    Inductor may give a saved tensor another layout than eager, for convolutions above all.
    """
    context = TracingContext.try_get()
    if context is None or context.output_strides is None:
        return
    sizes = graph.sizevars
    numbers = getattr(sizes, "guarding_hints_or_throw", None) or sizes.size_hints_or_throw  # torch 2.11
    for out in graph.graph_outputs:
        has_layout = isinstance(out, ir.IRNode) and out.has_tensor_output()
        strides = numbers(out.get_stride()) if has_layout else None
        context.output_strides.append(None if strides is None else tuple(strides))


def _is_kernel(node: scheduler.BaseSchedulerNode) -> bool:
    if isinstance(node, scheduler.NopKernelSchedulerNode):
        return False
    is_extern = isinstance(node, scheduler.ExternKernelSchedulerNode)
    return not (is_extern and type(node.node).__name__ == "MultiOutput")


def _kernel(node: scheduler.BaseSchedulerNode) -> Kernel:
    is_extern = isinstance(node, scheduler.ExternKernelSchedulerNode)
    name = (getattr(node.node, "python_kernel_name", None) or type(node.node).__name__) if is_extern else ""
    return Kernel(name or "+".join(n.get_name() for n in node.get_nodes()), _bytes(node), not is_extern)


def _bytes(node: scheduler.BaseSchedulerNode) -> int:
    """Returns the bytes that Inductor counts for a kernel, without those that it does not move.

    A write in place depends on each kernel that reads the old value, and on that value.
    """
    accessed = node.get_read_write_buffer_accesses(include_reads=True, include_writes=True)
    deps = [*node.read_writes.reads, *node.read_writes.writes]
    is_extern = isinstance(node, scheduler.ExternKernelSchedulerNode)
    written = {name for buffer in node.get_outputs() for name in buffer.get_mutations()}
    moved = {
        dep.name
        for dep in deps
        if not isinstance(dep, WeakDep)
        and (is_extern or not (isinstance(dep, StarDep) and dep.name in written))
    }
    return sum(size for name, size in accessed.items() if name in moved and not _stays_inside(node, name))


def _stays_inside(node: scheduler.BaseSchedulerNode, name: str) -> bool:
    """Whether a kernel makes a value that no other kernel reads, so that it needs no memory."""
    own = {inner.get_name() for inner in node.get_nodes()}
    buffer = node.scheduler.name_to_buf.get(name)
    if buffer is None or buffer.get_mutations() or name not in {d.name for d in node.read_writes.writes}:
        return False
    return len(own) > 1 and all(user.is_weak or user.get_name() in own for user in buffer.users)
