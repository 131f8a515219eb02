"""`watch`: which node of a model in training makes the first value or gradient that is not finite."""

from __future__ import annotations

import functools
import logging
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from .._compat import after_backward, compiled_by_dynamo
from ..errors import AmpGraphError, NumericsError, PolicyError, did_you_mean
from ..module import AmpModule
from ..origin import module_path
from ..passes import is_boundary
from ..passes.read_shadows import reads_copy
from ..policy.loss_scale import DynamicLossScale
from ..report import graph_view as view
from ..runtime.dynamo_backend import SHADOW_PREFIX, make_backend
from .finding import BACKWARD, FORWARD
from .run_graph import GraphRun, flat_inputs, is_meant

log = logging.getLogger("ampgraph")

REPORT, ABORT = KINDS = ("report", "abort")


@dataclass(frozen=True)
class Sighting:
    """The first value or gradient of one step that was not finite; ``str()`` is one line.

    Attributes:
        step: The step, counted from 1 in the ``with`` block.
        node: The node; of a gradient, the one whose result the gradient is of.
        module: Path of its module.
        op: Its op.
        line: ``file:line`` of the code that made it.
        direction: ``"forward"`` or ``"backward"``.
        scale: The loss scale of the step.
    """

    step: int
    node: str
    module: str
    op: str
    line: str
    direction: str
    scale: float

    def __str__(self) -> str:
        what = "the gradient of " if self.direction == BACKWARD else ""
        where = f" in {self.module}" if self.module else ""
        line = f", {self.line}" if self.line else ""
        return (
            f"step {self.step}: {what}{self.node} ({self.op}){where}{line} is not finite, at loss scale "
            f"{self.scale:g}; ampgraph.check_numerics finds what cures it"
        )


class _Flag(NamedTuple):
    """Whether a tensor has NaN, and whether it has infinities; on its device."""

    node: Node
    found: Tensor


def watch(amp: AmpModule, on: str = REPORT, steps: tuple[int, int] | None = None) -> Watch:
    """Watches a model in training: ``with ampgraph.watch(amp) as w:``.

    Inside, each call with gradients runs node by node, without the backend's compilation, and each value and
    gradient leaves one flag on the device. They are read once, when the backward ends. A step is one backward
    with the calls before it. Outside of ``steps``, and after the block, the model runs as it did before.
    Infinities that the model's code writes (masks) do not count; NaN always does.

    Args:
        amp: What `ampgraph.convert` returned.
        on: ``"report"`` logs each node once and keeps all in `Watch.sightings`. ``"abort"`` raises too; not
            for gradients while a dynamic loss scale can still fall, since that is how it settles.
        steps: The first and the last step to watch, counted from 1; None: all.

    Raises:
        NumericsError: With ``on="abort"``, from ``backward()``, at the step that is not finite.
        AmpGraphError: ``amp`` is no converted model.
        PolicyError: ``on`` or ``steps`` is not legal.

    Example:
        >>> with ampgraph.watch(amp, steps=(100, 120)) as w:
        ...     train(amp)
        >>> print(w.sightings[0])
    """
    if not isinstance(amp, AmpModule):
        raise AmpGraphError(f"watch: expected what ampgraph.convert returns; got a {type(amp).__name__}.")
    if on not in KINDS:
        legal = ", ".join(map(repr, KINDS))
        raise PolicyError(f"watch: on={on!r}; legal: {legal}.{did_you_mean(str(on), KINDS)}")
    return Watch(amp, on, *_range(steps))


def _range(steps: Any) -> tuple[int, float]:
    if steps is None:
        return 1, math.inf
    is_pair = isinstance(steps, Sequence) and len(steps) == 2 and all(isinstance(s, int) for s in steps)
    if not is_pair or not 1 <= steps[0] <= steps[1]:
        raise PolicyError(f"watch: steps={steps!r}; expected (first, last), counted from 1.")
    return steps[0], steps[1]


