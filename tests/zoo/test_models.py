"""Every model of the zoo runs, trains, is captured, and is understood by the oracle, in both modes.

The models of tests/zoo/test_zoo.py are left out: that file asserts the same of them, and more.
"""

from __future__ import annotations

import pytest
import torch

from ampgraph._compat import cheap_source_lines
from tests.zoo import models as zoo
from tests.zoo.capturable import marks
from tests.zoo.oracle import autocast_oracle
from tests.zoo.test_zoo import NAMES as MEASURED


@pytest.mark.zoo
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "training"),
    [
        pytest.param(
            name, training, marks=marks(name, training), id=f"{name}-{'train' if training else 'eval'}"
        )
        for name in zoo.names()
        if name not in MEASURED
        for training in (False, True)
    ],
)
def test_model(name: str, training: bool) -> None:
    model, args, kwargs = zoo.get(name).seeded()
    model.train(training)
    loss = zoo.get(name).loss(model(*args, **kwargs))
    loss.backward()
    assert loss.isfinite()
    assert any(p.grad is not None and p.grad.any() for p in model.parameters())

    with cheap_source_lines():
        gm = torch.export.export(model, args, kwargs, strict=False).module(check_guards=False)
    result = autocast_oracle(gm, args, kwargs, torch.float16)
    assert result.activation_casts


@pytest.mark.parametrize("family", ["timm", "transformers", "torchvision"])
def test_registry_is_large(family: zoo.Family) -> None:
    assert len(zoo.names(family)) >= 14


def test_names_are_unique_and_kept() -> None:
    assert len(set(zoo.names())) == len(zoo.names()) >= 42
    assert zoo.get("own/unet").family == "own"


def test_same_seed_same_model() -> None:
    first, (image,), _ = zoo.get("own/unet").seeded(3)
    second, (same_image,), _ = zoo.get("own/unet").seeded(3)
    torch.testing.assert_close(image, same_image, rtol=0, atol=0)
    torch.testing.assert_close(first.state_dict(), second.state_dict(), rtol=0, atol=0)
