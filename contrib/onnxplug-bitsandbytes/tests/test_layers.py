"""Layers and models of bitsandbytes, compared with bitsandbytes itself on the CPU."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("bitsandbytes", reason="`make packages` tests with it, in an environment of its own")

import bitsandbytes as bnb
import torch
from torch import nn

import onnxplug

#: Tolerances that are looser than torch.testing's, with their reasons.
LOOSER = {
    "factors": ({"rtol": 1e-2, "atol": 2e-2}, "the factors of blocks are in bfloat16 in that order of the bytes"),
    "decoder": ({"rtol": 1e-4, "atol": 2e-4}, "two layers of quantised products, summed in another order"),
}
DYNAMIC = ({0: "rows"},)
#: Sums are in another order than bitsandbytes'; in halves, weights aren't rounded before the product, as bitsandbytes
#: rounds them.
TOLERANCES: dict[torch.dtype, dict[str, Any]] = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 4e-3, "atol": 8e-3},
    torch.bfloat16: {"rtol": 3e-2, "atol": 6e-2},
}


#: Whether bitsandbytes computes layers of 4 bits in bfloat16 here, by kernels that take the bytes in another order.
BFLOAT16_KERNELS = bool(bnb.functional.has_avx512bf16())


@pytest.fixture(autouse=True)
def _seeded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Layers compute in the dtype of their input, on every processor."""
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.mark.onnxplug("bitsandbytes")
def test_sample(onnx_sample: Any) -> None:
    onnx_sample.check()


def four_bits(columns: int, rows: int, size: int = 64, **options: Any) -> Any:
    layer = bnb.nn.Linear4bit(columns, rows, **options)
    layer.weight.blocksize = size
    return layer.to("cpu").eval()


def by_the_format(layer: Any) -> nn.Linear:
    """A layer's plain equivalent: its levels times the factor of each block, one block after the other."""
    state, packed = layer.weight.quant_state, layer.weight.data.reshape(-1)
    factors = state.absmax
    if state.nested:
        factors = bnb.functional.dequantize_blockwise(factors, state.state2) + state.offset
    numbers = state.code[torch.stack([packed >> 4, packed & 15], 1).reshape(-1).int()]
    count = state.shape.numel()
    plain = nn.Linear(*reversed(state.shape), bias=layer.bias is not None)
    weight = (numbers[:count] * factors.repeat_interleave(state.blocksize)[:count]).view(state.shape)
    plain.load_state_dict({"weight": weight} | ({} if layer.bias is None else {"bias": layer.bias}))
    return plain.eval()


def operators(program: Any) -> Counter[str]:
    return Counter(node.op_type for node in program.model.graph.all_nodes())


