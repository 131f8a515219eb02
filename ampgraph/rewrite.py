"""One graph through the pipeline: what every entry point (`convert`, `export`, the backend) calls."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import fx

from .errors import PassError
from .passes import Hook, Workspace, default_pipeline, run_passes, workspace
from .plan import META_KEY, Plan
from .policy import Policy


def rewrite(
    graph_module: fx.GraphModule,
    policy: Policy,
    low_dtype: torch.dtype,
    modules: Iterable[str] = (),
    check_rules: bool = True,
    hook: Hook | None = None,
) -> Plan:
    """Plans and inserts casts in place.

    A graph for which nothing is to be done (level O0, an all-black list) stays node for node as it came.

    Args:
        graph_module: A captured graph; edited in place.
        policy: What the user wants.
        low_dtype: The low dtype.
        modules: Module paths that rules may name.
        check_rules: Whether a rule that matches nothing is an error.
        hook: See `run_passes`.

    Returns:
        The plan.

    Raises:
        PolicyError: The rules do not fit the model.
        PassError: A pass failed; the graph module must not be used then.
    """
    untouched = copy.deepcopy(graph_module.graph)
    graph_module.meta[META_KEY] = Workspace()
    run_passes(graph_module, default_pipeline(policy, low_dtype, tuple(modules), check_rules), hook)
    space = workspace(graph_module)
    if space.plan is None:
        raise PassError("the pipeline ended without a plan.")
    if not space.plan.casts and not space.plan.dtype_args:
        graph_module.graph = untouched
    # Analysis results point at nodes; the plan alone stays.
    graph_module.meta[META_KEY] = Workspace(plan=space.plan, seconds=space.seconds)
    return space.plan
