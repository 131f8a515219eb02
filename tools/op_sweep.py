"""Converts every op of torch's own operator tests as a model of one op, and writes what came out.

Usage:
    python tools/op_sweep.py --output docs/results/op-sweep.md    # all of op_db, 30 minutes on two cores
    python tools/op_sweep.py --names softmax 'nn.functional.*' --levels O3

Each op runs forward and backward on a few of its samples, in the forms of `tests.one_op`, in float16 and
bfloat16, at O1 and O2 unless told otherwise. A record per op is appended to ``--records`` (JSON lines), so
an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import op_sweep_report  # noqa: E402
import torch  # noqa: E402
from provenance import commit  # noqa: E402

from ampgraph.errors import did_you_mean  # noqa: E402
from tests import one_op  # noqa: E402
from tests.one_op import Case, Unusable, cases_of, first_line, name_of, op_db, op_names  # noqa: E402
from tests.one_op_checks import Finding, KernelError, TorchError, check, check_just_in_time  # noqa: E402

Record = dict[str, Any]
SECONDS_PER_CHECK = 120


class Slow(Exception):
    """One check took too long."""


def sweep(name: str, samples: int, levels: tuple[str, ...]) -> Record:
    """Runs every form of a few samples of one op."""
    signal.signal(signal.SIGALRM, _too_slow)
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    op = next(op for op in op_db() if name_of(op) == name)
    record: Record = {
        "op": name,
        "float": torch.float32 in op.supported_dtypes(one_op.DEVICE),
        "counts": {},
        "failures": [],
    }
    counts: Counter[str] = Counter()
    for case, where in _usable(op, samples):
        for level in levels:
            outcome, error = _outcome(case, level)
            counts[outcome] += 1
            if error and not any(f["outcome"] == outcome for f in record["failures"]):
                record["failures"].append({"outcome": outcome, "where": f"{where}, {level}", "error": error})
    return record | {"counts": dict(counts), "here": bool(op.supported_dtypes(one_op.DEVICE))}


def _usable(op: Any, samples: int) -> Iterator[tuple[Case, str]]:
    for make, where in cases_of(op, samples):
        signal.alarm(SECONDS_PER_CHECK)
        try:
            case = make()
        except (Unusable, Slow):
            continue
        finally:
            signal.alarm(0)
        yield case, where


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


def sweep_all(
    names: list[str], path: Path, samples: int, levels: tuple[str, ...], processes: int, device: str = "cpu"
) -> list[Record]:
    """Sweeps the ops that ``path`` lacks, each in a separate process; returns all records of this code."""
    here = commit()
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    records = [r for r in records if r.get("commit") == here and not here.endswith("+changes")]
    done = {record["op"] for record in records}
    todo = [name for name in names if name not in done]
    path.parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes, maxtasksperchild=40) as pool, path.open("a") as file:
        for index, record in enumerate(pool.imap_unordered(_Sweep(samples, levels, device), todo), 1):
            record["commit"] = here
            records.append(record)
            file.write(json.dumps(record) + "\n")
            file.flush()
            failures = "; ".join(
                f"{f['outcome']} ({f['where']}): {f['error'][:100]}" for f in record["failures"]
            )
            seconds = time.perf_counter() - start
            print(f"[{index}/{len(todo)} {seconds:.0f} s] {record['op']}: {failures or 'ok'}", flush=True)
    return [record for record in records if record["op"] in names]


class _Sweep:
    """`sweep` with its options, for worker processes."""

    def __init__(self, samples: int, levels: tuple[str, ...], device: str) -> None:
        self.samples, self.levels, self.device = samples, levels, device

    def __call__(self, name: str) -> Record:
        one_op.DEVICE = self.device
        try:
            return sweep(name, self.samples, self.levels)
        except Exception as error:
            failure = {
                "outcome": "crash",
                "where": "samples",
                "error": f"{type(error).__name__}: {first_line(error)}",
            }
            return {"op": name, "float": True, "here": True, "counts": {"crash": 1}, "failures": [failure]}


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--names", nargs="+", metavar="NAME", help="only these ops (globs); default: all")
    parser.add_argument("--samples", type=int, default=4, help="samples of each op; default: %(default)s")
    parser.add_argument("--levels", default="O1,O2", help="comma-separated; default: %(default)s")
    parser.add_argument("--device", default="cpu", help="default: %(default)s")
    parser.add_argument("--processes", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--records", type=Path, default=ROOT / "out/op_sweep.jsonl", help="read and extended")
    parser.add_argument("--output", type=Path, help="where to write the report; default: print it")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Runs the tool; returns 1 if an op failed."""
    options = parse(argv)
    patterns = options.names or ["*"]
    names = [name for name in op_names() if any(fnmatchcase(name, p) for p in patterns)]
    if not names:
        near = did_you_mean(patterns[0].removeprefix("aten."), op_names())
        print(f"op_sweep: no op is named {' or '.join(patterns)}.{near}", file=sys.stderr)
        return 2
    levels = tuple(options.levels.split(","))
    records = sweep_all(names, options.records, options.samples, levels, options.processes, options.device)
    report = op_sweep_report.report(sorted(records, key=lambda r: r["op"]), options.samples, levels)
    if options.output:
        options.output.write_text(report)
    else:
        print(report)
    return 1 if any(op_sweep_report.failed(record) for record in records) else 0


if __name__ == "__main__":
    sys.exit(main())
