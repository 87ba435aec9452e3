"""Linear attention and state spaces: each function beside transformers' own, and whole models of any length."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import onnxplug
from onnxplug.torch_private import pytree

pytestmark = pytest.mark.filterwarnings("ignore")

#: Tolerances that are looser than torch.testing's for float32, each with its reason.
LOOSER = {
    "functions": (
        {"rtol": 1e-4, "atol": 1e-5},
        "states are handed on from chunk to chunk, and triangular systems are solved in another order",
    ),
    "models": (
        {"rtol": 1e-3, "atol": 1e-4},
        "layers of such functions, with norms of small numbers between them",
    ),
}
SMALL = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "use_cache": False,
}
STATE_SPACE = {"mamba_d_state": 8, "mamba_dt_rank": 4, "mamba_expand": 2, "num_experts": 2}
DELTA_RULE = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
KIMI = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "num_shared_experts": 1,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "qk_head_dim": 16,
    "v_head_dim": 8,
    "head_dim": 8,
    "topk_group": 1,
    "num_expert_group": 1,
    "num_experts_per_token": 2,
    "num_experts": 4,
    "layer_types": ["linear_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse"],
    "linear_num_heads": 4,
    "pad_token_id": 0,
}
#: The name in transformers' classes, and settings beside those of :data:`SMALL`.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("Mamba", {"state_size": 8, "time_step_rank": 4, "num_hidden_layers": 1}),
    "falcon_mamba": ("FalconMamba", {"state_size": 8, "time_step_rank": 4}),
    "mamba2": ("Mamba2", {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 100}),
    "jamba": ("Jamba", {**STATE_SPACE, "attn_layer_period": 2, "attn_layer_offset": 1}),
    "zamba": (
        "Zamba",
        {
            **STATE_SPACE,
            "num_hidden_layers": 3,
            "layers_block_type": ["mamba", "hybrid", "hybrid"],
            "attention_head_dim": 16,
        },
    ),
    "qwen3_next": ("Qwen3Next", DELTA_RULE),
    "qwen3_5": ("Qwen3_5", {**DELTA_RULE, "num_hidden_layers": 1, "layer_types": ["linear_attention"]}),
    "qwen3_5_moe": ("Qwen3_5Moe", DELTA_RULE),
    "olmo_hybrid": ("OlmoHybrid", {**DELTA_RULE, "linear_num_key_heads": 4, "pad_token_id": 0}),
    "kimi_linear": ("KimiLinear", KIMI),
    "bailing_hybrid": ("BailingHybrid", {**KIMI, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1}),
    "rwkv": ("Rwkv", {"attention_hidden_size": 32, "context_length": 256}),
    "recurrent_gemma": (
        "RecurrentGemma",
        {
            "num_hidden_layers": 2,
            "block_types": ["recurrent", "attention"],
            "lru_width": 32,
            "attention_window_size": 8,
        },
    ),
    "minimax": ("MiniMax", {"block_size": 16, "layer_types": ["linear_attention", "full_attention"], "head_dim": 8}),
    "xlstm": ("xLSTM", {"chunk_size": 8, "num_heads": 4, "num_blocks": 2, "embedding_dim": 32, "hidden_size": 32}),
}
WITHOUT_MASK = ("rwkv", "xlstm")
LATER = [pytest.param(name, marks=pytest.mark.long) for name in MODELS if name not in ("mamba", "qwen3_5")]


def made(name: str, **settings: Any) -> Any:
    """A small model, with weights that are not all ones or zeros anywhere."""
    transformers = importlib.import_module("transformers")
    prefix, own = MODELS[name]
    config = getattr(transformers, f"{prefix}TextConfig", None) or getattr(transformers, f"{prefix}Config")
    torch.manual_seed(0)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config(**{**SMALL, **own, **settings})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def given(name: str, batch: int, length: int, padding: int = 0) -> dict[str, Tensor]:
    """Tokens, and a mask that hides the last tokens of the first row."""
    inputs = {"input_ids": torch.randint(3, 100, (batch, length))}
    if name not in WITHOUT_MASK:
        inputs["attention_mask"] = torch.ones(batch, length, dtype=torch.int64)
        if padding:
            inputs["attention_mask"][0, -padding:] = 0
    return inputs


@pytest.mark.parametrize("name", ["mamba", "qwen3_5", *LATER])
@pytest.mark.long
def test_any_length(name: str) -> None:
    """Shorter and longer than a chunk, a single token, a single row."""
    model, inputs = made(name), given(name, 2, 9, padding=2)
    with torch.no_grad():
        model(**inputs)  # Rwkv scales its weights at the first call
    program = onnxplug.to_onnx(
        model, kwargs=inputs, dynamic_shapes={key: {0: "batch", 1: "sequence"} for key in inputs}
    )
    program.verify()
    for batch, length, padding in ((1, 1, 0), (3, 5, 3), (1, 64, 0), (2, 65, 0), (2, 150, 70)):
        inputs = given(name, batch, length, padding)
        shown = inputs.get("attention_mask", torch.ones(batch, length)).bool()
        with torch.no_grad():
            expected = model(**inputs).logits[shown]
        torch.testing.assert_close(program(**inputs)[0][shown], expected, **LOOSER["models"][0])


# -- the functions themselves ------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A function here and transformers' own.

    Attributes:
        module: The module of transformers' function, behind ``transformers.models``.
        own: The name of transformers' function, with its class.
        name: The name of the function here.
        make: Arguments of both for a length, with or without a state.
    """

    module: str
    own: str
    name: str
    make: Callable[[int, bool], dict[str, Any]]


