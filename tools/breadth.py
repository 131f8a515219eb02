"""Converts every model of the registries both ways, runs it forward and backward, and writes what came out.

Usage:
    python tools/breadth.py --output docs/results/breadth.md    # everything, one to two hours on two cores
    python tools/breadth.py --names 'transformers/*' --modes eval
    python tools/breadth.py --names own/vae --ways ahead

The tool appends one record per model and mode to ``--records`` (JSON lines), so an interrupted run continues
where it stopped. It also tries a failing model without ampgraph, to find the cause of the failure.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import math
import multiprocessing
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import breadth_report  # noqa: E402
import torch  # noqa: E402
from provenance import commit  # noqa: E402

import ampgraph  # noqa: E402
from ampgraph import AmpModule, Policy, StaticLossScale  # noqa: E402
from ampgraph.errors import AheadOfTimeError  # noqa: E402
from ampgraph.marks import META_KEY  # noqa: E402
from tests.zoo import models as zoo  # noqa: E402
from tests.zoo.cpu_kernels import layer_norm_sums_in_float32  # noqa: E402
from tests.zoo.measure import AUTOCAST, FLOOR, Run, Subject, holds  # noqa: E402

Record = dict[str, Any]
RUNS = {"eval": (("O1", "float16"), ("O2", "bfloat16")), "train": (("O1", "bfloat16"),)}
WAYS = ("ahead", "just in time")
SECONDS_PER_MODEL = 900
# Tried in turn until all gradients are finite, as a dynamic scale would.
SCALES = (2.0**10, 2.0**4, 1.0, 2.0**-8)
# The same model, captured by torch alone in float32, differs from eager by the order of its sums.
FLOAT32_ERROR = 1e-3


class Finding(Exception):
    """A converted model ran, but not as it should."""


class Partly(Exception):
    """A part of the model runs unconverted."""


class Unfit(Exception):
    """What the model computes is not finite in the low dtype, by the autocast rule either."""


class Kernel(Exception):
    """A CPU kernel of torch causes the error; with its CUDA kernel it would be within the bound."""


class Slow(Exception):
    """One model took too long."""


def measure(job: tuple[str, str], ways: tuple[str, ...] = WAYS) -> Record:
    """Returns the record of one model in one mode."""
    _quiet()
    name, mode = job
    signal.signal(signal.SIGALRM, _too_slow)
    start = time.perf_counter()
    record: Record = {"model": name, "mode": mode}
    try:
        signal.alarm(SECONDS_PER_MODEL)
        subject = Subject.of(name, mode)
        record |= {"family": subject.model.family, "kind": subject.model.kind}
        record |= {way: _way(subject, way) for way in ways}
    except Exception as error:
        record["source"] = _first_line(error)
    finally:
        signal.alarm(0)
    gc.collect()
    return record | {"seconds": round(time.perf_counter() - start, 1)}


def _way(subject: Subject, way: str) -> Record:
    """The result of one way of capture: an outcome, its cause, and figures for each level that ran."""
    assert subject.reference.is_finite
    record: Record = {"outcome": "ok"}
    try:
        for level, dtype in RUNS[subject.mode]:
            record[f"{level} {dtype}"] = _run(subject, way, level, dtype)
    except Partly as error:
        return record | {"outcome": "partly", "cause": str(error)}
    except Unfit as error:
        return record | {"outcome": "dtype", "cause": str(error)}
    except Kernel as error:
        return record | {"outcome": "kernel", "cause": str(error)}
    except AheadOfTimeError as error:
        return record | _refused(subject, way, error)
    except Slow:
        raise
    except Exception as error:
        record["cause"] = str(error) if isinstance(error, Finding) else _first_line(error)
        alone = torch_alone(subject, way)
        if alone is not None:
            return record | {"outcome": "torch", "cause": alone}
        return record | {"outcome": "wrong" if isinstance(error, Finding) else "crash"}
    return record


def _refused(subject: Subject, way: str, error: AheadOfTimeError) -> Record:
    """The outcome of a refused capture: torch's, if torch alone fails too, else ampgraph's own choice."""
    alone = torch_alone(subject, way)
    if alone is not None:
        return {"outcome": "torch", "cause": alone}
    return {"outcome": "refused", "cause": _first_line(error)}


def _run(subject: Subject, way: str, level: str, dtype_name: str) -> Record:
    dtype = getattr(torch, dtype_name)
    for scale in SCALES if dtype is torch.float16 else (None,):
        amp = convert(subject, way, Policy(level, loss_scale=scale and StaticLossScale(scale)), dtype)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            run = subject.run(amp)
        if run.is_finite:
            break
    _check_form(subject, run)
    record: Record = {"errors": subject.errors(run)}
    if not max(record["errors"]) <= FLOOR * torch.finfo(dtype).eps:
        record |= _beside_autocast(subject, amp, way, level, dtype)
    _check_captured([str(warning.message) for warning in told])
    return record | _bytes(amp, level)


def _beside_autocast(subject: Subject, amp: AmpModule, way: str, level: str, dtype: torch.dtype) -> Record:
    """The errors beside those of the rule of torch's autocast; over several batches if one is not enough."""
    autocast = convert(subject, way, AUTOCAST, dtype)
    mine, theirs = subject.errors(subject.run(amp)), subject.errors(subject.run(autocast))
    if not holds(level, dtype, mine, theirs):
        mine, theirs = subject.errors_over_draws(amp, autocast)
    if [math.isfinite(m) for m in mine] == [math.isfinite(t) for t in theirs] != [True, True]:
        raise Unfit(f"{level} {dtype}: not finite, nor by the autocast rule")
    if holds(level, dtype, mine, theirs):
        return {"errors": mine, "autocasts_errors": theirs}
    found = f"{level} {dtype}: {_errors(mine, theirs, dtype)}"
    with layer_norm_sums_in_float32():
        mine, theirs = subject.errors_over_draws(amp, autocast)
    if holds(level, dtype, mine, theirs):
        raise Kernel(f"{found}; with layer_norm's sums in float32: {_errors(mine, theirs, dtype)}")
    raise Finding(found)


