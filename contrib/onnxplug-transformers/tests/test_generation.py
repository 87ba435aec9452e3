"""`onnxplug export transformers:FOLDER`: onnxruntime-genai loads the folder as it is and writes transformers' own text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from onnxplug.cli.app import run
from onnxplug.runtime import inference_session
from tests.support.contrib import installed

#: Tolerances looser than torch.testing's, and why.
LOOSER: dict[str, tuple[dict[str, float], str]] = {
    "float16": ({"rtol": 0.02, "atol": 0.02}, "every product and sum is rounded to half precision"),
    "fused": ({"rtol": 1e-4, "atol": 1e-4}, "one operator sums products and a softmax in another order"),
}

og = pytest.importorskip("onnxruntime_genai")
pytestmark = pytest.mark.filterwarnings("ignore:The explicitly set RoPE scaling factor")

#: Unequal lengths; onnxruntime-genai pads on the right, transformers on the left.
PROMPTS = [[5, 6, 7, 8, 9, 10, 35, 21], [11, 12, 13]]
STEPS = 16
BEAMS = {"num_beams": 3, "length_penalty": 1.0, "early_stopping": True}

LONG = pytest.mark.long
LATER = [pytest.param(n, marks=LONG) for n in ("gpt2", "qwen3", "phi3", "gemma3", "mistral", "qwen3_moe", "gpt_oss")]


def continued(folder: Path, prompts: list[list[int]], **search: Any) -> list[list[int]]:
    """The text that onnxruntime-genai writes after each prompt."""
    model, width = og.Model(str(folder)), max(map(len, prompts))
    settings = og.GeneratorParams(model)
    settings.set_search_options(max_length=width + STEPS, batch_size=len(prompts), **search)
    generator = og.Generator(model, settings)
    generator.append_tokens(np.array([p + [0] * (width - len(p)) for p in prompts], dtype=np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    return [generator.get_sequence(row)[width:].tolist() for row in range(len(prompts))]


def expected(model: Any, prompts: list[list[int]], **search: Any) -> list[list[int]]:
    """The text that transformers writes."""
    width = max(map(len, prompts))
    rows = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    with torch.no_grad():
        text = model.generate(rows, attention_mask=mask, max_new_tokens=STEPS, do_sample=False, **search)
    return text[:, width:].tolist()  # type: ignore[no-any-return]


def same_text(folder: Path, output: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    for search in ({}, BEAMS):
        text = expected(model, PROMPTS, **search)
        assert len({token for row in text for token in row}) > 4  # the text is not one token alone
        assert continued(output, PROMPTS, **search) == text
        for prompt, row in zip(PROMPTS, text, strict=True):
            assert continued(output, [prompt], **search) == expected(model, [prompt], **search) == [row]


def ended(folder: Path, token: int) -> None:
    """Sets the token that a text ends with."""
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": token}))


def export(*arguments: Any) -> int:
    return run(["export", *map(str, arguments)])


def interface(path: Path) -> tuple[list[str], list[str]]:
    graph = ir.load(path).graph
    return [str(v.name) for v in graph.inputs], [str(v.name) for v in graph.outputs]


@pytest.mark.parametrize("name", ["llama", *LATER])
def test_text_is_that_of_transformers(name: str, saved: Callable[[str], Path], exported: Any) -> None:
    folder = saved(name)
    output = exported(folder, "--verify", "--external-data")
    same_text(folder, output)
    past = [f"past_key_values.{layer}.{kind}" for layer in range(2) for kind in ("key", "value")]
    assert interface(output / "model.onnx") == (
        ["input_ids", "attention_mask", "position_ids", *past],
        ["logits", *[name.replace("past_key_values", "present") for name in past]],
    )


@pytest.mark.long
@pytest.mark.parametrize("flags", [(), ("--fused",)])
def test_frequencies_of_short_and_long_texts(
    flags: tuple[str, ...], saved: Callable[[str], Path], exported: Any
) -> None:
    """One graph: a text that stays below the original length of 24, and a text that begins beyond it."""
    from transformers import AutoModelForCausalLM

    folder = saved("phi3_long")
    output = exported(folder, "--verify", *flags)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    short, long = [5, 6, 7, 8], torch.randint(3, 100, (30,)).tolist()
    for prompt in (short, long):
        assert continued(output, [prompt]) == expected(model, [prompt])
    with torch.no_grad():
        model.model.rotary_emb.long_inv_freq = model.model.rotary_emb.original_inv_freq
        assert continued(output, [long]) != expected(model, [long])  # the long set matters


def test_the_folder_is_complete(saved: Callable[[str], Path], exported: Any) -> None:
    """Tokens of a text, settings of generation, and weights under the checkpoint's names."""
    from safetensors import safe_open
    from transformers import AutoTokenizer

    folder = saved("llama")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    output = exported(folder, "--verify", "--external-data")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    tokenizer = og.Tokenizer(og.Model(str(output)))
    text = "What, 2 of them?"
    assert tokenizer.encode(text).tolist() == AutoTokenizer.from_pretrained(folder)(text).input_ids
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (output / "model.onnx.data").is_file()
    with safe_open(folder / "model.safetensors", "pt") as weights:
        kept = set(weights.keys())
    initializers = {str(name) for name in ir.load(output / "model.onnx").graph.initializers}
    assert {name for name in kept if "norm" in name or "embed" in name} <= initializers
    about = json.loads((output / "genai_config.json").read_text())
    assert about["model"]["context_length"] == about["search"]["max_length"] == 64
    assert (about["model"]["bos_token_id"], about["model"]["eos_token_id"], about["model"]["pad_token_id"]) == (
        1,
        [2],
        0,
    )


