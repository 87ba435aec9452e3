"""``copy.deepcopy`` of tensors in a ``forward``."""

from __future__ import annotations

import copy
from typing import Any

import torch

import onnxplug
from onnxplug.torch_private import FakeTensor


def copied(x: torch.Tensor) -> Any:
    """As segment_anything's ``box_xyxy_to_xywh`` does, and with the same tensor twice in a list."""
    own = copy.deepcopy(x)
    own[:, 2] = own[:, 2] - own[:, 0]
    first, second = copy.deepcopy([x, x])
    first.add_(1)
    return own, second, x * 2


def test_a_deep_copy_of_a_tensor() -> None:
    shapes = ({0: torch.export.Dim("rows")},)
    program = onnxplug.to_onnx(copied, (torch.randn(3, 4),), dynamic_shapes=shapes, verify=True)
    for x in (torch.randn(5, 4), torch.zeros(1, 4)):
        for result, value in zip(program(x.clone()), copied(x.clone()), strict=True):
            torch.testing.assert_close(result, value)
    assert "__deepcopy__" not in vars(FakeTensor)
