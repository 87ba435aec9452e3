"""bfloat16 and doubles: an export warns of a model that ONNX Runtime won't load."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import onnxruntime
import pytest
import torch
from torch import nn

import onnxplug
from tests.support.check import Call

_MODELS: dict[str, Callable[[], Any]] = {
    "linear": lambda: nn.Linear(4, 4),
    "matmul": lambda: lambda x: x @ x.mT,
    "softmax": lambda: lambda x: x.softmax(-1),
    "layer_norm": lambda: nn.LayerNorm(4),
    "conv": lambda: lambda x: nn.functional.conv1d(x[None], x[:, :, None]),
    "where": lambda: lambda x: torch.where(x > 0, x, -x),
    "float": lambda: lambda x: (x.float() * 2).exp(),
    "reshape": lambda: lambda x: x.reshape(-1)[None],
    "branch": lambda: lambda x: torch.cond(x.float().sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,)),
}


def _exported(name: str, dtype: torch.dtype, **options: Any) -> tuple[bytes, list[str]]:
    model = _MODELS[name]()
    model = model.eval().to(dtype) if isinstance(model, nn.Module) else model
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        program = onnxplug.to_onnx(model, (torch.randn(4, 4).to(dtype),), **options)
    texts = [str(warning.message) for warning in caught]
    return program.model_proto.SerializeToString(), [text for text in texts if "kernel for bfloat16" in text]


def _failure(file: bytes) -> str:
    """The reason why ONNX Runtime doesn't load a model; empty where it does."""
    try:
        onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    except Exception as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", _MODELS)
def test_a_model_that_will_not_load_is_reported(name: str) -> None:
    file, messages = _exported(name, torch.bfloat16)
    failure = _failure(file)
    assert bool(messages) == bool(failure), failure
    assert all('target="onnxruntime:cpu"' in text for text in messages)


@pytest.mark.parametrize("name", _MODELS)
def test_the_target_that_is_named_loads(name: str) -> None:
    file, messages = _exported(name, torch.bfloat16, target="onnxruntime:cpu")
    assert not _failure(file)
    assert not messages


DOUBLES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **{
        name: getattr(nn.functional, name)
        for name in "softplus elu selu hardswish mish leaky_relu gelu softsign".split()
    },
    "conv": lambda x: nn.functional.conv1d(x[None], x[:, :, None]),
    "pool": lambda x: nn.functional.avg_pool1d(x[None], 2),
    "norm": lambda x: nn.functional.instance_norm(x[None]),
    "layer_norm": lambda x: nn.functional.layer_norm(x, (4,)),
    "matmul": lambda x: (x @ x).erf().softmax(-1),
}


@pytest.mark.parametrize("target", ["onnxruntime", "onnxruntime:cpu"])
@pytest.mark.parametrize("opset", [18, 20, 23])
@pytest.mark.parametrize("name", DOUBLES)
def test_doubles_that_will_not_load_are_reported(name: str, opset: int, target: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        program = onnxplug.to_onnx(
            Call(DOUBLES[name]), (torch.randn(4, 4).double(),), opset_version=opset, target=target
        )
    texts = [str(warning.message) for warning in caught if "no kernel for double of" in str(warning.message)]
    failure = _failure(program.model_proto.SerializeToString())
    assert bool(texts) == bool(failure), failure
    assert all("float32" in text for text in texts)


def test_other_targets_and_element_types_give_no_warning() -> None:
    assert not _exported("linear", torch.bfloat16, target=None)[1]
    assert not _exported("linear", torch.float32)[1]
