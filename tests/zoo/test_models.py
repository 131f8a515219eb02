"""The list of the models of the zoo."""

from __future__ import annotations

import pytest
import torch

from tests.zoo import models as zoo


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