def _errors(mine: tuple[float, float], theirs: tuple[float, float], dtype: torch.dtype) -> str:
    unit = torch.finfo(dtype).eps
    outputs, gradients = (f"{m / unit:.1f} eps ({t / unit:.1f})" for m, t in zip(mine, theirs, strict=True))
    return f"error of outputs (autocast's) {outputs}, of gradients {gradients}"


def convert(subject: Subject, way: str, policy: Policy, dtype: torch.dtype) -> AmpModule:
    """Converts a model one way; just in time nothing is captured before the first call."""
    if way == "ahead":
        return subject.convert(policy, dtype)
    torch._dynamo.reset()
    return ampgraph.convert(subject.module, policy=policy, dtype=dtype, backend="eager")


def _check_form(subject: Subject, run: Run) -> None:
    """Output as the source's, and a gradient of the parameter's dtype wherever the source has one."""
    if run.form != subject.reference.form:
        raise Finding(f"output is {_shown(run.form)}, the source's {_shown(subject.reference.form)}")
    if missing := sorted(run.grads.keys() ^ subject.reference.grads.keys()):
        raise Finding(f"gradients only on one side: {', '.join(missing[:3])}")
    for name, dtype in run.grad_dtypes.items():
        if dtype != subject.module.get_parameter(name).dtype:
            raise Finding(f"gradient of {name} is {dtype}")


def _shown(form: tuple[Any, ...]) -> str:
    kind, _, leaves = form
    return f"{kind.__name__} of {', '.join(str(leaf).removeprefix('torch.') for leaf in leaves)}"


def _check_captured(told: list[str]) -> None:
    for message in told:
        if "runs unconverted" in message or "ran unconverted" in message:
            raise Partly(message.splitlines()[0])


