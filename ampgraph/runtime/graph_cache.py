"""`GraphCache`: holds the captured graphs of a model, finds one for a call, and captures new ones."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from .._compat import compiled_calls, no_dispatch_modes, tracing_lock
from ..capture import Code, check_nested, is_capturing_here
from ..capture.guard_scope import GuardScope
from ..errors import CaptureError, NoGraphError
from ..plan import Plan
from ..training.scaler import LossScaler
from .capture_lock import lock_of
from .captured_graph import CapturedGraph, Runner, Timing
from .coverage import CoverageWatch
from .device import device_of
from .graph_maker import GraphMaker
from .low_storage import LowStorage
from .lowering import AotGraphs
from .module_structure import Flags, Structure
from .options import Options
from .places import Places
from .progress import told_if_long
from .shadow_weights import ShadowWeights
from .siblings import Call, Siblings
from .signature import Likeness, Signature, signature_of

log = logging.getLogger("ampgraph")

MANY_CAPTURES = 8
# One more capture drops the graph whose last use is longest ago. What still runs it keeps it.
MOST_GRAPHS = 64


class Found(NamedTuple):
    """The last call that found its graph.

    Attributes:
        structure: The parts of the model.
        flags: Its modes and the kinds of its tensors.
        likeness: The arguments.
        captured: The graph.
        is_in_place: Whether the model had the parameters that its low copies are of.
    """

    structure: Structure
    flags: Flags
    likeness: Likeness
    captured: CapturedGraph
    is_in_place: bool


class GraphCache:
    """The graphs of an `AmpModule`: one `CapturedGraph` for each training mode, kind and sizes of arguments.

    Args:
        source: The model.
        options: The conversion options.
        scaler: Its loss scaler.
        stored: Its parameters that are stored low.
        siblings: The captures of blocks that were converted together with it.

    Attributes:
        shadows: Low copies of its parameters, if the policy keeps them.
        lock: Separates calls from captures.
        watch: Tracks the coverage of just-in-time captures.
        guard_scope: Tells whether the model has an `fp16_guard`.
    """

    def __init__(
        self,
        source: nn.Module,
        options: Options,
        scaler: LossScaler,
        stored: LowStorage,
        siblings: Siblings | None = None,
    ) -> None:
        copies = options.policy.keeps_low_copies
        self.shadows = ShadowWeights(source, options.low_dtype) if copies else None
        self.lock = lock_of(source)
        self._source, self._options, self._scaler, self._stored = source, options, scaler, stored
        scaler.state.is_rewritten = scaler.state.is_rewritten or options.may_rewrite_results
        self._blocks = siblings
        self._siblings = None if options.policy.level == "O3" else siblings
        self._structure = Structure(source.modules(), copies)
        self._graphs: dict[tuple[Flags, Hashable], list[CapturedGraph]] = {}
        self._searches = 0
        self._last: Found | None = None
        self._current: CapturedGraph | None = None
        self._current_flags: Flags | None = None
        self._runs_by: Runner | None = None
        self.watch = CoverageWatch(source, options)
        self.guard_scope = GuardScope(source, options.policy, bool(options.block))
        self._maker = GraphMaker(
            source, options, scaler, stored, self.shadows, self._siblings, self.guard_scope
        )
        self._classes = Places()
        self._classes.settle()

    def __iter__(self) -> Iterator[CapturedGraph]:
        """Yields all graphs so far; with graph breaks, one call runs several."""
        return (captured for graphs in list(self._graphs.values()) for captured in graphs)

    def __len__(self) -> int:
        return sum(map(len, self._graphs.values()))

    def __bool__(self) -> bool:
        return bool(self._graphs)

    def run_by(self, run: Runner | None) -> None:
        """See `CapturedGraph.run_by`; for all graphs, and for those that are captured from now on."""
        self._runs_by = run
        for captured in self:
            captured.run_by(run)

    @property
    def structure(self) -> Structure:
        """The model's parts at the last call; another object after a change."""
        return self._structure

    @property
    def current(self) -> CapturedGraph:
        """The graph that ran or was captured last, preferably in the current training mode.

        Raises:
            NoGraphError: Nothing is captured yet.
        """
        if self._current is None and self.watch.was_called:
            raise NoGraphError(
                f"{self._name} has no graph: its calls ran unconverted, in the source's dtypes "
                f"({self.watch.coverage()})."
            )
        if self._current is None:
            raise NoGraphError(
                f"{self._name} is not captured yet: call the converted model once, "
                "or convert it ahead of time with example inputs."
            )
        flags = self._flags()
        for (seen_flags, _), graphs in reversed(list(self._graphs.items())):
            if seen_flags == flags and self._current not in graphs and self._current_flags != flags:
                return graphs[-1]
        return self._current

    def has_told(self, reason: str) -> bool:
        """Whether a block that was converted together with this one has told a reason before."""
        return self._blocks is not None and self._blocks.has_told(reason)

    def find(self, args: tuple, kwargs: dict[str, Any]) -> CapturedGraph:
        """Returns the captured graph for these arguments; captures one if none fits."""
        return self.find_for_run(args, kwargs).captured

    def find_for_run(self, args: tuple, kwargs: dict[str, Any]) -> Found:
        """Returns that graph and what holds for this call."""
        flags, last = self._flags(), self._last
        structure = self._structure
        if (
            last is not None
            and last.structure is structure
            and last.flags == flags
            and last.likeness.fits(args, kwargs)
            and last.captured.fits(args, kwargs, is_untouched=last.flags is flags)
        ):
            self._current, self._current_flags = last.captured, flags
            found = last
            if last.flags is not flags:
                found = last._replace(flags=flags, is_in_place=self._reads_copies())
        else:
            captured = self._find(args, kwargs, flags)
            found = Found(structure, flags, Likeness(args, kwargs), captured, self._reads_copies())
        self._last = found
        return found

    def note_loaded(self) -> None:
        """Lets the next calls look at the values that plans depend on: a checkpoint was loaded."""
        for captured in self:
            if captured.values is not None:
                captured.values.look_again()

    def is_in_place(self) -> bool:
        """Whether the model has the parameters that its low copies are of."""
        return self.shadows is not None and self.shadows.are_in_place()

    def _reads_copies(self) -> bool:
        """Whether a call reads low copies. If not, frees those of parameters that are gone."""
        if self.shadows is None or self.shadows.are_in_place():
            return self.shadows is not None
        if self.shadows.have_lost():
            with self.lock.alone():  # a call that runs may read them
                for captured in self:
                    captured.drop_shadowed()
                self.shadows.drop_lost()
        return False

    def _find(self, args: tuple, kwargs: dict[str, Any], flags: Flags) -> CapturedGraph:
        """Returns the captured graph of a call that is not like the last."""
        try:
            signature = signature_of(args, kwargs)
        except RuntimeError:  # torch's own, of a nested tensor
            check_nested(self._source, args, kwargs)
            raise
        if (captured := self._known(args, kwargs, signature, flags)) is not None:
            return captured
        with self.lock.alone(), compiled_calls.kept_out():
            # Another thread may have captured the graph while this one waited.
            known = self._known(args, kwargs, signature, flags)
            if known is not None:
                return known
            with no_dispatch_modes(), told_if_long(f"ampgraph captures {self._name}"):
                return self._capture(args, kwargs, signature, flags)

    def find_known(self, args: tuple, kwargs: dict[str, Any]) -> CapturedGraph:
        """Returns the graph for a call inside a ``torch.func`` transform, where no capture is possible.

        Raises:
            CaptureError: No graph fits.
        """
        if self._options.just_in_time:
            raise CaptureError(
                f"{self._name}: capture just in time does not work inside a transform of torch.func or "
                "forward-mode AD; pass example inputs to ampgraph.convert."
            )
        signature = signature_of(args, kwargs)
        if captured := self._known(args, kwargs, signature, self._flags()):
            return captured
        raise CaptureError(
            f"{self._name} is not captured for tensors of the sizes {list(signature.shapes)}, and it cannot "
            "be captured inside a transform of torch.func or forward-mode AD: call the converted model once "
            "outside, with such tensors (under vmap, with the sizes of one sample)."
        )

    def add(
        self,
        graph_module: fx.GraphModule,
        plan: Plan,
        aot: AotGraphs,
        timing: Timing,
        inputs: Sequence[Any],
    ) -> None:
        """Records a graph that was captured just in time, and the parameters among its inputs."""
        self.watch.add(inputs)
        self._scaler.move(device_of(self._source))  # it may have been converted without values
        type(graph_module).__name__ = self._name  # every graph module has its own class
        captured = CapturedGraph(graph_module, plan, self._options, self._scaler, timing=timing, aot=aot)
        flags = self._flags()
        self._graphs.setdefault((flags, "just in time"), []).append(captured)
        self._current, self._current_flags = captured, flags

    def note_classes(self) -> None:
        """Takes down the methods of the model's classes, and the functions of torch that they call."""
        with tracing_lock():  # a capture in another thread replaces functions of torch
            classes = Places()
            for place in Code(self._source).functions():
                classes.add(place)
            classes.settle()
        self._classes = classes

    def has_same_classes(self) -> bool:
        """Whether those are the same, which Dynamo does not look at. Runs at every call just in time."""
        return self._classes.are_same() or torch.compiler.is_dynamo_compiling() or is_capturing_here()

    def known(self, args: tuple, kwargs: dict[str, Any]) -> CapturedGraph | None:
        """Returns the graph that fits a call, if there is one; captures none."""
        return self._known(args, kwargs, signature_of(args, kwargs), self._flags())

    def modes(self) -> Flags:
        """Returns training modes and kinds of tensors; drops all graphs if the model has other parts now."""
        return self._flags()

    @property
    def _name(self) -> str:
        return type(self._source).__name__

    def _flags(self) -> Flags:
        flags = self._structure.flags()
        if flags is None:
            with tracing_lock():  # a capture in another thread sets hooks for as long as it lasts
                self._follow_structure()
            flags = self._structure.flags_now()
        return flags

    def _follow_structure(self) -> None:
        if self._structure.is_current():
            return
        if not self._options.just_in_time:
            dropped = [*self]
            self._graphs.clear()  # first: another thread trusts graphs that it finds with the structure
            if self._siblings is not None:
                self._siblings.drop(dropped)
        if self.shadows is not None:
            self.shadows.follow()
        self._structure = Structure(self._source.modules(), self.shadows is not None)

    def _known(
        self, args: tuple, kwargs: dict[str, Any], signature: Signature, flags: Flags
    ) -> CapturedGraph | None:
        for captured in self._graphs.get((flags, signature.kind), ()):
            if captured.sizes is None or not captured.sizes.fit(signature.shapes):
                continue
            if captured.fits(args, kwargs):
                self._current, self._current_flags = captured, flags
                self._searches += 1
                captured.found_at = self._searches  # further calls like this one do not search
                return captured
        return None

    def _capture(
        self, args: tuple, kwargs: dict[str, Any], signature: Signature, flags: Flags
    ) -> CapturedGraph:
        graphs = self._graphs.get((flags, signature.kind), [])
        self._scaler.move(device_of(self._source))  # it may have been converted without values
        call = Call(self._source, self._options, args, kwargs, signature, flags)
        found = None
        if self._siblings is not None:
            found = self._siblings.find(call, self._scaler, self.shadows, check_rules=not self._graphs)
        captured = found or self._maker.captured(call, graphs, is_first=not self._graphs)
        captured.run_by(self._runs_by)
        flags = self._flags()  # level O3 may have stored parameters low
        graphs = self._graphs.get((flags, signature.kind), [])
        self._searches += 1
        captured.found_at = self._searches
        graphs.append(captured)
        self._graphs[(flags, signature.kind)] = graphs
        self._drop_oldest()
        self._current, self._current_flags = captured, flags
        self._warn_if_many([v for (seen, _), found in self._graphs.items() if seen == flags for v in found])
        return captured

    def _drop_oldest(self) -> None:
        """Keeps at most `MOST_GRAPHS` graphs: drops the one whose last use is longest ago."""
        if len(self) <= MOST_GRAPHS:
            return
        oldest = min(self, key=lambda captured: captured.found_at)
        key = next(key for key, graphs in self._graphs.items() if any(v is oldest for v in graphs))
        # Another list, because another thread may search in this one.
        self._graphs[key] = [captured for captured in self._graphs[key] if captured is not oldest]
        if not self._graphs[key]:
            del self._graphs[key]
        if self._siblings is not None:
            self._siblings.drop([oldest])

    def _warn_if_many(self, graphs: list[CapturedGraph]) -> None:
        if len(graphs) != MANY_CAPTURES:
            return
        changed = sorted({path for v in graphs if v.state for path in v.state.changed()})
        dynamic = "" if self._options.block else "pass dynamic_shapes to ampgraph.convert, and "
        log.warning(
            "%s was captured %d times for different shapes, arguments or values%s; %spass numbers that "
            "change as tensors.",
            self._options.named(self._name),
            MANY_CAPTURES,
            f" ({', '.join(changed)})" if changed else "",
            dynamic,
        )
