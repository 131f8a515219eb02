"""Judges the gradients of an optimizer: by each model's guard, then by all ranks in one agreement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor
from torch.optim import Optimizer

from .agreement import agree
from .distributed import is_distributed
from .parameter_index import Slotted
from .step_guard import Agreement, StepGuard, Verdict

# Marks a gradient with the last agreement that was about it, and with its version then.
MARK = "_amp_agreed"


class Numbers(Protocol):
    """The interface of a loss scale that ranks agree on."""

    def count_left_out(self) -> None:
        """Lets overflows count whose steps the loop left out."""

    def shared(self) -> Tensor:
        """Returns the numbers that ranks make one."""

    def take_shared(self, numbers: Tensor) -> None:
        """Takes over the numbers that won."""


class Share(NamedTuple):
    """One model's part of an optimizer.

    Attributes:
        guard: The model's guard.
        parameters: The parameters of the optimizer that belong to the model, with their slots.
        numbers: The model's loss scale.
    """

    guard: StepGuard
    parameters: Slotted
    numbers: Numbers


def verdicts(optimizer: Optimizer, shares: Sequence[Share]) -> list[Verdict | None]:
    """Returns the verdicts for a step of the optimizer now; None for a model without gradients."""
    kept = [guard.kept(optimizer, parameters) for guard, parameters, _ in shares]
    open_shares = [share for share, known in zip(shares, kept, strict=True) if known is None]
    fresh = iter(_judged(optimizer, open_shares))
    found = [next(fresh) if known is None else known[0] for known in kept]
    for guard, parameters, _ in shares:
        guard.take(optimizer, parameters)
    return found


def judge_early(optimizer: Optimizer, shares: Sequence[Share]) -> None:
    """Checks gradients before the loop changes them.

    Raises:
        LoopError: See `StepGuard.check_order`.
    """
    for guard, parameters, _ in shares:
        guard.check_order(optimizer, parameters)
    for (guard, parameters, _), verdict in zip(shares, _judged(optimizer, shares), strict=True):
        guard.keep(optimizer, parameters, verdict)


def _judged(optimizer: Optimizer, shares: Sequence[Share]) -> list[Verdict | None]:
    found: dict[StepGuard, Verdict | None] = {}
    together: dict[tuple | None, list[Share]] = {}
    for share in shares:
        guard, parameters, _ = share
        if not parameters:
            found[guard] = None
        elif not is_distributed():
            found[guard] = guard.look(parameters)
        elif guard.is_alone():
            # What boundaries reported of gradients that were reduced since may differ between ranks.
            found[guard] = guard.look(parameters, with_reports=False)
        else:
            groups = None if guard.process_groups is None else tuple(guard.process_groups)
            together.setdefault(groups, []).append(share)
    for groups, asked in together.items():
        found.update(_agreed(optimizer, asked, groups))
    return [found[share.guard] for share in shares]


def _agreed(optimizer: Optimizer, asked: list[Share], groups: tuple | None) -> dict[StepGuard, Verdict]:
    """Returns the verdicts of all ranks: of the last agreement, if it was about these gradients, too.

    Ranks of one job may have other numbers of optimizers. If each step of a round had an agreement, they
    would wait for each other without end.
    """
    last = asked[0].guard.agreement
    if last is not None and all(_is_about(last, guard, parameters) for guard, parameters, _ in asked):
        return {share.guard: last.verdicts[share.guard] for share in asked}
    if last is not None:
        asked[0].guard.steps_apart.add(optimizer)
    wide = _with_others(optimizer, asked)
    local = [guard.look(parameters) for guard, parameters in wide]
    agreement = Agreement(_reduced(asked, local, groups))
    for guard, parameters in wide:
        guard.agreement = agreement
        _mark(agreement, parameters)
    return agreement.verdicts


def _reduced(
    asked: list[Share], local: list[Verdict | None], groups: tuple | None
) -> dict[StepGuard, Verdict]:
    """Brings verdicts and loss scales of all ranks together."""
    rows = []
    for share, verdict in zip(asked, local, strict=True):
        share.guard.peers.meet(groups)
        share.numbers.count_left_out()
        rows.append(share.guard.row(verdict, share.numbers.shared()))
    found = {}
    for share, verdict, row in zip(asked, local, agree(rows, groups), strict=True):
        found[share.guard] = share.guard.agreed(verdict, row)
        share.numbers.take_shared(row[2:])
    return found


def _with_others(optimizer: Optimizer, asked: list[Share]) -> list[tuple[StepGuard, Slotted]]:
    """Adds the gradients of optimizers that step later in this round and that no agreement was about."""
    wide = [(guard, list(parameters)) for guard, parameters, _ in asked]
    known = {id(p) for _, parameters in wide for p, _ in parameters}
    others = {id(o): o for share in asked for o in share.guard.others(optimizer)}
    for other in others.values():
        rest = [p for group in other.param_groups for p in group["params"]]
        rest = [p for p in rest if p.grad is not None and id(p) not in known and not _was_judged(p.grad)]
        for guard, parameters in wide:
            found = guard.slots.slotted(rest)
            parameters += [(p, slot) for p, slot in found if slot is not None]
            rest = [p for p, slot in found if slot is None]
        wide[0][1].extend((p, None) for p in rest)
    return wide


def _is_about(agreement: Agreement, guard: StepGuard, parameters: Slotted) -> bool:
    gradients = [p.grad for p, _ in parameters if p.grad is not None]
    marks = [getattr(gradient, MARK, None) for gradient in gradients]
    pairs = zip(gradients, marks, strict=True)
    is_same = all(mark is not None and mark == (agreement, g._version) for g, mark in pairs)
    return guard in agreement.verdicts and is_same


def _was_judged(gradient: Tensor) -> bool:
    mark = getattr(gradient, MARK, None)
    return mark is not None and mark[1] == gradient._version


def _mark(agreement: Agreement, parameters: Slotted) -> None:
    for parameter, _ in parameters:
        if parameter.grad is not None:
            setattr(parameter.grad, MARK, (agreement, parameter.grad._version))
