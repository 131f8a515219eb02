"""Converts every model of the zoo under several policies, runs it, and writes what came out.

Usage:
    python tools/zoo_check.py --output docs/results/zoo.md                 # everything, 20 to 30 minutes
    python tools/zoo_check.py --family timm --modes eval
    python tools/zoo_check.py --names transformers/bert timm/resnet18

A record is made per model and mode and appended to ``--records`` (JSON lines), so an interrupted run goes on
where it stopped. A group of values is a function from a `Subject` to named values, listed in `GROUPS`.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import torch  # noqa: E402
import zoo_report  # noqa: E402
from provenance import commit  # noqa: E402

from ampgraph import AmpModule  # noqa: E402
from tests.exact_integers import differing_integers  # noqa: E402
from tests.zoo import models as zoo  # noqa: E402
from tests.zoo.measure import AUTOCAST, DRAWS, OPTIMAL, Subject, activation_cast_bytes, holds  # noqa: E402

Record = dict[str, Any]
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
ERRORS = ("output_error", "gradient_error")
RUNS = {
    "eval": ("O1 float16", "O1 bfloat16", "O2 float16", "O2 bfloat16"),
    "train": ("O1 float16", "O1 bfloat16", "O2 bfloat16"),
}


def identity(subject: Subject) -> Record:
    """The measured figures."""
    model = subject.model
    return {"model": model.name, "family": model.family, "kind": model.kind, "mode": subject.mode}


def ampgraphs_part(subject: Subject) -> Record:
    """Every level and dtype: casts, traffic, time, and the error against float32. Captures the model."""
    record: Record = {}
    for run in RUNS[subject.mode]:
        level, name = run.split()
        amp = subject.convert(OPTIMAL[level], DTYPES[name])
        if not record:
            record |= {"capture_s": subject.capture_seconds(), "nodes": len(amp.plan.decisions)}
        output_error, gradient_error = subject.errors(subject.run_converted(amp))
        errors = {"output_error": output_error, "gradient_error": gradient_error}
        wrong, compared = differing_integers(amp, *subject.args, **subject.kwargs)
        integers = {"wrong_integers": wrong, "integers": compared}
        seconds = subject.rewrite_seconds(OPTIMAL[level], DTYPES[name])
        record[run] = {**of_plan(amp), "rewrite_s": seconds, **errors, **integers}
    return record


def of_plan(amp: AmpModule) -> Record:
    """What a conversion decided."""
    return {
        "cast_bytes": activation_cast_bytes(amp.graph_module),
        "casts": amp.plan.cost.activation_casts,
        "traffic": amp.plan.cost.traffic,
        "proven": amp.plan.optimal,
    }


def of_rules(amp: AmpModule) -> Record:
    """What autocast's rule and float32 would move."""
    rules = amp.plan.baselines
    return {
        "rule_cast_bytes": rules["autocast"].activation_cast_bytes,
        "traffic": rules["autocast"].traffic,
        "fp32_traffic": rules["fp32"].traffic,
    }


def default_part(subject: Subject) -> Record:
    """What it costs to give outputs back in the dtype that the source gives them in, as is the default."""
    if subject.mode == "train":
        return {}
    defaults = {level: policy.replace(keep_io_dtypes=True) for level, policy in OPTIMAL.items()}
    amps = {level: subject.convert(policy, torch.float16) for level, policy in defaults.items()}
    return {f"{level} default": activation_cast_bytes(amp.graph_module) for level, amp in amps.items()}


def autocasts_part(subject: Subject) -> Record:
    """The same for torch's autocast: its traffic and error by its rule, its casts by the oracle."""
    record: Record = {}
    for name, dtype in DTYPES.items():
        amp = subject.convert(AUTOCAST, dtype)
        output_error, gradient_error = subject.errors(subject.run_converted(amp))
        errors = {"output_error": output_error, "gradient_error": gradient_error}
        record[f"autocast {name}"] = {**of_rules(amp), **errors}
    if subject.mode == "eval":
        result = subject.oracle(torch.float16)
        record["oracle"] = {
            "cast_bytes": result.activation_cast_bytes,
            "casts": len(result.activation_casts),
        }
    return record


