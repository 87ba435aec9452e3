"""The weights of a program: the check for weights without numbers, and the replacement by other weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import onnx_ir as ir
import torch

from onnxplug.build.stored import META, PARTS, Origin, WeightTensor, as_content, content_of
from onnxplug.errors import WeightsError
from onnxplug.fake import is_fake
from onnxplug.text import counted, shortened, type_with_article

#: Layouts of sparse tensors.
SPARSE = frozenset((torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc))
#: Metadata key (``onnx_ir.TensorProtocol.meta``) of the source that an initializer's tensor is read from.
SOURCE = "onnxplug.source"
#: How many names a message gives.
_NAMED = 5
_EIGHT_BIT_FLOATS = frozenset(
    (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu)
)


class FileVersion(NamedTuple):
    """The version of a file, which tells it from another file at its path."""

    device: int
    inode: int
    size: int
    changed: int


def version_of(path: Path) -> FileVersion:
    """The present version of a file."""
    status = path.stat()
    return FileVersion(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


@dataclass(frozen=True, eq=False)
class Stored:
    """A tensor in a file.

    Attributes:
        name: Its name there.
        path: The file.
        version: The version of the file.
        shape: Its shape.
        dtype: Its dtype; ``None`` where torch has none.
        dtype_name: Its dtype in the file's notation.
        read: Reads it.
        place: Offset and number of its bytes in the file, where they are stored unchanged.
    """

    name: str
    path: Path
    version: FileVersion
    shape: torch.Size
    dtype: torch.dtype | None
    dtype_name: str
    read: Callable[[str], torch.Tensor]
    place: tuple[int, int] | None = None

    def load(self) -> torch.Tensor:
        """Reads the tensor.

        Raises:
            WeightsError: The file is gone, was written to since it was opened, or can't be read.
        """
        self.check_unchanged()
        try:
            return self.read(self.name)
        except Exception as error:  # safetensors raises a class of its own, torch.load any
            raise WeightsError(f"can't read {self.name!r} from {self.path}: {error}", names=[self.name]) from error

    def check_unchanged(self) -> None:
        """Checks that the file is unchanged.

        Raises:
            WeightsError: It is gone, or was written to.
        """
        try:
            unchanged = version_of(self.path) == self.version
        except OSError as error:
            raise WeightsError(f"can't read {self.name!r} from {self.path}: {error}", names=[self.name]) from error
        if not unchanged:
            raise WeightsError(
                f"{self.path} has changed since the weights were applied", names=[self.name], hint="Apply them again."
            )


def check_numbers(values: Iterable[ir.Value], purpose: str) -> None:
    """Checks that initializers have numbers.

    Args:
        values: The initializers.
        purpose: The action that needs them, in words.

    Raises:
        WeightsError: Some have none; all are named.
    """
    lacking = [v for v in values if isinstance(v.const_value, WeightTensor) and v.const_value.is_fake]
    if not lacking:
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


def replacements(
    model: ir.Model,
    tensors: Mapping[str, torch.Tensor | Stored],
    *,
    strict: bool,
    known: Collection[str] = (),
    refuse: Callable[[Iterable[str]], None] = lambda names: None,
) -> tuple[dict[ir.Value, ir.TensorProtocol], list[str]]:
    """The contents of a model's initializers with other weights; the model is left as it is.

    Args:
        model: The model.
        tensors: Tensors, or where they are stored, by their names in PyTorch.
        strict: Every weight of the model must be given, and nothing else.
        known: Names of the PyTorch model's tensors that the ONNX model doesn't read.
        refuse: Raises where a weight among some names can't be replaced.

    Returns:
        The new tensors, and the names that no weight has.

    Raises:
        WeightsError: A weight is missing, unexpected, of another shape or of a kind of dtype that isn't converted, or a tied
            weight has two different values.
    """
    contents: dict[ir.Value, ir.TensorProtocol] = {}
    names, missing = set(known), []
    for value in model.graph.initializers.values():
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
            refuse(targets)
            replace = _joint_replacement if origin.parts else _replacement
            contents[value] = replace(value, origin, targets, tensors)
        for part in origin.parts or [origin]:
            if part.persistent or is_fake(getattr(value.const_value, "raw", None)):
                missing += [] if tensors.keys() & {*part.targets} else [part.targets[0]]
    refuse(tensors)
    missing = list(dict.fromkeys(missing))
    unexpected = [name for name in tensors if name not in names]
    if strict and (missing or unexpected):
        raise _mismatch(missing, unexpected)
    return contents, unexpected


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
            lacking = lacking or is_fake(before())
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


def _lacks_numbers(content: torch.Tensor | None) -> bool:
    return content is None or is_fake(content)


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


class Source(NamedTuple):
    """The source of an initializer's content.

    Attributes:
        stored: The tensor in its file.
        is_plain: Whether the initializer's bytes are the file's.
    """

    stored: Stored
    is_plain: bool


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