# -- 4 bits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["onnxruntime", None])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize(
    ("columns", "rows", "size", "nested", "bias"),
    [
        (96, 40, 64, True, True),
        (64, 32, 128, False, False),
        (256, 260, 32, True, False),  # more than 256 blocks: factors of factors
        (130, 7, 64, True, True),  # the last block is shorter
        (35, 5, 64, False, True),  # odd rows, so that a byte has weights of two rows
        (1024, 6, 1024, True, True),  # larger than any block of ONNX Runtime's
        (600, 3, 512, False, True),
    ],
)
def test_linear_4bit(
    onnx_check: Callable[..., Any], kind: str, columns: int, rows: int, size: int, nested: bool, bias: bool, target: Any
) -> None:
    layer = four_bits(columns, rows, size, bias=bias, quant_type=kind, compress_statistics=nested)
    x = torch.randn(3, columns)
    more = [(torch.randn(1, columns) * 3,), (torch.zeros(6, columns),), (torch.randn(0, columns),)]
    plain = by_the_format(layer)
    if columns % size and not columns % 32 and torch.backends.cpu.get_cpu_capability() == "AVX512":
        # bitsandbytes' kernel for these processors takes other factors for blocks that go on in the next row.
        program = onnxplug.to_onnx(layer, (x,), dynamic_shapes=DYNAMIC, target=target)
    else:
        program = onnx_check(
            layer,
            (x,),
            dynamic_shapes=DYNAMIC,
            inputs=more,
            target=target,
            opsets=(21, 13),
            **TOLERANCES[torch.float32],
        )
    for (inputs,) in ((x,), *more):
        torch.testing.assert_close(program(inputs)[0], plain(inputs), **TOLERANCES[torch.float32])
    assert operators(program)["MatMulBnb4"] == (target is not None)
    stored = program.model.graph.initializers
    assert (stored["weight"].dtype.name, list(stored["weight"].shape)) == ("UINT8", [(rows * columns + 1) // 2])
    assert stored["weight_absmax"].dtype.name == ("UINT8" if nested else "FLOAT")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("target", ["onnxruntime", None])
def test_halves(onnx_check: Callable[..., Any], dtype: torch.dtype, target: Any) -> None:
    layer = four_bits(128, 24, quant_type="nf4")
    onnx_check(
        layer,
        (torch.randn(3, 128, dtype=dtype),),
        dynamic_shapes=DYNAMIC,
        target=target,
        **TOLERANCES[dtype],
    )


def test_a_dtype_to_compute_in(onnx_check: Callable[..., Any]) -> None:
    layer = four_bits(128, 24, quant_type="nf4", compute_dtype=torch.bfloat16)
    onnx_check(layer, (torch.randn(2, 3, 128),), dynamic_shapes=DYNAMIC, **TOLERANCES[torch.bfloat16])


def test_bytes_kept_as_another_dtype(onnx_check: Callable[..., Any]) -> None:
    layer = four_bits(64, 24, quant_type="nf4", quant_storage=torch.bfloat16)
    assert layer.weight.dtype == torch.bfloat16
    onnx_check(layer, (torch.randn(3, 64),), dynamic_shapes=DYNAMIC, **TOLERANCES[torch.float32])


def test_the_order_of_processors_with_bfloat16() -> None:
    """bitsandbytes reorders a layer's bytes at its first run on these processors, for a kernel that they alone have."""
    from bitsandbytes.functional import _convert_weight_packed_for_cpu

    layer = four_bits(192, 64, quant_type="nf4")
    x = torch.randn(3, 192)
    expected = layer(x)
    layer.weight.data, layer.weight.quant_state = _convert_weight_packed_for_cpu(
        layer.weight.data, layer.weight.quant_state
    )
    program = onnxplug.to_onnx(layer, (x,))
    assert operators(program)["MatMulBnb4"] == 1
    torch.testing.assert_close(program(x)[0], expected, **LOOSER["factors"][0])


@pytest.mark.skipif(not BFLOAT16_KERNELS, reason="a processor without AVX512-BF16")
def test_verified_on_processors_with_bfloat16() -> None:
    """Verification compares in float32 with layers that have or haven't run; after it they compute as before."""
    model = nn.Sequential(four_bits(128, 64), nn.ReLU(), four_bits(64, 32)).eval()
    model[0].support_avx512bf16_for_cpu = model[2].support_avx512bf16_for_cpu = True
    x = torch.randn(3, 128)
    onnxplug.to_onnx(model, (x,), dynamic_shapes=DYNAMIC, verify=True)
    assert not getattr(model[0].weight.quant_state, "packing_format_for_cpu", False)
    with torch.no_grad():
        expected = model(x)
    assert model[0].weight.quant_state.packing_format_for_cpu
    program = onnxplug.to_onnx(model, (x,), dynamic_shapes=DYNAMIC, verify=True)
    assert model[0].support_avx512bf16_for_cpu
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
    torch.testing.assert_close(program(x)[0], expected, **LOOSER["factors"][0])


def test_shared_weights_are_stored_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (four_bits(64, 64, quant_type="fp4", bias=bias) for bias in (True, False))
            self.second.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x).relu())

    model, x = Twice().eval(), torch.randn(3, 64)
    program = onnxplug.to_onnx(model, (x,), dynamic_shapes=DYNAMIC)
    for inputs in (x, torch.randn(7, 64) * 2):
        torch.testing.assert_close(program(inputs)[0], model(inputs), **TOLERANCES[torch.float32])
    assert sum(list(v.shape) == [64 * 32] for v in program.model.graph.initializers.values()) == 1