def _delta_rule(length: int, started: bool) -> dict[str, Any]:
    """Heads that forget nothing, little and everything."""
    return {
        "query": torch.randn(2, length, 2, 16),
        "key": torch.randn(2, length, 2, 16),
        "value": torch.randn(2, length, 4, 8),
        "g": -torch.rand(2, length, 4) * torch.tensor([0.0, 0.1, 1.0, 90.0]),
        "beta": torch.rand(2, length, 4),
        "initial_state": torch.randn(2, 4, 16, 8) if started else None,
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
    }


def _not_normalized(length: int, started: bool) -> dict[str, Any]:
    """Keys that are shorter than 1 by themselves: with longer keys, states would grow beyond all bounds."""
    given = _delta_rule(length, started)
    return {**given, "key": given["key"] / 8, "use_qk_l2norm_in_kernel": False}


def _alike(length: int, started: bool) -> dict[str, Any]:
    """All keys are the same, and each token overwrites the tokens before: the worst case of a triangular inverse."""
    key = torch.randn(2, 1, 4, 16).expand(2, length, 4, 16)
    own = {"key": key, "query": key, "g": torch.zeros(2, length, 4), "beta": torch.ones(2, length, 4)}
    return {**_delta_rule(length, started), **own}


def _by_channel(length: int, started: bool) -> dict[str, Any]:
    key = torch.randn(2, length, 4, 16)
    decay = -torch.rand(2, length, 4, 16) * torch.tensor([0.0, 0.1, 1.0, 90.0])[:, None]
    return {**_delta_rule(length, started), "query": torch.randn_like(key), "key": key, "g": decay}


def _state_space(length: int, gated: bool) -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(2, 6, length),
        "dt": torch.randn(2, 6, length),
        "A": -3 * torch.rand(6, 4),
        "B": torch.randn(2, 4, length),
        "C": torch.randn(2, 4, length),
        "D": torch.randn(6),
        "z": torch.randn(2, 6, length) if gated else None,
        "delta_bias": torch.randn(6) if gated else None,
        "delta_softplus": True,
        "return_last_state": True,
    }


def _in_half(length: int, gated: bool) -> dict[str, Any]:
    given = _state_space(length, gated)
    wide = ("A", "D")
    return {k: v.half() if isinstance(v, Tensor) and k not in wide else v for k, v in given.items()}


def _by_heads(length: int, started: bool) -> dict[str, Any]:
    """More than a chunk, of heads that keep everything and next to nothing; some ``dt`` are at their limits."""
    return {
        "hidden_states": torch.randn(2, length, 4, 6),
        "dt": torch.randn(2, length, 4),
        "A": -torch.tensor([0.0, 0.1, 1.0, 16.0]),
        "B": torch.randn(2, length, 2, 8),
        "C": torch.randn(2, length, 2, 8),
        "chunk_size": 100,
        "D": torch.randn(4),
        "dt_bias": torch.randn(4),
        "initial_states": torch.randn(2, 4, 6, 8) if started else None,
        "dt_softplus": True,
        "dt_limit": (0.2, 1.5),
        "return_final_states": True,
    }


