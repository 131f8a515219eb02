"""`GraphMaker`: captures a call of a model and rewrites the graph."""

from __future__ import annotations

import time

import torch
from torch import fx, nn

from .._compat import code_written_late
from ..capture import LOST_KEY, Reads, check_sparse, keep_before_assignment, planned_by, unlift
from ..capture.guard_scope import GuardScope
from ..errors import warn_user
from ..origin import module_names
from ..passes.pipeline import rewrite
from ..training.scaler import LossScaler
from .absent_ops import warn_of_absent_ops
from .accepted_sizes import AcceptedSizes
from .captured_graph import CapturedGraph, Timing
from .export_call import export_call
from .low_storage import LowStorage
from .options import Options
from .planned_values import PlannedValues
from .python_state import PythonState
from .rule_targets import Targets, targets_of, warn_of_idle, warn_of_others
from .shadow_weights import ShadowWeights
from .siblings import Call, Siblings, Unplanned
from .signature import Signature
from .written import lost_by_compilers, writes_of


class GraphMaker:
    """Makes the graphs of a model ahead of time, and warns once of what they lose.

    Args:
        source: The model.
        options: The conversion options.
        scaler: Its loss scaler.
        stored: Its parameters that are stored low.
        shadows: Low copies of its parameters, if the policy keeps them.
        siblings: The captures of blocks that were converted together with it.
        guard_scope: Tells whether the model has an `fp16_guard`.
    """

    def __init__(
        self,
        source: nn.Module,
        options: Options,
        scaler: LossScaler,
        stored: LowStorage,
        shadows: ShadowWeights | None,
        siblings: Siblings | None,
        guard_scope: GuardScope,
    ) -> None:
        self._source, self._options, self._scaler, self._stored = source, options, scaler, stored
        self._shadows, self._siblings, self._guard_scope = shadows, siblings, guard_scope
        self._name = options.named(type(source).__name__)
        self._told: set[str] = set()
        self._read: set[str] = set()
        self._set: set[str] = set()
        self._rule_targets: Targets | None = None

    def captured(self, call: Call, graphs: list[CapturedGraph], is_first: bool) -> CapturedGraph:
        """Captures and rewrites a call.

        Args:
            call: The call.
            graphs: The model's earlier graphs for such arguments.
            is_first: Whether the model has no graph yet.
        """
        is_compiled = self._options.backend != "eager"
        start = time.perf_counter()
        with code_written_late(), planned_by(self._options.policy), self._stored.as_float32():
            program, reads = export_call(call, graphs)
            seconds, start = time.perf_counter() - start, time.perf_counter()
            graph_module, constants = unlift(program, self._source, reads.elsewhere.values(), reads.real)
            if is_compiled:
                check_sparse(self._source, graph_module.graph)
            keep_before_assignment(graph_module, reads.assigned_buffers())
            sizes = AcceptedSizes(graph_module, program.range_constraints, call.signature.shapes)
            self._guard_scope.mark(graph_module, reads.code)
            before = Unplanned(graph_module, self._options) if self._siblings is not None else None
            timing = Timing(seconds, start)
            captured = self._rewrite(graph_module, constants, call.signature, timing, is_first)
            captured.sizes = sizes
        captured.state = PythonState(self._source, reads, call.args, call.kwargs)
        graph_module = captured.graph_module
        captured.values = PlannedValues(graph_module.graph, graph_module, captured.plan.low_dtype)
        if is_compiled and (lost := lost_by_compilers(captured.graph_module)):
            warn_user(
                f"{self._name}: torch.compile loses what forward writes to "
                f"{', '.join(lost)}, 0-dim float64 on a CPU. Store float32 values, or values of shape (1,)."
            )
        captured.writes = writes_of(captured.graph_module, call.args, call.kwargs, is_compiled)
        if self._options.policy.level == "O3":
            self._store_low(captured)
        if before is not None and self._siblings is not None:
            self._siblings.add(call, captured, reads, before)
        self._warn_about(reads)
        self._guard_scope.warn_if_unseen(self._name, [captured.graph_module])
        return captured

    def _rewrite(
        self,
        graph_module: fx.GraphModule,
        constants: dict[str, torch.Tensor],
        signature: Signature,
        timing: Timing,
        is_first: bool,
    ) -> CapturedGraph:
        """Rewrites; ``timing`` has the seconds of the capture and the time of its end."""
        options = self._options
        modules = module_names(self._source)
        # A rule for a node that the first graph has may match none in another mode.
        plan = rewrite(graph_module, options.policy, modules, check_rules=is_first)
        targets = targets_of(graph_module, plan, options.policy.rules, modules)
        if self._rule_targets is None:
            self._rule_targets = targets
            warn_of_idle(self._name, [(graph_module, plan)], options.policy, modules)
            warn_of_absent_ops(self._name, [graph_module], options.policy)
        warn_of_others(self._name, self._rule_targets, targets, self._source.training)
        timing = Timing(timing.capture, time.perf_counter() - timing.rewrite)
        return CapturedGraph(
            graph_module,
            plan,
            options,
            self._scaler,
            None,
            signature.shapes,
            constants,
            timing,
            self._shadows,
            lost=graph_module.meta.get(LOST_KEY, ()),
        )

    def _store_low(self, captured: CapturedGraph) -> None:
        """Frees the float32 memory of parameters, only at the first capture and in evaluation mode."""
        freed = self._stored.decide(captured.graph_module, self._source)
        captured.plan = self._stored.read(captured.graph_module, captured.plan)
        for parameter in freed:
            parameter.data = parameter.data.to(self._options.low_dtype)

    def _warn_about(self, reads: Reads) -> None:
        """Warns once about state that forward carries from call to call and a graph does not.

        One capture may set what another one reads: forward may set it for long inputs only.
        """
        self._read.update(reads.paths().values())
        self._set.update(reads.set_before_read())
        carried = dict.fromkeys([*reads.lost_paths(), *sorted(self._read & self._set)])
        lost = [path for path in carried if path not in self._told]
        self._told.update(lost)
        if only_set := [path for path in reads.only_set if path not in self._told]:
            self._told.update(only_set)
            warn_user(
                f"{self._name}: forward sets {', '.join(only_set)}. "
                "A captured graph sets no attributes: code that reads them after a call finds old values. "
                "Return such values, or convert without example inputs."
            )
        if lost:
            warn_user(
                f"{self._name}: forward reads {', '.join(lost)} and sets it for "
                "the next call. A captured graph uses the value from the capture and does not set it. Store "
                "it in a buffer. Converted without example inputs, the model sets it, but each new number "
                "(a counter) makes another capture."
            )
