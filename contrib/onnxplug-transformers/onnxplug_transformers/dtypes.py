"""The number formats of a file, under the names that transformers.js gives them; the conversions are onnxplug-precision's."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from onnxplug import OnnxProgram, UsageError, VerificationError
from onnxplug_transformers.rounded import Sample, furthest


@dataclass(frozen=True)
class NumberFormat:
    """The number format of a file.

    Attributes:
        suffix: The part of a file's name behind the model's name.
        half: Whether numbers that are not quantised are in float16.
    """

    suffix: str
    quantize: str | None = None
    half: bool = False


#: By the names of ``--dtypes``. 8 bits are unsigned under each name: sums of uint8 times int8 saturate on x86 without
#: VNNI.
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
    """Checks that all these formats can be written."""
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


def in_format(
    program: OnnxProgram, name: str, samples: Sequence[Sample], model: nn.Module | None, *, has_layers: bool = True
) -> tuple[OnnxProgram, str | None]:
    """A program in another number format, and how far its results moved.

    The new program ran on the samples, and gives NaN for none.

    Args:
        program: The program, in float32; it stays as it is.
        model: PyTorch's model, to compare with; ``None``: results are compared with those in float32 alone.
        has_layers: Whether there are layers that can be quantised; a file without them stays in floats.

    Raises:
        ConversionError: Nothing of the model can be in this format.
        VerificationError: The new model does not run on the samples, gives NaN, or is further from PyTorch's results than its
            format explains.
    """
    chosen = FORMATS[name]
    if chosen.quantize is None and not chosen.half:
        return program, None
    if not has_layers:
        chosen = dataclasses.replace(chosen, quantize=None)
        if not chosen.half:
            return program, "no layer to quantise"
    from onnxplug_precision.half.convert import to_half_precision
    from onnxplug_precision.integers.quantize import quantize
    from onnxplug_precision.integers.settings import settings_of
    from onnxplug_precision.report import results_of

    from onnxplug.build.scope import nodes_of

    new = copy.copy(program)
    new.release()
    reports, feeds = [], [sample.feed for sample in samples]
    if chosen.quantize is not None:
        new.model, report = quantize(program.model, settings_of(chosen.quantize), feeds, host=program.host)
        reports.append(report)
    else:
        new.model = program.model.clone()
    if chosen.half:
        reports.append(to_half_precision(new.model, "float16", feeds, host=program.host))
    operators = Counter(node.op_type for node in nodes_of(new.model.graph))
    new.statistics = dataclasses.replace(
        program.statistics, onnx_nodes=operators.total(), operators=dict(operators.most_common())
    )
    if model is None:
        return new, "; ".join(map(_summary, reports))
    results = results_of(new.model, feeds, program.host)
    try:
        distance = furthest(model, samples, results, chosen.quantize, chosen.half)
    except VerificationError as error:
        raise VerificationError(f"{name}: {error}", hint="Leave the format out of --dtypes.") from error
    remarks = [str(report).splitlines()[0] for report in reports]
    return new, "; ".join(remarks if distance is None else [*remarks, str(distance)])


def _summary(report: Any) -> str:
    """A line on the conversion, and on the output that moved most."""
    text = str(report).splitlines()[0]
    worst = min(report.accuracy, key=lambda item: item.cosine, default=None)
    return text if worst is None else f"{text}; of the outputs {worst.name} moved most, cosine {worst.cosine:.6f}"