def _bytes(amp: AmpModule, level: str) -> Record:
    """Bytes of activation casts and modelled traffic of all graphs, and the same of the autocast rule."""
    plans = [graph_module.meta[META_KEY].plan for graph_module in amp.graph_modules]
    own = [plan.cost for plan in plans]
    rule = [plan.baselines["autocast"] for plan in plans]
    record = {
        "graphs": len(plans),
        "cast_bytes": sum(cost.activation_cast_bytes for cost in own),
        "rule_cast_bytes": sum(cost.activation_cast_bytes for cost in rule),
        "traffic": sum(cost.traffic for cost in own),
        "rule_traffic": sum(cost.traffic for cost in rule),
    }
    if level == "O1" and record["cast_bytes"] > record["rule_cast_bytes"]:
        raise Finding(f"casts {record['cast_bytes']} bytes, the autocast rule {record['rule_cast_bytes']}")
    return record


def torch_alone(subject: Subject, way: str) -> str | None:
    """Returns why the model cannot be captured without ampgraph, or None if it can and gives the same."""
    try:
        run = subject.run(_captured_by_torch(subject, way))
        if run.form != subject.reference.form:
            return f"output is {_shown(run.form)}, the source's {_shown(subject.reference.form)}"
        if run.grads.keys() != subject.reference.grads.keys():
            return "some parameters get no gradient"
        error = max(subject.errors(run))
    except Slow:
        raise
    except Exception as error:
        return _first_line(error)
    return None if error < FLOAT32_ERROR else f"float32 result is off by {error:.1e}"


def _captured_by_torch(subject: Subject, way: str) -> Any:
    if way == "just in time":
        torch._dynamo.reset()
        return torch.compile(subject.module, backend="eager")
    program = torch.export.export(subject.module, subject.args, subject.kwargs, strict=False)
    return program.module(check_guards=False)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


def _quiet() -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)


def _too_slow(*_: object) -> None:
    raise Slow(f"more than {SECONDS_PER_MODEL} s")


@contextlib.contextmanager
def _measured(
    jobs: list[tuple[str, str]], ways: tuple[str, ...], processes: int
) -> Iterator[Iterator[Record]]:
    """Measures in separate processes that are restarted regularly, because captures leak memory."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes, maxtasksperchild=40) as pool:
        yield pool.imap_unordered(partial(measure, ways=ways), jobs)


def measure_all(jobs: list[tuple[str, str]], options: argparse.Namespace) -> list[Record]:
    """Measures what the records of this commit do not hold yet, reporting progress; returns all of them."""
    path, here = options.records, commit()
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    records = [record for record in records if record.get("commit") == here and "+" not in here]
    done = {(record["model"], record["mode"]) for record in records}
    todo = [job for job in jobs if job not in done]
    with (
        _measured(todo, tuple(options.ways.split(",")), options.processes) as measured,
        path.open("a") as file,
    ):
        for index, record in enumerate(measured, 1):
            record["commit"] = here
            records.append(record)
            file.write(json.dumps(record) + "\n")
            file.flush()
            outcome = "; ".join(breadth_report.outcomes(record))
            print(
                f"[{index}/{len(todo)} {record['seconds']} s] {record['model']} {record['mode']}: {outcome}",
                flush=True,
            )
    return records


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--names", nargs="+", default=["*"], metavar="NAME", help="only these (globs); default: all"
    )
    parser.add_argument("--modes", default="eval,train", help="comma-separated; default: %(default)s")
    parser.add_argument("--ways", default=",".join(WAYS), help="comma-separated; default: %(default)s")
    parser.add_argument("--processes", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--records", type=Path, default=Path("breadth.jsonl"), help="default: %(default)s")
    parser.add_argument("--output", type=Path, help="where to write the report; default: print it")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Runs the tool; returns 1 if a model failed that torch can capture."""
    options = parse(argv)
    names = [n for n in (*zoo.more_names(), *zoo.names()) if any(fnmatchcase(n, p) for p in options.names)]
    jobs = [(name, mode) for name in names for mode in options.modes.split(",")]
    records = [r for r in measure_all(jobs, options) if (r["model"], r["mode"]) in set(jobs)]
    report = breadth_report.report(records)
    if options.output:
        options.output.write_text(report)
    else:
        print(report)
    return 1 if breadth_report.failures(records) else 0


if __name__ == "__main__":
    sys.exit(main())
