"""Checks and times converted models on a GPU, all in one go; on a CPU it runs small, to show that it works.

Usage:
    python tools/gpu_check.py                     # prints Markdown
    python tools/gpu_check.py --output docs/gpu.md

Checked, for each backend at O1 and O2 in float16: a hundred steps of a fused optimizer with an overflow on
the way, under ``torch.cuda.set_sync_debug_mode("error")`` (no step may wait for the GPU), the loss against
float32; and gradients against torch's autocast with its GradScaler. Timed, side by side in one run: a step in
float32, under autocast with GradScaler, and converted, each eager and compiled. Needs torch only.
"""

from __future__ import annotations

import argparse
import contextlib
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import ampgraph  # noqa: E402
from ampgraph import DynamicLossScale, Policy  # noqa: E402

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
STEPS = 100 if CUDA else 12
OVERFLOW_AT = STEPS // 3
ROUNDS = 30 if CUDA else 3
BACKENDS = (("eager", None), ("aot_eager", None), ("inductor", None), ("inductor", "reduce-overhead"))
LEVELS = ("O1", "O2")

Step = Callable[[Tensor], Tensor]


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Blocks and a head."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width, width // 64) for _ in range(depth)))
        self.head = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


def convolutions(width: int, depth: int) -> nn.Module:
    """Convolutions with batch norm, in pairs."""
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


def tasks() -> list[Task]:
    """Returns what is trained: large on a GPU."""
    if CUDA:
        return [
            Task("transformer, 12 x 1024, 8 x 1024 tokens", lambda: Transformer(1024, 12), (8, 1024, 1024)),
            Task("convolutions, 16 x 256, 32 x 128 px", lambda: convolutions(256, 16), (32, 3, 128, 128)),
        ]
    return [
        Task("transformer, 2 x 64", lambda: Transformer(64, 2), (2, 16, 64)),
        Task("convolutions, 2 x 8", lambda: convolutions(8, 2), (4, 3, 16, 16)),
    ]


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


def policy(level: str) -> Policy:
    """Float16 with a dynamic scale that does not start at its limit."""
    return Policy(level, dtype=torch.float16, loss_scale=DynamicLossScale(init_scale=2.0**10))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """The fused one, which takes ``found_inf`` on the device."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    """Trains with an overflow on the way, without waiting for the device; returns the last loss."""
    spoilt = torch.full_like(x, float("inf"))
    for _ in range(3):  # captures, compiles and records
        model(x).square().mean().backward()
        optimizer.zero_grad()
    with no_sync():
        for step in range(STEPS):
            loss = model(spoilt if step == OVERFLOW_AT else x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
    return model(x).square().mean().detach()


def check_training(task: Task, level: str, backend: str, mode: str | None) -> list[str]:
    """Trains converted and in float32; returns a row."""
    plain = task.model()
    wanted = plain_loss(plain, task.input())
    amp = ampgraph.convert(task.model(), (task.input(),), policy=policy(level), backend=backend, mode=mode)
    optimizer = optimizer_of(amp)
    amp.scaler.attach(optimizer)
    found = train(amp, optimizer, task.input())
    scale = amp.scaler.get_scale()
    ok = bool(torch.isclose(found, wanted, rtol=0.05, atol=1e-3)) and scale == 2.0**9
    label = backend + (f", {mode}" if mode else "")
    return [task.name, level, label, f"{wanted:.4f}", f"{found:.4f}", f"{scale:g}", "ok" if ok else "**no**"]


def plain_loss(model: nn.Module, x: Tensor) -> Tensor:
    """The float32 loop with the bad step left out."""
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        if step == OVERFLOW_AT:
            continue
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model(x).square().mean().detach()


def gradients(model: nn.Module, run: Callable[[], Tensor]) -> Tensor:
    """Returns all gradients of one backward as one vector."""
    run().backward()
    return torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])


def check_gradients(task: Task, level: str, backend: str, mode: str | None) -> list[str]:
    """Errors of gradients against float32: converted, and torch's autocast with GradScaler."""
    x, plain = task.input(), task.model()
    exact = gradients(plain, lambda: plain(x).square().mean())
    source = task.model()
    amp = ampgraph.convert(source, (x,), policy=policy(level), backend=backend, mode=mode)
    mine = gradients(source, lambda: amp(x).square().mean())
    other = task.model()
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=2.0**10)
    theirs = gradients(other, lambda: scaler.scale(autocast_loss(other, x))) / 2.0**10
    mine_error, their_error = ((g - exact).norm() / exact.norm() for g in (mine, theirs))
    ok = bool(mine_error <= 2 * their_error + torch.finfo(torch.float16).eps)
    label = backend + (f", {mode}" if mode else "")
    return [task.name, level, label, f"{mine_error:.1e}", f"{their_error:.1e}", "ok" if ok else "**no**"]


