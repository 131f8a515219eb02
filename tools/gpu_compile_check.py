"""Compiles converted models for a CUDA device on a machine without one. Nothing runs and nothing is timed.

Usage (``make gpu-compile-check`` makes the environment):
    python tools/gpu_compile_check.py                                    # every model, prints the page
    python tools/gpu_compile_check.py unet --output docs/results/gpu-compile-check.md
    python tools/gpu_compile_check.py --no-cubin                         # Inductor alone

Needs a CUDA build of torch, which brings Triton and ptxas, and gcc. See `gpu_stubs.py` for what stands in for
the device. Capture, plan, AOTAutograd and Inductor run as on a GPU, and Triton compiles every kernel.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import gpu_stubs

if __name__ == "__main__":
    gpu_stubs.restart_with_stubs()

import torch
from gpu_compile_models import MODELS
from inductor_record import GRAPHS, Graph, backend, record
from provenance import written_by
from torch import Tensor, nn
from torch._inductor.codecache import PyCodeCache
from torch._subclasses.fake_tensor import FakeTensorMode

import ampgraph

COMMAND = "make gpu-compile-check"
DTYPES = (torch.float16, torch.bfloat16)
Forward = Callable[[Tensor], Tensor]


class UnderAutocast(nn.Module):
    """A model under torch.autocast; returns float32, as a converted model does."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model, self.dtype = model, dtype

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cuda", self.dtype):
            result = self.model(x)
        return result.float()


def contestants(model: nn.Module, x: Tensor) -> dict[tuple[str, str], Callable[[], Forward]]:
    """Returns, by level and dtype, what makes a forward. float16 brings its loss scale."""
    found: dict[tuple[str, str], Callable[[], Forward]] = {
        ("float32", "float32"): lambda: torch.compile(model, backend=backend)
    }
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        under = UnderAutocast(model, dtype)
        found["autocast", name] = lambda under=under: torch.compile(under, backend=backend)  # type: ignore[misc]
        for level in ("O1", "O2"):
            found[level, name] = lambda level=level, dtype=dtype: ampgraph.convert(  # type: ignore[misc]
                model, (x,), policy=level, dtype=dtype, backend=backend
            )
    return found


def graphs_of(name: str, key: tuple[str, str]) -> list[Graph]:
    """Compiles forward and backward of one contestant.

    Raises:
        RuntimeError: A gradient is missing or has another dtype than its parameter.
    """
    build, make_input = MODELS[name]
    torch._dynamo.reset()
    start = len(GRAPHS)
    with FakeTensorMode():
        with torch.device("cuda"):
            model, x = build(), make_input()
        step = contestants(model, x)[key]()
        step(x).square().mean().backward()
        wrong = [n for n, p in model.named_parameters() if p.grad is None or p.grad.dtype != p.dtype]
    if wrong:
        raise RuntimeError(f"no gradient, or one of another dtype: {wrong}")
    return GRAPHS[start:]


def compile_kernel(name: str, source: str) -> None:
    """Compiles one Triton kernel for the target, all its configurations.

    Raises:
        RuntimeError: The result is not for the target.
    """
    tuner = getattr(PyCodeCache.load(source), name)
    tuner.precompile(warm_cache_only=True)
    for result in tuner.compile_results:
        if result.kernel.metadata.target.arch != gpu_stubs.ARCH or not result.kernel.asm["cubin"]:
            raise RuntimeError("compiled for another target")


# -- the page ----------------------------------------------------------------------------------------


@dataclass
class Row:
    """The result of one contestant."""

    model: str
    level: str
    dtype: str
    graphs: list[Graph]
    error: str = ""

    def cells(self, broken: dict[str, str]) -> str:
        """Returns the line of the table; ``broken`` are kernels that failed, by source."""
        kernels = [_without_name(*kernel) for graph in self.graphs for kernel in graph.kernels]
        errors = [self.error] if self.error else sorted({broken[k] for k in kernels if k in broken})
        counts = [sum(graph.calls.values()) for graph in self.graphs]
        fallbacks = sorted(
            {call for graph in self.graphs for call in graph.calls if call.startswith("fallback")}
        )
        cells = [
            self.model,
            self.level,
            self.dtype,
            "; ".join(errors) or "compiled",
            " + ".join(str(len(graph.kernels)) for graph in self.graphs),
            " + ".join(map(str, counts)),
            " + ".join(str(graph.fused) for graph in self.graphs),
            " + ".join(str(graph.alone) for graph in self.graphs),
            f"{sum(graph.bytes for graph in self.graphs) / 2**20:.1f}",
            ", ".join(f.removeprefix("fallback ") for f in fallbacks) or "none",
        ]
        return f"| {' | '.join(cells)} |"


