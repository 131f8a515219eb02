"""What stands at the edges of a graph that runs: low copies of parameters, and loss scaling."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import torch
from torch import fx

from ..errors import warn_user
from ..passes import (
    InlineRegions,
    KeepRead,
    Pass,
    SaveNorms,
    SaveSoftmax,
    ScaleLoss,
    WidenGradients,
    has_writing_regions,
    reads_of_written_memory,
)
from ..passes.analysis.alias import written_memory
from ..passes.read_shadows import casts_of, is_cast_by_readers, is_laid_out_again
from ..plan import Plan
from ..training.gradient_boundary import scale_gradients, unscale_gradients
from ..training.scaler import LossScaler
from .options import Options
from .shadow_weights import ShadowWeights

# A graph keeps the slots of its parameters under this name.
PART = "_amp_slots"


def shadowed_parameters(
    graph: fx.Graph, values: Mapping[str, object], shadows: ShadowWeights, casts_fuse: bool
) -> dict[str, torch.Tensor]:
    """Returns the parameters, by node name, that the graph casts and can read as low copies instead.

    Parameters that the graph writes are excluded: a copy from before the call would have old values.

    Args:
        graph: The graph.
        values: The live value of each of its nodes that has one.
        shadows: The low copies.
        casts_fuse: Whether casts fuse and every call may follow an update. Then parameters are excluded too
            whose casts cost nothing: those that fused kernels read, and weights of convolutions. A compiler
            gives these another memory layout in the kernel of the cast, and would need a kernel more for a
            copy.
    """
    return accepted(castable(graph, casts_fuse), values, shadows)


def castable(graph: fx.Graph, casts_fuse: bool) -> list[str]:
    """Returns the nodes that low copies could replace, if they are parameters; see `shadowed_parameters`."""
    written = written_memory(graph)
    nodes = [node for node in graph.nodes if casts_of(node) and node not in written]
    if casts_fuse:
        nodes = [node for node in nodes if not (is_laid_out_again(node) or is_cast_by_readers(node))]
    return [node.name for node in nodes]


def accepted(
    names: Iterable[str], values: Mapping[str, object], shadows: ShadowWeights
) -> dict[str, torch.Tensor]:
    """Returns the values of those nodes that are parameters with low copies."""
    return {name: values[name] for name in names if shadows.accepts(values.get(name))}  # type: ignore[misc]


def has_low(plan: Plan) -> bool:
    """Whether any op in the plan runs low; otherwise no scaling is needed."""
    return any(d.dtype == plan.low_dtype for d in plan.decisions.values())


def gradient_passes(plan: Plan, graph_module: fx.GraphModule, options: Options) -> tuple[Pass, ...]:
    """Returns the passes for the gradients of a graph, before all others.

    They give ops of the plan other gradients than autograd's, and keep values for the backward of a compiler.
    """
    passes: list[Pass] = []
    if options.backend != "eager" and has_writing_regions(graph_module):
        passes = [InlineRegions(options.policy, with_autocast=False), KeepRead()]
    elif options.backend != "eager" and reads_of_written_memory(graph_module.graph):
        passes = [KeepRead()]
    if plan.wide_gradients:
        passes.append(WidenGradients(plan.wide_gradients))
    if plan.saved_low:
        passes.append(SaveNorms(plan.saved_low, plan.low_dtype))
    if plan.saved_softmax:
        passes.append(SaveSoftmax(plan.saved_softmax, plan.low_dtype))
    return tuple(passes)


def boundary_pass(
    scaler: LossScaler,
    values: Iterable[tuple[str, object]],
    state: tuple[str, str, str] | None = None,
    apart: bool = False,
) -> ScaleLoss:
    """Returns the boundary pass for a graph whose nodes, by name, hold the given live values."""
    size = scaler.state.probe.shape[0]
    slots = []
    for name, value in values:
        slot = scaler.slot_of(value)
        is_trained = isinstance(value, torch.Tensor) and (
            value.requires_grad or isinstance(value, torch.nn.Parameter)
        )
        if slot is None and is_trained:
            slot = size - 1  # a parameter that was added after the conversion, or a buffer
        if slot is not None:
            slots.append((name, slot))
    scale_loss = ScaleLoss(tuple(slots), size, apart=apart)
    return dataclasses.replace(scale_loss, state=state) if state else scale_loss


def of_part(scale_loss: ScaleLoss, part: str) -> tuple[ScaleLoss, list[int]]:
    """Returns the pass with slots that count in a graph's own part of the probe, and this part's slots.

    Args:
        scale_loss: The pass.
        part: The attribute of the graph that selects the part; empty if the slots are translated elsewhere.
    """
    own = sorted({slot for _, slot in scale_loss.slots} | {scale_loss.size - 1})
    slots = tuple((name, own.index(slot)) for name, slot in scale_loss.slots)
    return dataclasses.replace(scale_loss, slots=slots, size=len(own), part=part), own


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
