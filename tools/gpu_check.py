"""Checks training of converted models on a GPU; on a CPU it runs small, to show that it works.

Usage:
    python tools/gpu_check.py                     # prints Markdown
    python tools/gpu_check.py --page docs/results/gpu-check.md

For each backend at O1 and O2 in float16: steps of a fused optimizer with an overflow on the way, under
``torch.cuda.set_sync_debug_mode("error")`` (no step may wait for the GPU), the loss against float32; the same
steps as one graph (`compile_step`), whose losses must follow the loop's; and the gradients of one backward
against torch's autocast with GradScaler. `bench_step.py` has the times.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import multiprocessing
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import torch  # noqa: E402
from provenance import commit, machine  # noqa: E402
from small_models import Block  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import ampgraph  # noqa: E402
from ampgraph import DynamicLossScale, Policy  # noqa: E402

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
STEPS = 60 if CUDA else 12
OVERFLOW_AT = STEPS // 3
SCALE = 2.0**10
COMPILERS = (("inductor", None), ("inductor", "reduce-overhead"))
BACKENDS = (("eager", None), ("aot_eager", None), *(COMPILERS if CUDA else ()))
LEVELS = ("O1", "O2")
COLUMNS = ["model", "level", "backend", "steps", "first loss", "float32", "loss", "scale", "gradients"]
COLUMNS += ["autocast's", ""]


def transformer(width: int, depth: int) -> nn.Module:
    """Blocks and a head."""
    blocks = (Block(width, max(width // 64, 1)) for _ in range(depth))
    return nn.Sequential(*blocks, nn.Linear(width, width))


def perceptron() -> nn.Module:
    """Few parameters: compilers unroll what reads a value of each."""
    return nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 64))


def convolutions(width: int, depth: int) -> nn.Module:
    """Convolutions with batch norm."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 2, 1)]
    for _ in range(depth):
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 64))


@dataclass(frozen=True)
class Task:
    """A model to train on noise.

    Attributes:
        name: How the report calls it.
        build: Makes the model.
        shape: The input's shape.
    """

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]

    def model(self) -> nn.Module:
        """Returns the model with the same weights each time, on the device."""
        torch.manual_seed(0)
        return self.build().to(DEVICE)

    def input(self) -> Tensor:
        """Returns the same input each time."""
        return torch.randn(self.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)


if CUDA:
    TASKS = (
        Task("transformer, 4 x 512", functools.partial(transformer, 512, 4), (8, 256, 512)),
        Task("convolutions, 8 x 128", functools.partial(convolutions, 128, 8), (16, 3, 64, 64)),
        Task("perceptron, 64 x 128 x 64", perceptron, (32, 64)),
    )
else:
    TASKS = (
        Task("transformer, 2 x 64", functools.partial(transformer, 64, 2), (2, 16, 64)),
        Task("convolutions, 2 x 8", functools.partial(convolutions, 8, 2), (4, 3, 16, 16)),
        Task("perceptron, 64 x 128 x 64", perceptron, (32, 64)),
    )


@dataclass(frozen=True)
class Case:
    """One way to convert one model."""

    task: int
    level: str
    backend: str
    mode: str | None
    one_graph: bool

    def cells(self) -> list[str]:
        """Returns the cells that name it."""
        backend = self.backend + (f", {self.mode}" if self.mode else "")
        return [TASKS[self.task].name, self.level, backend, "one graph" if self.one_graph else "loop"]


@contextlib.contextmanager
def no_sync() -> Iterator[None]:
    """On CUDA, every call that waits for the GPU raises."""
    if not CUDA:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def convert(case: Case) -> tuple[nn.Module, ampgraph.AmpModule]:
    """Returns the source and the converted model, with a scale that does not start at its limit."""
    policy = Policy(case.level, dtype=torch.float16, loss_scale=DynamicLossScale(init_scale=SCALE))
    source = TASKS[case.task].model()
    x = TASKS[case.task].input()
    return source, ampgraph.convert(source, (x,), policy=policy, backend=case.backend, mode=case.mode)