def _weighted(length: int, started: bool) -> dict[str, Any]:
    state = [torch.randn(2, 6), torch.rand(2, 6) + 1, torch.randn(2, 6)]
    return {
        "time_decay": torch.randn(6),
        "time_first": torch.randn(6),
        "key": 3 * torch.randn(2, length, 6),
        "value": torch.randn(2, length, 6),
        "state": state if started else None,
        "return_state": True,
    }


def _linear(length: int, started: bool) -> dict[str, Any]:
    return {
        "self": None,
        "hidden_states": torch.randn(2, length, 6),
        "recurrent_gate": torch.rand(2, length, 6),
        "reset": torch.arange(length).expand(2, length)[..., None] == 2,
        "recurrent_states": torch.randn(2, 6) if started else None,
    }


def _matrices(length: int, started: bool) -> dict[str, Any]:
    module = importlib.import_module("transformers.models.xlstm.modeling_xlstm")
    states = ((2, 4, 8, 6), (2, 4, 8), (2, 4, 1))
    return {
        "self": module.xLSTMBackend(module.xLSTMConfig(chunk_size=8, mode="inference")),
        "query": torch.randn(2, 4, length, 8),
        "key": torch.randn(2, 4, length, 8),
        "value": torch.randn(2, 4, length, 6),
        "igate": 3 * torch.randn(2, 4, length),
        "fgate": 3 * torch.randn(2, 4, length),
        **{
            f"{name}_initial": torch.randn(shape) if started else None
            for name, shape in zip("cnm", states, strict=True)
        },
    }


