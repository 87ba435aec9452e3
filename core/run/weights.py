"""The check for weights without numbers. ``onnxplug_tools.weights`` replaces weights by others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx_ir as ir
import torch

from onnxplug.build.stored import META, PARTS, Origin, WeightTensor
from onnxplug.errors import WeightsError
from onnxplug.fake import is_fake
from onnxplug.text import counted, shortened

#: Metadata key (``onnx_ir.TensorProtocol.meta``) of the source that an initializer's tensor is read from.
SOURCE = "onnxplug.source"
#: How many names a message gives.
_NAMED = 5


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
        fake = [part for part, content in zip(origin.parts or [origin], kept, strict=True) if lacks_numbers(content())]
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


def lacks_numbers(content: torch.Tensor | None) -> bool:
    """Whether a tensor is fake or absent."""
    return content is None or is_fake(content)
