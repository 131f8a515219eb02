"""Captures every model of the zoo, measures it, and writes a table.

Usage:
    python tools/zoo_check.py --family timm --modes eval --dtypes float16
    python tools/zoo_check.py --names transformers/bert timm/resnet18
    python tools/zoo_check.py --output docs/zoo.md

A group of columns is a function from a `Case` to named values, listed in `COLUMN_GROUPS`.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from tests.zoo import models as zoo  # noqa: E402
from tests.zoo.oracle import autocast_oracle  # noqa: E402

Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One captured model in one mode, to be measured in one dtype.

    Attributes:
        model: The registry's entry.
        module: The model itself, in the mode that was captured.
        mode: "train" or "eval".
        dtype: The low dtype.
        args: Positional inputs.
        kwargs: Keyword inputs.
        graph_module: The pre-dispatch ATen graph.
        capture_seconds: How long ``torch.export`` took.
    """

    model: zoo.ZooModel
    module: torch.nn.Module
    mode: str
    dtype: torch.dtype
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    graph_module: torch.fx.GraphModule
    capture_seconds: float


def model_columns(case: Case) -> Row:
    """What was measured."""
    return {
        "model": case.model.name,
        "kind": case.model.kind,
        "mode": case.mode,
        "dtype": str(case.dtype).removeprefix("torch."),
    }


def capture_columns(case: Case) -> Row:
    """Size of the graph and the time it took to capture."""
    return {"nodes": len(case.graph_module.graph.nodes), "capture s": f"{case.capture_seconds:.2f}"}


def oracle_columns(case: Case) -> Row:
    """The casts that torch's CUDA autocast makes."""
    start = time.perf_counter()
    result = autocast_oracle(case.graph_module, case.args, case.kwargs, case.dtype)
    return {
        "oracle s": f"{time.perf_counter() - start:.2f}",
        "autocast casts": len(result.casts),
        "of activations": len(result.activation_casts),
        "autocast bytes": result.activation_cast_bytes,
    }


COLUMN_GROUPS: tuple[Callable[[Case], Row], ...] = (model_columns, capture_columns, oracle_columns)


def cases(model: zoo.ZooModel, modes: list[str], dtypes: list[torch.dtype]) -> Iterator[Case]:
    """Yields a model's cases; one capture serves all dtypes of a mode."""
    module, args, kwargs = model.seeded()
    for mode in modes:
        module.train(mode == "train")
        start = time.perf_counter()
        graph_module = torch.export.export(module, args, kwargs, strict=False).module()
        seconds = time.perf_counter() - start
        for dtype in dtypes:
            yield Case(model, module, mode, dtype, args, kwargs, graph_module, seconds)


def measure(names: list[str], modes: list[str], dtypes: list[torch.dtype]) -> tuple[list[Row], list[str]]:
    """Measures the named models one after the other, reporting progress.

    Returns:
        One row a case, and one line for each model that failed.
    """
    rows: list[Row] = []
    failures: list[str] = []
    for index, name in enumerate(names, 1):
        start = time.perf_counter()
        outcome = "ok"
        try:
            for case in cases(zoo.get(name), modes, dtypes):
                rows.append({key: value for group in COLUMN_GROUPS for key, value in group(case).items()})
        except Exception as error:
            first_line = (str(error).splitlines() or [""])[0]
            outcome = f"{type(error).__name__}: {first_line}"
            failures.append(f"{name}: {outcome}")
        gc.collect()
        print(f"[{index}/{len(names)}] {name}: {outcome} ({time.perf_counter() - start:.1f} s)", flush=True)
    return rows, failures


def markdown(rows: list[Row]) -> str:
    """Returns the rows as a Markdown table; a cell that a row lacks is left empty."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [columns, ["---"] * len(columns), *([str(row.get(key, "")) for key in columns] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def write(path: Path, rows: list[Row], failures: list[str]) -> None:
    """Writes the table, and below it the models that failed."""
    text = f"# The zoo\n\nWritten by `tools/zoo_check.py`, torch {torch.__version__}.\n\n{markdown(rows)}"
    if failures:
        text += "\n## Failures\n\n" + "".join(f"- {line}\n" for line in failures)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--names", nargs="+", metavar="NAME", help="only these models; default: all")
    parser.add_argument("--family", choices=get_args(zoo.Family), help="only this family")
    parser.add_argument("--modes", default="train,eval", help="comma-separated; default: %(default)s")
    parser.add_argument("--dtypes", default="float16,bfloat16", help="comma-separated; default: %(default)s")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch; default: %(default)s")
    parser.add_argument("--output", type=Path, help="where to write the table; default: print it")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Runs the tool; returns 1 if any model failed."""
    options = parse(argv)
    torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore")
    names = options.names or zoo.names(options.family)
    dtypes = [getattr(torch, name) for name in options.dtypes.split(",")]
    rows, failures = measure(names, options.modes.split(","), dtypes)
    if options.output:
        write(options.output, rows, failures)
    else:
        print(markdown(rows))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
