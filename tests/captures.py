"""One capture for several conversions of the same code, or of models that are alike."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import fx, nn
from torch.export import ExportedProgram

from ampgraph.capture import Reads, capture_program
from ampgraph.proxy.bound_proxy import over_dict_of
from ampgraph.runtime.captured_graph import CapturedGraph
from ampgraph.runtime.family import RunGiven
from ampgraph.runtime.graph_cache import GraphCache
from ampgraph.runtime.lowering import AotGraphs, compiled, compiled_module
from ampgraph.runtime.options import Options
from ampgraph.runtime.siblings import Call, Siblings, Unplanned


def copied(program: ExportedProgram) -> ExportedProgram:
    """Returns a program whose graph may be edited."""
    program = copy.copy(program)
    program._graph_module = copy.deepcopy(program.graph_module)
    return program


class LastCapture:
    """Keeps the last capture, of a model without parameters and buffers.

    Conversions inside ``of(key)`` take a copy of it if the key is the same. The copies record nothing of what
    forward reads of Python's state: call the model as it was captured.
    """

    def __init__(self) -> None:
        self._key: Hashable = None
        self._program: ExportedProgram | None = None

    @contextmanager
    def of(self, key: Hashable) -> Iterator[None]:
        """The key says all that the captured graph depends on, but for the inputs' dtypes and gradients."""

        def capture(model: Any, args: tuple, *rest: Any) -> ExportedProgram:
            held = next(model.parameters(), next(model.buffers(), None))
            assert held is None, "a capture belongs to the tensors of one model object"
            whole = (key, *((t.dtype, t.requires_grad) for t in args))
            if self._program is None or self._key != whole:
                self._key, self._program = whole, capture_program(model, args, *rest)
            return copied(self._program)

        with mock.patch("ampgraph.runtime.export_call.capture_program", capture):
            yield


class SharedCaptures(Siblings):
    """The captures of models that are alike, as blocks share them; each model runs as one by itself does."""

    def add(self, call: Call, captured: CapturedGraph, reads: Reads, unplanned: Unplanned) -> None:
        count = len(self._found)
        super().add(call, captured, reads, unplanned)
        if len(self._found) > count:
            self._found[-1] = dataclasses.replace(self._found[-1], captured=copy.copy(captured))
            captured.family = captured.parts = None

    def find(self, *given: Any, **options: Any) -> CapturedGraph | None:
        made = super().find(*given, **options)
        if made is not None:
            assert made.graph_module.meta  # made now, over its own parameters
            made.family = made.parts = None
        return made

    @contextmanager
    def by_all(self) -> Iterator[None]:
        """Every conversion ahead of time inside takes part, except those of `convert_blocks`."""
        made = GraphCache.__init__

        def init(
            cache: GraphCache, source: Any, options: Options, scaler: Any, stored: Any, siblings: Any = None
        ) -> None:
            shares = siblings is None and not options.just_in_time
            made(cache, source, options, scaler, stored, self if shares else siblings)

        with mock.patch.object(GraphCache, "__init__", init):
            yield


class SharedCompilations:
    """Graphs of the same code are compiled once; the compiled function takes the graph that it runs."""

    def __init__(self) -> None:
        self._found: dict[tuple, tuple[Callable, type[nn.Module], AotGraphs]] = {}

    def compiled(
        self, graph_module: fx.GraphModule, backend: str | Callable, mode: str | None, graphs: AotGraphs
    ) -> Callable:
        """Does what `ampgraph.runtime.lowering.compiled` does."""
        if not isinstance(backend, str) or backend == "eager" or mode is not None:
            return compiled(graph_module, backend, mode, graphs)
        targets = tuple(n.target for n in graph_module.graph.nodes if n.op == "call_function")
        key = graph_module.code, targets, backend
        if key not in self._found:
            run = compiled_module(RunGiven(), backend, mode, graphs)
            cls = type("Graph", (nn.Module,), {"forward": type(graph_module).forward})
            self._found[key] = run, cls, graphs
        run, cls, kept = self._found[key]
        graphs.graphs = kept.graphs
        return functools.partial(run, over_dict_of(graph_module, cls))

    @contextmanager
    def by_all(self) -> Iterator[None]:
        """Every graph that a model runs by itself takes part."""
        with mock.patch("ampgraph.runtime.captured_graph.compiled", self.compiled):
            yield
