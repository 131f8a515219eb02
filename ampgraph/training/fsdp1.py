"""Refuses torch's first FSDP, ``FullyShardedDataParallel``.

Its modules hold views of one flat parameter while they run. No loss-scaling boundary can tell these from
activations, so gradients would leave the model scaled.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn

from ..errors import CaptureError

# What both FSDPs set on the modules whose parameters they hold.
MANAGED = "_is_fsdp_managed_module"
_ADVICE = (
    "Use FSDP2: ampgraph.convert_blocks(model, which), where which is a glob of its blocks, 'layers.*' for "
    "instance, then torch.distributed.fsdp.fully_shard on each block and on the model."
)


def refuse_fsdp1(model: nn.Module) -> None:
    """Raises an error for a model that `FullyShardedDataParallel` wraps, around it or inside.

    Raises:
        CaptureError: It does; the message says to use FSDP2.
    """
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if not hasattr(fsdp, "FullyShardedDataParallel"):  # not loaded, or another thread is loading it
        return
    for path, module in model.named_modules():
        if isinstance(module, fsdp.FullyShardedDataParallel):
            where = f"{path!r} is" if path else "the model is"
            raise CaptureError(f"{where} wrapped in FullyShardedDataParallel (FSDP1). {_ADVICE}")
        held = (*vars(module).values(), *module._parameters.values())
        if any(isinstance(v, Tensor) and isinstance(v._base, fsdp.FlatParameter) for v in held):
            raise CaptureError(
                f"{type(module).__name__}: FullyShardedDataParallel (FSDP1) holds its parameters. {_ADVICE}"
            )
