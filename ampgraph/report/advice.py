"""Hardware advice for low-precision ops: sizes that are slow on tensor cores, GPUs without tensor cores.

Sources: NVIDIA, "Matrix Multiplication Background User's Guide", section "Tensor Core Requirements" (with
2-byte elements, matrix dimensions in multiples of 8 elements, 16 bytes); "Convolutional Layers User's Guide"
(and channels); CUDA C++ Programming Guide, compute capabilities (float16 tensor cores from 7.0 on,
bfloat16 from 8.0 on).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch.fx import GraphModule, Node

from .._compat import OpOverload, size_hint
from ..ops.kernels import packet_name
from ..origin import module_path
from ..passes.analysis.arguments import argument
from ..plan import Plan
from . import graph_view as view

MULTIPLE = 8
# A convolution with fewer input channels (images, spectrograms) is the first of the network.
IMAGE_CHANNELS = 4
# A GEMM this wide belongs to a vocabulary or a class list, where padding costs almost nothing.
VOCABULARY = 4096
TENSOR_CORES_SINCE = {torch.float16: (7, 0), torch.bfloat16: (8, 0)}

_PRODUCTS = ("aten.linear", "aten.addmm", "aten.mm", "aten.matmul", "aten.bmm", "aten.baddbmm")
_ATTENTION = "aten.scaled_dot_product_attention"


@dataclass(frozen=True)
class Advice:
    """One size, or one device, that keeps a low-precision op from being fast.

    Attributes:
        rule: ``"gemm"``, ``"vocabulary"``, ``"convolution"``, ``"attention"`` or ``"device"``.
        node: Label of the node; ``""`` for a device.
        module: Path of its innermost module.
        what: The name of the size or of the device.
        size: The offending size; 0 for a device.
        better: The next size up that is a multiple of 8; 0 for a device.
        text: The advice, in one sentence.
    """

    rule: str
    node: str
    module: str
    what: str
    size: int
    better: int
    text: str


def advise(graph_module: GraphModule, plan: Plan) -> tuple[Advice, ...]:
    """Returns the advice for ops that run low: devices first, then nodes in graph order."""
    low = [n for n in graph_module.graph.nodes if _runs_low(n, plan.low_dtype)]
    devices = dict.fromkeys(v.device for n in low for v in view.values(n) if v.device.type == "cuda")
    found = [a for device in devices if (a := _device(device, plan.low_dtype))]
    for node in low:
        for rule, what, size in _sizes(node):
            # Symbolic sizes depend on the caller.
            if isinstance(size, int) and size % MULTIPLE:
                found.append(_size_advice(node, rule, what, size))
    return tuple(found)


def _runs_low(node: Node, low_dtype: torch.dtype) -> bool:
    if view.kind_of(node) != "op" or not isinstance(node.target, OpOverload):
        return False
    return any(v.dtype == low_dtype for v in view.values(node))


def _sizes(node: Node) -> Iterator[tuple[str, str, int | torch.SymInt]]:
    """Yields (rule, name of the size, size) for each size that a rule checks."""
    name = packet_name(node.target)  # type: ignore[arg-type]
    if name in _PRODUCTS:
        yield from _gemm_sizes(node, name)
    elif name == _ATTENTION:
        yield "attention", "head size", _shape(node, "query")[-1]
        yield "attention", "head size of values", _shape(node, "value")[-1]
    elif "conv" in name and argument(node, "weight") is not None:
        yield from _convolution_sizes(node)


def _gemm_sizes(node: Node, name: str) -> Iterator[tuple[str, str, int | torch.SymInt]]:
    if name == "aten.linear":
        *leading, inner = _shape(node, "input")
        rows, columns = prod(leading), _shape(node, "weight")[0]
    else:
        first, second = [tuple(view.values(n)[0].shape) for n in node.args if isinstance(n, Node)][-2:]
        if min(len(first), len(second)) < 2:
            return  # a matrix by a vector: no GEMM
        rows, inner, columns = first[-2], first[-1], second[-1]
    yield "gemm", "inner size (K)", inner
    yield (
        "vocabulary" if isinstance(columns, int) and columns >= VOCABULARY else "gemm",
        "columns (N)",
        columns,
    )
    if size_hint(rows, fallback=2) != 1:
        yield "gemm", "rows (M)", rows


def _convolution_sizes(node: Node) -> Iterator[tuple[str, str, int | torch.SymInt]]:
    groups = argument(node, "groups") or 1
    weight = _shape(node, "weight")
    transposed = "transpose" in str(node.target) or argument(node, "transposed") is True
    out, inner = (weight[1], weight[0] // groups) if transposed else (weight[0] // groups, weight[1])
    if groups > 1 and inner == 1:
        return  # depthwise: no GEMM
    if inner > IMAGE_CHANNELS:
        yield "convolution", "input channels", inner
    yield "convolution", "output channels", out


def _size_advice(node: Node, rule: str, what: str, size: int) -> Advice:
    better = -(-size // MULTIPLE) * MULTIPLE
    fix = "pad the vocabulary (or the classes) to" if rule == "vocabulary" else "make it"
    text = f"{what} {size} is not a multiple of {MULTIPLE}: {fix} {better}"
    return Advice(rule, view.label_of(node), module_path(node), what, size, better, text)


def _device(device: torch.device, low_dtype: torch.dtype) -> Advice | None:
    if not torch.cuda.is_available():
        return None
    capability, since = torch.cuda.get_device_capability(device), TENSOR_CORES_SINCE[low_dtype]
    if capability >= since:
        return None
    name, dtype = torch.cuda.get_device_name(device), view.dtype_name(low_dtype)
    other = "; float16 would be fast" if capability >= TENSOR_CORES_SINCE[torch.float16] else ""
    text = (
        f"{name} has compute capability {capability[0]}.{capability[1]}, and {dtype} is fast from "
        f"{since[0]}.{since[1]} on: it saves memory here, not time{other}"
    )
    return Advice("device", "", "", name, 0, 0, text)


def _shape(node: Node, name: str) -> tuple[int | torch.SymInt, ...]:
    return tuple(argument(node, name).meta["val"].shape)
