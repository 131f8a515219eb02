"""Measures one zoo model: converts it under any policy, runs it, and compares it with float32.

A model is captured once a mode; every policy is then applied to a copy of that capture, by `ampgraph.convert`
itself. The reference is the source model run eagerly in float32.

Random numbers: every run starts from the same seed, and dropout draws the same mask in every dtype.
"""

from __future__ import annotations

import copy
import functools
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.utils._pytree import tree_leaves, tree_structure

import ampgraph
from ampgraph import AmpModule, NoLossScale, OpLists, Policy
from ampgraph.capture import capture_program
from ampgraph.marks import CastMark, mark_of
from tests.zoo import models as zoo
from tests.zoo.casts import OracleResult
from tests.zoo.oracle import autocast_oracle

# Like for like with torch.autocast, which leaves its outputs low. The loss is scaled here, alike for all.
_LIKE_FOR_LIKE = {"keep_io_dtypes": False, "loss_scale": NoLossScale()}
OPTIMAL = {level: Policy(level, **_LIKE_FOR_LIKE) for level in ("O1", "O2")}
AUTOCAST = Policy("O1", ops=OpLists.torch(), placement="autocast", hazards=False, **_LIKE_FOR_LIKE)

# How far a converted model may be from float32, in the relative 2-norm over all outputs or over all
# gradients: FLOOR units of the low dtype (its eps), or so many times the error of torch's autocast on
# the same model and seed, whichever is more. The floor: rounding the result itself costs up to half a
# unit, and what it was computed from was rounded as well. The factor: at O1 the roundings are
# autocast's in kind and nearly in number, but not the same ones; at O2 residual sums and norms round
# too, which makes them two to three times as many, and independent errors add up by their squares (a
# factor of sqrt(3), rounded up).
FLOOR = 2.0
FACTORS = {"O1": 1.5, "O2": 2.0}
# Models that amplify rounding (batch norm on two images, fifty blocks) have errors that are luck on one
# batch. Where one batch breaks the bound, the root mean square over so many decides, for both alike.
DRAWS = 6

# How often what is timed is done.
TIMES = 3

# Tried in turn until all gradients are finite, as a dynamic loss scale would.
LOSS_SCALES = (2.0**12, 2.0**6, 1.0, 2.0**-8)


@dataclass(frozen=True)
class Run:
    """One forward and backward.

    Attributes:
        outputs: The floating tensors of the output, in order.
        grads: The gradient of every parameter that has one, by name, unscaled, as float64.
        grad_dtypes: The dtype that each ``.grad`` had.
        form: What the output is, without its values: type and structure, types and dtypes of its leaves.
    """

    outputs: list[Tensor]
    grads: dict[str, Tensor]
    grad_dtypes: dict[str, torch.dtype]
    form: tuple[Any, ...]

    @property
    def is_finite(self) -> bool:
        """Whether all gradients are finite."""
        return all(bool(tensor.isfinite().all()) for tensor in self.grads.values())


