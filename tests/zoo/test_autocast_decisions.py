"""``OpLists.torch()`` with ``placement="autocast"`` decides every op as torch's real CUDA autocast does.

The plan and the oracle see the same capture. The pipeline inlines sub-graphs, the oracle runs them in place,
so nodes are matched in execution order, and their ops are compared as a check on that.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatch
from typing import Any

import pytest
import torch
from torch import fx

from ampgraph.passes import FoldMasks
from ampgraph.passes.insert_casts import is_inserted
from ampgraph.plan import Plan
from tests.zoo.measure import Subject
from tests.zoo.test_zoo import CORE

NAMES = (
    "timm/resnet18",
    "timm/mobilenetv2_050",
    "timm/convnext_atto",
    "timm/hrnet_w18_small",
    "timm/vit_tiny_patch16_224",
    "timm/deit_tiny_distilled_patch16_224",
    "timm/beit_base_patch16_224",
    "timm/eva02_tiny_patch14_224",
    "timm/cait_xxs24_224",
    "timm/mixer_s32_224",
    "torchvision/mobilenet_v3_small",
    "torchvision/squeezenet1_1",
    "torchvision/lraspp_mobilenet_v3_large",
    "torchvision/vit",
    "torchvision/swin",
    "torchvision/r3d_18",
    "transformers/bert",
    "transformers/deberta_v2",
    "transformers/modernbert",
    "transformers/gpt2_eager",
    "transformers/llama",
    "transformers/gemma2",
    "transformers/t5",
    "transformers/mixtral",
    "transformers/mamba",
    "transformers/rwkv",
    "transformers/wav2vec2",
    "transformers/whisper",
    "transformers/segformer",
    "own/gru",
    "own/transformer_encoder",
)

# Where the plan departs from what torch's autocast really does, always to keep float32: which nodes, and why.
EXCEPTIONS: dict[str, tuple[tuple[str, ...], str]] = {
    "timm/hrnet_w18_small": (
        ("add__*", "relu__*", "add_11"),
        "an in-place add into low memory rounds its sum; made functional, it promotes to float32",
    ),
    "transformers/deberta_v2": (
        ("masked_fill*",),
        "it fills with a number that float16 cannot hold: autocast overflows to -inf there",
    ),
    "transformers/rwkv": (
        ("select_*", "copy_*", "mul_*"),
        "memory that is written in place keeps the dtype that the source made it in",
    ),
}


METADATA_CHECK = torch.ops.aten._assert_tensor_metadata.default


def calls(gm: fx.GraphModule, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (name as the oracle writes it, op) of every op, sub-graphs in place."""
    for node in gm.graph.nodes:
        bodies = [gm._modules.get(arg.target) for arg in node.all_input_nodes if arg.op == "get_attr"]
        bodies = [body for body in bodies if isinstance(body, fx.GraphModule)]
        if bodies:
            yield from calls(bodies[0], f"{prefix}{node.name}.")
        elif isinstance(node.target, torch._ops.OpOverload):
            yield prefix + node.name, node.target


def packet(target: Any) -> str:
    return target._schema.name.rstrip("_")


def disagreements(name: str, dtype: torch.dtype) -> tuple[list[str], int]:
    """Returns the nodes that the plan decides differently, and how many were compared."""
    subject = Subject.shared(name, "eval")
    amp = subject.autocast(dtype)
    expected = subject.oracle(dtype).node_dtypes
    source = subject.program.module(check_guards=False)
    for check in source.graph.find_nodes(op="call_function", target=METADATA_CHECK):
        source.graph.erase_node(check)
    FoldMasks().run(source)  # constant masks are gone from the plan's graph
    captured = [pair for pair in calls(source) if pair[1] is not METADATA_CHECK]
    planned = [node for node in amp.graph_module.graph.nodes if is_planned_op(node, amp.plan)]
    assert [packet(op) for _, op in captured] == [packet(node.target) for node in planned]
    pairs = [
        (original, amp.plan[node.name], expected[original])
        for (original, _), node in zip(captured, planned, strict=True)
        if amp.plan[node.name].dtype and isinstance(expected.get(original), torch.dtype)
    ]
    patterns, _ = EXCEPTIONS.get(name, ((), ""))
    wrong = [
        f"{original}: planned {decision.dtype} ({decision.reason}), autocast {real}"
        for original, decision, real in pairs
        if decision.dtype != real and not (decision.dtype == torch.float32 and matches(original, patterns))
    ]
    return wrong, len(pairs)


def is_planned_op(node: fx.Node, plan: Plan) -> bool:
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and not is_inserted(node)
        and node.name in plan.decisions
    )


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


@pytest.mark.zoo
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.exhaustive] * (n not in CORE)) for n in NAMES]
)
@pytest.mark.filterwarnings("ignore")
def test_same_decisions(name: str) -> None:
    wrong, compared = disagreements(name, torch.float16)
    assert not wrong
    assert compared >= 4
