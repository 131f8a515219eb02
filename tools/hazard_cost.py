"""What the analysis of hazards pins on every model of the zoo, and what that costs in modelled traffic.

Usage:
    python tools/hazard_cost.py --output docs/results/hazards.md      # everything, about 12 minutes
    python tools/hazard_cost.py --names 'transformers/*' --models 20

Each model is captured once and planned with and without hazards. A record per model is appended to
``--records`` (JSON lines), so an interrupted run goes on where it stopped. Nothing is run.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import re
import sys
import time
import warnings
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import torch  # noqa: E402
from provenance import commit, without_folders, written_by  # noqa: E402

import ampgraph  # noqa: E402
from ampgraph import AmpModule, NoLossScale, Policy  # noqa: E402
from ampgraph.plan import Plan  # noqa: E402
from ampgraph.report.replan import replanned  # noqa: E402
from tests.zoo import models as zoo  # noqa: E402

Record = dict[str, Any]
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
PLANS = [f"{level} {dtype}" for level in ("O1", "O2") for dtype in DTYPES]


def measured(name: str) -> Record:
    """Plans one model under every level and dtype, with hazards and without."""
    model, args, kwargs = zoo.get(name).seeded()
    model.eval()
    how = {"backend": "eager", "capture": "ahead of time", "policy": _policy("O1 float16", True)}
    amp = ampgraph.convert(model, args, kwargs, **how)
    record: Record = {"model": name, "nodes": len(amp.plan.decisions)}
    for plan in PLANS:
        with_hazards, without = (_planned(amp, plan, hazards) for hazards in (True, False))
        record[plan] = {
            "traffic": with_hazards.cost.traffic / without.cost.traffic,
            "pinned": {n: d.reason for n, d in with_hazards.decisions.items() if d.by == "hazard"},
        }
    return record


def _policy(plan: str, hazards: bool) -> Policy:
    level, dtype = plan.split()
    return Policy(level, DTYPES[dtype], loss_scale=NoLossScale(), hazards=hazards)


def _planned(amp: AmpModule, plan: str, hazards: bool) -> Plan:
    return replanned(amp.graph_module, amp.plan, _policy(plan, hazards))[1]


def geometric_mean(values: list[float]) -> float:
    """Returns the geometric mean; 1 of nothing."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else 1.0


def report(records: list[Record]) -> str:
    """Returns the page."""
    good = [r for r in records if "failure" not in r]
    lines = [
        "# What hazards pin",
        written_by("python tools/hazard_cost.py --output docs/results/hazards.md"),
        "Traffic is modelled: bytes that ops and casts of one forward move, with hazards over without.",
        f"## Traffic of {len(good)} models",
        "| | geometric mean | largest | models with a pinned node |\n| --- | --- | --- | --- |",
    ]
    for plan in PLANS:
        ratios = {r["model"]: r[plan]["traffic"] for r in good}
        most = max(ratios, key=ratios.__getitem__)
        pinned = sum(bool(r[plan]["pinned"]) for r in good)
        lines[-1] += f"\n| {plan} | {geometric_mean(list(ratios.values())):.4f} "
        lines[-1] += f"| {ratios[most]:.3f} ({most}) | {pinned} |"
    lines.append("## Every pinned node")
    lines += [section for plan in PLANS if (section := _pinned(plan, good))]
    failed = [f"- {r['model']}: {without_folders(r['failure'])}" for r in records if "failure" in r]
    if failed:
        lines += ["## Not captured", "\n".join(failed)]
    return "\n\n".join(lines) + "\n"


def _pinned(plan: str, records: list[Record]) -> str:
    parts = [f"### {plan}"]
    for record in records:
        found = record[plan]
        if not found["pinned"]:
            continue
        by_reason: dict[str, list[str]] = {}
        for node, reason in found["pinned"].items():
            by_reason.setdefault(_folded(reason), []).append(f"`{node}`")
        rows = [f"- {', '.join(nodes)}: {reason}" for reason, nodes in by_reason.items()]
        title = f"{record['model']}, {len(found['pinned'])} of {record['nodes']} nodes"
        parts.append(f"{title}, traffic {found['traffic']:.3f}\n\n" + "\n".join(rows))
    return "\n\n".join(parts) if len(parts) > 1 else ""


def _folded(reason: str) -> str:
    """Returns a reason without the numbers at the end of nodes' names, which differ from layer to layer."""
    return re.sub(r"_\d+'", "'", reason)


def main(argv: list[str] | None = None) -> int:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--names", nargs="+", default=["*"], metavar="GLOB", help="which models")
    parser.add_argument("--models", type=int, default=10_000, help="stop after so many, to go on later")
    parser.add_argument(
        "--records", type=Path, default=ROOT / "out" / "hazards.jsonl", help="read and extended"
    )
    parser.add_argument("--output", type=Path, help="where to write the page; default: only print the ratios")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    options.records.parent.mkdir(parents=True, exist_ok=True)
    kept = options.records.read_text().splitlines() if options.records.exists() else []
    here = commit()
    records = {r["model"]: r for r in map(json.loads, kept) if r.get("commit") == here and "+" not in here}
    names = [n for n in zoo.names() if any(fnmatchcase(n, p) for p in options.names)]
    for name in [n for n in names if n not in records][: options.models]:
        start = time.process_time()
        try:
            records[name] = measured(name)
        except Exception as error:  # the page lists it
            records[name] = {"model": name, "failure": f"{type(error).__name__}: {str(error)[:200]}"}
        records[name]["commit"] = here
        with options.records.open("a") as file:
            file.write(json.dumps(records[name]) + "\n")
        print(f"{name:48s}", _summary(records[name]), f"{time.process_time() - start:.1f} s", flush=True)
        gc.collect()
    found = [records[n] for n in names if n in records]
    if options.output:
        options.output.write_text(report(found))
    return 0


def _summary(record: Record) -> str:
    if "failure" in record:
        return record["failure"]
    return "  ".join(
        f"{plan} {record[plan]['traffic']:.3f} {len(record[plan]['pinned']):3d}" for plan in PLANS
    )


if __name__ == "__main__":
    sys.exit(main())
