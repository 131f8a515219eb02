"""Inputs of a graph that mask what a softmax reads, as far as their readers tell."""

from __future__ import annotations

from torch.fx import Node

from ampgraph.ops import kernels
from ampgraph.ops.lists import OpClass

from .arguments import argument_name, tensor_arguments
from .facts import Facts, is_cast
from .graph_walk import kind

# With those that a softmax written out has.
_SOFTMAX = ("softmax", "_softmax", "_safe_softmax", "log_softmax", "_log_softmax", "exp", "exp2", "logsumexp")
# And ops that select.
_SUMS = ("add", "sub", "rsub", "where", "masked_fill", "maximum", "minimum")


def keeps_size(node: Node, op_class: OpClass | None) -> bool:
    """Whether a large operand makes a large result."""
    return op_class is OpClass.CLEAR or kernels.promotes(node.target) or not node.all_input_nodes  # type: ignore[arg-type]


def is_added_mask(placeholder: Node, facts: Facts) -> bool:
    """Whether a softmax reads a sum with the input, and no op of the white list reads it."""
    is_read = False
    known = {(placeholder, False)}
    stack = [(placeholder, False)]
    while stack:
        node, is_summed = stack.pop()
        for user in node.users:
            if _computes_low(user, node, facts):
                return False
            is_read |= is_summed and kind(user) in _SOFTMAX
            step = user, is_summed or kind(user) in _SUMS
            if step not in known and _passes_on(user, facts):
                known.add(step)
                stack.append(step)
    return is_read


def _computes_low(user: Node, node: Node, facts: Facts) -> bool:
    if user not in facts or facts[user].op_class is not OpClass.WHITE:
        return False
    masks = kernels.mask_slots(user.target)  # type: ignore[arg-type]
    return any(argument_name(user, path) not in masks for path, n in tensor_arguments(user) if n is node)


def _passes_on(user: Node, facts: Facts) -> bool:
    fact = facts.get(user)
    if fact is None or fact.op is None or fact.dtype is None or kind(user) in _SOFTMAX:
        return False
    return is_cast(user) or keeps_size(user, fact.op_class)
