"""Whole models of timm, transformers and torchvision: converted, run, and compared with float32 and autocast.

The models of ``NAMES`` in every respect, the others of the zoo in their integers and gradients;
`tools/zoo_check.py` compares every model in every respect, and writes docs/results/zoo.md.
"""

from __future__ import annotations

import pytest
import torch

from tests.exact_integers import differing_integers
from tests.zoo import models as zoo
from tests.zoo.capturable import marks
from tests.zoo.measure import OPTIMAL, Run, Subject, activation_cast_bytes, holds

NAMES = (
    "timm/resnet18",
    "timm/mobilenetv3_small_100",
    "timm/convnext_atto",
    "timm/regnetx_002",
    "timm/vit_tiny_patch16_224",
    "timm/beit_base_patch16_224",
    "timm/cait_xxs24_224",
    "timm/eva02_tiny_patch14_224",
    "timm/poolformer_s12",
    "timm/mixer_s32_224",
    "torchvision/resnet18",
    "torchvision/mnasnet0_5",
    "torchvision/shufflenet_v2_x0_5",
    "torchvision/squeezenet1_1",
    "torchvision/vgg11_bn",
    "torchvision/lraspp_mobilenet_v3_large",
    "torchvision/vit",
    "torchvision/swin",
    "torchvision/maxvit",
    "torchvision/r3d_18",
    "transformers/bert",
    "transformers/deberta_v2",
    "transformers/gpt2",
    "transformers/llama_eager",
    "transformers/qwen3",
    "transformers/t5",
    "transformers/mixtral",
    "transformers/wav2vec2",
    "transformers/whisper",
    "transformers/clip",
    "transformers/segformer",
    "own/gru",
    "own/unet",
)
# A capture ahead of time refuses it: an ``autograd.Function`` of the model computes gradients.
REFUSED = frozenset({"transformers/bloom"})
CORE = frozenset(
    {
        "timm/resnet18",
        "timm/convnext_atto",
        "timm/vit_tiny_patch16_224",
        "torchvision/swin",
        "transformers/bert",
        "transformers/gpt2",
        "transformers/llama_eager",
        "transformers/t5",
        "transformers/mixtral",
        "own/unet",
    }
)
DTYPES = (torch.float16, torch.bfloat16)


def combinations() -> list:
    """Every model in both modes; dtype and level take turns, so that each pair of them meets each mode.

    `make test` takes the models of ``CORE``, each in one mode; the others are exhaustive.
    """
    found = []
    for index, name in enumerate(NAMES):
        for position, mode in enumerate(("eval", "train")):
            dtype = DTYPES[(index + position) % 2]
            level = ("O1", "O2")[(index // 2) % 2]
            case = f"{name}-{mode}-{str(dtype)[6:]}-{level}"
            is_taken = name in CORE and position == index // 4 % 2
            expected = marks(name, mode == "train") + [pytest.mark.exhaustive] * (not is_taken)
            found.append(pytest.param(name, mode, dtype, level, marks=expected, id=case))
    return found


def test_each_library_is_there_ten_times() -> None:
    assert set(NAMES) <= set(zoo.names())
    assert set(NAMES) > CORE
    for family in ("timm", "torchvision", "transformers"):
        assert sum(zoo.get(name).family == family for name in NAMES) >= 10


@pytest.mark.zoo
@pytest.mark.parametrize(("name", "mode", "dtype", "level"), combinations())
@pytest.mark.filterwarnings("ignore")
def test_model(name: str, mode: str, dtype: torch.dtype, level: str) -> None:
    subject = Subject.shared(name, mode)
    amp = subject.convert(OPTIMAL[level], dtype)
    autocast = subject.autocast(dtype)

    check_reference(subject)
    check_bytes(subject, amp, autocast, dtype)
    check_levels(subject, level, amp, dtype)
    assert differing_integers(amp, *subject.args, **subject.kwargs)[0] == []
    run = subject.run_converted(amp)
    check_gradients(subject, run)
    mine, theirs = subject.errors(run), subject.errors(subject.run_converted(autocast))
    if not holds(level, dtype, mine, theirs):
        mine, theirs = subject.errors_over_draws(amp, autocast)
    assert holds(level, dtype, mine, theirs), (mine, theirs)
    assert len(amp.graph_modules) == 1  # the same call is not captured again


OTHERS = [name for name in zoo.names() if name not in NAMES and name not in REFUSED]


@pytest.mark.zoo
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "level", "training"),
    [
        pytest.param(
            name, f"O{number % 2 + 1}", number // 2 % 2 == 1, marks=marks(name, number // 2 % 2 == 1)
        )
        for number, name in enumerate(OTHERS)
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_other_model(name: str, level: str, training: bool) -> None:
    """One run each; levels and modes take turns. In float16 a CPU takes twice the time."""
    subject = Subject.shared(name, "train" if training else "eval")
    amp = subject.convert(OPTIMAL[level], torch.bfloat16)
    check_reference(subject)
    run = subject.run_converted(amp)
    assert run.is_finite
    check_gradients(subject, run)
    assert run.form[:2] == subject.reference.form[:2]
    assert differing_integers(amp, *subject.args, **subject.kwargs)[0] == []


def check_reference(subject: Subject) -> None:
    """The model trains in float32: what is compared with it says something."""
    grads = subject.reference.grads.values()
    assert all(grad.isfinite().all() for grad in grads)
    assert any(grad.any() for grad in grads)


def check_bytes(subject: Subject, amp, autocast, dtype: torch.dtype) -> None:
    """No more cast bytes than torch's CUDA autocast, no more modelled traffic than its rule."""
    oracle = subject.oracle(dtype)
    assert activation_cast_bytes(amp.graph_module) <= oracle.activation_cast_bytes
    assert oracle.activation_casts
    assert amp.plan.cost.traffic <= autocast.plan.baselines["autocast"].traffic


def check_levels(subject: Subject, level: str, amp, dtype: torch.dtype) -> None:
    """Plans are proven minimal; O2 moves no more than O1, and neither more than the autocast rule."""
    other = subject.convert(OPTIMAL["O1" if level == "O2" else "O2"], dtype)
    first, second = (amp.plan, other.plan) if level == "O1" else (other.plan, amp.plan)
    assert first.gap == second.gap == 0
    assert second.cost.traffic <= first.cost.traffic
    for plan in (first, second):
        assert plan.cost.traffic <= plan.baselines["autocast"].traffic
        assert plan.cost.activation_cast_bytes <= plan.baselines["autocast"].activation_cast_bytes


def check_gradients(subject: Subject, run: Run) -> None:
    """Every parameter has a gradient where float32 gives it one, in the parameter's own dtype."""
    parameters = dict(subject.module.named_parameters())
    assert run.grads.keys() == subject.reference.grads.keys()
    assert all(dtype == parameters[name].dtype for name, dtype in run.grad_dtypes.items())
