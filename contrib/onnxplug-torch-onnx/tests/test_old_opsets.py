"""Models of opsets 9 to 12: each is right, or refused with the first opset that has it."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from onnx import version_converter
from onnxplug_torch_onnx import old_opsets
from onnxscript import opset13 as op
from torch import nn
from torch.utils._pytree import tree_leaves

import onnxplug
from onnxplug import OpsetError, VerificationError
from onnxplug.verification.compare import compare

OPSETS = (9, 10, 11, 12)
Make = Callable[[int], torch.Tensor]
#: By name: a model, and a function for each of its inputs, from the size of the batch.
CASES: dict[str, tuple[Any, ...]] = {}


def floats(*sizes: int) -> Make:
    return lambda batch: torch.randn(batch, *sizes)


def integers(low: int, high: int) -> Make:
    return lambda batch: torch.randint(low, high, (batch, 3))


def steps(batch: int) -> torch.Tensor:
    return torch.randn(3, batch, 4)


class First(nn.Module):
    """The first result of a module; attention gets its input three times."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(*[x] * (3 if isinstance(self.module, nn.MultiheadAttention) else 1))[0]


def called(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: getattr(torch, name)(x)


CASES |= {
    "add": (lambda x, y: x + y, floats(3, 4), floats(3, 4)),
    "mul_sub_div": (lambda x, y: x * y - x / (y * y + 1), floats(3, 4), floats(3, 4)),
    "matmul": (lambda x, y: x @ y, floats(3, 4), floats(4, 5)),
    "linear": (nn.Linear(4, 5), floats(4)),
    "linear_nobias": (nn.Linear(4, 5, bias=False), floats(4)),
    "linear3d": (nn.Linear(4, 5), floats(3, 4)),
    "conv": (nn.Conv2d(3, 4, 3, padding=1), floats(3, 8, 9)),
    "conv1d_same": (nn.Conv1d(3, 4, 4, padding="same"), floats(3, 8)),
    "conv_t": (nn.ConvTranspose2d(3, 4, 3, stride=2), floats(3, 5, 6)),
    "bn": (nn.BatchNorm2d(3), floats(3, 5, 6)),
    "ln": (nn.LayerNorm(6), floats(3, 6)),
    "in": (nn.InstanceNorm2d(3), floats(3, 5, 6)),
    "gn": (nn.GroupNorm(2, 4), floats(4, 5, 6)),
    "softmax_last": (lambda x: x.softmax(-1), floats(3, 4)),
    "softmax_mid": (lambda x: x.softmax(1), floats(3, 4, 5)),
    "logsoftmax_mid": (lambda x: x.log_softmax(1), floats(3, 4)),
    "logsoftmax_last": (lambda x: x.log_softmax(-1), floats(3, 4)),
    "sum_axes": (lambda x: x.sum((1, 2)), floats(3, 4)),
    "sum_keep": (lambda x: x.sum(-1, keepdim=True), floats(3, 4)),
    "sum_all": (lambda x: x.sum()[None] + x[0, :1], floats(3)),
    "mean": (lambda x: x.mean((-1,)), floats(3, 4)),
    "amin": (lambda x: x.amin(-1), floats(3, 4)),
    "loop": (
        lambda x: torch.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 2), (torch.tensor(0), x))[1],
        floats(3),
    ),
    "amax": (lambda x: x.amax(-1), floats(3, 4)),
    "prod": (lambda x: x.prod(1), floats(3, 4)),
    "norm": (lambda x: x.norm(dim=-1), floats(3, 4)),
    "logsumexp": (lambda x: x.logsumexp(-1), floats(3, 4)),
    "var": (lambda x: x.var(-1), floats(3, 4)),
    "argmax": (lambda x: x.argmax(-1), floats(3, 4)),
    "argmin": (lambda x: x.argmin(1), floats(3, 4)),
    "topk": (lambda x: x.topk(2, -1), floats(3, 6)),
    "topk_smallest": (lambda x: x.topk(2, -1, largest=False), floats(3, 6)),
    "sort": (lambda x: x.sort(-1), floats(3, 6)),
    "cumsum": (lambda x: x.cumsum(1), floats(3, 6)),
    "max_dim": (lambda x: x.max(-1), floats(3, 4)),
    "squeeze_unsqueeze": (lambda x: x.unsqueeze(1).squeeze(-1), floats(3, 1)),
    "unsqueeze_neg": (lambda x: x.unsqueeze(-1) * 2, floats(3)),
    "reshape": (lambda x: x.reshape(x.shape[0], -1), floats(3, 4)),
    "flatten": (lambda x: x.flatten(1), floats(3, 4)),
    "transpose": (lambda x: x.transpose(1, 2), floats(3, 4)),
    "expand": (lambda x: x.expand(2, -1, -1, -1), floats(3, 4)),
    "repeat": (lambda x: x.repeat(1, 2, 3), floats(3, 4)),
    "cat_neg": (lambda x, y: torch.cat([x, y], -1), floats(3, 4), floats(3, 5)),
    "stack": (lambda x, y: torch.stack([x, y], 1), floats(3, 4), floats(3, 4)),
    "split": (lambda x: x.split(2, -1), floats(3, 6)),
    "split_uneven": (lambda x: x.split([1, 2, 3], 1), floats(6)),
    "chunk": (lambda x: x.chunk(3, -1), floats(3, 6)),
    "unbind": (lambda x: x.unbind(1), floats(3, 4)),
    "slice": (lambda x: x[:, 1:3], floats(5)),
    "slice_neg": (lambda x: x[:, -3:-1], floats(5)),
    "slice_step": (lambda x: x[:, ::2], floats(5)),
    "slice_dyn": (lambda x: x[:, : x.shape[0]], floats(9)),
    "flip": (lambda x: x.flip(1), floats(5)),
    "select": (lambda x: x[:, -1], floats(5)),
    "roll": (lambda x: x.roll(1, 1), floats(5)),
    "index_list": (lambda x: x[:, [0, 2, -1]], floats(5)),
    "index2": (lambda x: x[:, [0, 2], [1, 3]], floats(4, 5)),
    "gather": (lambda x: x.gather(1, torch.tensor([[0, 1, -0, 2]]).expand(x.shape[0], -1)), floats(5)),
    "scatter": (lambda x: x.scatter(1, torch.zeros_like(x, dtype=torch.int64)[:, :1], 5.0), floats(5)),
    "index_put": (
        lambda x: torch.zeros_like(x).index_put((torch.tensor([0]), torch.tensor([1])), torch.tensor(2.0)),
        floats(5),
    ),
    "masked_fill": (lambda x: x.masked_fill(x > 0, -1.0), floats(5)),
    "where": (lambda x, y: torch.where(x > y, x, y), floats(5), floats(5)),
    "embedding": (nn.Embedding(10, 4), integers(0, 10)),
    "nonzero": (lambda x: (x > 0).nonzero(), floats(5)),
    "onehot": (lambda x: F.one_hot(x, 10), integers(0, 10)),
    "clamp": (lambda x: x.clamp(-0.5, 0.5), floats(5)),
    "clamp_min": (lambda x: x.clamp(min=0.1), floats(5)),
    "clamp_int": (lambda x: x.clamp(1, 3), integers(0, 10)),
    "relu6": (nn.ReLU6(), floats(5)),
    "hardtanh": (nn.Hardtanh(), floats(5)),
    "hardswish": (nn.Hardswish(), floats(5)),
    "hardsigmoid": (nn.Hardsigmoid(), floats(5)),
    "pow": (lambda x: x.abs() ** 1.5 + x**2, floats(5)),
    "pow_int": (lambda x: x**2, integers(0, 10)),
    "fmod": (lambda x, y: torch.fmod(x, y.abs() + 1), floats(5), floats(5)),
    "remainder": (lambda x: x % 3, floats(5)),
    "remainder_int": (lambda x: x % 3, integers(-9, 10)),
    "floor_div": (lambda x: x // 2, integers(-9, 10)),
    "maximum": (lambda x, y: torch.maximum(x, y), floats(5), floats(5)),
    "maximum_int": (lambda x: torch.maximum(x, x * 0 + 2), integers(-9, 10)),
    "eq_float": (lambda x: x == x.round(), floats(5)),
    "eq_int": (lambda x: x == 3, integers(0, 5)),
    "ge": (lambda x, y: x >= y, floats(5), floats(5)),
    "lt_int": (lambda x: x < 3, integers(0, 5)),
    "logical": (lambda x, y: (x > 0) & (y > 0) | ~(x > 1), floats(5), floats(5)),
    "any": (lambda x: (x > 0).any(1), floats(5)),
    "isnan": (lambda x: (x / x.round()).isnan(), floats(5)),
    "isinf": (lambda x: (1 / x.round()).isinf(), floats(5)),
    "maxpool": (nn.MaxPool2d(2), floats(3, 8, 9)),
    "maxpool_ceil": (nn.MaxPool2d(3, 2, 1, ceil_mode=True), floats(3, 8, 9)),
    "maxpool_dil": (nn.MaxPool2d(2, 1, dilation=2), floats(3, 8, 9)),
    "avgpool": (nn.AvgPool2d(2), floats(3, 8, 9)),
    "avgpool_pad": (nn.AvgPool2d(3, 2, 1, count_include_pad=False), floats(3, 8, 9)),
    "avgpool_ceil": (nn.AvgPool2d(3, 2, ceil_mode=True), floats(3, 8, 9)),
    "gap": (nn.AdaptiveAvgPool2d(1), floats(3, 8, 9)),
    "adaptive_max": (nn.AdaptiveMaxPool2d(1), floats(3, 8, 9)),
    "pad": (lambda x: F.pad(x, (1, 2)), floats(3, 4)),
    "pad_neg": (lambda x: F.pad(x, (-1, 2, 0, 1)), floats(3, 4)),
    "pad_reflect": (lambda x: F.pad(x, (1, 2), mode="reflect"), floats(3, 4)),
    "pad_value": (lambda x: F.pad(x, (1, 2), value=3.0), floats(3, 4)),
    "pad_edge": (lambda x: F.pad(x, (1, 2), mode="replicate"), floats(3, 4)),
    "nearest": (lambda x: F.interpolate(x, scale_factor=2.0), floats(3, 4, 5)),
    "nearest_size": (lambda x: F.interpolate(x, size=(7, 9)), floats(3, 4, 5)),
    "bilinear": (lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"), floats(3, 4, 5)),
    "bilinear_corners": (lambda x: F.interpolate(x, size=(7, 9), mode="bilinear", align_corners=True), floats(3, 4, 5)),
    "bicubic": (lambda x: F.interpolate(x, size=(7, 9), mode="bicubic"), floats(3, 4, 5)),
    "pixel_shuffle": (nn.PixelShuffle(2), floats(4, 3, 5)),
    "pixel_unshuffle": (nn.PixelUnshuffle(2), floats(3, 4, 6)),
    "lstm": ((lambda m: lambda x: m(x)[0])(nn.LSTM(4, 5)), steps),
    "gru": ((lambda m: lambda x: m(x)[0])(nn.GRU(4, 5, bidirectional=True)), steps),
    "rnn": ((lambda m: lambda x: m(x)[0])(nn.RNN(4, 5)), steps),
    "mha": ((lambda m: lambda x: m(x, x, x)[0])(nn.MultiheadAttention(8, 2, batch_first=True)), floats(3, 8)),
    "sdpa": (lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True), floats(2, 5, 8)),
    "encoder": (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), floats(3, 8)),
    "einsum": (lambda x, y: torch.einsum("bij,bjk->bik", x, y), floats(3, 4), floats(4, 5)),
    "bmm": (lambda x, y: torch.bmm(x, y), floats(3, 4), floats(4, 5)),
    "addmm": (lambda x: torch.addmm(torch.ones(5), x, torch.ones(4, 5), beta=2.0), floats(4)),
    "arange": (lambda x: x + torch.arange(x.shape[0])[:, None], floats(4)),
    "full": (lambda x: torch.full((x.shape[0], 3), 2.5), floats(4)),
    "tril": (lambda x: x.tril(), floats(4, 4)),
    "cast": (lambda x: x.to(torch.int64).to(torch.float64), floats(4)),
    "zeros_like": (lambda x: torch.zeros_like(x) + torch.ones_like(x), floats(4)),
    "meshgrid": (
        lambda x: (
            torch.stack(torch.meshgrid(torch.arange(3), torch.arange(4), indexing="ij")).float()
            + x[:, :1, None, None][:1, 0]
        ),
        floats(4),
    ),
    "unfold": (lambda x: F.unfold(x, 2), floats(3, 4, 5)),
    "grid_sample": (
        lambda x: F.grid_sample(x, torch.zeros(x.shape[0], 2, 2, 2) + 0.3, align_corners=False),
        floats(3, 4, 5),
    ),
    "half": (lambda x: x.half(), floats(4)),
    "bitand": (lambda x: x & 3, integers(0, 9)),
    "loop_if": (lambda x: torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,)), floats(3)),
    "det": (lambda x: torch.linalg.det(x), floats(3, 3)),
    "mse": (lambda x, y: F.mse_loss(x, y)[None], floats(3), floats(3)),
    "nll": (lambda x: F.cross_entropy(x, torch.zeros(x.shape[0], dtype=torch.int64), reduction="none"), floats(3)),
    "dropout": (nn.Dropout(), floats(3)),
    "cdist": (lambda x, y: torch.cdist(x, y), floats(3, 4), floats(2, 4)),
    "std": (lambda x: x.std(-1, keepdim=True), floats(3, 4)),
    "var_mean": (lambda x: torch.var_mean(x, (1, 2)), floats(3, 4)),
    "lp": (nn.CosineSimilarity(), floats(3), floats(3)),
    "normalize": (lambda x: F.normalize(x), floats(3)),
    "local_response": (nn.LocalResponseNorm(2), floats(3, 4, 5)),
    "glu": (nn.GLU(), floats(4)),
    "cumprod": (lambda x: x.cumprod(1), floats(4)),
    "allclose": (lambda x: x.bool().all(1), floats(4)),
    "index_select": (lambda x: x.index_select(1, torch.tensor([0, 2])), floats(4)),
    "nms_like": (lambda x: x[x[:, 0] > -9], floats(4)),
}
for _name in "ReLU LeakyReLU ELU SELU Sigmoid Tanh Softplus Softsign GELU SiLU Mish PReLU LogSigmoid CELU".split():
    CASES[_name] = (getattr(nn, _name)(), floats(3, 5))
