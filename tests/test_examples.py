"""Each example runs, and its figures are what its docstring says."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import ampgraph
from ampgraph.testing import assert_dtype
from tests.zoo._images import allow_torchvision

EXAMPLES = Path(__file__).parent.parent / "examples"
BROKEN = 'raise RuntimeError("operator torchvision::nms does not exist")'
FP16, BF16 = torch.float16, torch.bfloat16


def load(name: str, *needs: str) -> Any:
    for library in needs:
        pytest.importorskip(library)
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # torch 2.11's Dynamo imports what it inlines
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def timm_can_be_imported() -> None:
    """Also where the installed torchvision was built for another torch."""
    allow_torchvision()


def near(low: float, exact: float, relative: float) -> None:
    """Close to float32, and not float32."""
    assert low == pytest.approx(exact, rel=relative)
    assert low != exact


def check_training(figures: dict[str, float], untrained: float) -> None:
    """The loss falls as in float32; the resumed run is the same to the bit; its scale has gone on growing."""
    assert figures["loss float32"] < untrained / 2
    near(figures["loss float16"], figures["loss float32"], 0.01)
    assert figures["loss float16, resumed"] == figures["loss float16"]
    assert figures["scale, resumed"] == figures["scale"] == 8 * 2.0**10


def test_the_trainer_reports_no_loss_of_a_class_that_names_no_labels(tmp_path) -> None:
    example = load("hf_trainer", "transformers")
    made, _ = example.trainer(tmp_path, converted=False)
    made.model = ampgraph.convert(made.model, dtype=BF16)

    def evaluated(**options: Any) -> dict[str, float]:
        args = example.TrainingArguments(tmp_path, use_cpu=True, report_to=[], disable_tqdm=True, **options)
        return example.Trainer(made.model, args, eval_dataset=made.eval_dataset).evaluate()

    assert "eval_loss" not in evaluated()
    assert "eval_loss" in evaluated(label_names=["labels"])


def test_a_cache_among_the_outputs_is_captured_when_turned_off() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2)
    model, ids = transformers.GPT2LMHeadModel(config), torch.randint(0, 64, (2, 6))
    with pytest.raises(ampgraph.CaptureError, match="use_cache=False"):
        ampgraph.convert(model, (ids,), capture="ahead of time")
    blocks = ampgraph.convert_blocks(model, "", dtype=BF16)
    assert model(ids, use_cache=False).logits.shape == (2, 6, 64)
    assert_dtype(blocks[""], "lm_head", BF16)


def test_the_table_names_every_example() -> None:
    page = (EXAMPLES / "README.md").read_text()
    command = r"(?:python|torchrun --nproc-per-node 4) examples/"
    row = rf"^\| \[(\w+\.py)\]\((\w+\.py)\) .*`{command}(\w+\.py)[^`]*` \|$"
    rows = re.findall(row, page, re.MULTILINE)
    assert sorted(rows) == [(path.name,) * 3 for path in sorted(EXAMPLES.glob("*.py"))]
    for path in EXAMPLES.glob("*.py"):
        assert re.search(rf"\n    {command}{path.name}", path.read_text().split('"""')[1])


def test_plain_loop(tmp_path: Path) -> None:
    example = load("plain_loop")
    check_training(example.main(), untrained=example.train(*example.build(converted=False), range(1)))
    model, optimizer = example.build(converted=True)
    assert_dtype(model, "0", FP16)
    example.train(model, optimizer, range(20))
    example.save(tmp_path / "checkpoint.pt", model, optimizer)
    again = example.resume(tmp_path / "checkpoint.pt")
    for run in ((model, optimizer), again):
        example.train(*run, range(20, 30))
    assert all(map(torch.equal, model.parameters(), again[0].parameters()))


@pytest.mark.usefixtures("timm_can_be_imported")
def test_timm_train() -> None:
    example = load("timm_train", "timm")
    figures = example.main()
    assert len({run["first loss"] for run in figures.values()}) == 3
    exact = figures.pop("float32")
    assert exact["last loss"] < exact["first loss"] / 2
    # NativeScaler leaves out a first step.
    for run, dtype, off in zip(figures.values(), (BF16, FP16), (0.01, 0.05), strict=True):
        near(run["first loss"], exact["first loss"], torch.finfo(dtype).eps)
        near(run["last loss"], exact["last loss"], off)
        assert run["accuracy"] == run["accuracy EMA"] == exact["accuracy"] == 1.0


def test_an_example_says_in_one_line_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "timm.py").write_text(BROKEN)
    command = [sys.executable, EXAMPLES / "timm_train.py"]
    found = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": str(tmp_path)}
    )
    assert found.returncode == 1
    assert found.stderr.count("\n") == 1
    assert "torchvision::nms does not exist: install timm, and torchvision as built for torch" in found.stderr


