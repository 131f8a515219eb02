"""Per-sample gradients with `torch.func`, each clipped separately, as in differentially private training.

    python examples/per_sample_gradients.py

Inside the transforms of `torch.func` a converted model runs only graphs that it captured before, so convert
it with a batch of one sample. There is no loss scaling there: use bfloat16, or scale the loss as here.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

import ampgraph

SAMPLES, SCALE, LARGEST = 16, 1024.0, 1.0
Gradients = dict[str, torch.Tensor]


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 16, generator=generator)
    return x, torch.randint(0, 4, (SAMPLES,), generator=generator)


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 4))


def per_sample(model: nn.Module, scale: float = 1.0) -> Gradients:
    """Returns the gradient of each sample's loss, with the sample as the first dimension."""

    def loss(parameters: Gradients, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return scale * F.cross_entropy(functional_call(model, parameters, (x[None],)), y[None])

    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    gradients = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, *data())
    return {name: gradient / scale for name, gradient in gradients.items()}


def norms(gradients: Gradients) -> torch.Tensor:
    return torch.stack([g.flatten(1).norm(dim=1) for g in gradients.values()]).norm(dim=0)


def clipped_mean(gradients: Gradients) -> torch.Tensor:
    """Returns the mean over the samples, each clipped to the norm `LARGEST`, as one vector."""
    factors = (LARGEST / norms(gradients)).clamp(max=1.0) / SAMPLES
    return torch.cat([torch.einsum("n,n...->...", factors, g).flatten() for g in gradients.values()])


def main() -> dict[str, float]:
    model, (x, _) = build(), data()
    exact = per_sample(model)
    figures = {"largest norm float32": norms(exact).max().item()}
    for dtype, scale in ((torch.bfloat16, 1.0), (torch.float16, SCALE)):
        amp = ampgraph.convert(build(), (x[:1],), dtype=dtype)
        low, name = per_sample(amp, scale), str(dtype).removeprefix("torch.")
        figures[f"largest norm {name}"] = norms(low).max().item()
        error = (clipped_mean(low) - clipped_mean(exact)).norm() / clipped_mean(exact).norm()
        figures[f"error of the mean {name}"] = error.item()
    return figures


if __name__ == "__main__":
    for name, value in main().items():
        print(f"{name:26} {value:.6g}")
