"""Ways to call a compiled function: eager's results, aliases and errors."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import onnx_ir as ir
import pytest
import torch
from onnxplug_compile.binding import RunError
from torch import nn

import onnxplug
from tests.support.compiled import compare

STRICT = {"fallback": False}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# -- settings of torch.compile ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"fullgraph": True, "options": STRICT},
        {"dynamic": True, "options": STRICT},
        {"dynamic": False, "options": STRICT},
        *({"mode": mode} for mode in ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")),
    ],
    ids=str,
)
def test_settings_of_torch_compile(settings: dict[str, Any]) -> None:
    compiled = torch.compile(lambda x: x.softmax(-1) * x.shape[0], backend="onnxplug", **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rows in (3, 5, 1):
            x = torch.randn(rows, 4)
            torch.testing.assert_close(compiled(x), x.softmax(-1) * rows)


def test_fullgraph_refuses_a_break() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x + 1

    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(broken, backend="onnxplug", fullgraph=True)(torch.ones(2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimise": True}, "no option 'optimise'"),
        ({"providers": ["NoSuchExecutionProvider"]}, "no execution provider 'NoSuchExecutionProvider'"),
        ({"session_options": {"enable_everything": 1}}, "no attribute 'enable_everything'"),
        ({"session_options": {"intra_op_num_threads": "two"}}, "intra_op_num_threads can't be 'two'"),
        ({"plugins": ["no-such-plugin"]}, "no plugin 'no-such-plugin' is installed"),
        ({"rewrites": {"no-such-rewrite": False}}, "no such rewrite"),
        ({"target": "no-such-target"}, "target='no-such-target' is unknown"),
    ],
)
def test_a_wrong_option_is_an_error_of_the_first_call(options: dict[str, Any], message: str) -> None:
    compiled = torch.compile(lambda x: x + 1, backend="onnxplug", options=options)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=message):
        compiled(torch.ones(2))


# -- inputs and outputs ----------------------------------------------------------------------------------------------------


def of_all_kinds(x: torch.Tensor, n: int, scale: float, flag: bool, nothing: None, more: dict[str, Any]) -> Any:
    y = x * n * scale + (1 if flag else 2)
    return y, n * 2, scale, flag, nothing, x.shape[0] + n, {"more": more["y"] + y.sum(), "none": None}, [x.size(1)]


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_numbers_bools_and_none(dynamic: bool | None) -> None:
    compiled = torch.compile(of_all_kinds, backend="onnxplug", dynamic=dynamic, options=STRICT)
    for rows, n, scale, flag in ((3, 2, 0.5, True), (4, 5, 1.5, False), (6, 7, -2.25, True), (1, 0, 0.0, False)):
        args = (torch.randn(rows, 4), n, scale, flag, None, {"y": torch.randn(())})
        compare(compiled(*args), of_all_kinds(*args))


def test_numbers_computed_from_floats() -> None:
    def function(x: torch.Tensor, scale: float) -> Any:
        return x * scale, scale * 2 + 1, int(x.shape[0] / 2)

    compiled = torch.compile(function, backend="onnxplug")
    for rows, scale in ((4, 0.5), (6, 1.5), (8, -3.0)):
        x = torch.randn(rows, 2)
        compare(compiled(x, scale), function(x, scale))


def test_views_of_inputs_are_views() -> None:
    compiled = torch.compile(lambda x: (x[1:], x.t(), x.view(-1), x, x + 1), backend="onnxplug", options=STRICT)
    x = torch.randn(3, 4)
    rows, transposed, flat, same, other = compiled(x)
    assert same is x
    x.fill_(5)
    for view in (rows, transposed, flat):
        assert view._base is x
        assert (view == 5).all()
    assert not (other == 6).any()
    assert transposed.stride() == (1, 4)


def sharing(x: torch.Tensor) -> Any:
    y, z = x * 2, x.sum(0)
    rows, flat = y.split(2)[-1], y.view(y.shape[0] * 2, -1)
    return y, y[1:], y.t(), y, rows, flat, y.unbind(1)[0], y.diagonal(), z.expand(y.shape[0], -1), z.unsqueeze(0)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.long
def test_results_that_share_memory_in_eager_share_it(dynamic: bool | None, training: bool) -> None:
    compiled = torch.compile(sharing, backend="onnxplug", dynamic=dynamic, options=STRICT)
    for rows in (3, 6, 5):
        x = torch.ones(rows, 4, requires_grad=training)
        mine, theirs = compiled(x), sharing(x)
        compare(mine, theirs)
        assert mine[0] is mine[3]
        for results in (mine, theirs):
            results[0].data.add_(1)
            results[2].data[0, 2] = 9
            results[4].data.mul_(3)
            results[9].data.sub_(5)
        compare(mine, theirs)


def test_a_view_alone_is_not_copied() -> None:
    """Not even where memory is not contiguous: ONNX Runtime computes the base of the view."""
    store: dict[str, Any] = {}
    compiled = torch.compile(
        lambda x: (x * 2).t()[1:], backend="onnxplug", options={"store": store, "optimize": False, **STRICT}
    )
    compare(compiled(torch.ones(3, 4)), (torch.ones(3, 4) * 2).t()[1:])
    (graph,) = store["graphs"]
    assert [node.op_type for node in graph.model.graph] == ["Mul"]


def add_and_double(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return y * 2


ALIASED: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    "the same": lambda base: (base, base),
    "a view": lambda base: (base, base[1:]),
    "overlapping views": lambda base: (base[:3], base[1:]),
    "apart": lambda base: (base[:2], base[2:]),
}


@pytest.mark.parametrize("name", ALIASED)
def test_inputs_that_share_memory_and_are_written(name: str) -> None:
    compiled = torch.compile(add_and_double, backend="onnxplug", options=STRICT)
    mine, theirs = torch.arange(8.0).view(4, 2), torch.arange(8.0).view(4, 2)
    for _ in range(2):
        torch.testing.assert_close(compiled(*ALIASED[name](mine)), add_and_double(*ALIASED[name](theirs)))
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("first", ALIASED)
def test_memory_that_is_shared_otherwise_in_a_later_call(first: str, dynamic: bool | None) -> None:
    """Eager's results: torch's own guards let the later calls pass, and its other backends then give wrong numbers."""
    later = [*ALIASED, first]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*share memory in another way")
        compiled = torch.compile(add_and_double, backend="onnxplug", dynamic=dynamic)
        for name in (first, *later):
            mine, theirs = torch.arange(8.0).view(4, 2), torch.arange(8.0).view(4, 2)
            torch.testing.assert_close(compiled(*ALIASED[name](mine)), add_and_double(*ALIASED[name](theirs)))
            torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("first", [32, 200])
def test_memory_that_is_shared_by_tensors_of_different_types(first: int, dynamic: bool | None) -> None:
    """torch compares offsets in elements: for it, bytes 32 to 48 are apart from floats 8 to 16, which have them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*share memory in another way")
        compiled = torch.compile(add_and_double, backend="onnxplug", dynamic=dynamic)
        for start in (first, 32, 200, 36):
            mine, theirs = torch.arange(64.0), torch.arange(64.0)
            views = [(base[8:16], base.view(torch.uint8)[start : start + 16]) for base in (mine, theirs)]
            torch.testing.assert_close(compiled(*views[0]), add_and_double(*views[1]))
            torch.testing.assert_close(mine, theirs)


