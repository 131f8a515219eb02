"""Records the kernels that Inductor schedules, without running them. `gpu_compile_check.py` uses it."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch._inductor.async_compile import AsyncCompile
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.scheduler import Scheduler

CASTS = ("prims.convert_element_type", "aten._to_copy")
VIEWS = ("view", "permute", "reshape", "expand", "squeeze", "select", "slice", "transpose", "alias")


@dataclass
class Graph:
    """One graph as Inductor scheduled it.

    Attributes:
        kernels: Name and source of its Triton kernels.
        calls: Calls of libraries' kernels and fallbacks, by name.
        fused: Casts inside a Triton kernel with other ops.
        alone: Triton kernels that only cast.
        bytes: What all its kernels read and write, by Inductor's count.
    """

    kernels: list[tuple[str, str]] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)
    fused: int = 0
    alone: int = 0
    bytes: int = 0


GRAPHS: list[Graph] = []


class _NotRun:
    def run(self, *args: object, **kwargs: object) -> None:
        raise RuntimeError("there is no GPU")


def record() -> None:
    """Keeps what Inductor schedules, and the kernels' sources instead of compiling them at once."""

    def triton(self: Any, kernel_name: str, source_code: str, device_str: str = "cuda") -> _NotRun:
        GRAPHS[-1].kernels.append((kernel_name, source_code))
        return _NotRun()

    AsyncCompile.triton = triton
    codegen = Scheduler.codegen

    def recorded(self: Any) -> Any:
        for node in self.nodes:
            _note(GRAPHS[-1], node)
        return codegen(self)

    Scheduler.codegen = recorded


def _note(graph: Graph, node: Any) -> None:
    if type(node).__name__ == "NopKernelSchedulerNode":
        return
    if node.is_extern() and not node.is_template():
        if type(node.node).__name__ in ("MultiOutput", "DynamicScalar", "InputsKernel"):
            return
        graph.calls[_library_name(node.node)] += 1
        graph.bytes += node.get_read_write_buffers_sizes()
        return
    graph.bytes += node.get_read_write_buffers_sizes()
    ops = {origin for inner in node.get_nodes() for origin in getattr(inner.node, "origins", None) or ()}
    names = [str(op.target) for op in ops if op.op == "call_function"]
    casts = [name for name in names if name.startswith(CASTS)]
    others = [n for n in names if n not in casts and not any(view in n for view in VIEWS)]
    if others:
        graph.fused += len(casts)
    elif casts:
        graph.alone += 1


def _library_name(kernel: Any) -> str:
    kind = type(kernel).__name__
    target = getattr(kernel, "op_overload", None)
    name = getattr(kernel, "python_kernel_name", None) or str(target or kind)
    name = re.sub(r"torch\.ops\.|extern_kernels\.|\.default", "", name)
    return f"fallback {name}" if kind == "FallbackKernel" else name


def _inner_compile(graph_module: Any, inputs: Any, **given: Any) -> Callable:
    """Inductor's compiler of one graph; what it returns runs the graph on fake tensors."""
    runnable = copy.deepcopy(graph_module)
    GRAPHS.append(Graph())
    compile_fx_inner(graph_module, inputs, **given)

    def run(args: list) -> Any:
        result = runnable(*args)
        args.clear()
        return result

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def backend(graph_module: Any, inputs: Any) -> Any:
    """torch.compile's backend: Inductor, without running what it makes."""
    return compile_fx(graph_module, inputs, inner_compile=_inner_compile)