for _name in "exp abs neg floor ceil round sin cos tan atan erf sign reciprocal sigmoid tanh trunc sinh cosh".split():
    CASES[_name] = (called(_name), floats(5))
for _name in "sqrt log rsqrt log1p".split():
    CASES[_name] = (called(_name), lambda batch: torch.rand(batch, 5) + 0.1)
#: The first opset that has a case, where it is not 9.
SINCE = {
    **dict.fromkeys("logsumexp slice_step slice_dyn flip fmod remainder_int maxpool_dil".split(), 10),
    **dict.fromkeys(
        "topk_smallest sort cumsum index2 gather scatter index_put round log1p remainder eq_float ge isnan".split(), 11
    ),
    **dict.fromkeys(
        "isinf nearest bilinear bilinear_corners bicubic pixel_shuffle arange grid_sample bitand det nll".split(), 11
    ),
    **dict.fromkeys("clamp_int CELU maximum_int einsum".split(), 12),
}
if version("onnxscript") == "0.7.0":  # its optimizer leaves Range in the graph
    SINCE["tril"] = 11


def run(proto: onnx.ModelProto, inputs: tuple[torch.Tensor, ...]) -> list[np.ndarray[Any, Any]]:
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    return session.run(None, {name: x.numpy() for name, x in zip(names, inputs, strict=True)})