def test_memory_that_is_shared_otherwise_warns_once_or_raises() -> None:
    base = torch.arange(8.0)
    for options in ({}, STRICT):
        torch._dynamo.reset()
        compiled = torch.compile(add_and_double, backend="onnxplug", options=options)
        compiled(base[:4], base[4:])
        if options:
            with pytest.raises(RunError, match="share memory in another way"):
                compiled(base[:4], base[2:6])
        else:
            with pytest.warns(UserWarning, match="share memory in another way"):
                compiled(base[:4], base[2:6])
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                compiled(base[:4], base[1:5])


def test_parts_of_one_memory_that_do_not_overlap() -> None:
    """The slots of a cache: each call has other slots, and eager PyTorch runs no call."""
    compiled = torch.compile(add_and_double, backend="onnxplug", options=STRICT)
    mine, theirs = torch.arange(24.0).view(6, 4), torch.arange(24.0).view(6, 4)
    for i, j in ((0, 1), (3, 2), (5, 0)):
        torch.testing.assert_close(compiled(mine[i], mine[j]), add_and_double(theirs[i], theirs[j]))
        torch.testing.assert_close(mine, theirs)
        other = compiled(mine[i], mine[j].view(torch.uint8))
        torch.testing.assert_close(other, add_and_double(theirs[i], theirs[j].view(torch.uint8)))


