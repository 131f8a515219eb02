"""What torch itself cannot capture, by Python version: expected to fail there and nowhere else."""

from __future__ import annotations

import sys

import pytest
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from ampgraph import CaptureError

# In training they skip layers at random: ``if torch.rand([]) < p``.
LAYERDROP = frozenset(
    {"transformers/bart", "transformers/opt", "transformers/wav2vec2", "transformers/whisper"}
)


def marks(name: str, training: bool) -> list[pytest.MarkDecorator]:
    """Returns the pytest marks for capturing a model of the zoo ahead of time."""
    if not (training and name in LAYERDROP):
        return []
    return [
        pytest.mark.xfail(
            sys.version_info < (3, 11),
            reason="torch.export cannot capture layerdrop on Python 3.10",
            raises=(GuardOnDataDependentSymNode, CaptureError),
            strict=True,
        )
    ]
