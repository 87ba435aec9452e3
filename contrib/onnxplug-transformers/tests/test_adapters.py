"""`--adapter`: PEFT's adapters merged into the weights, or in files of their own, which onnxruntime-genai and ONNX Runtime activate."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from onnxplug.cli.app import run

#: Tolerances looser than torch.testing's, and why.
LOOSER: dict[str, tuple[dict[str, float], str]] = {
    "decoder": (
        {"rtol": 1e-4, "atol": 1e-4},
        "an adapter's products are summed in another order than a merged weight's",
    ),
    "float16": ({"rtol": 0.05, "atol": 0.05}, "every product and sum is rounded to half precision"),
}

og = pytest.importorskip("onnxruntime_genai")
ort = pytest.importorskip("onnxruntime")

#: Unequal lengths; onnxruntime-genai pads on the right, transformers on the left.
PROMPTS = [[5, 6, 7, 8, 9, 10, 35, 21], [11, 12, 13]]
STEPS = 12
LAYERS = {"llama": ("q_proj", "v_proj", "down_proj"), "gpt2": ("c_attn", "mlp.c_proj")}
#: Settings of the second adapter, which also has other layers and another rank.
OTHERS = {"use_rslora": True, "alpha_pattern": {"lm_head": 3}, "rank_pattern": {"lm_head": 5}}


class Client:
    """onnxruntime-genai with a folder and all its adapters."""

    def __init__(self, folder: Path) -> None:
        self.model = og.Model(str(folder))
        self.adapters = og.Adapters(self.model)
        for path in sorted(folder.glob("*.onnx_adapter")):
            self.adapters.load(str(path), path.stem)

    def text(self, name: str | None, prompts: list[list[int]], **search: Any) -> list[list[int]]:
        """The text after each prompt, with an adapter or without."""
        width = max(map(len, prompts))
        settings = og.GeneratorParams(self.model)
        settings.set_search_options(max_length=width + STEPS, batch_size=len(prompts), **search)
        generator = og.Generator(self.model, settings)
        if name is not None:
            generator.set_active_adapter(self.adapters, name)
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


def logits(folder: Path, name: str | None, tokens: torch.Tensor) -> torch.Tensor:
    """The logits of a prompt, by ONNX Runtime alone."""
    session = ort.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    feeds: dict[str, Any] = {"input_ids": tokens.numpy(), "attention_mask": torch.ones_like(tokens).numpy()}
    for value in session.get_inputs():
        if value.name == "position_ids":
            feeds[value.name] = torch.arange(tokens.shape[1]).expand(len(tokens), -1).numpy()
        elif value.name not in feeds:
            shape = [len(tokens), value.shape[1], 0, value.shape[3]]
            feeds[value.name] = np.zeros(shape, np.float16 if value.type == "tensor(float16)" else np.float32)
    options = ort.RunOptions()
    adapter = ort.LoraAdapter()
    if name is not None:
        adapter.Load(str(folder / f"{name}.onnx_adapter"))
        options.add_active_adapter(adapter)
    return torch.from_numpy(session.run(["logits"], feeds, options)[0])


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.fixture
def two(saved: Callable[[str], Path], save_adapter: Any) -> Callable[[str], tuple[Path, dict[str, Path]]]:
    """A model's folder, and the folders of two of its adapters."""

    def make(name: str) -> tuple[Path, dict[str, Path]]:
        folder = saved(name)
        model, beside = load(folder), folder.parent / "adapters"
        first = save_adapter(model, beside / "first", LAYERS[name])
        return folder, {
            "first": first,
            "second": save_adapter(model, beside / "second", (LAYERS[name][0], "lm_head"), 2, **OTHERS),
        }

    return make


def options(adapters: dict[str, Path]) -> list[str]:
    return [text for name, folder in adapters.items() for text in ("--adapter", f"{name}={folder}")]


