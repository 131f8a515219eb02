"""Writes the generated parts of README.md and docs/loss-scaling.md, and docs/block.svg.

    python tools/readme.py           # rewrite them
    python tools/readme.py --check   # exit 1 where the README's cast map is not what the code gives

The demo's output is taken from out/demo/summary.txt where ``make demo`` has left one.
"""

from __future__ import annotations

import argparse
import operator
import re
import sys
from pathlib import Path

import torch
from torch import Tensor, fx, nn

import ampgraph
from ampgraph.drawing import can_render
from ampgraph.marks import BoundaryMark, mark_of
from ampgraph.testing import cast_map

ROOT = Path(__file__).resolve().parent.parent
# What the loss-scaling nodes read; AOTAutograd's own names follow the order in which bytecode reads inputs.
_STATE = {"scale": "scale", "unscale": "inverse"}
README, SCALING = ROOT / "README.md", ROOT / "docs/loss-scaling.md"
PICTURE, DEMO = ROOT / "docs/block.svg", ROOT / "out/demo/summary.txt"


class Block(nn.Module):
    """Attention with a pre-norm: three projections read one normalized tensor."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        weights = (self.q(y) @ self.k(y).transpose(1, 2)).softmax(-1)
        return x + weights @ self.v(y)


def converted(level: str = "O1") -> ampgraph.AmpModule:
    """Returns the block, converted for float16."""
    torch.manual_seed(0)
    return ampgraph.convert(Block(), (torch.randn(8, 32, 64),), policy=level, dtype=torch.float16)


def block_section() -> str:
    """Returns the cast map of the block and what it costs."""
    amp = converted()
    summary = ampgraph.explain(amp).table(casts_only=True).rpartition("\n\n")[2]
    return f"```text\n{cast_map(amp)}\n```\n\n```text\n{summary}\n```"


def backward_section() -> str:
    """Returns the backward of a linear layer and a ReLU, a node a line, loss scaling marked."""
    model, x = nn.Sequential(nn.Linear(8, 4), nn.ReLU()), torch.randn(2, 8)
    amp = ampgraph.convert(model, (x,), dtype=torch.float16, backend="aot_eager")
    amp(x).square().mean().backward()
    names: dict[fx.Node, str] = {}
    rows = []
    for node in amp.backward_graph.graph.nodes:
        names[node] = _STATE.get(_reader(node), node.name)
        if node.target is operator.getitem:
            names[node] = f"{names[node.args[0]]}[{node.args[1]}]"
        elif node.op == "call_function":
            rows.append((_call(node, names), _role(node)))
        elif node.op == "output":
            gradients = [value for value in node.args[0] if value is not None]  # not all inputs have one
            rows.append((f"return {_shown(gradients, names)}", ""))
    width = max(len(text) for text, _ in rows)
    lines = [f"{text:<{width}}  {f'# {mark}' if mark else ''}".rstrip() for text, mark in rows]
    return "```text\n" + "\n".join(lines) + "\n```"


def _role(node: fx.Node) -> str:
    mark = mark_of(node, BoundaryMark)
    return "" if mark is None else mark.boundary


def _reader(node: fx.Node) -> str:
    """Returns the loss-scaling role of what reads an input."""
    if not node.name.startswith("primals"):
        return ""
    return next((_role(user) for user in node.users), "")


def _call(node: fx.Node, names: dict[fx.Node, str]) -> str:
    value, name = node.meta["val"], str(node.target).split(".")[1]
    arguments = [_shown(a, names) for a in node.args]
    arguments += [str(a).removeprefix("torch.") for k, a in node.kwargs.items() if k == "dtype"]
    kind = ""
    if isinstance(value, torch.Tensor):
        kind = f": {str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return f"{node.name}{kind} = {name}({', '.join(arguments)})"


def _shown(value: object, names: dict[fx.Node, str]) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_shown(v, names) for v in value)}]"
    return names[value] if isinstance(value, fx.Node) else str(value)


def with_section(text: str, name: str, content: str) -> str:
    """Returns ``text`` with what stands between the markers of ``name`` replaced."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if not pattern.search(text):
        raise SystemExit(f"the page has no section {begin}")
    return pattern.sub(lambda _: f"{begin}\n{content}\n{end}", text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    pages = {
        README: with_section(README.read_text(), "block", block_section()),
        SCALING: with_section(SCALING.read_text(), "backward", backward_section()),
    }
    if options.check:
        stale = [page.name for page, text in pages.items() if text != page.read_text()]
        if stale:
            print(f"not up to date: {', '.join(stale)}; run python tools/readme.py", file=sys.stderr)
        return int(bool(stale))
    if DEMO.exists():
        demo = f"```text\n{DEMO.read_text().rstrip()}\n```"
        pages[README] = with_section(pages[README], "demo", demo)
    for page, text in pages.items():
        page.write_text(text)
    if can_render():
        ampgraph.draw(converted(), PICTURE)
    else:
        print("no Graphviz here: docs/block.svg left as it is", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
