"""`Family`: blocks that are alike run one graph and one compiled function.

A family keeps one copy of the planned graph, which nobody edits. It derives each graph that runs from this
copy, and compiles it, once. A block gives its parameters: compiled code takes a module that holds them as an
argument, and eager code is bound to it. So a further block copies no graph and writes no code.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from .._compat import calling_convention, new_lock, with_own_code, write_code
from ..capture.unlift import WHOLE, hold
from ..passes import Pass, ScaleLoss, run_passes
from ..proxy.bound_proxy import over_dict_of
from ..training.gradient_boundary import EAGERLY, unscale_gradients
from .boundary import PART, castable, of_part
from .eager_program import EagerCode, EagerProgram, is_writable
from .graph_copies import copy_graph_module
from .lowering import AotGraphs, compiled_module
from .options import Options


class RunGiven(nn.Module):
    """Runs the graph that it is given."""

    def forward(self, graph: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return graph(*args, **kwargs)


@dataclass
class _Derived:
    """A graph that blocks run.

    Attributes:
        graph_module: The graph, over the parameters of the block that came first.
        options: The options of its blocks.
        aot: Its graphs after autograd.
    """

    graph_module: fx.GraphModule
    options: Options
    aot: AotGraphs = field(default_factory=AotGraphs)

    @functools.cached_property
    def cls(self) -> type[nn.Module]:
        """The class of modules that hold a block's parameters and run this graph."""
        return type("Graph", (nn.Module,), {"forward": type(write_code(self.graph_module)).forward})

    @functools.cached_property
    def eager_code(self) -> EagerCode:
        return EagerCode(self.graph_module)

    @functools.cached_property
    def compiled(self) -> Callable:
        """The compiled graph, a function that takes a module of `cls` first."""
        return compiled_module(with_own_code(RunGiven)(), self.options.backend, self.options.mode, self.aot)


class Family:
    """The graphs of blocks that have the same planned graph.

    Args:
        graph_module: The planned graph of the first block.
        options: Its options; the others have the same backend and mode.

    Attributes:
        planned: A copy of the planned graph.
    """

    def __init__(self, graph_module: fx.GraphModule, options: Options) -> None:
        self.planned = copy_graph_module(graph_module)
        self._options = options
        self._targets = [(n.name, str(n.target)) for n in self.planned.graph.find_nodes(op="get_attr")]
        self._castable: dict[bool, list[str]] = {}
        self._derived: list[tuple[tuple[Pass, ...], _Derived]] = []
        self._lock = new_lock()

    def values(self, parts: nn.Module) -> dict[str, object]:
        """Returns a block's values by node name."""
        return {name: operator.attrgetter(target)(parts) for name, target in self._targets}

    def castable(self, casts_fuse: bool) -> list[str]:
        """See `ampgraph.runtime.boundary.castable`."""
        if casts_fuse not in self._castable:
            self._castable[casts_fuse] = castable(self.planned.graph, casts_fuse)
        return self._castable[casts_fuse]

    def runner(
        self, parts: nn.Module, passes: tuple[Pass, ...], device: torch.device, otherwise: Callable
    ) -> tuple[Callable, fx.Graph, AotGraphs]:
        """Returns what runs a block, its graph, and the holder of this graph's graphs after autograd.

        Args:
            parts: The block's parameters, and what its graphs read besides.
            passes: What makes the block's graph of the planned graph.
            device: The device of the loss scale.
            otherwise: Runs the block if eager code cannot.
        """
        is_eager = self._options.backend == "eager"
        own: list[int] = []
        for i, step in enumerate(passes):
            if isinstance(step, ScaleLoss):
                alike, own = of_part(step, "" if is_eager else PART)
                passes = (*passes[:i], alike, *passes[i + 1 :])
        if own and not is_eager:
            object.__setattr__(parts, PART, torch.tensor(own, device=device))
        with self._lock:
            found = self._find(passes, parts)
            if is_eager:
                instead = {EAGERLY[unscale_gradients]: _of_whole(own)} if own else {}
                run: Callable = EagerProgram(found.eager_code, parts, otherwise, instead)
            else:
                graph = over_dict_of(parts, found.cls)
                run = functools.partial(found.compiled, graph)
            return run, found.graph_module.graph, found.aot

    def _find(self, passes: tuple[Pass, ...], parts: nn.Module) -> _Derived:
        """Returns the graph that equal passes have made, or makes it."""
        for known, derived in self._derived:
            if known == passes:
                return derived
        graph_module = copy_graph_module(self.planned)
        for name in ("_amp", PART, "_shadows"):  # the lint looks whether they are there
            object.__setattr__(graph_module, name, getattr(parts, name, None))
        run_passes(graph_module, passes)
        self._derived.append((passes, _Derived(graph_module, self._options)))
        return self._derived[-1][1]


class Families:
    """The families that one captured graph has: one for each plan, which depends on the size of weights."""

    def __init__(self) -> None:
        self._found: dict[tuple, Family] = {}

    def of(self, graph_module: fx.GraphModule, options: Options) -> Family | None:
        """Returns the family of a planned graph; None if its blocks cannot share code."""
        # CUDA graphs belong to the addresses of one block's parameters.
        if options.records_cuda_graphs or not is_writable(graph_module):
            return None
        key = _key(graph_module)
        if key not in self._found:
            self._found[key] = Family(graph_module, options)
        return self._found[key]


def parts_of(source: nn.Module, planned: fx.GraphModule, constants: dict[str, torch.Tensor]) -> nn.Module:
    """Returns a module that holds what a graph reads of a block: live parameters, and constants.

    Args:
        source: The block.
        planned: The planned graph of a block that is alike.
        constants: The constants of the capture.
    """
    parts = nn.Module()
    hold(parts, source, WHOLE if WHOLE in planned._modules else "")
    for name in ("_in_spec", "_out_spec"):
        object.__setattr__(parts, name, getattr(planned, name))
    for name, value in constants.items():
        object.__setattr__(parts, name, value)
    return parts


def _of_whole(own: list[int]) -> Callable:
    """Returns `unscale_gradients` for slots that count in a part of the probe."""

    @functools.cache
    def in_probe(slots: str) -> str:
        return " ".join(str(own[int(slot)]) for slot in slots.split())

    def unscale(
        probe: torch.Tensor, inverse: torch.Tensor, slots: str, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        outputs: tuple[torch.Tensor, ...] = EAGERLY[unscale_gradients](
            probe, inverse, in_probe(slots), *tensors
        )
        return outputs

    return unscale


def _key(graph_module: fx.GraphModule) -> tuple:
    """Returns what graphs with the same code have in common: text, functions, structure of arguments."""
    calls = tuple(n.target for n in graph_module.graph.nodes if n.op == "call_function")
    return graph_module.code, calls, id(calling_convention(graph_module.graph))
