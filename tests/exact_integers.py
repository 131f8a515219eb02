"""Integers and booleans of a converted graph beside the source's: those that no low op feeds must be equal.

Which they are is found here apart from the analysis: a low op is one that guards or the op lists make low
(white), and that reads something computed from a floating input or a parameter. What is computed from
positions and tables alone is fed by no low op, whatever the lists say of matrix products.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from ampgraph import AmpModule, Policy
from ampgraph.guards import FP16, FP32, guard_of
from ampgraph.ops.lists import OpClass
from ampgraph.passes.analysis.alias import AliasSets, written_args
from ampgraph.plan import Plan
from ampgraph.policy.policy import LOW_DTYPES
from ampgraph.report.replan import without_casts

Values = dict[str, torch.Tensor]


def differing_integers(amp: AmpModule, *args: Any, **kwargs: Any) -> tuple[list[str], int]:
    """Runs the converted graph and its source; returns the nodes that differ, and how many were compared."""
    return differing_in(amp.graph_module, amp.plan, amp.policy, tree_leaves((args, kwargs)))


def differing_in(
    graph_module: fx.GraphModule, plan: Plan, policy: Policy, inputs: Sequence[Any]
) -> tuple[list[str], int]:
    """As `differing_integers`, of one graph and what its placeholders are given."""
    source = without_casts(graph_module, plan)
    names = integers_fed_by_no_low_op(source, policy, plan.low_dtype)
    expected, actual = (_integers(module, names, inputs) for module in (source, graph_module))
    return [n for n, value in expected.items() if not torch.equal(actual[n], value)], len(expected)


def integers_fed_by_no_low_op(graph_module: fx.GraphModule, policy: Policy, low: torch.dtype) -> set[str]:
    """Returns the names of the integer and boolean nodes that must be equal."""
    memory, _, fed = _marked(graph_module, policy, low)
    return {
        n.name
        for n in graph_module.graph.nodes
        if n.op == "call_function" and memory.root(n) not in fed and _is_integer(n.meta.get("val"))
    }


def positions(graph_module: fx.GraphModule, policy: Policy, low: torch.dtype) -> set[str]:
    """Returns the names of the floating nodes that are computed from no float but buffers and constants."""
    memory, measured, fed = _marked(graph_module, policy, low)
    return {
        n.name
        for n in graph_module.graph.nodes
        if n.op == "call_function"
        and memory.root(n) not in measured | fed
        and isinstance(value := n.meta.get("val"), torch.Tensor)
        and value.is_floating_point()
    }


def _marked(
    graph_module: fx.GraphModule, policy: Policy, low: torch.dtype
) -> tuple[AliasSets, set[fx.Node], set[fx.Node]]:
    """Returns the memory that is computed from floating inputs or parameters, and that a low op feeds.

    What the source itself computes in a low dtype, and what is drawn, counts as fed.
    """
    memory = AliasSets(graph_module.graph)
    measured: set[fx.Node] = set()
    fed: set[fx.Node] = set()
    for node in graph_module.graph.nodes:
        read = {memory.root(n) for n in node.all_input_nodes}
        marks = {name for name, marked in (("measured", measured), ("fed", fed)) if read & marked}
        if node.op in ("placeholder", "get_attr"):
            marks |= {"measured"} if _is_measured(graph_module, node) else set()
        elif "measured" in marks and _is_low(node, policy, low):
            marks.add("fed")
        if _is_of_its_own(node):
            marks |= {"measured", "fed"}
        for name, marked in (("measured", measured), ("fed", fed)):
            if name in marks:
                marked.update(memory.root(n) for n in (node, *written_args(node)))
    return memory, measured, fed


def _is_of_its_own(node: fx.Node) -> bool:
    values = [v for v in tree_leaves(node.meta.get("val")) if isinstance(v, torch.Tensor)]
    drawn = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return drawn or any(v.dtype in LOW_DTYPES for v in values)


def _is_measured(graph_module: fx.GraphModule, node: fx.Node) -> bool:
    value = node.meta.get("val")
    if node.op == "get_attr":
        value = graph_module
        for part in node.target.split("."):
            value = getattr(value, part)
        return isinstance(value, nn.Parameter)
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _is_low(node: fx.Node, policy: Policy, low: torch.dtype) -> bool:
    if guard_of(node) in (FP16, FP32):
        return guard_of(node) == FP16
    return policy.ops.classify(node, low)[0] is OpClass.WHITE


def _is_integer(value: object) -> bool:
    return isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex())


def _integers(graph_module: fx.GraphModule, names: set[str], inputs: Sequence[Any]) -> Values:
    interpreter = _Recording(graph_module, names)
    torch.manual_seed(1)
    copies = [t.clone() if isinstance(t, torch.Tensor) else t for t in inputs]
    state = {key: value.clone() for key, value in graph_module.state_dict().items()}
    with torch.no_grad():
        interpreter.run(*copies, enable_io_processing=False)
        for key, value in graph_module.state_dict().items():
            value.copy_(state[key])
    return interpreter.values


class _Recording(fx.Interpreter):
    def __init__(self, graph_module: fx.GraphModule, names: set[str]) -> None:
        super().__init__(graph_module)
        self.names, self.values = names, Values()

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.name in self.names:
            self.values[n.name] = result.clone()
        return result
