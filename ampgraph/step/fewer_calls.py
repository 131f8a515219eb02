"""Removes calls from the graph of a step: repeated views, and what costs a call where ops run one by one."""

from __future__ import annotations

from collections.abc import Hashable
from operator import getitem

import torch
from torch import Tensor, fx

aten = torch.ops.aten

# Ops that return views of their first argument, or a list of views.
VIEWS = {
    aten.alias.default,
    aten.detach.default,
    aten.expand.default,
    aten.permute.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.t.default,
    aten.transpose.int,
    aten.unbind.int,
    aten.unsqueeze.default,
    aten.view.default,
}


def share_views(graph: fx.Graph) -> None:
    """Replaces a view by an earlier tensor of the same memory, sizes, strides and offset.

    The nodes need their fake tensors in ``meta["val"]``. Unused nodes stay.
    """
    if any(torch.Tag.inplace_view in getattr(node.target, "tags", ()) for node in graph.nodes):
        return  # it would change the sizes of the tensor that another call uses
    roots: dict[fx.Node, fx.Node] = {}
    first: dict[Hashable, fx.Node] = {}
    for node in graph.nodes:
        root = _viewed(node, roots)
        roots[node] = root
        key = (root, *_layout(node))
        same = first.setdefault(key, node)
        # What the step returns must be another object than its tensors.
        if root is not node and same is not node and not any(user.op == "output" for user in node.users):
            node.replace_all_uses_with(same)


def shorten_calls(graph: fx.Graph) -> None:
    """Removes reshapes of sums and writes casts as ``to``; a compiler does as much itself.

    The nodes need their fake tensors in ``meta["val"]``. Unused nodes stay.
    """
    for node in graph.find_nodes(op="call_function", target=aten.view.default):
        _sum_without_view(node)
    for node in graph.find_nodes(op="call_function", target=aten._to_copy.default):
        _cast_by_to(node)


def _viewed(node: fx.Node, roots: dict[fx.Node, fx.Node]) -> fx.Node:
    """Returns the node whose memory a view shows; the node itself if it is no view."""
    source = node.args[0] if node.args else None
    is_part = node.target is getitem and isinstance(source, fx.Node) and source.target in VIEWS
    return roots[source] if node.target in VIEWS or is_part else node  # type: ignore[index]


def _layout(node: fx.Node) -> tuple[Hashable, ...]:
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return (node,)
    return value.dtype, value.shape, value.stride(), value.storage_offset()


def _sum_without_view(node: fx.Node) -> None:
    """Lets a sum to one dimension, as autograd takes for a bias, drop the others itself."""
    total, sizes = node.args
    if not isinstance(total, fx.Node) or total.target is not aten.sum.dim_IntList or len(total.users) > 1:
        return
    values, dims, *keeps = total.args
    of_sum, rank = total.meta["val"], values.meta["val"].dim()  # type: ignore[union-attr]
    if keeps != [True] or total.kwargs or not dims or not rank:
        return
    if len({dim % rank for dim in dims}) != rank - 1:  # type: ignore[operator, union-attr]
        return
    if sizes != [of_sum.numel()]:
        return
    total.args = (values, dims)
    total.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(total)


def _cast_by_to(node: fx.Node) -> None:
    """Writes a cast to another dtype as ``to``, which has a faster binding."""
    if set(node.kwargs) == {"dtype"} and node.args[0].meta["val"].dtype != node.kwargs["dtype"]:  # type: ignore
        node.target = aten.to.dtype
        node.args, node.kwargs = (node.args[0], node.kwargs["dtype"]), {}
