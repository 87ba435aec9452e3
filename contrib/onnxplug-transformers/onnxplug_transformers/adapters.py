"""Adapters of PEFT: low-rank products beside linear layers, merged into the weights, or inputs of the graph.

An input has a default of rank zero, so that the graph also runs without an adapter. A file ``NAME.onnx_adapter`` has the inputs of
one adapter: ONNX Runtime gives them to the graph where the adapter is active.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onnxplug import OnnxplugError, UsageError
from onnxplug_transformers.folders import check_safetensors, read_json

#: Settings of LoRA that are used here, or that concern training, the choice of layers, or the base's precision in
#: training.
_KNOWN = frozenset(
    "peft_type task_type auto_mapping peft_version base_model_name_or_path revision inference_mode r lora_alpha alpha_pattern "
    "rank_pattern use_rslora init_lora_weights target_modules exclude_modules layers_to_transform layers_pattern lora_dropout "
    "fan_in_fan_out runtime_config eva_config corda_config loftq_config lora_ga_config megatron_config megatron_core "
    "qalora_group_size ensure_weight_tying".split()
)
#: Ways to begin a training that leave the base's weights as they are.
_BEGINNINGS = (True, False, None, "gaussian", "eva", "orthogonal")
_KEY = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
#: The rank of the example.
_RANK = 3


@torch.library.custom_op("onnxplug_transformers::low_rank", mutates_args=())
def low_rank(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``x @ a @ b``, of any rank, zero among them.

    Args:
        x: [..., in].
        a: [in, rank].
        b: [rank, out].

    Returns:
        [..., out].
    """
    return x @ a @ b


@low_rank.register_fake
def _(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], b.shape[1]))


def convert(g: Any, node: Any) -> Any:
    """Two products."""
    x, a, b = node.args
    return g.op.MatMul(g.op.MatMul(x, a), b)


@dataclass(frozen=True)
class Adapter:
    """A trained adapter.

    Attributes:
        factors: Layer to its two factors in float32, [in, rank] and [rank, out]; the second one has the adapter's scale.
    """

    folder: Path
    factors: dict[str, tuple[torch.Tensor, torch.Tensor]]


def parse_adapters(texts: Sequence[str]) -> tuple[Path | None, dict[str, Path]]:
    """Parses the values of ``--adapter``: the folder to merge, and the folders, by name, that are kept apart."""
    merged: list[Path] = []
    apart: dict[str, Path] = {}
    for text in texts:
        name, equals, folder = text.partition("=")
        if not equals or "/" in name:
            merged.append(Path(text))
            continue
        if not re.fullmatch(r"\w[\w.-]*", name) or not folder:
            raise UsageError(f"--adapter {text!r} is not NAME=DIR", hint="A name has letters, digits, _, - and dots.")
        if name in apart:
            raise UsageError(f"--adapter names {name!r} twice")
        apart[name] = Path(folder)
    if len(merged) > 1 or (merged and apart):
        raise UsageError(
            "--adapter DIR merges an adapter into the weights, and stands alone",
            hint="--adapter NAME=DIR, as often as there are adapters, keeps each in a file of its own.",
        )
    return (merged[0] if merged else None), apart


def read_adapter(folder: Path) -> Adapter:
    """An adapter from a folder of PEFT."""
    if not (folder / "adapter_config.json").is_file():
        raise UsageError(
            f"{folder} has no adapter_config.json", hint="--adapter takes a folder of PEFT's save_pretrained."
        )
    about = read_json(folder / "adapter_config.json")
    _check_settings(folder, about)
    path = folder / "adapter_model.safetensors"
    if not path.is_file():
        raise UsageError(
            f"{folder} has no adapter_model.safetensors", hint="PEFT writes it: save_pretrained(DIR) of its model."
        )
    check_safetensors(path)
    from safetensors.torch import load_file

    by_layer: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in load_file(path).items():
        match = _KEY.fullmatch(key)
        if match is None or tensor.dim() != 2:
            raise UsageError(f"{path} has {key}, which is no factor of a linear layer's weight")
        by_layer.setdefault(match[1], {})[match[2]] = tensor.float()
    if not by_layer:
        raise UsageError(f"{path} has no tensors")
    factors = {layer: _scaled(path, about, layer, parts) for layer, parts in sorted(by_layer.items())}
    return Adapter(folder, factors)