@pytest.mark.long
def test_a_text_ends_where_transformers_ends_it(saved: Callable[[str], Path], tmp_path: Path) -> None:
    """A text ends at the end token of the settings of generation, each row of a batch by itself."""
    from transformers import AutoModelForCausalLM

    folder, output = saved("gpt2"), tmp_path / "onnx"
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    (row, _) = expected(model, PROMPTS)
    ended(folder, row[5])
    assert export(f"transformers:{folder}", "-o", output) == 0
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    for prompt in PROMPTS:
        (text,) = expected(model, [prompt])
        assert continued(output, [prompt]) == [text[:-1] if text[-1] == row[5] else text]  # it leaves out the end
    assert len(expected(model, PROMPTS[:1])[0]) < STEPS
    assert json.loads((output / "genai_config.json").read_text())["model"]["eos_token_id"] == [row[5]]


@pytest.mark.long
@pytest.mark.parametrize("name", ["gemma3", pytest.param("llama", marks=pytest.mark.long)])
def test_last_logits(name: str, saved: Callable[[str], Path], exported: Any) -> None:
    """One row of logits a prompt: those of its last token, which is not in the last place of a row with padding."""
    folder = saved(name)
    output = exported(folder, "--last-logits", "--verify")
    (logits, *_) = ir.load(output / "model.onnx").graph.outputs
    assert str(logits.shape) == "[batch,1,100]"
    same_text(folder, output)


