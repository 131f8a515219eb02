"""The agreement of ranks before a step: one table of whole numbers, of the same size on every rank.

Ranks of one job may hold different models: stages of a pipeline, experts of a mixture. So no rank can send
its flags of parameters to all others. Each sends one row per model instead, and in each column the greatest
number wins. The first column is the verdict: 0 without gradients, 1 for finite gradients, and a number that
tells where an overflow comes from. Its bits, from the lowest: whether there are gradients, the parameter, the
scaler, the rank counted from the end, and whether the overflow happened on that rank. Reduction spreads an
overflow to ranks where it did not happen. The other columns make the loss scales of all ranks one: see
`StepGuard.row` and `ScaleNumbers.shared`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .._compat import store_of_ranks
from ..errors import warn_user

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Rows and columns of one message. The models from the last row on share it.
PLACES, COLUMNS = 16, 7
# Loses against every other number.
LEAST = torch.iinfo(torch.int64).min
_FINITE = 1
_ORDER_BITS, _NUMBER_BITS, _RANK_BITS = 28, 12, 20
_TOP_BIT = 1 + _ORDER_BITS + _NUMBER_BITS + _RANK_BITS
# How long the first agreement waits before it names the ranks that are late.
SECONDS = 60.0


class Origin(NamedTuple):
    """Where an overflow comes from.

    Attributes:
        rank: The rank.
        number: `LossScaler.number` on that rank.
        slot: The slot of the parameter; None for the last one, of tensors without a slot.
    """

    rank: int
    number: int
    slot: int | None


def key_of(flags: Tensor, reported: Tensor | None, counts: bool | Tensor, number: int) -> Tensor:
    """Returns what this rank sends for one model.

    Args:
        flags: Positive in the slots of gradients that are not finite.
        reported: Those that this rank's boundaries reported; None if they reported nothing.
        counts: Whether the model has gradients of a backward.
        number: `LossScaler.number`.
    """
    behind = torch.distributed.get_world_size() - torch.distributed.get_rank()
    code = (behind << _NUMBER_BITS) + number % (1 << _NUMBER_BITS) << _ORDER_BITS + 1
    first = _first(flags)
    key = (first > 0) * (code + 2 * first)
    if reported is not None:
        own = _first(reported)
        key = torch.where(own > 0, (1 << _TOP_BIT) + code + 2 * own, key)
    return key + counts


def _first(flags: Tensor) -> Tensor:
    """Returns the slot that a backward meets first, plus two; 1 for the last slot alone, 0 for none."""
    bad = torch.cat([flags[-1:], flags[:-1]]) > 0
    return (bad * torch.arange(1, flags.shape[0] + 1, device=flags.device)).amax()


def origin_of(key: int) -> Origin:
    """Returns where the overflow of an agreed number comes from."""
    rest, order = divmod((key & (1 << _TOP_BIT) - 1) >> 1, 1 << _ORDER_BITS)
    behind, number = divmod(rest, 1 << _NUMBER_BITS)
    return Origin(torch.distributed.get_world_size() - behind, number, order - 2 if order > 1 else None)


def is_bad(key: Tensor) -> Tensor:
    """Returns whether some rank has an overflow."""
    return key > _FINITE


def has_gradients(key: Tensor) -> Tensor:
    """Returns whether some rank has gradients of a backward, or an overflow."""
    return key > 0


def agree(rows: Sequence[Tensor], groups: Sequence[ProcessGroup] | None) -> list[Tensor]:
    """Returns the rows of all ranks for each model of this rank.

    The verdicts of ranks with more models count for the first model of this rank.

    Args:
        rows: The rows of this rank, by model.
        groups: The groups to all-reduce over, one after the other; None for all ranks of the job.
    """
    own = [row.to(rows[0].device) for row in rows]
    if len(own) > PLACES:
        own[PLACES - 1 :] = [torch.stack(own[PLACES - 1 :]).amax(0)]
    message = torch.cat([torch.stack(own), own[0].new_full((PLACES - len(own), COLUMNS), LEAST)])
    for group in [None] if groups is None else groups:
        torch.distributed.all_reduce(message, op=torch.distributed.ReduceOp.MAX, group=group)
    if len(own) < PLACES:
        message[0, 0] = torch.maximum(message[0, 0], message[len(own) :, 0].amax())
    return [message[min(i, PLACES - 1)].to(row.device) for i, row in enumerate(rows)]


# -- the names of other ranks ----------------------------------------------------------------------------


class Peers:
    """Tells other ranks the names of this rank's parameters, and reads theirs.

    It uses the store of the process group: a rank reads what another has written, without
    its help. So the names take part in no step.

    Args:
        names: The parameters' names, by slot.
        number: `LossScaler.number`.
    """

    def __init__(self, names: list[str], number: int):
        self._names, self.number = names, number
        self._job: object = None
        self._met: set[tuple[int, ...]] = set()

    def meet(self, groups: Sequence[ProcessGroup] | None) -> None:
        """Publishes the names before the first agreement, and waits for the other ranks.

        Warns with their numbers if some are late: a rank that never steps would be waited for without end.
        """
        if self._job is not torch.distributed.group.WORLD:
            self._job, self._met = torch.distributed.group.WORLD, set()
            _publish(torch.distributed.get_rank(), self.number, self._names)
        for group in [None] if groups is None else groups:
            ranks = tuple(torch.distributed.get_process_group_ranks(group))
            if ranks not in self._met:
                self._met.add(ranks)
                _wait_for(ranks)

    def name_at(self, origin: Origin) -> str | None:
        """Returns the name of a parameter of any rank; None for a tensor without a slot."""
        if origin.slot is None:
            return None
        if origin.rank == torch.distributed.get_rank():
            return self._names[origin.slot]
        store, key = store_of_ranks(), _key(origin.rank, origin.number)
        if store is None or not store.check([key]):
            return f"parameter {origin.slot}"
        return json.loads(store.get(key))[origin.slot]

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_job": None, "_met": set()}


def _key(rank: int, number: int) -> str:
    return f"ampgraph/names/{rank}/{number % (1 << _NUMBER_BITS)}"


def _arrival(rank: int) -> str:
    return f"ampgraph/arrived/{rank}"


def _publish(rank: int, number: int, names: list[str]) -> None:
    if (store := store_of_ranks()) is not None:
        store.set(_key(rank, number), json.dumps(names))
        store.set(_arrival(rank), "")


def _wait_for(ranks: tuple[int, ...]) -> None:
    store = store_of_ranks()
    if store is None or store.wait_for([_arrival(rank) for rank in ranks], SECONDS):
        return
    late = [rank for rank in ranks if not store.check([_arrival(rank)])]
    if late:
        warn_user(
            f"ampgraph: the first step waits for the ranks {_listed(late)}. All ranks of the job skip a step "
            "together, so each has to step. If these ranks do not train this model, set "
            "scaler.process_groups on the others: () for a rank that trains alone, or their groups."
        )


def _listed(ranks: list[int], most: int = 8) -> str:
    return ", ".join(map(str, ranks[:most])) + (f" and {len(ranks) - most} more" if len(ranks) > most else "")
