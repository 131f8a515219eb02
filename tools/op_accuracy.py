"""The error of each white, gray and clear op that runs low, over wide ranges: do the op lists agree with it?

Usage:
    python tools/op_accuracy.py --output docs/results/op-accuracy.md    # about two minutes
    python tools/op_accuracy.py --ops gelu softmax

Each entry of torch's operator tests whose op is in a list runs on the samples, rounded to the low dtype,
times powers of ten: once in the low dtype and once in float32. So the error is the op's own; rounding its
inputs is not part of it. The exit status is 1 where a class disagrees with the measurement and `REASONS`
does not say why.
"""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import torch  # noqa: E402
from provenance import written_by  # noqa: E402
from torch import Tensor  # noqa: E402
from torch._ops import OpOverload  # noqa: E402
from torch.utils._pytree import tree_leaves, tree_map_only  # noqa: E402

from ampgraph.ops.lists import OpClass, OpLists  # noqa: E402
from tests.one_op import DTYPES, _calls, op_db  # noqa: E402

SCALES = (1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0)
SAMPLES = 3
# An op is exact up to this many roundings: one of its result, and those of its intermediate values.
ROUNDINGS = 4.0
CLASSES = (OpClass.WHITE, OpClass.GRAY, OpClass.CLEAR)
# The results are not initialised.
NO_VALUES = ("aten.empty_like", "aten.new_empty", "aten.new_empty_strided")
_PARTIAL = (
    "partial sums, or products before they are subtracted, leave float16's range although the "
    "result fits. Low "
    "is where its time is saved; `check_numerics` names such an overflow, and bfloat16 has none"
)
_PRODUCTS = (
    "a difference of products, each of which may leave float16's range although the result "
    "fits; at O1 it runs "
    "low only beside low inputs, as `a * b - c * d` does"
)
_ONE_ELEMENT = (
    "a norm over a single element: the mean is the element, and their difference, zero in "
    "float32, is the mean's "
    "rounding times 1/sqrt(eps). No model gains by such a norm; over more elements the error is one rounding"
)
# Why an op is in its class although it measures worse.
REASONS: dict[str, str] = {
    **dict.fromkeys(
        (
            "aten.addbmm",
            "aten.conv_transpose1d",
            "aten.conv_transpose2d",
            "aten.conv_transpose3d",
            "aten.linalg_vecdot",
        ),
        _PARTIAL,
    ),
    **dict.fromkeys(("aten.cross", "aten.linalg_cross"), _PRODUCTS),
    **dict.fromkeys(("aten.layer_norm", "aten.native_layer_norm"), _ONE_ELEMENT),
    "aten.gradient": (
        "with a tensor of spacings it multiplies spacings, which leave float16's range at 800; "
        "with spacings of "
        "that size, keep it in float32 by a rule"
    ),
}


@dataclass
class Measured:
    """One op in one dtype.

    Attributes:
        worst: The largest error of a result, in roundings: the 2-norm of the difference over half an eps
            times that of the float32 result.
        scale: The scale where it was found.
        lost: Results that are not finite although float32's fits the low dtype, of all.
        runs: How many results were compared.
        refused: Calls that the low kernel refuses.
    """

    worst: float = 0.0
    scale: float = 1.0
    lost: int = 0
    runs: int = 0
    refused: int = 0


@dataclass
class Row:
    """One op of the lists."""

    op: str
    cls: OpClass
    reason: str
    found: dict[str, Measured] = field(default_factory=dict)

    @property
    def is_exact(self) -> bool:
        """Whether running it low adds no more than roundings of its result."""
        return all(m.worst <= ROUNDINGS and not m.lost for m in self.found.values())


def entries() -> Iterator[tuple[str, OpOverload, Any]]:
    """Yields (name, ATen op, entry) of each entry of op_db whose op the lists know."""
    seen: set[str] = set()
    for entry in op_db():
        packet = getattr(torch.ops.aten, entry.aten_name or "", None)
        if packet is None or torch.float32 not in entry.supported_dtypes("cpu"):
            continue
        target = getattr(packet, packet.overloads()[0])
        name = f"aten.{entry.aten_name}"
        random = torch.Tag.nondeterministic_seeded in target.tags and "attention" not in name
        if name not in seen and not random and name not in NO_VALUES:
            seen.add(name)
            yield name, target, entry


def measure(entry: Any, dtype: torch.dtype) -> Measured:
    """Measures one op in one dtype."""
    found = Measured()
    for args, kwargs in _calls(entry, torch.float32, SAMPLES):
        for scale in SCALES:
            low = tree_map_only(Tensor, lambda t, s=scale: _low(t, s, dtype), (args, kwargs))
            wide = tree_map_only(Tensor, lambda t: t.float() if t.dtype == dtype else t, low)
            _compare(found, entry.op, low, wide, scale, dtype)
    return found