def in_two_parts(folder: Path, prompt: list[int], first: int) -> list[int]:
    """The text after a prompt that comes in two parts, as in a conversation."""
    model = og.Model(str(folder))
    settings = og.GeneratorParams(model)
    settings.set_search_options(max_length=len(prompt) + STEPS)
    generator = og.Generator(model, settings)
    for part in (prompt[:first], prompt[first:]):
        generator.append_tokens(np.array([part], dtype=np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    return generator.get_sequence(0)[len(prompt) :].tolist()  # type: ignore[no-any-return]


FUSED = [
    ("mistral", ("--last-logits",)),
    *[pytest.param(n, (), marks=pytest.mark.long) for n in ("llama", "qwen3", "phi3", "gpt2", "gemma3")],
    *[pytest.param(n, (), marks=pytest.mark.long) for n in ("qwen3_moe", "gpt_oss", "stablelm", "gpt_neox", "opt")],
    ("bloom", ()),
    *[pytest.param(n, (), marks=pytest.mark.long) for n in ("falcon", "falcon_alibi", "mpt", "gptj", "codegen")],
]


@pytest.mark.parametrize(("name", "flags"), FUSED)
@pytest.mark.long
def test_fused_attention_in_shared_buffers(
    name: str, flags: tuple[str, ...], saved: Callable[[str], Path], exported: Any
) -> None:
    """Windows and sinks too; beams, for which onnxruntime-genai has no shared buffers, write the same as ever."""
    from transformers import AutoModelForCausalLM

    folder = saved(name)
    output = exported(folder, "--verify", "--fused", *flags)
    same_text(folder, output)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert in_two_parts(output, PROMPTS[0], 5) == expected(model, PROMPTS[:1])[0]
    operators = [node.op_type for node in ir.load(output / "model.onnx").graph]
    assert operators.count("GroupQueryAttention") == 2
    turned = "Cos" not in operators
    with_tables = (
        "gpt2",
        "opt",
        "bloom",
        "falcon_alibi",
        "mpt",
        "gptj",
        "codegen",
    )  # learnt, ALiBi, or computed by transformers
    assert turned == (name in ("mistral", "llama", "qwen3", "phi3", "gemma3", "qwen3_moe", "falcon", *with_tables))
    assert "Softmax" not in operators or name in ("qwen3_moe", "gpt_oss")  # the softmax of the router
    about = json.loads((output / "genai_config.json").read_text())
    assert about["search"]["past_present_share_buffer"] is True


def first_logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of texts without padding, without a past."""
    session = inference_session(folder / "model.onnx")
    sizes = {"batch": len(tokens), "past": 0}
    feed = {
        value.name: np.zeros([sizes.get(size, size) for size in value.shape], "f2" if "16" in value.type else "f4")
        for value in session.get_inputs()
        if value.name.startswith("past_key_values.")
    }
    feed |= {"input_ids": tokens.numpy(), "attention_mask": np.ones(tokens.shape, np.int64)}
    if "position_ids" in (value.name for value in session.get_inputs()):
        feed["position_ids"] = np.arange(tokens.shape[1])[None].repeat(len(tokens), 0)
    return torch.from_numpy(session.run(["logits"], feed)[0])


@pytest.mark.parametrize("name", ["falcon_alibi_heads", *[pytest.param(n, marks=LONG) for n in ("bloom", "mpt")]])
def test_bias_of_fused_attention(name: str, saved: Callable[[str], Path], exported: Any) -> None:
    """ALiBi has transformers' own rounding: Falcon's is in bfloat16."""
    from transformers import AutoModelForCausalLM

    folder = saved(name)
    output = exported(folder, "--fused")
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    for batch, length in ((1, 9), (2, 60)):
        tokens = torch.randint(0, 100, (batch, length))
        with torch.no_grad():
            exact = model(tokens).logits
        torch.testing.assert_close(first_logits(output, tokens), exact, **LOOSER["fused"][0])


def test_bias_of_fused_attention_in_halves(saved: Callable[[str], Path], exported: Any) -> None:
    """Halves are as near the model in float32 as transformers' own, however long texts may be."""
    from transformers import AutoModelForCausalLM

    folder = saved("mpt_long")
    output = exported(folder, "--fused", "--dtype", "float16")
    model, own = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval() for dtype in (torch.float32, torch.float16)
    )
    for batch, length in ((1, 10), (2, 120)):
        tokens = torch.randint(0, 100, (batch, length))
        with torch.no_grad():
            exact, halves = model(tokens).logits, own(tokens).logits
        assert (first_logits(output, tokens) - exact).norm() < 1.5 * (halves - exact).norm()


STAYING = {
    "gpt_neo": "GPTNeoForCausalLM has attention of its own, which can't be replaced",
    "doge": "DogeAttention has a mask of its own",
    "olmoe_with_a_window": "OlmoeAttention has another window than its mask",
    "jetmoe": "JetMoeAttention has keys and values of other shapes than its cache",
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[LONG] * (name != "doge")) for name in STAYING])
def test_attention_that_stays(name: str, saved: Callable[[str], Path], exported: Any, capsys: Any) -> None:
    """Attention that the operator can't compute stays as it is, and a note says so."""
    from transformers import AutoModelForCausalLM

    folder = saved(name)
    output = exported(folder, "--verify", "--fused")
    printed = " ".join(capsys.readouterr().err.split())
    assert f"the attention is not fused: {STAYING[name]}" in printed
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    for batch, length in ((1, 9), (3, 40)):
        tokens = torch.randint(
            3, 100, (batch, length)
        )  # the states of padding may be zeros, and experts equal for them
        with torch.no_grad():
            exact = model(tokens).logits
        torch.testing.assert_close(first_logits(output, tokens), exact, **LOOSER["fused"][0])
    assert "GroupQueryAttention" not in {node.op_type for node in ir.load(output / "model.onnx").graph}
    about = json.loads((output / "genai_config.json").read_text())
    assert about["search"]["past_present_share_buffer"] is False


