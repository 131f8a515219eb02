"""Code of packages that lie beside torch, torchvision for example, is the user's."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import ampgraph
from ampgraph.errors import warn_user
from ampgraph.own_files import AMPGRAPH, PYTHON, TORCH, is_pythons, is_users

BESIDE = os.path.join(f"{os.path.dirname(torch.__file__)}vision", "model.py")
ASKS = """
def forward(self, x):
    y = self.layer(x)
    return y if x.requires_grad else y * 0.01

def warn():
    warn_user("look here")
"""


@pytest.fixture
def beside() -> dict:
    names: dict = {"warn_user": warn_user}
    exec(compile(ASKS, BESIDE, "exec"), names)
    return names


@pytest.mark.parametrize("filename", [BESIDE, f"{AMPGRAPH[:-1]}_models.py", f"{PYTHON}site-packages/a.py"])
def test_files_of_the_user(filename: str) -> None:
    assert is_users(filename)


@pytest.mark.parametrize(
    "filename", [f"{TORCH}nn/a.py", f"{AMPGRAPH}module.py", f"{PYTHON}abc.py", "<string>"]
)
def test_files_of_others(filename: str) -> None:
    assert not is_users(filename)
    assert is_pythons(filename) == filename.startswith(PYTHON)


def test_a_question_asked_beside_torch_counts(beside: dict) -> None:
    model = type("Asks", (nn.Module,), {"forward": beside["forward"]})()
    model.layer = nn.Linear(4, 4)
    amp = ampgraph.convert(model, (torch.ones(2, 4),), dtype=torch.bfloat16)
    with_gradients = torch.ones(2, 4, requires_grad=True)
    torch.testing.assert_close(amp(with_gradients), model(with_gradients), atol=0.05, rtol=0)


def test_a_warning_names_the_line_beside_torch(beside: dict) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        beside["warn"]()
    assert Path(caught[0].filename) == Path(BESIDE)
