"""Decides on optimizer steps for a loss scaler: checks gradients and counts rounds."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._compat import expects_uneven_inputs
from ..errors import LoopError
from .distributed import active_wrapper, groups_of, is_distributed, join
from .gradient_flags import GradientFlags
from .nested_optimizers import outermost
from .overflow import OverflowLog
from .parameter_index import ParameterIndex
from .scale_state import ScaleState
from .untaken_gradients import Backward, LeftOut

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.nn.parallel import DistributedDataParallel


_ROUNDS_OF_A_TURN = 2


class Verdict(NamedTuple):
    """The result of a check of the gradients of an optimizer.

    Attributes:
        flags: Positive in the slots of non-finite gradients; the last slot is for tensors without a slot.
        found: 1 if a gradient is not finite, else 0; 0-dim float32.
    """

    flags: Tensor
    found: Tensor


class _Early(NamedTuple):
    """What `StepGuard.judge_early` found, and the backwards that it was of."""

    optimizer: Optimizer
    verdict: Verdict | None
    backwards: set[Backward]


class StepGuard:
    """Checks gradients for one scaler and counts its rounds.

    A round ends with an update of the scale. It contains at most one step of each optimizer.

    Attributes:
        found: Whether a gradient of this round was not finite, 0-dim float32.
        has_judged: Whether this round had any gradient.
        steps: Rounds with gradients so far.
        process_groups: See `LossScaler.process_groups`.
        overflows: The recorded overflows.
    """

    def __init__(self, slots: ParameterIndex, state: ScaleState, flags: GradientFlags):
        self.slots, self._state, self._flags = slots, state, flags
        self.overflows = OverflowLog(slots.names)
        self.process_groups: Sequence[ProcessGroup] | None = None
        self._wrapper: weakref.ref[DistributedDataParallel] | None = None
        self.steps = 0
        self._attached: list[weakref.ref[Optimizer]] = []
        self._rounds, self._is_called = 0, False
        self._forget_rests()
        self.reset()

    def _forget_rests(self) -> None:
        self._resting: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._last_round: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()

    def reset(self) -> None:
        """Begins a round; what was found so far is forgotten."""
        self.found = torch.zeros((), dtype=torch.float32, device=self._state.scale.device)
        self.has_judged = False
        self._stepped: list[Optimizer] = []
        self._unscaled: list[_Early] = []

    def __getstate__(self) -> dict[str, object]:
        # A copy has no optimizers and no peers yet.
        lists: dict[str, list] = {"_attached": [], "_stepped": [], "_unscaled": []}
        nothing = dict.fromkeys(("process_groups", "_wrapper", "_resting", "_last_round"))
        return {**vars(self), **lists, **nothing}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self._forget_rests()

    # -- rounds ----------------------------------------------------------------------------------

    def attach(self, optimizer: Optimizer) -> None:
        """Records an optimizer whose ``step`` asks the guard."""

        self._attached.append(weakref.ref(optimizer))
        self.note_optimizer(optimizer)

    def note_optimizer(self, optimizer: Optimizer) -> None:
        """Notes an optimizer whose steps ask the guard; one that the loop leaves out counts."""
        self._flags.untaken.optimizers.add(optimizer)

    def is_attached(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer's ``step`` asks the guard."""
        return any(ref() is outermost(optimizer) for ref in self._attached)

    def is_end_of_round(self) -> bool:
        """Whether every attached optimizer has stepped since the last update, except those that rest.

        An optimizer rests after a round without it. Its next step is a round by itself.
        """
        waited_for = [o for o in self._live() if o not in self._resting]
        return self._is_comeback() or all(self.has_stepped(o) for o in waited_for)

    def _live(self) -> list[Optimizer]:
        return [o for ref in self._attached if (o := ref()) is not None]

    def _is_comeback(self) -> bool:
        return len(self._stepped) == 1 and self._stepped[0] in self._resting

    def end_round(self) -> None:
        """Begins the next round, and records which attached optimizers did not step in this one."""
        if self._stepped:
            is_comeback = self._is_comeback()
            for optimizer in self._live():
                if self.has_stepped(optimizer):
                    if not is_comeback or self._takes_turns(optimizer):
                        self._resting.discard(optimizer)
                    self._last_round[optimizer] = self._rounds + 1
                elif not is_comeback:
                    self._resting.add(optimizer)
            self._rounds += 1
        self._is_called = False
        self.reset()

    def _takes_turns(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer that rested steps in every other round now; so it is waited for again."""
        return self._rounds + 1 - self._last_round.get(optimizer, 0) <= _ROUNDS_OF_A_TURN

    def cancel(self, optimizer: Optimizer) -> None:
        """Removes the record of a step that raised."""
        self._stepped = [s for s in self._stepped if s is not outermost(optimizer)]

    def has_stepped(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer has stepped since the last update."""
        return any(s is outermost(optimizer) for s in self._stepped)

    def begin(self, optimizer: Optimizer) -> None:
        """Records that an optimizer is about to step."""
        self._stepped.append(outermost(optimizer))
        # The model was called since the last round: other optimizers step after this one.
        if self._is_comeback() and self._is_called and self._takes_turns(self._stepped[0]):
            self._resting.discard(self._stepped[0])
        self._flags.watch.asked()

    def before_call(self) -> None:
        """Finds steps that the loop has left out; the model is called now with gradients."""
        self._flags.untaken.look_before_call()

    def note_call(self) -> None:
        """Notes the scale that the model reads now."""
        self._is_called = True
        self._flags.untaken.scale = self._state.scale

    def left_out(self) -> list[LeftOut]:
        """Returns the steps that the loop has left out since this was asked."""
        if found := self._flags.untaken.left_out:
            self._flags.untaken.left_out = []
        return found

    def forget(self) -> None:
        """Begins a round, and forgets all backwards."""
        self.reset()
        self._flags.untaken.forget()

    # -- verdicts --------------------------------------------------------------------------------

    def judge_early(self, optimizer: Optimizer, parameters: list[Tensor]) -> None:
        """Checks gradients now; later changes before the step do not count.

        Raises:
            LoopError: The optimizer has already stepped, or its gradients were already checked.
        """
        if self.has_stepped(optimizer):
            raise LoopError(
                "unscale_ is called after step of this optimizer; call it before, or update first."
            )
        if self._early(optimizer, parameters):
            raise LoopError("unscale_ was already called for this optimizer since the last update.")
        early = _Early(optimizer, self.judge(parameters), self._flags.untaken.backwards_of(parameters))
        self._unscaled = [e for e in self._unscaled if e.optimizer is not optimizer] + [early]

    def verdict(self, optimizer: Optimizer, parameters: list[Tensor]) -> Verdict | None:
        """Returns the verdict on the gradients that the optimizer takes now; None if there are none."""
        early = self._early(optimizer, parameters)
        verdict = early.verdict if early else self.judge(parameters)
        self._flags.untaken.take(optimizer, parameters)
        return verdict

    def _early(self, optimizer: Optimizer, parameters: list[Tensor]) -> _Early | None:
        """Returns what `judge_early` found; of an attached optimizer, only until the next backward."""
        early = next((e for e in self._unscaled if e.optimizer is optimizer), None)
        if early is None or not self.is_attached(optimizer):
            return early
        is_last = early.backwards == self._flags.untaken.backwards_of(parameters)
        return early if is_last else None

    def judge(self, parameters: Iterable[Tensor]) -> Verdict | None:
        """Returns the verdict on these parameters' gradients; None if there are none on any rank."""
        if not (parameters := list(parameters)):
            return None
        has_no_peers = self.process_groups is not None and not self.process_groups
        is_alone = is_distributed() and (self._is_uneven() or has_no_peers)
        flags = self._flags.of(parameters, with_reports=not is_alone)  # ranks must decide the same
        if is_distributed():
            if flags is None:
                flags = torch.zeros_like(self._state.probe, requires_grad=False)
            flags = flags if self._is_uneven() else join(flags, self._groups(parameters))
        return None if flags is None else Verdict(flags, (flags > 0).any().to(torch.float32))

    def count(self, verdict: Verdict) -> None:
        """Counts a verdict for the scale."""
        self.steps += not self.has_judged
        self.has_judged = True
        self.found = torch.maximum(self.found, verdict.found)

    def count_unstepped(self) -> None:
        """Counts the verdicts of `judge_early` whose steps the loop skipped."""
        for early in self._unscaled:
            if early.verdict is not None and not self.has_stepped(early.optimizer):
                self.count(early.verdict)
                self.note(early.verdict)

    def note(self, verdict: Verdict) -> None:
        """Records an overflow for `LossScaler.last_overflow` without waiting for the device."""
        self.overflows.note(self.steps, verdict.flags, self._state.scale, verdict.found)

    # -- ranks -----------------------------------------------------------------------------------

    def note_wrapper(self) -> None:
        """Stores the wrapper that calls the model now."""
        if (wrapper := active_wrapper()) is not None:
            self._wrapper = weakref.ref(wrapper)

    def share_wrapper(self, others: Iterable[StepGuard]) -> None:
        """Copies the wrapper of models that step together with this one, which may not have run yet."""
        if self._noted_wrapper() is None:
            self._wrapper = next((o._wrapper for o in others if o._noted_wrapper() is not None), None)

    def _noted_wrapper(self) -> DistributedDataParallel | None:
        return self._wrapper() if self._wrapper is not None else None

    def _is_uneven(self) -> bool:
        """Whether some ranks may have no inputs left and join only DistributedDataParallel's collectives.

        The averaged gradients are equal on all remaining ranks, so these ranks decide the same.
        """
        wrapper = self._noted_wrapper()
        return wrapper is not None and self.process_groups is None and expects_uneven_inputs(wrapper)

    def _groups(self, parameters: list[Tensor]) -> Sequence[ProcessGroup] | None:
        if self.process_groups is not None:
            return self.process_groups
        groups = groups_of(parameters)
        if (wrapper := self._noted_wrapper()) is not None:
            groups.append(wrapper.process_group)
        return groups or None
