"""The number formats of a file, under the names that transformers.js gives them; the conversions are onnxplug-precision's."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onnxplug import OnnxProgram, UsageError


@dataclass(frozen=True)
class NumberFormat:
    """How a file has its numbers.

    Attributes:
        suffix: What follows the name of a model in that of its file.
        quantize: The kind of onnxplug-precision's quantisation.
        half: Whether what is not quantised is in float16.
    """

    suffix: str
    quantize: str | None = None
    half: bool = False


#: By the names of ``--dtypes``. 8 bits are unsigned by each name: sums of uint8 times int8 saturate on x86 without VNNI.
FORMATS = {
    "fp32": NumberFormat(""),
    "fp16": NumberFormat("_fp16", half=True),
    "q8": NumberFormat("_quantized", "dynamic"),
    "int8": NumberFormat("_int8", "dynamic"),
    "uint8": NumberFormat("_uint8", "dynamic"),
    "q4": NumberFormat("_q4", "int4"),
    "q4f16": NumberFormat("_q4f16", "int4", half=True),
}


def check_dtypes(names: Sequence[str]) -> None:
    """Looks whether all these formats can be written.

    Raises:
        UsageError: One is unknown or named twice, none is named, or onnxplug-precision is not installed.
    """
    for name in names:
        if name not in FORMATS:
            raise UsageError(f"--dtypes has no {name!r}", hint=f"They are {', '.join(FORMATS)}.")
    if not names or len(set(names)) < len(names):
        raise UsageError("--dtypes names each format once", hint="--dtypes fp32,fp16,q8,q4")
    if any(FORMATS[name] != FORMATS["fp32"] for name in names):
        try:
            import onnxplug_precision  # noqa: F401
        except ImportError as error:
            raise UsageError(
                f"--dtypes {','.join(names)} needs onnxplug-precision", hint="pip install onnxplug-precision"
            ) from error


def in_format(program: OnnxProgram, name: str, samples: Sequence[Mapping[str, Any]]) -> tuple[OnnxProgram, str | None]:
    """A program in another number format, and how far its results moved.

    It ran on the samples, and gives NaN for none.

    Args:
        program: The program, in float32; it stays as it is.
        name: The format.
        samples: Inputs by the names of the graph's.

    Raises:
        ConversionError: Nothing of the model can be in this format.
        VerificationError: The new model does not run on the samples, or gives NaN.
    """
    chosen = FORMATS[name]
    if chosen.quantize is None and not chosen.half:
        return program, None
    from onnxplug_precision.half.convert import to_half_precision
    from onnxplug_precision.integers.quantize import quantize
    from onnxplug_precision.integers.settings import settings_of

    from onnxplug.build.scope import nodes_of

    new = copy.copy(program)
    new.release()
    reports = []
    if chosen.quantize is not None:
        new.model, report = quantize(program.model, settings_of(chosen.quantize), samples, host=program.host)
        reports.append(report)
    else:
        new.model = program.model.clone()
    if chosen.half:
        reports.append(to_half_precision(new.model, "float16", samples, host=program.host))
    operators = Counter(node.op_type for node in nodes_of(new.model.graph))
    new.statistics = dataclasses.replace(
        program.statistics, onnx_nodes=operators.total(), operators=dict(operators.most_common())
    )
    return new, "; ".join(map(_summary, reports))


def _summary(report: Any) -> str:
    """What was converted, and the output that moved most."""
    text = str(report).splitlines()[0]
    worst = min(report.accuracy, key=lambda item: item.cosine, default=None)
    return text if worst is None else f"{text}; of the outputs {worst.name} moved most, cosine {worst.cosine:.6f}"
