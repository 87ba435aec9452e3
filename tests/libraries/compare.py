"""The comparison of an exported file, run by ONNX Runtime, with the model in eager PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from torch.utils._pytree import tree_leaves

from onnxplug.verification.compare import compare


def assert_same(file: str | Path, model: Any, *examples: Sequence[Any]) -> None:
    """Asserts that the file computes the model's results.

    Args:
        file: The ONNX file.
        model: A module or a function.
        examples: Inputs, each set as the model takes it by position.
    """
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    for example in examples:
        with torch.no_grad():
            expected = [leaf for leaf in tree_leaves(model(*example)) if isinstance(leaf, torch.Tensor)]
        tensors = [leaf for leaf in tree_leaves(example) if isinstance(leaf, torch.Tensor)]
        assert len(tensors) == len(names), f"the file has the inputs {names}, the model {len(tensors)}"
        results = session.run(None, {name: leaf.detach().numpy() for name, leaf in zip(names, tensors, strict=True)})
        assert len(results) == len(expected), f"the file has {len(results)} outputs, the model {len(expected)}"
        for number, (result, leaf) in enumerate(zip(results, expected, strict=True)):
            outcome = compare(torch.from_numpy(result), leaf)
            assert outcome.equal, f"output {number} of inputs {[list(x.shape) for x in tensors]}: {outcome}"
