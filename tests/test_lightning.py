"""The precision plugin for Lightning, under both of its package names."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import logging
import os
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ampgraph import AmpGraphError, DynamicLossScale, Policy, PolicyError
from ampgraph.cli.torchvision_shim import allow_torchvision
from ampgraph.testing import assert_dtype

from .ranks import SIZE

allow_torchvision()  # the processes of the last test have no conftest
RANKS_IMPORT = ("lightning.pytorch", "ampgraph.integrations.lightning")
# Not imported by the collection: 5 s, and 600 classes of modules, which every capture pays for.
pytestmark = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("lightning", "pytorch_lightning"))), reason="needs lightning"
)

FLOAT16 = Policy(dtype=torch.float16, loss_scale=DynamicLossScale(init_scale=1024.0, growth_interval=3))


@pytest.fixture(params=["lightning", "pytorch_lightning"])
def packages(request: pytest.FixtureRequest) -> tuple[ModuleType, ModuleType]:
    for name in ("lightning.pytorch", "pytorch_lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    framework = importlib.import_module({"lightning": "lightning.pytorch"}.get(request.param, request.param))
    return framework, importlib.import_module(f"ampgraph.integrations.{request.param}")


def task(framework: ModuleType) -> Any:
    class Task(framework.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
            self.heads, self.loss = nn.ModuleList([nn.Linear(2, 2)]), nn.MSELoss()
            self.norms: list[float] = []

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            x, y = batch
            return self.loss(self.heads[0](self.net(x)), y)

        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            norms = [p.grad.norm() for p in self.parameters()]
            self.norms.append(float(torch.stack(norms).norm()))

        def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
            self.log("loss", self.training_step(batch, index))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    torch.manual_seed(1)
    return Task()


def data(bad_batch: int | None = None) -> DataLoader:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(24, 4, generator=generator)
    y = x[:, :2] * 0.5
    if bad_batch is not None:
        x[4 * bad_batch, 0] = float("inf")
    return DataLoader(TensorDataset(x, y), batch_size=4)


def trainer(framework: ModuleType, *plugins: Any, **options: Any) -> Any:
    return framework.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=list(plugins),
        **{"max_epochs": 1, "enable_checkpointing": False, **options},
    )


def values(module: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in module.parameters()]


def test_training_is_that_of_float32_with_true_gradients(packages) -> None:
    framework, integration = packages
    plugin = integration.AmpGraphPrecision(policy=FLOAT16)
    low, full = task(framework), task(framework)
    options = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
    trainer(framework, plugin, **options).fit(low, data())
    trainer(framework, **options).fit(full, data())
    assert list(plugin.blocks) == ["net", "heads.0"]
    assert_dtype(plugin.blocks["net"], "0", torch.float16)
    torch.testing.assert_close(low.norms, full.norms, rtol=0.01, atol=0.0)
    assert plugin.scaler.get_scale() == 2048.0  # three good steps
    assert "forward" not in vars(low.net)


def test_a_bad_batch_changes_nothing(packages) -> None:
    framework, integration = packages
    plugin, module, seen = integration.AmpGraphPrecision(policy=FLOAT16), task(framework), []

    class Watch(framework.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            seen.append(values(module))

    trainer(framework, plugin, callbacks=[Watch()], gradient_clip_val=0.5).fit(module, data(bad_batch=2))
    same = [all(map(torch.equal, a, b)) for a, b in itertools.pairwise(seen)]
    assert same == [False, True, False, False, False]
    assert plugin.scaler.last_overflow.step == 3
    assert "net.2.weight" in plugin.scaler.last_overflow.parameters


def test_checkpoint_has_the_scaler_and_resumes_the_same_run(packages, tmp_path) -> None:
    framework, integration = packages
    whole = task(framework)
    plugin = integration.AmpGraphPrecision(policy=FLOAT16)
    trainer(framework, plugin, max_epochs=2).fit(whole, data(bad_batch=4))

    first = trainer(framework, integration.AmpGraphPrecision(policy=FLOAT16))
    first.fit(task(framework), data(bad_batch=4))
    first.save_checkpoint(tmp_path / "half.ckpt")
    state = torch.load(tmp_path / "half.ckpt", weights_only=True)["AmpGraphPrecision"]
    assert state["scale"] == 1024.0  # grown once, backed off once
    resumed, again = task(framework), integration.AmpGraphPrecision(policy=FLOAT16)
    trainer(framework, again, max_epochs=2).fit(resumed, data(bad_batch=4), ckpt_path=tmp_path / "half.ckpt")
    assert all(map(torch.equal, values(whole), values(resumed)))
    assert again.scaler.state_dict() == plugin.scaler.state_dict()


def test_one_plugin_fits_then_validates_and_own_forward(packages) -> None:
    framework, integration = packages

    class Whole(type(task(framework))):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.heads[0](self.net(x))

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            return self.loss(self(batch[0]), batch[1])

    plugin = integration.AmpGraphPrecision(dtype=torch.bfloat16, blocks="")
    with pytest.raises(AmpGraphError, match="no scaler yet"):
        plugin.scaler  # noqa: B018
    module, runner = Whole(), trainer(framework, plugin)
    runner.fit(module, data())
    assert len(plugin.blocks[""].graph_modules) == 1  # forward reads nothing of the Trainer, which changes
    assert runner.validate(module, data(), verbose=False)[0]["loss"] < 1.0
    assert list(plugin.blocks) == [""]
    assert_dtype(plugin.blocks[""], "net.2", torch.bfloat16)
    assert runner.precision == "bf16-mixed"


def test_a_module_with_nothing_to_convert_is_told_so(packages) -> None:
    framework, integration = packages

    class Bare(framework.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.loss = nn.Parameter(torch.ones(4)), nn.MSELoss()

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            return self.loss(batch[0] * self.weight, batch[0])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    with pytest.raises(PolicyError, match="Bare has no child module with parameters"):
        trainer(framework, integration.AmpGraphPrecision()).fit(Bare(), data())


class Coder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 8), nn.Linear(8, 2)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(x).relu())


@pytest.mark.parametrize("blocks", [None, "coder.*"])
def test_a_network_of_which_other_methods_are_called_is_told(packages, blocks, recwarn) -> None:
    framework, integration = packages

    class Codes(framework.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.coder, self.head = Coder(), nn.Linear(2, 2)

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            return (self.head(self.coder.encode(batch[0])) - batch[1]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    plugin = integration.AmpGraphPrecision(dtype=torch.bfloat16, blocks=blocks and (blocks, "head"))
    trainer(framework, plugin, max_steps=2).fit(Codes(), data())
    told = [str(w.message) for w in recwarn if "ran in float32" in str(w.message)]
    assert len(told) == (blocks is None)
    assert all("coder ran in float32" in text and "blocks='coder.*'" in text for text in told)


def test_a_training_step_that_returns_none_takes_no_step(packages) -> None:
    framework, integration = packages
    seen: list[list[torch.Tensor]] = []

    class Choosy(type(task(framework))):
        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor | None:
            seen.append(values(self))
            return None if index == 2 else super().training_step(batch, index)

        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            """Without gradients there is no norm."""

    module, plugin = Choosy(), integration.AmpGraphPrecision(policy=FLOAT16)
    trainer(framework, plugin).fit(module, data())
    seen.append(values(module))
    same = [all(map(torch.equal, a, b)) for a, b in itertools.pairwise(seen)]
    assert same == [False, False, True, False, False, False]
    assert plugin.scaler.state_dict()["_steps"] == 5
    assert plugin.scaler.get_scale() == 2048.0  # five good steps, and no overflow


def test_manual_optimization(packages) -> None:
    framework, integration = packages

    class Manual(type(task(framework))):
        automatic_optimization = False

        def training_step(self, batch: list[torch.Tensor], index: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, index))
            optimizer.step()

    module, plugin = Manual(), integration.AmpGraphPrecision(policy=FLOAT16)
    before = values(module)
    trainer(framework, plugin).fit(module, data(bad_batch=5))
    assert not torch.equal(before[0], module.net[0].weight)
    assert all(p.isfinite().all() for p in module.parameters())
    assert plugin.scaler.state_dict()["_steps"] == 6


def _data_parallel(rank: int) -> tuple[list[torch.Tensor], dict[str, Any]]:
    os.environ.update(LOCAL_RANK=str(rank), WORLD_SIZE=str(SIZE), NODE_RANK="0")
    framework = importlib.import_module("lightning.pytorch")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    plugin = importlib.import_module("ampgraph.integrations.lightning").AmpGraphPrecision(policy=FLOAT16)
    module = task(framework)
    options = {"strategy": "ddp", "devices": SIZE, "use_distributed_sampler": False}
    bad_batch = 2 if rank == 1 else None
    trainer(framework, plugin, **options).fit(module, data(bad_batch))
    return values(module), plugin.scaler.state_dict()


def test_ranks_of_the_ddp_strategy_skip_together(ranks) -> None:
    (mine, state), (theirs, other) = ranks.run(_data_parallel)
    assert all(map(torch.equal, mine, theirs))
    assert state == other
    assert state["_last_overflow"][0] == 3
    assert state["_steps"] == 6
