"""Models that call the operators, against formulas in float64; schemas against vLLM's source distribution."""

from __future__ import annotations

import math
import os
import re
import sys
import tarfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from onnxplug_vllm import OPERATORS
from onnxplug_vllm.library import SCHEMAS
from torch import Tensor, nn

import onnxplug

#: Tolerances looser than torch.testing's own, with their reasons.
LOOSER = {
    "float32": ({"rtol": 1e-5, "atol": 1e-5}, "the formulas are computed in float64, the operators in float32"),
    "float16": ({"rtol": 2e-3, "atol": 2e-3}, "the same, and results are rounded to float16"),
}
#: The folder of the archive.
FOLDER = os.environ.get("ONNXPLUG_SOURCES", "")
ROWS = {0: "tokens"}


@pytest.mark.onnxplug("vllm")
def test_sample(onnx_sample: Any) -> None:
    onnx_sample.check()


def norm(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * (1.0 if weight is None else weight.double())


def turned(x: Tensor, angles: Tensor, halves: bool) -> Tensor:
    """Heads [tokens, heads, elements] by complex numbers."""
    x = x.double()
    pairs = x.unflatten(-1, (2, -1)).transpose(-1, -2) if halves else x.unflatten(-1, (-1, 2))
    result = torch.view_as_real(
        torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angles), angles)[:, None]
    )
    return result.transpose(-1, -2).flatten(-2) if halves else result.flatten(-2)


def check(
    model: Callable[..., Any], expected: Callable[..., Any], inputs: list[Any], dtype: Any = torch.float32
) -> None:
    """Results of the file and of the model, both on copies of the inputs, are the formula's."""
    program = onnxplug.to_onnx(model, inputs[0], dynamic_shapes=(ROWS,) * len(inputs[0]))
    for args in inputs:
        for results in (program(*(x.clone() for x in args)), model(*(x.clone() for x in args))):
            for result, value in zip(results, expected(*args), strict=True):
                torch.testing.assert_close(
                    result, value.to(dtype), **(LOOSER["float32"] if dtype == torch.float32 else LOOSER["float16"])[0]
                )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("namespace", "gemma"), [("_C", False), ("sgl_kernel", False), ("sgl_kernel", True)])
def test_norms(namespace: str, gemma: bool, dtype: torch.dtype) -> None:
    """A norm that writes a new tensor, and a norm that writes its inputs."""
    ops = getattr(torch.ops, namespace)
    prefix, pdl = ("", ()) if namespace == "_C" else ("gemma_" if gemma else "", (False,))
    plain = getattr(ops, "rms_norm" if namespace == "_C" else f"{prefix}rmsnorm")
    fused = getattr(ops, "fused_add_rms_norm" if namespace == "_C" else f"{prefix}fused_add_rmsnorm")
    weight = torch.rand(16, dtype=dtype) + 0.5

    def model(x: Tensor, residual: Tensor) -> Any:
        x, residual = x * 1, residual * 1
        out = torch.empty_like(x)
        plain(out, x, weight, 1e-5, *pdl)
        fused(x, residual, weight, 1e-5, *pdl)
        return out, x, residual

    def expected(x: Tensor, residual: Tensor) -> Any:
        scale = weight + 1 if gemma else weight
        total = x + residual
        return norm(x, scale, 1e-5), norm(total, scale, 1e-5), total

    check(model, expected, [tuple(torch.randn(2, n, 16, dtype=dtype)) for n in (5, 1, 9)], dtype)


@pytest.mark.parametrize("halves", [True, False])
@pytest.mark.parametrize("namespace", ["_C", "sgl_kernel"])
def test_rotary_embeddings(namespace: str, halves: bool) -> None:
    """Heads with 8 elements, all of them turned, of tokens at any positions."""
    angles = torch.rand(20, 4, dtype=torch.float64) * 6
    cache = torch.cat([angles.cos(), angles.sin()], 1).float()

    def model(positions: Tensor, q: Tensor, k: Tensor) -> Any:
        q, k = q * 1, k * 1
        if namespace == "_C":
            torch.ops._C.rotary_embedding(positions, q, k, 8, cache, halves)
            return q, k
        q, k = q.unflatten(1, (-1, 8)), k.unflatten(1, (-1, 8))
        rest = (cache, positions, not halves, False, 0, None, None, None, None)
        torch.ops.sgl_kernel.apply_rope_pos_ids_cos_sin_cache(q, k, q, k, *rest)
        return q.flatten(1), k.flatten(1)

    def expected(positions: Tensor, q: Tensor, k: Tensor) -> Any:
        return [turned(x.unflatten(1, (-1, 8)), angles[positions], halves).flatten(1) for x in (q, k)]

    check(model, expected, [(torch.randint(0, 20, (n,)), torch.randn(n, 32), torch.randn(n, 16)) for n in (5, 1, 7)])


def test_a_cache_that_is_written_is_refused() -> None:
    def model(positions: Tensor, q: Tensor, buffer: Tensor) -> Tensor:
        out, cache = torch.empty_like(q), torch.ones(4, 8)
        rest = (cache, positions, True, False, 0, q, buffer, buffer, positions)
        torch.ops.sgl_kernel.apply_rope_pos_ids_cos_sin_cache(q, q, out, out.clone(), *rest)
        return out

    q = torch.randn(3, 2, 8)
    with pytest.raises(onnxplug.OnnxplugError, match="a cache of keys and values"):
        onnxplug.to_onnx(model, (torch.arange(3), q, q.clone()))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def gelu(x: float) -> float:
    return x / 2 * (1 + math.erf(x / math.sqrt(2)))


def gelu_tanh(x: float) -> float:
    return x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


