"""Compiles a rewritten graph for a backend and keeps the graphs of AOTAutograd."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from .._compat import aot_eager, compiled_by_dynamo, with_own_code, write_code
from ..errors import AmpGraphError, NoGraphError
from ..marks import BoundaryMark, set_mark
from ..training.gradient_boundary import role_of
from .eager_program import eager_program, is_writable

# The attribute of `_Call` that holds the graph module. A model has no module of this name.
_INNER = "_ampgraph_graph_module"


@dataclass
class AotGraphs:
    """The graphs after autograd of one rewritten graph, by kind: forward, backward, inference."""

    graphs: dict[str, fx.GraphModule] = field(default_factory=dict)

    def keep(self, kind: str, graph_module: fx.GraphModule) -> None:
        """Stores a graph and marks the role of its loss-scaling nodes."""
        for node in graph_module.graph.nodes:
            _leave_out_call(node)
            if node.op == "call_function" and (role := role_of(node)):
                set_mark(node, BoundaryMark(role))
        self.graphs[kind] = graph_module

    def get(self, kind: str, backend: str | Callable) -> fx.GraphModule:
        """Returns the graph of that kind; the inference graph if there is no training forward.

        Raises:
            NoGraphError: The backend keeps no graphs, or the model has not run yet.
        """
        found = self.graphs.get(kind) or (self.graphs.get("inference") if kind == "forward" else None)
        if found is not None:
            return found
        if backend != "aot_eager":
            raise NoGraphError(
                f"backend={backend!r} keeps no {kind} graph; convert(..., backend='aot_eager') does."
            )
        raise NoGraphError(f"there is no {kind} graph yet: call the model, with gradients on, once.")


def _leave_out_call(node: fx.Node) -> None:
    """Removes `_Call` from the modules around a node, because it is not a module of the model."""
    stack = node.meta.get("nn_module_stack") or {}
    if any(path.endswith(_INNER) for path, _ in stack.values()):
        node.meta["nn_module_stack"] = {k: v for k, v in stack.items() if not v[0].endswith(_INNER)}


def backend_for(backend: str | Callable, graphs: AotGraphs) -> str | Callable:
    """Returns the ``torch.compile`` backend; ``"aot_eager"`` keeps its graphs in ``graphs``."""
    return aot_eager(graphs.keep) if backend == "aot_eager" else backend


class _Call(nn.Module):
    """Calls a graph module, which Dynamo then inlines.

    Compiling the graph module directly with ``fullgraph`` fails in a non-reentrant checkpoint (torch 2.13).
    """

    def __init__(self, graph_module: fx.GraphModule) -> None:
        super().__init__()
        setattr(self, _INNER, graph_module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, _INNER)(*args, **kwargs)


def compiled(
    graph_module: fx.GraphModule, backend: str | Callable, mode: str | None, graphs: AotGraphs
) -> Callable:
    """Compiles a graph for a backend; ``"eager"`` runs it op by op.

    Raises:
        AmpGraphError: ``torch.compile`` does not know the backend or its mode.
    """
    if backend == "eager":
        return eager_program(graph_module) if is_writable(graph_module) else graph_module
    return compiled_module(with_own_code(_Call)(write_code(graph_module)), backend, mode, graphs)


def compiled_module(
    whole: nn.Module, backend: str | Callable, mode: str | None, graphs: AotGraphs
) -> Callable:
    """Compiles a module that calls a graph.

    Raises:
        AmpGraphError: ``torch.compile`` does not know the backend or its mode.
    """
    try:
        return compiled_by_dynamo(whole, backend_for(backend, graphs), mode=mode, fullgraph=True)
    except (RuntimeError, ValueError) as error:
        raise AmpGraphError(f"backend={backend!r}: {error}") from error