def autocast_loss(model: nn.Module, x: Tensor) -> Tensor:
    """The loss under torch's autocast."""
    with torch.autocast(DEVICE.type, dtype=torch.float16):
        out = model(x)
    return out.float().square().mean()


def steps(task: Task) -> dict[str, Step]:
    """Returns a training step for each contestant, with a new model and optimizer."""
    return {
        "float32, eager": _plain(task, lambda model: model),
        "float32, compiled": _plain(task, torch.compile),
        "autocast + GradScaler, eager": _autocast(task, lambda model: model),
        "autocast + GradScaler, compiled": _autocast(task, torch.compile),
        **{
            f"ampgraph {level}, {backend}" + (f", {mode}" if mode else ""): _converted(
                task, level, backend, mode
            )
            for level in LEVELS
            for backend, mode in BACKENDS
            if backend != "aot_eager"
        },
    }


def _plain(task: Task, wrap: Callable[[nn.Module], Callable]) -> Step:
    model = task.model()
    call, optimizer = wrap(model), optimizer_of(model)

    def step(x: Tensor) -> Tensor:
        loss = call(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def _autocast(task: Task, wrap: Callable[[nn.Module], Callable]) -> Step:
    model = task.model()
    call, optimizer = wrap(model), optimizer_of(model)
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=2.0**10)

    def step(x: Tensor) -> Tensor:
        loss = autocast_loss(call, x)  # type: ignore[arg-type]
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss

    return step


def _converted(task: Task, level: str, backend: str, mode: str | None) -> Step:
    model = task.model()
    amp = ampgraph.convert(model, (task.input(),), policy=policy(level), backend=backend, mode=mode)
    optimizer = optimizer_of(amp)
    amp.scaler.attach(optimizer)

    def step(x: Tensor) -> Tensor:
        loss = amp(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def timings(task: Task) -> list[list[str]]:
    """Times all contestants in turn, round by round; returns rows with medians and ratios."""
    contestants, x = steps(task), task.input()
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for step in contestants.values():
        for _ in range(5):
            step(x)
    for _ in range(ROUNDS):
        for name, step in contestants.items():
            seconds[name].append(timed(step, x))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    base = medians["autocast + GradScaler, compiled"]
    return [[task.name, name, f"{1e3 * m:.2f}", f"{base / m:.2f}"] for name, m in medians.items()]


def timed(step: Step, x: Tensor) -> float:
    """Seconds of one step, the device's work included."""
    if CUDA:
        torch.cuda.synchronize()
    start = time.perf_counter()
    step(x)
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def table(columns: list[str], rows: list[list[str]]) -> str:
    """Returns a Markdown table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows))


def machine() -> str:
    """Names what this runs on."""
    name = torch.cuda.get_device_name() if CUDA else f"{platform.machine()} CPU (too small to compare)"
    return f"torch {torch.__version__}, Python {platform.python_version()}, {name}"


def main(argv: list[str] | None = None) -> int:
    """Runs the tool; returns 1 if a check does not hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, help="where to write the page; default: print it")
    options = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    torch._dynamo.config.recompile_limit = 64
    cases = [(task, level, *backend) for task in tasks() for level in LEVELS for backend in BACKENDS]
    trained, compared = [], []
    for case in cases:
        print(*(str(part) for part in (case[0].name, *case[1:])), file=sys.stderr, flush=True)
        trained.append(check_training(*case))
        compared.append(check_gradients(*case))
    timed_rows = [row for task in tasks() for row in timings(task)]
    text = "\n\n".join(
        [
            "# On a GPU" if CUDA else "# A trial run on a CPU",
            f"Written by `tools/gpu_check.py`. {machine()}.",
            f"## {STEPS} steps of a fused optimizer, one of them bad"
            + (", nothing waiting for the GPU" if CUDA else ""),
            table(["model", "level", "backend", "loss float32", "loss float16", "scale", ""], trained),
            "## Gradients, relative error against float32",
            table(["model", "level", "backend", "ampgraph", "autocast", ""], compared),
            f"## Milliseconds a training step, medians of {ROUNDS}",
            table(["model", "", "ms", "times as fast as compiled autocast"], timed_rows),
            "",
        ]
    )
    if options.output:
        options.output.write_text(text)
    else:
        print(text)
    return 1 if any(row[-1] != "ok" for row in (*trained, *compared)) else 0


if __name__ == "__main__":
    sys.exit(main())