def _check_settings(folder: Path, about: Mapping[str, Any]) -> None:
    """Looks whether an adapter's configuration asks for no more than low-rank products."""
    if about.get("peft_type") != "LORA":
        raise UsageError(
            f"{folder} has an adapter of the kind {about.get('peft_type')!r}; LORA is the one that is taken"
        )
    beginning = about.get("init_lora_weights", True)
    if beginning not in _BEGINNINGS:
        raise UsageError(
            f"{folder} has init_lora_weights={beginning!r}, with which PEFT changes the base's weights too",
            hint="PEFT converts it: save_pretrained(DIR, path_initial_model_for_weight_conversion=...).",
        )
    for name, value in about.items():
        if name not in _KNOWN and value and not (name == "bias" and value == "none"):
            raise UsageError(f"{folder} has an adapter with {name}={value!r}, which is not taken")


def _scaled(
    path: Path, about: Mapping[str, Any], layer: str, parts: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The factors of one layer, as :class:`Adapter` has them."""
    if len(parts) < 2:
        raise OnnxplugError(f"{path} has one of the two factors of {layer} alone")
    a, b = parts["A"], parts["B"]
    try:
        rank, alpha = (
            _of_layer(about.get(patterns) or {}, layer, about[name])
            for patterns, name in (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha"))
        )
        scale = float(alpha) / (math.sqrt(rank) if about.get("use_rslora") else rank)
    except (KeyError, TypeError, ValueError, ZeroDivisionError, AttributeError, re.error) as error:
        raise OnnxplugError(
            f"{path.parent / 'adapter_config.json'} does not say {layer}'s rank and scale: {type(error).__name__}: {error}"
        ) from error
    if not a.shape[0] == b.shape[1] == rank:
        raise OnnxplugError(
            f"{path}: the factors of {layer}, {list(a.shape)} and {list(b.shape)}, are not of the rank {rank}"
        )
    return a.T.contiguous(), (b.T * scale).contiguous()


def _of_layer(patterns: Mapping[str, Any], layer: str, default: Any) -> Any:
    """The value of the first pattern that a layer's name ends with."""
    return next((v for key, v in patterns.items() if re.fullmatch(rf"(.*\.)?({key})", layer)), default)


def merge_adapter(model: Any, adapter: Adapter) -> None:
    """Adds an adapter's products to the weights of a model, in place."""
    from transformers.pytorch_utils import Conv1D

    owners = [id(p) for _, p in model.named_parameters(remove_duplicate=False)]
    for layer, (a, b) in adapter.factors.items():
        module = _module(model, adapter, layer)
        if type(module) not in (nn.Linear, Conv1D):
            raise UsageError(
                f"{adapter.folder}: {layer} is a {type(module).__name__}, into which nothing can be merged",
                hint="--adapter NAME=DIR keeps the adapter apart.",
            )
        if owners.count(id(module.weight)) > 1:
            raise UsageError(
                f"{adapter.folder}: the weight of {layer} is another layer's too, which the adapter would change",
                hint="--adapter NAME=DIR keeps the adapter apart.",
            )
        change = a @ b if type(module) is Conv1D else (a @ b).T
        if change.shape != module.weight.shape:
            shapes = f"{list(change.shape)}, and the weight is {list(module.weight.shape)}"
            raise UsageError(f"{adapter.folder}: the product for {layer} is {shapes}")
        with torch.no_grad():
            module.weight.copy_(module.weight.float() + change)


def _module(model: Any, adapter: Adapter, layer: str) -> Any:
    try:
        return model.get_submodule(layer)
    except AttributeError as error:
        raise UsageError(
            f"{adapter.folder}: {type(model).__name__} has no layer {layer}", hint="Is this the adapter's base?"
        ) from error


class Adapters:
    """Adapters of one language model that are inputs of its graph.

    Args:
        model: The model; its linear layers may have weights of few bits.
    """

    def __init__(self, model: Any, adapters: Mapping[str, Adapter]) -> None:
        self.adapters = dict(adapters)
        layers = {layer: adapter for adapter in adapters.values() for layer in adapter.factors}
        self._shapes = _shapes_of(model, layers)
        for adapter in adapters.values():
            for layer, (a, b) in adapter.factors.items():
                width, result, _ = self._shapes[layer]
                if (a.shape[0], b.shape[1]) != (width, result):
                    raise UsageError(
                        f"{adapter.folder}: {layer} takes {width} numbers and gives {result}, and the adapter's product "
                        f"takes {a.shape[0]} and gives {b.shape[1]}",
                        hint="Is this the adapter's base?",
                    )

    def tensors(self, name: str | None) -> dict[str, torch.Tensor]:
        """The inputs of an adapter by name; of rank zero for ``None`` and for layers that it does not have."""
        factors = self.adapters[name].factors if name is not None else {}
        return self._tensors(factors.get)

    def example(self) -> dict[str, torch.Tensor]:
        """Random inputs of a rank that stands for any rank."""
        generator = torch.Generator().manual_seed(0)

        def drawn(layer: str) -> tuple[torch.Tensor, torch.Tensor]:
            width, result, _ = self._shapes[layer]
            factors = [torch.randn(shape, generator=generator) for shape in ((width, _RANK), (_RANK, result))]
            return factors[0] / width**0.5, factors[1] / 10

        return self._tensors(drawn)

    def _tensors(self, factors_of: Any) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        for layer, (width, result, dtype) in self._shapes.items():
            factors = factors_of(layer) or (torch.empty(width, 0), torch.empty(0, result))
            tensors |= {f"{layer}.lora_{side}": x.to(dtype) for side, x in zip("AB", factors, strict=True)}
        return tensors

    def dynamic_shapes(self) -> dict[str, dict[int, str]]:
        """The dynamic ranks: each layer has its own."""
        return {
            f"{layer}.lora_{side}": {1 - axis: f"rank_{number}"}
            for number, layer in enumerate(self._shapes)
            for axis, side in enumerate("AB")
        }

    def make_optional(self, model: Any) -> None:
        """Gives the inputs of a finished model their default, of rank zero.

        Args:
            model: An ``onnx_ir`` model.
        """
        from onnx_ir.tensor_adapters import TorchTensor

        values = {value.name: value for value in model.graph.inputs}
        for name, tensor in self.tensors(None).items():
            value = values[name]
            value.const_value = TorchTensor(tensor, name=name)
            model.graph.register_initializer(value)

    def write(self, folder: Path) -> list[str]:
        """Writes a file for each adapter; returns a line of text on each file."""
        try:
            import onnxruntime
        except ImportError as error:
            raise UsageError("--adapter NAME=DIR needs onnxruntime", hint="pip install onnxruntime") from error
        notes = []
        for name, adapter in self.adapters.items():
            tensors = self.tensors(name)
            file = onnxruntime.AdapterFormat()
            file.set_adapter_version(1)
            file.set_model_version(1)
            file.set_parameters({key: _ort_value(x) for key, x in tensors.items() if x.numel()})
            path = folder / f"{name}.onnx_adapter"
            file.export_adapter(str(path))
            size = path.stat().st_size / 1e6
            notes.append(f"{path.name}: an adapter of {len(adapter.factors)} layers, {size:.2f} MB")
        return notes


def _ort_value(x: torch.Tensor) -> Any:
    from onnxruntime import OrtValue

    if x.dtype == torch.bfloat16:  # which NumPy doesn't have
        return OrtValue.ortvalue_from_numpy_with_onnx_type(x.view(torch.int16).numpy(), 16)
    return OrtValue.ortvalue_from_numpy(x.numpy())


def _shapes_of(model: Any, layers: Mapping[str, Adapter]) -> dict[str, tuple[int, int, torch.dtype]]:
    """The widths of each layer's input and result, and the input's dtype, from a call of the model."""
    shapes: dict[str, tuple[int, int, torch.dtype]] = {}

    def note(name: str, _: Any, args: tuple[Any, ...], result: Any) -> None:
        if len(args) == 1 and isinstance(args[0], torch.Tensor) and isinstance(result, torch.Tensor):
            shapes[name] = (args[0].shape[-1], result.shape[-1], args[0].dtype)

    with ExitStack() as stack:
        for layer, adapter in sorted(layers.items()):
            hook = _module(model, adapter, layer).register_forward_hook(partial(note, layer))
            stack.callback(hook.remove)
        with torch.no_grad():
            model(input_ids=torch.zeros(1, 2, dtype=torch.long), use_cache=False)
    for layer, adapter in layers.items():
        if layer not in shapes or not shapes[layer][2].is_floating_point:
            raise UsageError(f"{adapter.folder}: {layer} is no linear layer that every token goes through")
    return {layer: shapes[layer] for layer in sorted(layers)}


@contextmanager
def adapted(model: Any, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Holds while a model is called: the products of an adapter are added to the results of its layers.

    Args:
        tensors: Inputs by name, as :meth:`Adapters.tensors` gives them.
    """

    def add(a: torch.Tensor, b: torch.Tensor, _: Any, args: tuple[Any, ...], result: torch.Tensor) -> torch.Tensor:
        change: torch.Tensor = low_rank(args[0], a, b)
        return result + change

    hooks = []
    try:
        for name, a in tensors.items():
            layer, side = name.rsplit(".lora_", 1)
            if side == "A":
                change = partial(add, a, tensors[f"{layer}.lora_B"])
                hooks.append(model.get_submodule(layer).register_forward_hook(change))
        yield
    finally:
        for hook in hooks:
            hook.remove()
