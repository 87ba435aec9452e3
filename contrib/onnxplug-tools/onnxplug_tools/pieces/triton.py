"""The configurations by which Triton serves exported pieces: for each piece, and for the ensemble that chains them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxplug.errors import UsageError
from onnxplug.program import OnnxProgram
from onnxplug_tools.pieces.script import Step

#: The data types of Triton's ``model_config.proto``.
_TYPES = {
    ir.DataType.BOOL: "TYPE_BOOL",
    **{dtype: f"TYPE_{dtype.name}" for dtype in ir.DataType if re.fullmatch(r"U?INT(8|16|32|64)", dtype.name)},
    ir.DataType.FLOAT16: "TYPE_FP16",
    ir.DataType.BFLOAT16: "TYPE_BF16",
    ir.DataType.FLOAT: "TYPE_FP32",
    ir.DataType.DOUBLE: "TYPE_FP64",
}
_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*", re.ASCII)


@dataclass(frozen=True)
class _Tensor:
    """A tensor that Triton passes on.

    Attributes:
        dims: Its sizes; -1 for a dynamic size.
    """

    name: str
    data_type: str
    dims: tuple[int, ...]

    def text(self) -> str:
        """The tensor as an entry of ``input`` or ``output``."""
        return (
            f"  {{ name: {_quoted(self.name)} data_type: {self.data_type} dims: [ {', '.join(map(str, self.dims))} ] }}"
        )


def check_name(name: str) -> None:
    """Refuses a name that can't be the name of a folder."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} is no name of a model", hint="Write letters, digits, '_', '.' and '-'.")


def piece_name(name: str, path: str) -> str:
    """The name of a piece among Triton's models."""
    return f"{name}_{path}"


def piece_text(name: str, path: str, program: OnnxProgram) -> str:
    """``config.pbtxt`` of a piece.

    Args:
        name: The ensemble's name.
    """
    graph = program.model.graph
    head = [f"name: {_quoted(piece_name(name, path))}", 'backend: "onnxruntime"', "max_batch_size: 0"]
    inputs = [_tensor(value, path) for value in graph.inputs]
    return _text(head, inputs, [_tensor(value, path) for value in graph.outputs])


def ensemble_text(
    name: str, steps: Sequence[Step], outputs: Sequence[str], programs: Mapping[str, OnnxProgram], paths: Sequence[str]
) -> str:
    """``config.pbtxt`` of the ensemble.

    Args:
        steps: The calls of pieces, in order.
        outputs: The values that the model returns.
        programs: The pieces by their paths.
        paths: For each step the path of its piece.
    """
    names = _names_of_outputs(outputs, steps)
    given: dict[str, _Tensor] = {}
    made: dict[str, _Tensor] = {}
    texts = []
    for step, path in _needed(steps, paths, outputs):
        graph = programs[path].model.graph
        for value in graph.outputs:
            if (result := step.outputs.get(str(value.name))) is not None:
                made[result] = _tensor(value, path)
        for value in graph.inputs:
            taken = step.inputs[str(value.name)]
            if taken not in made:
                given.setdefault(taken, _tensor(value, path))
        texts.append(_step_text(piece_name(name, path), step, names))
    head = [f"name: {_quoted(name)}", 'platform: "ensemble"', "max_batch_size: 0"]
    results = [_Tensor(names[value], made[value].data_type, made[value].dims) for value in outputs]
    inputs = [_Tensor(value, tensor.data_type, tensor.dims) for value, tensor in given.items()]
    return _text(head, inputs, results) + "ensemble_scheduling {\n  step [\n" + ",\n".join(texts) + "\n  ]\n}\n"


def _names_of_outputs(outputs: Sequence[str], steps: Sequence[Step]) -> dict[str, str]:
    """Each value that the model returns to the name by which the ensemble returns it."""
    results = {value for step in steps for value in step.outputs.values()}
    for number, value in enumerate(outputs):
        if value not in results or value in outputs[:number]:
            what = "twice" if value in results else "as it is"
            raise UsageError(
                f"the model returns {value!r} {what}; an ensemble returns results of its models, each once",
                hint="Return it outside of the model that is exported.",
            )
    plain = ["output"] if len(outputs) == 1 else [f"output_{number}" for number in range(len(outputs))]
    taken = {value for step in steps for value in step.inputs.values()}
    names = {}
    for value, name in zip(outputs, plain, strict=True):
        while name in taken:  # an input of the model has that name
            name += "_"
        names[value] = name
    return names


def _needed(steps: Sequence[Step], paths: Sequence[str], outputs: Iterable[str]) -> list[tuple[Step, str]]:
    """The steps on which the outputs depend, each with the results that are used."""
    needed = set(outputs)
    chosen = []
    for step, path in zip(reversed(steps), reversed(paths), strict=True):
        if needed.isdisjoint(step.outputs.values()):
            continue
        taken = {name: value for name, value in step.outputs.items() if value in needed}
        chosen.append((step._replace(outputs=taken), path))
        needed |= set(step.inputs.values())
    return chosen[::-1]


def _step_text(model: str, step: Step, names: Mapping[str, str]) -> str:
    maps = [("input_map", step.inputs), ("output_map", step.outputs)]
    lines = [
        f"      {kind} {{ key: {_quoted(key)} value: {_quoted(names.get(value, value))} }}"
        for kind, entries in maps
        for key, value in entries.items()
    ]
    return "\n".join(["    {", f"      model_name: {_quoted(model)}", "      model_version: -1", *lines, "    }"])


def _text(head: Sequence[str], inputs: Sequence[_Tensor], outputs: Sequence[_Tensor]) -> str:
    parts = list(head)
    for kind, tensors in (("input", inputs), ("output", outputs)):
        parts.append(f"{kind} [\n" + ",\n".join(tensor.text() for tensor in tensors) + "\n]")
    return "\n".join(parts) + "\n"


def _tensor(value: ir.Value, path: str) -> _Tensor:
    dtype, shape = value.dtype, value.shape
    if dtype not in _TYPES:
        raise UsageError(f"{value.name!r} of the piece {path!r} is of {dtype}, which Triton does not have")
    assert shape is not None
    dims = tuple(size if isinstance(size, int) else -1 for size in shape)
    if not dims or 0 in dims:
        kind = "a scalar" if not dims else "empty"
        raise UsageError(
            f"{value.name!r} of the piece {path!r} is {kind}, which Triton does not pass on",
            hint="Give it an axis: x[None] outside of the piece, x[0] within it." if not dims else None,
        )
    return _Tensor(str(value.name), _TYPES[dtype], dims)


def _quoted(text: str) -> str:
    """A literal of protobuf's text format."""
    return '"' + "".join(c if c.isprintable() and c not in '"\\' else f"\\U{ord(c):08x}" for c in text) + '"'
