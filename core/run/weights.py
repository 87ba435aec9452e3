"""Weights without numbers, and other weights for a program: ``program.apply_weights(…)`` and ``program.save(weights=…)``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import onnx_ir as ir
import torch

from onnxplug.build.stored import (
    META,
    PARTS,
    AsExported,
    Origin,
    WeightTensor,
    as_content,
    bytes_of,
    content_of,
    on_cpu,
)
from onnxplug.errors import UsageError, WeightsError
from onnxplug.fake import is_fake
from onnxplug.packages import load
from onnxplug.text import counted, shortened, type_with_article

#: Metadata key (``onnx_ir.TensorProtocol.meta``) of the tensor in a file that an initializer's tensor is read from, and whether
#: their bytes are the same.
SOURCE = "onnxplug.source"
#: How many names a message gives.
_NAMED = 5


def check_numbers(values: Iterable[ir.Value], purpose: str) -> None:
    """Checks that initializers have numbers, those of the export.

    Args:
        values: The initializers.
        purpose: The action that needs them, in words.

    Raises:
        WeightsError: Some have none, and all of these are named; or the model's memory was written since the export.
    """
    weights = [(v, v.const_value) for v in values if isinstance(v.const_value, WeightTensor)]
    lacking = [value for value, tensor in weights if tensor.is_fake]
    if not lacking:
        for _, tensor in weights:
            tensor.check()
        return
    names, computed = [], []
    for value in lacking:
        origin: Origin | None = value.meta.get(META)
        if origin is None:
            names.append(str(value.name))
            continue
        assert value.const_value is not None
        kept = value.const_value.meta.get(PARTS) or [lambda: None]
        fake = [part for part, content in zip(origin.parts or [origin], kept, strict=True) if _lacks_numbers(content())]
        names += [part.targets[0] for part in fake]
        computed += [part.targets[0] for part in fake if not part.persistent]
    hint = "Give them: program.save(path, weights='model.safetensors') or program.apply_weights(state_dict)."
    if computed:
        hint += (
            f" No checkpoint has {named(computed)}, which the model computes when it is made: give the numbers by name "
            "(program.apply_weights({name: tensor})), or make the model under onnxplug.fake_weights(), which computes them."
        )
    verb = "has" if len(names) == 1 else "have"
    raise WeightsError(
        f"{purpose}: {counted(len(names), 'weight')} {verb} no numbers, {named(names)}", names=names, hint=hint
    )


def named(names: Sequence[str]) -> str:
    """Names in a message: the first few, and how many others there are."""
    shown = ", ".join(repr(shortened(name, 200)) for name in names[:_NAMED])
    return shown if len(names) <= _NAMED else f"{shown} and {counted(len(names) - _NAMED, 'other')}"


def _lacks_numbers(content: Any) -> bool:
    return content is None or is_fake(content)


def replacements(
    program: Any, weights: Any, strict: bool | None
) -> tuple[dict[ir.Value, ir.TensorProtocol], list[str]]:
    """The contents of a program's initializers with other weights; the program is left as it is.

    Args:
        program: The :class:`onnxplug.OnnxProgram`.
        weights: Tensors by their names in PyTorch, or files.
        strict: Every weight of the program must be given, and nothing else; ``None``: only for files.

    Returns:
        The new tensors, and the names in a mapping that no weight has.

    Raises:
        WeightsError: A weight is missing, unexpected, of another shape or of a kind of dtype that isn't converted, or a tied
            weight has two different values.
        UsageError: The program has computed with a weight, the model's code with a buffer's number, or ``strict`` is malformed.
        MissingPackageError: The package that reads files is not installed.
    """
    if program.unquantised is not None:
        raise UsageError("the weights of a quantised model can't be replaced", hint="Export it with the new ones.")
    if not isinstance(strict, bool | None):
        raise UsageError(f"strict= takes True, False or None, got {strict!r}")
    is_mapping = isinstance(weights, Mapping)
    tensors = _tensors(weights)
    for name in tensors:
        if name in program.folded:
            raise UsageError(
                f"the weight {name!r} can't be replaced: optimize() has computed with it",
                hint="Apply the weights before optimize().",
            )
    for name, number in (program.captured.numbers if program.captured is not None else {}).items():
        if name in tensors and not _is_equal(_loaded(tensors[name]), number):
            raise UsageError(
                f"the buffer {name!r} can't be replaced by another number: the model's code read its number in the export",
                hint="Export the model with the new weights.",
            )
    contents: dict[ir.Value, ir.TensorProtocol] = {}
    exported, missing = program.exported_program, []
    names = {*exported.state_dict, *exported.constants} if exported is not None else set()
    for value in program.model.graph.initializers.values():
        origin: Origin | None = value.meta.get(META)
        if origin is None:  # of a model that was not exported by onnxplug
            if value.name in tensors:
                names.add(value.name)
                contents[value] = WeightTensor(_loaded(tensors[value.name]).detach(), name=value.name)
            continue
        names.update(origin.targets)
        if not tensors.keys().isdisjoint(origin.targets):
            contents[value] = _content(value, origin, tensors)
        for part in origin.parts or [origin]:
            if part.persistent or is_fake(getattr(value.const_value, "raw", None)):
                missing += [part.targets[0]] if tensors.keys().isdisjoint(part.targets) else []
    unexpected = [name for name in tensors if name not in names]
    if (missing or unexpected) and (not is_mapping if strict is None else strict):
        raise _mismatch(list(dict.fromkeys(missing)), unexpected)
    return contents, unexpected if is_mapping else []


def first_that_differs(given: Iterable[Any], state: Mapping[str, torch.Tensor]) -> str | None:
    """The name of a weight that was given and is another in a model, bit by bit; ``None`` where there is none.

    Args:
        given: The arguments of ``apply_weights``, in order.
        state: The model's tensors by name.
    """
    latest = {name: item for weights in given for name, item in _tensors(weights).items() if name in state}
    for name, item in latest.items():
        tensor = on_cpu(state[name])
        if not torch.equal(bytes_of(on_cpu(_loaded(item)).to(tensor.dtype)), bytes_of(tensor)):
            return name
    return None


def _tensors(weights: Any) -> Mapping[str, Any]:
    """Weights by name; a tensor in a file has a shape, a dtype and ``load()``."""
    tensors: Mapping[str, Any] = (
        _checked_mapping(weights) if isinstance(weights, Mapping) else load("weights=")(weights)
    )
    return tensors


def _checked_mapping(weights: Mapping[Any, Any]) -> Mapping[str, torch.Tensor]:
    for name, tensor in weights.items():
        if not isinstance(name, str):
            raise WeightsError(f"weights are given by name, got {name!r}")
        if not isinstance(tensor, torch.Tensor):
            raise WeightsError(f"the weight {name!r} must be a tensor, got {type_with_article(tensor)}", names=[name])
        if str(tensor.layout).startswith("torch.sparse"):
            raise WeightsError(f"the weight {name!r} is sparse ({tensor.layout})", names=[name], hint="Use to_dense().")
    return weights


def _mismatch(missing: Sequence[str], unexpected: Sequence[str]) -> WeightsError:
    texts = [
        f"{counted(len(names), 'weight')} {of_model}{'is' if len(names) == 1 else 'are'} {problem}, {named(names)}"
        for names, of_model, problem in ((missing, "of the model ", "missing"), (unexpected, "", "not the model's"))
        if names
    ]
    pair = next(((m, u) for m in missing for u in unexpected if m.endswith(f".{u}") or u.endswith(f".{m}")), None)
    if pair is not None:
        hint = f"{pair[0]!r} may be what is called {pair[1]!r} there: give a mapping with the model's names."
    else:
        hint = "strict=False (--no-strict-weights) takes what fits, and leaves the other weights as they are."
    return WeightsError(f"the weights don't fit: {'; '.join(texts)}", names=[*missing, *unexpected], hint=hint)


def _content(value: ir.Value, origin: Origin, tensors: Mapping[str, Any]) -> ir.TensorProtocol:
    """The content of an initializer from the user's tensors, and where it is made of several, from the others as they were.

    Tensors of files are read when the content is needed.

    Raises:
        WeightsError: A tensor doesn't fit.
    """
    old = value.const_value
    assert old is not None
    parts, before = (origin.parts, old.meta.get(PARTS)) if origin.parts else ((origin,), (None,))
    if before is None:
        target = next(target for target in origin.targets if target in tensors)
        raise WeightsError(
            f"the weight {target!r} can't be replaced: {value.name!r} is computed of it, and no longer known how",
            names=[target],
            hint="Export the model with the new weights.",
        )
    items = [_checked(part, tensors) for part in parts]
    makers = [
        was if item is None else partial(_made, part, _kept(part, item))
        for part, item, was in zip(parts, items, before, strict=True)
    ]
    content: ir.TensorProtocol
    if any(item is None and _lacks_numbers(make()) for item, make in zip(items, makers, strict=True)):
        content = WeightTensor(old.raw)  # no number can be computed yet
    elif not origin.parts and isinstance(items[0], torch.Tensor):
        content = content_of(makers[0](), items[0].detach(), makers[0])
    else:
        join = origin.make if origin.parts else lambda tensor: tensor
        shape = ir.Shape(old.shape.numpy())
        content = ir.LazyTensor(lambda: as_content(join(*[make() for make in makers])), old.dtype, shape)
    if origin.parts:
        content.meta[PARTS] = tuple(makers)
    elif not isinstance(items[0], torch.Tensor):
        content.meta[SOURCE] = items[0], not origin.keys and items[0].dtype == origin.dtype
    content.name = value.name
    return content


def _checked(origin: Origin, tensors: Mapping[str, Any]) -> Any:
    """The user's tensor under one of its names; ``None`` where there is none.

    Raises:
        WeightsError: It doesn't fit, or differs between the names.
    """
    targets = [target for target in origin.targets if target in tensors]
    for name in targets:
        _check(origin, name, tensors[name])
    for name in targets[1:]:
        first, other = tensors[targets[0]], tensors[name]
        if other is not first and not torch.equal(_loaded(other), _loaded(first)):
            raise WeightsError(
                f"{targets[0]!r} and {name!r} are one tensor in the exported model, got two that differ",
                names=[targets[0], name],
                hint="Export the model with the new weights.",
            )
    return tensors[targets[0]] if targets else None


def _check(origin: Origin, name: str, item: Any) -> None:
    if tuple(item.shape) != tuple(origin.shape):
        raise WeightsError(
            f"the weight {name!r} has the shape {list(origin.shape)}, got {list(item.shape)}", names=[name]
        )
    if isinstance(item, torch.Tensor) and is_fake(item):
        raise WeightsError(f"the tensor that is given for the weight {name!r} has no numbers", names=[name])
    if item.dtype is None:
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
    kinds = [(dtype.is_floating_point, dtype.is_complex) for dtype in (source, wanted)]
    if any(map(any, kinds)):
        return kinds[0] == kinds[1] and min(source.itemsize, wanted.itemsize) > 1
    is_wider = torch.can_cast(source, wanted) and torch.promote_types(source, wanted) == wanted
    return torch.bool not in (source, wanted) and is_wider


def _is_equal(tensor: torch.Tensor, number: torch.Tensor) -> bool:
    """Whether two tensors have equal numbers, NaN for NaN; false of a tensor without numbers."""
    if is_fake(tensor) or tensor.shape != number.shape:
        return False
    return torch.allclose(on_cpu(tensor).to(number.dtype), on_cpu(number), rtol=0, atol=0, equal_nan=True)


def _loaded(item: Any) -> torch.Tensor:
    tensor: torch.Tensor = item if isinstance(item, torch.Tensor) else item.load()
    return tensor


def _kept(origin: Origin, item: Any) -> Any:
    """An item that is read when it is needed; a tensor must hold its present numbers then."""
    return AsExported(item, origin.targets[0]) if isinstance(item, torch.Tensor) else item


def _made(origin: Origin, item: Any) -> torch.Tensor | ir.TensorProtocol:
    return origin.make(on_cpu(_loaded(item)).to(origin.dtype))
