"""Files of GGUF, made here of random blocks: the blocks stay as they are, and logits are those of transformers' dequantised model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from onnxplug.cli.app import run
from onnxplug.runtime import inference_session

gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")  # transformers wants it for these files

#: Tolerances looser than torch.testing's, and why.
LOOSER = {"decoder": ({"rtol": 1e-4, "atol": 1e-4}, "two layers, their sums in another order")}

#: Where the floats of a block are: scales, and least weights.
FLOATS = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "IQ4_NL": [0],
    "IQ4_XS": [0],
    "IQ2_XS": [0],  # not taken
}
WIDTH, VOCABULARY = 256, 100


def random_blocks(form: str, rows: int, columns: int) -> np.ndarray[Any, Any]:
    """A matrix of random numbers and scales that stands for weights of ordinary size."""
    kind = gguf.GGMLQuantizationType[form]
    size, length = gguf.GGML_QUANT_SIZES[kind]
    raw = torch.randint(0, 256, (rows, columns // size, length), dtype=torch.uint8).numpy()
    for place in FLOATS[form]:
        raw[..., place : place + 2] = _half(0.01, raw.shape[:2])
    weights = gguf.dequantize(raw.reshape(rows, -1), kind)
    for place in FLOATS[form]:
        raw[..., place : place + 2] = _half(0.01 * 0.15 / weights.std(), raw.shape[:2])
    return raw.reshape(rows, -1)


def _half(value: float, shape: Any) -> np.ndarray[Any, Any]:
    numbers = value * (1 + 0.3 * torch.randn(*shape, 1).numpy())
    return numbers.astype("f2").view("u1")


MODELS = {
    "llama": ("llama", "LlamaForCausalLM", "LlamaConfig", {}),
    "qwen3": ("qwen3", "Qwen3ForCausalLM", "Qwen3Config", {"head_dim": 128}),
    "gemma3": ("gemma3", "Gemma3ForCausalLM", "Gemma3TextConfig", {"head_dim": 64, "tie_word_embeddings": True}),
    "gpt2": ("gpt2", "GPT2LMHeadModel", "GPT2Config", {"max_position_embeddings": 1024}),
}


@pytest.fixture
def checkpoint(tmp_path: Path, save_tokenizer: Callable[[Path], None]) -> Callable[..., Path]:
    """A file with a tokenizer beside it."""

    def make(name: str, form: Callable[[str], str], *, tied: bool = False) -> Path:
        import transformers

        arch, kind, settings, given = MODELS[name]
        sizes = {
            "vocab_size": VOCABULARY,
            "hidden_size": WIDTH,
            "intermediate_size": 2 * WIDTH,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "tie_word_embeddings": tied,
            **given,
        }
        config = getattr(transformers, settings)(**sizes)
        with torch.device("meta"):
            model = getattr(transformers, kind)(config)
        tied = config.tie_word_embeddings
        path = tmp_path / f"{name}.gguf"
        writer = gguf.GGUFWriter(path, arch)
        writer.add_context_length(64)
        writer.add_embedding_length(WIDTH)
        writer.add_block_count(2)
        writer.add_feed_forward_length(2 * WIDTH if name != "gpt2" else 4 * WIDTH)
        writer.add_head_count(4)
        writer.add_vocab_size(VOCABULARY)
        if name == "gpt2":
            writer.add_layer_norm_eps(1e-5)
            writer.add_tokenizer_model("gpt2")
            writer.add_token_list([f"t{number}" for number in range(VOCABULARY)])
        else:
            writer.add_head_count_kv(2)
            writer.add_layer_norm_rms_eps(1e-5)
            writer.add_rope_freq_base(10000.0)
            writer.add_rope_dimension_count(64)
            writer.add_key_length(64)
            writer.add_value_length(64)
        names = gguf.get_tensor_name_map(next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == arch), 2)
        for key, parameter in model.state_dict().items():
            if tied and key == "lm_head.weight":
                continue
            place = names.get_name(key, try_suffixes=(".weight", ".bias"))
            shape = list(parameter.shape)
            if len(shape) == 1:
                centre = 1.0 if key.endswith("weight") else 0.0
                writer.add_tensor(place, (centre + 0.1 * torch.randn(shape)).numpy())
                continue
            if ".c_" in key:  # Conv1D
                shape.reverse()
            kind_of = form(key)
            if kind_of in FLOATS:
                raw = random_blocks(kind_of, *shape)
                writer.add_tensor(place, raw, raw_dtype=gguf.GGMLQuantizationType[kind_of])
            else:
                writer.add_tensor(place, 0.1 * torch.randn(shape).half().numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        save_tokenizer(tmp_path)
        return path

    return make


def compare(path: Path, output: Path, shapes: tuple[tuple[int, int], ...] = ((2, 9), (1, 4))) -> None:
    """Compares a folder's logits with the model that transformers dequantises."""
    from transformers import AutoModelForCausalLM

    given = {"gguf_file": path.name, "dtype": torch.float32, "attn_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(path.parent, **given).eval()
    session = inference_session(output / "model.onnx")
    for shape in shapes:
        tokens = torch.randint(3, VOCABULARY, shape)
        feeds: dict[str, Any] = {"input_ids": tokens.numpy(), "attention_mask": torch.ones_like(tokens).numpy()}
        for value in session.get_inputs():
            if value.name == "position_ids":
                feeds[value.name] = torch.arange(shape[1]).expand(shape).numpy()
            elif value.name not in feeds:
                feeds[value.name] = np.zeros((shape[0], value.shape[1], 0, value.shape[3]), "f4")
        with torch.no_grad():
            exact = model(tokens).logits
        torch.testing.assert_close(torch.from_numpy(session.run(["logits"], feeds)[0]), exact, **LOOSER["decoder"][0])


def stored(output: Path) -> int:
    graph = ir.load(output / "model.onnx").graph
    tables = ("inv_freq.cos", "inv_freq.sin")
    return sum(v.const_value.nbytes for n, v in graph.initializers.items() if not n.endswith(tables))


def export(source: Path, output: Path, *flags: str) -> int:
    return run(["export", f"transformers:{source}", "-o", str(output), "--accuracy-level", "1", *flags])


def mixed(key: str) -> str:
    """The format of a weight in llama.cpp's Q4_K_M."""
    return "Q6_K" if any(part in key for part in ("lm_head", "v_proj", "down_proj")) else "Q4_K"


@pytest.mark.parametrize("form", [pytest.param(name, marks=pytest.mark.long) for name in list(FLOATS)[:-1]])
def test_each_form(form: str, checkpoint: Any, tmp_path: Path) -> None:
    path, output = checkpoint("llama", lambda _: form), tmp_path / "onnx"
    assert export(path, output, "--verify") == 0
    graph = ir.load(output / "model.onnx").graph
    assert sum(node.op_type == "MatMulNBits" for node in graph) == 11  # q, k and v are one product
    assert stored(output) < 1.1 * path.stat().st_size
    compare(path, output)


CASES = [
    pytest.param("llama", mixed, {}, ("--fused",), 13, id="llama-fused"),  # of each attention, q and k are one product
    pytest.param("llama", mixed, {"tied": True}, (), 13, id="llama-tied", marks=pytest.mark.long),
    pytest.param(
        "qwen3", lambda key: "F16" if "embed" in key else "Q5_K", {}, (), 11, id="qwen3", marks=pytest.mark.long
    ),
    pytest.param("gemma3", mixed, {}, ("--fused",), 13, id="gemma3-scaled-rows", marks=pytest.mark.long),
    pytest.param("gpt2", lambda key: "Q4_0" if ".c_" in key else "F16", {}, (), 8, id="gpt2", marks=pytest.mark.long),
]


@pytest.mark.parametrize(("name", "form", "about", "flags", "count"), CASES)
def test_models(name: str, form: Any, about: Any, flags: Any, count: int, checkpoint: Any, tmp_path: Path) -> None:
    path, output = checkpoint(name, form, **about), tmp_path / "onnx"
    assert export(path, output, "--verify", *flags) == 0
    graph = ir.load(output / "model.onnx").graph
    assert sum(node.op_type == "MatMulNBits" for node in graph) == count
    assert stored(output) < 1.1 * path.stat().st_size
    assert (output / "tokenizer.json").is_file()
    compare(path, output)


def test_a_folder_with_one_file_whose_products_round_activations(checkpoint: Any, tmp_path: Path) -> None:
    """The default accuracy level; and the folder has nothing but the file and a tokenizer."""
    path, output = checkpoint("llama", mixed), tmp_path / "onnx"
    assert run(["export", f"transformers:{path.parent}", "-o", str(output), "--last-logits"]) == 0
    graph = ir.load(output / "model.onnx").graph
    levels = {node.attributes["accuracy_level"].as_int() for node in graph if node.op_type == "MatMulNBits"}
    assert levels == {4}
    tokens = np.arange(3, 12)[None]
    feeds = {"input_ids": tokens, "attention_mask": np.ones_like(tokens), "position_ids": np.arange(9)[None]}
    session = inference_session(output / "model.onnx")
    for value in session.get_inputs()[3:]:
        feeds[value.name] = np.zeros((1, 2, 0, 64), "f4")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    with torch.no_grad():
        exact = model(torch.from_numpy(tokens)).logits[:, -1:]
    result = torch.from_numpy(session.run(["logits"], feeds)[0])
    assert torch.nn.functional.cosine_similarity(result, exact, -1).min() > 0.995


def test_float_layers_are_rounded(checkpoint: Any, tmp_path: Path) -> None:
    """They are rounded with --int4 alone; the blocks stay as they are."""
    path = checkpoint("llama", lambda key: "F16" if "lm_head" in key else mixed(key))
    products = {}
    for name, flags in (("plain", ()), ("rounded", ("--int4",))):
        assert export(path, tmp_path / name, *flags) == 0
        graph = ir.load(tmp_path / name / "model.onnx").graph
        products[name] = sum(node.op_type == "MatMulNBits" for node in graph)
        blocks = {key: v.const_value.numpy() for key, v in graph.initializers.items() if "down_proj" in key}
        assert len(blocks) == 8
    assert products == {"plain": 12, "rounded": 13}


def nothing(path: Path) -> Path:
    return path


def beside_another(path: Path) -> Path:
    path.with_name("other.gguf").write_bytes(path.read_bytes())
    return path.parent


def not_gguf(path: Path) -> Path:
    path.write_bytes(b"GGML" + path.read_bytes()[4:])
    return path


def cut_off(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[:-200_000])
    return path


def without_tokenizer(path: Path) -> Path:
    for file in path.parent.glob("*token*.json"):
        file.unlink()
    return path


BAD: dict[str, tuple[str, Callable[[Path], Path], str]] = {
    "unknown blocks": ("IQ2_XS", nothing, "blk.0.attn_q.weight is in blocks of IQ2_XS, which are not taken"),
    "two files": ("Q8_0", beside_another, "has 2 files of GGUF: llama.gguf, other.gguf"),
    "other letters": ("Q8_0", not_gguf, "is no file of GGUF"),
    "not whole": ("Q8_0", cut_off, "llama.gguf"),
    "no tokenizer": ("Q8_0", without_tokenizer, "llama.gguf has no tokenizer that transformers reads"),
    "no file": ("Q8_0", lambda path: path.with_name("x.gguf"), "there is no file"),
}


@pytest.mark.parametrize("case", BAD)
def test_refused_files(case: str, checkpoint: Any, tmp_path: Path, capsys: Any) -> None:
    form, spoil, message = BAD[case]
    source, output = spoil(checkpoint("llama", lambda key: form if "embed" not in key else "F16")), tmp_path / "onnx"
    before = sorted(tmp_path.iterdir())
    assert run(["export", f"transformers:{source}", "-o", str(output)]) in (1, 2)
    said = " ".join(capsys.readouterr().err.split())
    assert message in said
    assert "Traceback" not in said
    assert sorted(tmp_path.iterdir()) == before