COLUMNS = (
    "model",
    "level",
    "dtype",
    "result",
    "Triton kernels",
    "library calls",
    "casts inside kernels",
    "kernels that only cast",
    "MiB",
    "fallbacks to ATen",
)


def _without_name(name: str, source: str) -> str:
    return re.sub(rf"\b{name}\b", "KERNEL", source)


def measured(name: str) -> list[Row]:
    """Returns a row for each contestant of one model."""
    rows = []
    for level, dtype in contestants(nn.Identity(), torch.zeros(1)):
        start = time.perf_counter()
        try:
            row = Row(name, level, dtype, graphs_of(name, (level, dtype)))
        except Exception as error:  # it is the result: the table shows it, and the others go on
            row = Row(name, level, dtype, [], f"{type(error).__name__}: {str(error).splitlines()[0][:200]}")
        rows.append(row)
        print(f"{row.cells({})} {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    return rows


def compile_kernels(rows: list[Row]) -> tuple[int, dict[str, str]]:
    """Compiles each distinct kernel once; returns their number, and the errors by source."""
    distinct: dict[str, tuple[str, str]] = {}
    for row in rows:
        for graph in row.graphs:
            for kernel in graph.kernels:
                distinct.setdefault(_without_name(*kernel), kernel)
    broken = {}
    for number, (source, kernel) in enumerate(distinct.items()):
        try:
            compile_kernel(*kernel)
        except Exception as error:  # it is the result: the table shows it, and the others go on
            broken[source] = f"{kernel[0]}: {type(error).__name__}: {str(error).splitlines()[0][:200]}"
        if number % 20 == 0:
            print(f"kernel {number} of {len(distinct)}", file=sys.stderr, flush=True)
    return len(distinct), broken


def page(rows: list[Row], kernels: int | None, broken: dict[str, str]) -> str:
    """Returns the Markdown page."""
    cubins = "Triton did not compile the kernels."
    if kernels is not None:
        made = f"{kernels - len(broken)} became cubins for sm_{gpu_stubs.ARCH}"
        cubins = f"Of {kernels} distinct Triton kernels, {made}."
    lines = [
        "# Compiled for a GPU, without a GPU",
        "",
        f"{written_by(COMMAND, 'triton')}",
        "**Nothing ran on a GPU**, nothing is timed, and no result was compared: a stub stands in for the",
        "driver of an H100, and tensors are fake. The table shows whether converted models pass through",
        "capture, plan, AOTAutograd, Inductor and Triton for CUDA, and which kernels come out.",
        "",
        f"{cubins} Counts are forward + backward. float16 at O1 and O2 includes the loss scale and its",
        "finite checks; MiB are what all kernels of a forward and backward read and write, by Inductor's",
        "count. Fake parameters get no low copies: these graphs cast weights; graphs of real models have",
        "fewer kernels that only cast.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|{' --- |' * len(COLUMNS)}",
        *[row.cells(broken) for row in rows],
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("models", nargs="*", help=f"of {', '.join(MODELS)}; default: all")
    parser.add_argument("--no-cubin", action="store_true", help="do not compile the kernels")
    parser.add_argument("--output", type=Path, help="the page to write")
    options = parser.parse_args()
    if unknown := sorted(set(options.models) - MODELS.keys()):
        parser.error(f"unknown models {', '.join(unknown)}; there are {', '.join(MODELS)}")
    warnings.filterwarnings("ignore")
    gpu_stubs.compile_for_stub()
    record()
    rows = [row for name in options.models or MODELS for row in measured(name)]
    kernels, broken = (None, {}) if options.no_cubin else compile_kernels(rows)
    text = page(rows, kernels, broken)
    print(text)
    if options.output:
        options.output.write_text(text, encoding="utf-8")
    return 1 if broken or any(row.error for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
