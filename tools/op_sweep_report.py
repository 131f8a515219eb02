"""The report of `op_sweep.py`: rates, and every op that did not simply pass, with the cause."""

from __future__ import annotations

from collections import Counter
from typing import Any

from provenance import written_by

from tests.one_op import op_names

Record = dict[str, Any]
FAILURES = ("wrong", "crash", "slow")
LIMITS = {
    "just in time": "torch.export refuses it or breaks it by itself; captured just in time it is right",
    "torch": "neither capture of torch's gives a right program, without any conversion",
    "kernel": "torch's own low-precision kernel, called by hand, gives the very same values",
}

HEAD = """# Every op

Each entry of torch's operator tests (`op_db`, torch {version}) as a model of one op, converted and compared
with the source: {samples} samples an op, evenly spread over torch's own; forward and, where there is one,
backward; float16 and bfloat16; levels {levels}.

{written_by}

Forms: all inputs float32; all low; one low; and float32 models in which all inputs, the first or all others
come from something that runs low, the result is read by something that runs low, or the op works in place on
a copy. In float16 once more with inputs times and divided by 200, near the ends of its range. One sample each
of float64, complex, integers and booleans must come through untouched.

**Tolerance.** An element may be off by `4 * (eps * |value| + spread) + eps * mean |value|`, where `spread` is
how much the float32 op's own result changes when each input moves by `eps` of itself, and `eps` is that of
the low dtype; gradients by `eps` of the incoming gradient more. Where nothing runs low, results are equal bit
for bit. What differs between two seeds is compared in dtype and shape only; what the low dtype cannot hold is
not compared.
"""


def failed(record: Record) -> bool:
    """Whether some conversion of the op was wrong."""
    return any(outcome in record["counts"] for outcome in FAILURES)


def report(records: list[Record], samples: int, levels: tuple[str, ...]) -> str:
    """Renders all records as Markdown."""
    import torch

    version = torch.__version__.split("+")[0]
    written = written_by(f"python tools/op_sweep.py --samples {samples} --output docs/results/op-sweep.md")
    text = HEAD.format(written_by=written, version=version, samples=samples, levels=" and ".join(levels))
    return (
        text + "\n" + _rates(records) + "".join(_table(records, outcome) for outcome in (*FAILURES, *LIMITS))
    )


def _rates(records: list[Record]) -> str:
    floats = [r for r in records if r["float"]]
    rest = [r for r in records if not r["float"] and r["here"]]
    runs: Counter[str] = sum((Counter(r["counts"]) for r in records), Counter())
    passed = sum(not failed(r) for r in floats)
    lines = [
        f"| entries of op_db swept, of {len(op_names())} | {len(records)} |",
        f"| with a float32 CPU kernel | {len(floats)} |",
        f"| of these converted correctly | {passed} ({100 * passed / max(len(floats), 1):.1f} %) |",
        f"| without float32, left untouched | {sum(not failed(r) for r in rest)} of {len(rest)} |",
        f"| without a CPU kernel at all | {len(records) - len(floats) - len(rest)} |",
        f"| conversions run | {sum(runs.values())} |",
        f"| with something low, within tolerance | {runs['mixed']} |",
        f"| nothing low, equal bit for bit | {runs['untouched']} |",
        f"| random, dtype and shape compared | {runs['random']} |",
    ]
    lines += [f"| {outcome} | {runs[outcome]} |" for outcome in (*LIMITS, *FAILURES)]
    return "| | |\n|---|---|\n" + "\n".join(lines) + "\n"


def _table(records: list[Record], outcome: str) -> str:
    rows = [
        (r["op"], r["counts"][outcome], f) for r in records for f in r["failures"] if f["outcome"] == outcome
    ]
    if not rows:
        return ""
    title = LIMITS.get(outcome, "failed")
    lines = [f"| {op} | {count} | {f['where']} | {_cell(f['error'])} |" for op, count, f in rows]
    head = "| op | conversions | first | what |\n|---|---|---|---|\n"
    return f"\n## {outcome.capitalize()}: {title}\n\n{head}" + "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    text = " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
    return text if len(text) <= 160 else text[:157] + "..."
