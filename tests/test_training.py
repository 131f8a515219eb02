"""Real training, float16 against float32 with the same seeds; `tools/train_curves.py` does it at length."""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))
train_curves = pytest.importorskip("train_curves", reason="needs scikit-learn")

DIGITS, GPT, WEAK = train_curves.TASKS
# Smaller batches than in the tool: CPUs are slow at float16.
DIGITS = replace(DIGITS, batches=partial(DIGITS.batches, size=16))
GPT = replace(GPT, batches=partial(GPT.batches, size=4))


@pytest.fixture(scope="module")
def trained():
    """Trains a run of a task once, with few steps."""
    done = {}

    def train(task, run, steps):
        if (task.title, run) not in done:
            done[task.title, run] = train_curves.train(replace(task, steps=steps), task.runs[run])
        return done[task.title, run]

    return train


@pytest.mark.parametrize(
    ("task", "steps", "run"),
    [
        pytest.param(DIGITS, 150, "float16 O1", id="digits-O1"),
        pytest.param(DIGITS, 150, "float16 O2", id="digits-O2", marks=pytest.mark.exhaustive),
        pytest.param(GPT, 40, "float16 O1", id="GPT-O1", marks=pytest.mark.exhaustive),
        pytest.param(GPT, 40, "float16 O2", id="GPT-O2"),
    ],
)
def test_float16_trains_as_float32_does(trained, task, steps, run):
    exact, low = trained(task, "float32", steps)["figures"], trained(task, run, steps)["figures"]
    assert low["final loss"] == pytest.approx(exact["final loss"], rel=0.01)
    assert low["accuracy"] == pytest.approx(exact["accuracy"], abs=0.005)


def test_vanishing_gradients_need_the_loss_scale(trained):
    def losses(run):
        return trained(WEAK, run, 200)["losses"]

    assert losses("float16 O1")[-1] == pytest.approx(losses("float32")[-1], rel=0.01)
    assert losses("float16 O1")[-1] < losses("float16 O1")[0] / 4
    assert losses("float16 O1, no loss scale")[-1] > losses("float16 O1, no loss scale")[0] / 1.5
