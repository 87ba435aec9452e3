"""Bad input: each has its own clear error that says what, where, and what to do."""

from __future__ import annotations

import warnings
from typing import Any

import onnx_ir as ir
import pytest
import torch
from torch import nn

import onnxplug
from onnxplug import (
    CaptureError,
    ConversionError,
    Decline,
    MissingRuleError,
    OpsetError,
    OutputMismatchError,
    Rule,
    Unsupported,
    UsageError,
    VerificationError,
)

X = torch.arange(1.0, 7.0).reshape(2, 3)


@torch.library.custom_op("onnxplug_tests::mystery", mutates_args=())
def mystery(x: torch.Tensor) -> torch.Tensor:
    return x * 3


@mystery.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("onnxplug_tests::pair", mutates_args=())
def pair(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x * 3, x + 1


@pair.register_fake
def _(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


def export(function: Any, *args: Any, **options: Any) -> onnxplug.OnnxProgram:
    return onnxplug.to_onnx(function, args or (X,), **options)


def use_mystery(x: torch.Tensor) -> torch.Tensor:
    return mystery(x + 1)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((X, X), {}, "too many positional"),
        ((), {"y": X}, "missing a required argument|unexpected keyword"),
        ((X,), {"z": X}, "unexpected keyword argument 'z'"),
    ],
)
def test_inputs_that_do_not_fit_the_signature(args: Any, kwargs: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        onnxplug.to_onnx(lambda x: x + 1, args, kwargs=kwargs)


def test_shapes_that_do_not_fit() -> None:
    with pytest.raises(CaptureError) as caught:
        onnxplug.to_onnx(nn.Linear(4, 2), (X,))
    assert "[2, 3] X [4, 2]" in str(caught.value)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"z": {0: "b"}}, "names 'z', but the inputs are x"),
        ({"x": {2: "b"}}, "no axis 2 in a tensor of rank 2"),
        ({"x": ("b",)}, "1 entries for a tensor of rank 2"),
        (({0: "b"}, None), "2 entries for 1 inputs"),
        ({"x": "b"}, "name an axis"),
        ("b", "must be a dict"),
        ({"x": [{0: "b"}]}, "1 entries for a tensor of rank 2"),
        ({"x": {0: "3"}}, "a dimension is named '3', which is a number"),
        ({"x": {0: "-1"}}, "a dimension is named '-1', which is a number"),
        ({"x": {0: " "}}, "the name of a dimension is empty"),
        ({"x": {0: "b", 1: "b"}}, "'b' has the size 2 in axis 0 of x and 3 in axis 1 of x"),
    ],
)
def test_dynamic_shapes_that_do_not_fit(shapes: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        onnxplug.to_onnx(lambda x: x + 1, (X,), dynamic_shapes=shapes)


@pytest.mark.parametrize("wanted", ["batch", torch.export.Dim("batch"), torch.export.Dim.DYNAMIC])
def test_a_dynamic_dimension_that_specialises(wanted: Any) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return x + torch.ones(2, 3)

    with pytest.raises(CaptureError, match=r"(?s)dynamic.*(batch|x)"):
        onnxplug.to_onnx(model, (X,), dynamic_shapes={"x": {0: wanted}})


def test_a_model_that_cannot_be_captured() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x + 1
        return x.flip(0)

    with pytest.raises(CaptureError, match=r"test_errors\.py:\d+"):
        export(model)


def test_every_operator_without_a_rule_is_listed_with_its_lines() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        first = mystery(x)
        second, _ = pair(first)
        return mystery(second)

    with pytest.raises(MissingRuleError) as caught:
        export(model)
    assert set(caught.value.missing) == {"onnxplug_tests::mystery.default", "onnxplug_tests::pair.default"}
    places = caught.value.missing["onnxplug_tests::mystery.default"]
    assert len(places) == 2
    assert all("test_errors.py:" in place for place in places)
    assert "rules=[Rule(" in str(caught.value)


def converter_error(convert: Any, error: type[Exception], message: str, function: Any = use_mystery) -> None:
    op = "onnxplug_tests::pair" if function is use_pair else "onnxplug_tests::mystery"
    with pytest.raises(error, match=message) as caught:
        export(function, rules=[Rule(op, convert)])
    assert "test_errors.py:" in str(caught.value), "the user's line"


def use_pair(x: torch.Tensor) -> torch.Tensor:
    first, second = pair(x)
    return first + second


def test_converter_returns_too_few_outputs() -> None:
    converter_error(
        lambda g, node: [node.args[0]], OutputMismatchError, "returned 1 result where torch has 2 results", use_pair
    )


def test_converter_returns_too_many_outputs() -> None:
    converter_error(
        lambda g, node: [node.args[0]] * 3,
        OutputMismatchError,
        "returned 3 results where torch has 2; at",
        use_pair,
    )


def test_converter_returns_none() -> None:
    converter_error(
        lambda g, node: None, OutputMismatchError, r"returned None as result 0 where torch has a float\[2, 3\]"
    )
    converter_error(lambda g, node: [node.args[0], None], OutputMismatchError, "returned None as result 1", use_pair)


def test_converter_returns_the_wrong_dtype() -> None:
    converter_error(
        lambda g, node: g.cast(node.args[0], torch.int64),
        OutputMismatchError,
        "returned int64 as result 0 where torch has a float",
    )


def test_converter_returns_the_wrong_rank_or_shape() -> None:
    converter_error(lambda g, node: g.op.Unsqueeze(node.args[0], [0]), OutputMismatchError, "returned rank 3")
    converter_error(lambda g, node: g.op.Transpose(node.args[0], perm=[1, 0]), OutputMismatchError, "shape")


def test_converter_returns_something_else() -> None:
    converter_error(lambda g, node: 3, OutputMismatchError, r"returned an int \(3\)")


def test_converter_raises() -> None:
    def convert(g: Any, node: Any) -> Any:
        raise KeyError("oops")

    converter_error(convert, ConversionError, "the converter raised KeyError: 'oops'")


def test_converter_says_unsupported() -> None:
    def convert(g: Any, node: Any) -> Any:
        raise Unsupported("only on Tuesdays", hint="wait")

    converter_error(convert, Unsupported, "only on Tuesdays")


def test_converter_uses_a_dynamic_size_as_an_attribute() -> None:
    def convert(g: Any, node: Any) -> Any:
        return g.op.Softmax(node.args[0], axis=g.dim(node.args[0], 0))

    with pytest.raises(ConversionError, match=r"(?s)attribute 'axis' of Softmax must be a constant.*size batch"):
        onnxplug.to_onnx(
            use_mystery, (X,), dynamic_shapes=({0: "batch"},), rules=[Rule("onnxplug_tests::mystery", convert)]
        )


def test_a_converter_that_emits_an_unknown_operator() -> None:
    converter_error(lambda g, node: g.op.Gelo(node.args[0]), OpsetError, "no operator Gelo")
    converter_error(lambda g, node: g.op.Relu(node.args[0], slope=1.0), ConversionError, "no attribute 'slope'")
    converter_error(lambda g, node: g.op.Add(node.args[0]), ConversionError, "takes 2 to 2 inputs, got 1")
    with pytest.raises(OpsetError, match="it exists since opset 20"):
        export(
            use_mystery, rules=[Rule("onnxplug_tests::mystery", lambda g, n: g.op.Gelu(n.args[0]))], opset_version=18
        )


def test_decline_leaves_nothing_behind(expect_graph: Any) -> None:
    def declines(g: Any, node: Any) -> Any:
        g.op.Sin(g.op.Exp(node.args[0]))
        raise Decline("not today")

    def works(g: Any, node: Any) -> Any:
        return g.op.Mul(node.args[0], 3.0)

    rules = [Rule("onnxplug_tests::mystery", declines, priority=1), Rule("onnxplug_tests::mystery", works)]
    program = export(use_mystery, rules=rules, verify=True)
    expect_graph(program, "Add Mul")
    with pytest.raises(MissingRuleError, match="declined: not today"):
        export(use_mystery, rules=rules[:1])


def test_call_next_delegates() -> None:
    program = export(
        lambda x: x.relu(), rules=[Rule("aten::relu", lambda g, n: g.op.Neg(g.op.Neg(g.call_next(n))))], verify=True
    )
    assert "Relu" in [n.op_type for n in program.model.graph]


@pytest.mark.parametrize("opset", [12, 99, 0, "21", True])
def test_bad_opsets(opset: Any) -> None:
    with pytest.raises((OpsetError, ValueError, TypeError, AttributeError)) as caught:
        export(lambda x: x + 1, opset_version=opset)
    assert isinstance(caught.value, OpsetError)


@pytest.mark.parametrize("opset", [13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23])
def test_the_requested_opset_is_emitted(opset: int) -> None:
    program = export(lambda x: (x.softmax(-1) + x.mean(0)).reshape(-1), opset_version=opset, verify=True)
    assert program.model.opset_imports[""] == opset
    assert program.model_proto.opset_import[0].version == opset


@pytest.mark.parametrize("model", [3, "model", nn.Linear, None])
def test_things_that_are_no_model(model: Any) -> None:
    with pytest.raises(UsageError):
        onnxplug.to_onnx(model, (X,))


def test_rules_that_are_no_rules() -> None:
    with pytest.raises(UsageError, match="takes Rule objects"):
        export(lambda x: x + 1, rules=["aten::add"])
    with pytest.raises(UsageError, match="convert must be"):
        Rule("aten::add", 3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="range"):
        Rule("aten::add", print, opset=(20, 18))


def test_a_wrong_model_fails_verification_with_index_and_values() -> None:
    program = export(use_mystery, rules=[Rule("onnxplug_tests::mystery", lambda g, n: g.op.Mul(n.args[0], 2.0))])
    with pytest.raises(
        VerificationError, match=r"output 'output' differs at index \[\d, \d\]: ONNX has .* PyTorch"
    ) as caught:
        program.verify()
    assert "6 of 6 elements" in str(caught.value)
    with pytest.raises(VerificationError):
        export(use_mystery, rules=[Rule("onnxplug_tests::mystery", lambda g, n: g.op.Mul(n.args[0], 2.0))], verify=True)


def test_a_model_that_cannot_run_fails_verification() -> None:
    def convert(g: Any, node: Any) -> Any:
        return g.domain("com.nowhere").Mystery(node.args[0])

    program = export(use_mystery, rules=[Rule("onnxplug_tests::mystery", convert)])
    with pytest.raises(VerificationError, match=r"nothing runs com\.nowhere::Mystery"):
        program.verify()


def test_a_model_that_is_wrong_fails_verification() -> None:
    program = export(lambda x: x + 1)
    program.model.graph.outputs[0].dtype = ir.DataType.INT64
    with pytest.raises(VerificationError, match="can't load the model"):
        program.verify()


def test_two_versions_of_a_domain() -> None:
    def convert(g: Any, node: Any) -> Any:
        first = g.domain("com.acme", 1).A(node.args[0])
        return g.domain("com.acme", 2).B(first)

    with pytest.raises(OpsetError, match=r"two versions of domain 'com\.acme': 1 .* and 2 "):
        export(use_mystery, rules=[Rule("onnxplug_tests::mystery", convert)])


def test_training_mode_warns() -> None:
    with pytest.warns(UserWarning, match="training mode"):
        onnxplug.to_onnx(nn.Dropout(0.5).train(), (X,))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        onnxplug.to_onnx(nn.Dropout(0.5).eval(), (X,))


def test_a_weight_of_a_tensor_subclass_is_not_taken_for_a_plain_tensor() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    model = nn.Linear(3, 2)
    weight = model.weight.detach()
    model.weight = nn.Parameter(TwoTensor(weight.clone(), weight.clone()))
    with pytest.raises(onnxplug.OnnxplugError):
        onnxplug.to_onnx(model, (X,))
    program = torch.export.export(model, (X,), strict=False)
    with pytest.raises(UsageError, match="'weight' is a TwoTensor"):
        onnxplug.to_onnx(program)


@pytest.mark.parametrize(
    ("name", "instead"),
    [("dynamo_export", "to_onnx"), ("ExportOptions", "to_onnx"), ("enable_fake_mode", "fake_weights")],
)
def test_errors_for_names_of_2023(name: str, instead: str) -> None:
    with pytest.raises(AttributeError, match=rf"{name}.*there is .*{instead}"):
        getattr(onnxplug, name)
