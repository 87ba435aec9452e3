"""ONNX files compared with PyTorch models, without a captured graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import onnx_ir as ir
import torch

from onnxplug.capture.dimensions import evaluate, is_expression, names_in
from onnxplug.capture.eager import inference
from onnxplug.capture.signature import present_name
from onnxplug.errors import VerificationError
from onnxplug.host import RuntimeHost
from onnxplug.plugin_api import VerificationReport
from onnxplug.run.session import TARGET, Runner
from onnxplug.torch_private import pytree
from onnxplug.verification.choices import Ties, outputs_of_choices
from onnxplug.verification.eager import copied, state_of
from onnxplug.verification.inputs import ATTEMPTS, Sizes, clone_leaves, tensor_like
from onnxplug.verification.outputs import Replay
from onnxplug.verification.verify import verify_runner
from onnxplug_tools.onnx_file import read_model

if TYPE_CHECKING:
    from onnxplug.program import OnnxProgram


def verify_file(
    path: str,
    model: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dynamic: Mapping[str, Mapping[int, str]] | None = None,
    seeds: Sequence[int] = (0, 1, 2),
    host: RuntimeHost | None = None,
    replay: Replay | None = None,
) -> VerificationReport:
    """Compares an ONNX file with a PyTorch model that is run eagerly; nothing is captured.

    Args:
        args, kwargs: Example inputs; an ExportedProgram's own when there are none.
        dynamic: Input name to axis to the name of its dimension, or to an expression of other names
            (``"past + sequence"``); other sizes are tried along these axes.
        seeds: A set of generated inputs for each seed.
        host: The plugins whose libraries and kernels run custom operators; all installed plugins when ``None``.
        replay: Gives PyTorch's results for the file's choices among equal elements (:func:`choices_of_file`), where results
            differ.
    """
    if isinstance(model, torch.export.ExportedProgram):
        if not args and not kwargs and model.example_inputs is not None:
            args, kwargs = model.example_inputs
        model = model.module()
    elif isinstance(model, torch.nn.Module):
        model.eval()
    if not path.endswith(".ort"):  # ONNX Runtime's own format
        for output in read_model(path).graph.output:
            if output.type.WhichOneof("value") in ("sequence_type", "map_type"):
                raise VerificationError(
                    f"the output {output.name!r} is no tensor: only tensors are compared with PyTorch"
                )
    runner = Runner(path, host)
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    fed = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    if len(fed) != len(runner.input_names):
        raise VerificationError(
            f"the model takes {len(runner.input_names)} inputs ({', '.join(runner.input_names)}), the target gives "
            f"{len(fed)} tensors",
            hint="Give its inputs with --input.",
        )
    order = input_order(runner.input_names, fed, args, kwargs)
    axes = {order[name]: dict(named) for name, named in (dynamic or {}).items() if name in order}
    unknown = [name for name in dynamic or {} if name not in order]
    if unknown:
        raise VerificationError(f"the model has no input {unknown[0]!r}; it has {', '.join(runner.input_names)}")
    return verify_runner(
        runner,
        model,
        lambda model, leaves: _eager_by_name(model, leaves, spec, runner.output_names, order),
        lambda leaves: {name: leaves[position] for name, position in order.items()},
        leaves,
        seeds,
        lambda seed, attempt: resized_inputs(leaves, axes, seed, attempt),
        replay,
    )


def resized_inputs(
    leaves: Sequence[Any], axes: Mapping[int, Mapping[int, str]], seed: int, attempt: int = 0
) -> tuple[list[Any], dict[str, int]]:
    """As :func:`onnxplug.verification.inputs.generated_inputs`, where only the names of dynamic axes are known.

    Args:
        axes: Leaf to axis to the name of its dimension, or an expression of other names.

    Returns:
        The leaves, and the size that each name took.
    """
    from sympy import Symbol

    places = [(leaf, axis, name) for leaf, named_axes in axes.items() for axis, name in named_axes.items()]
    known = {name: Symbol(name) for _, _, name in places if not names_in(name)}
    exported: dict[Any, int] = {}
    dependent: dict[Any, Any] = {}
    for leaf, axis, name in places:
        if is_expression(name, known):
            dependent[Symbol(name)] = evaluate(name, known)
        else:
            exported.setdefault(Symbol(name), int(leaves[leaf].shape[axis]))
    sizes = {str(s): size for s, size in Sizes(exported, dependent, {}).draw(seed, attempt).items()}
    generator = torch.Generator().manual_seed(seed + 1 + attempt * 65537)
    fresh: list[Any] = []
    for position, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            fresh.append(leaf)
            continue
        shape = [
            sizes[axes[position][axis]] if axis in axes.get(position, {}) else n for axis, n in enumerate(leaf.shape)
        ]
        fresh.append(tensor_like(leaf, shape, generator, own=attempt >= ATTEMPTS // 2))
    return fresh, sizes


def _eager_by_name(
    model: Any, leaves: list[Any], spec: Any, output_names: Sequence[str], inputs: Mapping[str, int]
) -> list[tuple[str, Any]]:
    """PyTorch's result for each output of a file: its results in order, then the inputs and buffers that it writes."""
    own = copied(model) if isinstance(model, torch.nn.Module) else model
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    with inference():
        returned = pytree.tree_leaves(own(*args, **kwargs))
    results = [x for x in returned if isinstance(x, torch.Tensor | bool | int | float | str)]
    expected = list(zip(output_names, results, strict=False))
    presents = {present_name(name): name for name in inputs}
    for name in output_names[len(results) :]:
        written = presents.get(name, name.removesuffix("_out"))
        state = state_of(own, written) if written != name else None
        if state is not None:
            expected.append((name, state))
        elif written != name and written in inputs:
            expected.append((name, leaves[inputs[written]]))
        else:
            raise VerificationError(
                f"the model has the output {name!r} beyond the {len(results)} results of PyTorch, and no input or buffer is "
                f"called {written!r}"
            )
    expected += [(f"result {index}", x) for index, x in enumerate(results) if index >= len(output_names)]
    return expected


