"""Converts every op of torch's own operator tests as a model of one op, and writes what came out.

Usage:
    python tools/op_sweep.py --output docs/op-sweep.md      # all of op_db, about 30 minutes on two cores
    python tools/op_sweep.py --names softmax 'nn.functional.*'

Each op runs forward and backward on a few of its samples, in the forms of `tests.one_op`, in float16 and
bfloat16, at O1 and O2. A record per op is appended to ``--records`` (JSON lines), so an interrupted run
goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import random
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import op_sweep_report  # noqa: E402
import torch  # noqa: E402
from torch.testing._internal import common_methods_invocations as op_tests  # noqa: E402

from ampgraph import CaptureError  # noqa: E402
from tests.one_op import (  # noqa: E402
    DTYPES,
    FORMS,
    OTHER_DTYPES,
    Case,
    Finding,
    KernelError,
    TorchError,
    Unusable,
    check,
    check_just_in_time,
    first_line,
    make_case,
)

Record = dict[str, Any]
LEVELS = ("O1", "O2")
SECONDS_PER_CHECK = 120

# Samples of random ops reset the seed around each call, which would hide that they are random.
op_tests.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)


class Slow(Exception):
    """One check took too long."""


def op_names() -> list[str]:
    """Names of all entries of op_db, variants included."""
    return [_name(op) for op in op_tests.op_db]


def _name(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def sweep(name: str, samples: int) -> Record:
    """Runs every form of a few samples of one op."""
    signal.signal(signal.SIGALRM, _too_slow)
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    op = next(op for op in op_tests.op_db if _name(op) == name)
    record: Record = {"op": name, "float": torch.float32 in op.supported_dtypes("cpu"), "counts": {}, "failures": []}
    counts: Counter[str] = Counter()
    for case, where in _cases(op, samples):
        for level in LEVELS:
            outcome, error = _outcome(case, level)
            counts[outcome] += 1
            if error and not any(f["outcome"] == outcome for f in record["failures"]):
                record["failures"].append({"outcome": outcome, "where": f"{where}, {level}", "error": error})
    return record | {"counts": dict(counts), "cpu": bool(op.supported_dtypes("cpu"))}


def _cases(op: Any, samples: int) -> Iterator[tuple[Case, str]]:
    for dtype in (torch.float32, *OTHER_DTYPES):
        if dtype not in op.supported_dtypes("cpu"):
            continue
        wide = dtype is torch.float32
        grad = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
        for index, sample in enumerate(_samples(op, dtype, samples if wide else 1)):
            call = ((sample.input, *sample.args), sample.kwargs)
            for form in FORMS if wide else ("float32",):
                for low in DTYPES if wide else ("float16",):
                    where = f"sample {index}, {form}, {low}" if wide else f"{dtype} sample"
                    yield from _usable(lambda: make_case(op.op, call, form, DTYPES[low], grad), where)  # noqa: B023
            if wide and op.inplace_variant is not None:
                in_place = _on_a_copy(op.inplace_variant)
                for low in DTYPES:
                    where = f"sample {index}, in place, {low}"
                    yield from _usable(lambda: make_case(in_place, call, "after low", DTYPES[low], grad), where)  # noqa: B023


def _usable(make: Callable[[], Case], where: str) -> Iterator[tuple[Case, str]]:
    signal.alarm(SECONDS_PER_CHECK)
    try:
        yield make(), where
    except (Unusable, Slow):
        return
    finally:
        signal.alarm(0)


def _on_a_copy(function: Callable) -> Callable:
    def call(first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        copied = first + 0
        function(copied, *args, **kwargs)
        return copied

    return call


def _samples(op: Any, dtype: torch.dtype, limit: int) -> list[Any]:
    """Returns up to ``limit`` samples, evenly spread over those that torch's own tests use."""
    torch.manual_seed(0)
    random.seed(0)
    found = list(op.sample_inputs("cpu", dtype))
    if len(found) <= limit:
        return found
    return [found[round(i * (len(found) - 1) / max(limit - 1, 1))] for i in range(limit)]


def _outcome(case: Case, level: str) -> tuple[str, str]:
    """Returns the outcome of one conversion, and what went wrong if something did."""
    signal.alarm(SECONDS_PER_CHECK)
    try:
        return check(case, level), ""
    except TorchError as error:
        return _just_in_time(case, level, str(error))
    except KernelError as error:
        return "kernel", str(error)
    except Finding as error:
        return "wrong", str(error)
    except Slow:
        return "slow", f"more than {SECONDS_PER_CHECK} s"
    except Exception as error:
        return "crash", f"{type(error).__name__}: {first_line(error)}"
    finally:
        signal.alarm(0)


def _just_in_time(case: Case, level: str, reason: str) -> tuple[str, str]:
    """What torch.export cannot capture, or breaks by itself, must run just in time."""
    try:
        check_just_in_time(case, level)
    except Exception as error:
        return "torch", f"{reason}; just in time: {type(error).__name__}: {first_line(error)}"
    return "just in time", reason


def _too_slow(*_: object) -> None:
    raise Slow


def sweep_all(names: list[str], path: Path, samples: int, processes: int) -> list[Record]:
    """Sweeps what ``path`` does not hold yet, in processes of their own; returns all its records."""
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {record["op"] for record in records}
    todo = [name for name in names if name not in done]
    start = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes, maxtasksperchild=40) as pool, path.open("a") as file:
        for index, record in enumerate(pool.imap_unordered(_Sweep(samples), todo), 1):
            records.append(record)
            file.write(json.dumps(record) + "\n")
            file.flush()
            failures = "; ".join(f"{f['outcome']} ({f['where']}): {f['error'][:100]}" for f in record["failures"])
            seconds = time.perf_counter() - start
            print(f"[{index}/{len(todo)} {seconds:.0f} s] {record['op']}: {failures or 'ok'}", flush=True)
    return [record for record in records if record["op"] in names]


class _Sweep:
    """`sweep` with its options, for worker processes."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __call__(self, name: str) -> Record:
        try:
            return sweep(name, self.samples)
        except Exception as error:
            failure = {"outcome": "crash", "where": "samples", "error": f"{type(error).__name__}: {first_line(error)}"}
            return {"op": name, "float": True, "cpu": True, "counts": {"crash": 1}, "failures": [failure]}


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--names", nargs="+", metavar="NAME", help="only these ops (globs); default: all")
    parser.add_argument("--samples", type=int, default=4, help="samples of each op; default: %(default)s")
    parser.add_argument("--processes", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--records", type=Path, default=Path("op_sweep.jsonl"), help="default: %(default)s")
    parser.add_argument("--output", type=Path, help="where to write the report; default: print it")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Runs the tool; returns 1 if an op failed."""
    options = parse(argv)
    patterns = options.names or ["*"]
    names = [name for name in op_names() if any(fnmatchcase(name, p) for p in patterns)]
    records = sweep_all(names, options.records, options.samples, options.processes)
    report = op_sweep_report.report(sorted(records, key=lambda r: r["op"]), options.samples)
    if options.output:
        options.output.write_text(report)
    else:
        print(report)
    return 1 if any(op_sweep_report.failed(record) for record in records) else 0


if __name__ == "__main__":
    sys.exit(main())
