"""The modules behind ``more_own``."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class DiffusionTransformer(nn.Module):
    """Patches and a time embedding that shifts and scales every layer norm."""

    def __init__(self, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(4, width, 2, 2)
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width, elementwise_affine=False) for _ in range(layers))
        self.modulations = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.attentions = nn.ModuleList(
            nn.MultiheadAttention(width, 4, batch_first=True) for _ in range(layers)
        )
        self.out = nn.ConvTranspose2d(width, 4, 2, 2)

    def forward(self, latent: Tensor, step: Tensor) -> Tensor:
        x = self.patches(latent)
        shape, x = x.shape, x.flatten(2).transpose(1, 2)
        time = self.time(_sinusoids(step, x.shape[-1]))
        for norm, modulation, attention in zip(self.norms, self.modulations, self.attentions, strict=True):
            shift, scale, gate = modulation(F.silu(time))[:, None].chunk(3, -1)
            y = norm(x) * (1 + scale) + shift
            x = x + gate * attention(y, y, y, need_weights=False)[0]
        return self.out(x.transpose(1, 2).reshape(shape))


def _sinusoids(step: Tensor, width: int) -> Tensor:
    frequencies = torch.exp(-math.log(1e4) * torch.arange(width // 2, device=step.device) / (width // 2))
    angles = step[:, None].float() * frequencies
    return torch.cat([angles.sin(), angles.cos()], -1)


class Autoencoder(nn.Module):
    """A variational autoencoder that draws its latent."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 8, 4, 2, 1), nn.GroupNorm(2, 8), nn.SiLU(), nn.Flatten())
        self.moments = nn.Linear(8 * 64, 16)
        self.decoder = nn.Sequential(
            nn.Linear(8, 8 * 64), nn.Unflatten(1, (8, 8, 8)), nn.ConvTranspose2d(8, 3, 4, 2, 1), nn.Sigmoid()
        )

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        mean, log_variance = self.moments(self.encoder(image)).chunk(2, -1)
        latent = mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean)
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(-1).mean()
        return {"image": self.decoder(latent), "divergence": divergence}


class Vectors(NamedTuple):
    """What `Quantizer` returns."""

    restored: Tensor
    codes: Tensor
    commitment: Tensor


class Quantizer(nn.Module):
    """Vector quantization with a straight-through gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(16, 8), nn.Linear(8, 16)
        self.codebook = nn.Parameter(torch.randn(12, 8))

    def forward(self, x: Tensor) -> Vectors:
        hidden = self.encoder(x)
        codes = torch.cdist(hidden, self.codebook).argmin(-1)
        chosen = F.embedding(codes, self.codebook)
        passed = hidden + (chosen - hidden).detach()
        return Vectors(self.decoder(passed), codes, F.mse_loss(hidden, chosen.detach()) + chosen.mean())


class ConformerBlock(nn.Module):
    """Half a feed-forward, attention, a gated depthwise convolution, half a feed-forward."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first, self.last = _feed_forward(width), _feed_forward(width)
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.convolution = nn.Sequential(
            nn.Conv1d(width, 2 * width, 1),
            nn.GLU(1),
            nn.Conv1d(width, width, 5, padding=2, groups=width),
            nn.BatchNorm1d(width),
            nn.SiLU(),
            nn.Conv1d(width, width, 1),
        )

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        x = x + 0.5 * self.first(x)
        y = self.norm(x)
        x = x + self.attention(y, y, y, key_padding_mask=padding, need_weights=False)[0]
        x = x + self.convolution(x.transpose(1, 2)).transpose(1, 2)
        return x + 0.5 * self.last(x)


def _feed_forward(width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.LayerNorm(width),
        nn.Linear(width, 2 * width),
        nn.SiLU(),
        nn.Dropout(0.1),
        nn.Linear(2 * width, width),
    )


