"""Checkpoints of GPTQ and AWQ, made here in their published layouts: 4 bits stay 4 bits, and logits are the dequantised model's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import nn

from onnxplug.cli.app import run
from onnxplug.runtime import inference_session

#: Tolerances that are wider than torch.testing's, and why.
LOOSER = {"decoder": ({"rtol": 1e-4, "atol": 1e-4}, "two layers, their sums in another order")}

_AWQ = [0, 2, 4, 6, 1, 3, 5, 7]


def packed(numbers: torch.Tensor) -> torch.Tensor:
    """Eight numbers of the last axis in each int32, the first number lowest."""
    words = (numbers.long().unflatten(-1, (-1, 8)) << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def quantised(linear: nn.Linear, method: str, size: int, symmetric: bool, shuffled: bool) -> dict[str, torch.Tensor]:
    """Random tensors of a layer as the method stores them; the layer gets the weight that they stand for."""
    rows, columns = linear.weight.shape
    groups = torch.arange(columns) // size
    if shuffled:
        groups = groups[torch.randperm(columns)]
    scales = (torch.rand(columns // size, rows) * 0.02 + 0.01).half()
    zeros = torch.full(scales.shape, 8) if symmetric else torch.randint(1, 16, scales.shape)
    levels = torch.randint(0, 16, (columns, rows))
    with torch.no_grad():
        linear.weight.copy_(((levels - zeros[groups]) * scales.float()[groups]).T)
    if method == "awq":
        levels, zeros = (packed(x.unflatten(-1, (-1, 8))[..., _AWQ].flatten(-2)) for x in (levels, zeros))
        return {"qweight": levels, "qzeros": zeros, "scales": scales}
    stored = {"qweight": packed(levels.T).T, "qzeros": packed(zeros - 1), "scales": scales, "g_idx": groups.int()}
    return {name: tensor.contiguous() for name, tensor in stored.items()}


@pytest.fixture
def checkpoint(decoder: Any, tmp_path: Path, save_tokenizer: Any) -> Callable[..., tuple[nn.Module, Path]]:
    """A dequantised model and the folder of its checkpoint."""

    def make(method: str, *, symmetric: bool = False, shuffled: bool = False, **about: Any) -> tuple[nn.Module, Path]:
        from safetensors.torch import save_file

        model, folder = decoder("llama"), tmp_path / method
        model.save_pretrained(folder)
        save_tokenizer(folder)
        (folder / "model.safetensors").unlink()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.half())
        tensors = {name: tensor.half() for name, tensor in model.state_dict().items()}
        for name, module in model.named_modules():
            if type(module) is nn.Linear and name != "lm_head":
                del tensors[f"{name}.weight"]
                for key, tensor in quantised(module, method, 32, symmetric, shuffled).items():
                    tensors[f"{name}.{key}"] = tensor
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        path = folder / "config.json"
        settings = {"quant_method": method, "bits": 4, "group_size": 32, **about}
        path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": settings}))
        return model, folder

    return make


def check_logits(output: Path, model: nn.Module, options: Any = None) -> None:
    """Compares a folder's logits with a model's."""
    tokens = torch.randint(3, 100, (2, 9))
    feeds: dict[str, Any] = {"input_ids": tokens.numpy(), "attention_mask": torch.ones_like(tokens).numpy()}
    session = inference_session(output / "model.onnx")
    for value in session.get_inputs():
        if value.name == "position_ids":
            feeds[value.name] = torch.arange(9).expand(2, -1).numpy()
        elif value.name not in feeds:
            feeds[value.name] = torch.zeros(2, 2, 0, 16).numpy()
    with torch.no_grad():
        exact = model(tokens).logits
    logits = torch.from_numpy(session.run(["logits"], feeds, options)[0])
    torch.testing.assert_close(logits, exact, **LOOSER["decoder"][0])


CASES = [
    ("gptq", {}, ("--fused",)),
    pytest.param("gptq", {"symmetric": True, "sym": True}, (), marks=pytest.mark.long),
    pytest.param("gptq", {"shuffled": True, "desc_act": True}, (), marks=pytest.mark.long),
    ("awq", {"version": "gemm"}, ()),
]


@pytest.mark.parametrize(("method", "about", "flags"), CASES)
def test_weights_stay_packed(method: str, about: dict[str, Any], flags: tuple[str, ...], checkpoint: Any) -> None:
    model, folder = checkpoint(method, **about)
    output = folder.parent / "onnx"
    assert (
        run(["export", f"transformers:{folder}", "-o", str(output), "--verify", "--accuracy-level", "1", *flags]) == 0
    )
    graph = ir.load(output / "model.onnx").graph
    products = [node for node in graph if node.op_type == "MatMulNBits"]
    assert len(products) == (14 if about.get("shuffled") else 10)  # q, k and v are one product
    assert all((len(node.inputs) > 3) != bool(about.get("symmetric")) for node in products)
    tables = () if not flags else ("inv_freq.cos", "inv_freq.sin")
    stored = sum(v.const_value.nbytes for n, v in graph.initializers.items() if not n.endswith(tables or ("-",)))
    assert stored < 1.1 * (folder / "model.safetensors").stat().st_size
    check_logits(output, model)


@pytest.fixture
def by_torchao(saved: Callable[[str], Path], save_tokenizer: Any) -> Callable[..., Path]:
    """The folder of a model that torchao has quantised through transformers."""

    def make(settings: Any, **about: Any) -> Path:
        import transformers

        base = saved("llama")
        given = {"quantization_config": transformers.TorchAoConfig(settings, **about), "dtype": torch.float32}
        transformers.AutoModelForCausalLM.from_pretrained(base, **given).save_pretrained(base.parent / "torchao")
        save_tokenizer(base.parent / "torchao")
        return base.parent / "torchao"

    return make


def torchao_settings(kind: str) -> Any:
    from torchao import quantization as ao

    row, asymmetric = ao.PerAxis(0), ao.quant_primitives.MappingType.ASYMMETRIC
    return {
        "4 bits": lambda: ao.IntxWeightOnlyConfig(torch.int4, ao.PerGroup(32), asymmetric),
        "3 bits": lambda: ao.IntxWeightOnlyConfig(torch.int3, ao.PerGroup(16), scale_dtype=torch.float16),
        "rows": lambda: ao.IntxWeightOnlyConfig(torch.int4, row),
        "8 bits": lambda: ao.IntxWeightOnlyConfig(torch.int8, ao.PerGroup(32)),
        "8 bits by row": lambda: ao.Int8WeightOnlyConfig(version=2),
        "activations": lambda: ao.Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4),
        "small groups": lambda: ao.IntxWeightOnlyConfig(torch.int4, ao.PerGroup(8)),
        "wide zero points": lambda: ao.IntxWeightOnlyConfig(torch.int8, ao.PerGroup(32), asymmetric),
        "floats": lambda: ao.Float8WeightOnlyConfig(),
        "embedding": lambda: ao.FqnToConfig(
            {"model.embed_tokens": ao.IntxWeightOnlyConfig(torch.int4, ao.PerGroup(32))}
        ),
    }[kind]()


SAVED = pytest.mark.xfail(
    torch.__version__.startswith("2.9."), strict=True, reason="torchao 0.15, the release for torch 2.9, saves none"
)


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("4 bits", ("--fused",)),
        pytest.param("8 bits by row", (), marks=SAVED),
        *[pytest.param(kind, (), marks=pytest.mark.long) for kind in ("3 bits", "rows", "8 bits")],
    ],
)
@pytest.mark.long
def test_integers_of_torchao(kind: str, flags: tuple[str, ...], by_torchao: Any, tmp_path: Path) -> None:
    """Levels, scales and zero points are torchao's: logits are those of the weights that it restores."""
    from transformers import AutoModelForCausalLM

    folder, output = by_torchao(torchao_settings(kind)), tmp_path / "onnx"
    arguments = ["-o", str(output), "--verify", "--accuracy-level", "1", *flags]
    assert run(["export", f"transformers:{folder}", *arguments]) == 0
    model, rounded = AutoModelForCausalLM.from_pretrained(folder).eval(), 0
    for module in model.modules():
        if type(module) is nn.Linear and type(module.weight) is not nn.Parameter:
            module.weight = nn.Parameter(module.weight.dequantize().float(), requires_grad=False)
            rounded += 1
    assert rounded == 14
    check_logits(output, model)
    graph = ir.load(output / "model.onnx").graph
    products = [node for node in graph if node.op_type == "MatMulNBits"]
    assert len(products) == 10  # q, k and v are one product
    assert {node.attributes["bits"].as_int() for node in products} == {8 if "8" in kind else 4}
    tables = ("inv_freq.cos", "inv_freq.sin")
    stored = sum(v.const_value.nbytes for n, v in graph.initializers.items() if not n.endswith(tables))
    assert stored < (1.1 if "8" in kind else 0.9) * (folder / "model.safetensors").stat().st_size


