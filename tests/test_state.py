"""State: several models, threads, exceptions, memory, and the same plan in every process."""

from __future__ import annotations

import copy
import gc
import json
import os
import subprocess
import sys
import textwrap
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import ampgraph
from ampgraph import DynamicLossScale, Policy
from ampgraph._compat import fake_tensors
from ampgraph.runtime import capture_lock
from ampgraph.testing import cast_map
from ampgraph.training import optimizer_steps, scaler
from ampgraph.training.weak_registry import WeakRegistry

THREADS = 4


class Net(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, width), nn.LayerNorm(width), nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(x)).relu()).softmax(-1)


@pytest.fixture
def switching() -> Iterator[None]:
    """Lets threads change places often, so that races show."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def in_threads(work: Callable[[int], Any]) -> list[Any]:
    """Runs ``work(0) ... work(THREADS - 1)`` at the same time; raises what one of them raises."""
    start = threading.Barrier(THREADS)

    def run(number: int) -> Any:
        start.wait()
        return work(number)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(run, range(THREADS)))


# -- several models ----------------------------------------------------------------------------------------


def test_two_conversions_of_one_model_do_not_disturb_each_other() -> None:
    model, x = Net(), torch.randn(2, 8)
    half = ampgraph.convert(model, (x,), dtype=torch.float16)
    before, scale = cast_map(half), half.scaler.get_scale()
    out = half(x)
    other = ampgraph.convert(model, (x,), policy="O2", dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.0)
    other(x).sum().backward()
    optimizer.step()
    assert cast_map(half) == before
    assert cast_map(other) != before
    assert half.scaler.get_scale() == scale
    assert torch.equal(half(x), out)


def test_more_models_of_one_class_than_dynamo_keeps_apart() -> None:
    """Dynamo gives up on a piece of code after eight graphs, and models of one class share their code."""
    x = torch.randn(2, 8)
    models = [ampgraph.convert(Net()) for _ in range(10)]
    for amp in models:
        amp(x)
    assert [len(amp.graph_modules) for amp in models] == [1] * 10


# -- threads -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("just_in_time", [False, True], ids=["ahead", "just-in-time"])
def test_models_convert_in_threads(just_in_time: bool, switching: None) -> None:
    x = torch.randn(2, 8)
    models = [Net(16 + number) for number in range(THREADS)]  # here: threads share one random generator

    def work(number: int) -> tuple[dict, torch.Tensor]:
        model = copy.deepcopy(models[number])
        amp = ampgraph.convert(model, *(() if just_in_time else ((x,),)), policy="O2")
        out = amp(x)
        out.sum().backward()
        return cast_map(amp), out

    alone = [work(number) for number in range(THREADS)]
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # another thread's autograd.Function is not this model's
        together = in_threads(work)
    for (casts, out), (expected_casts, expected) in zip(together, alone, strict=True):
        assert casts == expected_casts
        assert torch.equal(out, expected)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_first_calls_from_several_threads_capture_once(backend: str, level: str, switching: None) -> None:
    x, source = torch.randn(2, 8), Net()
    reference = ampgraph.convert(source, (x,), policy=level, dtype=torch.float16)(x)
    amp = ampgraph.convert(source, (torch.randn(3, 8),), policy=level, dtype=torch.float16, backend=backend)

    def work(number: int) -> torch.Tensor:
        with torch.set_grad_enabled(number % 2 == 0):
            return amp(x)

    assert all(torch.equal(out, reference) for out in in_threads(work))
    assert len(amp.graph_modules) == 2


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_model_runs_while_it_is_captured_anew(level: str, switching: None) -> None:
    """Capture puts fake tensors in the place of the parameters; no call may see them."""
    model, x = Net().eval(), torch.randn(2, 8)
    amp = ampgraph.convert(model, (x,), policy=level)
    with torch.no_grad():
        expected = amp(x)
    stop, outs, errors = threading.Event(), [], []

    def serve() -> None:
        with torch.no_grad():
            while not stop.is_set():
                try:
                    outs.append(amp(x))
                except Exception as error:
                    errors.append(error)

    server = threading.Thread(target=serve)
    server.start()
    try:
        ampgraph.convert(model, (x,), policy="O1")
        for rank in range(2, 5):
            amp(torch.randn(*[2] * rank, 8))
    finally:
        stop.set()
        server.join()
    assert not errors
    assert outs
    assert all(type(out) is torch.Tensor and torch.equal(out, expected) for out in outs)


def test_first_calls_of_many_sizes_under_inference_mode(switching: None) -> None:
    sizes = [1, 2, 4, 8]
    amp = ampgraph.convert(Net().eval(), (torch.randn(3, 8),), dtype=torch.bfloat16)

    @torch.inference_mode()
    def work(number: int) -> list[torch.Size]:
        return [amp(torch.randn(sizes[number - turn], 8)).shape for turn in range(THREADS)]

    assert in_threads(work) == [[(sizes[i - turn], 8) for turn in range(THREADS)] for i in range(THREADS)]
    assert len(amp.graph_modules) <= 3  # the first, one with a dynamic size, one for size 1


def test_a_capture_by_one_thread_is_none_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's flag says of the whole process that it exports, and its mode stack holds for every thread."""
    inside, done = threading.Event(), threading.Event()

    class Slow(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inside.set()
            assert done.wait(60)
            return x * 2

    amp, x = ampgraph.convert(Net(), (torch.randn(2, 8),), dtype=torch.float16), torch.randn(2, 8)
    expected = amp(x)
    monkeypatch.setattr(ampgraph.AmpModule, "_run_traced", lambda *_: pytest.fail("nobody traces here"))
    with ThreadPoolExecutor(1) as pool:
        capture = pool.submit(ampgraph.convert, Slow(), (x,))
        try:
            assert inside.wait(60)
            assert torch.equal(amp(x), expected)
        finally:
            done.set()
        capture.result()


def test_a_capture_waits_for_calls_and_calls_for_a_capture() -> None:
    events: list[str] = []
    door = capture_lock.CaptureLock()
    inside, leave = threading.Event(), threading.Event()

    def capture() -> None:
        with door.alone():
            events.append("capture")
            inside.set()
            leave.wait(10)
            events.append("captured")

    def call() -> None:
        with door:
            events.append("call")

    with door:
        capturer = threading.Thread(target=capture)
        capturer.start()
        assert not inside.wait(0.05)
    assert inside.wait(10)
    caller = threading.Thread(target=call)
    caller.start()
    caller.join(0.05)
    leave.set()
    capturer.join()
    caller.join()
    assert events == ["capture", "captured", "call"]


def test_an_optimizer_may_step_while_models_convert(switching: None) -> None:
    """The hook that tells shadow weights of updates looks at all of them, whichever thread steps."""
    x = torch.randn(2, 8)
    optimizer = torch.optim.SGD(Net().parameters(), lr=0.1)
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.zeros_like(parameter)

    def work(number: int) -> None:
        if number:
            for _ in range(20):
                ampgraph.convert(nn.Linear(8, 8), policy="O2")
            return
        for _ in range(200):
            optimizer.step()

    keep = [ampgraph.convert(Net(), (x,), policy="O2") for _ in range(2)]
    in_threads(work)
    assert keep


def test_a_model_may_be_collected_during_a_step() -> None:
    """torch iterates over the hooks of all optimizers; a model that goes must leave them as they are."""
    alive: list[nn.Module] = []

    def let_go(*_: object) -> None:
        alive.clear()
        gc.collect()

    hook = register_optimizer_step_post_hook(let_go)  # before the model's, so that torch's iteration goes on
    try:
        x = torch.randn(2, 8)
        alive.append(ampgraph.convert(Net(), (x,), policy="O2", dtype=torch.float16))
        alive[0](x).sum().backward()
        gone = weakref.ref(alive[0])
        parameter = nn.Parameter(torch.zeros(2))
        parameter.grad = torch.ones(2)
        torch.optim.SGD([parameter], lr=0.1).step()
    finally:
        hook.remove()
    assert gone() is None
    assert parameter.tolist() == pytest.approx([-0.1, -0.1])


def test_a_registry_may_grow_during_an_iteration() -> None:
    registry: WeakRegistry[nn.Module] = WeakRegistry()
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    registry.add(first)
    for _ in registry:
        registry.add(second)
    assert list(registry) == [first, second]
    del first, _
    gc.collect()
    assert list(registry) == [second]


# -- exceptions --------------------------------------------------------------------------------------------


class Breaking(Exception):
    pass


@torch.library.custom_op("ampgraph_test_state::breaks", mutates_args=())
def breaks(x: torch.Tensor, fails: torch.Tensor) -> torch.Tensor:
    if fails.item():
        raise Breaking("forward")
    return x.clone()


@breaks.register_fake
def _(x: torch.Tensor, fails: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _breaks_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    if FAIL_IN_BACKWARD:
        raise Breaking("backward")
    return grad, None


breaks.register_autograd(_breaks_backward)
FAIL_IN_BACKWARD: list[bool] = []


class MayBreak(Net):
    def forward(self, x: torch.Tensor, fails: torch.Tensor) -> torch.Tensor:
        return self.second(breaks(self.first(x), fails).relu())


@pytest.mark.parametrize("just_in_time", [False, True], ids=["ahead", "just-in-time"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_exception_in_forward_or_backward_changes_nothing(just_in_time: bool, level: str) -> None:
    source, x, no, yes = MayBreak(), torch.randn(2, 8), torch.tensor(False), torch.tensor(True)
    example = () if just_in_time else ((x, no),)
    policy = Policy(level, torch.float16, loss_scale=DynamicLossScale(init_scale=64.0))
    amp = ampgraph.convert(source, *example, policy=policy)
    expected = amp(x, no)
    expected.sum().backward()
    gradients = [None if p.grad is None else p.grad.clone() for p in amp.parameters()]
    state = {name: value.clone() for name, value in amp.state_dict().items()}
    graphs, scaler = len(amp.graph_modules), amp.scaler.state_dict()

    with pytest.raises(Breaking, match="forward"):
        amp(x, yes)
    out = amp(x, no)
    FAIL_IN_BACKWARD.append(True)
    try:
        with pytest.raises(Breaking, match="backward"):
            out.sum().backward()
    finally:
        FAIL_IN_BACKWARD.clear()

    amp.zero_grad()
    again = amp(x, no)
    again.sum().backward()
    assert torch.equal(again, expected)
    for parameter, gradient in zip(amp.parameters(), gradients, strict=True):
        assert gradient is None if parameter.grad is None else torch.equal(parameter.grad, gradient)
    assert any(gradient is not None and gradient.any() for gradient in gradients)
    assert all(torch.equal(value, state[name]) for name, value in amp.state_dict().items())
    assert len(amp.graph_modules) == graphs
    assert amp.scaler.state_dict() == scaler


def test_a_capture_that_fails_leaves_the_model_usable() -> None:
    class Branches(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.dim() == 3 and x.sum() > 0:
                x = x + 1
            return super().forward(x)

    model, x = Branches(), torch.randn(2, 8)
    amp = ampgraph.convert(model, (x,), policy="O2", capture="ahead of time")
    expected, apply = amp(x), torch.autograd.Function.__dict__["apply"]
    for _ in range(2):
        with pytest.raises(ampgraph.CaptureError, match="Branches could not be captured"):
            amp(torch.randn(1, 2, 8))
    assert torch.equal(amp(x), expected)
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert torch.autograd.Function.__dict__["apply"] is apply
    assert len(amp.graph_modules) == 1


# -- memory ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("just_in_time", [False, True], ids=["ahead", "just-in-time"])
def test_converted_models_die_with_their_last_reference(just_in_time: bool) -> None:
    x = torch.randn(2, 8)
    alive: list[weakref.ref] = []

    def use(number: int) -> None:
        source = Net(16 + number % 3)
        amp = ampgraph.convert(source, *(() if just_in_time else ((x,),)), policy="O2", dtype=torch.float16)
        optimizer = torch.optim.SGD(amp.parameters(), lr=0.1)
        amp.scaler.attach(optimizer)
        amp(x).sum().backward()
        optimizer.step()
        with torch.no_grad():
            amp(x)
        alive.extend(weakref.ref(o) for o in (source, amp, amp.graph_module, amp.plan, amp.training_graph))
        alive.extend(weakref.ref(o) for o in (source.first.weight, optimizer, amp.scaler.state))

    use(0)
    rounds, sizes, classes = 10 if just_in_time else 40, [], []
    for number in range(rounds):
        use(number)
        if number in (5, rounds - 1):
            torch._dynamo.reset()
            gc.collect()
            known = (optimizer_steps._listeners, scaler._all_scalers)
            kept = (fake_tensors._dtype_cache, capture_lock._locks, *known)
            sizes.append(tuple(map(len, kept)))
            classes.append(classes_under(nn.Module))  # a capture makes some
    assert [ref() for ref in alive if ref() is not None] == []
    assert sizes[0] == sizes[1]
    assert classes[0] >= classes[1]  # those of earlier tests may have gone


def classes_under(cls: type) -> int:
    return sum(1 + classes_under(child) for child in type.__subclasses__(cls))


# -- determinism -------------------------------------------------------------------------------------------

REPORT = """
    import hashlib, json, torch, ampgraph
    from ampgraph.testing import cast_map

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.LayerNorm(16)
            self.attend = torch.nn.MultiheadAttention(16, 2, batch_first=True)
            self.convolve, self.head = torch.nn.Conv1d(4, 4, 3, padding=1), torch.nn.Linear(16, 4)

        def forward(self, x):
            y = self.norm(x)
            x = x + self.attend(y, y, y)[0] + self.convolve(x).sigmoid()
            parts = torch.cat([x.exp(), x.relu(), x * 0.5], -1)[..., :16]
            return {"logits": self.head(parts), "norm": parts.norm(dim=-1)}

    torch.manual_seed(0)
    model, x = Block(), torch.randn(2, 4, 16)
    rules = {"head": "fp32", "convolve": "low", "attend*": "low"}
    found = {}
    for level in ("O1", "O2"):
        amp = ampgraph.convert(model, (x,), policy=ampgraph.Policy(level, torch.float16, rules=rules))
        found[level] = [str(cast_map(amp)), ampgraph.explain(amp).to_dict()]
    print(json.dumps(found))
"""


def test_the_plan_does_not_depend_on_process_or_hash_seed() -> None:
    running = []
    for seed in ("0", "1"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", textwrap.dedent(REPORT)]
        running.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, cwd=Path(__file__).parent)
        )
    reports = [process.communicate(timeout=300)[0].decode().strip() for process in running]
    assert all(process.returncode == 0 for process in running)
    assert json.loads(reports[0])["O1"] != json.loads(reports[0])["O2"]
    assert reports[0] == reports[1]


class CountsCalls(nn.Module):
    """Counts calls on its weight, as hooks of opacus do; one read of a value ends a capture ahead of time."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.fc, self.reads = nn.Linear(4, 4), reads
        self.fc.weight.calls = 0

    def forward(self, x):
        self.fc.weight.calls += 1
        return self.fc(x) * (x.sum().item() if self.reads else 1.0)


@pytest.mark.filterwarnings("ignore:.*captured just in time instead")
@pytest.mark.parametrize("reads", [False, True])
def test_a_capture_leaves_attributes_of_parameters_as_they_were(reads):
    model = CountsCalls(reads)
    ampgraph.convert(model, (torch.ones(2, 4),), dtype=torch.bfloat16)
    assert model.fc.weight.calls == 0


def test_a_converted_model_has_the_name_of_its_source():
    """Hugging Face's Trainer shifts the labels of models whose ``_get_name()`` it knows."""
    amp = ampgraph.convert(CountsCalls(False), dtype=torch.bfloat16)
    assert amp._get_name() == "CountsCalls"
    assert repr(amp).startswith("AmpModule(")