@pytest.mark.skipif(
    BFLOAT16_KERNELS, reason="bitsandbytes' function takes the bytes in another order there, or ends the process"
)
def test_products_of_one_row(onnx_check: Callable[..., Any]) -> None:
    """bitsandbytes' older operator, which takes NF4 or FP4 as a code."""
    packed, state = bnb.functional.quantize_4bit(torch.randn(6, 128), quant_type="nf4", blocksize=64)

    class OneRow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.packed, self.absmax, self.code = nn.Buffer(packed), nn.Buffer(state.absmax), nn.Buffer(state.code)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.bitsandbytes.gemv_4bit(x, self.packed, [6, 128], self.absmax, self.code, 64)

    for target in ("onnxruntime", None):
        program = onnx_check(OneRow(), (torch.randn(1, 128),), target=target, **TOLERANCES[torch.float32])
        assert operators(program)["MatMulBnb4"] == (target is not None)


# -- 8 bits ------------------------------------------------------------------------------------------------------------


class WithOutliers(nn.Module):
    """A layer of 8 bits whose input has some large columns."""

    def __init__(self, columns: int, rows: int, threshold: float, bias: bool = True, dtype: Any = None) -> None:
        super().__init__()
        layer = bnb.nn.Linear8bitLt(columns, rows, bias=bias, has_fp16_weights=False, threshold=threshold)
        self.layer = (layer if dtype is None else layer.to(dtype)).to("cpu")
        self.scale = nn.Buffer(torch.ones(columns, dtype=dtype))
        self.scale[3], self.scale[columns - 2] = 15.0, -9.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x * self.scale)


@pytest.mark.parametrize("target", ["onnxruntime", None])
@pytest.mark.parametrize("threshold", [0.0, 6.0])
@pytest.mark.parametrize(("columns", "rows", "bias"), [(96, 40, True), (37, 5, False)])
def test_linear_8bit(
    onnx_check: Callable[..., Any], columns: int, rows: int, bias: bool, threshold: float, target: Any
) -> None:
    """With outliers in all, some and no rows; one row; rows of zeros; no rows."""
    model = WithOutliers(columns, rows, threshold, bias).eval()
    some = torch.randn(5, columns)
    some[1:] *= 0.1
    more = [(some,), (torch.randn(1, columns),), (torch.zeros(2, columns),), (torch.randn(9, columns) * 0.05,)]
    more += [(torch.randn(300, columns),), (torch.randn(300, columns) * 0.1,)]  # some numbers are near half a level
    program = onnx_check(
        model,
        (torch.randn(3, columns),),
        dynamic_shapes=DYNAMIC,
        inputs=more,
        target=target,
        opsets=(21, 13),
        **TOLERANCES[torch.float32],
    )
    assert operators(program)["MatMulInteger"] == 1
    assert {v.dtype.name for v in program.model.graph.initializers.values() if list(v.shape) == [columns, rows]} == {
        "INT8" if target is None else "UINT8"
    }


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("threshold", [0.0, 6.0])
def test_linear_8bit_in_halves(onnx_check: Callable[..., Any], dtype: torch.dtype, threshold: float) -> None:
    model = WithOutliers(64, 24, threshold, dtype=dtype).eval()
    x = torch.randn(2, 3, 64, dtype=dtype)
    step = {"rtol": float(torch.finfo(dtype).eps), "atol": 1e-3}
    onnx_check(model, (x,), dynamic_shapes=DYNAMIC, inputs=[(torch.randn(40, 3, 64, dtype=dtype),)], **step)


def test_sums_that_would_saturate(onnx_check: Callable[..., Any]) -> None:
    """All bytes are ±127: two products of unsigned with signed bytes do not fit into 16 bits."""
    layer = bnb.nn.Linear8bitLt(256, 4, has_fp16_weights=False)
    layer.load_state_dict({"weight": torch.tensor([[1.0], [-1.0]] * 2).expand(4, 256), "bias": torch.zeros(4)})
    onnx_check(layer.to("cpu").eval(), (torch.ones(2, 256),), dynamic_shapes=DYNAMIC, inputs=[(-torch.ones(3, 256),)])


