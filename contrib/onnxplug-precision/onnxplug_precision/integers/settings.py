"""The values of ``quantize=``: a kind and its settings."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from onnxplug import UsageError
from onnxplug.text import did_you_mean

#: The sizes of blocks of ONNX Runtime's kernel.
BLOCK_SIZES = (16, 32, 64, 128, 256)
_WORDS = {"yes": True, "no": False, "true": True, "false": False}


@dataclass(frozen=True)
class Dynamic:
    """Weights of 8 bits, and activations whose scales are computed when the model runs.

    Attributes:
        per_channel: Whether each column of a weight has a scale.
        convolutions: Whether to quantise convolutions too, which ONNX Runtime computes more slowly than in float32.
    """

    kind: ClassVar[str] = "dynamic"
    per_channel: bool = True
    convolutions: bool = False


@dataclass(frozen=True)
class Static:
    """QuantizeLinear and DequantizeLinear with scales from data.

    Attributes:
        method: The range of activations: ``"minmax"``, ``"percentile"`` or ``"entropy"``.
        percentile: The percentage of elements within the range, for that method.
        per_channel: Whether each output channel of a weight has a scale.
    """

    kind: ClassVar[str] = "qdq"
    method: str = "minmax"
    percentile: float = 99.99
    per_channel: bool = True


@dataclass(frozen=True)
class FourBits:
    """Weights of 4 bits in blocks of a column, by ``MatMulNBits``.

    Attributes:
        block_size: The number of weights that share a scale.
        symmetric: Whether there is no zero point.
        accuracy_level: The precision to which activations may be rounded: 4 for int8, which is fast, 1 for float32.
    """

    kind: ClassVar[str] = "int4"
    block_size: int = 32
    symmetric: bool = True
    accuracy_level: int = 4


Settings = Dynamic | Static | FourBits
KINDS: dict[str, type[Settings]] = {kind.kind: kind for kind in (Dynamic, Static, FourBits)}


def settings_of(text: Any) -> Settings:
    """The settings of a text such as ``"int4:block_size=64,symmetric=no"``.

    Raises:
        UsageError: The kind or a setting is unknown, or a value is invalid.
    """
    kind, _, rest = str(text).partition(":")
    if not isinstance(text, str) or kind not in KINDS:
        raise UsageError(f"quantize= takes 'dynamic', 'qdq' or 'int4', not {text!r}")
    fields = {item.name: item for item in dataclasses.fields(KINDS[kind])}
    values: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        name, _, word = (piece.strip() for piece in part.partition("="))
        if name not in fields:
            hint = did_you_mean(name, list(fields), otherwise=f"They are {', '.join(fields)}.")
            raise UsageError(f"quantize={text!r}: {kind} has no setting {name!r}", hint=hint)
        values[name] = _value(word, fields[name].default, f"quantize={text!r}: {name}")
    settings = KINDS[kind](**values)
    if isinstance(settings, FourBits):
        _check_choice("block_size", settings.block_size, BLOCK_SIZES)
        _check_choice("accuracy_level", settings.accuracy_level, (0, 1, 2, 3, 4))
    elif isinstance(settings, Static):
        _check_choice("method", settings.method, ("minmax", "percentile", "entropy"))
        if not 50 < settings.percentile <= 100:
            raise UsageError(f"quantize=: percentile is more than 50 and at most 100, got {settings.percentile:g}")
    return settings


def _check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    if value not in choices:
        raise UsageError(f"quantize=: {name} is one of {', '.join(map(str, choices))}, got {value}")


def _value(word: str, default: Any, what: str) -> Any:
    if isinstance(default, bool):
        if word not in _WORDS:
            raise UsageError(f"{what} is yes or no, got {word!r}")
        return _WORDS[word]
    try:
        return type(default)(word)
    except ValueError:
        raise UsageError(f"{what} is a number, got {word!r}") from None
