"""`explain`: what runs in which dtype, who decided so, and what the casts cost."""

from __future__ import annotations

from torch.fx import GraphModule

from .converted import Converted
from .explanation import Explanation
from .read_graph import source_of


def explain(amp: Converted | GraphModule) -> Explanation:
    """Explains a converted model: every node's dtype and reason, every cast, and the totals.

    Everything is read off the rewritten graph itself; reasons and modelled traffic come from its plan.

    Args:
        amp: What `ampgraph.convert` returned, or the graph module of one. An `AmpModule` with several
            graphs is explained by the one that ran last; the others are in ``amp.graph_modules``.

    Raises:
        AmpGraphError: It is neither, or not captured yet.

    Example:
        >>> print(ampgraph.explain(amp))
        >>> print(ampgraph.explain(amp).why("linear"))
    """
    return Explanation.of(*source_of(amp))
