"""Runs a rewritten graph for the capture of a larger model: what it has in float32 is marked to stay so."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from .._compat import flat_inputs
from ..guards import fp32_guard
from ..passes.analysis.facts import tensors


class _Guarded(fx.Interpreter):
    """Runs each op whose results are float32 inside an `fp32_guard`."""

    _is_wide = False

    def run_node(self, n: fx.Node) -> Any:
        self._is_wide = any(tensor.dtype == torch.float32 for tensor in tensors(n))
        return super().run_node(n)

    def call_function(self, target: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if not self._is_wide:
            return super().call_function(target, args, kwargs)
        with fp32_guard():  # here, because `run_node` puts the marks of its node in the place of others
            return super().call_function(target, args, kwargs)


def run_as_part(graph_module: fx.GraphModule, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Runs a rewritten graph on the arguments of its model while a larger model is captured.

    The plan of the larger model may run the other ops in float32 as well, and never lowers more ops.
    """
    inputs = flat_inputs(graph_module, args, kwargs)
    outputs = _Guarded(graph_module).run(*inputs, enable_io_processing=False)
    return graph_module.graph.process_outputs(outputs)
