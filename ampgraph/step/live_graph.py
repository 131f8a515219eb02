"""The graph of a step over live tensors: which they are, and how the graph holds them."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor, fx
from torch.optim import Optimizer

from ..errors import AmpGraphError
from ..module import AmpModule
from ..proxy.all_parameters import all_parameters
from .surroundings import Surroundings

# Attributes of the graph that hold live tensors have this prefix.
LIVE = "live_"
# Read the numbers of ``torch.tensor(1.0)``.
_LIFTED = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)


def live_tensors(amp: AmpModule, optimizer: Optimizer) -> dict[int, Tensor]:
    """Returns the tensors that a step reads where they are, by identity."""
    found: list[Tensor] = [*all_parameters(amp.source), *amp.source.buffers()]
    for group in optimizer.param_groups:
        found += [value for value in group.values() if isinstance(value, Tensor)]
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            found += [value for value in state.values() if isinstance(value, Tensor)]
    for captured in amp._graphs:
        found += captured.constants.values()
    if amp._graphs.shadows is not None:
        found += [copy for copy, _ in amp._graphs.shadows.pairs()]
    if amp.scaler.is_enabled():
        found.append(amp.scaler.state.probe)
    return {id(tensor): tensor for tensor in found}


def hold_live(graph_module: fx.GraphModule, live: Sequence[Tensor], surroundings: Surroundings) -> None:
    """Turns the first inputs of a graph into attributes, so that the graph reads and writes them in place.

    Raises:
        AmpGraphError: The graph holds another tensor for which the next step may have another.
    """
    graph = graph_module.graph
    placeholders = graph.find_nodes(op="placeholder")
    for index, (node, tensor) in enumerate(zip(placeholders, live, strict=False)):
        if node.users:
            name = f"{LIVE}{index}"
            if isinstance(tensor, torch.nn.Parameter):  # itself: its memory may be replaced
                graph_module.register_parameter(name, tensor)
            else:
                graph_module.register_buffer(name, tensor.detach() if tensor.requires_grad else tensor)
            with graph.inserting_before(node):
                held = graph.get_attr(name)
            held.meta.update(node.meta)
            node.replace_all_uses_with(held)
        graph.erase_node(node)
    _refuse_constants(graph_module, surroundings)
    graph.eliminate_dead_code(is_impure)
    graph_module.recompile()


def _refuse_constants(graph_module: fx.GraphModule, surroundings: Surroundings) -> None:
    for node in graph_module.graph.find_nodes(op="get_attr"):
        value = getattr(graph_module, str(node.target), None)
        if str(node.target).startswith(LIVE) or not isinstance(value, Tensor):
            continue
        if not (surroundings.holds(value) or all(user.target in _LIFTED for user in node.users)):
            raise AmpGraphError(
                f"loss_fn reads a tensor of the sizes {tuple(value.shape)} that is neither an argument nor "
                "in a variable or attribute that it names; a parameter must be in a module that it names"
            )


def is_impure(node: fx.Node) -> bool:
    """Whether a step needs a node that no other reads, such as a check, which returns nothing."""
    # Profilers time a step as a whole.
    if node.target is operator.getitem or getattr(node.target, "namespace", "") == "profiler":
        return False
    if node.is_impure():  # by torch's list
        return True
    schema = getattr(node.target, "_schema", None)
    if node.op in ("placeholder", "output") or schema is None or schema.is_mutable or not schema.returns:
        return True
    has_statistics = any(argument.name == "running_mean" for argument in schema.arguments)
    return _draws(node) or (has_statistics and _is_forward(node))


def has_generator(graph_module: fx.GraphModule) -> bool:
    """Whether a graph draws from a generator, which it holds or names as an argument."""
    nodes = graph_module.graph.nodes
    held = (getattr(graph_module, str(node.target), None) for node in nodes if node.op == "get_attr")
    return any(isinstance(value, torch.Generator) for value in held) or any(
        isinstance(value, torch.Generator) for node in nodes for value in node.kwargs.values()
    )


def _is_forward(node: fx.Node) -> bool:
    """Whether a batch norm is no backward: it writes running statistics, which not every schema declares."""
    return "backward" not in str(node.target)


def _draws(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