CASES = [
    ("llama", ("--verify",)),
    *[
        pytest.param(name, flags, marks=pytest.mark.long)
        for name, flags in (
            ("llama", ("--verify", "--fused", "--last-logits", "--external-data")),
            ("gpt2", ("--verify",)),
            ("gpt2", ("--fused",)),
        )
    ],
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "flags"), CASES)
def test_text_with_each_adapter(
    name: str, flags: tuple[str, ...], two: Any, with_adapter: Any, exported: Any, capsys: Any
) -> None:
    """One base, each adapter in turns, and none: transformers' text with the adapter in its weights."""
    folder, adapters = two(name)
    output = exported(folder, *flags, *options(adapters))
    assert "first.onnx_adapter: an adapter of" in capsys.readouterr().err
    client, texts = Client(output), []
    for given in (None, "second", "first", None):
        model = load(folder) if given is None else with_adapter(load(folder), adapters[given])
        for search in ({}, {"num_beams": 3, "length_penalty": 1.0, "early_stopping": True}):
            assert client.text(given, PROMPTS, **search) == expected(model, PROMPTS, **search)
        texts.append(client.text(given, PROMPTS[:1]))
        if "--last-logits" not in flags:
            for tokens in (torch.randint(3, 100, (2, 7)), torch.randint(3, 100, (1, 1))):
                with torch.no_grad():
                    exact = model(tokens).logits
                torch.testing.assert_close(logits(output, given, tokens), exact, **LOOSER["decoder"][0])
    assert texts[0] == texts[3]
    assert texts[0] != texts[1] != texts[2] != texts[0]


@pytest.mark.long
def test_the_readme_shows_how(two: Any, with_adapter: Any, exported: Any, tmp_path: Path, monkeypatch: Any) -> None:
    folder, adapters = two("llama")
    output = exported(folder, "--verify", *options({"formal": adapters["first"]}))
    (tmp_path / "DIR").symlink_to(output)
    monkeypatch.chdir(tmp_path)
    page = Path(__file__).parents[1].joinpath("README.md").read_text(encoding="utf-8")
    (code,) = [block for block in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S) if "og.Adapters" in block]
    shown: dict[str, Any] = {}
    exec(code, shown)
    text = expected(with_adapter(load(folder), adapters["first"]), [[5, 6, 7]])
    assert shown["generator"].get_sequence(0).tolist()[3 : 3 + STEPS] == text[0]


@pytest.mark.long
def test_contents_of_the_files(two: Any, exported: Any) -> None:
    """The base's weights are there once under their names; factors are inputs with a default of rank zero."""
    folder, adapters = two("llama")
    output = exported(folder, "--verify", *options(adapters))
    graph = ir.load(output / "model.onnx").graph
    inputs = {str(value.name): value for value in graph.inputs}
    factors = [name for name in inputs if ".lora_" in name]
    assert len(factors) == 2 * (2 * 3 + 1)
    for name in factors:
        default = graph.initializers[name].const_value
        assert default is not None
        assert 0 in default.shape.numpy()
        assert sum(isinstance(size, int) for size in inputs[name].shape) == 1  # the other size is the rank
    assert {"model.embed_tokens.weight", "model.norm.weight"} <= set(graph.initializers)
    second = ort.AdapterFormat.read_adapter(str(output / "second.onnx_adapter")).get_parameters()
    assert {name: value.shape() for name, value in second.items() if "layers.1" not in name} == {
        "lm_head.lora_A": [64, 5],
        "lm_head.lora_B": [5, 100],
        "model.layers.0.self_attn.q_proj.lora_A": [64, 2],
        "model.layers.0.self_attn.q_proj.lora_B": [2, 64],
    }
    assert len(second) == 6
    about = json.loads((folder.parent / "adapters" / "second" / "adapter_config.json").read_text())
    assert about["rank_pattern"] == {"lm_head": 5}


