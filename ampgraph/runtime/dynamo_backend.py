"""``torch.compile(model, backend="ampgraph")`` and the capture side of just-in-time conversion."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from .._compat import (
    fake_mode_of,
    find_backend,
    has_triton,
    inductor_modes,
    known_backends,
    mark_as_input,
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
from ..policy.policy import LOW_DTYPES, Policy
from ..policy.rules import NODE_PREFIX, ModulePaths, RuleBook
from ..training.distributed import spread_error
from ..training.gradient_boundary import traced_for_a_compiler
from ..training.scale_state import STATE_NAMES
from ..training.scaler import LossScaler
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
from .options import UNDECIDED, Options
from .shadow_weights import SHADOW_PREFIX, ShadowWeights

Record = Callable[[fx.GraphModule, Plan, AotGraphs, Timing, Sequence[Any]], None]


def make_backend(
    options: Options,
    modules: tuple[ModulePaths, ...] = (),
    record: Record | None = None,
    scaler: LossScaler | None = None,
    shadows: ShadowWeights | None = None,
    guards: GuardScope | None = None,
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
    """

    def backend(graph_module: fx.GraphModule, inputs: list, **_: Any) -> Callable:
        values = [node.meta.get("example_value") for node in graph_module.graph.nodes]
        if error := spread_error("the model", values):
            raise error
        let_backwards_be_differentiated(graph_module)
        around = compile_around_custom_functions(graph_module, inputs, compile_graph)
        return around or compile_graph(graph_module, inputs)

    def compile_graph(graph_module: fx.GraphModule, inputs: list) -> Callable:
        start = time.perf_counter()
        try:
            lowered = lower_dynamo_graph(graph_module, inputs)
            captured = time.perf_counter()
            if guards is not None:
                guards.mark(lowered)
            if modules:
                _check_rules(options.policy, modules, lowered)
            plan = rewrite(lowered, options.policy, modules, check_rules=False)
        except (CaptureError, PassError) as error:
            what = options.named("a part of the model runs unconverted, in the source's dtypes")
            warn_user(f"ampgraph: {what}: {error}")
            return _next_backend(options.backend, options.mode)(graph_module, inputs)
        graphs = AotGraphs()
        if record:
            record(lowered, plan, graphs, Timing(captured - start, time.perf_counter() - captured), inputs)
        compile_next = _next_backend(backend_for(options.backend, graphs), options.mode)
        scales = scaler is not None and scaler.is_enabled() and has_low(plan) and torch.is_grad_enabled()
        casts_fuse = options.policy.objective == "fused" and torch.is_grad_enabled()
        masters = _masters(lowered, inputs, shadows, casts_fuse) if shadows is not None else {}
        gradients: tuple[Pass, ...] = ()
        if torch.is_grad_enabled():
            gradients = gradient_passes(plan, lowered, options)
        if not (scales or masters or gradients):
            return compile_next(lowered, inputs)
        bounded = fx.GraphModule(lowered, copy_graph(lowered.graph))
        bounded.meta.update(lowered.meta)
        scaling = scaler if scales else None
        extra = _Extra(scaling, shadows, tuple(masters.values()))
        run_passes(bounded, gradients)
        added = _add_boundary(bounded, inputs, extra, masters)
        warn_about_float16_gradients(bounded.graph, options)
        with traced_for_a_compiler():  # on torch 2.11 `torch.compiler.is_compiling` is false in a backend
            compiled = compile_next(bounded, [*added, *inputs])
        if scaling is None:
            return lambda *args: compiled(*extra.tensors(args), *args)

        def run(*args: Any) -> Any:
            if scaling.guard.overflows.looks and torch.is_grad_enabled():
                look_for(lowered, args, scaling, options)
            outputs = scaling.note_outputs(compiled(*extra.tensors(args), *args))
            return outputs if options.backend == "eager" else scaling.follow(outputs)

        return run

    return backend


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
        found = [self.shadows.of(inputs[index]) for index in self.masters]
        self.shadows.refresh()
        return [*state, *found]


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
    given = {**(given.pop("options", None) or {}), **given}
    mode = given.pop("mode", None)
    policy = given.pop("policy", None)
    backend = given.pop("backend", None)
    legal = Policy.__dataclass_fields__
    for name in given:
        if name not in legal:
            raise PolicyError(f"ampgraph backend: unknown option {name!r}.{did_you_mean(name, legal)}")
    policy = Policy.of(policy) if policy is not None else Policy()
    policy = policy.replace(**given)
    device = device_of_tensors(inputs)
    if policy.dtype is None:
        policy = policy.replace(dtype=_autocast_dtype(device))
    backend, mode = choose_backend(backend, mode, device)
    options = Options(policy.resolved(device, backend, mode), backend, mode)
    shadows = ShadowWeights(None, options.low_dtype) if policy.keeps_low_copies else None
    with no_ambient_autocast():
        compiled = make_backend(options, shadows=shadows)(graph_module, inputs)

    def run(*args: Any) -> Any:
        return without_callers_autocast(compiled, *args)

    return run


