"""`SharedCode`: graphs of blocks that are alike run one compiled function.

Each graph reads the parameters of one block. The function takes the graph as an argument, and its guards
check its assumptions. So it is compiled once for all graphs with the same code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from ..proxy.bound_proxy import over_dict_of
from .lowering import AotGraphs, compiled, compiled_module

# Modes that record CUDA graphs, which belong to the addresses of one block's parameters.
_OF_ONE_BLOCK = ("reduce-overhead", "max-autotune")


@dataclass(frozen=True)
class _Compiled:
    """A compiled function, the class of the graphs that it runs, and the graphs of AOTAutograd."""

    run: Callable
    cls: type[nn.Module]
    aot: AotGraphs


class _RunGiven(nn.Module):
    """Runs the graph that it is given."""

    def forward(self, graph: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return graph(*args, **kwargs)


class SharedCode:
    """The compiled functions of one family of graphs, by the graphs' code."""

    def __init__(self) -> None:
        self._compiled: dict[tuple, _Compiled] = {}

    def runner(
        self, graph_module: fx.GraphModule, backend: str | Callable, mode: str | None, aot: AotGraphs
    ) -> tuple[Callable, AotGraphs]:
        """Returns what runs a graph, and the holder of its graphs after autograd.

        Args:
            graph_module: The graph; what it holds is read at each call.
            backend: The backend, one that compiles.
            mode: Its mode.
            aot: Takes the graphs after autograd, if the code is new.
        """
        key = _key(graph_module)
        if key not in self._compiled:
            cls = type("Graph", (nn.Module,), {"forward": type(graph_module).forward})
            self._compiled[key] = _Compiled(compiled_module(_RunGiven(), backend, mode, aot), cls, aot)
        found = self._compiled[key]
        graph, code = over_dict_of(graph_module, found.cls), type(graph_module).forward
        edited: list[Callable] = []

        def run(*args: Any, **kwargs: Any) -> Any:
            if type(graph_module).forward is code:
                return found.run(graph, *args, **kwargs)
            if not edited:  # a user edited the graph
                edited.append(compiled(graph_module, backend, mode, AotGraphs()))
            return edited[0](*args, **kwargs)

        return run, found.aot


def can_share(backend: str | Callable, mode: str | None) -> bool:
    """Whether graphs can share compiled code; eager code is written for each graph."""
    return backend != "eager" and mode not in _OF_ONE_BLOCK


def _key(graph_module: fx.GraphModule) -> tuple:
    """Returns what graphs with the same code have in common: text, functions, structure of arguments."""
    calls = tuple(n.target for n in graph_module.graph.nodes if n.op == "call_function")
    return graph_module.code, calls, id(graph_module.graph._codegen)
