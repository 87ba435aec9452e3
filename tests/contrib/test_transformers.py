"""onnxplug-transformers beside onnxplug-ort, and where transformers is not in use. Caches: the package's own tests."""

from __future__ import annotations

import copy
import subprocess
import sys

import torch
from torch.utils import _pytree

import onnxplug
from tests.support.contrib import plugged
from tests.support.zoo import ZOO


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(3, 100, shape)


def mask(batch: int, total: int) -> torch.Tensor:
    """Rows padded on the left to different lengths, the first one not at all."""
    starts = torch.randint(0, max(total // 2, 1), (batch, 1))
    starts[0] = 0
    return (torch.arange(total)[None] >= starts).long()


TEXT = {"input_ids": {0: "batch", 1: "sequence"}, "attention_mask": {0: "batch", 1: "total"}}


def test_without_transformers_nothing_is_imported() -> None:
    code = (
        "import sys, torch, onnxplug; sys.path.insert(0, '.')\n"
        "from tests.support.contrib import plugged\n"
        "onnxplug.to_onnx(lambda x: x + 1, (torch.ones(2),), registry=plugged('onnxplug-transformers'))\n"
        "print('transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "False", done.stderr


def test_decoding_by_fused_operators(seeded: None) -> None:
    """The cache and ONNX Runtime's own operators in one model."""
    from onnxplug_transformers import cache_shapes

    model = ZOO["llama"].module()
    model.config.use_cache = True
    with torch.no_grad():
        past = model(input_ids=ids(2, 4), use_cache=True).past_key_values
    program = onnxplug.to_onnx(
        model,
        kwargs={"input_ids": ids(2, 3), "attention_mask": mask(2, 7), "past_key_values": past},
        dynamic_shapes={**TEXT, "past_key_values": cache_shapes(past)},
        registry=plugged("onnxplug-transformers", "onnxplug-ort"),
        opset_version={"": 21, "com.microsoft": 1},
    )
    operators = program.statistics.operators
    assert {operators.get(n) for n in ("MultiHeadAttention", "RotaryEmbedding")} == {2, 4}
    for batch, length, step in ((2, 4, 3), (1, 1, 1), (3, 7, 2)):
        with torch.no_grad():
            past = model(input_ids=ids(batch, length)).past_key_values
        total = mask(batch, length + step)
        given = {"input_ids": ids(batch, step), "attention_mask": total, "past_key_values": past}
        got = program(**copy.deepcopy(given))
        with torch.no_grad():
            leaves = [x for x in _pytree.tree_leaves(model(**given)) if isinstance(x, torch.Tensor)]
        assert len(got) >= len(leaves)
        for mine, theirs in zip(got, leaves, strict=False):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