@pytest.mark.long
@pytest.mark.parametrize("flags", [("--fused", "--zero-points"), pytest.param((), marks=pytest.mark.long)])
def test_a_base_in_four_bits(flags: tuple[str, ...], two: Any, with_adapter: Any, restore: Any, exported: Any) -> None:
    """Adapters stay floats beside rounded weights, also those of layers that are parts of one product."""
    folder, adapters = two("llama")
    output = exported(folder, "--verify", "--int4", "--accuracy-level", "1", *flags, *options(adapters))
    client = Client(output)
    for given in (None, "first", "second"):
        model = load(folder)
        restore(model, output / "model.onnx")
        if given is not None:
            with_adapter(model, adapters[given])
        assert client.text(given, PROMPTS) == expected(model, PROMPTS)
        tokens = torch.randint(3, 100, (2, 6))
        with torch.no_grad():
            exact = model(tokens).logits
        torch.testing.assert_close(logits(output, given, tokens), exact, **LOOSER["decoder"][0])
    products = [node for node in ir.load(output / "model.onnx").graph if node.op_type == "MatMulNBits"]
    assert len(products) == 2 * 5 + 1


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves(dtype: str, two: Any, with_adapter: Any, exported: Any) -> None:
    folder, adapters = two("llama")
    target = () if dtype == "float16" else ("--target", "onnxruntime:cpu")
    output = exported(folder, "--verify", "--dtype", dtype, *target, *options(adapters))
    given = ort.AdapterFormat.read_adapter(str(output / "first.onnx_adapter")).get_parameters()
    assert {value.data_type() for value in given.values()} == {f"tensor({dtype})"}
    model = with_adapter(load(folder), adapters["first"])
    if dtype == "float16":
        tokens = torch.randint(3, 100, (2, 6))
        with torch.no_grad():
            exact = model(tokens).logits
        torch.testing.assert_close(logits(output, "first", tokens).float(), exact, **LOOSER["float16"][0])
        return
    with torch.no_grad():
        exact = model(torch.tensor(PROMPTS[:1])).logits[0, -1]
    ((token, *_),) = Client(output).text("first", PROMPTS[:1])
    assert exact[token] > exact.max() - 0.1


@pytest.mark.parametrize("flags", [(), pytest.param(("--int4", "--accuracy-level", "1"), marks=pytest.mark.long)])
@pytest.mark.long
def test_an_adapter_in_the_weights(
    flags: tuple[str, ...], two: Any, with_adapter: Any, restore: Any, exported: Any
) -> None:
    folder, adapters = two("gpt2" if not flags else "llama")
    output = exported(folder, "--verify", *flags, "--adapter", str(adapters["second"]))
    model = with_adapter(load(folder), adapters["second"])
    if flags:
        restore(model, output / "model.onnx")
    assert Client(output).text(None, PROMPTS) == expected(model, PROMPTS)
    assert not [value.name for value in ir.load(output / "model.onnx").graph.inputs if "lora" in str(value.name)]
    assert not list(output.glob("*.onnx_adapter"))


@pytest.mark.long
def test_an_adapter_in_an_encoder(save_adapter: Any, with_adapter: Any, save_tokenizer: Any, tmp_path: Path) -> None:
    """An adapter is merged into a model of any task."""
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    model = BertModel(BertConfig(vocab_size=100, **sizes)).eval()
    model.save_pretrained(tmp_path / "bert")
    save_tokenizer(tmp_path / "bert")
    adapter = save_adapter(model, tmp_path / "adapter", ("query", "output.dense"))
    arguments = ["-o", str(tmp_path / "onnx"), "--verify", "--adapter", str(adapter)]
    assert run(["export", f"transformers:{tmp_path / 'bert'}", *arguments]) == 0
    session = ort.InferenceSession(str(tmp_path / "onnx" / "model.onnx"), providers=["CPUExecutionProvider"])
    with_adapter(model, adapter)
    for shape in ((2, 7), (1, 3)):
        tokens = torch.randint(3, 100, shape)
        given = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "token_type_ids": tokens * 0}
        with torch.no_grad():
            exact = model(**given).last_hidden_state
        names = [value.name for value in session.get_inputs()]
        (states, *_) = session.run(["last_hidden_state"], {name: given[name].numpy() for name in names})
        torch.testing.assert_close(torch.from_numpy(states), exact, **LOOSER["decoder"][0])