def input_order(
    names: Sequence[str], fed: Sequence[int], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, int]:
    """ONNX input name to the leaf that goes there: a keyword that has an input's name by it, the others by position."""
    position = len(pytree.tree_leaves(tuple(args)))
    order: dict[str, int] = {}
    for name, value in kwargs.items():
        if name in names and isinstance(value, torch.Tensor):
            order[name] = position
        position += len(pytree.tree_leaves(value))
    taken = set(order.values())
    left = iter([leaf for leaf in fed if leaf not in taken])
    return {name: order[name] if name in order else next(left) for name in names}


def choices_of_file(
    path: str,
    model: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dynamic_shapes: Any = None,
    host: RuntimeHost | None = None,
) -> Replay:
    """A function of PyTorch's results with a file's choices among equal elements; its first call captures the model.

    The file's values are found by the names that an export of the model gives them with the file's opset, target and names of
    inputs and outputs. If the file was made otherwise, no value is found, and nothing is known of its choices.

    Args:
        dynamic_shapes: As ``to_onnx`` takes it.
    """
    if isinstance(model, torch.export.ExportedProgram) and not args and not kwargs and model.example_inputs is not None:
        args, kwargs = model.example_inputs
    spec = pytree.tree_structure((tuple(args), dict(kwargs)))

    @cache
    def exported() -> tuple[ir.Model, OnnxProgram] | None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                file = ir.load(path)
                return file, _exported_again(file, model, args, kwargs, dynamic_shapes)
        except Exception:  # it can't be captured: the difference itself is reported
            return None

    def replay(leaves: Sequence[Any], eager: Callable[[], Any]) -> Ties | None:
        export = exported()
        recipe = export[1].recipe if export is not None else None
        if export is None or recipe is None:
            return None
        file, program = export
        inputs = program.flatten(*pytree.tree_unflatten(clone_leaves(leaves), spec))
        return outputs_of_choices(file, recipe, host, inputs, eager)

    return replay


def _exported_again(
    file: ir.Model, model: Any, args: Sequence[Any], kwargs: Mapping[str, Any], dynamic_shapes: Any
) -> OnnxProgram:
    from onnxplug.exporter import to_onnx

    options: dict[str, Any] = {
        "opset_version": dict(file.opset_imports),
        "target": file.graph.metadata_props.get(TARGET),
        "input_names": [value.name for value in file.graph.inputs],
        "output_names": [value.name for value in file.graph.outputs],
    }
    if isinstance(model, torch.export.ExportedProgram):
        return to_onnx(model, **options)
    return to_onnx(model, tuple(args), kwargs=dict(kwargs), dynamic_shapes=dynamic_shapes, **options)
