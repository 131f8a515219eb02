"""Models that no library has in a small form: recurrent text models and a plain U-Net."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from tests.zoo._images import image
from tests.zoo.models import Inputs, ZooModel

if TYPE_CHECKING:
    from torch import nn


def models() -> list[ZooModel]:
    """Returns the part of the registry that is written here."""
    return [
        ZooModel("own/lstm", "own", "rnn", functools.partial(_recurrent, "LSTM"), _text),
        ZooModel("own/gru", "own", "rnn", functools.partial(_recurrent, "GRU"), _text),
        ZooModel("own/unet", "own", "segmentation", _unet, image()),
        ZooModel("own/transformer_encoder", "own", "encoder", _encoder, _sequence),
    ]


def _recurrent(cell: str) -> nn.Module:
    from tests.zoo._modules import RecurrentClassifier

    return RecurrentClassifier(cell)


def _unet() -> nn.Module:
    from tests.zoo._modules import UNet

    return UNet()


def _encoder() -> nn.Module:
    from torch import nn

    return nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2)


def _text() -> Inputs:
    import torch

    return (torch.randint(0, 96, (2, 8)),), {}


def _sequence() -> Inputs:
    import torch

    return (torch.randn(2, 8, 32),), {}