class SpeechRecognizer(nn.Module):
    """Spectrogram of the raw wave, two conformer blocks, the CTC loss."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(32))
        self.project = nn.Linear(17, 32)
        self.blocks = nn.ModuleList(ConformerBlock() for _ in range(2))
        self.head = nn.Linear(32, 12)

    def forward(self, wave: Tensor, labels: Tensor) -> Tensor:
        spectrum = torch.stft(wave, 32, 16, window=self.window, return_complex=True)
        x = self.project(spectrum.abs().square().clamp(min=1e-5).log().transpose(1, 2))
        for block in self.blocks:
            x = block(x)
        scores = self.head(x).log_softmax(-1).transpose(0, 1)
        frames = torch.full((wave.shape[0],), scores.shape[0])
        return F.ctc_loss(scores, labels, frames, torch.full_like(frames, labels.shape[1]))


class WaveNet(nn.Module):
    """Dilated causal convolutions with gates and skip connections."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.start = nn.Conv1d(1, width, 1)
        self.gates = nn.ModuleList(nn.Conv1d(width, 2 * width, 2, dilation=2**i) for i in range(4))
        self.outs = nn.ModuleList(nn.Conv1d(width, 2 * width, 1) for _ in range(4))
        self.end = nn.Conv1d(width, 32, 1)

    def forward(self, wave: Tensor) -> Tensor:
        x, total = self.start(wave), 0
        for i, (gate, out) in enumerate(zip(self.gates, self.outs, strict=True)):
            value, control = gate(F.pad(x, (2**i, 0))).chunk(2, 1)
            residual, skip = out(value.tanh() * control.sigmoid()).chunk(2, 1)
            x, total = x + residual, total + skip
        return self.end(F.relu(total))


class Recommender(nn.Module):
    """Bags of categories beside dense features, and their pairwise products."""

    def __init__(self, tables: int = 3) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(20, 16, mode="sum") for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(6, 16), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(22, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense: Tensor, sparse: list[Tensor]) -> Tensor:
        x = self.bottom(dense)
        features = torch.stack([x, *(t(ids) for t, ids in zip(self.tables, sparse, strict=True))], 1)
        products = features @ features.transpose(1, 2)
        rows, columns = torch.tril_indices(4, 4, -1)
        return self.top(torch.cat([x, products[:, rows, columns]], -1)).squeeze(-1)


class GraphAttention(nn.Module):
    """Attention over the edges of a graph, by scatter."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.values, self.scores = nn.Linear(8, width), nn.Linear(2 * width, 1)
        self.head = nn.Linear(width, 4)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        x = self.values(nodes)
        source, target = edges
        scores = F.leaky_relu(self.scores(torch.cat([x[source], x[target]], -1))).exp()
        total = torch.zeros(len(nodes), 1).index_add(0, target, scores)
        summed = torch.zeros(len(nodes), x.shape[-1]).scatter_add(
            0, target[:, None].expand(-1, x.shape[-1]), scores * x[source]
        )
        return self.head(F.elu(summed / total.clamp(min=1e-6)))


class Translator(nn.Module):
    """Recurrent cells in a loop, the decoder attending to the encoder."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, width)
        self.encoder, self.decoder = nn.GRUCell(width, width), nn.LSTMCell(2 * width, width)
        self.head = nn.Linear(width, 32)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        state = torch.zeros(source.shape[0], self.head.in_features)
        memory = []
        for token in self.embedding(source).unbind(1):
            state = self.encoder(token, state)
            memory.append(state)
        keys = torch.stack(memory, 1)
        hidden, cell, outputs = state, torch.zeros_like(state), []
        for token in self.embedding(target).unbind(1):
            weights = (keys @ hidden[..., None]).softmax(1)
            hidden, cell = self.decoder(torch.cat([token, (weights * keys).sum(1)], -1), (hidden, cell))
            outputs.append(self.head(hidden))
        return torch.stack(outputs, 1)