@pytest.mark.parametrize("threshold", [0.0, 6.0])
def test_not_finite(onnx_check: Callable[..., Any], threshold: float) -> None:
    """Numbers that aren't finite, or are infinite in float16, in which bitsandbytes quantises."""
    layer = bnb.nn.Linear8bitLt(40, 6, has_fp16_weights=False, threshold=threshold).to("cpu").eval()
    special = torch.randn(7, 40)
    special[0, 3], special[1, 5], special[2, 6] = float("nan"), float("inf"), float("-inf")
    special[3], special[4, 2], special[5, 9] = 0.0, 1e6, 1e-30
    onnx_check(layer, (torch.randn(2, 40),), dynamic_shapes=DYNAMIC, inputs=[(special,)], exact=True)


def test_layers_in_training(onnx_check: Callable[..., Any]) -> None:
    """On the CPU bitsandbytes restores the weight in training; weights in floating point are quantised at each call."""
    x = torch.randn(3, 64)
    onnx_check(WithOutliers(64, 8, 6.0).train(), (x,), dynamic_shapes=DYNAMIC, **TOLERANCES[torch.float32])
    full = bnb.nn.Linear8bitLt(64, 8, has_fp16_weights=True).eval().requires_grad_(False)
    onnx_check(full, (x,), dynamic_shapes=DYNAMIC, **TOLERANCES[torch.float32])


# -- embeddings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["onnxruntime", None])
@pytest.mark.parametrize(
    ("kind", "columns"),
    [("Embedding8bit", 24), ("EmbeddingNF4", 128), ("EmbeddingFP4", 64), ("EmbeddingNF4", 40), ("EmbeddingFP4", 33)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_embeddings(kind: str, columns: int, dtype: torch.dtype, target: Any) -> None:
    """In blocks of 64, rows of 128 and 64 are whole blocks."""
    layer = getattr(bnb.nn, kind)(50, columns, dtype=dtype).to("cpu").eval()
    index = torch.randint(0, 50, (2, 3))
    program = onnxplug.to_onnx(layer, (index,), dynamic_shapes=({0: "rows", 1: "words"},), target=target)
    for inputs in (index, torch.randint(0, 50, (5, 1)), torch.tensor([[0, 49]])):
        torch.testing.assert_close(program(inputs)[0], layer(inputs), rtol=0, atol=0)
    weight = program.model.graph.initializers["weight"]
    assert weight.dtype.name == ("INT8" if kind == "Embedding8bit" else "UINT8")


# -- models ------------------------------------------------------------------------------------------------------------


def test_the_model_is_as_before() -> None:
    model = (
        nn.Sequential(four_bits(64, 32), bnb.nn.Linear8bitLt(32, 8, has_fp16_weights=False, threshold=6.0))
        .to("cpu")
        .eval()
    )
    before = [dict(vars(layer)) for layer in model], list(model.state_dict()), [layer.weight for layer in model]
    onnxplug.to_onnx(model, (torch.randn(2, 64),))
    after = [dict(vars(layer)) for layer in model], list(model.state_dict()), [layer.weight for layer in model]
    assert after[1] == before[1]
    assert all(a is b for a, b in zip(after[2], before[2], strict=True))
    assert [set(own) for own in after[0]] == [set(own) for own in before[0]]
    assert (model[0].compute_type_is_set, model[0].compute_dtype) == (False, None)


def test_a_model_that_is_a_function(onnx_check: Callable[..., Any]) -> None:
    words = bnb.nn.EmbeddingNF4(50, 64).to("cpu").eval()
    model = (
        nn.Sequential(four_bits(64, 64), bnb.nn.Linear8bitLt(64, 8, has_fp16_weights=False, threshold=6.0))
        .to("cpu")
        .eval()
    )
    index = torch.randint(0, 50, (3,))
    onnx_check(
        lambda index: model(words(index)) + model(words(index * 0)),
        (index,),
        dynamic_shapes=({0: "words"},),
        seeds=(),
        inputs=[(torch.tensor([7]),)],
        **TOLERANCES[torch.float32],
    )
    assert "_onnxplug_forward" not in vars(words)
    assert type(words.weight) is bnb.nn.Params4bit


class Doubled(bnb.nn.LinearNF4):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


@pytest.mark.parametrize("strict", [False, True])
def test_a_forward_around_the_layers(strict: bool) -> None:
    x = torch.randn(3, 64)
    model = nn.Sequential(Doubled(64, 64), four_bits(64, 8)).to("cpu").eval()
    program = onnxplug.to_onnx(model, (x,), dynamic_shapes=DYNAMIC, strict=strict)
    torch.testing.assert_close(program(x)[0], model(x), **TOLERANCES[torch.float32])
    assert operators(program)["MatMulBnb4"] == 2


def test_hooks_of_accelerate() -> None:
    hooks = pytest.importorskip("accelerate.hooks")

    class Doubling(hooks.ModelHook):  # type: ignore[misc, name-defined]
        def post_forward(self, module: Any, output: torch.Tensor) -> torch.Tensor:
            return output * 2

    x, layer = torch.randn(3, 64), four_bits(64, 8)
    expected = layer(x) * 2
    hooks.add_hook_to_module(layer, Doubling())
    program = onnxplug.to_onnx(layer, (x,))
    torch.testing.assert_close(program(x)[0], expected, **TOLERANCES[torch.float32])
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize("kind", ["Linear4bit", "Linear8bitLt", "EmbeddingNF4", "Embedding8bit"])
def test_a_layer_that_is_not_quantised_yet(kind: str) -> None:
    options = {"has_fp16_weights": False} if kind == "Linear8bitLt" else {}
    model = nn.Sequential(getattr(bnb.nn, kind)(64, 64, **options)).eval()
    x = torch.zeros(2, 64) if "Linear" in kind else torch.zeros(2, dtype=torch.int64)
    with pytest.raises(onnxplug.OnnxplugError, match=f"layer 0 .{kind}. is not quantised yet"):
        onnxplug.to_onnx(model, (x,))


def test_without_the_package() -> None:
    with pytest.raises(onnxplug.OnnxplugError, match="may translate bitsandbytes, but it is left out"):
        onnxplug.to_onnx(four_bits(64, 8), (torch.zeros(2, 64),), plugins=[])


def test_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bnb, "__version__", "0.44.0")
    with pytest.raises(
        onnxplug.OnnxplugError, match=r"knows the layers of bitsandbytes>=0.50,<0.51; 0.44.0 is installed"
    ):
        onnxplug.to_onnx(four_bits(64, 8), (torch.zeros(2, 64),))
    onnxplug.to_onnx(nn.Linear(4, 2), (torch.zeros(2, 4),))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small Llama of two layers, saved."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="transformers asks for it to load quantised models")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(
        **sizes, num_key_value_heads=2, vocab_size=100, max_position_embeddings=64, initializer_range=0.1
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "full")
    return tmp_path