@pytest.mark.parametrize(
    ("kind", "about", "message"),
    [
        ("activations", {}, "changes its activations too"),
        ("small groups", {}, "has groups of 8 inputs"),
        ("wide zero points", {}, "zero points that are no integers of 4 bits"),
        ("floats", {}, "is a Float8Tensor of torchao in a Linear, which is not taken"),
        ("embedding", {"include_input_output_embeddings": True}, "of torchao in a Embedding"),
    ],
)
def test_refused_checkpoints_of_torchao(kind: str, about: Any, message: str, by_torchao: Any, capsys: Any) -> None:
    folder = by_torchao(torchao_settings(kind), **about)
    assert run(["export", f"transformers:{folder}", "-o", str(folder.parent / "onnx")]) in (1, 2)
    said = " ".join(capsys.readouterr().err.split())
    assert message in said
    assert "Traceback" not in said
    assert not (folder.parent / "onnx").exists()


@pytest.mark.parametrize("method", ["gptq", pytest.param("awq", marks=pytest.mark.long)])
@pytest.mark.long
def test_adapters_beside_packed_weights(method: str, checkpoint: Any, save_adapter: Any, with_adapter: Any) -> None:
    """The weights stay as they are, and the adapter's products are added."""
    model, folder = checkpoint(method)
    adapter = save_adapter(model, folder.parent / "adapter", ("q_proj", "down_proj"))
    output = folder.parent / "onnx"
    arguments = ["-o", str(output), "--verify", "--accuracy-level", "1", "--adapter", f"one={adapter}"]
    assert run(["export", f"transformers:{folder}", *arguments]) == 0
    stored = ir.load(output / "model.onnx").graph.initializers.values()
    assert sum(value.const_value.nbytes for value in stored) < 1.1 * (folder / "model.safetensors").stat().st_size
    options, file = onnxruntime.RunOptions(), onnxruntime.LoraAdapter()
    file.Load(str(output / "one.onnx_adapter"))
    for active in (False, True):
        if active:
            options.add_active_adapter(file)
            with_adapter(model, adapter)
        check_logits(output, model, options)


def test_nothing_is_merged_into_packed_weights(checkpoint: Any, save_adapter: Any, capsys: Any) -> None:
    model, folder = checkpoint("gptq")
    adapter = save_adapter(model, folder.parent / "adapter", ("o_proj",))
    output = folder.parent / "onnx"
    assert run(["export", f"transformers:{folder}", "-o", str(output), "--adapter", str(adapter)]) == 2
    assert "o_proj is a FourBitLinear, into which nothing can be merged" in " ".join(capsys.readouterr().err.split())
    assert not output.exists()


BAD = {
    "bits": ({"bits": 3}, "gptq of 3 bits"),
    "groups": ({"group_size": 48}, "in groups of 48"),
    "lengths": ({"group_size": 64}, "the weights can't be loaded"),
}


@pytest.mark.parametrize("case", BAD)
def test_refused_checkpoints(case: str, checkpoint: Any, capsys: Any) -> None:
    about, message = BAD[case]
    _, folder = checkpoint("gptq", **about)
    assert run(["export", f"transformers:{folder}", "-o", str(folder.parent / "onnx")]) in (1, 2)
    said = " ".join(capsys.readouterr().err.split())
    assert message in said
    assert "Traceback" not in said
    assert not (folder.parent / "onnx").exists()
