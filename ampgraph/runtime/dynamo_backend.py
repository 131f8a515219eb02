"""``torch.compile(model, backend="ampgraph")`` and the capture side of just-in-time conversion."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from .._compat import (
    fake_mode_of,
    has_modes_aside,
    mark_as_input,
    modes_of_callers_back,
    no_ambient_autocast,
)
from ..capture.guard_scope import GuardScope
from ..capture.just_in_time import lower_dynamo_graph
from ..capture.split import compile_around_custom_functions, let_backwards_be_differentiated
from ..errors import CaptureError, PassError, PolicyError, did_you_mean, warn_user
from ..marks import BoundaryMark, set_mark
from ..origin import names_of
from ..passes import Pass, ReadShadows, run_passes
from ..passes.pipeline import rewrite
from ..plan import Plan
from ..policy.loss_scale import NoLossScale
from ..policy.policy import LOW_DTYPES, Policy
from ..policy.rules import NODE_PREFIX, ModulePaths, RuleBook
from ..training.compiler_traces import traced_for_a_compiler
from ..training.distributed import spread_error
from ..training.scale_state import STATE_NAMES
from ..training.scaler import LossScaler
from .backends import choose_backend, next_backend
from .boundary import (
    boundary_pass,
    gradient_passes,
    has_low,
    shadowed_parameters,
    warn_about_float16_gradients,
)
from .callers_autocast import without_callers_autocast
from .captured_graph import Timing
from .device import device_of_tensors
from .first_nonfinite import look_for
from .graph_copies import copy_graph
from .lowering import AotGraphs, backend_for
from .options import Options
from .rule_targets import warn_of_unmatched
from .shadow_weights import SHADOW_PREFIX, ShadowWeights

Record = Callable[[fx.GraphModule, Plan, AotGraphs, Timing, Sequence[Any]], None]


def make_backend(
    options: Options,
    modules: tuple[ModulePaths, ...] = (),
    record: Record | None = None,
    scaler: LossScaler | None = None,
    shadows: ShadowWeights | None = None,
    guards: GuardScope | None = None,
    is_observed: bool = False,
) -> Callable:
    """Returns a ``torch.compile`` backend that rewrites each graph and hands it to the next backend.

    Args:
        options: See `ampgraph.runtime.options.Options`.
        modules: Module paths that rules may name.
        record: Called with each rewritten graph, its plan, its AOTAutograd graphs (filled later), its timing
            and its inputs.
        scaler: Owner of the loss scale; None for no loss scaling.
        shadows: Low copies of parameters; None for casts in the graph.
        guards: Tells whether the model has an `fp16_guard`; None if that is up to each graph.
        is_observed: Whether the next backend is a tool that runs graphs node by node and plans them again: it
            gets them without the passes for gradients, whose edits no plan knows.
    """
    compiler = _Compiler(options, modules, record, scaler, shadows, guards, is_observed)

    def backend(graph_module: fx.GraphModule, inputs: list, **_: Any) -> Callable:
        values = [node.meta.get("example_value") for node in graph_module.graph.nodes]
        if error := spread_error("the model", values):
            raise error
        let_backwards_be_differentiated(graph_module)
        around = compile_around_custom_functions(graph_module, inputs, compiler.compiled)
        return around or compiler.compiled(graph_module, inputs)

    return backend


class _Rewritten(NamedTuple):
    """A rewritten graph, and what its capture left."""

    graph_module: fx.GraphModule
    plan: Plan
    graphs: AotGraphs
    timing: Timing


@dataclass(frozen=True)
class _Compiler:
    """Compiles the graphs of Dynamo; the attributes are the arguments of `make_backend`."""

    options: Options
    modules: tuple[ModulePaths, ...]
    record: Record | None
    scaler: LossScaler | None
    shadows: ShadowWeights | None
    guards: GuardScope | None
    is_observed: bool

    def compiled(self, graph_module: fx.GraphModule, inputs: list) -> Callable:
        """Returns what runs a graph: rewritten, or as it is, with a warning, if it cannot be rewritten."""
        options = self.options
        try:
            rewritten = self._rewritten(graph_module, inputs)
        except (CaptureError, PassError) as error:
            what = options.named("a part of the model runs unconverted, in the source's dtypes")
            warn_user(f"ampgraph: {what}: {error}")
            compiled = next_backend(options.backend, options.mode)(graph_module, inputs)
            return self._seen_by_modes(compiled, graph_module)
        if self.record:
            self.record(*rewritten, inputs)
        compile_next = next_backend(backend_for(options.backend, rewritten.graphs), options.mode)
        return self._with_boundary(rewritten, inputs, compile_next)

    def _rewritten(self, graph_module: fx.GraphModule, inputs: list) -> _Rewritten:
        start = time.perf_counter()
        lowered = lower_dynamo_graph(graph_module, inputs)
        captured = time.perf_counter()
        if self.guards is not None:
            self.guards.mark(lowered)
        if self.modules:
            _check_rules(self.options.policy, self.modules, lowered)
        plan = rewrite(lowered, self.options.policy, self.modules, check_rules=False)
        return _Rewritten(
            lowered, plan, AotGraphs(), Timing(captured - start, time.perf_counter() - captured)
        )

    def _with_boundary(self, rewritten: _Rewritten, inputs: list, compile_next: Callable) -> Callable:
        """Compiles a graph with the low copies, loss scale and own gradients that it needs."""
        lowered, options, with_gradients = rewritten.graph_module, self.options, torch.is_grad_enabled()
        has_scale = self.scaler is not None and self.scaler.is_enabled()
        scaling = self.scaler if has_scale and has_low(rewritten.plan) and with_gradients else None
        casts_fuse = options.policy.objective == "fused" and with_gradients
        masters = _masters(lowered, inputs, self.shadows, casts_fuse) if self.shadows is not None else {}
        has_passes = with_gradients and not self.is_observed
        gradients = gradient_passes(rewritten.plan, lowered, options) if has_passes else ()
        if scaling is None and not masters and not gradients:
            return self._seen_by_modes(compile_next(lowered, inputs), lowered)
        bounded = fx.GraphModule(lowered, copy_graph(lowered.graph))
        bounded.meta.update(lowered.meta)
        extra = _Extra(scaling, self.shadows, tuple(masters.values()))
        run_passes(bounded, gradients)
        added = _add_boundary(bounded, inputs, extra, masters)
        warn_about_float16_gradients(bounded.graph, options)
        with traced_for_a_compiler():  # on torch 2.11 `torch.compiler.is_compiling` is false in a backend
            compiled = compile_next(bounded, [*added, *inputs])
        return _run_with(self._seen_by_modes(compiled, bounded), extra, lowered, options)

    def _seen_by_modes(self, compiled: Callable, graph_module: fx.GraphModule) -> Callable:
        """Returns what runs a compiled graph, or its ops one by one in a dispatch mode of the caller."""
        is_tool = callable(self.options.backend)  # which may look at each node itself
        one_by_one = compiled if is_tool else graph_module

        def run(*args: Any) -> Any:
            if not has_modes_aside():
                return compiled(*args)
            with modes_of_callers_back():
                return one_by_one(*args)

        return run


def _run_with(compiled: Callable, extra: _Extra, lowered: fx.GraphModule, options: Options) -> Callable:
    """Returns a function of the graph's inputs that passes the extra ones."""
    scaling = extra.scaler
    pending = extra.shadows.pending if extra.shadows is not None and options.backend != "eager" else None

    def run_and_note(*args: Any) -> Any:
        outputs = compiled(*extra.tensors(args), *args)
        if pending is not None:
            pending.note_outputs(outputs)
        return outputs

    if scaling is None:
        return run_and_note

    def run(*args: Any) -> Any:
        if scaling.guard.overflows.looks and torch.is_grad_enabled():
            look_for(lowered, args, scaling, options)
        outputs = scaling.note_outputs(run_and_note(*args))
        return outputs if options.backend == "eager" else scaling.follow(outputs)

    return run