@pytest.mark.long
def test_folders_that_peft_writes(saved: Callable[[str], Path], exported: Any, tmp_path: Path) -> None:
    """PEFT's own text with an adapter that it has saved."""
    peft = pytest.importorskip("peft", reason="it is in the extra `test` of the package")
    folder, adapters = saved("llama"), {}
    for index, targets in enumerate((["q_proj", "v_proj"], "all-linear")):
        settings = {"r": 4 + index, "lora_alpha": 7, "init_lora_weights": False, "use_rslora": bool(index)}
        made = peft.get_peft_model(
            load(folder), peft.LoraConfig(task_type="CAUSAL_LM", target_modules=targets, **settings)
        )
        made.save_pretrained(tmp_path / f"adapter{index}")
        adapters[f"adapter{index}"] = tmp_path / f"adapter{index}"
    client = Client(exported(folder, "--verify", "--fused", *options(adapters)))
    texts = []
    for name, path in adapters.items():
        texts.append(expected(peft.PeftModel.from_pretrained(load(folder), path).eval(), PROMPTS))
        assert client.text(name, PROMPTS) == texts[-1]
    assert texts[0] != texts[1] != expected(load(folder), PROMPTS)


# -- what can't be taken -----------------------------------------------------------------------------------------------


def configure(adapter: Path, **settings: Any) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def change(adapter: Path, **tensors: Any) -> None:
    """Replaces an adapter's tensors, by the end of their name; ``None`` removes a tensor."""
    from safetensors.torch import load_file, save_file

    path, layer = adapter / "adapter_model.safetensors", "base_model.model.model.layers.0.self_attn"
    found = load_file(path)
    for name, tensor in tensors.items():
        key = f"{layer}.{name.replace('__', '.')}"
        found.pop(key, None)
        if tensor is not None:
            found[key] = tensor
    save_file(found, path)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def nothing(_: Path) -> None:
    pass


