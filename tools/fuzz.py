"""Converts random modules and checks every invariant; prints the smallest module that breaks one, as code.

Usage:
    python tools/fuzz.py --examples 5000 --seed 1           # about 30 minutes
    python tools/fuzz.py --examples 300 --levels O2 --just-in-time
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from hypothesis import HealthCheck, given, seed, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from tests.fuzz_checks import NotConvertible, check_just_in_time, check_program  # noqa: E402
from tests.random_modules import Program, programs  # noqa: E402


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
    return parser.parse_args(argv)


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
    return 1 if fuzz.failing else 0


if __name__ == "__main__":
    sys.exit(main())
