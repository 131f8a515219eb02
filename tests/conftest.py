"""One thread: the tests share small machines, and thread pools cost more than these sizes gain."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread_fresh_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
