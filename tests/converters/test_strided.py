"""Memory seen with other strides: through views, beyond the tensor's own elements, after writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import onnxplug
from onnxplug import Unsupported
from tests.support.check import Call, check

S = torch.as_strided
X = torch.arange(12.0).reshape(3, 4) * 1.5
OTHER = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
LONGER = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))

READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "rows": lambda x: S(x[1:], (2, 2), (4, 1), 0),
    "rows, from their own start": lambda x: S(x[1:], (2, 2), (4, 1)),
    "copy": lambda x: torch.as_strided_copy(x[1:], (2, 2), (4, 1), 0),
    "columns": lambda x: S(x[:, 1:3], (2, 2), (4, 1), 1),
    "columns, from their own start": lambda x: S(x[:, 1:3], (2, 2), (4, 1)),
    "beside the columns": lambda x: S(x[:, :2], (3, 4), (4, 1), 0),
    "scatter": lambda x: torch.as_strided_scatter(x[1:], x[:2, :2] * 2, (2, 2), (4, 1), 0),
    "scatter into columns": lambda x: torch.as_strided_scatter(x[:, 1:], x[:2, :2] * 2, (2, 2), (4, 1)),
    "scatter into a transposed view": lambda x: torch.as_strided_scatter(x.t()[1:], x[:2, :2] * 2, (2, 2), (4, 1), 2),
    "empty view": lambda x: S(x[x.shape[0] :], (2, 2), (4, 1), 0),
    "empty view, static": lambda x: S(x[:0], (2, 2), (4, 1), 0),
    "empty result": lambda x: S(x[1:], (0, 2), (4, 1)),
    "expanded": lambda x: S(x[0].expand(5, 4), (2, 4), (0, 1)),
    "select": lambda x: S(x[1], (2, 2), (4, 1), 1),
    "select behind it": lambda x: S(x[0], (2, 2), (4, 1), 4),
    "chunk": lambda x: S(x.chunk(2, 1)[1], (2, 2), (4, 1), 0),
    "unbind": lambda x: S(x.unbind(1)[2], (2, 2), (4, 1), 0),
    "view by reshape": lambda x: S(x[1:].reshape(-1), (2, 2), (4, 1), 0),
    "copy by reshape": lambda x: S(x.t().reshape(-1)[2:], (2, 2), (3, 1), 0),
    "transposed": lambda x: S((x.t() + 1)[1:], (2, 2), (1, 3), 0),
    "twice": lambda x: S(S(x[1:], (2, 3), (4, 1), 1)[1:], (2, 2), (4, 1), 0),
    "windows": lambda x: S(x.unfold(0, 2, 1), (2, 2), (4, 1), 2),
    "diagonal": lambda x: S(x.diagonal(), (2, 2), (4, 1), 0),
    "the tensor itself": lambda x: S(F.dropout(x.to(torch.float32).contiguous(), 0.5, False)[1:], (2, 2), (4, 1), 0),
    "complex": lambda x: torch.view_as_real(S(torch.complex(x, x + 1)[1:], (2, 2), (4, 1), 0)),
    "complex of equal parts": lambda x: torch.view_as_real(S(torch.complex(x, x)[:1], (2, 2), (4, 1), 0)),
    "conjugate": lambda x: torch.view_as_real(S(torch.complex(x, x + 1).conj()[1:], (2, 2), (4, 1), 0).resolve_conj()),
    "pairs": lambda x: S(torch.view_as_real(torch.complex(x, x + 1))[1:], (2, 2), (8, 1), 0),
    "one row fewer": lambda x: S(x[1:], (x.shape[0] - 1, 2, 2), (4, 1, 1), 0),
    "integers": lambda x: S(x.long()[1:], (2, 2), (4, 1), 0),
}


@pytest.mark.parametrize("name", READS)
def test_elements_of_the_memory(name: str) -> None:
    if name == "complex of equal parts":
        with pytest.raises(Unsupported, match="whose parts are one"):
            onnxplug.to_onnx(Call(READS[name]), (X,))
        return
    check(READS[name], X, others=[(OTHER,)])
    check(
        READS[name], X, others=[(OTHER,), (LONGER,)] if name != "copy by reshape" else [(OTHER,)], dynamic=({0: "b"},)
    )


def base_written(x: torch.Tensor) -> Any:
    x = x + 0
    y = x[1:]
    x.add_(1)
    return S(y, (2, 2), (4, 1), 0)


def view_written(x: torch.Tensor) -> Any:
    x = x + 0
    y = x[1:]
    y.add_(1)
    return S(y, (2, 2), (4, 1), 0), x


def result_written(x: torch.Tensor) -> Any:
    x = x + 0
    y = x[1:]
    z = S(y, (2, 2), (4, 1), 0)
    z.mul_(2)
    return x, y, z


def base_written_later(x: torch.Tensor) -> Any:
    x = x + 0
    y = x[:, 1:]
    z = S(y, (2, 2), (4, 1))
    x.mul_(2)
    y.sub_(1)
    return x, y, z


def all_written(x: torch.Tensor) -> Any:
    x = x + 0
    y = x[:, 1:]
    y.add_(1)
    z = S(y, (2, 2), (4, 1))
    z.add_(3)
    y[0] = 7
    return x, y, z


def input_written(x: torch.Tensor) -> Any:
    z = S(x[1:], (2, 2), (4, 1), 0)
    z.add_(3)
    return x * 1, z * 1


def transposed_written(x: torch.Tensor) -> Any:
    x = x.t() + 0
    y = x[1:]
    y.add_(1)
    z = S(y, (2, 2), (4, 1), 0)
    z.add_(3)
    return x, y, z


@pytest.mark.parametrize(
    "function", [base_written, view_written, result_written, base_written_later, all_written, input_written]
)
def test_writes(function: Callable[..., Any]) -> None:
    check(function, X.clone(), others=[(OTHER.clone(),)])
    check(function, X.clone(), others=[(OTHER.clone(),), (LONGER.clone(),)], dynamic=({0: "b"},))


def test_a_write_to_transposed_memory() -> None:
    check(transposed_written, X, others=[(OTHER,)])


def test_a_value_that_the_graph_lacks_is_no_element() -> None:
    """The example is a part of larger memory, of which the exported model gets nothing."""

    def program(function: Callable[..., Any], x: torch.Tensor) -> torch.export.ExportedProgram:
        return torch.export.export(Call(function), (x,))

    with pytest.raises(Unsupported, match="elements of the memory that the graph lacks"):
        onnxplug.to_onnx(program(lambda x: S(x, (2, 2), (4, 1), 0), X[1:]))
    with pytest.raises(Unsupported, match="elements of the memory that the graph lacks"):
        onnxplug.to_onnx(Call(lambda x: S(x, (3, 2), (4, 1), 0)), (X[:2],))
    with pytest.raises(Unsupported, match="does not fill its memory"):
        onnxplug.to_onnx(program(lambda x: S(x, (2, 2), (4, 1)), X[:, 1:]))
    check(lambda x: S(x, (2, 2), (4, 1)), X[1:], others=[(OTHER[1:],)])


def test_strides_and_offsets_of_views() -> None:
    """Strides and offsets are those of the memory, not of a contiguous tensor."""

    def model(x: torch.Tensor) -> Any:
        part, turned, last = x[:, :2], x.transpose(0, 2), x[x.shape[0] - 1 :]
        numbers = [part.stride(0), turned.stride(0), turned.stride(2), last.storage_offset(), x[1:].storage_offset()]
        return [x.sum() * 0 + number for number in numbers]

    check(model, torch.ones(3, 4, 5), others=[(torch.ones(2, 6, 7),), (torch.ones(5, 3, 2),)], dynamic=True)


@pytest.mark.parametrize("start", [(slice(1, None),), (slice(None), slice(1, None))], ids=["rows", "columns"])
@pytest.mark.parametrize("op", [torch.as_strided, torch.as_strided_copy])
def test_an_example_that_is_a_view_of_a_larger_memory(start: tuple[slice, ...], op: Any) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return op(x[:, 1:], (2, 2), (4, 1), 0) + 0

    x = torch.randn(6, 4)[start]
    with pytest.raises(onnxplug.OnnxplugError, match="a part of a larger memory"):
        onnxplug.to_onnx(model, (x,))
    y = x.clone()
    torch.testing.assert_close(onnxplug.to_onnx(model, (y,))(y)[0], model(y))


def test_an_example_that_is_a_view_of_its_whole_memory() -> None:
    x = torch.randn(4, 6).t()
    model = lambda x: torch.as_strided(x, (2, 2), (4, 1), 0) + 0  # noqa: E731
    torch.testing.assert_close(onnxplug.to_onnx(model, (x,))(x)[0], model(x))
