"""`CompiledSource`: a model that ``torch.compile`` captures just in time, part by part, at its calls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tag, fx, nn

from .._compat import (
    compiled_by_dynamo,
    has_modes_of_callers,
    is_backend_error,
    is_dynamo_error,
    modes_of_callers_aside,
    modes_of_callers_back,
    tracing_lock,
)
from ..errors import AmpGraphError, did_you_mean, warn_user
from ..guards import keep_errors_out_of_log, warn_about_uncaptured_guards
from ..origin import module_names, names_of
from ..passes.analysis.alias import SOURCES, written_memory
from ..policy.rules import NODE_PREFIX, RuleBook
from ..training.scaler import LossScaler
from .absent_ops import warn_of_absent_ops
from .compiled_by_hooks import CompiledByHooks
from .graph_cache import GraphCache
from .low_storage import LowStorage
from .options import Options
from .own_error import own_error
from .rule_targets import warn_of_idle

# Each takes the time of a first call. A model may never be captured in one of its modes.
_MOST_TRIES = 4


class CompiledSource:
    """Runs a model in its compiled form, and warns of what was not captured or decides nothing.

    Args:
        source: The model.
        options: The conversion options.
        graphs: Collects the graphs of the model.
        scaler: Its loss scaler.
        stored: Its parameters that are stored low.

    Attributes:
        run: The compiled form.
    """

    def __init__(
        self,
        source: nn.Module,
        options: Options,
        graphs: GraphCache,
        scaler: LossScaler,
        stored: LowStorage,
    ) -> None:
        self._source, self._options, self._graphs, self._scaler = source, options, graphs, scaler
        self._stored, self._name = stored, options.named(type(source).__name__)
        self._told_uncaptured = self._told_settings = False
        self._told_idle: set[str] = set()
        # The mode in which Dynamo gave up on code that it captured before; None if it did not.
        self._idle_mode: bool | None = None
        self._tries_left = _MOST_TRIES
        self.run: Callable = self._compiled()

    def _compiled(self) -> Callable:
        from .dynamo_backend import make_backend

        keep_errors_out_of_log()
        graphs = self._graphs
        modules = module_names(self._source)
        graphs.note_classes()
        backend = make_backend(
            self._options, modules, graphs.add, self._scaler, graphs.shadows, graphs.guard_scope
        )
        backend = graphs.watch.noting(backend)
        # Its backward gives gradients one by one in any case.
        keeps_whole = self._options.backend == "eager"
        compile_source = functools.partial(compiled_by_dynamo, self._source, backend, keeps_whole)
        return CompiledByHooks(self._source, compile_source)

    def __call__(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Runs a call of the model."""
        if not has_modes_of_callers():
            return self._call(args, kwargs)
        with modes_of_callers_aside():
            return self._call(args, kwargs)

    def _call(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        if torch.is_grad_enabled():
            self._scaler.check_loop()
        if not self._graphs.has_same_classes() or self._may_try_again():
            self._compile_again()
        watch = self._graphs.watch
        before = watch.before_call()
        try:
            with warn_about_uncaptured_guards():
                result = self.run(*args, **kwargs)
        except Exception as error:
            if not is_dynamo_error(error):
                raise
            # Dynamo wraps what a backend raises.
            inner = getattr(error, "inner_exception", None)
            if not isinstance(inner, AmpGraphError):
                inner = own_error(self._source, self._stored, args, kwargs)
            if inner is not None:
                raise inner from None
            # Graphs before a graph break have run in this call, and would run again.
            effects = any(_has_effects(captured.graph_module.graph) for captured in self._graphs)
            if effects or is_backend_error(error) or self._stored.names(self._source):
                raise
            result = self._without_graphs(error, args, kwargs)
        if watch.after_call(before):
            self._note_idle_call()
        if not self._told_uncaptured:
            self._warn_if_not_captured()
        self._graphs.guard_scope.warn_if_unseen(self._name, (c.graph_module for c in self._graphs))
        if not self._told_settings:
            self._warn_about_settings()
        return result

    def _without_graphs(self, error: Exception, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Runs the source, on which ``torch.compile`` fails; from the second time on, all calls do."""
        if self._told_uncaptured:  # the first time, a trace around the call may be the cause
            self.run = self._source
            with modes_of_callers_back():
                return self.run(*args, **kwargs)
        self._told_uncaptured = True
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        warn_user(
            f"{self._name} runs unconverted, in the source's dtypes: torch.compile fails on it with "
            f"{type(error).__name__}: {'; '.join(lines[:3])}"
        )
        with modes_of_callers_back():
            return self._source(*args, **kwargs)

    def _compile_again(self) -> None:
        """Compiles for other methods of the model's classes; a capture replaces some while it lasts."""
        with self._graphs.lock.alone(), tracing_lock():
            if not self._graphs.has_same_classes() or self._may_try_again():
                self._tries_left -= self._may_try_again()
                self._idle_mode = None
                self.run = self._compiled()

    def _may_try_again(self) -> bool:
        """Whether Dynamo, which does not try code again on which it gave up, may see other code now."""
        is_idle = self._idle_mode is not None and self._tries_left > 0
        return is_idle and self._idle_mode is not self._source.training

    def _note_idle_call(self) -> None:
        """Warns of a call in which Dynamo gave up and no graph ran, though calls before had some."""
        if self._told_uncaptured:
            return
        hooked = self.run.hooked() if isinstance(self.run, CompiledByHooks) else ""
        if hooked:
            cause = f"torch.compile captured no graph with the hooks of these modules: {hooked}"
        else:
            cause = "torch.compile gave up on its code, and tries again after the next train() or eval()"
            self._idle_mode = self._source.training
        if hooked in self._told_idle:
            return
        self._told_idle.add(hooked)
        warn_user(f"{self._name} ran unconverted in this call, in the source's dtypes: {cause}.")

    def _warn_if_not_captured(self) -> None:
        if self._graphs:
            return
        self._told_uncaptured = True
        see = (
            ""
            if self._graphs.watch.is_told
            else ' With example inputs, or capture="ahead of time", convert captures what torch.compile does '
            "not, or shows the reason."
        ) + ' ampgraph.convert_blocks(model, "layers.*") converts layers and leaves the code around them.'
        warn_user(
            f"{self._name} ran unconverted, in the source's dtypes: no part of it was captured and rewritten."
            f"{see}"
        )

    def _warn_about_settings(self) -> None:
        """Warns, of the graphs of the first call, about rules and listed ops that match or decide nothing."""
        if not self._graphs:
            return
        self._told_settings = True
        policy, modules = self._options.policy, module_names(self._source)
        graphs = [(captured.graph_module, captured.plan) for captured in self._graphs]
        names = [name for graph_module, _ in graphs for name in names_of(graph_module.graph)[0]]
        for pattern in RuleBook(policy.rules, modules).unmatched(names):
            near = did_you_mean(pattern, [NODE_PREFIX + name for name in names])
            warn_user(f"{self._name}: rule {pattern!r} matches no op of its {len(graphs)} graphs.{near}")
        warn_of_idle(self._name, graphs, policy, modules)
        warn_of_absent_ops(self._name, [graph_module for graph_module, _ in graphs], policy)


def _has_effects(graph: fx.Graph) -> bool:
    """Whether a graph writes to others' memory or draws random numbers, so that no call may run it twice."""
    written = written_memory(graph)
    return any(
        (n.op in SOURCES and n in written) or Tag.nondeterministic_seeded in getattr(n.target, "tags", ())
        for n in graph.nodes
    )
