"""`Converted`: what reports and pictures read of a converted model, whatever runs it."""

from __future__ import annotations

from torch import fx

from ..plan import Plan
from ..policy.policy import Policy
from ..proxy.module_proxy import ModuleProxy
from ..runtime.coverage import Coverage


class Converted(ModuleProxy):
    """A converted model to look at; `ampgraph.AmpModule` is the class that users have."""

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
        """The backward, loss scaling in it."""
        raise NotImplementedError

    @property
    def is_just_in_time(self) -> bool:
        """Whether the first call captures, by ``torch.compile``'s front end."""
        raise NotImplementedError

    @property
    def coverage(self) -> Coverage | None:
        """How much of the model the graphs hold, captured just in time; None ahead of time."""
        raise NotImplementedError
