"""Captures in one thread, compiled calls in others: torch keeps the state of a trace per process."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.fx import traceback as fx_traceback

import ampgraph
from ampgraph._compat import (
    compiled_calls,
    global_hooks,
    is_compiling,
    new_lock,
    path_inside_wrappers,
    tracing_lock,
)
from ampgraph._compat.tracing import CompiledCalls
from ampgraph.runtime import capture_lock, graph_maker, held_tensors, shadow_weights
from ampgraph.runtime.capture_lock import CaptureLock
from ampgraph.training import optimizer_steps
from ampgraph.training.fsdp1 import refuse_fsdp1

SECONDS = 60


class Slow(nn.Module):
    """Forward waits in the middle of its capture."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wait_inside()
        return x * 2


inside, leave = threading.Event(), threading.Event()


def wait_inside() -> None:
    inside.set()
    assert leave.wait(SECONDS)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    inside.clear()
    leave.clear()
    with ThreadPoolExecutor(3) as pool:
        yield pool
        leave.set()


@pytest.mark.parametrize(
    ("backend", "is_ahead"), [("aot_eager", True), ("aot_eager", False), ("eager", False)]
)
def test_compiled_calls_wait_for_a_capture(pool: ThreadPoolExecutor, backend: str, is_ahead: bool) -> None:
    x = torch.randn(2, 8)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.LayerNorm(8)).eval()
    amp = ampgraph.convert(model, *([(x,)] if is_ahead else []), dtype=torch.bfloat16, backend=backend)
    expected = amp(x)
    capture = pool.submit(ampgraph.convert, Slow(), (x,))
    assert inside.wait(SECONDS)
    call = pool.submit(amp, x)
    with pytest.raises(TimeoutError):
        call.result(0.1)
    leave.set()
    assert torch.equal(call.result(SECONDS), expected)
    capture.result(SECONDS)


def test_a_capture_waits_until_another_is_rewritten(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewrite = graph_maker.rewrite
    rewriting, other, began = threading.Event(), threading.Event(), []

    def slow_rewrite(*args, **kwargs):
        rewriting.set()
        began.append(other.wait(SECONDS) and inside.wait(0.2))
        return rewrite(*args, **kwargs)

    monkeypatch.setattr(graph_maker, "rewrite", slow_rewrite)
    leave.set()
    first = pool.submit(ampgraph.convert, nn.Linear(8, 8), (torch.randn(2, 8),))
    assert rewriting.wait(SECONDS)
    second = pool.submit(lambda: other.set() or ampgraph.convert(Slow(), (torch.randn(2, 8),)))
    first.result(SECONDS)
    second.result(SECONDS)
    assert began[0] is False


def test_calls_that_capture_do_not_wait_for_each_other(pool: ThreadPoolExecutor) -> None:
    calls, both = CompiledCalls(), threading.Barrier(2)

    def call_and_capture() -> None:
        with calls.mutex:
            calls.begin()
        both.wait(SECONDS)
        with calls.kept_out(), calls.mutex:
            calls.begin()
            calls.end()
        with calls.mutex:
            calls.end()

    for done in [pool.submit(call_and_capture) for _ in range(2)]:
        done.result(5)


def test_a_call_inside_another_does_not_wait_for_a_capture_that_waits(pool: ThreadPoolExecutor) -> None:
    calls, waits = CompiledCalls(), threading.Event()
    calls.resting = lambda: waits.set() or CompiledCalls.resting(calls)  # type: ignore[method-assign]
    with calls.mutex:
        calls.begin()
    captured = pool.submit(lambda: calls.kept_out().__enter__())
    assert waits.wait(SECONDS)
    with calls.mutex:
        calls.begin()
        calls.end()
    assert not captured.done()
    with calls.mutex:
        calls.end()
    captured.result(5)


class BranchesInTraining(nn.Module):
    """No capture ahead of time in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return y * 2 if self.training and y.square().sum() > 0 else y


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_threads_fall_back_together(pool: ThreadPoolExecutor) -> None:
    x = torch.randn(2, 8)
    amp = ampgraph.convert(BranchesInTraining().eval(), (x,), dtype=torch.bfloat16)
    amp.train()
    together = threading.Barrier(3)

    def call() -> torch.Tensor:
        together.wait(SECONDS)
        return amp(x)

    results = [future.result(SECONDS) for future in [pool.submit(call) for _ in range(3)]]
    assert amp.is_just_in_time
    for result in results:
        torch.testing.assert_close(result, amp.source(x), atol=0.1, rtol=0)


def test_an_interrupted_capture_lets_calls_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    lock = CaptureLock()
    monkeypatch.setattr(threading.Condition, "wait_for", interrupt)
    with lock, pytest.raises(KeyboardInterrupt), lock.alone():
        pass
    with lock:  # a call that waits would be interrupted
        assert not lock._captures


def exit_code_of_fork(is_right: Callable[[], bool]) -> int:
    pid = os.fork()
    if pid == 0:
        os._exit(0 if is_right() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")


@needs_fork
def test_a_forked_process_has_free_locks(pool: ThreadPoolExecutor) -> None:
    capture = pool.submit(ampgraph.convert, Slow(), (torch.randn(2, 8),))
    assert inside.wait(SECONDS)
    code = exit_code_of_fork(lambda: tracing_lock().acquire(blocking=False) and not compiled_calls._captures)
    assert code == 0
    leave.set()
    capture.result(SECONDS)


@needs_fork
def test_locks_that_another_thread_held_at_a_fork_are_free(pool: ThreadPoolExecutor) -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    (block,) = ampgraph.convert_blocks(model, "0", dtype=torch.bfloat16, backend="eager").values()
    model(torch.randn(2, 8))
    captured = block._graphs.current
    of_process = (shadow_weights._lock, held_tensors._lock, global_hooks._lock, capture_lock._guard)
    locks = (*of_process, optimizer_steps._listeners._lock, captured._lock, captured.family._lock)

    def hold() -> None:
        with contextlib.ExitStack() as stack:
            for lock in locks:
                stack.enter_context(lock)
            wait_inside()

    holds = pool.submit(hold)
    assert inside.wait(SECONDS)
    code = exit_code_of_fork(lambda: all(lock.acquire(blocking=False) for lock in locks))
    leave.set()
    holds.result(SECONDS)
    assert code == 0


@needs_fork
def test_the_thread_that_forks_keeps_its_locks() -> None:
    lock = new_lock()
    with lock:
        assert exit_code_of_fork(lock._is_owned) == 0


def test_modules_of_torch_that_another_thread_is_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch.distributed.fsdp", "torch._dynamo"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    refuse_fsdp1(nn.Linear(2, 2))
    assert path_inside_wrappers(nn.Linear(2, 2)) == ""


def test_a_backward_and_data_beside_a_trace_of_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's flags and marks of a trace are the process's."""
    x = torch.randn(2, 4)
    amp = ampgraph.convert(nn.Linear(4, 4), (x,), dtype=torch.float16)
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    monkeypatch.setattr(fx_traceback, "should_preserve_node_meta", True)
    monkeypatch.setattr(fx_traceback, "annotate", None)
    assert torch.compiler.is_compiling()
    assert not is_compiling()
    with ampgraph.fp16_guard():
        amp(x).mean().backward()
    assert torch.allclose(amp.weight.grad, x.sum(0).expand(4, 4) / 8, rtol=1e-2, atol=1e-3)
    amp.weight.data.zero_()
    assert not amp(x)[:, 0].sub(amp.bias[0]).gt(1e-3).any()