class Changing(nn.Module):
    """Writes its parameter and its buffer, replaces another buffer, and counts calls in a Python attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("last", torch.zeros(3))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        with torch.no_grad():
            self.weight.mul_(2)
        self.seen += x
        self.last = x * self.calls
        return x * self.weight + self.seen + self.last


@pytest.mark.long
def test_a_model_that_changes_itself() -> None:
    mine = Changing()
    theirs = copy.deepcopy(mine)
    compiled = torch.compile(mine, backend="onnxplug", options=STRICT)
    for _ in range(4):
        x = torch.randn(3)
        torch.testing.assert_close(compiled(x), theirs(x))
        compare(dict(mine.state_dict()), dict(theirs.state_dict()))
    mine.load_state_dict({"weight": torch.zeros(3), "seen": torch.ones(3), "last": torch.ones(3)})
    theirs.load_state_dict(mine.state_dict())
    mine.weight.data = theirs.weight.data = torch.full((3,), 4.0)
    theirs.weight.data = theirs.weight.data.clone()
    torch.testing.assert_close(compiled(torch.ones(3)), theirs(torch.ones(3)))


# -- calls that ONNX Runtime doesn't run -------------------------------------------------------------------------------


def no_operator(model: ir.Model) -> None:
    for node in model.graph:
        if node.op_type == "Erf":
            node.op_type = "NoSuchOperator"


REFUSED: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor, dict[str, Any]]] = {
    "a dtype without a kernel": (lambda x: x.erf() + 1, torch.randn(3).to(torch.bfloat16), {"target": None}),
    "a session that does not load": (lambda x: x.erf() + 1, torch.randn(3), {"transforms": [no_operator]}),
    "a dtype that ONNX lacks": (
        lambda x: x.view(torch.int32) + 1,
        torch.arange(4, dtype=torch.int32).view(torch.complex32),
        {},
    ),
    "an input that is not in memory": (lambda x: x * 2, torch.empty(3, device="meta"), {}),
    "an output that is not in memory": (lambda x: (x * 2).to("meta"), torch.randn(3), {}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_calls_that_onnx_runtime_does_not_run(name: str) -> None:
    function, x, options = REFUSED[name]
    compiled = torch.compile(function, backend="onnxplug", options=options)
    with pytest.warns(UserWarning, match="run by eager PyTorch") as seen:
        torch.testing.assert_close(compiled(x), function(x))
    assert len([w for w in seen if "eager PyTorch" in str(w.message)]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(compiled(x), function(x))
    torch._dynamo.reset()
    strict = torch.compile(function, backend="onnxplug", options={**options, **STRICT})
    with pytest.raises(Exception, match=r"."):
        strict(x)


@pytest.mark.parametrize(
    "dtype", [getattr(torch, f"float8_{kind}") for kind in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz")]
)
@pytest.mark.parametrize("dynamic", [None, True])
def test_float8_results(dtype: torch.dtype, dynamic: bool | None) -> None:
    """ONNX Runtime gives no DLPack tensor of float8 results."""

    def function(x: torch.Tensor) -> Any:
        return (x * 2).to(dtype), (x * 2).t().to(dtype), x[x > 1].to(dtype)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(function, backend="onnxplug", dynamic=dynamic, fullgraph=True, options=STRICT)
        for rows in (3, 3, 5):
            x = torch.randn(rows, 4)
            for got, expected in zip(compiled(x), function(x), strict=True):
                assert got.dtype == dtype
                compare(got.view(torch.uint8), expected.view(torch.uint8))


# -- custom operators ------------------------------------------------------------------------------------------------------


def test_a_custom_operator_by_a_rule() -> None:
    operator = torch.library.custom_op("onnxplug_calls_test::triple", mutates_args=())(_triple)
    operator.register_fake(torch.empty_like)
    operator.register_autograd(lambda context, grad: torch.ops.onnxplug_calls_test.triple(grad))

    def convert(g: onnxplug.GraphBuilder, node: onnxplug.FxNode) -> ir.Value:
        (x,) = node.args
        return g.op.Mul(x, g.const(3.0, x.dtype))

    rule = onnxplug.Rule("onnxplug_calls_test::triple", convert)
    compiled = torch.compile(
        lambda x: torch.ops.onnxplug_calls_test.triple(x).exp(), backend="onnxplug", options={"rules": [rule], **STRICT}
    )
    x = torch.randn(4, requires_grad=True)
    got = compiled(x)
    torch.testing.assert_close(got, (3 * x).exp())
    got.sum().backward()
    torch.testing.assert_close(x.grad, 3 * (3 * x.detach()).exp())


def _triple(x: torch.Tensor) -> torch.Tensor:
    return x * 3


# -- threads ---------------------------------------------------------------------------------------------------------------


def together(*works: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_threads_that_compile_at_once() -> None:
    """Equal graphs, which share a session, and graphs of their own; then many calls of one model."""

    def work(width: int) -> Callable[[], None]:
        def run() -> None:
            layer = nn.Sequential(nn.Linear(4, width), nn.Tanh())
            compiled = torch.compile(layer, backend="onnxplug", options=STRICT)
            with torch.no_grad():
                for rows in (2, 5, 7):
                    x = torch.randn(rows, 4)
                    torch.testing.assert_close(compiled(x), layer(x))

        return run

    together(work(3), work(3), work(5), work(6))


def test_threads_that_train_one_model() -> None:
    layer = nn.Linear(4, 3)
    compiled = torch.compile(layer, backend="onnxplug", dynamic=True, options=STRICT)
    torch.autograd.grad(compiled(torch.randn(2, 4)).sum(), [layer.weight])

    def work(rows: int) -> Callable[[], None]:
        def run() -> None:
            for _ in range(20):
                x = torch.randn(rows, 4)
                (got,) = torch.autograd.grad(compiled(x).square().sum(), [layer.weight])
                (expected,) = torch.autograd.grad(layer(x).square().sum(), [layer.weight])
                torch.testing.assert_close(got, expected)

        return run

    together(*(work(rows) for rows in (2, 3, 5)))


def test_calls_within_inference_mode_and_without_gradients() -> None:
    layer = nn.Linear(4, 3)
    compiled = torch.compile(layer, backend="onnxplug", options=STRICT)
    contexts: Sequence[Any] = (torch.no_grad(), torch.inference_mode(), torch.enable_grad())
    for context in contexts:
        with context:
            x = torch.randn(2, 4)
            got = compiled(x)
            torch.testing.assert_close(got, layer(x))
            assert got.requires_grad == layer(x).requires_grad
            assert got.is_inference() == layer(x).is_inference()
