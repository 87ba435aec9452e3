"""How ``torch.onnx.export`` writes a model: which weights, under which names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from onnxplug.build.stored import META, Origin
from onnxplug.errors import UsageError
from onnxplug_torch_onnx.request import Request, warn

if TYPE_CHECKING:
    from onnxplug.program import OnnxProgram


def save(program: OnnxProgram, request: Request) -> None:
    """Writes a program as the call asks."""
    external = request.external_data and request.dynamo and not hasattr(request.f, "write")
    program.save(
        request.f,
        include_initializers=request.export_params,
        keep_initializers_as_inputs=request.stored_as_inputs,
        # With None the weights of a model that is too large for one file go beside it all the same.
        external_data=True if external else None,
    )


def with_parameter_names(program: OnnxProgram, model: Any, names: Sequence[str]) -> None:
    """Gives weights the names that follow the names of the inputs, in the order of ``state_dict()``.

    Raises:
        UsageError: There are more names than weights, or a name is that of another value.
    """
    weights = list(model.state_dict()) if isinstance(model, torch.nn.Module) else []
    if len(names) > len(weights):
        raise UsageError(
            f"input_names has {len(names)} names more than the model has inputs, and it has {len(weights)} weights"
        )
    initializers = program.model.graph.initializers
    wanted = dict(zip(weights, names, strict=False))
    new: dict[str, str] = {}
    named: set[str] = set()
    for value in initializers.values():
        origin: Origin | None = value.meta.get(META)
        target = next((t for t in origin.targets if t in wanted), None) if origin is not None else None
        # A value that is computed from a weight has a name of its own.
        if origin is not None and target is not None and value.name in origin.targets:
            new[str(value.name)] = wanted[target]
            named.update(origin.targets)
    missing = [name for target, name in wanted.items() if target not in named]
    if missing:
        warn(
            f"input_names has names of weights that the graph has in another form, or not at all: {', '.join(missing)}"
        )
    taken = {str(v.name) for node in program.model.graph.all_nodes() for v in (*node.inputs, *node.outputs) if v}
    for name in new.values():
        if name in taken - set(new):
            raise UsageError(f"input_names calls a weight {name!r}, which is the name of another value")
    moved = [initializers.pop(name) for name in new]
    for value, name in zip(moved, new.values(), strict=True):
        value.name = name
        if value.const_value is not None:
            value.const_value.name = name
        initializers[name] = value
