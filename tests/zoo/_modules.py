"""The modules behind ``own_models``."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RecurrentClassifier(nn.Module):
    """Embedding, a two-layer bidirectional recurrent network, and a linear head on the mean over time."""

    def __init__(self, cell: str, vocabulary: int = 96, width: int = 32, classes: int = 10) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        recurrent = getattr(nn, cell)
        self.recurrent = recurrent(width, width, 2, batch_first=True, bidirectional=True, dropout=0.1)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.recurrent(self.embedding(tokens))
        return self.head(hidden.mean(1))


class UNet(nn.Module):
    """Two levels down, two up by transposed convolutions, with skip connections."""

    def __init__(self, width: int = 8, classes: int = 4) -> None:
        super().__init__()
        self.inner, self.middle = _block(3, width), _block(width, 2 * width)
        self.bottom = _block(2 * width, 4 * width)
        self.pool = nn.MaxPool2d(2)
        self.up_middle = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.out_middle = _block(4 * width, 2 * width)
        self.up_inner = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.out_inner = _block(2 * width, width)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, image: Tensor) -> Tensor:
        inner = self.inner(image)
        middle = self.middle(self.pool(inner))
        bottom = self.bottom(self.pool(middle))
        middle = self.out_middle(torch.cat([middle, self.up_middle(bottom)], 1))
        inner = self.out_inner(torch.cat([inner, self.up_inner(middle)], 1))
        return self.head(inner)


def _block(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for source in (inputs, outputs):
        layers += [nn.Conv2d(source, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)
