"""autograd.Function with a symbolic method: honoured when asked, traced into otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import onnxplug
from onnxplug import compat
from tests.support.check import check


class Cap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, cap: float, mode: str = "tanh") -> Any:
        ctx.save_for_backward(x)
        ctx.cap = cap
        return cap * getattr(torch, mode)(x / cap)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad, None, None

    @staticmethod
    def symbolic(g: Any, x: Any, cap: float, mode: str = "tanh") -> Any:
        limit = g.op("Constant", value_t=torch.tensor(cap, dtype=x.type().dtype()))
        return g.op("Mul", limit, g.op(mode.capitalize(), g.op("Div", x, limit)))


apply_cap = Cap.apply  # as in most code: bound before any patch


class Pair(torch.autograd.Function):
    """A ``forward`` without ``ctx``, with a number and None among its results."""

    @staticmethod
    def forward(x: Any, y: Any, size: int) -> Any:
        return x[:size], None, (x + y).sum(), 3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)

    @staticmethod
    def symbolic(g: Any, x: Any, y: Any, size: Any) -> Any:
        from torch.onnx import symbolic_helper

        end = size if isinstance(size, torch._C.Value) else g.op("Constant", value_t=torch.tensor([size]))
        end = g.op("Reshape", end, g.op("Constant", value_t=torch.tensor([1])))
        head = g.op("Slice", x, g.op("Constant", value_t=torch.tensor([0])), end)
        total = symbolic_helper._reducesum_helper(g, g.op("Add", x, y), keepdims_i=0)
        return head, None, total


class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.mark_dirty(x)
        return x.add_(1)

    @staticmethod
    def symbolic(g: Any, x: Any) -> Any:
        return g.op("Add", x, torch.tensor(1.0))


class Plain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.clone()


def test_kept_on_request_and_inlined_otherwise(expect_graph: Any) -> None:
    class Custom(Cap):
        @staticmethod
        def symbolic(g: Any, x: Any, cap: float) -> Any:
            return g.op("com.acme::Cap", x, cap_f=cap, doc_s="soft")

    def model(x: Any) -> Any:
        return Custom.apply(x, 3.0) + 1

    args = (torch.randn(2, 3),)
    expect_graph(onnxplug.to_onnx(model, args), "Div Tanh Mul Add")
    rule = compat.autograd_function(Custom, domains={"com.acme": 2})
    program = onnxplug.to_onnx(model, args, rules=[rule])
    expect_graph(program, "com.acme::Cap Add")
    assert program.model.opset_imports["com.acme"] == 2
    assert program.model.graph[0].attributes["cap"].value == 3.0
    # Other operators would mean that the patch outlived the export.
    expect_graph(onnxplug.to_onnx(model, args), "Div Tanh Mul Add")
    assert Custom.apply(args[0], 3.0).shape == (2, 3)


def test_numbers_of_several_calls(expect_graph: Any) -> None:
    def model(x: Any) -> Any:
        return apply_cap(x, 3.0), Cap.apply(x, 5.0, "sigmoid"), apply_cap(x.double(), 3.0), Cap.apply(x, 3.0)

    program = check(
        model,
        torch.randn(2, 3) * 4,
        others=[(torch.randn(5, 3) * 9,), (torch.tensor([[float("nan"), 0.0, float("-inf")]]),)],
        dynamic=[{0: "n"}],
        rules=[compat.autograd_function(Cap)],
    )
    expect_graph(program, "... Sigmoid ...")
    targets = {str(n.target) for n in program.exported_program.graph.nodes}
    assert any("onnxplug_autograd" in t for t in targets)
    x = torch.randn(3, 3)
    torch.testing.assert_close(program.exported_program.module()(x), model(x))


def test_structure_of_results_and_dynamic_sizes() -> None:
    def model(x: Any, y: Any) -> Any:
        head, nothing, total, three = Pair.apply(x, y, y.shape[0] - 1)
        assert nothing is None
        return head * three, total

    check(
        model,
        torch.randn(4),
        torch.randn(4),
        others=[(torch.randn(7), torch.randn(7)), (torch.randn(2), torch.randn(2))],
        dynamic=[{0: "n"}, {0: "n"}],
        rules=[compat.autograd_function(Pair)],
    )


def test_an_exported_program() -> None:
    module = torch.nn.Module()
    module.forward = lambda x: Cap.apply(x, 2.0)
    with compat.keep_autograd_functions(Cap):
        exported = torch.export.export(module, (torch.randn(3),))
    program = onnxplug.to_onnx(exported, rules=[compat.autograd_function(Cap)])
    program.verify()
    with pytest.raises(onnxplug.MissingRuleError, match="onnxplug_autograd"):
        onnxplug.to_onnx(exported)


@pytest.mark.long
def test_a_subclass_and_a_parent_are_kept_each_by_itself(expect_graph: Any) -> None:
    class Child(Cap):
        @staticmethod
        def symbolic(g: Any, x: Any, cap: float) -> Any:
            return g.op("com.acme::Cap", x, cap_f=cap)

    def model(x: Any) -> Any:
        return Child.apply(x, 2.0), Cap.apply(x, 3.0).relu()

    x = torch.randn(3, requires_grad=True)
    before = vars(Cap)["forward"]
    with compat.keep_autograd_functions(Cap), compat.keep_autograd_functions(Cap, Child):
        torch.testing.assert_close(apply_cap(x, 3.0), 3 * torch.tanh(x / 3))
    child, parent = (compat.autograd_function(f, domains={"com.acme": 1}) for f in (Child, Cap))
    expect_graph(onnxplug.to_onnx(model, (x,), rules=[child]), "com.acme::Cap Div Tanh Mul Relu")
    expect_graph(onnxplug.to_onnx(model, (x,), rules=[parent]), "Div Tanh Mul Div Tanh Mul Relu")
    expect_graph(onnxplug.to_onnx(model, (x,), rules=[parent, child]), "com.acme::Cap Div Tanh Mul Relu")
    assert vars(Cap)["forward"] is before
    assert "forward" not in vars(Child)


def test_a_real_number_of_a_dynamic_size_is_not_fixed_silently() -> None:
    def model(x: Any) -> Any:
        return Cap.apply(x, x.shape[0] / 2)

    x, rule = torch.randn(2, 3), compat.autograd_function(Cap)
    with pytest.raises(onnxplug.FixedDimensionError, match=r"test_autograd\.py"):
        onnxplug.to_onnx(model, (x,), rules=[rule], dynamic_shapes=({0: "batch"},))
    check(model, x, rules=[rule])
    check(model, torch.randn(5, 3), rules=[rule])


def test_refusals() -> None:
    with pytest.raises(onnxplug.UsageError, match="has no static method symbolic"):
        compat.autograd_function(Plain)
    with pytest.raises(onnxplug.UsageError, match=r"takes a subclass of torch\.autograd\.Function"):
        compat.autograd_function(torch.nn.ReLU)
    rule = compat.autograd_function(Cap)
    with pytest.raises(onnxplug.UsageError, match=r"need torch.export's non-strict mode"):
        onnxplug.to_onnx(lambda x: Cap.apply(x, 2.0), (torch.randn(2),), rules=[rule], strict=True)
    with pytest.raises(onnxplug.OnnxplugError, match="Dirty writes its inputs"):
        onnxplug.to_onnx(lambda x: Dirty.apply(x * 2), (torch.randn(2),), rules=[compat.autograd_function(Dirty)])