def _lightning(length: int, masked: bool) -> dict[str, Any]:
    module = importlib.import_module("transformers.models.minimax.modeling_minimax")
    layer = module.MiniMaxLightningAttention(
        module.MiniMaxConfig(**{**SMALL, **MODELS["minimax"][1], "block_size": 8}), 0
    )
    mask = torch.ones(2, length)
    mask[0, length // 2 + 1 :] = 0
    return {
        "self": layer.eval().requires_grad_(False),
        "hidden_states": torch.randn(2, length, 32),
        "position_embeddings": (),
        "attention_mask": mask if masked else None,
    }


CASES = {
    "gated_delta_rule": Case(
        "qwen3_next.modeling_qwen3_next", "torch_chunk_gated_delta_rule", "gated_delta_rule", _delta_rule
    ),
    "not_normalized": Case(
        "qwen3_5.modeling_qwen3_5", "torch_chunk_gated_delta_rule", "gated_delta_rule", _not_normalized
    ),
    "keys_alike": Case("qwen3_next.modeling_qwen3_next", "torch_chunk_gated_delta_rule", "gated_delta_rule", _alike),
    "kimi": Case("kimi_linear.modeling_kimi_linear", "chunk_kimi_delta_attention", "kimi_delta_attention", _by_channel),
    "mamba": Case("mamba.modeling_mamba", "mamba_selective_scan", "selective_scan", _state_space),
    "mamba_half": Case("mamba.modeling_mamba", "mamba_selective_scan", "selective_scan", _in_half),
    "mamba2": Case("mamba2.modeling_mamba2", "mamba2_chunk_scan", "chunked_state_space", _by_heads),
    "rwkv": Case("rwkv.modeling_rwkv", "rwkv_linear_attention", "weighted_key_values", _weighted),
    "recurrent_gemma": Case(
        "recurrent_gemma.modeling_recurrent_gemma", "RecurrentGemmaRglru._rnn_scan", "linear_recurrence", _linear
    ),
    "xlstm": Case("xlstm.modeling_xlstm", "xLSTMBackend.forward", "matrix_memory", _matrices),
    "minimax": Case("minimax.modeling_minimax", "MiniMaxLightningAttention.forward", "lightning_attention", _lightning),
}


def found(case: Case) -> Any:
    value: Any = importlib.import_module(f"transformers.models.{case.module}")
    for part in case.own.split("."):
        value = getattr(value, part)
    return value


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("length", [1, 7, 64, 65, 200])
@pytest.mark.parametrize("name", CASES)
def test_as_in_transformers(name: str, length: int, started: bool) -> None:
    """The results and the last state have the same numbers and dtypes."""
    from onnxplug_transformers import recurrences

    case = CASES[name]
    arguments = case.make(length, started)
    module = [arguments.pop("self")] if "self" in arguments else []  # the module of a method
    expected = found(case)(*module, **arguments)
    actual = getattr(recurrences, case.name)(*module, **arguments)
    torch.testing.assert_close(actual[0], expected[0], **LOOSER["functions"][0])
    torch.testing.assert_close(list(actual[1]), list(expected[1]), **LOOSER["functions"][0])


def test_no_state_where_none_is_asked_for() -> None:
    from onnxplug_transformers import recurrences

    for name in ("gated_delta_rule", "kimi"):
        case = CASES[name]
        given = {**case.make(3, False), "output_final_state": False}
        assert getattr(recurrences, case.name)(**given)[1] is found(case)(**given)[1] is None
    given = {**_state_space(3, False), "return_last_state": False}
    assert recurrences.selective_scan(**given).shape == (2, 6, 3)
    given = {**_by_heads(3, False), "return_final_states": False}
    assert recurrences.chunked_state_space(**given).shape == (2, 3, 4, 6)
    assert recurrences.weighted_key_values(**{**_weighted(3, False), "return_state": False})[1] is None


# -- exchanged functions -----------------------------------------------------------------------------------------------


def test_modules_are_as_before() -> None:
    """After a capture, and after a capture that fails; in between, packed sequences are left to transformers."""
    from onnxplug_transformers.recurrences import exportable_recurrences

    before = {name: found(case) for name, case in CASES.items()}

    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert found(CASES["mamba"]) is not before["mamba"]
            raise RuntimeError("of the model")

    with pytest.raises(onnxplug.CaptureError, match="of the model"):
        onnxplug.to_onnx(Fails(), (torch.ones(2),))
    assert {name: found(case) for name, case in CASES.items()} == before
    with exportable_recurrences():
        inside = {name: found(case) for name, case in CASES.items()}
        assert not [name for name in CASES if inside[name] is before[name]]
        with pytest.raises(ValueError, match="packed sequences"):
            inside["gated_delta_rule"](**_delta_rule(3, False), cu_seqlens=torch.tensor([0, 3]))
    assert {name: found(case) for name, case in CASES.items()} == before


def test_other_parameters_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from onnxplug_transformers.recurrences import exportable_recurrences

    def other(hidden_states: Tensor, seq_len: int) -> Tensor:
        return hidden_states[:seq_len]

    module = importlib.import_module("transformers.models.mamba.modeling_mamba")
    monkeypatch.setattr(module, "mamba_selective_scan", other)
    with exportable_recurrences():
        assert module.mamba_selective_scan is other


# -- caches ------------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen3_next", "olmo_hybrid", "kimi_linear"])
def test_one_graph_for_a_prompt_and_its_steps(name: str) -> None:
    """The delta rule goes on from the state that it is given, for any number of tokens."""
    from onnxplug_transformers import cache_shapes, empty_cache

    model = made(name, use_cache=True)
    with torch.no_grad():
        past = model(input_ids=torch.randint(3, 100, (2, 5))).past_key_values
    program = onnxplug.to_onnx(
        model,
        kwargs={"input_ids": torch.randint(3, 100, (2, 3)), "past_key_values": past},
        dynamic_shapes={"input_ids": {0: "batch", 1: "sequence"}, "past_key_values": cache_shapes(past)},
    )
    text = torch.randint(3, 100, (2, 80))
    with torch.no_grad():
        expected = model(input_ids=text).logits
    past, at = empty_cache(past), 0
    for step in (1, 70, 1, 8):
        logits, *leaves = program(input_ids=text[:, at : at + step], past_key_values=past)
        past = pytree.tree_unflatten(leaves, pytree.tree_structure(past))
        torch.testing.assert_close(logits, expected[:, at : at + step], **LOOSER["models"][0])
        at += step


def test_several_tokens_after_a_state_space() -> None:
    """transformers begins from zeros, except for a single token: a graph for both would be wrong for one case."""
    module = importlib.import_module("transformers.models.mamba.modeling_mamba")
    cache = SimpleNamespace(get_recurrent_state=lambda _: torch.ones(1))
    layer = made("mamba").backbone.layers[0].mixer

    class Step(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return module.MambaMixer.forward(layer, x, cache)

    with pytest.raises(onnxplug.CaptureError, match="takes one token after those that its cache has seen"):
        onnxplug.to_onnx(Step(), (torch.ones(2, 3, 32),), dynamic_shapes=({1: "sequence"},), strict=False)
