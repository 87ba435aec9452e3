"""Other weights for a program: ``program.apply_weights(…)`` and ``program.save(weights=…)``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import onnx_ir as ir
import torch

from onnxplug.build.stored import META, PARTS, Origin, WeightTensor, as_content, content_of
from onnxplug.errors import UsageError, WeightsError
from onnxplug.fake import is_fake
from onnxplug.run.weights import SOURCE, lacks_numbers, named
from onnxplug.text import counted, type_with_article
from onnxplug_tools.checkpoint import SPARSE, Source, Stored, open_checkpoint

if TYPE_CHECKING:
    from onnxplug import OnnxProgram

_EIGHT_BIT_FLOATS = frozenset(
    (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu)
)


def replacements(
    program: OnnxProgram, weights: Any, strict: bool | None
) -> tuple[dict[ir.Value, ir.TensorProtocol], list[str]]:
    """The contents of a program's initializers with other weights; the program is left as it is.

    Args:
        program: The program.
        weights: Tensors by their names in PyTorch, or files.
        strict: Every weight of the program must be given, and nothing else; ``None``: only for files.

    Returns:
        The new tensors, and the names in a mapping that no weight has.

    Raises:
        WeightsError: A weight is missing, unexpected, of another shape or of a kind of dtype that isn't converted, or a tied
            weight has two different values.
        UsageError: The program has computed with a weight, or ``strict`` is malformed.
    """
    if program.unquantised is not None:
        raise UsageError("the weights of a quantised model can't be replaced", hint="Export it with the new ones.")
    if not isinstance(strict, bool | None):
        raise UsageError(f"strict= takes True, False or None, got {strict!r}")
    is_mapping = isinstance(weights, Mapping)
    tensors = checked_mapping(weights) if is_mapping else open_checkpoint(weights)
    contents, missing, unexpected = _contents(program, tensors)
    if (missing or unexpected) and (not is_mapping if strict is None else strict):
        raise _mismatch(missing, unexpected)
    return contents, unexpected if is_mapping else []


def _contents(
    program: OnnxProgram, tensors: Mapping[str, torch.Tensor | Stored]
) -> tuple[dict[ir.Value, ir.TensorProtocol], list[str], list[str]]:
    """The new contents, the weights without a tensor, and the names of tensors that are no weights."""
    contents: dict[ir.Value, ir.TensorProtocol] = {}
    exported, missing = program.exported_program, []
    names = {*exported.state_dict, *exported.constants} if exported is not None else set()
    for value in program.model.graph.initializers.values():
        origin: Origin | None = value.meta.get(META)
        if origin is None:
            item = tensors.get(str(value.name))
            if item is not None:  # a model that was not exported by onnxplug
                names.add(str(value.name))
                contents[value] = WeightTensor(_loaded(item).detach(), name=value.name)
            continue
        names.update(origin.targets)
        targets = [target for target in origin.targets if target in tensors]
        if targets:
            _refuse_folded(program, targets)
            replace = _joint_replacement if origin.parts else _replacement
            contents[value] = replace(value, origin, targets, tensors)
        for part in origin.parts or [origin]:
            if part.persistent or is_fake(getattr(value.const_value, "raw", None)):
                missing += [] if tensors.keys() & {*part.targets} else [part.targets[0]]
    _refuse_folded(program, tensors)
    return contents, list(dict.fromkeys(missing)), [name for name in tensors if name not in names]


def _refuse_folded(program: OnnxProgram, names: Iterable[str]) -> None:
    for name in names:
        if name in program.folded:
            raise UsageError(
                f"the weight {name!r} can't be replaced: optimize() has computed with it",
                hint="Apply the weights before optimize().",
            )


def _mismatch(missing: Sequence[str], unexpected: Sequence[str]) -> WeightsError:
    texts = []
    if missing:
        texts.append(f"{counted(len(missing), 'weight')} of the model {_is(missing)} missing, {named(missing)}")
    if unexpected:
        texts.append(f"{counted(len(unexpected), 'weight')} {_is(unexpected)} not the model's, {named(unexpected)}")
    pair = next(((m, u) for m in missing for u in unexpected if m.endswith(f".{u}") or u.endswith(f".{m}")), None)
    if pair is not None:
        hint = f"{pair[0]!r} may be what is called {pair[1]!r} there: give a mapping with the model's names."
    else:
        hint = "strict=False (--no-strict-weights) takes what fits, and leaves the other weights as they are."
    return WeightsError(f"the weights don't fit: {'; '.join(texts)}", names=[*missing, *unexpected], hint=hint)


def _is(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _replacement(
    value: ir.Value, origin: Origin, targets: Sequence[str], tensors: Mapping[str, torch.Tensor | Stored]
) -> ir.TensorProtocol:
    """The content of an initializer from the user's tensor: read when it is needed, if it is in a file.

    Raises:
        WeightsError: The tensor doesn't fit.
    """
    first = _checked(origin, targets, tensors)
    old = value.const_value
    if isinstance(first, torch.Tensor):
        tensor = first.detach()
        content = content_of(_made(origin, tensor), tensor, lambda: _made(origin, tensor))
    else:
        stored = first
        assert old is not None
        content = ir.LazyTensor(
            lambda: as_content(_made(origin, stored.load())), old.dtype, ir.Shape(old.shape.numpy())
        )
        content.meta[SOURCE] = Source(stored, not origin.keys and stored.dtype == origin.dtype)
    content.name = value.name
    return content


def _joint_replacement(
    value: ir.Value, origin: Origin, targets: Sequence[str], tensors: Mapping[str, torch.Tensor | Stored]
) -> ir.TensorProtocol:
    """The content of an initializer of several tensors, with the user's tensors and the others as they were.

    Raises:
        WeightsError: A tensor doesn't fit.
    """
    old = value.const_value
    assert old is not None
    kept: Sequence[Callable[[], torch.Tensor]] | None = old.meta.get(PARTS)
    if kept is None:
        raise WeightsError(
            f"the weight {targets[0]!r} can't be replaced: {value.name!r} is computed of it, and no longer known how",
            names=targets,
            hint="Export the model with the new weights.",
        )
    parts: list[Callable[[], Any]] = []
    lacking = False
    for part, before in zip(origin.parts, kept, strict=True):
        replaced = [target for target in part.targets if target in tensors]
        if replaced:
            parts.append(partial(_part, part, _checked(part, replaced, tensors)))
        else:
            parts.append(before)
            lacking = lacking or lacks_numbers(before())
    content: ir.TensorProtocol
    if lacking:  # no number can be computed yet
        content = WeightTensor(old.raw)
    else:
        shape = ir.Shape(old.shape.numpy())
        content = ir.LazyTensor(lambda: as_content(origin.make(*[part() for part in parts])), old.dtype, shape)
    content.meta[PARTS] = tuple(parts)
    content.name = value.name
    return content


def _part(origin: Origin, item: torch.Tensor | Stored) -> torch.Tensor | ir.TensorProtocol:
    return _made(origin, _loaded(item))


def _checked(
    origin: Origin, targets: Sequence[str], tensors: Mapping[str, torch.Tensor | Stored]
) -> torch.Tensor | Stored:
    """The user's tensor under one of its names.

    Raises:
        WeightsError: It doesn't fit, or differs between the names.
    """
    for name in targets:
        _check(origin, name, tensors[name])
    first = tensors[targets[0]]
    for name in targets[1:]:
        if tensors[name] is not first and not torch.equal(_loaded(tensors[name]), _loaded(first)):
            raise WeightsError(
                f"{targets[0]!r} and {name!r} are one tensor in the exported model, got two that differ",
                names=[targets[0], name],
                hint="Export the model with the new weights.",
            )
    return first


def _made(origin: Origin, tensor: torch.Tensor) -> torch.Tensor | ir.TensorProtocol:
    return origin.make(tensor.detach().to(origin.dtype))


def _check(origin: Origin, name: str, item: torch.Tensor | Stored) -> None:
    if tuple(item.shape) != tuple(origin.shape):
        raise WeightsError(
            f"the weight {name!r} has the shape {list(origin.shape)}, got {list(item.shape)}", names=[name]
        )
    if isinstance(item, torch.Tensor) and is_fake(item):
        raise WeightsError(f"the tensor that is given for the weight {name!r} has no numbers", names=[name])
    if item.dtype is None:
        assert isinstance(item, Stored)
        raise WeightsError(f"the weight {name!r} is stored as {item.dtype_name}, which torch lacks", names=[name])
    if not _converts(item.dtype, origin.dtype):
        raise WeightsError(
            f"the weight {name!r} is {origin.dtype}, got {item.dtype}",
            names=[name],
            hint="Only floating-point weights of 16 bits and more are converted to each other, and integers to wider ones. "
            "What is quantised needs its scales: export a model of that dtype.",
        )


def _converts(source: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether a weight may be replaced by a tensor of another dtype."""
    if source == wanted:
        return True
    if source in _EIGHT_BIT_FLOATS or wanted in _EIGHT_BIT_FLOATS:
        return False
    if source.is_floating_point and wanted.is_floating_point:
        return True
    if source.is_complex or wanted.is_complex:
        return source.is_complex and wanted.is_complex
    return (
        not wanted.is_floating_point
        and source != torch.bool != wanted
        and torch.can_cast(source, wanted)
        and (torch.promote_types(source, wanted) == wanted)
    )


def _loaded(item: torch.Tensor | Stored) -> torch.Tensor:
    return item if isinstance(item, torch.Tensor) else item.load()


def checked_mapping(weights: Mapping[Any, Any]) -> dict[str, torch.Tensor | Stored]:
    """Weights from a mapping.

    Raises:
        WeightsError: A name is not a string, or a value not a tensor.
    """
    for name, tensor in weights.items():
        if not isinstance(name, str):
            raise WeightsError(f"weights are given by name, got {name!r}")
        if not isinstance(tensor, torch.Tensor | Stored):
            raise WeightsError(f"the weight {name!r} must be a tensor, got {type_with_article(tensor)}", names=[name])
        if isinstance(tensor, torch.Tensor) and tensor.layout in SPARSE:
            raise WeightsError(f"the weight {name!r} is sparse ({tensor.layout})", names=[name], hint="Use to_dense().")
    return dict(weights)