def _check_rules(policy: Policy, modules: tuple[ModulePaths, ...], graph_module: fx.GraphModule) -> None:
    """Refuses a rule that matches no module; a node rule may match another graph of the model."""
    rules = {pattern: v for pattern, v in policy.rules.items() if not pattern.startswith(NODE_PREFIX)}
    RuleBook(rules, modules).check(*names_of(graph_module.graph))


@dataclass(frozen=True)
class _Extra:
    """Tensors that a graph reads as extra inputs, because constants in the graph could not change.

    Attributes:
        scaler: Owner of scale, inverse and probe, or None.
        shadows: The shadow weights.
        masters: The inputs that are parameters with a shadow.
    """

    scaler: LossScaler | None
    shadows: ShadowWeights | None
    masters: tuple[int, ...]

    def tensors(self, inputs: Sequence[Any]) -> list[torch.Tensor]:
        """Returns the current values, shadows fresh."""
        state = list(self.scaler.state.tensors()) if self.scaler else []
        if self.shadows is None or not self.masters:
            return state
        self.shadows.refresh()  # first: it may replace copies
        return [*state, *(self.shadows.of(inputs[index]) for index in self.masters)]


def _masters(
    graph_module: fx.GraphModule, inputs: Sequence[Any], shadows: ShadowWeights, casts_fuse: bool
) -> dict[str, int]:
    """Returns the position of each input that is a parameter with a shadow, by node name."""
    names = [node.name for node in graph_module.graph.find_nodes(op="placeholder")]
    values = dict(zip(names, inputs, strict=True))
    found = shadowed_parameters(graph_module.graph, values, shadows, casts_fuse)
    return {name: index for index, name in enumerate(names) if name in found}


