"""One captured and rewritten graph, and the graphs that run."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from .._compat import (
    code_written_late,
    flat_inputs,
    has_code,
    has_modes_of_callers,
    new_lock,
    outside_transforms,
    runs_while_traced,
    tracing_lock,
    write_code,
)
from ..guards import is_capturing
from ..passes import ExplicitCasts, Pass, ReadShadows, run_passes
from ..plan import Plan
from ..training.scaler import LossScaler
from .accepted_sizes import AcceptedSizes
from .boundary import (
    accepted,
    boundary_pass,
    castable,
    gradient_passes,
    has_low,
    warn_about_float16_gradients,
)
from .family import Family
from .first_nonfinite import look_for
from .graph_copies import copy_graph_module
from .lowering import AotGraphs, compiled
from .options import Options
from .planned_values import PlannedValues
from .python_state import PythonState
from .shadow_weights import ShadowWeights
from .written import Writes

# Runs a graph for the model's arguments.
Runner = Callable[..., Any]


class Timing(NamedTuple):
    """Wall seconds to create one captured graph, without the compilation at its first run.

    Attributes:
        capture: From the model to an ATen graph; just in time, only the lowering of Dynamo's graph.
        rewrite: From the ATen graph to the graph with casts.
    """

    capture: float = 0.0
    rewrite: float = 0.0


@dataclass
class CapturedGraph:
    """A graph for one training mode and one family of arguments.

    Attributes:
        graph: The rewritten graph with its casts, or what makes it when it is asked for.
        plan: Its plan.
        options: Backend and mode.
        scaler: The model's loss scaler.
        sizes: The sizes that it accepts; None for just-in-time graphs.
        seen: Sizes it was captured for.
        constants: Tensors that exist only in the capture, by attribute name.
        timing: Seconds to create it.
        shadows: The model's shadow weights, if its policy keeps them.
        state: The Python state at capture; None for just-in-time graphs.
        writes: The caller's memory that the graph writes, if any.
        values: The values of the model that the plan was made for; None for just-in-time graphs.
        aot: The graphs of AOTAutograd, on a backend that keeps them.
        lost: The parts of the model's backward that the graph lacks; gradients would be wrong.
        family: The graphs that run blocks which are alike; None for a model by itself.
        parts: What the family's graphs read of this block.
        found_at: When a search found it last.
    """

    graph: fx.GraphModule | Callable[[], fx.GraphModule]
    plan: Plan
    options: Options
    scaler: LossScaler
    sizes: AcceptedSizes | None = None
    seen: tuple[tuple[int, ...], ...] = ()
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    timing: Timing = Timing()  # noqa: RUF009
    shadows: ShadowWeights | None = None
    state: PythonState | None = None
    writes: Writes | None = None
    values: PlannedValues | None = None
    aot: AotGraphs = field(default_factory=AotGraphs)
    lost: tuple[str, ...] = ()
    family: Family | None = None
    parts: nn.Module | None = None
    found_at: int = 0
    _made: tuple[fx.GraphModule, Callable] | None = None  # with its code
    _code_at_first: Callable | None = None
    _graphs: dict[tuple[bool, bool], fx.GraphModule] = field(default_factory=dict)
    _runners: dict[tuple[bool, bool], Callable] = field(default_factory=dict)
    _kept: dict[tuple[bool, bool], Callable] = field(default_factory=dict)
    _runs_by: Runner | None = None
    _is_scaled: bool = False
    _explicit: fx.GraphModule | None = None
    _lock: Any = field(default_factory=new_lock, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.graph, fx.GraphModule):
            self._keep(self.graph)

    def _keep(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        self._made = graph_module, type(graph_module).forward
        self._code_at_first = self._code_at_first or self._made[1]
        return graph_module

    @property
    def graph_module(self) -> fx.GraphModule:
        """The rewritten graph with its casts. If somebody edits it, the edited graph runs."""
        if self._made is not None:
            return self._made[0]
        with code_written_late(), self._lock:
            return self._made[0] if self._made else self._keep(self.graph())  # type: ignore[arg-type]

    @runs_while_traced
    def write_code(self) -> bool:
        """Writes the code of `graph_module` for Dynamo, which reads it."""
        write_code(self.graph_module)
        return True

    @property
    def is_edited(self) -> bool:
        """Whether somebody has edited `graph_module`."""
        return self._code_at_first is not None and not self.is_as_with(self._code_at_first)

    @property
    def code_of_graph(self) -> Callable:
        """The code of `graph_module`, for `is_as_with`."""
        return type(self.graph_module).forward

    def is_as_with(self, code: Callable) -> bool:
        """Whether nobody has edited `graph_module` since it had this code."""
        return has_code(type(self.graph_module), code)

    def fits(self, args: tuple, kwargs: dict[str, Any], is_untouched: bool = False) -> bool:
        """Whether code and values that count are as at the capture, and the arguments share memory as there.

        Args:
            args: The positional arguments.
            kwargs: The keyword arguments.
            is_untouched: Whether nothing was written to the dict of a module since the model fitted.
        """
        if self.state is not None and not self.state.fits(args, kwargs, is_untouched):
            return False
        if self.values is not None and not self.values.hold():
            return False
        return self.writes is None or self.writes.allows(args, kwargs)

    def run(self, args: tuple, kwargs: dict[str, Any], is_in_place: bool) -> Any:
        """Runs the graph; with gradients enabled, the graph with the boundary.

        Args:
            args: The positional arguments.
            kwargs: The keyword arguments.
            is_in_place: Whether the model has the parameters that its low copies are of.
        """
        training = torch.is_grad_enabled()
        if (made := self._made) is not None and not has_code(type(made[0]), made[1]):
            self._derive_again()
        if training and self.scaler.is_enabled():
            self.scaler.check_loop()
            if self.scaler.guard.overflows.looks:
                self._look(args, kwargs)
        shadowed = self.shadows is not None and is_in_place
        kind = training, shadowed
        runner = self._runners.get(kind)
        if runner is None:
            with tracing_lock(), self._lock:
                runner = self._runners.setdefault(kind, self._runner(training, shadowed))
        if self.shadows is not None and shadowed:
            self.shadows.refresh()
        if self.options.backend != "eager" and self._runs_by is None and has_modes_of_callers():
            outputs = self._graph(*kind)(*args, **kwargs)
        else:
            outputs = runner(*args, **kwargs)
        if training and shadowed and self.options.backend != "eager":
            self.shadows.pending.note_outputs(outputs)  # type: ignore[union-attr]
        if training and self._is_scaled:
            self.scaler.note_outputs(outputs)
            if self.options.backend != "eager":
                self.scaler.follow(outputs)
        return outputs

    def _look(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """Looks for the node that made the last overflow, which the same values may make here."""
        if not is_capturing():
            inputs = flat_inputs(self.graph_module, args, kwargs)
            look_for(self.graph_module, inputs, self.scaler, self.options)

    def _derive_again(self) -> None:
        """Drops what was made of `graph_module`: somebody has edited the graph and called ``recompile``."""
        with self._lock:
            self._graphs, self._runners, self._kept = {}, {}, {}
            self._explicit, self.family, self.aot = None, None, AotGraphs()
            self._keep(self.graph_module)

    def run_by(self, run: Runner | None) -> None:
        """Lets ``run(graph_module, *args, **kwargs)`` run the graph, and not the backend; None: no more."""
        with self._lock:
            if run is None:
                self._runners, self._kept = (self._kept if self._runs_by else self._runners), {}
            elif self._runs_by is None:
                self._runners, self._kept = {}, self._runners
            self._runs_by = run

    def drop_shadowed(self) -> None:
        """Drops the graphs that read low copies. A call that needs one makes another."""
        with self._lock:
            for made in (self._graphs, self._runners, self._kept):
                made.pop((True, True), None)
                made.pop((False, True), None)

    def run_in_transform(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the graph eagerly for the transforms of ``torch.func``.

        It uses neither low copies nor loss scaling, and it writes each conversion inside a kernel as a cast,
        because the batching rules of ``vmap`` support one dtype.
        """
        if self._explicit is None:
            with code_written_late(), self._lock, outside_transforms():
                explicit = copy_graph_module(self.graph_module)
                run_passes(explicit, (ExplicitCasts(self.plan.low_dtype),))
                self._explicit = self._explicit or explicit
        return self._explicit(*args, **kwargs)

    @property
    def training_graph(self) -> fx.GraphModule:
        """The graph that runs with gradients: `graph_module`, shadow weights, loss-scaling boundary."""
        return self._graph(training=True, shadowed=self.shadows is not None)

    @property
    def inference_graph(self) -> fx.GraphModule:
        """The graph that runs without gradients: `graph_module`, shadow weights."""
        return self._graph(training=False, shadowed=self.shadows is not None)

    def make_graphs(self) -> None:
        """Makes the graphs of all kinds of calls so far: a family has others in their places."""
        for training, shadowed in [*self._runners]:
            self._graph(training, shadowed)

    def made_graph(self, is_in_place: bool) -> fx.GraphModule | None:
        """Returns the graph that `run` runs in the grad mode of now, if it is made."""
        return self._graphs.get((torch.is_grad_enabled(), self.shadows is not None and is_in_place))

    def apply(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Applies ``function`` to the constants, as ``nn.Module.to`` does to buffers."""
        for name, value in self.constants.items():
            self.constants[name] = function(value)
            made = self._made[0] if self._made else None
            for holder in (made, self._explicit, self.parts, *self._graphs.values()):
                if holder is not None:
                    object.__setattr__(holder, name, self.constants[name])

    def _runner(self, training: bool, shadowed: bool) -> Callable:
        if self._runs_by is not None:
            return functools.partial(self._runs_by, self._graph(training, shadowed))
        if self.family is not None:
            return self._runner_of_family(self.family, training, shadowed)
        graph_module = self._graph(training, shadowed)
        other = self._runners.get((not training, shadowed))
        if other is not None and self._graph(not training, shadowed) is graph_module:
            return other
        return compiled(graph_module, self.options.backend, self.options.mode, self.aot)

    def _runner_of_family(self, family: Family, training: bool, shadowed: bool) -> Callable:
        """Returns what runs the family's graph, until somebody edits the graph of this block."""
        parts = self.parts
        assert parts is not None
        passes = self._passes(family.castable, family.values(parts), training, shadowed)
        object.__setattr__(parts, "_amp", self.scaler.state)
        object.__setattr__(parts, "_shadows", self.shadows)

        def run_own(*args: Any, **kwargs: Any) -> Any:
            return self._graph(training, shadowed)(*args, **kwargs)

        run, graph, self.aot = family.runner(parts, passes, self.scaler.state.scale.device, run_own)
        warn_about_float16_gradients(graph, self.options)
        if (shown := self._graphs.get((training, shadowed))) is None:
            return run
        return unless_edited(run, shown, lambda: self._compiled_alone(shown))

    def _compiled_alone(self, graph_module: fx.GraphModule) -> Callable:
        return compiled(graph_module, self.options.backend, self.options.mode, AotGraphs())

    def _graph(self, training: bool, shadowed: bool) -> fx.GraphModule:
        if (found := self._graphs.get((training, shadowed))) is not None:
            return found
        with code_written_late(), self._lock:
            if (training, shadowed) not in self._graphs:
                self._graphs[training, shadowed] = self._derived(training, shadowed)
                for runners in (self._runners, self._kept):  # the next one notices edits
                    runners.pop((training, shadowed), None)
            return self._graphs[training, shadowed]

    def _derived(self, training: bool, shadowed: bool) -> fx.GraphModule:
        graph = self.graph_module.graph
        values = dict(_attributes(self.graph_module))
        passes = self._passes(functools.partial(castable, graph), values, training, shadowed)
        if not passes:
            return self.graph_module
        graph_module = copy_graph_module(self.graph_module)
        object.__setattr__(graph_module, "_amp", self.scaler.state)
        object.__setattr__(graph_module, "_shadows", self.shadows)
        run_passes(graph_module, passes)
        if self.family is None:
            warn_about_float16_gradients(graph_module.graph, self.options)
        return graph_module

    def _passes(
        self,
        names_of_casts: Callable[[bool], list[str]],
        values: Mapping[str, object],
        training: bool,
        shadowed: bool,
    ) -> tuple[Pass, ...]:
        """Decides which passes make the graph that runs of `graph_module`.

        Args:
            names_of_casts: Returns the nodes that low copies could replace; see `castable`.
            values: The values of its attributes by node name.
            training: Whether gradients are enabled.
            shadowed: Whether the model's parameters are those that it has low copies of.
        """
        planned = self.family.planned if self.family else self.graph_module
        passes: list[Pass] = [*gradient_passes(self.plan, planned, self.options)] if training else []
        if self.shadows is not None and shadowed:
            names = names_of_casts(training and self.options.policy.objective == "fused")
            masters = accepted(names, values, self.shadows)
            copies = self.shadows.names_of([*masters.values()])
            holders = {name: f"_shadows.{copy}" for name, copy in zip(masters, copies, strict=True)}
            passes.append(ReadShadows(holders, differentiable=training))
        if training and self.scaler.is_enabled() and has_low(self.plan):
            apart = self.options.backend != "eager"
            passes.append(boundary_pass(self.scaler, values.items(), apart=apart))
            self._is_scaled = True
        return tuple(passes)


def unless_edited(run: Callable, graph_module: fx.GraphModule, again: Callable[[], Callable]) -> Callable:
    """Returns ``run``; after an edit of the graph module that it stands for, the compiled graph module."""
    code = type(graph_module).forward
    edited: list[Callable] = []

    def choose(*args: Any, **kwargs: Any) -> Any:
        if has_code(type(graph_module), code):
            return run(*args, **kwargs)
        if not edited:
            edited.append(again())
        return edited[0](*args, **kwargs)

    return choose


def _attributes(graph_module: fx.GraphModule) -> Iterator[tuple[str, object]]:
    for node in graph_module.graph.find_nodes(op="get_attr"):
        yield node.name, operator.attrgetter(node.target)(graph_module)
