"""Ahead-of-time capture of a whole graph by ``torch.export`` (non-strict)."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from .._compat import telling_no_export
from ..errors import AheadOfTimeError, CaptureError, warn_user
from ..training.distributed import sharded_error
from .body_modules import name_modules_of_bodies
from .capture_mode import is_capturing_here
from .reads import Reads
from .watched_trace import WatchedTrace


def capture_program(
    model: nn.Module,
    args: tuple,
    kwargs: dict[str, Any] | None = None,
    dynamic_shapes: Any = None,
    reads: Reads | None = None,
    gradients: bool = True,
) -> ExportedProgram:
    """Captures ``model`` whole for the given example inputs.

    Args:
        model: Any ``nn.Module``, a ``torch.fx.GraphModule`` included; not changed.
        args: Example positional arguments; only their structure, shapes, dtypes and devices matter.
        kwargs: Example keyword arguments.
        dynamic_shapes: As for ``torch.export.export``.
        reads: Records the Python state that forward reads.
        gradients: The grad mode to capture in.

    Raises:
        CaptureError: The model cannot be captured for these inputs; the message names the user's source line.

    The graph's ``meta`` lists the lost parts of the model's backward under `LOST_KEY`.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise CaptureError(
            f"{type(model).__name__} is a TorchScript module, which has no Python code to capture; "
            "convert the nn.Module it was made from."
        )
    kwargs, reads = kwargs or {}, Reads(model) if reads is None else reads
    if refusal := sharded_error(model, args, kwargs):
        raise refusal
    program = _exported(model, args, kwargs, dynamic_shapes, reads, gradients)
    if reads.has_only_decided():
        again = Reads(model)
        with reads.decided():
            other = _exported(model, args, kwargs, dynamic_shapes, again, gradients)
        if not (again.lost or again.only_set) and _code(other) == _code(program):
            reads.forget_decisions()
    if gradients and _has_op(program, "associative_scan"):
        warn_user(
            f"{type(model).__name__}: forward runs associative_scan, whose backward in torch leaves out"
            " gradients between its tensors (pytorch/pytorch#172568). Where it has several, run a loop."
        )
    return program


def _code(program: ExportedProgram) -> list[str]:
    return [part.code for part in program.graph_module.modules() if isinstance(part, fx.GraphModule)]


def _exported(
    model: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    dynamic_shapes: Any,
    reads: Reads,
    gradients: bool,
) -> ExportedProgram:
    """Captures a call of the model; where the sizes may change, or a call cannot be captured, an export.

    Code that is compiled but not exported may run a scan of ``torch.func``, or on a GPU the op
    ``associative_scan``, in place of the loop of a call. Then an export has the loop too.
    """

    def traced(told: contextlib.AbstractContextManager[None]) -> ExportedProgram:
        found = WatchedTrace(model, args, kwargs, dynamic_shapes, reads, gradients).run(told)
        _complete(found, model)
        return found

    asked: list[str] = []
    program = None
    if dynamic_shapes is None:
        try:
            program = traced(telling_no_export(is_capturing_here, asked.append))
        except AheadOfTimeError:
            if not asked:
                raise
    if program is not None and not (asked and _has_scans(program)):
        return program
    other = traced(contextlib.nullcontext())
    return program if program is not None and _has_scans(other) else other


def _has_scans(program: ExportedProgram) -> bool:
    """Whether a graph enters transforms of ``torch.func``, or runs the op ``associative_scan``.

    The backward of the op takes no gradient from one tensor of several to another: with ``(a, b)`` of a
    recurrence ``a * state + b``, the gradient of ``a`` is zero (torch 2.11; pytorch/pytorch#172568).
    """
    return _has_op(program, "associative_scan") or _has_op(program, "_increment_nesting")


def _has_op(program: ExportedProgram, ending: str) -> bool:
    """Whether an op whose name ends so is in a graph of a program, also in bodies of loops and branches."""
    graphs = (part.graph for part in program.graph_module.modules() if isinstance(part, fx.GraphModule))
    return any(getattr(n.target, "__name__", "").endswith(ending) for graph in graphs for n in graph.nodes)


def _complete(program: ExportedProgram, model: nn.Module) -> None:
    """Adds what ``torch.export`` leaves out of its graphs: users, and the modules of nodes in bodies."""
    for module in program.graph_module.modules():
        if isinstance(module, fx.GraphModule):
            _complete_users(module.graph)
    name_modules_of_bodies(program.graph_module, model)


def _complete_users(graph: fx.Graph) -> None:
    """Registers every reader as a user of the nodes that it reads.

    ``torch.export`` omits readers without users next to a grad-mode region; torch.fx then fails to edit them.
    """
    for node in graph.nodes:
        for source in node.all_input_nodes:
            source.users.setdefault(node)