QUANTISED: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "int8": {"load_in_8bit": True},
}


@pytest.mark.parametrize("target", ["onnxruntime", None])
@pytest.mark.parametrize("how", QUANTISED)
def test_a_model_of_transformers(folder: Path, how: str, target: Any) -> None:
    """A model loaded with a configuration, or from a quantised checkpoint, which is larger than the stored weights."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    config = BitsAndBytesConfig(**QUANTISED[how])
    model = AutoModelForCausalLM.from_pretrained(folder / "full", quantization_config=config, device_map="cpu")
    model.save_pretrained(folder / "quantised")
    again = AutoModelForCausalLM.from_pretrained(folder / "quantised", device_map="cpu")

    class Logits(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.inner(ids, use_cache=False).logits

    ids = torch.randint(0, 100, (2, 7))
    for module in (model, again):
        wrapped = Logits(module.eval()).eval()
        shapes = ({0: "batch", 1: "words"},)
        program = onnxplug.to_onnx(wrapped, (ids,), dynamic_shapes=shapes, target=target)
        for tokens in (ids, torch.randint(0, 100, (1, 12))):
            torch.testing.assert_close(program(tokens)[0], wrapped(tokens), **LOOSER["decoder"][0])
        assert operators(program)["MatMulInteger" if how == "int8" else "MatMulBnb4"] == (
            14 if target or how == "int8" else 0
        )
        stored = sum(v.const_value.nbytes for v in program.model.graph.initializers.values())
        assert stored < (folder / "quantised" / "model.safetensors").stat().st_size  # the rest of the file are nodes


def test_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    exec(block, {})


def test_a_copy_of_a_layer() -> None:
    layer = copy.deepcopy(four_bits(64, 8, quant_type="nf4"))
    x = torch.randn(2, 64)
    torch.testing.assert_close(onnxplug.to_onnx(layer, (x,))(x)[0], layer(x), **TOLERANCES[torch.float32])