class Watch:
    """What `watch` returns.

    Attributes:
        sightings: One for each step that was not finite.
        step: The step that runs now.
    """

    def __init__(self, amp: AmpModule, on: str, first: int, last: float):
        self.sightings: list[Sighting] = []
        self.step = 0
        self._amp, self._on, self._first, self._last = amp, on, first, last
        self._values: list[_Flag] = []
        self._gradients: list[_Flag] = []
        self._is_over = True  # the next call begins a step
        self._is_waiting = False
        self._told: set[tuple[str, str]] = set()
        self._forward: Callable | None = None
        self._compiled: Callable | None = None  # what runs just in time while nothing is watched
        self._watching: Callable | None = None

    # -- on and off ------------------------------------------------------------------------------

    def __enter__(self) -> Watch:
        if self._forward is not None:
            raise AmpGraphError("this watch is on already.")
        forward = self._amp.__dict__["forward"]
        if hasattr(forward, "_amp_watch"):
            raise AmpGraphError("the model is watched already.")

        @functools.wraps(forward)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():
                self._begin()
            return forward(*args, **kwargs)

        watched._amp_watch = self  # type: ignore[attr-defined]
        self._forward = forward
        self._amp.__dict__["forward"] = watched
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._switch(on=False)
        self._amp.__dict__["forward"], self._forward = self._forward, None
        if kind is None:
            self._read()
        self._values, self._gradients = [], []

    def _switch(self, on: bool) -> None:
        amp = self._amp
        amp._graphs.run_by(self._run if on else None)
        if not amp.is_just_in_time or on == (self._compiled is not None):
            return
        if on:
            self._watching = self._watching or self._compile()
            self._compiled, amp.__dict__["_compiled"] = amp.__dict__["_compiled"], self._watching
        else:
            amp.__dict__["_compiled"], self._compiled = self._compiled, None

    def _compile(self) -> Callable:
        """Compiles just in time with a backend that watches; what is compiled already stays for later."""
        amp = self._amp
        options = replace(amp.options, backend=self._take, mode=None)
        modules = tuple(name for name, _ in amp.source.named_modules())
        record = None if amp._graphs else amp._graphs.add
        backend = make_backend(options, modules, record, amp.scaler, amp._graphs.shadows)
        return compiled_by_dynamo(amp.source, backend)

    def _take(self, graph_module: GraphModule, inputs: Sequence[Any]) -> Callable:
        return functools.partial(self._run, graph_module)

    def _begin(self) -> None:
        if not self._is_over:
            return
        self._read()  # what had no backward
        self._is_over = False
        self.step += 1
        is_watched = self._first <= self.step <= self._last
        self._switch(on=is_watched)
        if not is_watched:
            self._is_over = True

    # -- looking ---------------------------------------------------------------------------------

    def _run(self, graph_module: GraphModule, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return graph_module(*args, **kwargs)
        run = GraphRun(graph_module, flat_inputs(graph_module, args, kwargs), is_real=True)
        for node, value in run:
            if not isinstance(value, Tensor) or not value.is_floating_point() or _is_passed_on(node):
                continue
            if value.layout != torch.strided or not value.numel():
                continue
            self._values.append(_Flag(node, _flag(value)))
            if value.requires_grad and node.op == "call_function":
                value.register_hook(functools.partial(self._note_gradient, node))
        return run.result()

    def _note_gradient(self, node: Node, gradient: Tensor) -> None:
        self._gradients.append(_Flag(node, _flag(gradient)))
        if not self._is_waiting:
            self._is_waiting = True
            after_backward(self._end)

    def _end(self) -> None:
        self._is_waiting, self._is_over = False, True
        self._read()

    def _read(self) -> None:
        """Reads all flags: the only wait for the device."""
        values, self._values = self._values, []
        gradients, self._gradients = self._gradients, []
        if not values and not gradients:
            return
        found = torch.stack([flag.found for flag in (*values, *gradients)]).tolist()
        node = _first_value([flag.node for flag in values], found)
        direction = FORWARD
        if node is None:
            of_gradients = zip(gradients, found[len(values) :], strict=True)
            node, direction = next((f.node for f, bad in of_gradients if any(bad)), None), BACKWARD
        if node is not None:
            self._tell(node, direction)

    def _tell(self, node: Node, direction: str) -> None:
        node = _behind_boundary(node)
        while view.kind_of(node) in ("cast", "clamp"):
            node = _behind_boundary(node.args[0])  # type: ignore[arg-type]
        scale = self._amp.scaler.get_scale()
        op, name = view.op_name(node) or node.op, view.label_of(node).removeprefix(SHADOW_PREFIX)
        sighting = Sighting(self.step, name, module_path(node), op, view.user_line(node), direction, scale)
        self.sightings.append(sighting)
        if (sighting.node, direction) not in self._told:
            self._told.add((sighting.node, direction))
            log.warning("%s", sighting)
        if self._on == ABORT and not (direction == BACKWARD and self._can_fall(scale)):
            raise NumericsError(str(sighting))

    def _can_fall(self, scale: float) -> bool:
        config = self._amp.scaler.config
        return isinstance(config, DynamicLossScale) and scale > config.floor


def _flag(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return torch.stack([tensor.isnan().any(), tensor.isinf().any()])


def _first_value(nodes: list[Node], found: Sequence[list[bool]]) -> Node | None:
    """Returns the first node that is not finite, but for infinities that are meant, and what they lead to."""
    meant: set[Node] = set()
    for node, (is_nan, is_inf) in zip(nodes, found, strict=False):
        if not is_nan and not is_inf:
            continue
        is_copy = node.name.startswith(SHADOW_PREFIX)  # of a parameter, which has not fitted
        is_own = is_meant(node) or (node.op == "placeholder" and not is_copy)  # a mask may be an argument
        read = [_behind_boundary(node)] if reads_copy(node) else node.all_input_nodes
        if is_nan or not (is_own or any(_behind_boundary(n) in meant for n in read)):
            return node
        meant.add(node)
    return None


def _is_passed_on(node: Node) -> bool:
    """Whether the boundary passes a value on, which has its flag already; it makes low copies, though."""
    return is_boundary(node) and not reads_copy(node)


def _behind_boundary(node: Node) -> Node:
    """Returns the tensor that a node of the loss-scaling boundary passes on; any other node as it is."""
    while is_boundary(node) and node.op == "call_function":
        source = node.args[0]
        assert isinstance(source, Node)
        if node.target is operator.getitem:
            passed = source.args[len(source.args) - len(source.meta["val"]) :]
            source = passed[int(node.args[1])]  # type: ignore[arg-type]
            assert isinstance(source, Node)
        node = source
    return node
