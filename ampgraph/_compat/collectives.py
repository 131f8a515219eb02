"""Collectives that count as writes: ``dist.broadcast(p, 0)`` raises no version counter.

The first parameter that is watched replaces the methods of ``ProcessGroup`` by functions that tell of the
memory that they were given (tried on torch 2.13). They stay.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

# Gets the tensors that a collective was given, read ones too.
Tell = Callable[[list[Tensor]], None]
# Methods of ``ProcessGroup`` that write tensors; later versions of torch have more of them.
_COLLECTIVES = (
    "_allgather_base",
    "_reduce_scatter_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "broadcast",
    "gather",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
)


def tell_of_collectives(tell: Tell) -> None:
    """Calls ``tell`` after each collective of the process, from now on."""
    if not torch.distributed.is_available():
        return
    group = torch.distributed.ProcessGroup
    for name in _COLLECTIVES:
        if hasattr(group, name):
            setattr(group, name, _telling(getattr(group, name), tell))


def _telling(collective: Callable, tell: Tell) -> Callable:
    @torch.compiler.disable  # Dynamo would trace the search for parameters at a graph break
    @functools.wraps(collective)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = collective(*args, **kwargs)
        tell([x for x in tree_leaves((args, kwargs)) if type(x) in (Tensor, torch.nn.Parameter)])
        return result

    return call
