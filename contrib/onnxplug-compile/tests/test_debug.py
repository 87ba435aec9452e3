"""torch.compile(backend="onnxplug_debug"): results of eager, and the name of an operator that is wrong."""

from __future__ import annotations

import copy
import tomllib
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from onnxplug_compile.debug import DifferenceError, onnxplug_debug_backend
from onnxplug_compile.options import DebugOptions, parse_options
from onnxplug_tools.diagnosis.verdict import Culprit
from torch import nn

import onnxplug
from onnxplug import Rule
from tests.support.check import Call
from tests.support.compiled import Everything, compare

PACKAGE = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(model: Callable[..., Any], dynamic: bool | None = None, **options: Any) -> Callable[..., Any]:
    return torch.compile(model, backend=onnxplug_debug_backend, options=options, dynamic=dynamic)


def equals_eager(model: nn.Module, *calls: tuple[Any, ...], train: bool = False, dynamic: bool | None = None) -> None:
    eager = copy.deepcopy(model)
    mine = compiled(model, dynamic=dynamic)
    for args in calls:
        inputs, theirs = copy.deepcopy(args), copy.deepcopy(args)
        torch.manual_seed(3)
        got = mine(*inputs)
        torch.manual_seed(3)
        expected = eager(*theirs)
        compare(got, expected)
        compare(inputs, theirs)
        if train:
            got.sum().backward()
            expected.sum().backward()
    for one, other in zip(model.parameters(), eager.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        if other.grad is not None:
            torch.testing.assert_close(one.grad, other.grad)


class Noisy(nn.Module):
    """Dropout, batch statistics and a complex number in between."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.4), nn.BatchNorm1d(6), nn.GELU(), nn.Linear(6, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.fft.fft(x + torch.rand_like(x)).abs()
        return self.body(y) * x.shape[0]


def test_all_that_a_graph_may_take_and_give() -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        equals_eager(Everything(), (torch.randn(3, 4), 2, 0.5), (torch.randn(5, 4), 3, -1.5), dynamic=True)


@pytest.mark.long
def test_training_with_draws_and_several_sizes() -> None:
    torch.manual_seed(0)
    equals_eager(Noisy(), *[(torch.randn(n, 4),) for n in (3, 7, 2)], train=True, dynamic=True)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm, self.out = nn.Embedding(9, 4), nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.out(self.lstm(self.embedding(x))[0]).flatten(0, 1), x.flatten())


TRAINED: dict[str, tuple[Callable[[], nn.Module], torch.Tensor]] = {
    "recurrent": (Recurrent, torch.arange(8).reshape(2, 4)),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 2)),
        torch.linspace(-2, 2, 108).reshape(3, 1, 6, 6).sin(),
    ),
    "attention": (lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), torch.linspace(-2, 2, 24).reshape(2, 3, 4)),
}  # fmt: skip


@pytest.mark.parametrize("name", TRAINED)
def test_forward_and_backward(name: str) -> None:
    """No right operator of either graph is called wrong."""
    torch.manual_seed(0)
    make, x = TRAINED[name]
    equals_eager(make(), (x,), train=True)


def test_results_that_are_views_of_a_transposed_tensor() -> None:
    model = Call(lambda x: ((y := (x + 1).t() * 2), y.t().view(-1), y.view(4, 3)))
    equals_eager(model, (torch.randn(3, 4),))


def test_nothing_to_compute() -> None:
    x = torch.randn(2, 3)
    assert compiled(lambda x: x.t())(x).data_ptr() == x.data_ptr()


def wrong_tanh(g: Any, node: Any) -> Any:
    return g.op.Sinh(node.args[0])


WRONG = Rule("aten::tanh", wrong_tanh)


def wavy(x: torch.Tensor) -> torch.Tensor:
    y = x.sin() * 2
    return y.tanh().exp()  # tanh has the wrong rule


def test_the_first_operator_that_differs_is_named() -> None:
    line = wavy.__code__.co_firstlineno + 2
    with pytest.raises(DifferenceError) as caught:
        compiled(wavy, rules=[WRONG])(torch.linspace(-1, 2, 5))
    verdict = caught.value.verdict
    assert verdict.culprit is Culprit.RULE
    assert (verdict.first.operator, verdict.first.location) == ("aten::tanh.default", f"{__file__}:{line}")
    text = str(caught.value)
    for part in ("aten::tanh.default", f"{__file__}:{line}", "wrong_tanh", "ONNX has", "PyTorch"):
        assert part in text
    assert isinstance(caught.value, onnxplug.VerificationError)


def test_without_compare_the_wrong_result_is_returned() -> None:
    x = torch.linspace(-1, 2, 5)
    torch.testing.assert_close(compiled(wavy, compare=False, rules=[WRONG])(x), ((x.sin() * 2).sinh()).exp())


def test_with_fallback_a_difference_is_a_warning_and_eager_goes_on() -> None:
    x = torch.linspace(-1, 2, 5)
    mine = compiled(wavy, rules=[WRONG], fallback=True)
    with pytest.warns(UserWarning, match=r"aten::tanh\.default"):
        torch.testing.assert_close(mine(x), wavy(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(mine(x), wavy(x))


def test_a_wrong_backward_rule_is_an_error() -> None:
    def wrong(g: Any, node: Any) -> Any:
        return node.args[0]

    model = nn.Sequential(nn.Linear(3, 3), nn.Sigmoid())
    mine = compiled(model, rules=[Rule("aten::sigmoid_backward", wrong)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the forward graph has no such operator
        result = mine(torch.randn(2, 3))
        with pytest.raises(DifferenceError, match=r"\(backward\) differs from PyTorch(.|\n)*aten::sigmoid_backward"):
            result.sum().backward()


def test_an_operator_without_a_rule_is_an_error() -> None:
    @torch.library.custom_op("debugged::op", mutates_args=())
    def op(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @op.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    with pytest.raises(Exception, match="debugged::op"):
        compiled(lambda x: op(x) + 1)(torch.ones(2))


# -- the text of a run -----------------------------------------------------------------------------------------------------


def test_a_run_as_text() -> None:
    lines: list[str] = []
    mine = compiled(lambda x: x.sin() * 2, verbose=2, write=lines.append)
    mine(torch.tensor([0.0, 1.0]))
    text = "\n".join(lines)
    assert lines[0].startswith("graph ")
    assert lines[0].endswith("(inference), call 0")
    assert " +I input_0: float32:(2,) in [0.0, 1.0]" in text
    assert "Sin(input_0) -> sin" in text
    assert " + sin: float32:(2,) in [0.0, 0.8414" in text
    assert "2 compared, none differ" in lines[-1]
    lines.clear()
    mine(torch.tensor([0.0, 1.0]))
    assert lines[0].endswith("call 1")


def test_levels_of_text(capsys: pytest.CaptureFixture[str]) -> None:
    compiled(lambda x: x.cos() + 1, verbose=1)(torch.arange(7.0))
    printed = capsys.readouterr().out
    assert "Cos(input_0) -> " in printed
    assert "float32" not in printed
    torch._dynamo.reset()
    compiled(lambda x: x.cos() + 1, verbose=10)(torch.arange(7.0))
    assert "0.0,1.0,2.0,3.0,4.0,5.0,6.0" in capsys.readouterr().out
    torch._dynamo.reset()
    compiled(lambda x: x.cos() + 1)(torch.arange(7.0))
    assert capsys.readouterr().out == ""


def test_text_goes_to_a_file(tmp_path: Path) -> None:
    file = tmp_path / "run.txt"
    mine = compiled(wavy, verbose=1, write=file, rules=[WRONG])
    with pytest.raises(DifferenceError):  # the file has the nodes that ran before
        mine(torch.ones(2))
    lines = file.read_text(encoding="utf-8").splitlines()
    assert lines[0].endswith("call 0")
    assert (
        lines[-1].endswith("3 compared, 1 differs; not compared: 1 folded or not in the ONNX graph")
        or "1 differs" in lines[-1]
    )
    assert any(line.startswith("Sinh(") for line in lines)


# -- options ---------------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": ({"compere": True}, "'onnxplug_debug' has no option 'compere'.*\n.*'compare'"),
    "compare": ({"compare": "yes"}, "'compare'.* is True or False"),
    "verbose": ({"verbose": -1}, "'verbose'.* level"),
    "write": ({"write": 3}, "'write'.* a file"),
    "write where": ({"write": "/nowhere/at/all.txt"}, "'write'.*'/nowhere/at/all.txt' can't be written"),
    "one of onnxplug's": ({"opset": 3}, "opset 3 is not supported"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_option_is_refused_by_name(name: str) -> None:
    options, message = REFUSED[name]
    with pytest.raises(onnxplug.OnnxplugError, match=message):
        parse_options(options, kind=DebugOptions)


def test_options_of_debugging_are_not_the_other_backends() -> None:
    with pytest.raises(onnxplug.UsageError, match="'onnxplug' has no option 'compare'"):
        parse_options({"compare": True})


def test_opset_and_store() -> None:
    store: dict[str, Any] = {}
    compiled(lambda x: x.softmax(-1), opset=17, store=store, target=None)(torch.ones(2, 3))
    (graph,) = store["graphs"]
    assert graph.model.opset_imports[""] == 17
    assert len(graph.calls) == 1


def test_it_is_registered() -> None:
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module, _, name = project["entry-points"]["torch_dynamo_backends"]["onnxplug_debug"].partition(":")
    assert getattr(import_module(module), name) is onnxplug_debug_backend


def test_numbers_drawn_in_a_branch_are_no_difference() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: torch.nn.functional.dropout(x, 0.5), lambda x: x.sin(), (x,)) * 2

    call = compiled(model)
    x = torch.rand(4, 3) + 1
    assert set((call(x) / x).flatten().round(decimals=3).tolist()) <= {0.0, 4.0}
    torch.testing.assert_close(call(-x), (-x).sin() * 2)