@dataclass
class Subject:
    """A zoo model in one mode.

    Attributes:
        model: The registry's entry.
        module: The source model, in float32.
        args: Positional inputs.
        kwargs: Keyword inputs.
        mode: "train" or "eval".
    """

    model: zoo.ZooModel
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    mode: str
    _program: list[ExportedProgram] = field(default_factory=list)
    _state: dict[str, Tensor] = field(default_factory=dict)
    _runs: dict[str, Run] = field(default_factory=dict)
    _autocasts: dict[torch.dtype, AmpModule] = field(default_factory=dict)
    _oracles: dict[torch.dtype, OracleResult] = field(default_factory=dict)

    @classmethod
    @functools.lru_cache(maxsize=1)
    def shared(cls, name: str, mode: str) -> Subject:
        """Returns the model of that name, the same one again until another is asked for."""
        return cls.of(name, mode)

    @classmethod
    def of(cls, name: str, mode: str) -> Subject:
        """Builds the model of that name."""
        module, args, kwargs = zoo.get(name).seeded()
        module.train(mode == "train")
        subject = cls(zoo.get(name), module, args, kwargs, mode)
        subject._state = {key: value.clone() for key, value in module.state_dict().items()}
        return subject

    @property
    def program(self) -> ExportedProgram:
        """The capture that all conversions share; there is none before the first conversion."""
        return self._program[0]

    def capture_seconds(self) -> float:
        """Returns the seconds of a capture from scratch, the median of `TIMES`."""

        def once() -> float:
            self._program.clear()
            gc.collect()  # no collection within the time
            return self.convert(OPTIMAL["O1"], torch.float16).timings[0].capture

        return statistics.median(once() for _ in range(TIMES))

    def rewrite_seconds(self, policy: Policy, dtype: torch.dtype) -> float:
        """Returns the seconds of everything that follows the capture, the median of `TIMES`."""

        def once() -> float:
            gc.collect()
            return self.convert(policy, dtype).timings[0].rewrite

        return statistics.median(once() for _ in range(TIMES))

    def convert(self, policy: Policy, dtype: torch.dtype) -> AmpModule:
        """Converts the model; the first call captures it, later ones copy that capture.

        The seconds that conversion reports are CPU seconds here: a shared machine's wall clock says little.
        """
        with (
            mock.patch("ampgraph.runtime.export_call.capture_program", self._capture),
            mock.patch.object(time, "perf_counter", time.process_time),
        ):
            how = {"backend": "eager", "capture": "ahead of time"}
            return ampgraph.convert(self.module, self.args, self.kwargs, policy=policy, dtype=dtype, **how)

    def _capture(self, *given: Any) -> ExportedProgram:
        if not self._program:
            self._program.append(capture_program(*given))
        program = copy.copy(self._program[0])
        program._graph_module = copy.deepcopy(program.graph_module)
        return program

    def autocast(self, dtype: torch.dtype) -> AmpModule:
        """Returns the model converted under the rule of autocast, once a dtype."""
        if dtype not in self._autocasts:
            self._autocasts[dtype] = self.convert(AUTOCAST, dtype)
        return self._autocasts[dtype]

    def oracle(self, dtype: torch.dtype) -> OracleResult:
        """Returns what torch's CUDA autocast does with the captured graph, once a dtype."""
        if dtype not in self._oracles:
            graph = self.program.module(check_guards=False)
            self._oracles[dtype] = autocast_oracle(graph, self.args, self.kwargs, dtype)
        return self._oracles[dtype]

    @functools.cached_property
    def reference(self) -> Run:
        """The source model's run in float32."""
        return self.run(self.module)

    def run_converted(self, amp: AmpModule) -> Run:
        """Runs a converted model, unless a policy before it gave the very same code."""
        code = amp.graph_module.code
        if code not in self._runs:
            self._runs[code] = self.run(amp)
        return self._runs[code]

    def run(self, module: Callable[..., Any]) -> Run:
        """Runs forward and backward, leaving parameters and buffers as they were."""
        for scale in LOSS_SCALES:
            run = self._run(module, scale)
            if run.is_finite:
                break
        return run

    def _run(self, module: Callable[..., Any], scale: float) -> Run:
        with self._restored():
            torch.manual_seed(1)
            output = module(*self.args, **self.kwargs)
            (self.model.loss(output) * scale).backward()
            grads = {name: p.grad for name, p in self.module.named_parameters() if p.grad is not None}
        leaves = _leaves(output)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        kinds = [leaf.dtype if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves]
        return Run(
            [leaf.detach().double() for leaf in tensors if leaf.is_floating_point()],
            {name: grad.double() / scale for name, grad in grads.items()},
            {name: grad.dtype for name, grad in grads.items()},
            (type(output), tree_structure(output), tuple(kinds)),
        )

    @contextmanager
    def _restored(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.module.zero_grad(set_to_none=True)
            with torch.no_grad():
                for key, value in self.module.state_dict().items():
                    value.copy_(self._state[key])

    def errors_over_draws(self, *amps: AmpModule) -> list[tuple[float, float]]:
        """Returns `errors` of each converted model as the root mean square over `DRAWS` batches."""
        errors: list[list[tuple[float, float]]] = [[] for _ in amps]
        for seed in range(DRAWS):
            torch.manual_seed(seed)
            args, kwargs = self.model.inputs()
            draw = Subject(self.model, self.module, args, kwargs, self.mode, _state=self._state)
            for amp, found in zip(amps, errors, strict=True):
                found.append(draw.errors(draw.run(amp)))
        return [tuple(_root_mean_square(kind) for kind in zip(*found, strict=True)) for found in errors]

    def errors(self, run: Run) -> tuple[float, float]:
        """Returns the relative error of outputs and of gradients against float32, in the 2-norm over all."""
        names = self.reference.grads
        return (
            _relative(run.outputs, self.reference.outputs),
            _relative([run.grads[name] for name in names], list(names.values())),
        )


def _leaves(output: Any) -> list[Any]:
    """Looks into dataclasses that are no pytree as well."""
    leaves = tree_leaves(output)
    return [inner for leaf in leaves for inner in (tree_leaves(vars(leaf)) if is_dataclass(leaf) else [leaf])]


def _relative(values: list[Tensor], exact: list[Tensor]) -> float:
    """Where the exact value is infinite (a masked score) there is no error to speak of."""
    error = size = 0.0
    for one, other in zip(values, exact, strict=True):
        known = other.isfinite()
        if not known.all():
            one, other = one[known], other[known]
        error += float((one - other).square().sum())
        size += float(other.square().sum())
    return math.sqrt(error / max(size, 1e-300))


def _root_mean_square(values: Sequence[float]) -> float:
    return math.sqrt(sum(value**2 for value in values) / len(values))


def tolerance(level: str, dtype: torch.dtype, autocasts_error: float) -> float:
    """Returns the error that a level may have where torch's autocast has ``autocasts_error``."""
    return max(FLOOR * torch.finfo(dtype).eps, FACTORS[level] * autocasts_error)


def holds(level: str, dtype: torch.dtype, errors: Sequence[float], autocasts: Sequence[float]) -> bool:
    """Whether the errors of outputs and gradients are within `tolerance`."""
    return all(e <= tolerance(level, dtype, a) for e, a in zip(errors, autocasts, strict=True))


def activation_cast_bytes(graph_module: fx.GraphModule) -> int:
    """Returns the bytes that inserted casts of activations read and write, from the graph itself."""
    marks = (mark_of(node, CastMark) for node in graph_module.graph.nodes)
    return sum(mark.bytes for mark in marks if mark is not None and not mark.is_parameter)
