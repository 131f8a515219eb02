"""`check_numerics`: where a converted model first is not finite, and rules that fix it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ..errors import AmpGraphError
from ..module import AmpModule
from ..origin import maker_of_item, module_path
from ..passes.analysis.bodies import runs_bodies
from ..policy.loss_scale import DynamicLossScale
from ..report import graph_view as view
from ..runtime.run_graph import Draws, is_meant, written_by
from .calibration import Calibration
from .evidence import checked, pins_for, wide
from .finding import BACKWARD, FORWARD, Finding, Range
from .observe import Look, Observer, Place, Seen, share_below
from .remedy import Trial, Trials, origins, readers_of
from .run_model import ModelRunner, Part
from .side_run import check_is_loss

# A gradient is lost where more than half of it underflows; a scale is of use while no more than this share of
# the low tensors' gradients is lost there.
LOST, MOST_LOST = 0.5, 0.25


def check_numerics(
    amp: AmpModule,
    args: tuple,
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    calibration: Calibration | None = None,
) -> Finding | None:
    """Finds the first node of a converted model whose value is not finite, and rules that fix it.

    The model runs node by node in its current training mode, in float32 and in the low dtype. A value counts
    if it has more NaN or infinite elements than in float32, so masks do not count. The remedy is tested: the
    model is planned with its rules and runs again. Model, buffers, gradients, random state and scaler are
    restored.

    With a loss the backward runs too, scaled as in training. A dynamic scale falls after each bad step. If it
    falls to a scale with finite gradients, most of them nonzero, nothing needs a fix, and the finding holds
    this scale (`Finding.settles_at`). Otherwise the remedy is chosen to allow the largest such scale.

    Args:
        amp: The converted model.
        args: Positional arguments of one call.
        kwargs: Its keyword arguments.
        loss: A function from the model's result to the loss, a 0-dim tensor. None checks only the forward.
        calibration: Ranges over more batches. A low node whose values left the range in one of them is a
            finding too, and a remedy keeps all such nodes in float32.

    Returns:
        The finding, or None if all values are finite.

    Raises:
        AmpGraphError: The model is not converted, it cannot be captured, the loss is not a 0-dim tensor, or
            the calibration has no statistics of this graph.

    Example:
        >>> finding = ampgraph.check_numerics(amp, (x,), loss=lambda y: y.square().mean())
        >>> if finding and finding.remedy:
        ...     amp = ampgraph.convert(model, (x,), policy=amp.policy.replace(rules=finding.remedy))
    """
    check_is_loss(loss)
    model = ModelRunner(amp, args, kwargs)
    draws = Draws()
    ranges = checked(calibration, "check_numerics")
    found = _Forward(model, draws, ranges).finding()
    if found is None and loss is not None:
        found = _Backward(model, draws, ranges, _checked_loss(loss)).finding()
    return found


def _checked_loss(loss: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
    def checked(result: Any) -> Tensor:
        value = loss(result)
        if not isinstance(value, Tensor) or value.dim() != 0:
            what = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise AmpGraphError(f"check_numerics: loss must return a 0-dim tensor; got one {what}.")
        if torch.is_grad_enabled() and not value.requires_grad:
            raise AmpGraphError(
                "check_numerics: loss returned a constant; expected one number that depends on the result."
            )
        return value

    return checked


class _Forward:
    """Checks the values."""

    direction = FORWARD

    def __init__(
        self,
        model: ModelRunner,
        draws: Draws,
        calibration: Calibration | None,
        loss: Callable[[Any], Tensor] | None = None,
        scale: float = 1.0,
    ):
        self.model, self.low_dtype = model, model.amp.options.low_dtype
        reference = Observer(
            model, lambda part: part.float32, loss, None, draws, with_exponents=loss is not None
        )
        self.reference = reference.run()
        has_scale = loss is not None and model.amp.scaler.is_enabled()
        self.trials = Trials(model, self.reference, loss, scale if has_scale else None, draws)
        self.calibration = calibration

    def finding(self) -> Finding | None:
        """Returns the values that are not finite; checks float32 first."""
        if (broken := self._in_float32()) is not None:
            return broken
        first = self.trials.run()
        if not first.bad:
            return self._in_other_batches(first)
        place = origins(first)[0]
        return self.found(first, place, self._why(place, first), self._values_beyond())

    def found(self, trial: Trial, place: Place, reason: str, beyond: list[Place]) -> Finding:
        """Describes a node, and searches its remedy."""
        pins = self.trials.search(trial, beyond, self._needed())
        if pins is None:
            return self.described(trial.seen, place, reason)
        rules, held = self.trials.rules(pins), self.trials.held
        return self.described(
            trial.seen, place, reason, remedy=rules, pinned=tuple(sorted(pins)), modules=held
        )

    def _values_beyond(self) -> list[Place]:
        """Returns the values that exceed the low range in float32."""
        most = torch.finfo(self.low_dtype).max
        return [p for p, look in self.reference.values.items() if look.peak > most]

    def _in_other_batches(self, trial: Trial) -> Finding | None:
        """Returns the first low node whose values left the range in a calibrated batch."""
        needed = self._needed()
        for part in self.model.parts if needed else ():
            near = self.trials.neighbours(part.index)
            for node, peak in self._wide(part).items():
                if not near.around([node], part.plan):
                    continue
                low, most = view.dtype_name(self.low_dtype), torch.finfo(self.low_dtype).max
                reason = f"it reached {peak:.3g} in the calibrated batches, and {low} holds {most:.5g}"
                return self.found(trial, (part.index, node.name), reason, [])
        return None

    def _needed(self) -> frozenset[str]:
        """Returns the nodes that calibrated batches need in float32."""
        near, policy = self.trials.neighbours, self.model.amp.policy
        pins = [pins_for(self._wide(part), part, near(part.index), policy) for part in self.model.parts]
        return frozenset().union(*pins)

    def _wide(self, part: Part) -> dict[Node, float]:
        if self.calibration is None:
            return {}
        return wide(self.calibration, part, self.trials.neighbours(part.index), self.low_dtype)

    def described(self, seen: Seen, place: Place, reason: str, **more: Any) -> Finding:
        """Returns a finding about a node, named as in the graph without casts."""
        index, name = self.trials.own(place, seen)
        node = self.trials.neighbours(index).nodes.get(name)
        if node is None:
            return Finding("", "", "", "", self.direction, reason, **more)
        return Finding(
            node.name,
            module_path(node),
            view.op_name(maker_of_item(node)) or node.op,
            view.user_line(node),
            self.direction,
            reason,
            self._ranges(seen, (index, name)),
            **more,
        )

    def _ranges(self, seen: Seen, place: Place) -> tuple[Range, ...]:
        node = seen.nodes.get(place)
        inputs = dict.fromkeys(node.all_input_nodes) if node is not None else {}
        found = []
        for source in inputs:
            look = seen.values.get((place[0], source.name))
            own = self.trials.neighbours(place[0]).own(source)
            if look is not None and own is not None:
                found.append(Range(view.label_of(own), view.dtype_of(source), look.least, look.most))
        return tuple(found)

    def _why(self, place: Place, trial: Trial) -> str:
        low, most = view.dtype_name(self.low_dtype), torch.finfo(self.low_dtype).max
        own = self.trials.own(place, trial.seen)
        look = self.reference.values.get(own)
        if look is None:
            return "float32 gives finite values"
        if runs_bodies(call := maker_of_item(self.trials.neighbours(own[0]).nodes[own[1]])):
            return f"an op in a branch or loop of {call.name!r} is the cause; rules for modules reach it"
        if look.peak > most:
            return f"it reaches {look.peak:.3g} in float32, and {low} holds {most:.5g}"
        if place not in self.reference.values and place not in trial.seen.values:
            return "the loss is not finite, although the outputs are"
        return f"{look.peak:.3g} at most in float32; what it reads was rounded to what it cannot stand"

    def _in_float32(self) -> Finding | None:
        """Returns the values that are not finite in float32 and reach a result; masks do not count."""
        seen = self.reference
        if not any(look.bad for look in seen.outputs):
            return None
        for place, look in seen.values.items():
            if look.bad and self._starts(place, look) and self._reaches_result(place):
                return self.described(seen, place, f"{look.bad} elements in float32", in_float32=True)
        return None

    def _starts(self, place: Place, look: Look) -> bool:
        """Whether it is the first that is not finite, or makes NaN, as of the infinities of a mask."""
        node, values = self.reference.nodes[place], self.reference.values
        inputs = [values[of] for n in node.all_input_nodes if (of := (place[0], n.name)) in values]
        if look.nan and not any(of.nan for of in inputs):
            return True
        return not any(of.bad for of in inputs) and not is_meant(node)

    def _reaches_result(self, place: Place) -> bool:
        seen = self.reference
        bad, waiting = {place[1]}, [seen.nodes[place]]
        while waiting:
            for user in waiting.pop().users:
                if user.op == "output" or written_by(user):
                    return True
                there = place[0], user.name
                may_pass = there in seen.unwritten or _is_bad(seen.values.get(there))
                if user.name not in bad and may_pass:
                    bad.add(user.name)
                    waiting.append(user)
        return False


def _is_bad(look: Look | None) -> bool:
    return look is not None and look.bad > 0


class _Backward(_Forward):
    """Checks the gradients, at the loss scale of now and at those that it may fall to."""

    direction = BACKWARD

    def __init__(
        self,
        model: ModelRunner,
        draws: Draws,
        calibration: Calibration | None,
        loss: Callable[[Any], Tensor],
    ):
        super().__init__(model, draws, calibration, loss, model.amp.scaler.get_scale())
        self.config = model.amp.scaler.config

    def finding(self) -> Finding | None:
        """Returns the gradient that no scale keeps finite, or the scale that keeps all finite."""
        if (broken := self._gradient_in_float32()) is not None:
            return broken
        trial = self.trials.run()
        if not self._overflows(trial):
            return None
        scales = self._scales()
        least = self._least_useful(scales, trial)
        if least != scales[0]:
            lower = self._at(least)
            if not self._overflows(lower):
                return self._settles(trial, scales[: scales.index(least) + 1])
            trial = lower
        return self._fault(trial, least)

    def _overflows(self, trial: Trial) -> bool:
        """Whether a loop would leave the step out: by the gradients that leave the graph."""
        known = self.reference.leaves
        return any(look.is_worse_than(known.get(place)) for place, look in trial.seen.leaves.items())

    def _scales(self) -> list[float]:
        """Returns the scale of now, and those that it falls to."""
        scales = [self.trials.scale or 1.0]
        if self.trials.scale is None:
            return scales
        dynamic = isinstance(self.config, DynamicLossScale)
        floor = self.config.floor if isinstance(self.config, DynamicLossScale) else 1.0
        factor = self.config.backoff_factor if dynamic else 0.5  # type: ignore[union-attr]
        while (lower := max(floor, scales[-1] * factor)) < scales[-1]:
            scales.append(lower)
        return scales

    def _at(self, scale: float) -> Trial:
        self.trials.scale = scale
        return self.trials.run()

    def _least_useful(self, scales: list[float], trial: Trial) -> float:
        """Returns the least scale at which most low tensors keep most of their gradient."""
        info = torch.finfo(self.low_dtype)
        smallest = info.smallest_normal * info.eps / 2
        low = {
            (i, n)
            for i, plan in trial.plans.items()
            for n, d in plan.decisions.items()
            if d.dtype == self.low_dtype
        }
        counts = [count for place, count in self.reference.exponents.items() if place in low]

        def lost(scale: float) -> float:
            gone = sum(share_below(count, smallest / scale) > LOST for count in counts)
            return gone / len(counts) if counts else 0.0

        allowed = max(MOST_LOST, lost(scales[0]))
        return min(scale for scale in scales if lost(scale) <= allowed)

    def _settles(self, trial: Trial, scales: list[float]) -> Finding:
        """Finds the largest of the scales without an overflow, between the first, with one, and the last."""
        above, below = 0, len(scales) - 1
        while below - above > 1:
            middle = (above + below) // 2
            if self._overflows(self._at(scales[middle])):
                above = middle
            else:
                below = middle
        place, reason = self._blamed(trial, scales[0])
        return self.described(trial.seen, place, reason, settles_at=scales[below], least_scale=scales[-1])

    def _fault(self, trial: Trial, scale: float) -> Finding:
        place, reason = self._blamed(trial, scale)
        most = torch.finfo(self.low_dtype).max
        looks = {**self.reference.leaves, **self.reference.gradients}
        beyond = [p for p, look in looks.items() if look.peak * scale > most]
        found = self.found(trial, place, reason, beyond + self._values_beyond())
        least = scale if self.trials.scale is not None else None
        return Finding(**{**vars(found), "least_scale": least})

    def _blamed(self, trial: Trial, scale: float) -> tuple[Place, str]:
        """Returns the node whose backward makes the first bad gradient, and what happens."""
        place = next((p for p in trial.bad if p in trial.seen.gradients), trial.bad[0])
        tensor = self.trials.own(place, trial.seen)
        maker = self._maker(place, trial)
        looks = {**self.reference.leaves, **self.reference.gradients}
        peak = looks[tensor].peak * scale if tensor in looks else 0.0
        low, most = view.dtype_name(self.low_dtype), torch.finfo(self.low_dtype).max
        told = f"the gradient of {tensor[1]!r}" if maker else "its gradient"
        if peak > most:
            reason = f"{told} reaches {peak:.3g} at loss scale {scale:g}, and {low} holds {most:.5g}"
        else:
            reason = (
                f"{told} is {peak:.3g} at most in float32 at loss scale {scale:g}; on the way it does not fit"
            )
        return (maker or place), reason

    def _maker(self, place: Place, trial: Trial) -> Place | None:
        near, seen = self.trials.neighbours(place[0]), trial.seen
        readers = readers_of(seen.nodes[place], lambda node: node.name in near.nodes)
        bad = set(trial.bad)
        fine = [n for n in readers if (place[0], n.name) not in bad]
        return (place[0], fine[0].name) if fine else None

    def _gradient_in_float32(self) -> Finding | None:
        seen = self.reference
        if not (seen.outputs[-1].bad or any(look.bad for look in seen.leaves.values())):
            return None
        bad = [p for p, look in seen.gradients.items() if look.bad] or [
            p for p, v in seen.leaves.items() if v.bad
        ]
        if not bad or seen.outputs[-1].bad:
            return Finding("", "", "", "", self.direction, "it is not finite in float32", in_float32=True)
        trial = Trial(seen, {}, bad)
        place = self._maker(bad[0], trial) or bad[0]
        return self.described(seen, place, f"the gradient of {bad[0][1]!r} in float32", in_float32=True)