def logits_after(folder: Path, prompt: list[int]) -> torch.Tensor:
    """onnxruntime-genai's logits for the next token, [vocabulary]."""
    model = og.Model(str(folder))
    settings = og.GeneratorParams(model)
    settings.set_search_options(max_length=20)
    generator = og.Generator(model, settings)
    generator.append_tokens(np.array([prompt], dtype=np.int32))
    return torch.from_numpy(np.array(generator.get_logits(), dtype=np.float32))[0, -1]


@pytest.mark.long
def test_halves_and_options_together(saved: Callable[[str], Path], exported: Any) -> None:
    """Halves are near the model in float32; with weights of four bits, fused attention gives the plain logits."""
    from transformers import AutoModelForCausalLM

    folder, prompt = saved("llama"), PROMPTS[0]
    with torch.no_grad():
        exact = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([prompt])).logits[0, -1]
    for flags in ((), ("--fused", "--last-logits")):
        output = exported(folder, "--dtype", "float16", "--verify", *flags)
        types = {str(v.name): v.dtype for v in ir.load(output / "model.onnx").graph.inputs}
        assert types["past_key_values.0.key"] == ir.DataType.FLOAT16
        torch.testing.assert_close(logits_after(output, prompt), exact, **LOOSER["float16"][0])
    rounded = ("--int4", "--block-size", "16", "--accuracy-level", "1")
    plain = logits_after(exported(folder, *rounded), prompt)
    fused = logits_after(exported(folder, *rounded, "--fused", "--last-logits"), prompt)
    torch.testing.assert_close(fused, plain, **LOOSER["fused"][0])
    halves = logits_after(exported(folder, *rounded, "--dtype", "float16"), prompt)
    # A weight on the border of two levels may get the other level if it was rounded to float16 before.
    assert torch.nn.functional.cosine_similarity(halves, plain, 0) > 0.99


@pytest.mark.long
def test_brain_floats_on_the_cpu(saved: Callable[[str], Path], exported: Any) -> None:
    """Operators without kernels on the CPU are computed in float32; the weights are those of the model in bfloat16."""
    from transformers import AutoModelForCausalLM

    folder, prompt = saved("llama"), PROMPTS[0]
    output = exported(folder, "--dtype", "bfloat16", "--target", "onnxruntime:cpu", "--verify")
    assert {v.dtype for v in ir.load(output / "model.onnx").graph.outputs} == {ir.DataType.BFLOAT16}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.no_grad():
        exact = model.float()(torch.tensor([prompt])).logits[0, -1]
    settings = og.GeneratorParams(og.Model(str(output)))
    settings.set_search_options(max_length=len(prompt) + 1)
    generator = og.Generator(og.Model(str(output)), settings)
    generator.append_tokens(np.array([prompt], dtype=np.int32))
    generator.generate_next_token()
    token = int(generator.get_sequence(0)[-1])
    assert exact[token] > exact.max() - 0.1


def test_prompts_in_two_parts(saved: Callable[[str], Path], exported: Any, capsys: Any) -> None:
    from transformers import AutoModelForCausalLM

    folder = saved("llama")
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    output = exported(folder, "--verify", "--external-data")
    assert "handles errors" not in capsys.readouterr().err  # as if the decoder's own context managers did
    assert in_two_parts(output, PROMPTS[0], 5) == expected(model, PROMPTS[:1])[0]