def repeated(subject: Subject, record: Record) -> Record:
    """Replaces the errors of runs that break the bound on one batch by those over several batches."""
    found: Record = {}
    for run in RUNS[subject.mode]:
        level, name = run.split()
        own, theirs = record[run], record[f"autocast {name}"]
        if holds(level, DTYPES[name], _errors(own), _errors(theirs)):
            continue
        amps = [subject.convert(policy, DTYPES[name]) for policy in (OPTIMAL[level], AUTOCAST)]
        pairs = [dict(zip(ERRORS, e, strict=True)) for e in subject.errors_over_draws(*amps)]
        found[run] = own | pairs[0] | {"over_draws": {"draws": DRAWS, "autocast": pairs[1]}}
    return found


def _errors(figures: Record) -> list[float]:
    return [figures[kind] for kind in ERRORS]


GROUPS: tuple[Callable[[Subject], Record], ...] = (
    identity,
    ampgraphs_part,
    default_part,
    autocasts_part,
)


def measure(name: str, mode: str) -> Record:
    """Returns the record of one model in one mode; one that fails says why."""
    try:
        subject = Subject.of(name, mode)
        record = {key: value for group in GROUPS for key, value in group(subject).items()}
        return record | repeated(subject, record) | {"run_at": commit()}
    except Exception as error:
        first_line = (str(error).splitlines() or [""])[0]
        return {"model": name, "mode": mode, "failure": f"{type(error).__name__}: {first_line}"}


def measure_all(names: list[str], modes: list[str], path: Path) -> list[Record]:
    """Measures what ``path`` does not hold yet, reporting progress; returns all its records."""
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {(record["model"], record["mode"]) for record in records}
    for index, name in enumerate(names, 1):
        for mode in modes:
            if (name, mode) in done:
                continue
            start = time.perf_counter()
            record = measure(name, mode)
            records.append(record)
            with path.open("a") as file:
                file.write(json.dumps(record) + "\n")
            gc.collect()
            outcome = record.get("failure", "ok")
            print(
                f"[{index}/{len(names)}] {name} {mode}: {outcome} ({time.perf_counter() - start:.1f} s)",
                flush=True,
            )
    return [record for record in records if record["model"] in names and record["mode"] in modes]


def refresh(record: Record) -> Record:
    """Returns a record of eval mode with new float16 plans and timings; the results of runs stay."""
    if record["mode"] != "eval" or "failure" in record:
        return record
    subject = Subject.of(record["model"], "eval")
    new: Record = {"capture_s": subject.capture_seconds()}
    for level, policy in OPTIMAL.items():
        plan = of_plan(subject.convert(policy, torch.float16))
        seconds = subject.rewrite_seconds(policy, torch.float16)
        new[f"{level} float16"] = record[f"{level} float16"] | plan | {"rewrite_s": seconds}
    rules = of_rules(subject.convert(AUTOCAST, torch.float16))
    new |= {"autocast float16": record["autocast float16"] | rules, "planned_at": commit()}
    print(f"{record['model']}: refreshed", flush=True)
    return record | new


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--names", nargs="+", metavar="NAME", help="only these models; default: all")
    parser.add_argument("--family", choices=get_args(zoo.Family), help="only this family")
    parser.add_argument("--modes", default="eval,train", help="comma-separated; default: %(default)s")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch; default: %(default)s")
    parser.add_argument(
        "--records", type=Path, default=Path("zoo_records.jsonl"), help="default: %(default)s"
    )
    parser.add_argument("--refresh", action="store_true", help="remake the plans of existing records")
    parser.add_argument("--output", type=Path, help="where to write the report; default: print it")
    parser.add_argument("--readme", type=Path, help="README whose zoo section to fill as well")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Runs the tool; returns 1 if a model failed or a bound does not hold."""
    options = parse(argv)
    torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore")
    names = options.names or zoo.names(options.family)
    records = measure_all(names, options.modes.split(","), options.records)
    if options.refresh:
        records = [refresh(record) for record in records]
        options.records.write_text("".join(json.dumps(record) + "\n" for record in records))
    report = zoo_report.report(records)
    if options.output:
        options.output.write_text(report)
    else:
        print(report)
    if options.readme:
        zoo_report.fill_readme(options.readme, records)
    return 1 if zoo_report.violations(records) else 0


if __name__ == "__main__":
    sys.exit(main())
