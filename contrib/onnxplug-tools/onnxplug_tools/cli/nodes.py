"""Example nodes: an operator called on tensors of one dtype, for the conditions (``when``) of rules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from onnxplug.errors import UsageError

if TYPE_CHECKING:
    import torch

    from onnxplug.interpret.node import FxNode

#: Square, so that products of matrices and convolutions take them too.
_SHAPES = ((2, 2), (2, 2, 2), (2, 2, 2, 2), (2,), ())


def find_dtype(name: str) -> torch.dtype:
    """A dtype by its name."""
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"--dtype {name!r}: torch has no such dtype", hint="float32, float16, int64, bool …")
    return dtype


def make_node(op: str, dtype: torch.dtype, samples: Iterable[Any] = ()) -> tuple[FxNode | None, str]:
    """A node that calls ``op`` on tensors of ``dtype``, and the origin of its inputs in words.

    The plugin's own sample of the operator is used where there is one; else tensors of a few shapes are tried until the
    operator takes them. Where it takes none, the node is ``None``, and the text is the reason.
    """
    import torch

    from onnxplug.registry.names import find_overload, packet_of, without_prefix

    if op != without_prefix(op):
        return None, "there are examples of plain tensors alone"
    target = find_overload(op)
    if target is None:
        return None, f"torch knows no {op}"
    try:
        torch.zeros(1, dtype=dtype)
    except Exception:
        return None, f"torch makes no tensors of {str(dtype).removeprefix('torch.')}"
    for sample in samples:
        if packet_of(sample.op) == packet_of(op):
            args = sample.args() if callable(sample.args) else sample.args
            node = _trace(
                target, [_cast(a, dtype) for a in args], {k: _cast(v, dtype) for k, v in sample.kwargs.items()}
            )
            if node is not None:
                return node, f"the plugin's sample in {str(dtype).removeprefix('torch.')}"
    for shape in _SHAPES:
        args = _arguments(target, shape, dtype)
        node = _trace(target, args, {}) if args is not None else None
        if node is not None:
            return node, f"tensors of {str(dtype).removeprefix('torch.')}{list(shape)}"
    return None, f"{op} accepts none of the generated {str(dtype).removeprefix('torch.')} inputs"


def _cast(value: Any, dtype: torch.dtype) -> Any:
    import torch

    if isinstance(value, list | tuple):
        return type(value)(_cast(v, dtype) for v in value)
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _arguments(target: Any, shape: Sequence[int], dtype: torch.dtype) -> list[Any] | None:
    """A value for each parameter up to the optional keywords: its default, or by its type; ``None`` if unknown."""
    import torch

    values = {
        "Tensor": torch.zeros(shape, dtype=dtype),
        "number": 1,
        "Scalar": 1,
        "int": 1,
        "SymInt": 1,
        "float": 1.0,
        "bool": False,
        "str": "none",
        "List[Tensor]": [torch.zeros(shape, dtype=dtype)] * 2,
        "List[int]": [1] * max(1, len(shape)),
        "List[SymInt]": [1] * max(1, len(shape)),
        "List[float]": [1.0],
        "List[bool]": [True],
    }
    args = []
    for parameter in target._schema.arguments:
        if parameter.has_default_value():
            if parameter.kwarg_only:
                break
            args.append(parameter.default_value)
            continue
        kind = str(parameter.type)
        if kind.startswith("Optional["):
            kind = kind[len("Optional[") : -1] if kind == "Optional[Tensor]" else "None"
        if kind not in values and kind != "None":
            return None
        args.append(values.get(kind))
    return args


def _trace(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> FxNode | None:
    """The node of a call, its tensors fake; ``None`` when the operator does not take the arguments."""
    import logging

    import torch

    from onnxplug.torch_private import FakeTensorMode, pytree

    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # torch logs rejected arguments
    graph = torch.fx.Graph()
    tensors: list[torch.fx.Node] = []
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        try:
            fake_args, fake_kwargs = pytree.tree_map_only(torch.Tensor, mode.from_tensor, (list(args), kwargs))
            val = target(*fake_args, **fake_kwargs)
        except Exception:
            return None

    def placeholder(fake: Any) -> torch.fx.Node:
        node = graph.placeholder(f"x{len(tensors)}")
        node.meta["val"] = fake
        tensors.append(node)
        return node

    fx_args, fx_kwargs = pytree.tree_map_only(torch.Tensor, placeholder, (fake_args, fake_kwargs))
    call = graph.call_function(target, tuple(fx_args), fx_kwargs)
    call.meta["val"] = val
    return _as_node(call, target)


def _as_node(call: torch.fx.Node, target: Any) -> FxNode:
    import onnx_ir as ir
    import torch

    from onnxplug.build.dtypes import to_onnx_dtype
    from onnxplug.interpret.node import FxNode, frozen, output_specs, schema_parameters
    from onnxplug.interpret.symbols import SymbolNames
    from onnxplug.registry.names import qualified_name

    def value(argument: Any) -> Any:
        if isinstance(argument, torch.fx.Node):
            fake = argument.meta["val"]
            return ir.Value(
                name=argument.name, type=ir.TensorType(to_onnx_dtype(fake.dtype)), shape=ir.Shape(tuple(fake.shape))
            )
        return [value(a) for a in argument] if isinstance(argument, list | tuple) else argument

    args = [value(a) for a in call.args]
    for parameter in schema_parameters(target)[len(args) :]:
        args.append(value(call.kwargs.get(parameter.name, parameter.default)))
    outputs = output_specs(call.meta["val"], SymbolNames({}))
    return FxNode(call, target, qualified_name(target), tuple(map(frozen, args)), outputs, "unknown source")
