"""`explain`: the dtype of each op, the reason, and the cost of the casts."""

from __future__ import annotations

from torch.fx import GraphModule

from .converted import Converted
from .explanation import Explanation
from .read_graph import source_of


def explain(amp: Converted | GraphModule) -> Explanation:
    """Explains a converted model: every node's dtype and reason, every cast, and the totals.

    Counts come from the rewritten graph. Reasons and modelled traffic come from its plan.

    Args:
        amp: The result of `ampgraph.convert`, or its graph module. For an `AmpModule` with several graphs,
            `explain` shows the one that ran last; ``amp.graph_modules`` has the others.

    Raises:
        AmpGraphError: ``amp`` is not a converted model, or it is not captured yet.

    Example:
        >>> print(ampgraph.explain(amp))
        >>> print(ampgraph.explain(amp).why("linear"))
    """
    return Explanation.of(*source_of(amp))