def _add_boundary(
    graph_module: fx.GraphModule, inputs: Sequence[Any], extra: _Extra, masters: dict
) -> list[torch.Tensor]:
    """Adds the boundary with its extra inputs in front; returns their fake values, of fixed sizes."""
    names = [node.name for node in graph_module.graph.find_nodes(op="placeholder")]
    holders = [*(STATE_NAMES if extra.scaler else ()), *(SHADOW_PREFIX + name for name in masters)]
    added = _add_inputs(graph_module.graph, dict(zip(holders, extra.tensors(inputs), strict=True)))
    passes: list[Pass] = []
    if masters:
        shadows = dict(zip(masters, added[-len(masters) :], strict=True))
        passes.append(ReadShadows(shadows, differentiable=torch.is_grad_enabled()))
    if extra.scaler:
        values = zip(names, inputs, strict=True)
        passes.append(boundary_pass(extra.scaler, values, (added[0], added[1], added[2])))
    if not run_passes(graph_module, tuple(passes)).modified:
        graph_module.recompile()  # for the new inputs
    return [node.meta["val"] for node in graph_module.graph.find_nodes(op="placeholder")[: len(added)]]


def _add_inputs(graph: fx.Graph, values: dict[str, torch.Tensor]) -> list[str]:
    mode = fake_mode_of(graph)
    assert mode is not None  # a graph with low ops has tensors
    names = []
    with graph.inserting_before(next(iter(graph.nodes))):
        for name, value in values.items():
            node = graph.placeholder(name)
            mark_as_input(node, value, mode)
            if name.startswith(SHADOW_PREFIX):  # no input of the model: its gradient goes to the parameter
                set_mark(node, BoundaryMark("shadow"))
            names.append(node.name)
    return names


def ampgraph_backend(graph_module: fx.GraphModule, inputs: list, **given: Any) -> Callable:
    """The ``torch.compile`` backend named ``"ampgraph"``.

    ``torch.compile(model, backend="ampgraph", options={"level": "O1", "dtype": torch.float16})``. Options are
    the fields of `Policy` or ``policy=``, ``backend=`` for the backend that runs the result, and its
    ``mode=``. A ``torch.autocast`` around the compiled model sets the dtype if the options do not. It has no
    other effect inside.

    Raises:
        PolicyError: An option is not known.
    """
    options = _options({**(given.pop("options", None) or {}), **given}, device_of_tensors(inputs))
    shadows = ShadowWeights(None, options.low_dtype) if options.policy.keeps_low_copies else None

    def check(rewritten: fx.GraphModule, *_: Any) -> None:
        warn_of_unmatched(rewritten, options.policy)

    with no_ambient_autocast():
        compiled = make_backend(options, record=check, shadows=shadows)(graph_module, inputs)

    def run(*args: Any) -> Any:
        return without_callers_autocast(compiled, *args)

    return run


def _options(given: dict[str, Any], device: torch.device) -> Options:
    mode, policy, backend = (given.pop(name, None) for name in ("mode", "policy", "backend"))
    legal = Policy.__dataclass_fields__
    for name in given:
        if name not in legal:
            raise PolicyError(f"ampgraph backend: unknown option {name!r}.{did_you_mean(name, legal)}")
    policy = (Policy.of(policy) if policy is not None else Policy()).replace(**given)
    if policy.dtype is None:
        policy = policy.replace(dtype=_autocast_dtype(device))
    if policy.loss_scale is not None and not isinstance(policy.loss_scale, NoLossScale):
        warn_user(
            f"ampgraph backend: loss_scale={policy.loss_scale} has no effect, because a backend sees no "
            "optimizer. Use torch.amp.GradScaler, or ampgraph.convert."
        )
    backend, mode = choose_backend(backend, mode, device)
    return Options(policy.resolved(device, backend, mode), backend, mode)


def _autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Returns the dtype of the ``torch.autocast`` around this call; None without one, or for a wide dtype."""
    kind = device.type
    if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        return None
    dtype = torch.get_autocast_dtype(kind)
    return dtype if dtype in LOW_DTYPES else None