def restored(path: Path, name: str, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix of four or eight bits as it stands in the file, and the scale of each of its numbers."""
    stored = ir.load(path).graph.initializers
    levels, scales = (stored[f"{name}.{kind}"].const_value.numpy() for kind in ("levels", "scales"))
    middle = 8 if levels.shape[-1] == size // 2 else 128
    numbers = np.stack([levels & 15, levels >> 4], -1) if middle == 8 else levels
    steps = torch.tensor(scales).repeat_interleave(size, 1)
    return (torch.from_numpy(numbers.reshape(len(scales), -1).astype("float32")) - middle) * steps, steps


def check_rounded(path: Path, name: str, size: int, weight: torch.Tensor) -> torch.Tensor:
    """Checks that each number is the level nearest to the weight, and that a plain scale gives no nearer blocks."""
    rounded, steps = restored(path, name, size)
    missing = -weight.shape[1] % size
    exact = torch.nn.functional.pad(weight, (0, missing))
    half = 8 if (rounded / steps).abs().max() <= 8 else 128
    torch.testing.assert_close(rounded, (exact / steps).round().clamp(-half, half - 1) * steps, rtol=0, atol=1e-6)
    blocks = exact.unflatten(1, (-1, size))
    plain = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-30) / (half - 0.5)
    error = (blocks - (blocks / plain).round().clamp(-half, half - 1) * plain).square().sum()
    assert (exact - rounded).square().sum() <= error
    return rounded[:, : weight.shape[1]]


@pytest.mark.parametrize(
    ("name", "flags", "size", "kept"),
    [
        ("llama", ("--block-size", "32"), 32, "-"),
        pytest.param(
            "qwen3", ("--block-size", "64", "--int4-keep", "*layers.0.*,lm_head"), 64, "layers.0.", marks=LONG
        ),
        pytest.param("gemma3", ("--block-size", "32", "--int4-keep", ""), 32, "-", marks=LONG),
        ("gpt2", ("--int4-keep", ""), 32, "-"),
        pytest.param("falcon", ("--int4-keep", ""), 32, "-", marks=LONG),
        pytest.param("gemma3", ("--block-size", "128", "--int4-keep", ""), 128, "-", marks=LONG),
    ],
)
@pytest.mark.long
def test_weights_of_few_bits(
    name: str, flags: tuple[str, ...], size: int, kept: str, saved: Callable[[str], Path], exported: Any, capsys: Any
) -> None:
    """Weights are the scheme's; the text is that of transformers with these weights."""
    from transformers import AutoModelForCausalLM

    folder = saved(name)
    output = exported(folder, "--verify", "--int4", "--accuracy-level", "1", *flags)
    said = " ".join(capsys.readouterr().err.split())
    assert "perplexity of text that the model itself drew" in said
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    rounded = 0
    for path, module in model.named_modules():
        linear = type(module).__name__ in ("Linear", "FalconLinear", "Conv1D")
        if not linear or kept in path or (path == "lm_head" and "lm_head" in flags[-1]):
            continue
        owner, _, last = path.rpartition(".")
        with torch.no_grad():
            if last == "q_proj":  # one matrix for the three projections
                parts = [module, *(model.get_submodule(f"{owner}.{other}") for other in ("k_proj", "v_proj"))]
                whole = torch.cat([part.weight for part in parts])
                whole = check_rounded(output / "model.onnx", f"{owner}.q_proj_k_proj_v_proj", size, whole)
                for part, weight in zip(parts, whole.split([p.out_features for p in parts]), strict=True):
                    part.weight.copy_(weight)
            elif last not in ("k_proj", "v_proj"):
                turned = type(module).__name__ == "Conv1D"
                weight = module.weight.T if turned else module.weight
                weight = check_rounded(output / "model.onnx", path, size, weight)
                module.weight.copy_(weight.T if turned else weight)
        rounded += 1
    embedding = model.get_input_embeddings()
    if embedding.embedding_dim % size == 0:
        with torch.no_grad():
            (path,) = (path for path, module in model.named_modules() if module is embedding)
            embedding.weight.copy_(check_rounded(output / "model.onnx", path, size, embedding.weight))
    assert f"{rounded} linear layers" in said
    for search in ({}, BEAMS):
        assert continued(output, PROMPTS, **search) == expected(model, PROMPTS, **search)


@pytest.mark.long
def test_products_of_bytes(saved: Callable[[str], Path], exported: Any) -> None:
    """By default the activations are rounded too: the logits stay near; fused attention adds few nodes."""
    folder, prompt = saved("llama"), PROMPTS[0]
    fast = exported(folder, "--int4", "--fused")
    exact = logits_after(exported(folder, "--verify", "--int4", "--accuracy-level", "1", "--block-size", "32"), prompt)
    assert torch.nn.functional.cosine_similarity(logits_after(fast, prompt), exact, 0) > 0.999
    nodes = list(ir.load(fast / "model.onnx").graph)
    products = [node for node in nodes if node.op_type == "MatMulNBits"]
    assert len(products) == 2 * 5 + 1
    assert {node.attributes["accuracy_level"].as_int() for node in products} == {4}
    for node in nodes:
        if node.op_type == "GroupQueryAttention":  # it takes one product apart, and turns queries and keys itself
            assert node.inputs[0].producer() in products
            assert [v is None for v in node.inputs[1:3]] == [True, True]
            assert node.attributes["do_rotary"].as_int() == 1
    kinds = [node.op_type for node in nodes]
    assert not {"Cos", "Sin", "Slice", "RotaryEmbedding", "Split", "TopK", "GatherND"}.intersection(kinds)
    assert kinds.count("If") == 2  # they move tokens and results, unless there is one token


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "flags", "size"),
    [("qwen3", ("--fused",), 32), *[pytest.param("llama_tied", (), size, marks=LONG) for size in (16, 128)]],
)
def test_some_layers_in_eight_bits(
    name: str, flags: tuple[str, ...], size: int, saved: Callable[[str], Path], exported: Any, capsys: Any
) -> None:
    """Some layers, and an embedding that shares the logits' matrix, have 256 levels; the logits are nearer."""
    from transformers import AutoModelForCausalLM

    folder, prompt = saved(name), PROMPTS[0]
    wide = ("--int8-layers", "lm_head,*.down_proj,*.0.self_attn.v_proj")
    common = ("--verify", "--int4", "--block-size", str(size), *flags)
    outputs = [exported(folder, *common, "--accuracy-level", "1", *mixed) for mixed in ((), wide)]
    assert "11 linear layers have weights of 4 bits, 4 of 8" in " ".join(capsys.readouterr().err.split()) or size != 32
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    for path in ("model.layers.1.mlp.down_proj", *(() if name == "llama_tied" else ("lm_head",))):
        check_rounded(outputs[1] / "model.onnx", path, size, model.get_submodule(path).weight.detach())
    with torch.no_grad():
        exact = model(torch.tensor([prompt])).logits[0, -1]
    errors = [(logits_after(output, prompt) - exact).norm() for output in outputs]
    assert errors[1] < errors[0]
    rounded = logits_after(exported(folder, *common, *wide), prompt)  # activations are rounded too
    assert torch.nn.functional.cosine_similarity(rounded, logits_after(outputs[1], prompt), 0) > 0.999
    products = [node for node in ir.load(outputs[1] / "model.onnx").graph if node.op_type == "MatMulNBits"]
    assert sorted({node.attributes["bits"].as_int() for node in products}) == [4, 8]