class Experts(nn.Module):
    """A router, and the two best of four experts for every token, by index."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4)
        self.experts = nn.ModuleList(_feed_forward(width) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        total = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            weight = (weights * (chosen == index)).sum(-1, keepdim=True)
            total = total + weight * expert(x)
        return total, weights.mean((0, 1))


class StateSpace(nn.Module):
    """A diagonal state-space layer: a convolution by FFT with a complex kernel."""

    def __init__(self, width: int = 16, states: int = 8) -> None:
        super().__init__()
        self.log_decay = nn.Parameter(torch.zeros(width, states))
        self.frequency = nn.Parameter(torch.arange(states).float().repeat(width, 1))
        self.mix = nn.Parameter(torch.randn(width, states))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        poles = torch.complex(-self.log_decay.exp(), self.frequency)
        kernel = (
            (self.mix[..., None] * torch.exp(poles[..., None] * torch.arange(length) / length)).sum(1).real
        )
        size = 2 * length
        product = torch.fft.rfft(x.transpose(1, 2), n=size) * torch.fft.rfft(kernel, n=size)
        return self.out(F.gelu(torch.fft.irfft(product, n=size)[..., :length].transpose(1, 2)))


class Coupling(nn.Module):
    """A normalizing flow of affine couplings, with the log determinant."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        log_determinant = torch.zeros(len(x))
        for net in self.nets:
            kept, changed = x.chunk(2, -1)
            log_scale, shift = net(kept).chunk(2, -1)
            log_scale = 2 * torch.tanh(log_scale / 2)
            x = torch.cat([changed * log_scale.exp() + shift, kept], -1)
            log_determinant = log_determinant + log_scale.sum(-1)
        return x, log_determinant


class RadianceField(nn.Module):
    """Positional encoding, a small network, and alpha compositing along rays."""

    def __init__(self, bands: int = 4) -> None:
        super().__init__()
        self.bands = bands
        self.net = nn.Sequential(nn.Linear(6 * bands, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, points: Tensor) -> Tensor:
        angles = points[..., None] * 2.0 ** torch.arange(self.bands)
        encoded = torch.cat([angles.sin(), angles.cos()], -1).flatten(-2)
        raw = self.net(encoded)
        alpha = 1 - torch.exp(-F.softplus(raw[..., 3]) * 0.1)
        passed = torch.cumprod(torch.cat([torch.ones_like(alpha[..., :1]), 1 - alpha + 1e-6], -1), -1)[
            ..., :-1
        ]
        return ((alpha * passed)[..., None] * raw[..., :3].sigmoid()).sum(-2)


class SuperResolution(nn.Module):
    """Convolutions, pixel shuffle, and the enlarged image beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.PReLU(), nn.Conv2d(16, 12, 3, padding=1), nn.PixelShuffle(2)
        )

    def forward(self, image: Tensor) -> Tensor:
        return self.body(image) + F.interpolate(image, scale_factor=2, mode="bicubic")


class Matcher(nn.Module):
    """Two towers, a temperature, and the symmetric contrastive loss; everything is optional but the first."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(12, width), nn.EmbeddingBag(20, width)
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(
        self, pixels: Tensor, ids: Tensor | None = None, *, loss: bool = True
    ) -> dict[str, Tensor | None]:
        left = F.normalize(self.image(pixels), dim=-1)
        if ids is None:
            return {"embedding": left, "loss": None}
        scores = self.temperature.exp() * left @ F.normalize(self.text(ids), dim=-1).t()
        target = torch.arange(len(scores))
        total = F.cross_entropy(scores, target) + F.cross_entropy(scores.t(), target) if loss else None
        return {"scores": scores, "loss": total}


@dataclasses.dataclass
class Detections:
    """What `Detector` returns: a dataclass that torch's pytree does not know."""

    boxes: Tensor
    scores: Tensor


class Detector(nn.Module):
    """Queries that attend to image features, decoded into boxes."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.features = nn.Conv2d(3, width, 4, 4)
        self.queries = nn.Parameter(torch.randn(5, width))
        self.decoder = nn.TransformerDecoderLayer(width, 2, 32, batch_first=True)
        self.box, self.score = nn.Linear(width, 4), nn.Linear(width, 3)

    def forward(self, image: Tensor) -> Detections:
        memory = self.features(image).flatten(2).transpose(1, 2)
        found = self.decoder(self.queries.expand(len(image), -1, -1), memory)
        return Detections(self.box(found).sigmoid(), self.score(found))


class EarlyExit(nn.Module):
    """Leaves after the first block where that is sure enough: a branch on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        scores = self.head(x)
        if scores.softmax(-1).amax() > 0.99:
            return scores
        return self.head(x + F.relu(self.second(x)))


class Segments(nn.Module):
    """Means over segments whose number is in the data: sizes that depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, segment: Tensor) -> Tensor:
        kept = self.embed(x)[segment > 0]
        return self.head(kept).logsumexp(0) / max(1, int(segment.max()))
