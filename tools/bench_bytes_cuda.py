"""Counts the bytes of training steps in the kernels that Inductor schedules for a GPU, without a GPU.

Usage (``make bytes-cuda`` makes the environment and writes the page):
    python tools/bench_bytes_cuda.py                                      # every model, printed
    python tools/bench_bytes_cuda.py bert unet --records out/cuda.json    # these
    python tools/bench_bytes_cuda.py --records out/cuda.json --output docs/results/bytes-cuda.md

Needs a CUDA build of torch and gcc. See `gpu_stubs.py` for what stands in for the device; no kernel runs and
no code is generated. Records are kept after each model. A model takes two to five minutes of one core.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import gpu_stubs

if __name__ == "__main__":
    gpu_stubs.restart_with_stubs()

import torch
from bench_bytes import VARIANTS, all_low, counted
from bytes_models import CONVOLUTIONAL, MODELS, Made, channels_last, made
from bytes_report import ALL_LOW, CAST, LAID_OUT, WHOLE, Record, cuda_page
from provenance import commit

from ampgraph.cli.torchvision_shim import allow_torchvision

LABELS = (*WHOLE, "O1, torch's lists", "O1" + CAST)
POLICIES = {label: VARIANTS[label].policy for label in LABELS if label in VARIANTS}
# Shows what float32 gradients of weights gain.
POLICIES["O1" + CAST] = VARIANTS["O1"].policy.replace(wide_weight_gradients=False)


def measured(name: str) -> Record:
    """Returns, by variant, the bytes by backend; see `bench_bytes.py`."""
    model, args = made(name)
    model, args = model.to("cuda"), tuple(a.to("cuda") for a in args)
    record = {ALL_LOW: {"fused": all_low(model, args)}} | _measured(name, (model, args), LABELS)
    if name in CONVOLUTIONAL:
        laid_out = _measured(f"{name}, channels last", channels_last(model, args), WHOLE)
        record |= {LAID_OUT + label: counts for label, counts in laid_out.items()}
    return record


def _measured(title: str, given: Made, labels: Sequence[str]) -> Record:
    known: dict[str, list[int]] = {}
    return {
        label: counted(
            f"{title}, {label}",
            given,
            POLICIES[label],
            ("fused", "step") if label in WHOLE else ("fused",),
            known,
        )
        for label in labels
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("models", nargs="*", help="names of models; default: all")
    parser.add_argument("--records", type=Path, help="JSON file to which every model's figures go")
    parser.add_argument("--output", type=Path, help="page to write")
    options = parser.parse_args()
    if unknown := set(options.models) - set(MODELS):
        parser.error(f"unknown models {sorted(unknown)}; legal: {', '.join(MODELS)}")
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    allow_torchvision()
    gpu_stubs.compile_for_stub()
    at = commit()
    known = json.loads(options.records.read_text()) if options.records and options.records.exists() else {}
    records: dict[str, Record] = known.get(at, {})
    failed: dict[str, str] = {}
    wanted = [name for name in options.models or MODELS if name not in records]
    for number, name in enumerate(wanted, 1):
        print(f"{number}/{len(wanted)} {name}", file=sys.stderr)
        try:
            records[name] = measured(name)
        except Exception as error:  # the page names it
            failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
            print(f"{name}: {failed[name]}", file=sys.stderr)
        if options.records:
            options.records.parent.mkdir(parents=True, exist_ok=True)
            options.records.write_text(json.dumps({**known, at: records}))
    text = cuda_page(records, failed, at)
    if options.output:
        options.output.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