A, B = "q_proj__lora_A__weight", "q_proj__lora_B__weight"
#: A change of the adapter's folder, options in which @ is the folder, the exit status and the message.
BAD: dict[str, tuple[Callable[[Path], Any], str, int, str]] = {
    "no folder": (nothing, "--adapter x=@nowhere", 2, "has no adapter_config.json"),
    "no name": (nothing, "--adapter =@", 2, "is not NAME=DIR"),
    "no file's name": (nothing, "--adapter .x=@", 2, "is not NAME=DIR"),
    "nothing named": (nothing, "--adapter x=", 2, "is not NAME=DIR"),
    "a name twice": (nothing, "--adapter x=@ --adapter x=@", 2, "names 'x' twice"),
    "two to merge": (nothing, "--adapter @ --adapter @", 2, "stands alone"),
    "both ways": (nothing, "--adapter @ --adapter x=@", 2, "stands alone"),
    "another task": (nothing, "--adapter x=@ --task feature-extraction", 2, "NAME=DIR is for text generation"),
    "another layout": (nothing, "--adapter x=@ --for optimum", 2, "NAME=DIR is for --for genai"),
    "another kind": (lambda f: configure(f, peft_type="IA3"), "--adapter x=@", 2, "kind 'IA3'"),
    "dora": (lambda f: configure(f, use_dora=True), "--adapter x=@", 2, "use_dora=True, which is not taken"),
    "unknown setting": (lambda f: configure(f, novelty={"a": 1}), "--adapter @", 2, "novelty={'a': 1}"),
    "biases": (lambda f: configure(f, bias="all"), "--adapter x=@", 2, "bias='all'"),
    "changed base": (lambda f: configure(f, init_lora_weights="pissa"), "--adapter @", 2, "changes the base's weights"),
    "no rank": (lambda f: configure(f, r=None), "--adapter x=@", 1, "does not say model.layers.0"),
    "rank 0": (lambda f: configure(f, r=0), "--adapter x=@", 1, "rank and scale: ZeroDivisionError"),
    "damaged pattern": (lambda f: configure(f, alpha_pattern={"(": 1}), "--adapter x=@", 1, "rank and scale"),
    "another rank": (lambda f: configure(f, r=3), "--adapter x=@", 1, "are not of the rank 3"),
    "damaged configuration": (lambda f: cut(f / "adapter_config.json"), "--adapter x=@", 1, "can't be read"),
    "no weights": (
        lambda f: (f / "adapter_model.safetensors").unlink(),
        "--adapter x=@",
        2,
        "adapter_model.safetensors",
    ),
    "damaged weights": (lambda f: cut(f / "adapter_model.safetensors"), "--adapter x=@", 1, "not a whole safetensors"),
    "one factor": (lambda f: change(f, **{A: None}), "--adapter x=@", 1, "one of the two factors"),
    "other tensors": (lambda f: change(f, weight=torch.ones(2)), "--adapter @", 2, "which is no factor"),
    "images": (lambda f: change(f, **{A: torch.ones(4, 3, 2, 2)}), "--adapter x=@", 2, "which is no factor"),
    "another base": (
        lambda f: change(f, **{A: torch.ones(4, 48)}),
        "--adapter x=@",
        2,
        "takes 64 numbers and gives 64",
    ),
    "another base's": (lambda f: change(f, **{B: torch.ones(32, 4)}), "--adapter @", 2, "product for model.layers.0"),
    "no such layer": (
        lambda f: change(f, to__lora_A__weight=torch.ones(4, 64), to__lora_B__weight=torch.ones(64, 4)),
        "--adapter x=@",
        2,
        "LlamaForCausalLM has no layer model.layers.0.self_attn.to",
    ),
    "no linear layer": (
        lambda f: change(f, lora_A__weight=torch.ones(4, 64), lora_B__weight=torch.ones(64, 4)),
        "--adapter x=@",
        2,
        "self_attn is no linear layer",
    ),
    "nothing to merge into": (
        lambda f: change(f, lora_A__weight=torch.ones(4, 64), lora_B__weight=torch.ones(64, 4)),
        "--adapter @",
        2,
        "self_attn is a LlamaAttention",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str, saved: Callable[[str], Path], save_adapter: Any, tmp_path: Path, capsys: Any) -> None:
    """One error with its cause; nothing is written, under any name."""
    damage, flags, status, message = BAD[case]
    folder = saved("llama")
    adapter = save_adapter(load(folder), tmp_path / "adapter", ("q_proj",))
    damage(adapter)
    before = sorted(tmp_path.iterdir())
    arguments = flags.replace("@nowhere", f"{adapter}-nowhere").replace("@", str(adapter)).split()
    assert run(["export", f"transformers:{folder}", "-o", str(tmp_path / "onnx"), *arguments]) == status
    said = capsys.readouterr().err
    assert message in " ".join(said.split())
    assert "Traceback" not in said
    assert sorted(tmp_path.iterdir()) == before


def test_a_weight_of_two_layers(saved: Callable[[str], Path], save_adapter: Any, tmp_path: Path, capsys: Any) -> None:
    """An adapter of the logits is not merged where the embedding has the same weight."""
    folder = saved("llama_tied")
    adapter = save_adapter(load(folder), tmp_path / "adapter", ("lm_head",))
    assert run(["export", f"transformers:{folder}", "-o", str(tmp_path / "onnx"), "--adapter", str(adapter)]) == 2
    assert "is another layer's too" in " ".join(capsys.readouterr().err.split())


def test_the_adapter_is_no_model(saved: Callable[[str], Path], save_adapter: Any, tmp_path: Path, capsys: Any) -> None:
    adapter = save_adapter(load(saved("llama")), tmp_path / "adapter", ("q_proj",))
    assert run(["export", f"transformers:{adapter}", "-o", str(tmp_path / "onnx")]) == 2
    assert "transformers:BASE --adapter" in " ".join(capsys.readouterr().err.split())
