"""Models that ask whether an export is under way are captured as they run in a call."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

import ampgraph
from ampgraph.errors import CaptureError

X = torch.randn(3, 4)


class Asking(nn.Module):
    """Resizes its bias in an export alone; ``on_call`` runs in a call alone."""

    def __init__(self, on_call=lambda x: x) -> None:
        super().__init__()
        self.linear, self.bias, self.on_call = nn.Linear(4, 4), nn.Parameter(torch.ones(2)), on_call

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias
        if torch.compiler.is_exporting():
            bias = nn.functional.interpolate(bias[None, None], size=4)[0, 0]
        else:
            bias, x = bias.repeat(2), self.on_call(x)
        return self.linear(x) + bias


def ops(amp: ampgraph.AmpModule) -> str:
    return str([node.target for node in amp.graph_module.graph.nodes])


def test_the_graph_is_that_of_a_call() -> None:
    model = Asking()
    assert not torch.compiler.is_exporting()
    amp = ampgraph.convert(model, (X,), policy="O0", capture="ahead of time")
    assert "repeat" in ops(amp)
    assert torch.equal(amp(X), model(X))


def test_a_graph_for_other_sizes_is_that_of_an_export() -> None:
    shapes = {"x": {0: torch.export.Dim("batch", min=2)}}
    amp = ampgraph.convert(Asking(), (X,), policy="O0", dynamic_shapes=shapes, capture="ahead of time")
    assert "repeat" not in ops(amp)


def test_a_call_that_cannot_be_captured_is_captured_as_an_export() -> None:
    model = Asking(lambda x: x if x.sum() < 1e9 else -x)
    amp = ampgraph.convert(model, (X,), policy="O0", capture="ahead of time")
    assert "upsample_nearest" in ops(amp)
    assert torch.equal(amp(X), nn.functional.linear(X, model.linear.weight, model.linear.bias) + 1)


def _scan(x: Tensor) -> Tensor:
    from torch._higher_order_ops import associative_scan

    return associative_scan(torch.add, x, dim=0, combine_mode="generic")


def test_a_call_with_scans_of_compilers_is_captured_as_an_export() -> None:
    amp = ampgraph.convert(Asking(_scan), (X,), policy="O0", capture="ahead of time")
    assert "upsample_nearest" in ops(amp)


def _recurrence_of_compilers(x: Tensor) -> Tensor:
    from torch._higher_order_ops.associative_scan import associative_scan_op

    if not torch.compiler.is_compiling():
        states = [x[0]]
        for row in x[1:]:
            states.append(row * states[-1] + row)
        return torch.stack(states)

    # `associative_scan` does so for tensors on a GPU.
    return associative_scan_op(lambda a, b, c, d: (a * c, c * b + d), (x, x), ())[1]


def test_a_call_with_the_scan_op_has_the_gradients_of_an_export() -> None:
    model = Asking(_recurrence_of_compilers)
    amp = ampgraph.convert(model, (X,), policy="O0", capture="ahead of time")
    assert "associative_scan" not in ops(amp)


class Scanning(nn.Module):
    """Runs the op in calls and exports alike."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        from torch._higher_order_ops.associative_scan import associative_scan_op

        if not torch.compiler.is_compiling():
            return self.linear(x)
        return associative_scan_op(lambda a, b: (a + b,), (self.linear(x),), ())[0]


def test_a_scan_that_an_export_has_too_warns_of_its_gradients() -> None:
    with pytest.warns(UserWarning, match="whose backward in torch leaves out gradients between its tensors"):
        amp = ampgraph.convert(Scanning(), (X,), policy="O0", capture="ahead of time")
    assert "associative_scan" in ops(amp)


class Failing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch.compiler.is_exporting()
        return x if x.sum() > 0 else -x


ORIGINAL = torch.compiler.is_exporting.__code__


def test_a_failed_capture_leaves_the_function_as_it_was() -> None:
    with pytest.raises(CaptureError):
        ampgraph.convert(Failing(), (X,), capture="ahead of time")
    assert torch.compiler.is_exporting.__code__ is ORIGINAL


def test_captures_of_two_threads_leave_the_function_as_it_was() -> None:
    other = threading.Thread(target=lambda: ampgraph.convert(Asking(), (X,), capture="ahead of time"))

    def start(x: Tensor) -> Tensor:
        other.start()
        other.join(0.2)  # it waits for this capture
        return x

    ampgraph.convert(Asking(start), (X,), capture="ahead of time")
    other.join()
    assert torch.compiler.is_exporting.__code__ is ORIGINAL


def test_torch_and_other_threads_get_the_true_answer() -> None:
    answers = {}

    def ask(x: Tensor) -> Tensor:
        thread = threading.Thread(target=lambda: answers.update(other=torch.compiler.is_exporting()))
        thread.start()
        thread.join()
        answers.update(
            model=torch.compiler.is_exporting(), torch=torch.nn.modules.activation._is_make_fx_tracing()
        )
        return x

    ampgraph.convert(Asking(ask), (X,), capture="ahead of time")
    assert answers == {"model": False, "torch": True, "other": True}


def test_attention_of_torch_stays_single_ops() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True).eval()
    with torch.no_grad():
        amp = ampgraph.convert(layer, (torch.randn(2, 3, 8),), capture="ahead of time")
    assert "scaled_dot_product_attention" in ops(amp)