def wrong(proto: onnx.ModelProto, model: Any, inputs: tuple[torch.Tensor, ...]) -> list[str]:
    """The differences from eager PyTorch."""
    with torch.no_grad():
        expected = tree_leaves(model(*inputs))
    pairs = zip(run(proto, inputs), expected, strict=True)
    outcomes = [compare(torch.from_numpy(result), leaf) for result, leaf in pairs]
    return [str(outcome) for outcome in outcomes if not outcome.equal]


def export(model: Any, inputs: tuple[torch.Tensor, ...], axis: int, opset: int) -> onnx.ModelProto:
    shapes = tuple({axis: "batch"} for _ in inputs)
    program = onnxplug.export(model, inputs, dynamic_shapes=shapes, opset_version=opset)
    assert program is not None
    return program.model_proto


@pytest.mark.parametrize("name", CASES)
def test_right_or_refused(name: str) -> None:
    torch.manual_seed(0)
    model, *makes = CASES[name]
    model = model.eval() if isinstance(model, nn.Module) else model
    first, second = (tuple(make(batch) for make in makes) for batch in (2, 3))
    for opset in OPSETS:
        since = SINCE.get(name, 9)
        if opset < since:
            with pytest.raises(OpsetError, match=f"no form in opset {opset}") as refused:
                export(model, first, int(makes == [steps]), opset)
            assert refused.value.hint == f"Ask for opset {since} or a newer one."
            continue
        proto = export(model, first, int(makes == [steps]), opset)
        onnx.checker.check_model(proto, full_check=True)
        assert [entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx")] == [opset]
        assert [wrong(proto, model, inputs) for inputs in (first, second)] == [[], []], opset


@pytest.mark.long
def test_each_operator_is_in_a_case() -> None:
    seen = {"Constant", "GreaterOrEqual", "LessOrEqual"}  # Constant: a test below; the others: lowered to two nodes
    for model, *makes in CASES.values():
        model = model.eval() if isinstance(model, nn.Module) else model
        proto = export(model, tuple(make(2) for make in makes), int(makes == [steps]), 12)
        seen |= {node.op_type for node in ir.from_proto(proto).graph.all_nodes()}
    assert sorted((old_opsets._SAME | set(old_opsets._FORMS)) - seen) == []


@pytest.mark.parametrize("opset", OPSETS)
def test_a_constant_of_a_translation(opset: int) -> None:
    def relu6(x: Any, low: Any, high: Any) -> Any:
        return op.Clip(x, op.Constant(value_float=0.0), op.Constant(value_float=6.0))

    table = {torch.ops.aten.hardtanh.default: relu6}
    model, x = nn.ReLU6(), 9 * torch.randn(3, 4)
    if opset < 12:
        with pytest.raises(OpsetError, match="no form in opset"):
            onnxplug.export(model, (x,), opset_version=opset, custom_translation_table=table)
        return
    program = onnxplug.export(model, (x,), opset_version=opset, custom_translation_table=table)
    assert program is not None
    assert [wrong(program.model_proto, model, (value,)) for value in (x, 2 * x)] == [[], []]


@pytest.mark.parametrize("dynamo", [True, False])
def test_the_call_as_it_was(dynamo: bool, tmp_path: Path) -> None:
    model, x, file = nn.Sequential(nn.Linear(3, 4), nn.Softmax(0)), torch.randn(2, 3), tmp_path / "model.onnx"
    onnxplug.export(model, (x,), file, opset_version=9, dynamo=dynamo, verify=True, external_data=False)
    proto = onnx.load(file)
    assert (proto.opset_import[0].version, proto.ir_version) == (9, 4)
    assert [wrong(proto, model, (value,)) for value in (x, 2 * x)] == [[], []]


def test_verification_sees_the_older_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verification finds a wrong form."""

    def mistaken(lowering: Any, node: Any) -> None:
        lowering.set(node, "axis", 1)

    monkeypatch.setitem(old_opsets._FORMS, "Softmax", ((13, mistaken),))
    with pytest.raises(VerificationError):
        onnxplug.export(nn.Softmax(1), (torch.randn(2, 3, 4),), opset_version=11, verify=True)


@pytest.mark.parametrize("name", ["softmax_mid", "logsoftmax_mid"])
def test_the_version_converter_of_onnx_is_wrong(name: str) -> None:
    """The reason that it is not used: it reports no error, and the results are wrong."""
    model, make = CASES[name]
    inputs = (make(2),)
    newer = onnxplug.to_onnx(model, inputs, opset_version=13).model_proto
    assert wrong(newer, model, inputs) == []
    assert wrong(version_converter.convert_version(newer, 12), model, inputs)


@pytest.mark.parametrize("kind", ["MatMul", "Gather", "Cast", "Shape", "Transpose", "Concat"])
def test_the_version_converter_of_onnx_has_no_way_down(kind: str) -> None:
    inputs = {"MatMul": 2, "Gather": 2, "Concat": 2}.get(kind, 1)
    names = [f"x{number}" for number in range(inputs)]
    attributes = {"Cast": {"to": 1}, "Concat": {"axis": 0}}.get(kind, {})
    node = onnx.helper.make_node(kind, names, ["y"], **attributes)
    types = [onnx.TensorProto.INT64 if kind == "Gather" and name == "x1" else onnx.TensorProto.FLOAT for name in names]
    values = [onnx.helper.make_tensor_value_info(n, dtype, [2, 2]) for n, dtype in zip(names, types, strict=True)]
    graph = onnx.helper.make_graph([node], "g", values, [onnx.helper.make_empty_tensor_value_info("y")])
    with pytest.raises(RuntimeError, match="No Adapter"):
        version_converter.convert_version(
            onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 13)]), 12
        )
