"""Makes the backward of softmax read its probabilities in the low dtype, instead of the scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule

from ampgraph._compat import evaluate, fake_mode_of
from ampgraph.marks import drop_mark
from ampgraph.training.softmax_gradient import softmax_gradient

from .analysis.softmax import Softmax, softmax_at
from .base import Pass
from .insert_casts import inherit_metadata

aten = torch.ops.aten


@dataclass(frozen=True)
class SaveSoftmax(Pass):
    """Computes each softmax without gradients, and passes the result through its gradient alone.

    The forward runs the op that it had, so its values do not change.

    Attributes:
        names: The nodes; those that are no softmax any more stay.
        low_dtype: The dtype of the saved probabilities.
    """

    names: tuple[str, ...]
    low_dtype: torch.dtype
    name: ClassVar[str] = "save_softmax"

    def run(self, graph_module: GraphModule) -> bool:
        nodes = list(graph_module.graph.nodes)
        found = [softmax for n in nodes if n.name in self.names and (softmax := softmax_at(n))]
        for softmax in found:
            self._edit(softmax)
        return bool(found)

    def _edit(self, softmax: Softmax) -> None:
        output, graph = softmax.output, softmax.output.graph
        with graph.inserting_before(output):
            x = graph.call_function(aten.detach.default, (softmax.x,))
            x.meta["val"] = evaluate(x, fake_mode_of(graph))
            inherit_metadata(x, output)
            result = graph.node_copy(output)
        drop_mark(result)
        result.replace_input_with(softmax.x, x)
        output.target = softmax_gradient
        output.args = (softmax.x, result, softmax.dim, self.low_dtype)
        output.kwargs = {}
