"""Precision as node data for Google's Model Explorer, shown on the exported program."""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule

from ..report.converted import Converted
from . import styles
from .annotated import to_networkx


def to_model_explorer(amp: Converted | GraphModule) -> dict[str, Any]:
    """Returns the graph's precision in Model Explorer's node-data format.

    Every node gets the dtype it computes in, casts ``"cast to float16"``, in the colours of `draw`. Nodes
    are keyed by name, so the data fits the program that `ampgraph.export` returns for the same model and
    policy: save that with ``torch.export.save``, open it in Model Explorer, and load this as node data.
    Parameters are omitted, because they have other names there. Bodies of ``torch.cond`` are omitted too.

    Source of the format: ``node_data_builder.py`` of github.com/google-ai-edge/model-explorer.

    Args:
        amp: The result of `ampgraph.convert`, or its graph module.

    Returns:
        Plain dicts, lists and strings, for ``json.dump``.
    """
    graph = to_networkx(amp)
    results = {
        name: {"value": _value(data), "bgColor": _colour(data), "textColor": "#000000"}
        for name, data in graph.nodes(data=True)
        if data["dtype"] and data["kind"] != "parameter" and "/" not in name
    }
    return {"results": results, "showExpandedSummaryOnGroupNode": True}


def _value(data: dict[str, Any]) -> str:
    return f"cast to {data['dtype']}" if data["kind"] == "cast" else str(data["dtype"])


def _colour(data: dict[str, Any]) -> str:
    if data["kind"] in ("cast", "clamp"):
        return styles.CAST
    return styles.PRECISION_COLOURS[data["precision"]]
