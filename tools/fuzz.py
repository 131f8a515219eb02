"""Converts random modules and checks every invariant; prints the smallest module that breaks one, as code.

Usage:
    python tools/fuzz.py --examples 5000 --seed 1           # about 20 minutes
    python tools/fuzz.py --examples 300 --levels O2 --just-in-time
    python tools/fuzz.py --examples 5000 --records out/fuzz.jsonl --output docs/results/fuzz.md
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import torch  # noqa: E402
from hypothesis import HealthCheck, given, seed, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from provenance import commit, written_by  # noqa: E402

from tests.fuzz_checks import NotConvertible, check_just_in_time, check_program  # noqa: E402
from tests.random_modules import Program, programs  # noqa: E402

PAGE = """# Random modules

Modules that hypothesis writes (branches, shared tensors, in-place ops, views, tuples, mixed dtypes,
guards, buffers that forward writes), each converted, run forward and backward and held against the
float32 module: structure, shapes, dtypes and shared memory of outputs; values and gradients within a
bound from what the float32 module itself changes by when its values move by one rounding (not at O3);
what was written into inputs and buffers. Ahead of time also: that converting again changes nothing
and, at O1, that nothing is less precise and nothing moves more bytes than the autocast rule. A run
stops at the first module that breaks an invariant. Not convertible are modules that fail in float32,
that torch.export refuses or captures wrongly.

{written_by}

**{checked} modules checked, {broken} broken.**

| capture | seed | levels | most lines | modules | not convertible | broken | torch | Python | commit |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
{rows}
"""


class Fuzz:
    """A run over random programs.

    Attributes:
        counts: How many programs came to which end, by level.
        failing: The last program that broke an invariant: the smallest, when the run is over.
    """

    def __init__(self, just_in_time: bool) -> None:
        self.check = check_just_in_time if just_in_time else check_program
        self.counts: Counter[str] = Counter()
        self.failing: tuple[Program, str] | None = None
        self.start = time.perf_counter()

    def __call__(self, program: Program, level: str) -> None:
        torch._dynamo.reset()
        try:
            outcome = self.check(program, level)
        except NotConvertible as reason:
            outcome = f"not convertible ({str(reason).split(':')[0]})"
        except Exception:
            self.failing = (program, level)
            raise
        self.counts[f"{level} {outcome}"] += 1
        done = sum(self.counts.values())
        if done % 100 == 0:
            print(f"{done} programs, {time.perf_counter() - self.start:.0f} s", flush=True)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--examples", type=int, default=500, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=14, help="most lines of a module; default: %(default)s")
    parser.add_argument("--levels", default="O1,O2,O3", help="comma-separated; default: %(default)s")
    parser.add_argument("--just-in-time", action="store_true", help="capture by torch.compile's front end")
    parser.add_argument("--records", type=Path, help="JSON lines: what this and earlier runs counted")
    parser.add_argument("--output", type=Path, help="where to write a page of the records")
    return parser.parse_args(argv)


def record_of(options: argparse.Namespace, fuzz: Fuzz) -> dict[str, Any]:
    """Returns what one run was and what it counted."""
    return {
        "capture": "just in time" if options.just_in_time else "ahead of time",
        "seed": options.seed,
        "levels": options.levels,
        "steps": options.steps,
        "counts": dict(fuzz.counts),
        "broken": int(fuzz.failing is not None),
        "minutes": round((time.perf_counter() - fuzz.start) / 60, 1),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit(),
    }


def report(records: list[dict[str, Any]]) -> str:
    """Returns the page."""
    rows = [
        f"| {r['capture']} | {r['seed']} | {r['levels'].replace(',', ', ')} | {r['steps']} | "
        f"{sum(r['counts'].values())} | {_refused(r['counts'])} | {r['broken']} | "
        f"{r['torch']} | {r['python']} | {r.get('commit', '-')} |"
        for r in records
    ]
    checked = sum(sum(r["counts"].values()) - _refused(r["counts"]) for r in records)
    broken = sum(r["broken"] for r in records)
    written = written_by("python tools/fuzz.py --output docs/results/fuzz.md")
    return PAGE.format(written_by=written, checked=checked, broken=broken, rows="\n".join(rows))


def _refused(counts: dict[str, int]) -> int:
    return sum(count for outcome, count in counts.items() if "not convertible" in outcome)


def keep(record: dict[str, Any], path: Path) -> list[dict[str, Any]]:
    """Writes the record, in the place of an earlier one of the same run, and returns all."""
    earlier = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    key = ("capture", "seed", "levels", "steps", "torch")
    records = [r for r in earlier if any(r[k] != record[k] for k in key)] + [record]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return records


def main(argv: list[str] | None = None) -> int:
    """Runs the tool; returns 1 if an invariant was broken."""
    options = parse(argv)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    fuzz = Fuzz(options.just_in_time)
    run = settings(
        max_examples=options.examples,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )(
        seed(options.seed)(
            given(programs(options.steps), st.sampled_from(options.levels.split(",")))(fuzz.__call__)
        )
    )
    try:
        run()
    except Exception as error:
        if fuzz.failing is None:
            raise
        program, level = fuzz.failing
        print(f"\n{level} breaks:\n\n{program}\n{type(error).__name__}: {error}")
    for outcome, count in sorted(fuzz.counts.items()):
        print(f"{count:6} {outcome}")
    record = record_of(options, fuzz)
    records = keep(record, options.records) if options.records else [record]
    if options.output:
        options.output.write_text(report(records))
    return 1 if fuzz.failing else 0


if __name__ == "__main__":
    sys.exit(main())
