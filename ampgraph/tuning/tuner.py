"""`Tuner`: predicts which policies meet the budget at little traffic, and measures the cheapest."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from ..errors import AmpGraphError
from ..module import AmpModule
from ..numerics.calibration import Calibration
from ..numerics.run_model import ModelRunner, Part
from ..passes.placement.amounts import moved
from ..policy.policy import Policy
from ..report.graph_view import human_bytes
from ..runtime.progress import with_progress
from ..runtime.run_graph import Draws
from .candidates import Candidate, Candidates
from .learned import Learned
from .lookahead import best_choice
from .planned_graph import PlannedGraph
from .result_error import ResultError
from .sensitivity import LEAST_PROBES, PROBES, EqualDraws, Probes

# Runs of the model over all batches, that with gates included.
RUNS = 8
# The least scatter of a squared error that is measured, as a share; candidates are searched at these shares
# of the budget, before and after the first trial.
SCATTER, SHARES, LATER = 0.1, (0.85, 1.0, 1.15, 1.4), (0.95, 1.0)
# Of two candidates, that of more traffic is worth a look if it is likelier by this much.
STEP = 1 / 24
# An expected saving of less than this share of the traffic is not worth a run.
LEAST_GAIN = 2e-4

Arguments = tuple[tuple, dict[str, Any]]


@dataclass(frozen=True)
class Trial:
    """One measured set of pins."""

    candidate: Candidate
    error: float


@dataclass(frozen=True)
class Tuned:
    """What tuning found.

    Attributes:
        policy: The policy.
        error: Its error on the batches.
        traffic: The bytes that one forward moves with it, in all graphs; at O2, parameters are read low and
            not cast.
        start: The same without rules: (error, traffic).
        runs: How many times the model ran over the batches, and how many backwards there were.
    """

    policy: Policy
    error: float
    traffic: int
    start: tuple[float, int]
    runs: tuple[int, int]

    def __str__(self) -> str:
        error, traffic = self.start
        pins = [f"  {name}" for name, value in self.policy.rules.items() if value == "fp32"]
        moved = self.traffic / traffic if traffic else 1.0
        return "\n".join(
            [
                f"error    {self.error:.3g}, without rules {error:.3g}",
                f"traffic  {human_bytes(self.traffic)}, {moved:.3f} of that without rules",
                f"runs     {self.runs[0]} of the model, and {self.runs[1]} backwards",
                f"float32  {len(pins)} rules",
                *pins,
            ]
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns plain dicts, lists, strings and numbers."""
        error, traffic = self.start
        return {
            "error": self.error,
            "traffic": self.traffic,
            "without_rules": {"error": error if math.isfinite(error) else None, "traffic": traffic},
            "runs": self.runs[0],
            "backwards": self.runs[1],
            "policy": self.policy.to_dict(),
        }

    def to_json(self) -> str:
        """Returns `to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def to_markdown(self) -> str:
        """Returns the text as a block of Markdown."""
        return f"```text\n{self}\n```"


# The traffic and the charges of a candidate.
Plan = tuple[int, frozenset[int]]


def _plan_of(candidate: Candidate) -> Plan:
    """Returns a key that identifies the plan; different pins may lead to one plan."""
    return candidate.traffic, candidate.charged


class Tuner:
    """Tunes one converted model.

    Args:
        amp: The model, converted with the policy that rules are added to.
        batches: The arguments of each batch.
        budget: The error that is allowed.
        error: Measures it.
        calibration: Ranges over more batches.
    """

    def __init__(
        self,
        amp: AmpModule,
        batches: Sequence[Arguments],
        budget: float,
        error: ResultError,
        calibration: Calibration | None = None,
    ):
        self._amp, self._batches, self._budget, self._error = amp, batches, budget, error
        self._calibration = calibration
        self._model: ModelRunner | None = None
        self._draws = [Draws() for _ in batches]
        self._graphs: dict[int, PlannedGraph] = {}
        self._references: list[Any] = []
        self._trials: list[Trial] = []
        self._pool: dict[Candidate, None] = {}
        self._runs = self._backwards = 0
        self._result: Tuned | None = None

    def run(self, progress: bool | None = None) -> Tuned:
        """Returns the policy that meets the budget at the least traffic found.

        Raises:
            AmpGraphError: Float32 everywhere does not meet it.
        """
        for _ in with_progress(self._steps(), "tuning", progress):
            pass
        assert self._result is not None
        return self._result

    def _steps(self) -> Iterator[None]:
        """Yields after each run of the model."""
        self._references = self._run(lambda part: part.float32)
        yield
        results = self._run(lambda part: part.graph_module)
        first = self._error.of(results, self._references)
        yield
        graphs = self._graphs.values()
        start = first, sum(moved(graph.part.plan.cost, graph.stores_low) for graph in graphs)
        if first <= self._budget and self._calibration is None:
            self._result = self._tuned(self._amp.policy, first, start[1], start)
            return
        weights = self._weights(results)
        del results
        candidates = self._candidates(weights)
        yield
        base = candidates.of(())
        if not candidates.needed:
            self._trials.append(Trial(base, first))
        while self._runs < RUNS and (candidate := self._next(candidates)) is not None:
            self._trials.append(Trial(candidate, self._measured(candidates, candidate)))
            yield
        best = self._best()
        if best is None:
            least = min(trial.error for trial in self._trials)
            if not math.isfinite(least):
                raise AmpGraphError(
                    "tune: the error is not finite even with every op in float32: the metric returns NaN or "
                    "infinity, or the model does."
                )
            raise AmpGraphError(
                f"tune: the budget of {self._budget:g} is not met even with every op in float32: the least "
                f"error is {least:.3g}. Casts in the model's code, fp16_guard and 'low' rules stay low."
            )
        rules = candidates.rules(candidates.pruned(best.candidate).pins)
        policy = self._amp.policy.replace(rules=rules)
        self._result = self._tuned(policy, best.error, best.candidate.traffic, start)

    def _tuned(self, policy: Policy, error: float, traffic: int, start: tuple[float, int]) -> Tuned:
        return Tuned(policy, error, traffic, start, (self._runs, self._backwards))

    # -- running ---------------------------------------------------------------------------------

    def _run(self, graph_of: Any, gates: Probes | None = None, weights: Any = None) -> list[Any]:
        """Runs all batches; returns what the model returns for each."""
        self._runs += 1
        results = []
        for index, (args, kwargs) in enumerate(self._batches):
            model = self._at(args, kwargs)
            draws = self._draws[index]

            def run_part(part: Part, inputs: list[Any], draws: Draws = draws) -> Sequence[Any]:
                if part.index not in self._graphs:
                    self._graphs[part.index] = PlannedGraph(part, self._amp.policy)
                if gates is not None:
                    return gates.run_part(self._graphs[part.index], inputs, draws)
                run = EqualDraws(graph_of(part), inputs, draws)
                for _ in run:
                    pass
                return run.outputs

            result = model(run_part, gradients=gates is not None)
            if gates is not None:
                self._probe(gates, result, weights[index])
                continue
            results.append(result)
        return results

    def _at(self, args: tuple, kwargs: dict[str, Any]) -> ModelRunner:
        if self._model is None:
            self._model = ModelRunner(self._amp, args, kwargs)
        else:
            self._model.take(args, kwargs)
        return self._model

    def _probe(self, gates: Probes, result: Any, weights: list[float]) -> None:
        count = max(LEAST_PROBES, -(-PROBES // len(self._batches)))
        with torch.enable_grad():
            gates.backward(self._error.counted(result), weights, count)
        self._backwards += count

    def _measured(self, candidates: Candidates, candidate: Candidate) -> float:
        policy = self._amp.policy.replace(rules=candidates.rules(candidate.pins))
        graphs: dict[int, GraphModule] = {}

        def graph_of(part: Part) -> GraphModule:
            if part.index not in graphs:
                graphs[part.index] = part.under(policy)[0]
            return graphs[part.index]

        return self._error.of(self._run(graph_of), self._references)

    # -- choosing --------------------------------------------------------------------------------

    def _weights(self, results: list[Any]) -> list[list[float]]:
        """Returns how much each output of each batch counts: most where the error is largest."""
        parts = self._error.parts(results, self._references)
        worst = max(max(part) for part in parts)
        if not math.isfinite(worst) or worst == 0:
            return [[1.0] * len(part) for part in parts]
        return [[error / worst for error in part] for part in parts]

    def _candidates(self, weights: list[list[float]]) -> Candidates:
        probes = Probes(self._amp.options.low_dtype)
        self._run(None, probes, weights)
        graphs = list(self._graphs.values())
        sensitivity = probes.result(graphs)
        if self._calibration is not None:
            most = torch.finfo(self._amp.options.low_dtype).max
            for graph in graphs:
                ranges = self._calibration.of(graph.graph_module).values
                wide = {name for name, row in ranges.items() if row.peak > most}
                sensitivity.beyond |= {
                    t for t in graph.payers if t.name in wide and t not in graph.problem.out_of_range
                }
        return Candidates(graphs, sensitivity)

    def _best(self) -> Trial | None:
        met = [trial for trial in self._trials if trial.error <= self._budget]
        return min(met, key=lambda t: (t.candidate.traffic, t.error), default=None)

    def _next(self, candidates: Candidates) -> Candidate | None:
        """Returns what to measure next."""
        best, tried = self._best(), {_plan_of(trial.candidate) for trial in self._trials}
        if best is None and self._runs == RUNS - 1:
            return candidates.everything
        base = candidates.of(())
        if not self._trials:
            return base
        if best is not None and best.candidate == base:
            return None
        learned = self._learned(candidates)
        if self._pool:
            candidates.correct(learned.corrected())
        for share in LATER if self._pool else SHARES:
            self._pool |= dict.fromkeys(candidates.search(self._budget * share))
        if best is not None and best is self._trials[-1]:
            self._pool |= dict.fromkeys(candidates.given_back(best.candidate))
        found = self._chosen(learned, (best.candidate if best else candidates.everything).traffic, tried)
        return found if found is not None or best is not None else candidates.everything

    def _chosen(self, learned: Learned, traffic: int, tried: set[Plan]) -> Candidate | None:
        """Returns the candidate that promises most, of those that move less than now; None if none does."""
        front: list[Candidate] = []
        least = 0.0
        for candidate in sorted((c for c in self._pool if c.traffic < traffic), key=lambda c: c.traffic):
            chance = learned.chance(candidate.charged, self._budget)
            if _plan_of(candidate) not in tried and chance >= least + STEP:
                front.append(candidate)
                least = chance
        if not front:
            return None
        left = RUNS - self._runs - (self._best() is None)  # the last run is for float32 everywhere
        saved = [(traffic - candidate.traffic) / traffic for candidate in front]
        met = learned.met([candidate.charged for candidate in front], self._budget)
        gain, index = best_choice(saved, met, left)
        return front[index] if gain > LEAST_GAIN else None

    def _learned(self, candidates: Candidates) -> Learned:
        """Returns what the trials say."""
        learned = Learned(candidates.squares, math.hypot(SCATTER, candidates.scatter))
        for trial in self._trials:
            if math.isfinite(trial.error):
                learned.add(trial.candidate.charged, trial.error)
        return learned