def _autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Returns the dtype of the ``torch.autocast`` around this call; None without one, or for a wide dtype."""
    kind = device.type
    if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        return None
    dtype = torch.get_autocast_dtype(kind)
    return dtype if dtype in LOW_DTYPES else None


def choose_backend(
    backend: str | Callable | None, mode: str | None, device: torch.device, *, can_wait: bool = False
) -> tuple[str | Callable, str | None]:
    """Returns the backend for the rewritten graphs, and its mode.

    Args:
        backend: The name or function that the user gave.
        mode: The mode that the user gave.
        device: The device of the model.
        can_wait: Whether `UNDECIDED` is an answer for a model without values, on the device meta.

    Raises:
        PolicyError: ``torch.compile`` does not know the backend, inductor does not know the mode, or the
            backend takes no mode.
    """
    _check_backend(backend)
    if mode is not None:
        _check_mode(mode, backend)
    if backend is not None:
        return backend, mode
    if can_wait and device.type == "meta":
        return UNDECIDED, mode
    default = default_backend(device)
    if mode is None or default == "inductor":
        return default, mode
    warn_user(
        f"mode={mode!r} configures inductor and has no effect here: the default backend on "
        f"{device.type} is {default!r}. Pass backend='inductor' to compile."
    )
    return default, None


def decided(options: Options, device: torch.device) -> Options:
    """Returns the options of a model that was converted without values, for the device that it has now."""
    backend, mode = None if options.backend == UNDECIDED else options.backend, options.mode
    if backend is None:
        backend, mode = choose_backend(None, mode, device)
    policy = options.policy.resolved(device, backend, mode)
    return replace(options, policy=policy, backend=backend, mode=mode)


def _check_mode(mode: str, backend: str | Callable | None) -> None:
    if backend in (None, "inductor"):
        known = inductor_modes()
        if mode in known:
            return
        raise PolicyError(
            f"mode={mode!r} is not known to inductor; legal: {', '.join(known)}."
            + did_you_mean(str(mode), known)
        )
    if not _takes_mode(backend):
        raise PolicyError(f"mode={mode!r} configures inductor; backend={backend!r} has no modes.")


def _takes_mode(backend: str | Callable | None) -> bool:
    found = find_backend(backend) if isinstance(backend, str) else backend
    try:
        parameters = inspect.signature(found).parameters  # type: ignore[arg-type]
    except (TypeError, ValueError):  # a callable without a signature
        return True
    if "mode" in parameters:
        return True
    # torch's own backends take any keyword and ignore it.
    is_torchs = getattr(found, "__module__", "").startswith("torch.")
    return not is_torchs and any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _check_backend(backend: object) -> None:
    if backend is None or callable(backend):
        return
    known = known_backends()
    if backend in known:
        return
    usual = ["eager", "aot_eager", *torch.compiler.list_backends()]
    raise PolicyError(
        f"backend={backend!r} is not known to torch.compile; legal: {', '.join(usual)}, any other of "
        f"torch.compiler.list_backends(None), or a function.{did_you_mean(str(backend), known)}"
    )


def default_backend(device: torch.device) -> str:
    """Returns ``"inductor"`` for CUDA with Triton, else ``"eager"``."""
    if device.type != "cuda":
        return "eager"
    return "inductor" if has_triton() else "eager"


def _next_backend(backend: str | Callable, mode: str | None) -> Callable:
    """Returns the function behind a backend's name, with the mode as ``torch.compile`` would pass it."""
    found: Callable = find_backend(backend) if isinstance(backend, str) else backend
    if mode in (None, "default"):
        return found
    if backend == "inductor":
        return functools.partial(found, config_patches=inductor_modes()[mode])
    return functools.partial(found, mode=mode)
