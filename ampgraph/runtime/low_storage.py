"""`LowStorage`: the parameters of level O3; their float32 memory is freed when no graph reads it."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import weakref
from collections.abc import Iterable, Iterator

import torch
from torch import fx, nn
from torch.optim import Optimizer

from ..errors import warn_user
from ..passes import ReadStored, run_passes
from ..passes.read_shadows import casts_of
from ..plan import Plan
from ..proxy.all_parameters import all_parameters
from ..training.optimizer_steps import tell_after_steps
from .options import Options

# The optimizers that a warning named, for all converted blocks of a model.
_told: weakref.WeakSet[Optimizer] = weakref.WeakSet()


class LowStorage:
    """The parameters of one model that are stored in its low dtype.

    Args:
        model: The model.
        options: The conversion options; they have the dtype that the parameters are stored in.
        names: Paths of the parameters that are stored low, of a copied or unpickled model; None if no capture
            has decided yet.

    Attributes:
        is_decided: Whether a capture has decided what is stored low; no later one stores more.
    """

    def __init__(self, model: nn.Module, options: Options, names: Iterable[str] | None):
        self._name, self._options = type(model).__name__, options
        self.is_decided = names is not None
        names = set(names or ())
        self._parameters = {id(p): p for n, p in nn.Module.named_parameters(model) if n in names}
        if self._parameters:
            tell_after_steps(self)

    def __contains__(self, parameter: object) -> bool:
        return id(parameter) in self._parameters

    def names(self, model: nn.Module) -> tuple[str, ...]:
        """Returns the paths of the stored parameters."""
        return tuple(name for name, parameter in nn.Module.named_parameters(model) if parameter in self)

    @contextlib.contextmanager
    def as_float32(self) -> Iterator[None]:
        """Gives the parameters float32 values during a capture of the model."""
        stored = {key: parameter.data for key, parameter in self._parameters.items()}
        try:
            for parameter in self._parameters.values():
                parameter.data = parameter.data.float()
            yield
        finally:
            for key, data in stored.items():
                self._parameters[key].data = data

    def decide(self, graph_module: fx.GraphModule, model: nn.Module) -> list[nn.Parameter]:
        """Returns the parameters to store low: at the first capture, and in evaluation mode alone.

        They are the model's float32 parameters that the graph reads only low; they are recorded as stored.
        """
        if self.is_decided:
            return []
        self.is_decided = True
        if model.training:
            return []
        own = set(map(id, all_parameters(model)))  # the graph may read those of a teacher in a list, too
        values = [v for v in read_low_alone(graph_module) if id(v) in own and v not in self]
        values = [v for v in values if v.dtype == torch.float32]
        self._parameters |= {id(value): value for value in values}
        if values:
            tell_after_steps(self)
        return values

    def after_step(self, optimizer: Optimizer, parameters: set[int]) -> None:
        """Warns once of an optimizer that updates stored parameters; called after each step of any one."""
        if optimizer in _told:
            return
        found = [p for key, p in self._parameters.items() if key in parameters and p.requires_grad]
        if not found:
            return
        _told.add(optimizer)
        low_dtype = self._options.low_dtype
        dtype = str(low_dtype).removeprefix("torch.")
        lost = torch.finfo(low_dtype).eps / 4  # below it, a value is rounded back
        warn_user(
            f"{self._options.named(self._name)}: level O3 has stored {len(found)} of the parameters that "
            f"{type(optimizer).__name__} updates in {dtype}, because the first capture was in evaluation "
            f"mode. Updates smaller than {lost:.1g} of a value are lost. To train, convert the float32 model "
            "in training mode, ampgraph.convert(model.train(), ...), or at level O1 or O2."
        )

    def read(self, graph_module: fx.GraphModule, plan: Plan) -> Plan:
        """Makes a graph read the stored parameters directly; returns the plan without their casts."""
        return read_stored(graph_module, plan, self._parameters.values())


def read_low_alone(graph_module: fx.GraphModule) -> list[nn.Parameter]:
    """Returns the parameters whose every use in a graph is a cast to the low dtype."""
    low: dict[int, nn.Parameter] = {}
    wide: set[int] = set()
    for node in graph_module.graph.find_nodes(op="get_attr"):
        value = operator.attrgetter(node.target)(graph_module)
        if not isinstance(value, nn.Parameter) or node.meta["val"].dtype != torch.float32:
            continue
        if len(casts_of(node)) == len(node.users):
            low[id(value)] = value
        else:
            wide.add(id(value))
    return [value for key, value in low.items() if key not in wide]


def read_stored(graph_module: fx.GraphModule, plan: Plan, stored: Iterable[nn.Parameter]) -> Plan:
    """Makes a graph read parameters as they are, stored low; returns the plan without their casts."""
    keys = {id(parameter) for parameter in stored}
    nodes = graph_module.graph.find_nodes(op="get_attr")
    names = tuple(n.name for n in nodes if id(operator.attrgetter(n.target)(graph_module)) in keys)
    run_passes(graph_module, (ReadStored(names, plan.low_dtype),))
    gone = [c for c in plan.casts if c.tensor in names and c.dst == plan.low_dtype]
    saved, cost = sum(c.bytes for c in gone), plan.cost
    cost = dataclasses.replace(
        cost,
        traffic=cost.traffic - saved,
        cast_bytes=cost.cast_bytes - saved,
        casts=cost.casts - len(gone),
    )
    casts = tuple(c for c in plan.casts if c not in gone)
    return dataclasses.replace(plan, casts=casts, cost=cost)
