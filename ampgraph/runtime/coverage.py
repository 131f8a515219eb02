"""`Coverage`: the part of a model inside the graphs that were captured just in time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import fx, nn

from .._compat import BreakLog, times_refused
from ..errors import warn_user
from ..own_files import AMPGRAPH
from ..proxy.module_proxy import ModuleProxy
from .options import Options

# A line of text names at most this many modules and graph breaks.
NAMED = 5


@dataclass(frozen=True)
class GraphBreak:
    """A place where Dynamo stopped capturing.

    Attributes:
        where: ``file:line`` of the user's code.
        reason: Dynamo's reason.
        runs_ops: Whether the uncaptured code may contain ops: more than a branch, a read number or a print.
    """

    where: str
    reason: str
    runs_ops: bool

    def __str__(self) -> str:
        return f"{Path(self.where).name}: {self.reason}"


@dataclass(frozen=True)
class Coverage:
    """The coverage of all graphs so far of a model that is captured just in time.

    Attributes:
        graphs: Number of graphs.
        modules: Number of modules with parameters.
        left_out: Modules whose parameters no graph reads: a graph break left them out, or they never ran. If
            several modules share a parameter, one reader counts for all.
        breaks: Where Dynamo stopped capturing.
    """

    graphs: int
    modules: int
    left_out: tuple[str, ...]
    breaks: tuple[GraphBreak, ...]

    def __str__(self) -> str:
        count = f"{self.graphs} graph" + ("s" if self.graphs != 1 else "")
        inside = self.modules - len(self.left_out)
        text = f"captured: {count}, {inside} of {self.modules} modules with parameters"
        if self.left_out:
            text += f"; not captured: {_named([path or 'the root' for path in self.left_out], ', ')}"
        if self.breaks:
            text += f" (graph breaks at {_named(self.breaks, '; ')})"
        return text

    @property
    def leaves_ops(self) -> bool:
        """Whether graph breaks may have left ops out."""
        return bool(self.breaks and self.left_out) or any(each.runs_ops for each in self.breaks)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Coverage:
        """Rebuilds a `Coverage` from ``dataclasses.asdict``."""
        breaks = tuple(GraphBreak(**each) for each in data["breaks"])
        return cls(data["graphs"], data["modules"], tuple(data["left_out"]), breaks)


def _named(names: Iterable[object], between: str) -> str:
    found = [str(name) for name in names]
    return between.join(found[:NAMED]) + (f"{between}.." if len(found) > NAMED else "")


class CoverageWatch:
    """Tracks the coverage of a model over its calls; warns once when graph breaks leave ops out.

    Args:
        source: The model.
        options: The conversion options.

    Attributes:
        is_told: Whether the user knows, from this warning or another.
    """

    def __init__(self, source: nn.Module, options: Options) -> None:
        self._source, self._options = source, options
        self.is_told = False
        self._graphs = self._runs = 0
        self._captures = False  # whether this call captures a graph
        self._is_refused = False  # whether Dynamo refused to capture more
        self._read: set[str] = set()
        self._breaks: dict[GraphBreak, None] = {}
        self._log: BreakLog | None = None

    @property
    def was_called(self) -> bool:
        """Whether a call was watched."""
        return self._log is not None

    def add(self, inputs: Iterable[object]) -> None:
        """Records a captured graph by its inputs."""
        self._graphs += 1
        self._captures = True
        self._note(inputs)

    def noting(self, backend: Callable) -> Callable:
        """Returns a backend of Dynamo whose graphs note their parameters: layers of one code share a graph.

        They do so in calls that capture a graph; later ones take no time for it.
        """

        def noting_backend(graph_module: fx.GraphModule, inputs: list, **options: Any) -> Callable:
            before = self._graphs
            compiled: Callable = backend(graph_module, inputs, **options)
            if self._graphs == before:  # it runs unconverted
                return compiled

            def run(*args: Any) -> Any:
                self._runs += 1
                if self._captures:
                    self._note(args)
                return compiled(*args)

            return run

        return noting_backend

    def _note(self, inputs: Iterable[object]) -> None:
        read = {id(value) for value in inputs if isinstance(value, nn.Parameter)}
        self._read.update(path for path, own in self._own_parameters() if not read.isdisjoint(own))

    def before_call(self) -> tuple[int, int, int, int, float]:
        """Returns the state that `after_call` compares with."""
        if self._log is None:
            self._log = BreakLog()
        return times_refused(), self._graphs, self._runs, *self._log.mark()

    def after_call(self, before: tuple[int, int, int, int, float]) -> bool:
        """Records the graph breaks since `before_call`, and warns where Dynamo refused to capture more.

        Returns:
            True if Dynamo gave up on code in this call, so that none of the graphs before ran.
        """
        refused, graphs, runs, count, start = before
        self._captures = False
        if refused != times_refused() and not self._is_refused:
            self._is_refused = True
            self._warn_of_limit()
        has_breaks = self._log is not None and count != self._log.mark()[0]
        if self._log is not None and (has_breaks or graphs != self._graphs):
            self._note_breaks(self._log.since(count, start))
        return has_breaks and self._graphs > 0 and runs == self._runs and not self._is_refused

    def _note_breaks(self, breaks: Iterable[tuple]) -> None:
        found = [GraphBreak(*each) for each in breaks]
        # A converted model inside runs its own graphs.
        self._breaks.update(dict.fromkeys(each for each in found if not each.where.startswith(AMPGRAPH)))
        coverage = self.coverage()
        if self.is_told or not (self._graphs and coverage.leaves_ops):
            return
        self.is_told = True
        warn_user(
            f"{self._name} is captured in parts: {coverage}. Code between the graphs (at graph breaks) runs "
            "in the source's dtypes; ampgraph.explain(amp).coverage lists all parts."
        )

    def _warn_of_limit(self) -> None:
        warn_user(
            f"{self._name} runs in part unconverted, in the source's dtypes, from now on: torch.compile "
            "captured one of its functions as often as its limit allows, each time for other sizes, "
            "arguments or values that forward reads; torch's log names the function. Pad inputs to fewer "
            "sizes, and pass numbers that change as tensors."
        )

    @property
    def _name(self) -> str:
        return self._options.named(type(self._source).__name__)

    def coverage(self) -> Coverage:
        """Returns the coverage so far."""
        paths = [path for path, _ in self._own_parameters()]
        left_out = tuple(path for path in paths if path not in self._read)
        return Coverage(self._graphs, len(paths), left_out, tuple(self._breaks))

    def _own_parameters(self) -> list[tuple[str, set[int]]]:
        modules = dict(self._source.named_modules())
        converted = tuple(f"{path}." for path, module in modules.items() if isinstance(module, ModuleProxy))
        own = (
            (path, {id(p) for p in module.parameters(recurse=False)})
            for path, module in modules.items()
            if not f"{path}.".startswith(converted)  # those have their own graphs
        )
        return [(path, found) for path, found in own if found]
