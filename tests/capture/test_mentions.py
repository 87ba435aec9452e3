"""The functions and layers that a model's code names, found without running it."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import onnxplug
from onnxplug.capture import mentions
from onnxplug.capture.mentions import Mentions


def names(model: nn.Module, name: str) -> bool:
    return Mentions(model)(lambda met: met == name)


class Helper:
    """An object of a model; its method is named by code that is met before or after an object of this class."""

    def late(self, x: torch.Tensor) -> torch.Tensor:
        return torch.lstm_cell(x, [x, x], x, x)[0]

    def unused(self, x: torch.Tensor) -> torch.Tensor:
        return torch.gru_cell(x, x, x, x)


class Derived(Helper):
    pass


class Caller(nn.Module):
    def __init__(self, helper: Any, first: bool) -> None:
        super().__init__()
        if first:
            self.helper = helper
            self.inner = Named()
        else:
            self.inner = Named()
            self.helper = helper

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x, self.helper)


class Named(nn.Module):
    def forward(self, x: torch.Tensor, helper: Any) -> torch.Tensor:
        return helper.late(x)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("kind", [Helper, Derived])
def test_methods_are_met_in_either_order(first: bool, kind: type) -> None:
    model = Caller(kind(), first)
    assert names(model, "lstm_cell")
    assert not names(model, "gru_cell")


def test_layers_are_met() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ModuleList([nn.GRU(2, 2)]))
    assert names(model, "GRU")
    assert not names(model, "LSTM")


def test_one_search_answers_every_question(monkeypatch: pytest.MonkeyPatch) -> None:
    searches: list[None] = []
    run = mentions._Search.run
    monkeypatch.setattr(mentions._Search, "run", lambda self, model: (searches.append(None), run(self, model))[1])
    requested = Mentions(nn.Sequential(nn.GRU(2, 2)))
    assert [requested(lambda met, name=name: met == name) for name in ("GRU", "LSTM", "RNN")] == [True, False, False]
    assert len(searches) == 1


def test_a_search_that_gives_up_says_yes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mentions, "_MOST", 3)
    assert names(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), "no such layer")


def test_work_grows_with_code_and_not_with_code_times_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries such as x-transformers reach thousands of functions and classes of helpers."""
    calls: list[None] = []
    skipped = mentions._is_skipped

    def counted(*args: Any, **kwargs: Any) -> bool:
        calls.append(None)
        return skipped(*args, **kwargs)

    monkeypatch.setattr(mentions, "_is_skipped", counted)

    def work(count: int) -> int:
        calls.clear()
        model = nn.Module()
        for i in range(count):
            scope: dict[str, Any] = {"__name__": __name__}
            exec(f"def function_{i}(x): return x.name_{i}", scope)
            setattr(model, f"helper_{i}", type(f"Helper{i}", (), {f"name_{i}": scope[f"function_{i}"]})())
            setattr(model, f"function_{i}", scope[f"function_{i}"])
        assert not names(model, "lstm")
        return len(calls)

    assert work(200) < 3 * work(100)


def test_code_that_exec_ran_in_a_bare_dict() -> None:
    """The code's classes claim to be of the module builtins, whose own classes are not searched."""
    source = (
        "class Layer(torch.nn.Module):\n    def forward(self, x):\n        return torch.lstm_cell(x, [x, x], x, x)[0]\n"
    )
    namespace: dict[str, Any] = {"torch": torch}
    exec(source, namespace)
    assert namespace["Layer"].__module__ == "builtins"
    assert names(namespace["Layer"](), "lstm_cell")


def test_pytest_is_no_part_of_a_model_with_an_assertion() -> None:
    """pytest rewrites assertions in modules of tests: their code names its functions, from which every test can be reached."""

    class Asserting(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert x.dim() == 2
            return x + 1

    model = Asserting()
    assert any(name.startswith("@pytest") for name in Asserting.forward.__code__.co_names)
    assert [function.__qualname__ for function in Mentions(model).functions] == [Asserting.forward.__qualname__]


class Scaled(NamedTuple):
    """A number with its scale, as brevitas has them: adding anything to it works on its parts."""

    value: Any
    scale: Any

    def __radd__(self, other: Any) -> Any:
        return Scaled(self.value + other, self.scale)


def test_a_tuple_that_adds_itself_to_a_list() -> None:
    model = nn.Linear(2, 2)
    model.kept = Scaled(None, Helper().late)
    assert names(model, "lstm_cell")
    program = onnxplug.to_onnx(model, (torch.ones(3, 2),), verify=True)
    program.verify(args=(torch.randn(3, 2),), seeds=())
