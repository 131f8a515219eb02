"""One thread: the tests share small machines, and thread pools cost more than these sizes gain."""

import pytest
import torch

from ampgraph.cli.torchvision_shim import allow_torchvision

# Lightning imports torchvision, and xdist's controller, which reads the workers' warnings, Lightning.
allow_torchvision()


@pytest.fixture(autouse=True)
def _one_thread_fresh_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
