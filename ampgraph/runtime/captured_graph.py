"""One captured and rewritten graph, and the graphs that run."""

from __future__ import annotations

import dataclasses
import functools
import operator
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from .._compat import flat_inputs, outside_transforms
from ..capture import LOST_KEY
from ..errors import warn_user
from ..guards import is_capturing
from ..passes import ExplicitCasts, Pass, ReadShadows, SaveNorms, ScaleLoss, run_passes
from ..passes.analysis.alias import written_memory
from ..passes.read_shadows import casts_of, is_laid_out_again
from ..plan import Plan
from ..training.gradient_boundary import scale_gradients, unscale_gradients
from ..training.scaler import LossScaler
from .first_nonfinite import look_for
from .graph_copies import copy_graph_module
from .lowering import AotGraphs, compiled
from .options import Options
from .python_state import PythonState
from .shadow_weights import ShadowWeights
from .shared_code import SharedCode, can_share
from .written import Writes

# A graph module keeps the slots of its parameters under this name.
PART = "_amp_slots"
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
        graph_module: The rewritten graph with its casts.
        plan: Its plan.
        options: Backend and mode.
        scaler: The model's loss scaler.
        shapes: Sizes it accepts, see `ampgraph.runtime.signature.accepted_shapes`.
        seen: Sizes it was captured for.
        constants: Tensors that exist only in the capture, by attribute name.
        timing: Seconds to create it.
        shadows: The model's shadow weights, if its policy keeps them.
        state: The Python state at capture; None for just-in-time graphs.
        writes: The caller's memory that the graph writes, if any.
        aot: The graphs of AOTAutograd, on a backend that keeps them.
        lost: The parts of the model's backward that the graph lacks; gradients would be wrong.
        code: Compiled code that graphs of blocks that are alike share; None for a model by itself.
    """

    graph_module: fx.GraphModule
    plan: Plan
    options: Options
    scaler: LossScaler
    shapes: list[tuple] = field(default_factory=list)
    seen: tuple[tuple[int, ...], ...] = ()
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    timing: Timing = Timing()  # noqa: RUF009
    shadows: ShadowWeights | None = None
    state: PythonState | None = None
    writes: Writes | None = None
    aot: AotGraphs = field(default_factory=AotGraphs)
    lost: tuple[str, ...] = ()
    code: SharedCode | None = None
    _graphs: dict[tuple[bool, bool], fx.GraphModule] = field(default_factory=dict)
    _runners: dict[tuple[bool, bool], Callable] = field(default_factory=dict)
    _kept: dict[tuple[bool, bool], Callable] = field(default_factory=dict)
    _runs_by: Runner | None = None
    _is_scaled: bool = False
    _explicit: fx.GraphModule | None = None
    _code_of_graph: Callable | None = None
    _lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    def __post_init__(self) -> None:
        self.lost = self.lost or self.graph_module.meta.get(LOST_KEY, ())
        self._code_of_graph = self.code_of_graph

    @property
    def code_of_graph(self) -> Callable:
        """The code of `graph_module`, which is another after an edit."""
        return type(self.graph_module).forward

    def fits(self, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Whether the model is unchanged since the capture and the arguments share memory as at capture."""
        if self.state is not None and not self.state.fits(args, kwargs):
            return False
        return self.writes is None or self.writes.allows(args, kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the graph; with gradients enabled, the graph with the boundary."""
        training = torch.is_grad_enabled()
        if self.code_of_graph is not self._code_of_graph:
            self._derive_again()
        if training and self.scaler.is_enabled():
            self.scaler.check_loop()
            if self.scaler.guard.overflows.looks:
                self._look(args, kwargs)
        shadowed = self.shadows is not None and self.shadows.are_in_place()
        kind = training, shadowed
        if kind not in self._runners:
            with self._lock:
                self._runners.setdefault(kind, self._runner(training, shadowed))
        if self.shadows is not None and shadowed:
            self.shadows.refresh()
        outputs = self._runners[kind](*args, **kwargs)
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
            self._explicit, self.code, self.aot = None, None, AotGraphs()
            self._code_of_graph = self.code_of_graph

    def run_by(self, run: Runner | None) -> None:
        """Lets ``run(graph_module, *args, **kwargs)`` run the graph, and not the backend; None: no more."""
        with self._lock:
            if run is None:
                self._runners, self._kept = (self._kept if self._runs_by else self._runners), {}
            elif self._runs_by is None:
                self._runners, self._kept = {}, self._runners
            self._runs_by = run

    def run_in_transform(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the graph eagerly for the transforms of ``torch.func``.

        It uses neither low copies nor loss scaling, and it writes each conversion inside a kernel as a cast,
        because the batching rules of ``vmap`` support one dtype.
        """
        with self._lock, outside_transforms():
            if self._explicit is None:
                explicit = copy_graph_module(self.graph_module)
                run_passes(explicit, (ExplicitCasts(self.plan.low_dtype),))
                self._explicit = explicit
        return self._explicit(*args, **kwargs)

    @property
    def training_graph(self) -> fx.GraphModule:
        """The graph that runs with gradients: `graph_module`, shadow weights, loss-scaling boundary."""
        return self._graph(training=True, shadowed=self.shadows is not None)

    @property
    def inference_graph(self) -> fx.GraphModule:
        """The graph that runs without gradients: `graph_module`, shadow weights."""
        return self._graph(training=False, shadowed=self.shadows is not None)

    def apply(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Applies ``function`` to the constants, as ``nn.Module.to`` does to buffers."""
        for name, value in self.constants.items():
            self.constants[name] = function(value)
            explicit = (self._explicit,) if self._explicit else ()
            for graph_module in (self.graph_module, *explicit, *self._graphs.values()):
                object.__setattr__(graph_module, name, self.constants[name])

    @property
    def _is_fused(self) -> bool:
        return self.options.policy.objective == "fused"

    def _runner(self, training: bool, shadowed: bool) -> Callable:
        graph_module = self._graph(training, shadowed)
        if self._runs_by is not None:
            return functools.partial(self._runs_by, graph_module)
        other = self._runners.get((not training, shadowed))
        if other is not None and self._graph(not training, shadowed) is graph_module:
            return other
        backend, mode = self.options.backend, self.options.mode
        if not self._shares_code():
            return compiled(graph_module, backend, mode, self.aot)
        assert self.code is not None
        run, self.aot = self.code.runner(graph_module, backend, mode, self.aot)
        return run

    def _shares_code(self) -> bool:
        return self.code is not None and can_share(self.options.backend, self.options.mode)

    def _graph(self, training: bool, shadowed: bool) -> fx.GraphModule:
        with self._lock:
            if (training, shadowed) not in self._graphs:
                self._graphs[training, shadowed] = self._with_boundary(training, shadowed)
            return self._graphs[training, shadowed]

    def _with_boundary(self, training: bool, shadowed: bool) -> fx.GraphModule:
        values = dict(_attributes(self.graph_module))
        passes: list[Pass] = []
        part: torch.Tensor | None = None
        if self.shadows is not None and shadowed:
            graph = self.graph_module.graph
            masters = shadowed_parameters(graph, values, self.shadows, training and self._is_fused)
            names = {name: f"_shadows.{self.shadows.name_of(master)}" for name, master in masters.items()}
            passes.append(ReadShadows(names, differentiable=training))
        if training and self.scaler.is_enabled() and has_low(self.plan):
            scale_loss = boundary_pass(self.scaler, values.items())
            self._is_scaled = True
            if self._shares_code():
                scale_loss, part = of_part(scale_loss, self.scaler.state.scale.device)
            passes.append(scale_loss)
        if training and self.plan.saved_low:
            passes.append(SaveNorms(self.plan.saved_low, self.plan.low_dtype))
        if not passes:
            return self.graph_module
        graph_module = copy_graph_module(self.graph_module)
        object.__setattr__(graph_module, "_amp", self.scaler.state)
        object.__setattr__(graph_module, PART, part)
        object.__setattr__(graph_module, "_shadows", self.shadows)
        run_passes(graph_module, tuple(passes))
        warn_about_float16_gradients(graph_module.graph, self.options)
        return graph_module


def shadowed_parameters(
    graph: fx.Graph, values: Mapping[str, object], shadows: ShadowWeights, casts_fuse: bool = False
) -> dict[str, torch.Tensor]:
    """Returns the parameters, by node name, that the graph casts and can read as low copies instead.

    Parameters that the graph writes are excluded: a copy from before the call would have old values.

    Args:
        graph: The graph.
        values: The live value of each of its nodes that has one.
        shadows: The low copies.
        casts_fuse: Whether casts fuse and every call may follow an update. Then weights of convolutions are
            excluded too: a compiler gives them another memory layout in the kernel of the cast, and would
            need a kernel more for a copy.
    """
    written = written_memory(graph)
    nodes = [node for node in graph.nodes if shadows.accepts(values.get(node.name)) and casts_of(node)]
    nodes = [n for n in nodes if n not in written and not (casts_fuse and is_laid_out_again(n))]
    return {node.name: values[node.name] for node in nodes}  # type: ignore[misc]


def has_low(plan: Plan) -> bool:
    """Whether any op in the plan runs low; otherwise no scaling is needed."""
    return any(d.dtype == plan.low_dtype for d in plan.decisions.values())


def boundary_pass(
    scaler: LossScaler, values: Iterable[tuple[str, object]], state: tuple[str, str, str] | None = None
) -> ScaleLoss:
    """Returns the boundary pass for a graph whose nodes, by name, hold the given live values."""
    size = scaler.state.probe.shape[0]
    slots = []
    for name, value in values:
        slot = scaler.slot_of(value)
        if slot is None and isinstance(value, torch.nn.Parameter):
            slot = size - 1  # the parameter was added after the conversion
        if slot is not None:
            slots.append((name, slot))
    return ScaleLoss(tuple(slots), size, state) if state else ScaleLoss(tuple(slots), size)


def of_part(scale_loss: ScaleLoss, device: torch.device) -> tuple[ScaleLoss, torch.Tensor]:
    """Returns the pass with slots that count in the graph's own part of the probe, and this part's slots."""
    own = sorted({slot for _, slot in scale_loss.slots} | {scale_loss.size - 1})
    slots = tuple((name, own.index(slot)) for name, slot in scale_loss.slots)
    part = torch.tensor(own, device=device)
    return dataclasses.replace(scale_loss, slots=slots, size=len(own), part=PART), part


def warn_about_float16_gradients(graph: fx.Graph, options: Options) -> None:
    """Warns about gradients that are float16 outside of the boundary, where the loss scale protects nothing.

    Those of outputs underflow before they are scaled, those of parameters and inputs when they are unscaled.
    """
    name = options.named("the model")
    scaled = graph.find_nodes(op="call_function", target=scale_gradients)
    if any(node.args[1].meta["val"].dtype == torch.float16 for node in scaled):
        warn_user(
            f"ampgraph: {name} returns a float16 tensor, so its gradient is float16 "
            "before the loss scale is applied, and gradients below 6e-8 become zero. Return x.float(), or "
            "compute the loss inside the model."
        )
    unscaled = graph.find_nodes(op="call_function", target=unscale_gradients)
    low = [n for call in unscaled for n in call.args[3:] if n.meta["val"].dtype == torch.float16]
    if low:
        warn_user(
            f"ampgraph: {len(low)} parameters and inputs of {name} arrive in float16 ({low[0].name} first). "
            "Their gradients leave the graph unscaled in float16, and gradients below 6e-8 become zero. "
            "Keep them in float32; ampgraph inserts the casts. Under FSDP2, omit param_dtype from "
            "MixedPrecisionPolicy, or set it to bfloat16."
        )


def _attributes(graph_module: fx.GraphModule) -> Iterator[tuple[str, object]]:
    for node in graph_module.graph.find_nodes(op="get_attr"):
        yield node.name, operator.attrgetter(node.target)(graph_module)
