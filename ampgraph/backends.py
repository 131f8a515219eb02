"""``torch.compile(model, backend="ampgraph")`` and the capture side of just-in-time conversion."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ._compat import LocalSource, fake_mode_of
from .capture.just_in_time import drop_values, lower_dynamo_graph
from .errors import CaptureError, PassError, PolicyError, did_you_mean
from .passes import run_passes
from .plan import Plan
from .policy import Policy
from .rewrite import rewrite
from .scaler import STATE_NAMES, LossScaler
from .variant import boundary_pass, copy_graph, has_low

Record = Callable[[fx.GraphModule, Plan], None]


def make_backend(
    options: Any,
    modules: tuple[str, ...] = (),
    record: Record | None = None,
    scaler: LossScaler | None = None,
) -> Callable:
    """Returns a ``torch.compile`` backend that rewrites each graph and hands it to the next backend.

    Args:
        options: See `ampgraph.module.Options`.
        modules: Module paths that rules may name.
        record: Called with each rewritten graph and its plan.
        scaler: Owner of the loss scale; None for no loss scaling.
    """

    def backend(graph_module: fx.GraphModule, inputs: list, **_: Any) -> Callable:
        try:
            lowered = lower_dynamo_graph(graph_module, inputs)
            plan = rewrite(lowered, options.policy, options.low_dtype, modules, check_rules=bool(modules))
        except (CaptureError, PassError) as error:
            warnings.warn(f"ampgraph: a part of the model runs in its own dtypes: {error}", stacklevel=2)
            return _next_backend(options.backend)(graph_module, inputs)
        drop_values(lowered)
        if record:
            record(lowered, plan)
        compile_next = _next_backend(options.backend)
        if not (scaler and scaler.is_enabled() and has_low(plan) and torch.is_grad_enabled()):
            return compile_next(lowered, inputs)
        names = [n.name for n in lowered.graph.find_nodes(op="placeholder")]
        scaled = fx.GraphModule(lowered, copy_graph(lowered.graph))
        scaled.meta.update(lowered.meta)
        state = _state_inputs(scaled, scaler)
        run_passes(scaled, (boundary_pass(scaler, zip(names, inputs, strict=True), state),))
        compiled = compile_next(scaled, [*scaler.state.tensors(), *inputs])
        return lambda *args: compiled(*scaler.state.tensors(), *args)

    return backend


def _state_inputs(graph_module: fx.GraphModule, scaler: LossScaler) -> tuple[str, str, str]:
    """Adds inputs for scale, inverse and probe: a constant in the graph would be baked in."""
    graph = graph_module.graph
    mode = fake_mode_of(graph)
    assert mode is not None  # a graph with low ops has tensors
    names = []
    with graph.inserting_before(next(iter(graph.nodes))):
        for name, value in zip(STATE_NAMES, scaler.state.tensors(), strict=True):
            node = graph.placeholder(name)
            source = LocalSource(name)
            node.meta.update({"val": mode.from_tensor(value, source=source), "_dynamo_source": source})
            names.append(node.name)
    return tuple(names)  # type: ignore[return-value]


def ampgraph_backend(graph_module: fx.GraphModule, inputs: list, **given: Any) -> Callable:
    """The ``torch.compile`` backend named ``"ampgraph"``.

    ``torch.compile(model, backend="ampgraph", options={"level": "O1", "dtype": torch.float16})``. Options are
    the fields of `Policy`, or ``policy=`` itself, and ``backend=`` for the backend that runs the result.

    Raises:
        PolicyError: An option is not known.
    """
    from .module import Options

    given = {**(given.pop("options", None) or {}), **given}
    given.pop("mode", None)
    policy = given.pop("policy", None)
    backend = given.pop("backend", None)
    legal = Policy.__dataclass_fields__
    for name in given:
        if name not in legal:
            raise PolicyError(f"ampgraph backend: unknown option {name!r}.{did_you_mean(name, legal)}")
    policy = Policy.of(policy) if policy is not None else Policy()
    policy = policy.replace(**given)
    device = next((i.device for i in inputs if isinstance(i, torch.Tensor)), torch.device("cpu"))
    options = Options(policy, policy.low_dtype(device), backend or default_backend(device))
    return make_backend(options)(graph_module, inputs)


def default_backend(device: torch.device) -> str:
    """Returns ``"inductor"`` for CUDA with Triton, else ``"eager"``."""
    if device.type != "cuda":
        return "eager"
    return "inductor" if torch.utils._triton.has_triton() else "eager"


def _next_backend(backend: str | Callable) -> Callable:
    return torch._dynamo.lookup_backend(backend) if isinstance(backend, str) else backend
