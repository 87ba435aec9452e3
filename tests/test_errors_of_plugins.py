"""Errors of converters: a plugin's own error class is kept, and a converter's error is shown with its line."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import onnxplug
from onnxplug import ConversionError, OnnxplugError, Rule, Unsupported, UsageError

X = torch.arange(6.0).reshape(2, 3)


class CodedError(OnnxplugError):
    """A class with a constructor of its own."""

    def __init__(self, code: int, *, node: str) -> None:
        super().__init__(f"code {code}", hint="see the manual")
        self.code = code
        self.node = node


class CodedUnsupported(Unsupported):
    def __init__(self, dtype: str) -> None:
        super().__init__(f"no kernel for {dtype}")
        self.dtype = dtype


class Careless(OnnxplugError):
    """An error whose constructor does not call ours."""

    def __init__(self, code: int) -> None:
        self.code = code


class OwnText(UsageError):
    def __str__(self) -> str:
        return "a text of its own"


def _coded(g: Any, node: Any) -> Any:
    raise CodedError(7, node=node.name)


def _coded_unsupported(g: Any, node: Any) -> Any:
    raise CodedUnsupported("float8")


def _careless(g: Any, node: Any) -> Any:
    raise Careless(9)


def _own_text(g: Any, node: Any) -> Any:
    raise OwnText("message")


def _helper(value: Any) -> Any:
    return value["nothing"]


def _breaks(g: Any, node: Any) -> Any:
    return _helper({})


def _breaks_inside(g: Any, node: Any) -> Any:
    return g.op.Relu(node.args[0], _outputs=object())


def export(convert: Any, **options: Any) -> onnxplug.OnnxProgram:
    return onnxplug.to_onnx(lambda x: x.relu() + 1, (X,), rules=[Rule("aten::relu", convert, **options)])


@pytest.mark.parametrize(
    ("convert", "kind", "attributes", "text", "noted"),
    [
        (_coded, CodedError, {"code": 7, "node": "relu", "hint": "see the manual"}, "code 7", False),
        (
            _coded_unsupported,
            CodedUnsupported,
            {"dtype": "float8", "reason": "no kernel for float8"},
            "no kernel",
            False,
        ),
        (_careless, Careless, {"code": 9}, "9", False),
        (_own_text, OwnText, {}, "message", True),
    ],
)
def test_a_class_of_the_plugins_own_stays(
    convert: Any, kind: type, attributes: dict[str, Any], text: str, noted: bool
) -> None:
    """An error of a class with a text of its own bears the place as a note; any other error's text has the place."""
    with pytest.raises(kind) as caught:
        export(convert)
    error = caught.value
    assert type(error) is kind
    assert {name: getattr(error, name) for name in attributes} == attributes
    assert isinstance(error, OnnxplugError)
    place = "cannot convert aten::relu.default(float[2, 3]) at "
    for part in (place, "test_errors_of_plugins.py:", convert.__name__, text):
        assert part in error.message
    notes = [note for note in getattr(error, "__notes__", []) if place in note]
    assert (place in str(error), len(notes)) == (not noted, int(noted))
    assert error.message.count(place) == 1


@pytest.mark.parametrize("convert", [_breaks, _breaks_inside])
def test_a_converter_that_raises_is_shown_with_its_line(convert: Any) -> None:
    with pytest.raises(ConversionError) as caught:
        export(convert)
    inner = _helper if convert is _breaks else convert
    line = inner.__code__.co_firstlineno + 1
    assert f" ({__file__}:{line})" in str(caught.value)
    assert caught.value.__cause__ is not None


def test_a_condition_that_raises_is_shown_with_its_line() -> None:
    def when(node: Any) -> bool:
        return node.no_such_attribute  # type: ignore[no-any-return]

    with pytest.raises(ConversionError) as caught:
        export(lambda g, node: node.args[0], when=when)
    assert f"({__file__}:{when.__code__.co_firstlineno + 1})" in str(caught.value)
