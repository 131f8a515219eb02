"""``mode=``: a converted model passes the options of ``torch.compile`` on to inductor."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ampgraph
from ampgraph import PolicyError

X = torch.randn(4, 8)
BF16 = torch.bfloat16


@pytest.fixture
def patches(monkeypatch):
    """The configurations that inductor was called with."""
    import torch._inductor.compile_fx as inductor

    seen = []
    compile_fx = inductor.compile_fx

    def spy(*args, **kwargs):
        seen.append({**(kwargs.get("config_patches") or {}), "now": torch._inductor.config.max_autotune})
        return compile_fx(*args, **kwargs)

    monkeypatch.setattr(inductor, "compile_fx", spy)
    torch._dynamo.reset()
    return seen


OF_TORCH: dict[str | None, list] = {}


def of_torch(patches, mode):
    """What a plain ``torch.compile`` passes on."""
    if mode not in OF_TORCH:
        with torch.no_grad():
            torch.compile(nn.Linear(8, 8), backend="inductor", mode=mode)(X)
        OF_TORCH[mode] = patches.copy()
        patches.clear()
    return OF_TORCH[mode]


WAYS = {
    "ahead of time": lambda m, mode: ampgraph.convert(m, (X,), dtype=BF16, backend="inductor", mode=mode),
    "just in time": lambda m, mode: ampgraph.convert(m, dtype=BF16, backend="inductor", mode=mode),
    "torch.compile": lambda m, mode: torch.compile(
        m, backend="ampgraph", options={"dtype": BF16, "backend": "inductor", "mode": mode}
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", [None, "default", "reduce-overhead", "max-autotune-no-cudagraphs"])
def test_mode_reaches_inductor(patches, way, mode):
    wanted = of_torch(patches, mode)
    model = nn.Linear(8, 8)
    with torch.no_grad():
        found = WAYS[way](model, mode)(X)
    assert patches == wanted
    assert wanted
    assert (found - model(X)).norm() <= 0.02 * model(X).norm()


@pytest.mark.parametrize("args", [None, (X,)], ids=["just in time", "ahead of time"])
def test_unknown_mode_is_refused_at_once(args):
    model = nn.Linear(8, 8)
    with pytest.raises(PolicyError, match=r"mode='max-autotun'.*legal: default,.*max-autotune.*Did you mean"):
        ampgraph.convert(model, args, backend="inductor", mode="max-autotun")
    with pytest.raises(PolicyError, match="backend='eager' has no modes"):
        ampgraph.convert(model, args, backend="eager", mode="reduce-overhead")
    for backend in ("aot_eager_decomp_partition", lambda graph_module, inputs: graph_module):
        with pytest.raises(PolicyError, match="has no modes"):
            ampgraph.convert(model, args, backend=backend, mode="reduce-overhead")
    with pytest.raises(PolicyError, match="mode='max-autotun'"):
        ampgraph.convert_blocks(nn.Sequential(model), "0", backend="inductor", mode="max-autotun")


def test_mode_without_a_backend_is_for_devices_whose_default_is_inductor():
    """So that one line does for a GPU and a laptop; on a CPU the default is eager."""
    model = nn.Linear(8, 8)
    with pytest.warns(UserWarning, match="'reduce-overhead'.* has no effect here.* cpu is 'eager'") as warned:
        amp = ampgraph.convert(model, (X,), dtype=BF16, mode="reduce-overhead")
    assert warned[0].filename == __file__
    assert (amp.options.backend, amp.options.mode) == ("eager", None)
