"""Decides on optimizer steps for a loss scaler: checks gradients and counts rounds."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._compat import expects_uneven_inputs, is_in_backward
from ..errors import LoopError
from .agreement import Peers, has_gradients, is_bad, key_of
from .distributed import active_wrapper, is_distributed
from .gradient_flags import GradientFlags
from .nested_optimizers import outermost
from .overflow import OverflowLog
from .parameter_index import ParameterIndex, Slotted
from .scale_state import ScaleState
from .untaken_gradients import Backward, LeftOut

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.nn.parallel import DistributedDataParallel


_ROUNDS_OF_A_TURN = 2
_numbers = itertools.count()


class Verdict(NamedTuple):
    """The result of a check of the gradients of an optimizer.

    Attributes:
        flags: Positive in the slots of this rank's non-finite gradients; the last slot is for tensors
            without a slot.
        found: 1 if a gradient of any rank is not finite, else 0; 0-dim float32.
        counts: Whether a backward made the gradients. A step on zeros without a backward does not count: with
            such steps ``torch.distributed.checkpoint`` builds the state of optimizers.
        reported: What boundaries of this rank reported of gradients that were changed since, by reduction
            between ranks above all; None if they reported nothing.
        key: What the ranks agreed on, see `ampgraph.training.agreement`; None without other ranks.
    """

    flags: Tensor
    found: Tensor
    counts: bool | Tensor
    reported: Tensor | None = None
    key: Tensor | None = None


class Agreement:
    """One agreement of ranks.

    Attributes:
        verdicts: The verdict of each guard that asked.
    """

    def __init__(self, verdicts: dict[StepGuard, Verdict]):
        self.verdicts = verdicts


class _Early(NamedTuple):
    """What `StepGuard.keep` was given, and the backwards that it was of."""

    optimizer: Optimizer
    verdict: Verdict | None
    backwards: set[Backward]


class StepGuard:
    """Checks gradients for one scaler and counts its rounds.

    A round ends with an update of the scale. It contains at most one step of each optimizer.

    Attributes:
        found: Whether a gradient of this round was not finite, 0-dim float32; None before there was any.
        counts: Whether a backward made the gradients of this round.
        steps: Rounds with gradients of a backward so far.
        agreement: The last agreement of this round.
        steps_apart: Optimizers whose gradients changed after the agreement of their round: the optimizers of
            a GAN, or the loop clips between two steps. What they hold before is not about their steps.
        number: Number of guards created before, the same on like ranks.
        process_groups: See `LossScaler.process_groups`.
        peers: The names of parameters on other ranks.
        overflows: The recorded overflows.
    """

    def __init__(self, slots: ParameterIndex, state: ScaleState, flags: GradientFlags):
        self.slots, self._state, self._flags = slots, state, flags
        self.number = next(_numbers)
        self.peers = Peers(slots.names, self.number)
        self.overflows = OverflowLog(slots.names, self.peers)
        self.process_groups: Sequence[ProcessGroup] | None = None
        self._wrapper: weakref.ref[DistributedDataParallel] | None = None
        self.steps: int | Tensor = 0
        self._stepped_before: list[weakref.ref[Optimizer]] = []
        self._attached: list[weakref.ref[Optimizer]] = []
        self._rounds, self._is_called = 0, False
        self._forget_rests()
        self.reset()

    def _forget_rests(self) -> None:
        self._resting: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._last_round: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self.steps_apart: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def reset(self) -> None:
        """Begins a round; what was found so far is forgotten."""
        self.found: Tensor | None = None
        self.counts: bool | Tensor = False
        self.agreement: Agreement | None = None
        self._stepped: list[Optimizer] = []
        self._taken: set[int] = set()
        self._unscaled: list[_Early] = []

    def __getstate__(self) -> dict[str, object]:
        # A copy has no optimizers and no peers yet.
        lists: dict[str, list] = {"_attached": [], "_stepped": [], "_unscaled": [], "_stepped_before": []}
        nothing = dict.fromkeys(
            ("process_groups", "_wrapper", "_resting", "_last_round", "agreement", "steps_apart")
        )
        return {**vars(self), **lists, **nothing}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self.number = self.peers.number = next(_numbers)
        self._forget_rests()

    # -- rounds ----------------------------------------------------------------------------------

    def attach(self, optimizer: Optimizer) -> None:
        """Records an optimizer whose ``step`` asks the guard."""

        self._attached = [ref for ref in self._attached if ref() is not None] + [weakref.ref(optimizer)]
        self.note_optimizer(optimizer)
        self._flags.untaken.attached.add(optimizer)

    def note_optimizer(self, optimizer: Optimizer) -> None:
        """Notes an optimizer whose steps ask the guard; one that the loop leaves out counts."""
        self._flags.untaken.optimizers.add(optimizer)

    def has_untaken(self) -> bool:
        """Whether there may be gradients of this model that no step has taken."""
        return self._flags.untaken.has_any()

    def has_due(self, parameters: list[Tensor]) -> bool:
        """Whether a backward of this model made the gradient of one of these for the next step."""
        return self._flags.untaken.has_due(parameters)

    def is_attached(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer's ``step`` asks the guard."""
        return any(ref() is outermost(optimizer) for ref in self._attached)

    def is_end_of_round(self) -> bool:
        """Whether every attached optimizer has stepped since the last update, except those that rest.

        An optimizer rests after a round without it. Its next step is a round by itself. One whose parameters
        others have stepped is not waited for: its next step is of another backward.
        """
        waited_for = [o for o in self._live() if o not in self._resting and not self.has_stepped(o)]
        return self._is_comeback() or all(map(self._is_covered, waited_for))

    def _is_covered(self, optimizer: Optimizer) -> bool:
        """Whether steps of this round were of all parameters of the optimizer that have gradients."""
        if is_distributed():
            return False  # its step may need an agreement of ranks
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        return bool(parameters) and all(self.slots.known(p) in self._taken for p in parameters)

    def _live(self) -> list[Optimizer]:
        return [o for ref in self._attached if (o := ref()) is not None]

    def _is_comeback(self) -> bool:
        return len(self._stepped) == 1 and self._stepped[0] in self._resting

    def end_round(self) -> None:
        """Begins the next round, and records which attached optimizers did not step in this one."""
        if self._stepped:
            self._note_round()
        self._is_called = False
        self.overflows.end_round()
        self.reset()

    def _note_round(self) -> None:
        is_comeback = self._is_comeback()
        for optimizer in self._live():
            if self.has_stepped(optimizer):
                if not is_comeback or self._takes_turns(optimizer):
                    self._resting.discard(optimizer)
                self._last_round[optimizer] = self._rounds + 1
            elif not is_comeback:
                self._resting.add(optimizer)
        self._rounds += 1
        self._stepped_before = [weakref.ref(o) for o in self._stepped]

    def _takes_turns(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer that rested steps in every other round now; so it is waited for again."""
        return self._rounds + 1 - self._last_round.get(optimizer, 0) <= _ROUNDS_OF_A_TURN

    def cancel(self, optimizer: Optimizer) -> None:
        """Removes the record of a step that raised."""
        self._stepped = [s for s in self._stepped if s is not outermost(optimizer)]

    def has_stepped(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer has stepped since the last update."""
        return any(s is outermost(optimizer) for s in self._stepped)

    def begin(self, optimizer: Optimizer, is_alone: bool = False) -> None:
        """Records that an optimizer is about to step; ``is_alone``: for no other model."""
        self._stepped.append(outermost(optimizer))
        # The model was called since the last round: other optimizers step after this one.
        if self._is_comeback() and self._is_called and self._takes_turns(self._stepped[0]):
            self._resting.discard(self._stepped[0])
        self._flags.watch.asked(is_alone)

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

    def check_order(self, optimizer: Optimizer, parameters: Slotted) -> None:
        """Checks that the loop may ask for a check of this optimizer's gradients now.

        Raises:
            LoopError: The optimizer has already stepped, or its gradients were already checked.
        """
        if self.has_stepped(optimizer):
            raise LoopError(
                "amp.scaler.unscale_ was called after step of the same optimizer; call it before step, or "
                "call update first."
            )
        if self._early(optimizer, parameters):
            raise LoopError("unscale_ was already called for this optimizer since the last update.")

    def keep(self, optimizer: Optimizer, parameters: Slotted, verdict: Verdict | None) -> None:
        """Keeps the verdict on gradients for the step; later changes before it do not count."""
        early = _Early(optimizer, verdict, self._flags.untaken.backwards_of(parameters))
        self._unscaled = [e for e in self._unscaled if e.optimizer is not optimizer] + [early]

    def kept(self, optimizer: Optimizer, parameters: Slotted) -> tuple[Verdict | None] | None:
        """Returns what `keep` was given, in a tuple; None if nothing was."""
        early = self._early(optimizer, parameters)
        return None if early is None else (early.verdict,)

    def take(self, optimizer: Optimizer, parameters: Slotted) -> None:
        """Notes that an optimizer takes the gradients, or leaves them out on a verdict."""
        self._taken.update(slot for _, slot in parameters if slot is not None)
        self._flags.untaken.take(optimizer, parameters)

    def _early(self, optimizer: Optimizer, parameters: Slotted) -> _Early | None:
        """Returns what `judge_early` found; of an attached optimizer, only until the next backward."""
        early = next((e for e in self._unscaled if e.optimizer is optimizer), None)
        if early is None or not self.is_attached(optimizer):
            return early
        is_last = early.backwards == self._flags.untaken.backwards_of(parameters)
        return early if is_last else None

    def look(self, parameters: Slotted, with_reports: bool = True) -> Verdict | None:
        """Returns the verdict on what this rank holds; None if there are no gradients.

        Args:
            parameters: The parameters.
            with_reports: Whether what the last backward reported here of gradients that were changed since
                counts too.
        """
        reported = self._flags.untaken.flags_of(parameters) if with_reports else None
        flags = self._flags.of(parameters, reported)
        if flags is None:
            return None
        found = flags.amax().sign()
        counts = self._flags.has_new_backward() or self.counts
        if counts is False and not self._repeats(parameters):
            counts = self._flags.any_value(parameters) | (found > 0)
        return Verdict(flags, found, counts, reported)

    def _repeats(self, parameters: Slotted) -> bool:
        """Whether an attached optimizer steps on gradients that the last round has taken."""
        is_attached = bool(self._stepped) and self.is_attached(self._stepped[-1])
        return is_attached and self._flags.untaken.were_taken(parameters)

    def key(self, verdict: Verdict | None) -> Tensor:
        """Returns the message of this rank to the others."""
        if verdict is None:
            return torch.zeros((), dtype=torch.int64, device=self._state.scale.device)
        return key_of(verdict.flags, verdict.reported, verdict.counts, self.number)

    def row(self, verdict: Verdict | None, numbers: Tensor) -> Tensor:
        """Returns this rank's row of an agreement.

        Args:
            verdict: What this rank found.
            numbers: See `ScaleNumbers.shared`.
        """
        key = self.key(verdict)
        steps = self.steps if isinstance(self.steps, Tensor) else torch.full_like(key, self.steps)
        return torch.cat([torch.stack([key, steps.to(key)]), numbers])

    def agreed(self, verdict: Verdict | None, row: Tensor) -> Verdict:
        """Returns the verdict of all ranks, and takes over how many steps there were."""
        key, self.steps = row[0], row[1]
        flags = torch.zeros_like(self._state.probe, requires_grad=False) if verdict is None else verdict.flags
        return Verdict(flags, is_bad(key).to(torch.float32), has_gradients(key), key=key)

    def count(self, verdict: Verdict) -> None:
        """Counts a verdict for the scale."""
        before, self.counts = self.counts, self.counts | verdict.counts
        self.steps = self.steps + (self.counts ^ before)
        self.found = verdict.found if self.found is None else torch.maximum(self.found, verdict.found)

    def count_unstepped(self) -> None:
        """Counts the verdicts of `judge_early` whose steps the loop skipped."""
        for early in self._unscaled:
            if early.verdict is not None and not self.has_stepped(early.optimizer):
                self.count(early.verdict)
                self.note(early.verdict)

    def note(self, verdict: Verdict) -> None:
        """Records an overflow for `LossScaler.last_overflow` without waiting for the device.

        A verdict that repeats one of the last round is not recorded again.
        """
        if verdict.counts is False:
            return
        self.overflows.note(self.steps, verdict.flags, self._state.scale, verdict.found, verdict.key)

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

    def is_alone(self) -> bool:
        """Whether no other rank is asked.

        Some ranks may have no inputs left and join only DistributedDataParallel's collectives. The averaged
        gradients are equal on all remaining ranks, so these ranks decide the same.
        """
        if self.process_groups is not None:
            return not self.process_groups
        wrapper = self._noted_wrapper()
        return wrapper is not None and expects_uneven_inputs(wrapper)

    # -- several optimizers ----------------------------------------------------------------------

    def others(self, optimizer: Optimizer) -> list[Optimizer]:
        """Returns the optimizers that step after this one in the same round, according to earlier rounds."""
        if is_in_backward():
            return []  # each parameter may have an optimizer, and most gradients are yet to come
        this = outermost(optimizer)
        due = [o for o in self._live() if o not in self._resting]
        before = [o for ref in self._stepped_before if (o := ref()) is not None]
        # A loop that calls `update` after each step gives each optimizer its own rounds.
        if any(o is this for o in before):
            due += before
        others = {id(o): o for o in due if o is not this and not self.has_stepped(o)}
        return [o for o in others.values() if o not in self.steps_apart]