@pytest.mark.long
def test_a_matrix_for_embedding_and_logits(saved: Callable[[str], Path], exported: Any) -> None:
    """Where the model ties both, the file has the four bits once."""
    from transformers import AutoModelForCausalLM

    folder = saved("llama_tied")
    output = exported(folder, "--verify", "--int4", "--fused", "--accuracy-level", "1")
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    nodes = {node.op_type: node for node in ir.load(output / "model.onnx").graph}  # the last node of each operator
    gather, product = nodes["GatherBlockQuantized"], nodes["MatMulNBits"]
    assert gather.inputs[0].producer().inputs[0].name == product.inputs[1].name
    assert gather.inputs[2].name == product.inputs[2].name
    weight = model.get_input_embeddings().weight
    assert model.get_output_embeddings().weight is weight
    check_rounded(output / "model.onnx", str(product.inputs[1].name).removesuffix(".levels"), 32, weight.detach())


@pytest.mark.long
def test_random_weights_of_a_configuration(saved: Callable[[str], Path], tmp_path: Path) -> None:
    folder, output = saved("gpt2"), tmp_path / "onnx"
    (folder / "model.safetensors").unlink()
    assert export(f"transformers:{folder}", "-o", output, "--random", "--opset", "23") == 0
    assert ir.load(output / "model.onnx").opset_imports[""] == 23
    assert og.Model(str(output))


