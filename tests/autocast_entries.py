"""torch's own autocast test lists as one-op programs, with what autocast makes of each.

``entries("cuda")`` and ``entries("cpu")`` turn the 121 and 55 entries that torch tests its autocast with into
``Entry`` values: a callable with arguments (on CPU tensors), the dtype its result has under autocast, and the
same computation with the casts written by hand.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.testing._internal.autocast_test_lists import AutocastCPUTestLists, AutocastTestLists
from torch.utils import _pytree as pytree

# Where CPU autocast classifies an op that CUDA autocast, which OpLists.torch() is, leaves alone.
CPU_ONLY = frozenset({"_addmm_activation", "_native_multi_head_attention", "avg_pool3d", "reflection_pad1d"})

# Section name -> what its ops run in: "low", "fp32", or "promote" for the widest input.
RUNS_IN = {
    "torch_expect_builtin_promote": "promote",
    "methods_expect_builtin_promote": "promote",
    "torch_need_autocast_promote": "promote",
    "torch_fp16": "low",
    "torch_16": "low",
    "nn_fp16": "low",
    "nn_16": "low",
    "linalg_fp16": "low",
    "methods_fp16": "low",
    "torch_fp32": "fp32",
    "nn_fp32": "fp32",
    "methods_fp32": "fp32",
    "banned": "fp32",  # CUDA autocast raises here; float32 is the safe form
}


@dataclasses.dataclass(frozen=True)
class Entry:
    """One entry of torch's lists.

    Attributes:
        id: Unique and readable, for pytest.
        section: The list it stands in.
        op: The name torch's list gives.
        fn: What to call.
        args: Positional arguments of ``fn``.
        kwargs: Keyword arguments of ``fn``.
        low: The low dtype of the run.
        output_dtype: The dtype of the (first) tensor result under autocast, None if there is none.
    """

    id: str
    section: str
    op: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    low: torch.dtype
    output_dtype: torch.dtype | None

    @property
    def run_dtype(self) -> torch.dtype:
        """The dtype autocast computes in."""
        return self.low if RUNS_IN[self.section] == "low" else torch.float32

    @property
    def as_on_cuda(self) -> bool:
        """Whether CUDA autocast treats the op in the same way."""
        return self.op not in CPU_ONLY

    def run(self) -> Any:
        """Calls the op as it is, without autocast."""
        return self.fn(*self.args, **self.kwargs)

    def reference(self) -> Any:
        """Calls the op with the casts of autocast written by hand."""
        return self.fn(*cast(self.args, self.run_dtype), **cast(self.kwargs, self.run_dtype))

    def module(self) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
        """Returns a module of this one op and the tensors to call it with."""
        leaves, spec = pytree.tree_flatten((self.args, self.kwargs))
        tensors = tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        return _OneOp(self.fn, leaves, spec), tensors


class _OneOp(torch.nn.Module):
    def __init__(self, fn: Callable[..., Any], leaves: list[Any], spec: pytree.TreeSpec) -> None:
        super().__init__()
        self.fn, self.leaves, self.spec = fn, leaves, spec

    def forward(self, *tensors: torch.Tensor) -> Any:
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return self.fn(*args, **kwargs)


def entries(device_type: str) -> Iterator[Entry]:
    """Yields the entries of torch's lists for CUDA (121, fp16) or CPU (55, bf16) autocast."""
    on_cuda = device_type == "cuda"
    lists = (AutocastTestLists if on_cuda else AutocastCPUTestLists)(torch.device("cpu"))
    low = torch.float16 if on_cuda else torch.bfloat16
    for section, rows in vars(lists).items():
        seen: Counter[str] = Counter()
        for row in rows:
            seen[row[0]] += 1
            yield _entry(f"{device_type}-{section}-{row[0]}-{seen[row[0]]}", section, row, low)


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Casts every floating tensor in a nest of tuples, lists and dicts."""

    def one(leaf: Any) -> Any:
        floating = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        return leaf.to(dtype) if floating else leaf

    return pytree.tree_map(one, value)


def _entry(name: str, section: str, row: tuple[Any, ...], low: torch.dtype) -> Entry:
    op, args = row[0], row[1]
    if op == "einsum":
        # torch's own entry cannot run (matrices for a 4-d equation): its third item makes torch skip it.
        args = (args, [torch.randn(2, 3, 4, 5), torch.randn(2, 6, 4, 5)])
    kwargs = next((extra for extra in row[2:] if isinstance(extra, dict)), {})
    return Entry(
        name, section, op, _function(section, op), args, kwargs, low, _output_dtype(section, row, low)
    )


def _function(section: str, op: str) -> Callable[..., Any]:
    if section.startswith(("nn_", "banned")):
        return getattr(torch._C._nn, op)
    if section.startswith("linalg"):
        return getattr(torch._C._linalg, op)
    if section.startswith("methods") or not hasattr(torch, op):
        return getattr(torch.Tensor, op)
    return getattr(torch, op)


def _output_dtype(section: str, row: tuple[Any, ...], low: torch.dtype) -> torch.dtype | None:
    if row[0] == "equal":
        return None  # a Python bool
    if "builtin_promote" in section:
        return row[-1]
    return low if RUNS_IN[section] == "low" else torch.float32
