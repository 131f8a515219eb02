"""`watch`: which node of a model in training makes the first value or gradient that is not finite."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from .._compat import after_backward, compiled_by_dynamo, is_compiling
from ..errors import AmpGraphError, NumericsError, PolicyError, did_you_mean
from ..module import AmpModule
from ..origin import module_names, module_path, op_name, user_line
from ..policy.loss_scale import DynamicLossScale
from ..report.graph_view import dtype_of
from ..runtime.dynamo_backend import make_backend
from ..runtime.first_nonfinite import (
    Flag,
    first_of,
    flag_of,
    has_values,
    is_passed_on,
    maker_of,
    name_of,
    read,
)
from ..runtime.run_graph import GraphRun, flat_inputs
from .finding import BACKWARD, FORWARD

log = logging.getLogger("ampgraph")

REPORT, ABORT = KINDS = ("report", "abort")


@dataclass(frozen=True)
class Sighting:
    """The first value or gradient of one step that was not finite; ``str()`` is one line.

    Attributes:
        step: The step, counted from 1 in the ``with`` block.
        node: The node. For a gradient, the node whose result has this gradient.
        module: Path of its module.
        op: Its op.
        line: ``file:line`` of the model's code.
        direction: ``"forward"`` or ``"backward"``.
        scale: The loss scale of the step.
        dtype: The dtype in which it is not finite, such as ``"float16"``: that of the node or of its cast.
    """

    step: int
    node: str
    module: str
    op: str
    line: str
    direction: str
    scale: float
    dtype: str = ""

    def __str__(self) -> str:
        what = "the gradient of " if self.direction == BACKWARD else ""
        where = f" in {self.module}" if self.module else ""
        line = f", {self.line}" if self.line else ""
        return (
            f"step {self.step}: {what}{self.node} ({self.op}){where}{line} is not finite in {self.dtype}, at "
            f"loss scale {self.scale:g}; ampgraph.check_numerics finds a fix"
        )


def watch(amp: AmpModule, on: str = REPORT, steps: tuple[int, int] | None = None) -> Watch:
    """Watches a model in training: ``with ampgraph.watch(amp) as w:``.

    In the ``with`` block, each call with gradients runs node by node, without the backend's compiler. Each
    value and gradient writes one flag on the device. The host reads the flags once, at the end of the
    backward. A step is one backward and the calls before it. Outside of ``steps``, and after the block, the
    model runs as before. Infinities that the model's code writes (masks) do not count; NaN always counts.

    Args:
        amp: The converted model.
        on: ``"report"`` logs each node once and stores all sightings in `Watch.sightings`. ``"abort"`` also
            raises an error, but not for gradients while a dynamic loss scale can still fall.
        steps: The first and the last step to watch, counted from 1; None: all.

    Raises:
        NumericsError: With ``on="abort"``, from ``backward()``, at the step that is not finite.
        AmpGraphError: ``amp`` is not a converted model.
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
    is_pair = isinstance(steps, Sequence) and len(steps) == 2 and all(type(s) is int for s in steps)
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
        self._values: list[Flag] = []
        self._gradients: list[Flag] = []
        self._is_over = True  # the next call begins a step
        self._is_waiting = False
        self._told: set[tuple[str, str]] = set()
        self._forward: Callable | None = None
        self._compiled: Callable | None = None  # what runs just in time while nothing is watched
        self._watching: Callable | None = None

    # -- on and off ------------------------------------------------------------------------------

    def __enter__(self) -> Watch:
        if self._forward is not None:
            raise AmpGraphError("watch: this watch is already active.")
        forward = self._amp.__dict__["forward"]
        if hasattr(forward, "_amp_watch"):
            raise AmpGraphError("watch: the model is already watched.")

        @functools.wraps(forward)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled() and not is_compiling():
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
            self._compiled, amp._compiled.run = amp._compiled.run, self._watching
        elif self._compiled is not None:
            amp._compiled.run, self._compiled = self._compiled, None

    def _compile(self) -> Callable:
        """Compiles just in time with a backend that watches; what is compiled already stays for later."""
        amp = self._amp
        options = replace(amp.options, backend=self._take, mode=None)
        modules, graphs = module_names(amp.source), amp._graphs
        record = None if graphs else graphs.add
        backend = make_backend(options, modules, record, amp.scaler, graphs.shadows, graphs.guard_scope)
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
            if not isinstance(value, Tensor) or not value.is_floating_point() or is_passed_on(node):
                continue
            if not has_values(value):
                continue
            self._values.append(Flag(node, flag_of(value), node not in run.unwritten))
            if value.requires_grad and node.op == "call_function":
                value.register_hook(functools.partial(self._note_gradient, node))
        return run.result()

    def _note_gradient(self, node: Node, gradient: Tensor) -> None:
        self._gradients.append(Flag(node, flag_of(gradient)))
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
        found = read([*values, *gradients])
        first = first_of(values, found)
        node, direction = first and first.node, FORWARD
        if node is None:
            of_gradients = zip(gradients, found[len(values) :], strict=True)
            node, direction = next((f.node for f, bad in of_gradients if any(bad)), None), BACKWARD
        if node is not None:
            self._tell(node, direction)

    def _tell(self, found: Node, direction: str) -> None:
        scale, node = self._amp.scaler.get_scale(), maker_of(found)
        op, line = op_name(node) or node.op, user_line(node)
        dtype = dtype_of(found)
        sighting = Sighting(self.step, name_of(node), module_path(node), op, line, direction, scale, dtype)
        self.sightings.append(sighting)
        if (sighting.node, direction) not in self._told:
            self._told.add((sighting.node, direction))
            log.warning("%s", sighting)
        if self._on == ABORT and not (direction == BACKWARD and self._can_fall(scale)):
            raise NumericsError(str(sighting))

    def _can_fall(self, scale: float) -> bool:
        config = self._amp.scaler.config
        return isinstance(config, DynamicLossScale) and scale > config.floor
