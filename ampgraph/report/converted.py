"""`Converted`: the interface of a converted model that reports and pictures read."""

from __future__ import annotations

from torch import fx

from ..plan import Plan
from ..policy.policy import Policy
from ..proxy.module_proxy import ModuleProxy
from ..runtime.coverage import Coverage


class Converted(ModuleProxy):
    """The readable part of a converted model; users have the subclass `ampgraph.AmpModule`."""

    @property
    def policy(self) -> Policy:
        """The policy, with its dtype filled in."""
        raise NotImplementedError

    @property
    def plan(self) -> Plan:
        """The plan of `graph_module`."""
        raise NotImplementedError

    @property
    def graph_module(self) -> fx.GraphModule:
        """The rewritten graph that ran or was captured last."""
        raise NotImplementedError

    @property
    def graph_modules(self) -> list[fx.GraphModule]:
        """All rewritten graphs so far."""
        raise NotImplementedError

    @property
    def forward_graph(self) -> fx.GraphModule:
        """The forward after autograd."""
        raise NotImplementedError

    @property
    def backward_graph(self) -> fx.GraphModule:
        """The backward, with loss scaling."""
        raise NotImplementedError

    @property
    def is_just_in_time(self) -> bool:
        """Whether the front end of ``torch.compile`` captures at the first call."""
        raise NotImplementedError

    @property
    def stored_low(self) -> tuple[str, ...]:
        """Paths of the parameters that level O3 has stored in the low dtype."""
        raise NotImplementedError

    @property
    def coverage(self) -> Coverage | None:
        """The share of the model inside its graphs, just in time; None ahead of time."""
        raise NotImplementedError
