"""Time to convert and first run a stack of identical blocks, next to ``torch.compile`` for each block.

    python tools/bench_blocks.py --output docs/results/blocks.md

A decoder layer of transformers' Llama is repeated 1, 8 and 32 times. A row has the medians of new processes,
which take turns with those of the other rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from provenance import written_by
from torch import nn

COUNTS = (1, 8, 32)
WAYS = ("ampgraph, eager", "ampgraph, aot_eager", "torch.compile per block, aot_eager")
WIDTH, HEADS = 64, 4
TIMES = ("capture s", "rewrite s", "first step s", "next step s", "first - next s")
COLUMNS = ("blocks", "way", "captured", "compiled", *TIMES)


class Layers(nn.Module):
    """Decoder layers of transformers' Llama, with one table of angles."""

    def __init__(self, count: int) -> None:
        super().__init__()
        from transformers.models.llama.modeling_llama import LlamaConfig, LlamaDecoderLayer

        config = LlamaConfig(
            hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_attention_heads=HEADS, num_key_value_heads=2
        )
        config._attn_implementation = "sdpa"
        self.layers = nn.ModuleList(LlamaDecoderLayer(config, i) for i in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(x.shape[1])[:, None] * torch.ones(WIDTH // HEADS)
        table = angles.cos()[None], angles.sin()[None]
        for layer in self.layers:
            x = layer(x, position_embeddings=table)
        return x


def measured(count: int, way: str) -> dict[str, float]:
    """Returns one row; to be called once in a process."""
    import ampgraph
    import ampgraph.runtime.export_call as export_call
    from ampgraph.cli.torchvision_shim import allow_torchvision

    allow_torchvision()
    model, x = Layers(count), torch.randn(2, 8, WIDTH, requires_grad=True)
    captured, compiled = [], []

    def capture(*args, _capture=export_call.capture_program, **kwargs):
        captured.append(1)
        return _capture(*args, **kwargs)

    def backend(graph_module, inputs):
        compiled.append(1)
        return torch._dynamo.lookup_backend("aot_eager")(graph_module, inputs)

    export_call.capture_program = capture
    _warm_up(backend)
    compiled.clear()
    captured.clear()
    blocks = {}
    start = time.perf_counter()
    if way.startswith("ampgraph"):
        chosen = "eager" if way.endswith(", eager") else backend
        blocks = ampgraph.convert_blocks(model, "layers.*", dtype=torch.bfloat16, backend=chosen)
    else:
        for layer in model.layers:
            layer.compile(backend=backend)
    times = []
    for _ in range(4):
        model(x).square().mean().backward()
        times.append(time.perf_counter() - start)
        start = time.perf_counter()
    timings = [timing for block in blocks.values() for timing in block.timings]
    return {
        "captured": len(captured),
        "compiled": len(compiled),
        "capture s": sum(t.capture for t in timings),
        "rewrite s": sum(t.rewrite for t in timings),
        "first step s": times[0],
        "next step s": min(times[1:]),
        "first - next s": times[0] - min(times[1:]),
    }


def _warm_up(backend) -> None:
    """Imports and initializes what the first use in a process does."""
    import ampgraph

    small, x = nn.Linear(4, 4), torch.randn(2, 4)
    ampgraph.convert(small, (x,), dtype=torch.bfloat16)(x)
    torch.compile(small, backend=backend)(x).sum().backward()


def _row(count: int, way: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--one", json.dumps([count, way])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _medians(rows: tuple[dict[str, float], ...]) -> dict[str, float]:
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def _table(rows: list[tuple[int, str, dict[str, float]]]) -> str:
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + " ---: | --- |" + " ---: |" * (len(COLUMNS) - 2)]
    for count, way, row in rows:
        numbers = [f"{row[c]:.0f}" if c in ("captured", "compiled") else f"{row[c]:.3f}" for c in COLUMNS[2:]]
        if not way.startswith("ampgraph"):
            numbers[0] = numbers[2] = numbers[3] = ""
        lines.append(f"| {count} | {way} | " + " | ".join(numbers) + " |")
    return "\n".join(lines)


TEXT = """# Identical blocks

{written}

`ampgraph.convert_blocks` captures, plans and compiles blocks that are alike once
([distributed training](../distributed.md)).
The model is a stack of decoder layers of transformers' Llama (width {width}), in
bfloat16, one thread; a step is forward and backward of a batch of 2 x 8 tokens. The capture of
the first block is in "capture s", and so are the comparisons of the others with it; "rewrite s" has
the plan of the first block, and for the others a look at the size of their weights. Further blocks copy
no graph and write no code. torch.compile's own capture is in its first step. Each row has the medians of
{repeats} processes. "first - next" is what the first step takes longer than the next. A further block costs
comparisons, its low copies and its own first run, a few milliseconds. Times of a row scatter
by a fifth.

{table}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--counts", type=int, nargs="+", default=COUNTS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        torch.set_num_threads(1)
        print(json.dumps(measured(*json.loads(args.one))))
        return
    kinds = [(count, way) for way in WAYS for count in args.counts]
    turns = [[_row(*kind) for kind in kinds] for _ in range(args.repeats)]
    rows = [(*kind, _medians(found)) for kind, found in zip(kinds, zip(*turns, strict=True), strict=True)]
    written = written_by("python tools/bench_blocks.py --output docs/results/blocks.md", "transformers")
    text = TEXT.format(written=written, width=WIDTH, repeats=args.repeats, table=_table(rows))
    if args.output:
        args.output.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
