"""Runs the zoo's models on a GPU, converted and under torch.autocast itself, and compares both with float32.

    python tools/zoo_gpu.py --records zoo_gpu.jsonl                    # on the machine with the GPU
    python tools/zoo_gpu.py --records zoo_gpu.jsonl --page docs/results/zoo-gpu.md   # anywhere

Each model runs forward and backward, without dropout, with batch norm's own statistics of the batch, on the
eager backend, on one batch. Errors are relative 2-norms over all outputs, and over all gradients. The bound
is that of `tests/zoo/measure.py`: 1.5 (O1) or 2 (O2) times autocast's error, or 2 eps of the low dtype. One
batch can break it by chance: a rounding that moves a ReLU's input past zero changes gradients by more.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import torch  # noqa: E402
from provenance import commit, machine, without_folders  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils._pytree import tree_map_only  # noqa: E402

from ampgraph.cli.torchvision_shim import allow_torchvision  # noqa: E402
from tests.zoo import models as zoo  # noqa: E402
from tests.zoo.measure import OPTIMAL, Run, Subject, holds  # noqa: E402

Record = dict[str, Any]
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
IN_TRAINING = (nn.modules.batchnorm._BatchNorm, nn.RNNBase)  # cuDNN's RNNs have a backward there alone


def subject_on(name: str, device: str) -> Subject:
    """Returns a model with its inputs on a device, with no dropout."""
    made = Subject.of(name, "eval")
    module = made.module.to(device)
    for part in module.modules():
        part.training = isinstance(part, IN_TRAINING)
        if isinstance(part, nn.RNNBase):
            part.dropout = 0.0
    args, kwargs = tree_map_only(torch.Tensor, lambda x: x.to(device), (made.args, made.kwargs))
    state = {key: value.clone() for key, value in module.state_dict().items()}
    return Subject(made.model, module, args, kwargs, "eval", _state=state)


def measure(job: tuple[str, str]) -> Record:
    """Returns the record of one model."""
    name, device = job
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    start = time.perf_counter()
    record: Record = {"model": name}
    try:
        allow_torchvision()
        subject = subject_on(name, device)
        for dtype, low in DTYPES.items():
            record[f"autocast {dtype}"] = subject.errors(autocast_run(subject, low))
            for level, policy in OPTIMAL.items():
                record[f"{level} {dtype}"] = found(subject, level, policy, low)
    except Exception as error:
        lines = str(error).splitlines() or [""]
        record["failure"] = f"{type(error).__name__}: {lines[0]}"
    return record | {"seconds": time.perf_counter() - start}


def found(subject: Subject, level: str, policy: Any, low: torch.dtype) -> Any:
    """Returns the errors of one conversion, or why it failed."""
    try:
        return subject.errors(subject.run(subject.convert(policy, low)))
    except Exception as error:
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def autocast_run(subject: Subject, low: torch.dtype) -> Run:
    """Runs the source under torch's autocast."""
    device = next(iter(subject.module.parameters())).device.type

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device, low):
            return subject.module(*args, **kwargs)

    return subject.run(call)


def verdict(record: Record, level: str, dtype: str) -> str:
    """Returns "ok", or what is wrong."""
    own, theirs = record[f"{level} {dtype}"], record[f"autocast {dtype}"]
    if isinstance(own, str):
        return own
    return "ok" if holds(level, DTYPES[dtype], own, theirs) else "**more than the bound**"


def page(records: list[Record]) -> str:
    """Returns the page as Markdown."""
    heads = [r for r in records if "model" not in r]
    models = sorted((r for r in records if "model" in r), key=lambda r: str(r["model"]))
    commits, machines = (", ".join(dict.fromkeys(h[key] for h in heads)) for key in ("commit", "machine"))
    runs = [(level, dtype) for dtype in DTYPES for level in OPTIMAL]
    lines = [
        "# The zoo on a GPU",
        "",
        f"Written by `python tools/zoo_gpu.py` at commit {commits}. {machines}.",
        "",
        *(__doc__ or "").split("\n\n")[2].splitlines(),
        "",
        "| model | " + " | ".join(f"{d} autocast | O1 | O2" for d in DTYPES) + " | |",
        "| --- " * (3 * len(DTYPES) + 2) + "|",
    ]
    for record in models:
        if "failure" in record:
            lines.append(f"| {record['model']} | {record['failure']} |" + " |" * 3 * len(DTYPES))
            continue
        cells = [_pair(record[f"{way} {d}"]) for d in DTYPES for way in ("autocast", *OPTIMAL)]
        bad = {v for run in runs if (v := verdict(record, *run)) != "ok"}
        lines.append(f"| {record['model']} | {' | '.join(cells)} | {'; '.join(sorted(bad)) or 'ok'} |")
    missing = sorted({*zoo.names()} - {record["model"] for record in models})
    if missing:
        lines += ["", f"Not run: {', '.join(missing)}."]
    return without_folders("\n".join([*lines, ""]))


def _pair(errors: Any) -> str:
    return "failed" if isinstance(errors, str) else " / ".join(f"{e:.1e}" for e in errors)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--names", nargs="+", help="only these models; default: all")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--processes", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--records", type=Path, nargs="+", required=True, help="JSON lines; machine first")
    parser.add_argument("--page", type=Path, help="writes the page from the records, and measures nothing")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    options = parse(argv)
    if options.page:
        records = [json.loads(line) for path in options.records for line in path.read_text().splitlines()]
        options.page.write_text(page(records), encoding="utf-8")
        return
    names = options.names or [*zoo.names(), *zoo.more_names()]
    where = torch.cuda.get_device_name() if options.device == "cuda" else options.device
    context = multiprocessing.get_context("spawn")
    with options.records[0].open("w") as file, context.Pool(options.processes) as pool:
        print(json.dumps({"commit": commit(), "machine": f"{where}; {machine()}"}), file=file, flush=True)
        jobs = [(name, options.device) for name in names]
        for index, record in enumerate(pool.imap_unordered(measure, jobs), 1):
            print(json.dumps(record), file=file, flush=True)
            print(
                f"[{index}/{len(jobs)}] {record['model']} ({record['seconds']:.1f} s)",
                record.get("failure", ""),
                flush=True,
            )


if __name__ == "__main__":
    main()
