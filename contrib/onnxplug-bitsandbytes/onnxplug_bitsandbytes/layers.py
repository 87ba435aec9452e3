"""bitsandbytes' layers while torch.export captures a model.

Their weights are subclasses of Parameter with the factors as attributes, which torch.export loses. During the capture
each layer holds its bytes as a plain parameter, the factors as buffers, and has a forward that calls bitsandbytes'
operators on them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import bitsandbytes
import torch
from bitsandbytes import functional
from bitsandbytes.nn.modules import Embedding4bit, Embedding8bit, Linear4bit, Linear8bitLt
from packaging.requirements import Requirement
from torch import nn

from onnxplug import Observer, UsageError
from onnxplug.capture.patching import patched
from onnxplug.torch_private import disable_current_modes
from onnxplug_bitsandbytes import REQUIRED

_OPS = torch.ops.bitsandbytes
#: The attribute with the forward of a layer whose weights are plain.
_FORWARD = "_onnxplug_forward"
#: Weight, by identity, to its plain parameter, so that layers that share a weight share the parameter.
Plain = dict[int, nn.Parameter]


@contextlib.contextmanager
def plain_layers(module: nn.Module) -> Iterator[None]:
    """Gives a model's layers of bitsandbytes plain weights, within the context.

    A layer that is no submodule, as in a model that is a function, gets them when it is called. A subclass's own
    forward stays: the forward of the library, which it calls, is exchanged.

    Raises:
        UsageError: A layer is not quantised yet, or the package doesn't know the installed version of bitsandbytes.
    """
    plain: Plain = {}
    own = [kind.forward for kind in _LAYERS]
    with contextlib.ExitStack() as stack:

        def change(layer: Any, name: str) -> None:
            _check_version()
            kind = next(kind for kind in _LAYERS if isinstance(layer, kind))
            tensors, forward = _LAYERS[kind](layer, name)
            stack.enter_context(_changed(layer, tensors, plain))
            stack.enter_context(patched(layer, _FORWARD, forward))
            if (
                getattr(vars(layer).get("_old_forward"), "__func__", None) in own
            ):  # accelerate wraps the layer's own forward
                stack.enter_context(patched(layer, "_old_forward", forward))

        def called(layer: Any, x: torch.Tensor) -> Any:
            if _FORWARD not in vars(layer):
                with disable_current_modes():
                    change(layer, "")
            return getattr(layer, _FORWARD)(x)

        for name, layer in module.named_modules():
            if isinstance(layer, tuple(_LAYERS)):
                change(layer, name)
        for kind in _LAYERS:
            stack.enter_context(patched(kind, "forward", called))
        yield


class VerifiedInFloat32(Observer):
    """An observer: while a program is verified, layers of 4 bits compute in the dtype of their input.

    On processors with AVX512-BF16 bitsandbytes computes them in bfloat16, whatever the dtype of the input.
    """

    def __init__(self) -> None:
        self._held = contextlib.ExitStack()

    def begin(self, span: Any) -> None:
        """Changes the layers of the model where a verification begins."""
        captured = span.subject.captured if span.name == "verification" and span.kind == "stage" else None
        model = getattr(captured, "reference", None)
        if not isinstance(model, nn.Module):
            return
        for layer in model.modules():
            if isinstance(layer, Linear4bit) and layer.support_avx512bf16_for_cpu:
                state = getattr(layer.weight, "quant_state", None)
                if getattr(state, "packing_format_for_cpu", False):  # its bytes are in the order of bfloat16's kernels
                    self._held.enter_context(plain_layers(model))
                    return
                self._held.enter_context(patched(layer, "support_avx512bf16_for_cpu", False))

    def end(self, span: Any) -> None:
        """Restores the layers where the verification ends."""
        if span.name == "verification" and span.kind == "stage":
            self._held.close()


def _check_version() -> None:
    requirement = Requirement(REQUIRED)
    if not requirement.specifier.contains(bitsandbytes.__version__, prereleases=True):
        raise UsageError(
            f"onnxplug-bitsandbytes knows the layers of {REQUIRED}; {bitsandbytes.__version__} is installed",
            hint=f"pip install '{REQUIRED}'",
        )


@contextlib.contextmanager
def _changed(layer: Any, tensors: dict[str, torch.Tensor], plain: Plain) -> Iterator[None]:
    """Replaces a layer's weight by a plain parameter, and adds the other tensors as buffers, within the context."""
    weight = layer.weight
    own = plain.setdefault(id(weight), nn.Parameter(tensors.pop("weight"), requires_grad=False))
    buffers = {f"weight_{name}": tensor.detach() for name, tensor in tensors.items()}
    layer._parameters["weight"] = own
    for name, tensor in buffers.items():
        layer.register_buffer(name, tensor, persistent=False)
    try:
        yield
    finally:
        layer._parameters["weight"] = weight
        for name in buffers:
            delattr(layer, name)


