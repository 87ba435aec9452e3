"""Types, attributes and tensors in words, short enough for a line, without loading data from other files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from onnxplug.text import counted, printable

_LONGEST = 60
_MOST_ITEMS = 8


def shortened(text: str, longest: int = _LONGEST) -> str:
    """A text, cut where it is longer."""
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def text_of(text: str | bytes | None) -> str:
    """A text of a file; protocol buffers give bytes for text that is not UTF-8."""
    if isinstance(text, bytes):
        return text.decode("utf-8", "backslashreplace")
    return text or ""


def visible(text: str) -> str:
    """A text of a file for a terminal or a page: in one line, with invisible characters as escapes."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def finite(item: Any) -> Any:
    """A value for JSON, which lacks NaN and infinities: they are texts."""
    if isinstance(item, float) and not math.isfinite(item):
        return str(item)
    if isinstance(item, dict):
        return {str(key): finite(value) for key, value in item.items()}
    return [finite(value) for value in item] if isinstance(item, list | tuple) else item


def count_text(count: int) -> str:
    """A count with separators: ``"1,234"``."""
    return f"{count:,}"


def bytes_text(size: int) -> str:
    """A size in bytes: ``"1.5 MB"``."""
    return _scaled(size, "bytes", ("kB", "MB", "GB", "TB", "PB"))


def flops_text(count: int) -> str:
    """A number of operations: ``"3.64 GFLOP"``."""
    return _scaled(count, "FLOP", ("kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"), digits=2)


def _scaled(number: int, unit: str, larger: tuple[str, ...], digits: int = 1) -> str:
    if number < 1000:
        return f"{number} {unit[:-1] if number == 1 and unit == 'bytes' else unit}"
    scaled = float(number)
    for name in larger:
        scaled /= 1000
        if scaled < 999.95 or name == larger[-1]:
            return f"{scaled:,.{digits}f} {name}"
    raise AssertionError("the last name takes what is left")


def time_text(seconds: float) -> str:
    """A time: ``"1.23 ms"``."""
    for limit, factor, unit in ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms")):
        if seconds < limit:
            return f"{seconds * factor:.3g} {unit}" if seconds * factor < 999.5 else f"{seconds * factor:.0f} {unit}"
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:,.0f} s"


def opsets_text(opsets: Mapping[str, int]) -> str:
    """Opsets in words: ``"ai.onnx 21, com.microsoft 1"``."""
    return ", ".join(f"{domain or 'ai.onnx'} {version}" for domain, version in opsets.items())


def type_text(kind: ir.TypeProtocol | None) -> str | None:
    """``"float"`` for a tensor, ``"sequence(float)"``, ``"optional(float)"``; ``None`` where it is not known."""
    if kind is None:
        return None
    if type(kind) is ir.TensorType:  # nearly all are
        return kind.dtype.name.lower()
    if isinstance(kind, ir.SequenceType):
        return f"sequence({type_text(kind.elem_type)})"
    if isinstance(kind, ir.OptionalType):
        return f"optional({type_text(kind.elem_type)})"
    name = kind.dtype.name.lower()
    return f"sparse({name})" if isinstance(kind, ir.SparseTensorType) else name


def tensor_bytes(tensor: ir.TensorProtocol) -> int:
    """Bytes of a tensor's elements; of text, of its characters."""
    if tensor.dtype == ir.DataType.STRING:
        strings = getattr(tensor, "string_data", None)
        return sum(len(part) for part in strings()) if strings is not None else 0
    return int(tensor.nbytes)


def attribute_text(attribute: ir.Attr) -> str:
    """An attribute's value in a short text."""
    if attribute.is_ref():
        return f"@{attribute.ref_attr_name}"
    return _value_text(attribute.value)


def _value_text(value: Any) -> str:
    if isinstance(value, str):
        return repr(shortened(value))
    if isinstance(value, bytes):
        return repr(value[:_LONGEST])
    if isinstance(value, float):
        return f"{value:.7g}"
    if isinstance(value, ir.Graph):
        return f"graph of {counted(len(value), 'node')}"
    if isinstance(value, list | tuple):
        shown = [_value_text(item) for item in value[:_MOST_ITEMS]]
        return f"[{', '.join(shown)}{f', … {len(value)} items' if len(value) > _MOST_ITEMS else ''}]"
    if isinstance(value, ir.TensorProtocol):
        return _tensor_text(value)
    return shortened(str(value))


def _tensor_text(tensor: ir.TensorProtocol) -> str:
    dims = ", ".join(str(dim) for dim in tensor.shape)
    text = f"{tensor.dtype.name.lower()}[{dims}]"
    if isinstance(tensor, ir.ExternalTensor) or tensor.size > _MOST_ITEMS or tensor.dtype == ir.DataType.STRING:
        return text
    try:
        return f"{text} {shortened(str(tensor.numpy().tolist()))}"
    except Exception:  # a file's tensor may have fewer bytes than its shape says
        return text
