"""onnxplug-transformers beside onnxplug-ort, and where transformers is not in use. Caches: the package's own tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import onnxplug
from tests.support.contrib import plugged
from tests.support.distributions import run_python
from tests.support.experts import EXPERTS, compare, experts_program, ids, mask, mixture
from tests.support.zoo import ZOO

TEXT = {"input_ids": {0: "batch", 1: "sequence"}, "attention_mask": {0: "batch", 1: "past + sequence"}}


def test_without_transformers_nothing_is_imported(tmp_path: Path) -> None:
    code = (
        f"import sys, torch, onnxplug; sys.path.insert(0, {str(Path(__file__).resolve().parents[2])!r})\n"
        "from tests.support.contrib import plugged\n"
        "onnxplug.to_onnx(lambda x: x + 1, (torch.ones(2),), registry=plugged('onnxplug-transformers'))\n"
        "print('imported', 'transformers' in sys.modules)"
    )
    assert "imported False\n" in run_python(tmp_path, "-c", code)


@pytest.mark.long
def test_decoding_by_fused_operators(seeded: None) -> None:
    """The cache and ONNX Runtime's own operators in one model."""
    registry = plugged("onnxplug-transformers", "onnxplug-ort")
    from onnxplug_transformers import cache_shapes

    model = ZOO["llama"].module()
    model.config.use_cache = True
    with torch.no_grad():
        past = model(input_ids=ids(2, 4), use_cache=True).past_key_values
    program = onnxplug.to_onnx(
        model,
        kwargs={"input_ids": ids(2, 3), "attention_mask": mask(2, 7), "past_key_values": past},
        dynamic_shapes={**TEXT, "past_key_values": cache_shapes(past)},
        registry=registry,
        opset_version={"": 21, "com.microsoft": 1},
    )
    operators = program.statistics.operators
    assert operators.get("RotaryEmbedding") == 4
    # The model's heads share keys, which the plain form does not copy.
    assert "MultiHeadAttention" not in operators
    for batch, length, step in ((2, 4, 3), (1, 1, 1), (3, 7, 2)):
        with torch.no_grad():
            past = model(input_ids=ids(batch, length)).past_key_values
        total = mask(batch, length + step)
        compare(program, input_ids=ids(batch, step), attention_mask=total, past_key_values=past)


@pytest.mark.long
def test_the_decoder_verifies_at_every_seed(seeded: None) -> None:
    """The example of the package's README: sizes are drawn that fit together."""
    registry = plugged("onnxplug-transformers")
    from onnxplug_transformers import cache_shapes

    model = ZOO["llama"].module()
    model.config.use_cache = True
    with torch.no_grad():
        past = model(input_ids=torch.ones(2, 4, dtype=torch.long), use_cache=True).past_key_values
    program = onnxplug.to_onnx(
        model,
        kwargs={"input_ids": ids(2, 3), "attention_mask": mask(2, 7), "past_key_values": past},
        dynamic_shapes={**TEXT, "past_key_values": cache_shapes(past)},
        registry=registry,
        verify=True,
    )
    assert [str(dim) for dim in program.model.graph.inputs[1].shape] == ["batch", "past + sequence"]
    report = program.verify(seeds=range(20))
    assert [case.seed for case in report.cases] == [None, *range(20)]
    assert report.skipped == []
    assert {case.sizes["past + sequence"] - case.sizes["past"] - case.sizes["sequence"] for case in report.cases} == {0}


# -- mixtures of experts -----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "implementation"),
    [*((name, None) for name in EXPERTS), ("Mixtral", "eager"), ("GptOss", "eager"), ("Qwen3Moe", "batched_mm")],
)
def test_mixture_of_experts(name: str, implementation: str | None, vision: None) -> None:
    model = mixture(name, implementation)
    before = model.config._experts_implementation
    program = experts_program(model)
    # The capture may set another implementation; the model has its own again afterwards.
    assert model.config._experts_implementation == before
    loops = program.statistics.operators.get("Loop", 0)
    assert loops == (0 if implementation == "batched_mm" else 4)
    for batch, length in ((2, 5), (1, 1), (3, 9)):
        compare(program, input_ids=ids(batch, length), attention_mask=mask(batch, length))
    # Weights are stored as the products take them.
    for node in program.model.graph.all_nodes():
        assert node.op_type != "Transpose" or node.inputs[0].name not in program.model.graph.initializers


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "opset"), [("GptOss", 18), ("Qwen3Moe", 24)])
@pytest.mark.long
def test_mixture_of_experts_at_other_opsets(name: str, opset: int, vision: None) -> None:
    model = mixture(name)
    program = experts_program(model, opset)
    for batch, length in ((2, 5), (1, 1), (3, 8)):
        compare(program, input_ids=ids(batch, length), attention_mask=mask(batch, length))


@pytest.mark.filterwarnings("ignore")
def test_the_choice_of_experts_ends_with_the_export(vision: None) -> None:
    from transformers.integrations import moe

    experts_program(mixture("Mixtral", "eager"))
    default = object()
    assert moe.ALL_EXPERTS_FUNCTIONS.get_interface("eager", default) is default