def test_the_backend_is_found_by_name_without_an_import() -> None:
    """As a script must find it that knows nothing of ampgraph."""
    code = """
import sys, torch
assert "ampgraph" in torch._dynamo.list_backends() and "ampgraph" not in sys.modules
model, x = torch.nn.Linear(8, 8), torch.randn(2, 8)
found = torch.compile(model, backend="ampgraph")(x)
assert torch.equal(found, model.bfloat16()(x.bfloat16()).float())
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.usefixtures("timm_can_be_imported")
def test_timm_task_compiles_by_name() -> None:
    """As the script does since timm 1.0.2x, the averaged model included."""
    task_module = pytest.importorskip("timm.task")
    torch.manual_seed(0)
    model = pytest.importorskip("timm").create_model("test_vit", num_classes=4, img_size=32)
    task = task_module.ClassificationTask(model, nn.CrossEntropyLoss(), verbose=False)
    images, labels = torch.randn(2, 3, 32, 32), torch.tensor([0, 1])
    exact = task(images, labels)["loss"].item()
    task.setup_ema(decay=0.5)
    task.compile(backend="ampgraph")
    task.compile_ema(backend="ampgraph")
    loss = task(images, labels)["loss"]
    near(loss.item(), exact, torch.finfo(BF16).eps)
    loss.backward()
    task.update_ema()
    with torch.no_grad():
        averaged = task.get_eval_model(ema=True)(images)
        expected = task.get_trainable_module(ema=True).module(images)
    error = (averaged - expected).norm() / expected.norm()
    assert 0 < error < 4 * torch.finfo(BF16).eps


def test_hf_trainer() -> None:
    example = load("hf_trainer", "transformers", "accelerate")
    figures = example.main()
    check_training(figures, untrained=0.6931)
    near(figures["loss reloaded"], figures["loss float16"], 0.001)  # the same parameters, run in float32


def test_accelerate_loop() -> None:
    example = load("accelerate_loop", "accelerate")
    check_training(example.main(), untrained=example.Run(converted=False).train(1))
    assert_dtype(example.Run(converted=True).model, "0", FP16)


def test_lightning_module() -> None:
    example = load("lightning_module", "lightning")
    check_training(example.main(), untrained=example.fit(epochs=1).callback_metrics["loss"].item())


@pytest.mark.usefixtures("timm_can_be_imported")
def test_ema() -> None:
    example = load("ema")
    figures = example.main()
    names = [name for name in ("torch", "timm") if name == "torch" or importlib.util.find_spec(name)]
    assert len(figures) == 1 + 3 * len(names)
    for name in names:
        assert figures[f"{name}: off the average by hand"] < 1e-5
        assert figures[f"{name}: loss of the average"] < figures["loss of the last weights"]
        near(figures[f"{name}: loss of the average"], figures[f"{name}: the same in float32"], 0.005)
    _, averages, _ = example.train()
    linear, norm = averages["torch"].module.source[:2]
    inputs = torch.cat([example.batch(step)[0] for step in range(example.STEPS)])
    torch.testing.assert_close(norm.running_mean, linear(inputs).mean(0).detach())


def test_checkpointing() -> None:
    example = load("checkpointing")
    figures = example.main()
    kept = {name: kept for name, (kept, _) in figures.items()}
    inputs = example.LAYERS * example.BATCH * example.WIDTH * 4
    assert kept["convert_blocks"] == kept["float32"] == inputs
    assert kept["just in time, aot_eager"] <= inputs
    assert inputs < kept["ahead of time"] < kept["float32, no checkpoints"]
    errors = {name: error for name, (_, error) in figures.items()}
    assert errors.pop("float32") == errors.pop("float32, no checkpoints") == 0
    assert all(0 < error < 2 * torch.finfo(BF16).eps for error in errors.values())


def test_per_sample_gradients() -> None:
    example = load("per_sample_gradients")
    figures = example.main()
    assert figures["largest norm float32"] > example.LARGEST
    for dtype in (BF16, FP16):
        name, eps = str(dtype).removeprefix("torch."), torch.finfo(dtype).eps
        near(figures[f"largest norm {name}"], figures["largest norm float32"], eps)
        assert 0 < figures[f"error of the mean {name}"] < 2 * eps
    one = example.per_sample(example.build())
    x, y = example.data()
    for index in range(2):
        model = example.build()
        nn.functional.cross_entropy(model(x[index : index + 1]), y[index : index + 1]).backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(one[name][index], parameter.grad)


def test_server() -> None:
    example = load("server")
    requests = len(example.SIZES) * example.CLIENTS
    assert example.main() == {
        "requests": requests,
        "equal to the direct call": requests,
        "graphs captured": 3,
    }
    amp = example.build()
    assert len(amp.graph_modules) == 3
    assert_dtype(amp, "0", BF16)
    assert amp.source[0].weight.dtype == BF16


@pytest.mark.parametrize("content", ["no JSON", "[]", "{}", '{"rows": [[1, 2]]}', '{"rows": [["one"]]}'])
def test_server_answers_a_bad_request(content: str) -> None:
    example = load("server")
    with example.server_of(example.build()) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(address, content.encode(), timeout=30)
        assert refused.value.code == 400
        assert "send" in json.load(refused.value)["error"]
        assert len(example.ask(server.server_port, [[0.0] * example.FEATURES])[0]) == 3
        server.shutdown()


def test_compiled_step() -> None:
    figures = load("compiled_step").main()
    assert figures["is_equal"]
    assert figures["reason"] is None
    assert figures["loss"] < 2