#: Formulas of a number, or of a number of the first and of the second half; and their options.
FORMULAS: dict[str, tuple[Callable[..., float], tuple[float, ...]]] = {
    "silu_and_mul": (lambda x, y: x * sigmoid(x) * y, ()),
    "mul_and_silu": (lambda x, y: y * sigmoid(y) * x, ()),
    "gelu_and_mul": (lambda x, y: gelu(x) * y, ()),
    "gelu_tanh_and_mul": (lambda x, y: gelu_tanh(x) * y, ()),
    "fatrelu_and_mul": (lambda x, y: (x if x > 0.3 else 0.0) * y, (0.3,)),
    "gelu_new": (gelu_tanh, ()),
    "gelu_fast": (gelu_tanh, ()),
    "gelu_quick": (lambda x: x * sigmoid(1.702 * x), ()),
    "relu_squared": (lambda x: max(x, 0.0) ** 2, ()),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_activations(name: str) -> None:
    formula, options = FORMULAS[name]
    is_gated = "_and_" in name

    def model(x: Tensor) -> Any:
        out = x.new_empty((x.shape[0], x.shape[1] // 2) if is_gated else x.shape)
        getattr(torch.ops._C, name)(out, x, *options)
        return (out,)

    def expected(x: Tensor) -> Any:
        parts = x.double().chunk(2, -1) if is_gated else (x.double(),)
        values = [formula(*numbers) for numbers in zip(*(p.flatten().tolist() for p in parts), strict=True)]
        return (torch.tensor(values, dtype=torch.float64).reshape(parts[0].shape),)

    check(model, expected, [(torch.randn(n, 12) * 2,) for n in (4, 1)])


def test_limited_gates() -> None:
    """Gates and values are neighbours, and limited."""

    def model(x: Tensor) -> Any:
        out = x.new_empty(x.shape[0], x.shape[1] // 2)
        torch.ops._C.swigluoai_and_mul(out, x, 1.5, 0.8)
        return (out,)

    def expected(x: Tensor) -> Any:
        rows = []
        for row in x.double().tolist():
            pairs = [(min(g, 0.8), max(min(u, 0.8), -0.8)) for g, u in zip(row[::2], row[1::2], strict=True)]
            rows.append([(u + 1) * g * sigmoid(1.5 * g) for g, u in pairs])
        return (torch.tensor(rows, dtype=torch.float64),)

    check(model, expected, [(torch.randn(n, 12) * 2,) for n in (4, 1)])


class Block(nn.Module):
    """The operators of a layer of vLLM between its products."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(32))
        self.angles = nn.Buffer(torch.randn(20, 8))

    def forward(self, positions: Tensor, q: Tensor, k: Tensor, residual: Tensor) -> Any:
        torch.ops._C.rotary_embedding(positions, q, k, 8, self.angles, True)
        torch.ops._C.fused_add_rms_norm(q, residual, self.weight, 1e-5)
        out = q.new_empty(q.shape[0], 16)
        torch.ops._C.silu_and_mul(out, q)
        return out


def test_inputs_that_a_model_writes() -> None:
    """Their new values are outputs of the file."""
    inputs = [(torch.arange(n), torch.randn(n, 32), torch.randn(n, 16), torch.randn(n, 32)) for n in (5, 2)]
    model = Block().eval()
    program = onnxplug.to_onnx(model, tuple(x.clone() for x in inputs[0]), dynamic_shapes=(ROWS,) * 4)
    assert [value.name for value in program.model.graph.outputs][1:] == ["q_out", "k_out", "residual_out"]
    for args in inputs:
        sample = [x.clone() for x in args]
        with torch.no_grad():
            wanted = [model(*sample), *sample[1:]]
        for result, value in zip(program(*(x.clone() for x in args)), wanted, strict=True):
            torch.testing.assert_close(result, value)


@pytest.mark.parametrize(
    ("name", "version", "requested"), [("vllm", "0.9.2", ">=0.33,<0.34"), ("sgl_kernel", "0.1.0", ">=0.3,<0.5")]
)
def test_another_version(name: str, version: str, requested: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library = types.ModuleType(name)
    library.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, library)
    op = torch.ops._C.gelu_new if name == "vllm" else torch.ops.sgl_kernel.silu_and_mul

    def model(x: Tensor) -> Tensor:
        out = x.new_empty(x.shape[0], 8)
        op(out, x)
        return out

    with pytest.raises(onnxplug.OnnxplugError, match=f"{name}{requested} are translated; {version} is installed"):
        onnxplug.to_onnx(model, (torch.randn(2, 8 if name == "vllm" else 16),))


def test_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    exec(block, {"__name__": "readme"})


def test_schemas() -> None:
    """The schemas of vLLM's operators are those of its source distribution."""
    archive = next(Path(FOLDER).glob("vllm-*.tar.gz"), None) if FOLDER else None
    if archive is None:
        pytest.skip("no source distribution of vLLM in the folder that ONNXPLUG_SOURCES names")
    with tarfile.open(archive) as files:
        source = files.extractfile(next(n for n in files.getnames() if n.endswith("/csrc/torch_bindings.cpp")))
        assert source is not None
        text = source.read().decode()
    theirs = {}
    for parts in re.findall(r"ops\.def\(\s*((?:\"[^\"]*\"\s*)+)", text):
        schema = re.sub(r"\s+", " ", "".join(re.findall(r"\"([^\"]*)\"", parts)))
        theirs["_C::" + schema.partition("(")[0].strip()] = "(" + schema.partition("(")[2]
    for op in OPERATORS:
        if op.startswith("_C::"):
            both = [str(torch._C.parse_schema(op + schema)) for schema in (theirs[op], SCHEMAS[op])]
            assert both[0] == both[1]
