"""Ops whose kernels ask whether gradients are enabled. A step as one graph runs without autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

_RNN_LAYER = torch.ops.aten.mkldnn_rnn_layer.default


def keep_workspaces(graph: fx.Graph) -> None:
    """Lets the layers of an LSTM on a CPU return the workspace that their backward in the graph reads."""
    for node in graph.find_nodes(op="call_function", target=_RNN_LAYER):
        node.target = rnn_layer_with_workspace


def rnn_layer_with_workspace(*args: Any) -> tuple[Tensor, ...]:
    """Runs ``mkldnn_rnn_layer``, which makes a workspace only if gradients are enabled (torch 2.13)."""
    # No input requires gradients, so autograd records nothing.
    values = [x.detach() if isinstance(x, Tensor) else x for x in args]
    with torch.enable_grad():
        outputs: tuple[Tensor, ...] = _RNN_LAYER(*values)
    return outputs
