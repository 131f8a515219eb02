"""Softmax ops in a graph."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from .alias import drops
from .arguments import argument
from .facts import is_cast, tensors

aten = torch.ops.aten


@dataclass(frozen=True)
class Softmax:
    """One softmax.

    Attributes:
        output: The node that returns the probabilities.
        x: What it reads.
        dim: The dimension over which the probabilities sum to 1.
    """

    output: Node
    x: Node
    dim: int


def softmax_at(node: Node) -> Softmax | None:
    """Returns the softmax that a node is, or None; it gives float32."""
    if node.target is not aten.softmax.int or [t.dtype for t in tensors(node)] != [torch.float32]:
        return None
    return Softmax(node, argument(node, "self"), argument(node, "dim"))


def same_values(node: Node) -> list[Node]:
    """Returns a node and the ops behind it that return its values in its dtype and shape."""
    found = [node]
    for one in found:
        found += [user for user in one.users if _returns(user, one)]
    return found


def _returns(user: Node, node: Node) -> bool:
    if user.target is aten.dropout.default and user.args[0] is node:
        return not drops(user)
    if user.op != "call_function" or not is_cast(user) or user.args[0] is not node:
        return False
    return [t.dtype for t in tensors(user)] == [t.dtype for t in tensors(node)]