def _low(tensor: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    return (tensor.detach() * scale).to(dtype) if tensor.dtype == torch.float32 else tensor.detach()


def _compare(found: Measured, op: Any, low: Any, wide: Any, scale: float, dtype: torch.dtype) -> None:
    try:
        true = tree_leaves(op(*wide[0], **wide[1]))
    except (RuntimeError, ValueError, IndexError):  # a scale that the op does not take, such as a probability
        return
    try:
        ours = tree_leaves(op(*low[0], **low[1]))
    except (RuntimeError, NotImplementedError, ValueError):  # no kernel, or one that wants other dtypes
        found.refused += 1
        return
    info = torch.finfo(dtype)
    for a, b in zip(ours, true, strict=True):
        if not isinstance(b, Tensor) or b.dtype != torch.float32 or not b.numel() or a.dtype != dtype:
            continue
        a, fits = a.float(), b.isfinite() & (b.abs() <= info.max)
        found.runs += 1
        found.lost += int((fits & ~a.isfinite()).any())
        counted = fits & a.isfinite()
        norm = float(b.masked_fill(~counted, 0).double().norm())
        # Below the normal numbers, the spacing is that of the smallest.
        norm = max(norm, info.smallest_normal * math.sqrt(b.numel()))
        error = float((a - b).masked_fill(~counted, 0).double().norm()) / norm / (info.eps / 2)
        if error > found.worst:
            found.worst, found.scale = error, scale


def measured(only: list[str] | None) -> list[Row]:
    """Measures all ops of the lists."""
    lists, rows = OpLists.default(), []
    for name, target, entry in entries():
        rule = lists.lookup(target)
        if rule is None or rule.cls not in CLASSES or (only and name.removeprefix("aten.") not in only):
            continue
        row = Row(name, rule.cls, rule.reason)
        for label, dtype in DTYPES.items():
            found = measure(entry, dtype)
            if found.runs:
                row.found[label] = found
        if row.found:
            rows.append(row)
    return sorted(rows, key=lambda r: (CLASSES.index(r.cls), r.op))


def reason_of(row: Row) -> str | None:
    """Returns why an op that measures worse is in its class."""
    return REASONS.get(row.op)


def report(rows: list[Row]) -> str:
    """Returns the page."""
    exact = [r for r in rows if r.is_exact]
    parts = [
        "# How accurate each op is when it runs low",
        f"The {len(rows)} white, gray and clear ops of the default lists that torch's operator "
        f"tests have samples "
        f"of. Each runs on up to {SAMPLES} samples, rounded to the low dtype, times "
        f"{', '.join(f'{s:g}' for s in SCALES)}: in the low dtype, and on the same numbers in "
        f"float32. The error is "
        "the 2-norm of the difference over that of the float32 result, in units of half an eps: "
        "one rounding of "
        "the result is at most 1. Elements count whose float32 value fits the low dtype; *lost* "
        "are results with "
        "such an element that is not finite.",
        written_by("python tools/op_accuracy.py --output docs/results/op-accuracy.md"),
        f"An op agrees with its class where its error is at most {ROUNDINGS:g} roundings and "
        f"nothing is lost: "
        f"{len(exact)} of {len(rows)} do.",
        "## Ops that measure worse, and why they are in their class",
        _table([r for r in rows if not r.is_exact], with_reason=True) or "None.",
        "## All ops",
        _table(rows, with_reason=False),
    ]
    return "\n\n".join(parts) + "\n"


def _table(rows: list[Row], with_reason: bool) -> str:
    if not rows:
        return ""
    head = "| op | class | float16 | bfloat16 |" + (" why |" if with_reason else "")
    lines = [head, "|---|---|---:|---:|" + ("---|" if with_reason else "")]
    for row in rows:
        cells = [f"`{row.op}`", row.cls.value, *(_cell(row.found.get(label)) for label in DTYPES)]
        if with_reason:
            cells.append(reason_of(row) or "**no reason is stated**")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(found: Measured | None) -> str:
    if found is None:
        return "no kernel"
    lost = f", {found.lost} of {found.runs} lost" if found.lost else ""
    at = f" (at {found.scale:g})" if found.worst > ROUNDINGS else ""
    return f"{found.worst:.1f}{at}{lost}"


def main(argv: list[str] | None = None) -> int:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ops", nargs="+", metavar="OP", help="only these, without aten.")
    parser.add_argument("--output", type=Path, help="where to write the page; default: print it")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    rows = measured(options.ops)
    page = report(rows)
    if options.output:
        options.output.write_text(page)
    else:
        print(page)
    unexplained = [row.op for row in rows if not row.is_exact and reason_of(row) is None]
    if unexplained:
        print("no reason is stated for", ", ".join(unexplained), file=sys.stderr)
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
