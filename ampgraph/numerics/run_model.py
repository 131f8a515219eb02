"""Runs a converted model and lets the caller run its graphs, for every way of capture."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._pytree import tree_map_only

from .._compat import compiled_by_dynamo, no_ambient_autocast
from ..errors import AmpGraphError
from ..marks import META_KEY
from ..module import AmpModule
from ..origin import module_names
from ..passes import Workspace
from ..plan import Plan
from ..policy.policy import Policy
from ..policy.rules import ModulePaths
from ..report.replan import Replanner
from ..runtime.device import device_of
from ..runtime.dynamo_backend import make_backend
from ..runtime.run_graph import flat_inputs
from ..runtime.unchanged_model import unchanged


@dataclass(eq=False)
class Part:
    """One graph of a converted model; just in time there may be several.

    Attributes:
        index: Its place among the model's graphs.
        graph_module: The rewritten graph.
        plan: Its plan.
        modules: Paths of the model's modules, which rules may name.
    """

    index: int
    graph_module: GraphModule
    plan: Plan
    modules: tuple[ModulePaths, ...] = ()

    @cached_property
    def _replanner(self) -> Replanner:
        return Replanner(self.graph_module, self.plan, self.modules)

    @property
    def float32(self) -> GraphModule:
        """The graph without casts, in the source's dtypes; nodes have the same names."""
        return self._replanner.float32

    def under(self, policy: Policy) -> tuple[GraphModule, Plan]:
        """Returns the graph planned under another policy, and that plan."""
        return self._replanner.under(policy)


# Runs one graph for flat inputs and returns its flat outputs.
RunPart = Callable[[Part, list[Any]], Sequence[Any]]


class ModelRunner:
    """Runs a model for given arguments, and lets a function run each of its graphs.

    A run leaves the model as it was: buffers, modules' attributes, random numbers, the arguments.

    Args:
        amp: The converted model; it is captured for the arguments if it is not yet.
        args: Positional arguments.
        kwargs: Keyword arguments.

    Raises:
        AmpGraphError: ``amp`` is not a converted model, or it cannot be captured.
    """

    def __init__(self, amp: object, args: tuple, kwargs: Mapping[str, Any] | None = None):
        if not isinstance(amp, AmpModule):
            raise AmpGraphError(f"expected what ampgraph.convert returns; got a {type(amp).__name__}.")
        self.amp = amp
        self.modules = module_names(amp.source)
        self._parts: dict[int, Part] = {}
        self._run_part: RunPart | None = None
        self._has_run = False
        self._compiled: Callable | None = None
        self.take(args, kwargs)

    def take(self, args: tuple, kwargs: Mapping[str, Any] | None = None) -> None:
        """Takes other arguments to run the model for."""
        self._args, self._kwargs = args if isinstance(args, tuple) else (args,), dict(kwargs or {})
        if not self.amp.is_just_in_time:
            with self._undisturbed():
                self.amp._capture_now(self._args, self._kwargs)
        if self.amp.is_just_in_time and self._compiled is None:
            self._compiled = self._compile()

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return device_of(self.amp.source)

    @property
    def parts(self) -> list[Part]:
        """The graphs that have run so far."""
        return list(self._parts.values())

    def __call__(self, run_part: RunPart, gradients: bool = False) -> Any:
        """Runs the model, with or without gradients, and returns what it returns.

        Raises:
            AmpGraphError: It is captured just in time, and no graph ran.
        """
        args, kwargs = tree_map_only(Tensor, _copied, (self._args, self._kwargs))
        with self._undisturbed(), no_ambient_autocast(), torch.set_grad_enabled(gradients):
            if self._compiled is None:
                return self._run_captured(run_part, args, kwargs)
            self._run_part, self._has_run = run_part, False
            try:
                result = self._compiled(*args, **kwargs)
            finally:
                self._run_part = None
            if not self._has_run:
                raise AmpGraphError(
                    f"{type(self.amp.source).__name__}: the call ran no converted graph, so there is nothing "
                    "to look at; TORCH_LOGS=graph_breaks,recompiles shows what torch.compile leaves out."
                )
            return result

    def _run_captured(self, run_part: RunPart, args: tuple, kwargs: dict[str, Any]) -> Any:
        captured = self.amp._graphs.find(self._args, self._kwargs)
        part = self._part(captured.graph_module, captured.plan)
        outputs = run_part(part, flat_inputs(part.graph_module, args, kwargs))
        return part.graph_module.graph.process_outputs(outputs)

    def _part(self, graph_module: GraphModule, plan: Plan) -> Part:
        new = Part(len(self._parts), graph_module, plan, self.modules)
        return self._parts.setdefault(id(graph_module), new)

    def _compile(self) -> Callable:
        options = dataclasses.replace(self.amp.options, backend=self._take, mode=None)
        guards = self.amp._graphs.guard_scope
        backend = make_backend(options, self.modules, guards=guards, is_observed=True)
        return compiled_by_dynamo(self.amp.source, backend)

    def _take(self, graph_module: GraphModule, inputs: Sequence[Any]) -> Callable:
        """Is the backend that just-in-time graphs go to."""
        space = graph_module.meta.get(META_KEY)
        if not isinstance(space, Workspace) or space.plan is None:
            return graph_module.forward  # it could not be rewritten, and runs as it is
        part = self._part(graph_module, space.plan)

        def run(*flat: Any) -> Sequence[Any]:
            assert self._run_part is not None
            self._has_run = True
            return self._run_part(part, list(flat))

        return run

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), unchanged(self.amp.source):
            yield


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