# -- 4 bits ------------------------------------------------------------------------------------------------------------


def _state_of(layer: Any, name: str) -> Any:
    state = getattr(layer.weight, "quant_state", None) or getattr(layer, "quant_state", None)
    if state is None:
        raise UsageError(
            f"the layer {name or 'itself'} ({type(layer).__name__}) is not quantised yet",
            hint='bitsandbytes quantises when a model is moved: model.to("cpu") before the export.',
        )
    return state


def _packed(layer: Any, state: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes as a vector, and the factors of the blocks.

    On processors with AVX512-BF16 a layer that has run holds both in another order, the factors rounded to bfloat16.
    """
    weight = layer.weight.data
    if not getattr(state, "packing_format_for_cpu", False):
        return weight.reshape(-1).view(torch.uint8), state.absmax
    rows, half = weight.shape
    levels = torch.cat([weight.reshape(-1, 32) & 15, weight.reshape(-1, 32) >> 4], 1)
    levels = levels.reshape(rows // 32, half, 32, 2).transpose(1, 2).reshape(-1, 2)
    return levels[:, 0] << 4 | levels[:, 1], state.absmax.t().reshape(-1).float()


def linear_4bit(layer: Any, name: str) -> tuple[dict[str, torch.Tensor], Callable[..., Any]]:
    """Linear4bit, which computes in its input's dtype where that is float32 or bfloat16, unless a dtype is set."""
    state = _state_of(layer, name)
    weight, absmax = _packed(layer, state)
    tensors = {"weight": weight, "absmax": absmax}
    if nested := state.nested:
        if state.state2.blocksize != 256:
            raise UsageError(
                f"the layer {name} has factors in blocks of {state.state2.blocksize}; bitsandbytes takes 256"
            )
        tensors |= {"nested_absmax": state.state2.absmax, "nested_code": state.state2.code, "offset": state.offset}
    shape, size, kind = list(state.shape), state.blocksize, state.quant_type

    def forward(x: torch.Tensor) -> torch.Tensor:
        dtype = layer.compute_dtype
        if not layer.compute_type_is_set and x.dtype in (torch.float32, torch.bfloat16):
            dtype = x.dtype
        input_dtype, x = x.dtype, x if dtype is None else x.to(dtype)
        bias = None if layer.bias is None else layer.bias.to(x.dtype)
        rest: tuple[Any, ...] = (size, kind, bias)
        if nested:
            parts = (layer.weight_absmax, layer.weight_nested_code, layer.weight_offset)
            result = _OPS.gemm_4bit(x, layer.weight, shape, layer.weight_nested_absmax, *rest, *parts)
        else:
            result = _OPS.gemm_4bit(x, layer.weight, shape, layer.weight_absmax, *rest)
        return result.to(input_dtype)

    return tensors, forward


def embedding_4bit(layer: Any, name: str) -> tuple[dict[str, torch.Tensor], Callable[..., Any]]:
    """Embedding4bit: rows of whole blocks are taken before they are restored, other rows after."""
    state = _state_of(layer, name)
    weight, absmax = _packed(layer, state)
    rows, columns = layer.num_embeddings, layer.embedding_dim
    size, kind, dtype = state.blocksize, state.quant_type, state.dtype
    if columns % size:

        def whole(index: torch.Tensor) -> torch.Tensor:
            table = _OPS.dequantize_4bit(layer.weight, layer.weight_absmax, size, kind, [rows, columns], dtype)
            return nn.functional.embedding(index, table).to(layer.dtype)

        return {"weight": weight, "absmax": absmax}, whole

    byte = torch.arange(256)
    pairs = torch.stack((state.code[byte >> 4], state.code[byte & 15]), 1)

    def forward(index: torch.Tensor) -> torch.Tensor:
        taken = nn.functional.embedding(index, layer.weight)
        factors = nn.functional.embedding(index, layer.weight_absmax)
        numbers = nn.functional.embedding(taken.int(), layer.weight_pairs)
        blocks = numbers.reshape(*index.shape, columns // size, size) * factors.unsqueeze(-1)
        return blocks.reshape(*index.shape, columns).to(dtype).to(layer.dtype)

    return {"weight": weight.view(rows, -1), "absmax": absmax.view(rows, -1), "pairs": pairs}, forward


# -- 8 bits ------------------------------------------------------------------------------------------------------------


def _bytes_of(layer: Any, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight's bytes and the largest magnitude of each row, from the layer's state or, before a run, its weight."""
    state, weight = getattr(layer, "state", None), layer.weight
    places: tuple[Any, ...] = (state, weight)
    for place in places:
        if getattr(place, "CB", None) is not None and getattr(place, "SCB", None) is not None:
            return place.CB, place.SCB
    if weight.dtype == torch.int8 and getattr(weight, "SCB", None) is not None:
        return weight.data, weight.SCB
    if state is not None and state.has_fp16_weights:
        levels, largest, _ = functional.int8_vectorwise_quant(weight.detach().half())
        return levels, largest
    raise UsageError(
        f"the layer {name or 'itself'} ({type(layer).__name__}) is not quantised yet",
        hint='bitsandbytes quantises when a model is moved: model.to("cpu") before the export.',
    )


def linear_8bit(layer: Any, name: str) -> tuple[dict[str, torch.Tensor], Callable[..., Any]]:
    """Linear8bitLt: on the CPU bitsandbytes restores the weight in training, else it quantises the activations."""
    levels, largest = _bytes_of(layer, name)
    threshold = layer.state.threshold

    def forward(x: torch.Tensor) -> torch.Tensor:
        weight, factors = layer.weight, layer.weight_largest
        bias = None if layer.bias is None else layer.bias.to(x.dtype)
        if layer.training:
            restored = weight.to(x.dtype) * (factors.unsqueeze(1) * (1.0 / 127.0)).to(x.dtype)
            return nn.functional.linear(x, restored, bias)
        rows = x.reshape(-1, x.shape[-1])
        quantised, magnitudes, outliers = _OPS.int8_vectorwise_quant(rows.half(), threshold)
        if threshold > 0:
            result, _ = _OPS.int8_mixed_scaled_mm(rows, quantised, weight, magnitudes, factors, outliers, bias)
        else:
            result = _OPS.int8_scaled_mm(quantised, weight, magnitudes, factors, bias, x.dtype)
        return result.reshape(*x.shape[:-1], weight.shape[0])

    return {"weight": levels, "largest": largest}, forward


def embedding_8bit(layer: Any, name: str) -> tuple[dict[str, torch.Tensor], Callable[..., Any]]:
    """Embedding8bit."""
    levels, largest = _bytes_of(layer, name)

    def forward(index: torch.Tensor) -> torch.Tensor:
        taken = nn.functional.embedding(index, layer.weight)
        factors = nn.functional.embedding(index, layer.weight_largest)
        return (taken * (factors / 127.0)).to(layer.dtype)

    return {"weight": levels, "largest": largest.view(-1, 1)}, forward


_LAYERS: dict[Any, Callable[[Any, str], tuple[dict[str, torch.Tensor], Callable[..., Any]]]] = {
    Linear4bit: linear_4bit,
    Embedding4bit: embedding_4bit,
    Linear8bitLt: linear_8bit,
    Embedding8bit: embedding_8bit,
}