# -- what can't be exported --------------------------------------------------------------------------------------------


def cut(path: Path, left: int) -> None:
    path.write_bytes(path.read_bytes()[:left])


def split(folder: Path, lost: bool = True) -> None:
    """The weights in several files with an index, one of which is lost."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="40KB")
    parts = sorted(folder.glob("model-*.safetensors"))
    assert len(parts) > 1
    if lost:
        parts[-1].unlink()


def forget_a_weight(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def configure(folder: Path, **settings: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


BAD: dict[str, tuple[Callable[[Path], Any], tuple[str, ...], int, str]] = {
    "truncated": (lambda f: cut(f / "model.safetensors", 3000), (), 1, "not a whole safetensors file"),
    "truncated header": (lambda f: cut(f / "model.safetensors", 90), (), 1, "not a whole safetensors file"),
    "empty": (lambda f: cut(f / "model.safetensors", 0), (), 1, "not a whole safetensors file"),
    "lost part": (split, (), 1, "names the file model-0"),
    "lost weight": (forget_a_weight, (), 1, "no weights for model.layers.1.mlp.up_proj.weight"),
    "other shapes": (lambda f: configure(f, intermediate_size=80), (), 1, "weights can't be loaded"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), (), 2, "has no weights"),
    "no configuration": (lambda f: (f / "config.json").unlink(), (), 2, "has no config.json"),
    "damaged configuration": (lambda f: cut(f / "config.json", 20), (), 1, "config.json can't be read"),
    "unknown model": (lambda f: configure(f, model_type="nosuch"), (), 1, "config.json can't be read"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), (), 2, "has no tokenizer"),
    "no class": (lambda f: configure(f, architectures=None), (), 2, "names no class"),
    "other class": (lambda f: configure(f, architectures=["LlamaForNothing"]), (), 2, "LlamaForNothing"),
    "angles": (
        lambda f: configure(f, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}),
        (),
        2,
        "depend on the length of the text",
    ),
    "task": (lambda f: None, ("--task", "singing"), 2, "--task 'singing' is unknown"),
    "task of others": (lambda f: None, ("--task", "image-classification"), 2, "no model of llama"),
    "dtype": (lambda f: None, ("--dtype", "float99"), 2, "--dtype 'float99' is unknown"),
    "contradiction": (
        lambda f: None,
        ("--task", "feature-extraction", "--last-logits"),
        2,
        "--last-logits is for text generation",
    ),
    "int4 of others": (lambda f: None, ("--task", "feature-extraction", "--int4"), 2, "--int4 is for text generation"),
    "int4 and bfloat16": (lambda f: None, ("--int4", "--dtype", "bfloat16"), 2, "no kernel for bfloat16"),
    "fused and bfloat16": (lambda f: None, ("--fused", "--dtype", "bfloat16"), 2, "no kernel for bfloat16"),
    "blocks": (lambda f: None, ("--int4", "--block-size", "48"), 2, "--block-size 48 is none of 16, 32"),
    "blocks of nothing": (
        lambda f: None,
        ("--block-size", "32"),
        2,
        "--block-size, --int4-keep, --int8-layers, --zero-points and --accuracy-level are",
    ),
    "accuracy": (lambda f: None, ("--int4", "--accuracy-level", "2"), 2, "--accuracy-level 2 is none of 1, 4"),
    "no such layer": (lambda f: None, ("--int4", "--int4-keep", "*.nosuch"), 2, "no linear layer is called '*.nosuch'"),
    "no wide layer": (lambda f: None, ("--int4", "--int8-layers", "*.nosuch"), 2, "--int8-layers: no linear layer is"),
    "wide without int4": (lambda f: None, ("--int8-layers", "lm_head"), 2, "--zero-points and --accuracy-level are"),
    "zero points without int4": (lambda f: None, ("--zero-points",), 2, "--zero-points and --accuracy-level are"),
    "nothing to round": (lambda f: None, ("--int4", "--int4-keep", "*"), 2, "no linear layer is left to round"),
    "option of others": (lambda f: None, ("--pieces", "model"), 2, "No such option"),
    "opset": (lambda f: None, ("--opset", "99"), 2, "opset"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str, saved: Callable[[str], Path], tmp_path: Path, capsys: Any) -> None:
    """One error with its cause; nothing is written, under any name."""
    damage, options, status, message = BAD[case]
    folder = saved("llama")
    damage(folder)
    before = sorted(tmp_path.iterdir())
    assert export(f"transformers:{folder}", "-o", tmp_path / "onnx", *options) == status
    said = capsys.readouterr().err
    assert message in " ".join(said.split())
    assert "Traceback" not in said
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.long
def test_weights_in_several_files(saved: Callable[[str], Path], tmp_path: Path) -> None:
    folder = saved("gpt2")
    split(folder, lost=False)
    (tmp_path / "onnx").mkdir()  # an empty folder is taken
    assert export(f"transformers:{folder}", "-o", tmp_path / "onnx", "--no-tokenizer") == 0
    assert not (tmp_path / "onnx" / "tokenizer.json").exists()
    same_text(folder, tmp_path / "onnx")


@pytest.mark.parametrize("name", ["nowhere", "config.json", ""])
def test_bad_folders(name: str, saved: Callable[[str], Path], tmp_path: Path, capsys: Any) -> None:
    folder = saved("llama") / name if name else ""
    assert export(f"transformers:{folder}", "-o", tmp_path / "onnx") == 2
    assert "save_pretrained" in capsys.readouterr().err
    assert not (tmp_path / "onnx").exists()


@pytest.mark.long
def test_output_folders(saved: Callable[[str], Path], tmp_path: Path, capsys: Any) -> None:
    """The contents of the folder stay until the whole export is done, and are replaced only with --overwrite."""
    folder, output = saved("gpt2"), tmp_path / "onnx"
    for place, status in ((tmp_path / "no" / "where", 1), (folder / "config.json", 2)):
        assert export(f"transformers:{folder}", "-o", place) == status
    output.mkdir()
    (output / "mine.txt").write_text("mine")
    assert export(f"transformers:{folder}", "-o", output) == 2
    assert "is not empty" in capsys.readouterr().err
    configure(folder, activation_function="nosuch")
    assert export(f"transformers:{folder}", "-o", output, "--overwrite") == 1
    assert (output / "mine.txt").read_text() == "mine"
    configure(folder, activation_function="gelu_new")
    assert export(f"transformers:{folder}", "-o", output, "--overwrite") == 0
    assert not (output / "mine.txt").exists()
    assert og.Model(str(output))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpt2", "onnx"]


def test_other_commands_take_the_folder(saved: Callable[[str], Path], exported: Any, capsys: Any) -> None:
    folder = saved("llama")
    output = exported(folder, "--verify", "--external-data")
    with installed("onnxplug-transformers", "onnxplug-tools"):
        assert run(["verify", str(output / "model.onnx"), f"transformers:{folder}"]) == 0
        assert run(["verify", str(output / "model.onnx"), "transformers:"]) == 2
        assert "transformers: needs a name" in capsys.readouterr().err
        assert run(["verify", str(output / "model.onnx"), f"transformers:{folder / 'nowhere'}"]) == 2
