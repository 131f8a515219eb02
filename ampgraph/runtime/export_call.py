"""`export_call`: captures the graph for one call with ``torch.export``, with static or dynamic sizes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch.export import Dim, ExportedProgram, ShapesCollection
from torch.utils._pytree import tree_leaves

from ..capture import Reads, capture_program, distinct
from ..errors import CaptureError
from .captured_graph import CapturedGraph
from .siblings import Call
from .signature import changed_dims

log = logging.getLogger("ampgraph")


def export_call(call: Call, graphs: Sequence[CapturedGraph]) -> tuple[ExportedProgram, Reads]:
    """Captures a call, in the caller's grad mode if forward reads the grad mode.

    Args:
        call: The call.
        graphs: The graphs that were captured for other sizes of the same arguments. If there are any and the
            user gave no ``dynamic_shapes``, the sizes that differ become dynamic.

    Returns:
        The program, and the Python state that forward read.

    Raises:
        CaptureError: ``torch.export`` cannot capture the call.
    """
    reads = Reads(call.source)
    program = _exported(call, graphs, reads, gradients=True)
    if reads.asks.for_gradients and not torch.is_grad_enabled():
        program = _exported(call, graphs, reads, gradients=False)
    return program, reads


def _exported(call: Call, graphs: Sequence[CapturedGraph], reads: Reads, gradients: bool) -> ExportedProgram:
    model, args, kwargs, sizes = call.source, call.args, call.kwargs, call.signature.shapes
    given = call.options.dynamic_shapes
    if not graphs:
        return capture_program(model, args, kwargs, given, reads, gradients)
    args, kwargs = distinct(args, kwargs)  # sizes are stored by tensor object
    dims = changed_dims(sizes, [found.seen for found in graphs])
    try:
        dynamic = given or _dynamic(args, kwargs, dims).dynamic_shapes(model, args, kwargs)
        return capture_program(model, args, kwargs, dynamic, reads, gradients)
    except (CaptureError, ValueError) as error:
        log.info("capturing with static shapes: %s", error)
        return capture_program(model, args, kwargs, None, reads, gradients)


def _dynamic(args: tuple, kwargs: dict[str, Any], dims: list[set[int]]) -> ShapesCollection:
    """Marks the given dimensions of each tensor as dynamic if the model allows."""
    leaves = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    shapes = ShapesCollection()
    for leaf, changed in zip(leaves, dims, strict=True):
        if changed:
            shapes[leaf] = dict.fromkeys(changed, Dim.AUTO)
    return shapes
