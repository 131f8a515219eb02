"""Host time of a call for CUDA, without a GPU: what Python and the dispatcher take, kernels left out.

Usage (``make host-cuda`` makes the environment and writes the page):
    python tools/bench_host_cuda.py --output docs/results/host-cuda.md

Needs a CUDA build of torch and gcc. Each call goes the way that it goes on a GPU, to the launch of its
kernels. There `gpu_stubs.py` stands in for the runtime and for cuBLAS, and does nothing. No value is right.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import gpu_stubs

if __name__ == "__main__":
    gpu_stubs.restart_with_stubs()

import torch
from bench_host import page, rows, scaled_rows
from provenance import written_by
from small_models import MODELS

# cuDNN has no stub, so networks of convolutions are left out.
NAMES = [name for name in MODELS if name not in ("residual network", "ConvNeXt", "U-Net")]
REMARK = (
    "on the same device.\n"
    "**Nothing ran on a GPU**: a stub takes launches of kernels and calls of cuBLAS, and does nothing. "
    "So the time is that of Python and the dispatcher, without the time that a driver takes for a launch. "
    "autocast launches more kernels."
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", choices=NAMES, action="append", help="all by default")
    parser.add_argument("--output", type=Path, help="the page to write")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.backends.cuda.enable_cudnn_sdp(False)
    warnings.filterwarnings("ignore")
    names = options.model or NAMES
    found = *rows(names, "cuda"), scaled_rows(names, "cuda")
    text = page("Host time of a call for CUDA", written_by("make host-cuda"), REMARK, *found)
    if options.output:
        options.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
