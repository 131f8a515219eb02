"""Regions of model code that force a precision.

A guard is a mark that capture carries onto every node made inside it (``node.meta["custom"]``); it
changes nothing by itself. Outside a capture it costs one Python check.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from functools import cache

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx import traceback as fx_traceback

from ._compat import is_compiling, is_exporting, is_traced, keep_dynamo_out, never_log_raised_errors
from .errors import warn_user

GUARD_KEY = "ampgraph_guard"
FP16, FP32, LISTS = "fp16", "fp32", "lists"
_MODEL_KEY = "ampgraph_guarded_model"

# Set while a just-in-time model runs. A guard that Python enters then was not captured.
_running = threading.local()


@contextlib.contextmanager
def fp16_guard() -> Iterator[None]:
    """Runs the guarded code in the policy's low dtype (Paddle's ``fp16_guard``).

    Works as a context manager and as a decorator, nests (the innermost guard wins), and has no
    effect outside a converted model. Each ``with`` takes a new guard. Ops that have no low-precision
    kernel, and ops with a constant that the low dtype cannot hold, stay in float32.

    Example:
        >>> with ampgraph.fp16_guard():
        ...     x = self.attention(x)
    """
    if not _capturing("fp16_guard"):
        yield
        return
    with fx_traceback.annotate({GUARD_KEY: FP16}), _keeping_marks():
        yield


@contextlib.contextmanager
def fp32_guard() -> Iterator[None]:
    """Runs the guarded code in float32 and overrides the op lists; the opposite of `fp16_guard`."""
    if not _capturing("fp32_guard"):
        yield
        return
    with fx_traceback.annotate({GUARD_KEY: FP32}), _keeping_marks():
        yield


def _keeping_marks() -> contextlib.AbstractContextManager:
    """Keeps the marks in an export that the user runs, for a later conversion."""
    if torch.compiler.is_dynamo_compiling() or not is_exporting():  # Dynamo traces bodies of torch.cond
        return contextlib.nullcontext()
    return fx_traceback.preserve_node_meta()


def guard_of(node: Node) -> str | None:
    """Returns the innermost guard around ``node``: ``"fp16"``, ``"fp32"``, ``"lists"`` or None."""
    return (node.meta.get("custom") or {}).get(GUARD_KEY)


def set_guard(node: Node, guard: str) -> None:
    """Marks ``node`` and replaces an earlier mark."""
    node.meta["custom"] = {**(node.meta.get("custom") or {}), GUARD_KEY: guard}


def has_guarded_region(graph_module: GraphModule, guard: str = FP16) -> bool:
    """Whether a graph, or a body inside it, has nodes whose innermost guard is this one."""
    graphs = [m.graph for m in graph_module.modules() if isinstance(m, GraphModule)]
    return any(guard_of(node) == guard for graph in graphs for node in graph.nodes)


def mark_guarded_model(graph: Graph) -> None:
    """Marks a graph as one of a model that has an `fp16_guard` in some graph."""
    graph.output_node().meta[_MODEL_KEY] = True


def is_of_guarded_model(graph_module: GraphModule) -> bool:
    """Whether a graph is one of a model that has an `fp16_guard`, in this graph or in another."""
    return _MODEL_KEY in graph_module.graph.output_node().meta or has_guarded_region(graph_module)


@contextlib.contextmanager
def warn_about_uncaptured_guards() -> Iterator[None]:
    """While active, warns once about a guard that executes instead of being captured."""
    _keep_dynamo_out_of_guards()
    before = getattr(_running, "active", False)
    _running.active = True
    try:
        yield
    finally:
        _running.active = before


@cache
def keep_errors_out_of_log() -> None:
    """Keeps torch from logging errors that it also raises, while a just-in-time model runs."""
    never_log_raised_errors(lambda: getattr(_running, "active", False))


@cache
def _keep_dynamo_out_of_guards() -> None:
    """Stops Dynamo from compiling a guard outside a graph; the guard would look captured."""
    for function in (fp16_guard, fp32_guard):
        keep_dynamo_out(function.__wrapped__)  # type: ignore[attr-defined]
    keep_dynamo_out(_capturing)
    keep_dynamo_out(is_capturing)
    keep_dynamo_out(_keeping_marks)


def is_capturing() -> bool:
    """Whether ampgraph, or an export of the user with a guard, captures now and keeps marks on nodes."""
    return fx_traceback.has_preserved_node_meta() and is_traced()  # the marks are the process's


def _capturing(name: str) -> bool:
    if is_compiling() or is_capturing():
        return True
    if getattr(_running, "active", False):
        warn_user(
            f"{name}: this region runs outside the captured graph, in float32: a graph break inside the "
            "guard made torch.compile skip the frame. Move the break (print, .item(), data-dependent "
            "branch) out of the guard, or convert with example inputs to see where it is."
        )
    return False