def loss_of(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The loss, as a function for `compile_step` too."""
    return model(x).float().square().mean()


def train(case: Case) -> tuple[float, float]:
    """Trains with an overflow on the way, without waiting for the device; returns the last loss and scale."""
    x = TASKS[case.task].input()
    _, amp = convert(case)
    optimizer = torch.optim.AdamW(amp.parameters(), lr=1e-3, fused=True)
    spoilt = torch.full_like(x, float("inf"))
    if case.one_graph:
        step = ampgraph.compile_step(amp, optimizer, loss_of)
        first = 3  # captures, compiles and records
        for _ in range(first):
            step(x)
        assert step.reason is None, step.reason
    else:
        amp.scaler.attach(optimizer)
        first = 3
        for _ in range(first):
            loss_of(amp, x).backward()
            optimizer.step()
            optimizer.zero_grad()
    with no_sync():
        for index in range(first, STEPS):
            given = spoilt if index == OVERFLOW_AT else x
            if case.one_graph:
                step(given)
                continue
            loss_of(amp, given).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=index % 2 == 0)
    return float(loss_of(amp, x)), amp.scaler.get_scale()


def plain_losses(task: Task) -> tuple[float, float]:
    """The first and the last loss of the float32 loop with the bad step left out."""
    model, x = task.model(), task.input()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    start = float(loss_of(model, x))
    for index in range(STEPS):
        if index == OVERFLOW_AT:
            continue
        loss_of(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()
    return start, float(loss_of(model, x))


def gradients(model: nn.Module, run: Callable[[], Tensor]) -> Tensor:
    """Returns all gradients of one backward as one vector."""
    run().backward()
    return torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])


def gradient_errors(case: Case) -> tuple[float, float]:
    """Errors of gradients against float32: converted, and torch's autocast with GradScaler."""
    task = TASKS[case.task]
    x, plain = task.input(), task.model()
    exact = gradients(plain, lambda: loss_of(plain, x))
    source, amp = convert(case)
    mine = gradients(source, lambda: loss_of(amp, x))
    other = task.model()
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=SCALE)

    def scaled() -> Tensor:
        with torch.autocast(DEVICE.type, dtype=torch.float16):
            out = other(x)
        return scaler.scale(out.float().square().mean())

    theirs = gradients(other, scaled) / SCALE
    mine_error, their_error = (float((g - exact).norm() / exact.norm()) for g in (mine, theirs))
    return mine_error, their_error


def check(case: Case) -> list[str]:
    """Returns the row of one case; its last cell is "ok" or says what is wrong."""
    warnings.filterwarnings("ignore")
    torch._dynamo.config.recompile_limit = 64
    try:
        start, wanted = plain_losses(TASKS[case.task])
        found, scale = train(case)
        mine, theirs = gradient_errors(case)
    except Exception as error:
        traceback.print_exc()
        line = (str(error).splitlines() or [""])[0]
        return [*case.cells(), *[""] * 6, f"**{type(error).__name__}: {line}**"]
    wrong = []
    if not abs(found - wanted) <= 0.02 * start:
        wrong.append("loss")
    if scale != SCALE / 2:
        wrong.append("scale")
    if mine > 2 * theirs + torch.finfo(torch.float16).eps:
        wrong.append("gradients")
    figures = [f"{start:.4f}", f"{wanted:.4f}", f"{found:.4f}", f"{scale:g}", f"{mine:.1e}", f"{theirs:.1e}"]
    return [*case.cells(), *figures, f"**wrong: {', '.join(wrong)}**" if wrong else "ok"]


def table(columns: list[str], rows: list[list[str]]) -> str:
    """Returns a Markdown table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows))


def main(argv: list[str] | None = None) -> int:
    """Runs the tool; returns 1 if a check does not hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--page", type=Path, help="where to write the page; default: print it")
    parser.add_argument("--processes", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    options = parser.parse_args(argv)
    kinds = [
        (task, level, *backend) for backend in BACKENDS for task in range(len(TASKS)) for level in LEVELS
    ]
    cases = [Case(*kind, one_graph) for kind in kinds for one_graph in (False, True)]
    cases = [case for case in cases if options.only in ", ".join(case.cells())]
    rows = []
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for row in pool.imap(check, cases):
            rows.append(row)
            print(*row, file=sys.stderr, flush=True)
            if options.page:  # an interrupted run leaves what it has found
                options.page.write_text(page(rows), encoding="utf-8")
    if not options.page:
        print(page(rows))
    return 1 if any(row[-1] != "ok" for row in rows) else 0


def page(rows: list[list[str]]) -> str:
    """Returns the report as Markdown."""
    where = torch.cuda.get_device_name() if CUDA else "A CPU, and small models"
    return "\n\n".join(
        [
            "# Training on a GPU" if CUDA else "# A trial run on a CPU",
            f"Written by `python tools/gpu_check.py` at commit {commit()}. {where}; {machine()}.",
            *(__doc__ or "").split("\n\n")[2:],
            f"{STEPS} steps of AdamW, scale {SCALE:g} at first. Gradients: relative error against float32.",
            table(COLUMNS, rows),
            "",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
