"""Hides the caller's ``torch.autocast`` from a converted model, in its forward and in its backward.

Autograd runs each node in the autocast state of the thread that calls ``backward``. It restores this state
after each node, so a hook before the node may switch autocast off for it alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .._compat import (
    is_any_autocast_enabled,
    never_compiled,
    next_node_number,
    no_ambient_autocast,
    node_number,
    running_node,
)

_HIDDEN = "ampgraph_without_autocast"  # in the metadata of a node


def without_callers_autocast(function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function outside of the caller's autocast; so runs the backward of what it returns."""
    if not is_any_autocast_enabled():
        return function(*args)
    first = next_node_number()
    with no_ambient_autocast():
        outputs = function(*args)
    functions = {t.grad_fn for t in tree_leaves(outputs) if isinstance(t, Tensor)}
    for node in filter(None, functions):
        node.register_prehook(functools.partial(_hide, first))
    return outputs


@never_compiled
def _hide(first: int, gradients: Iterable[Tensor | None]) -> None:
    """Hides autocast from the node that runs next, and from those behind it that are of the same call."""
    own = running_node()
    if own is None or not is_any_autocast_enabled():
        return
    pending = [own]
    while pending:
        node = pending.pop()
        # What accumulates a gradient is no call's own, and leads nowhere.
        is_of_call = node is not None and node.next_functions and node_number(node) >= first
        if is_of_call and _HIDDEN not in node.metadata:
            node.metadata[_HIDDEN] = True
            node.register_prehook(_switch_off)
            pending += [following for following, _ in node.next_functions]
    if _HIDDEN in own.metadata:  # autograd has chosen its hooks already
        _switch_off(gradients)


@never_compiled
def _switch_off(gradients: Iterable[Tensor | None]) -> None:
    """Switches autocast off for the node that runs next."""
    for device in {g.device.type for g in gradients if g is not None}:
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            torch.set_autocast_enabled(device, False)
