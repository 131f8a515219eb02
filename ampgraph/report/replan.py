"""Plans a rewritten graph again, under another policy or with one node flipped, without a capture."""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx import GraphModule

from ..passes import Pins, RemoveCasts, run_passes
from ..passes.pipeline import rewrite
from ..plan import Plan
from ..policy.policy import Policy
from ..policy.rules import ModulePaths
from ..runtime.graph_copies import copy_graph
from ..runtime.low_storage import read_low_alone, read_stored
from .graph_view import with_bodies


def replanned(
    graph_module: GraphModule,
    plan: Plan,
    policy: Policy,
    modules: Iterable[ModulePaths] = (),
    check_rules: bool = False,
    pins: Pins = (),
    stores_low: bool = False,
) -> tuple[GraphModule, Plan]:
    """Returns a copy of the graph, rewritten under another policy, and its plan.

    Args:
        graph_module: A rewritten graph; not changed. The copy shares its tensors.
        plan: Its plan.
        policy: The new policy; if it sets no dtype, the low dtype stays.
        modules: Module paths that rules may name.
        check_rules: Whether a rule that matches nothing is an error.
        pins: Precisions by node name that stand above guards, rules and lists.
        stores_low: Whether level O3 stores parameters low, as it does of models in evaluation mode.

    Raises:
        PolicyError: The rules do not fit the model.
    """
    source = without_casts(graph_module, plan)
    policy = policy.replace(dtype=policy.dtype or plan.low_dtype)
    new = rewrite(source, policy, modules, check_rules, pins=pins)
    if policy.level == "O3" and stores_low:
        new = read_stored(source, new, read_low_alone(source))
    return source, new


class Replanner:
    """Plans one rewritten graph under many policies; the casts are removed once.

    Args:
        graph_module: A rewritten graph; not changed. Its copies share its tensors.
        plan: Its plan.
        modules: Module paths that rules may name.
    """

    def __init__(self, graph_module: GraphModule, plan: Plan, modules: Iterable[ModulePaths] = ()) -> None:
        self._low_dtype, self._modules = plan.low_dtype, tuple(modules)
        self.float32 = without_casts(graph_module, plan)

    def under(self, policy: Policy) -> tuple[GraphModule, Plan]:
        """Returns a copy of the graph, rewritten under another policy, and its plan; as `replanned`."""
        source = _with_own_bodies(self.float32)
        policy = policy.replace(dtype=policy.dtype or self._low_dtype)
        return source, rewrite(source, policy, self._modules, check_rules=False)


def without_casts(graph_module: GraphModule, plan: Plan) -> GraphModule:
    """Returns a copy of a rewritten graph as it was planned: without casts, in the source's dtypes."""
    copied = _copy(graph_module)
    for name, body, body_plan in with_bodies(graph_module, plan):
        if name.count("/") == 1:
            setattr(copied, name.removesuffix("/"), without_casts(body, body_plan))
    run_passes(copied, (RemoveCasts(plan),))
    # A graph never forgets a name: without a fresh one, new casts would be numbered after the old.
    return _copy(copied)


def _with_own_bodies(graph_module: GraphModule) -> GraphModule:
    """Returns a copy whose bodies are copies too, because a rewrite edits them."""
    copied = _copy(graph_module)
    for name, child in graph_module.named_children():
        if isinstance(child, GraphModule):
            setattr(copied, name, _with_own_bodies(child))
    return copied


def _copy(graph_module: GraphModule) -> GraphModule:
    return GraphModule(graph_module, copy_graph(graph_module.graph))
