"""Models with arithmetic that a low dtype spoils, as people write it; float32 does all of it well.

Each is a function of ``self`` (a `Planted`) and ``y``, ``[ROWS, WIDTH]``, about normal, made by a low op.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROWS, WIDTH = 512, 32


class Planted(nn.Module):
    """Something low, and a function of it.

    ``torch.autocast`` casts the input of the layers at each, so placement has bytes of casts to spend.
    """

    def __init__(self, function: Callable) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.table = nn.Parameter(torch.randn(1024, WIDTH))
        self.register_buffer("frequencies", 1e4 ** -torch.linspace(0, 1, WIDTH // 2))
        self.register_buffer("padding", torch.arange(ROWS) >= ROWS - 40)
        edges = (torch.rand(ROWS, ROWS) > 0.98).float()
        self.register_buffer("edges", edges.masked_fill(self.padding[:, None], 0.0))
        self.function = function

    def forward(self, x: Tensor) -> object:
        y = sum(layer(x) for layer in self.layers)
        return self.function(self, y)


# -- normalisation by hand ---------------------------------------------------------------------------------


def rms_norm(self, y):
    y = y * 300
    return self.head(y * torch.rsqrt((y * y).mean(-1, keepdim=True) + 1e-6))


def rms_norm_by_sum(self, y):
    y = y * 90
    return self.head(y / torch.sqrt(torch.sum(y * y, -1, keepdim=True) / WIDTH + 1e-6))


def l2_norm(self, y):
    y = y * 90
    return self.head(y / (y * y).sum(-1, keepdim=True).sqrt())


def layer_norm(self, y):
    y = y * 300 + 200
    centered = y - y.mean(-1, keepdim=True)
    variance = (centered * centered).mean(-1, keepdim=True)
    return self.head(centered / torch.sqrt(variance + 1e-5))


def layer_norm_by_pow(self, y):
    y = y * 300
    mean = y.mean(-1, keepdim=True)
    return self.head((y - mean) / ((y - mean).pow(2).mean(-1, keepdim=True) + 1e-12).sqrt())


def batch_norm(self, y):
    y = y * 300
    centered = y - y.mean(0)
    return self.head(centered * ((centered * centered).mean(0) + 1e-5).rsqrt())


def weight_standardised(self, y):
    weight = self.table[:WIDTH] * 300
    weight = weight - weight.mean(1, keepdim=True)
    scale = (weight * weight).mean(1, keepdim=True).sqrt() + 1e-5
    return F.linear(y, weight / scale)


def demodulated(self, y):
    weight = self.head.weight[None] * (y[:16, None] * 900)
    return weight * torch.rsqrt((weight * weight).sum(-1, keepdim=True) + 1e-8)


def response_norm(self, y):
    y = (y * 300).T[None, None]
    squares = F.avg_pool2d(y * y, (5, 1), 1, (2, 0))
    return y / (1 + 1e-4 * squares).pow(0.75)


def normalised_zero_rows(self, y):
    return self.head(F.normalize(y.masked_fill(self.padding[:, None], 0.0), dim=-1))


def variance_of_moments(self, y):
    y = y * 12 + 100
    mean = y.mean(-1, keepdim=True)
    variance = (y * y).mean(-1, keepdim=True) - mean * mean
    return (y - mean) / (variance + 1e-5).sqrt()


def standard_deviation(self, y):
    y = y * 90
    centered = y - y.mean(0, keepdim=True)
    return torch.sqrt((centered * centered).sum(0) / (ROWS - 1))


def var_and_eps(self, y):
    y = y * 300
    return self.head((y - y.mean(-1, keepdim=True)) / (y.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt())


# -- exponentials ------------------------------------------------------------------------------------------


def softmax(self, y):
    e = torch.exp(y * 4)
    return (e / e.sum(-1, keepdim=True)) @ self.table[:WIDTH]


def softmax_after_product(self, y):
    e = torch.exp(y * 4)
    return (e @ self.table[:WIDTH]) / e.sum(-1, keepdim=True)


def softmax_of_shares(self, y):
    e = torch.exp(y[:, :, None] * 4 + y[:, None] * 0.1)
    return (e * self.table[:WIDTH]).sum(1) / e.sum(1)


def log_sum_exp(self, y):
    return torch.log(torch.exp(y * 4).sum(-1)) + 0.5


def info_nce(self, y):
    z = F.normalize(y[:64], dim=-1)
    e = torch.exp(z @ F.normalize(y[64:128] + y[:64], dim=-1).T / 0.07)
    return -torch.log(e.diagonal() / e.sum(-1)).mean()


def cumulative_attention(self, y):
    e = torch.exp(y * 4)
    value = y.roll(1, 0)
    return self.head((e * value).cumsum(0) / e.cumsum(0))


def feature_map_attention(self, y):
    queries, keys = torch.exp(y * 3), torch.exp(y.roll(1, 0) * 3)
    state = keys.T @ y
    return (queries @ state) / (queries @ keys.sum(0)[:, None])


def log_cosh(self, y):
    by_hand = (torch.exp(y * 4) + torch.exp(y * -4)) * 0.5
    return torch.log(torch.cosh(y * 4)).mean() + torch.log(by_hand).mean(0)


def mixture_density(self, y):
    weight = torch.exp(y * 4)
    return (weight / (weight.sum(-1, keepdim=True) + 1e-8) * y).sum(-1)


# -- losses ------------------------------------------------------------------------------------------------


def focal_loss(self, y):
    p, target = torch.sigmoid(y * 6), self.padding.float()[:, None]
    hit = (1 - p) * (1 - p) * torch.log(p + 1e-8)
    miss = p * p * torch.log(1 - p + 1e-8)
    return -(target * hit + (1 - target) * miss).mean(-1)


def cross_entropy_of_probabilities(self, y):
    p, target = torch.sigmoid(y * 4), self.padding.float()[:, None]
    return -(target * torch.log(p + 1e-10) + (1 - target) * torch.log(1 - p + 1e-10)).mean(-1)


def focal_loss_of_the_hit(self, y):
    p, target = torch.sigmoid(y * 6), self.padding.float()[:, None]
    hit = p * target + (1 - p) * (1 - target)
    return -((1 - hit) ** 2 * torch.log(hit.clamp(1e-8, 1))).mean(-1)


def dice_loss(self, y):
    p = torch.sigmoid(y.repeat(64, 1)).view(2, -1)
    target = (y.repeat(64, 1) > 0.1).float().view(2, -1)
    return 1 - (2 * (p * target).sum(1) + 1) / (p.sum(1) + target.sum(1) + 1)


def mean_square(self, y):
    error = y * 300 - 7
    return (error * error).mean(-1).sqrt()


def signal_to_noise(self, y):
    clean = y.roll(1, 0) * 90
    noise = y * 9
    ratio = (clean * clean).sum(-1) / ((noise * noise).sum(-1) + 1e-8)
    return 10 * torch.log10(ratio + 1e-8)


def evidence_bound(self, y):
    mean, log_variance = y * 90, y.roll(1, 0) * 4
    return -0.5 * (1 + log_variance - mean * mean - log_variance.exp()).sum(-1) / WIDTH


# -- sums, products, distances -----------------------------------------------------------------------------


def running_mean(self, y):
    total = (y.abs() * 300).cumsum(0)
    return self.head(total / torch.arange(1, ROWS + 1)[:, None])


def masked_mean(self, y):
    seen = (~self.padding).float()[:, None]
    total = ((y + 2) * 200 * seen).sum(0) + 1.0
    return self.head(total / seen.sum(0).clamp(min=1e-9))


def sum_pooling(self, y):
    return self.head(((y + 2) * 200).sum(0, keepdim=True) * (1 / ROWS))


def l1_norm(self, y):
    total = (y * 90).abs().sum(0, keepdim=True) + 1e-12
    return self.head(y * 90 / total * 20)


def gram_matrix(self, y):
    features = (y * 60).T
    return features @ features.T / (WIDTH * ROWS)


def covariance(self, y):
    centered = y * 60 - (y * 60).mean(0)
    return centered.T @ centered / (ROWS - 1)


def linear_attention_mean(self, y):
    state = ((y + 1).T * 40) @ ((y + 1) * 40) * (1.0 / ROWS)
    return self.head(state)


def channel_attention(self, y):
    features = (y * 40).T
    energy = features @ features.T
    return (energy.amax(-1, keepdim=True) - energy).div(1e5).softmax(-1) @ y.T


def pairwise_distances(self, y):
    a, b = y[:64] * 90, y[64:128] * 90
    squared = (a * a).sum(-1)[:, None] + (b * b).sum(-1) - 2 * (a @ b.T)
    return squared.clamp(min=0).sqrt()


def distances_by_difference(self, y):
    difference = (y[:64, None] - y[None, 64:128]) * 90
    return torch.sqrt((difference * difference).sum(-1) + 1e-12)


def student_kernel(self, y):
    difference = (y[:64, None] - self.table[None, :8]) * 60
    q = 1 / (1 + (difference * difference).sum(-1))
    return q / q.sum(-1, keepdim=True)


def squared_norms_by_einsum(self, y):
    y = y * 90
    return y / torch.einsum("nd,nd->n", y, y).sqrt()[:, None]


# -- inverses ----------------------------------------------------------------------------------------------


def polynomial(self, y):
    powers = torch.stack([(y * 2.5) ** k for k in range(1, 9)], -1)
    return self.head(powers @ torch.logspace(0, -7, 8))


def fourth_moment(self, y):
    y = y * 12
    squares = y * y
    return self.head(squares * squares / 1e6)


def cumulative_growth(self, y):
    growth = torch.cumprod(1 + (y * 0.8).abs(), -1)
    return growth @ (self.table[:WIDTH] * 1e-6)


def cosine(self, y):
    a, b = y * 200, y.roll(1, 0) * 200 + y * 40
    return (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1) + 1e-8)


def cosine_matrix(self, y):
    a, b = y[:64] * 60, (y[64:128] + y[:64]) * 60
    return (a @ b.T) / (a.norm(dim=-1)[:, None] * b.norm(dim=-1)).clamp(min=1e-8)


def unit_vectors(self, y):
    y = y.masked_fill(self.padding[:, None], 0.0)
    return self.head(y / (y.norm(dim=-1, keepdim=True) + 1e-12))


def graph_degrees(self, y):
    inverse = self.edges.sum(-1).clamp(min=1e-12).rsqrt()  # some nodes have no edges
    return (inverse[:, None] * self.edges) @ y


def inverse_weights(self, y):
    weight = 1 / ((y - 1).relu() + 1e-6)
    return (weight * y.roll(1, 0)).sum(-1) / weight.sum(-1)


# -- masks, positions, buckets, lookups --------------------------------------------------------------------


def rotate(y, angles):
    a, b = y.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


def drawn_out(t):
    """Much arithmetic that changes nothing: in low it would move fewer bytes than its casts."""
    for _ in range(4):
        t = (t * 1.25 + 0.5) * 0.8 - 0.4
    return t


def additive_mask(self, y):
    scores = y @ y.T / 6
    bias = (1.0 - (~self.padding).float()) * torch.finfo(torch.float32).min
    return (scores + bias).softmax(-1) @ y


def masked_exponentials(self, y):
    scores = (y @ y.T).masked_fill(self.padding, -1e9)
    e = torch.exp(scores - scores.amax(-1, keepdim=True))
    return (e / (e.sum(-1, keepdim=True) + 1e-9)) @ y


def rotary_by_einsum(self, y):
    return rotate(y, torch.einsum("i,j->ij", torch.arange(ROWS).float(), self.frequencies))


def rotary_by_matmul(self, y):
    return rotate(y, torch.arange(ROWS).float()[:, None] @ self.frequencies[None])


def rotary_by_multiplication(self, y):
    return rotate(y, drawn_out((torch.arange(ROWS) * 4)[:, None] * self.frequencies))


def fourier_features(self, y):
    angles = drawn_out(torch.arange(ROWS)[:, None] * self.frequencies * (2 * math.pi))
    return y + torch.cat([angles.sin(), angles.cos()], -1)


def buckets(self, y):
    distance = drawn_out(torch.arange(ROWS).float().clamp(min=1) / 16)
    return y + F.embedding((torch.log(distance) / math.log(32) * 100 + 200).long(), self.table)


def lookups(self, y):
    at = drawn_out(torch.linspace(0, 1000, ROWS))
    low = torch.floor(at)
    return y + F.embedding(low.long(), self.table) * (at - low)[:, None]


def sharp_attention(self, y):
    """Over 4,096 positions, rotated; the 64 last ones ask."""
    keys = y.repeat(8, 1)
    angles = torch.arange(len(keys)).float()[:, None] @ self.frequencies[None]
    keys = rotate(keys, angles)
    scores = keys[-64:] @ keys.T / math.sqrt(WIDTH) * 2
    e = torch.exp(scores)
    return (e @ y.repeat(8, 1)) / e.sum(-1, keepdim=True)


CASES: dict[str, Callable] = {
    function.__name__: function
    for function in (
        rms_norm, rms_norm_by_sum, l2_norm, layer_norm, layer_norm_by_pow, batch_norm, weight_standardised,
        demodulated, response_norm, normalised_zero_rows, variance_of_moments, standard_deviation,
        var_and_eps,
        softmax, softmax_after_product, softmax_of_shares, log_sum_exp, info_nce, cumulative_attention,
        feature_map_attention, log_cosh, mixture_density,
        focal_loss, focal_loss_of_the_hit, cross_entropy_of_probabilities, dice_loss, mean_square,
        signal_to_noise, evidence_bound,
        running_mean, masked_mean, sum_pooling, l1_norm, gram_matrix, covariance, linear_attention_mean,
        channel_attention, pairwise_distances, distances_by_difference, student_kernel,
        squared_norms_by_einsum, polynomial, fourth_moment, cumulative_growth,
        cosine, cosine_matrix, unit_vectors, graph_degrees, inverse_weights,
        additive_mask, masked_exponentials, rotary_by_einsum, rotary_by_matmul, rotary_by_multiplication,
        fourier_features, buckets, lookups, sharp_attention,
    )
}  # fmt: skip
