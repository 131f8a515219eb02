"""One thread: the tests share small machines, and thread pools cost more than these sizes gain."""

import functools
import gc
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ampgraph.cli.torchvision_shim import allow_torchvision

from .ranks import Ranks

# Lightning imports torchvision, and xdist's controller, which reads the workers' warnings, Lightning.
allow_torchvision()

# Captures make many small objects: with Python's 700, collections took 8 % of the CPU time of the tests.
gc.set_threshold(10_000, 20, 20)


def pytest_configure() -> None:
    """Pytest adds handlers to loggers that do not propagate; with one, torch records every fake tensor.

    From torch 2.14 on the handler that torch adds passes its first records on.
    """
    trace_log = logging.getLogger("torch.__trace")
    trace_log.propagate = True
    trace_log.handlers.clear()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts files that name a library of models last.

    Each class of modules in the process makes every capture slower, and these libraries have a thousand.
    """
    items.sort(key=lambda item: _names_a_library(item.path))


@functools.cache
def _names_a_library(path: Path) -> bool:
    return re.search(r"\b(timm|transformers|torchvision|zoo)\b", path.read_text("utf-8")) is not None


@pytest.fixture(autouse=True, scope="session")
def _dynamo_measures_nothing() -> Iterator[None]:
    """After each compilation Dynamo collects garbage, and times the guards for a log that nobody reads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._dynamo.config, "run_gc_after_compile", False)
        patch.setattr(torch._dynamo.guards, "profile_guard_manager", lambda *_: 0.0)
        yield


@pytest.fixture(autouse=True, scope="session")
def _seeds_for_no_gpu_are_dropped() -> Iterator[None]:
    """Until CUDA or XPU starts, torch keeps each seed with a formatted stack: 2 % of the tests' CPU time."""
    with pytest.MonkeyPatch.context() as patch:
        for device in (torch.cuda, torch.xpu):
            if not device.is_available():
                patch.setattr(device, "manual_seed_all", lambda seed: None)
        yield


@pytest.fixture(autouse=True, scope="module")
def _libraries_are_no_garbage():
    """A full collection looks at every object of torch, Dynamo and transformers, unless they are frozen."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _one_thread_fresh_seed(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    if "shared_captures" in request.fixturenames:
        torch._dynamo.pgo.reset_code_state()  # sizes of one test are no reason for dynamic ones in the next
    else:
        torch._dynamo.reset()


@pytest.fixture(scope="module")
def shared_captures() -> Iterator[None]:
    """For test files about what runs after a capture: models of one class share captures, plans and code."""
    from .captures import SharedCaptures, SharedCompilations

    with SharedCaptures().by_all(), SharedCompilations().by_all():
        yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Two processes; a module names in ``RANKS_IMPORT`` what its functions import."""
    pool = Ranks(imports=[request.module.__name__, *getattr(request.module, "RANKS_IMPORT", ())])
    yield pool
    pool.stop()
