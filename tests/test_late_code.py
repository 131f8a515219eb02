"""The code of graph modules is written when somebody asks for it, and asking is no edit."""

import inspect
import threading

import pytest
import torch
from torch import fx, nn

import ampgraph
from ampgraph._compat import code_written_late, has_code, write_code

from .exported_models import Attention

BF16, X = torch.bfloat16, torch.randn(2, 5, 32)


@pytest.fixture
def written(monkeypatch):
    """The number of times that torch wrote the code of a graph."""
    found = []
    write = fx.Graph.python_code

    def counted(self, *args, **kwargs):
        found.append(self)
        return write(self, *args, **kwargs)

    monkeypatch.setattr(fx.Graph, "python_code", counted)
    return found


def graph_module():
    return fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))


def test_a_conversion_writes_no_code_until_somebody_reads_it(written):
    model, args = Attention(), (X,)
    amp = ampgraph.convert(model, args, dtype=BF16)
    out = amp(*args)
    with torch.no_grad():
        amp(*args)
    assert len(written) == 1  # of the trace itself, which may run code of the model that reads graphs
    assert "torch.ops.aten.linear" in amp.graph_module.code
    assert len(written) == 2
    assert torch.equal(amp(*args), out)
    assert len(written) == 2


@pytest.mark.parametrize("graph", ["graph_module", "training_graph", "inference_graph"])
def test_graphs_that_people_get_have_their_code(graph):
    model, args = Attention(), (X,)
    amp = ampgraph.convert(model, args, dtype=BF16)
    shown = getattr(amp, graph)
    assert [*inspect.signature(shown.forward).parameters] == ["x"]
    names = [node.name for node in fx.symbolic_trace(shown).graph.find_nodes(op="placeholder")]
    assert names == ["x"]


def test_reading_the_code_is_no_edit_and_an_edit_is_one():
    model, args = Attention(), (X,)
    amp = ampgraph.convert(model, args, dtype=BF16)
    out = amp(*args)
    captured = amp._graphs.current
    runners = dict(captured._runners)
    assert amp.graph_module.code
    assert amp.training_graph.code
    assert torch.equal(amp(*args), out)
    assert captured._runners == runners  # nothing was made again
    result = amp.graph_module.graph.output_node()
    with amp.graph_module.graph.inserting_before(result):
        doubled = amp.graph_module.graph.call_function(torch.add, (result.args[0][0], result.args[0][0]))
    result.args = ((doubled,),)
    amp.graph_module.recompile()
    assert torch.equal(amp(*args), 2 * out)


def test_a_graph_without_code_runs_and_prints():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    x = torch.ones(2, 4)
    with code_written_late():
        runs, prints, shows = (fx.symbolic_trace(model) for _ in range(3))
    assert torch.equal(runs(x), model(x))
    assert prints.code == runs.code
    assert "def forward(self, input)" in str(shows)


def test_code_stands_for_the_graph_at_the_last_recompile():
    with code_written_late():
        late = graph_module()
        before = type(late).forward
        late.recompile()
    assert not has_code(type(late), before)
    before = type(late).forward
    assert type(write_code(late)).forward is not before
    assert has_code(type(late), before)
    late.recompile()
    assert not has_code(type(late), before)


def test_bodies_get_their_code_too():
    class Branch(nn.Module):
        def forward(self, x):
            return torch.cond(x.sum() > 0, lambda x: x @ x, lambda x: x - 1, (x,))

    x = torch.randn(4, 4)
    amp = ampgraph.convert(Branch(), (x,), dtype=BF16)
    bodies = [part for part in amp.graph_module.modules() if isinstance(part, fx.GraphModule)]
    assert len(bodies) == 3
    assert all("def forward" in body.code for body in bodies)
    assert torch.equal(amp.graph_module(x), amp(x))


class Traced(nn.Module):
    """Has a graph module of the user, whose signature its forward reads, and makes another."""

    def __init__(self):
        super().__init__()
        self.graph = fx.symbolic_trace(nn.Sequential(nn.Linear(32, 32), nn.ReLU()))
        self.norm = nn.LayerNorm(32)

    def forward(self, x):
        again = fx.symbolic_trace(self.graph)
        return again(self.norm(x)) * len(inspect.signature(self.graph.forward).parameters)


def test_graph_modules_of_the_user_keep_their_code():
    model = Traced()
    code, out = type(model.graph).forward.__code__.co_varnames, model(X)
    amp = ampgraph.convert(model, (X,), dtype=BF16, capture="ahead of time")
    assert (amp(X) - out).norm() < 0.02 * out.norm()
    assert amp.graph_module.code
    assert type(model.graph).forward.__code__.co_varnames == code
    assert torch.equal(model(X), out)


def test_other_threads_write_their_code_at_once():
    made = []
    with code_written_late():
        thread = threading.Thread(target=lambda: made.append(graph_module()))
        thread.start()
        thread.join()
        mine = graph_module()
    assert "_code" in vars(made[0])
    assert "_code" not in vars(mine)


def test_torch_writes_its_own_code_again_after_an_error():
    recompile = fx.GraphModule.recompile
    with pytest.raises(KeyError), code_written_late(), code_written_late():
        raise KeyError
    assert fx.GraphModule.recompile is recompile
