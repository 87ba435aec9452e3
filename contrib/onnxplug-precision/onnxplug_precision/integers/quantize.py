"""Quantises a model by ``onnxruntime.quantization``, and measures the differences of its results."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch

from onnxplug.build.scope import nodes_of
from onnxplug.errors import ConversionError, UsageError
from onnxplug.run.protobuf import to_proto
from onnxplug.run.save import LARGE_MODEL_BYTES, save_model, weight_bytes
from onnxplug.run.weights import check_numbers
from onnxplug_precision.integers.products import left_alone, prepare, why_none
from onnxplug_precision.integers.settings import Dynamic, FourBits, Settings, Static
from onnxplug_precision.report import Precision, WideNode, differences, results_of

#: Operators that compute with integers.
_DYNAMIC = frozenset({"MatMulInteger", "ConvInteger", "DynamicQuantizeLSTM", "MatMulIntegerToFloat", "QAttention"})
_STATIC = ("MatMul", "Gemm", "Conv", "ConvTranspose")
#: The part of a path that marks the quantiser's modules.
_QUANTISER = os.path.join("onnxruntime", "quantization", "")
#: The number of bins of the histograms for the entropy.
_BINS = 512
Samples = Sequence[Mapping[str, torch.Tensor]]


def quantize(
    model: ir.Model, settings: Settings, samples: Samples, data: Samples = (), host: Any = None
) -> tuple[ir.Model, Precision]:
    """A quantised copy of a model, and the report.

    Args:
        model: The model, in float32.
        settings: The kind of quantisation, and its settings.
        samples: Inputs by name, for the comparison.
        data: Inputs by name, for the scales of activations.
        host: The plugins that run custom operators.

    Raises:
        UsageError: The kind needs data, and there are none.
        ConversionError: Nothing was quantised, or ONNX Runtime's quantiser fails.
        VerificationError: The quantised model does not run, or gives NaN.
    """
    check_numbers(model.graph.initializers.values(), "the model can't be quantised")
    before = results_of(model, [*samples, *data], host)
    plain = ir.from_proto(to_proto(model))
    prepare(plain, gemms=not isinstance(settings, Static))
    try:
        with _quiet():
            quantised = _quantised(plain, settings, data)
    except (UsageError, ConversionError):
        raise
    except Exception as error:
        raise ConversionError(
            f"ONNX Runtime's quantiser fails: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        ) from error
    operators = _operators(quantised, settings)
    if not operators:
        raise ConversionError(f"nothing was quantised ({settings.kind}): {why_none(plain, settings.kind)}")
    after = results_of(quantised, [*samples, *data], host)
    return quantised, Precision(
        settings.kind,
        operators.total(),
        dict(operators.most_common()),
        [WideNode.of(node, reason) for node, reason in left_alone(quantised, settings.kind)],
        bytes_before=weight_bytes(model),
        bytes_after=weight_bytes(quantised),
        accuracy=differences(before, after),
    )


def _operators(model: ir.Model, settings: Settings) -> Counter[str]:
    """The number of nodes that compute with few bits, by operator."""
    nodes = list(nodes_of(model.graph))
    if isinstance(settings, FourBits):
        return Counter(n.op_type for n in nodes if n.op_type in ("MatMulNBits", "GatherBlockQuantized"))
    if isinstance(settings, Dynamic):
        return Counter(n.op_type for n in nodes if n.op_type in _DYNAMIC)
    restored = [n for n in nodes if n.op_type == "DequantizeLinear"]
    return Counter(
        user.op_type for user in {u for n in restored for u, _ in n.outputs[0].uses()} if _takes_weight(user)
    )


def _takes_weight(node: ir.Node) -> bool:
    """Whether both factors of a product come from DequantizeLinear."""
    if node.op_type not in _STATIC:
        return False
    makers = [v.producer() if v is not None else None for v in node.inputs[:2]]
    return len(makers) == 2 and all(m is not None and m.op_type == "DequantizeLinear" for m in makers)


def _quantised(model: ir.Model, settings: Settings, data: Samples) -> ir.Model:
    if isinstance(settings, FourBits):
        return _four_bits(model, settings)
    with tempfile.TemporaryDirectory(prefix="onnxplug-precision-") as folder:
        source, target = Path(folder) / "model.onnx", Path(folder) / "quantised.onnx"
        is_large = weight_bytes(model) > LARGE_MODEL_BYTES
        save_model(model, source, external_data=is_large)
        if isinstance(settings, Dynamic):
            _dynamic(source, target, settings, is_large)
        else:
            _static(source, target, settings, data, is_large)
        return ir.from_proto(onnx.load(target))


def _dynamic(source: Path, target: Path, settings: Dynamic, is_large: bool) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    operators = ["MatMul", "LSTM", "Attention", *(["Conv"] if settings.convolutions else [])]
    quantize_dynamic(
        source,
        target,
        op_types_to_quantize=operators,
        per_channel=settings.per_channel,
        # as the activations: on x86 without VNNI the sums of uint8 times int8 saturate
        weight_type=QuantType.QUInt8,
        use_external_data_format=is_large,
        extra_options={"EnableSubgraph": True, "MatMulConstBOnly": True},
    )


def _static(source: Path, target: Path, settings: Static, data: Samples, is_large: bool) -> None:
    from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static

    methods = {
        "minmax": CalibrationMethod.MinMax,
        "percentile": CalibrationMethod.Percentile,
        "entropy": CalibrationMethod.Entropy,
    }
    if not data:
        raise UsageError(
            "quantize='qdq' needs data for the scales of activations", hint="Give them by calibrate= (--calibrate)."
        )
    ranges = source.with_suffix(".json") if settings.method == "entropy" else None
    if ranges is not None:
        _ranges_by_entropy(source, ranges, data, is_large)
    quantize_static(
        source,
        target,
        _Reader(data),
        quant_format=QuantFormat.QDQ,
        op_types_to_quantize=list(_STATIC),
        per_channel=settings.per_channel,
        activation_type=QuantType.QUInt8,
        # as for the activations: on x86 without VNNI the sums of uint8 times int8 saturate
        weight_type=QuantType.QUInt8,
        calibrate_method=methods[settings.method],
        calibration_cache_path=ranges,
        use_external_data_format=is_large,
        extra_options={"CalibPercentile": settings.percentile, "WeightSymmetric": True},
    )


def _ranges_by_entropy(source: Path, ranges: Path, data: Samples, is_large: bool) -> None:
    """Writes the ranges of activations by entropy, which lose the least information.

    By default ``quantize_static`` has as many bins in its histograms as quanta, and so always takes the whole range.
    """
    from onnxruntime.quantization.calibrate import CalibrationMethod, create_calibrator
    from onnxruntime.quantization.quantize import save_tensors_data

    calibrator = create_calibrator(
        source,
        list(_STATIC),
        str(source.with_name("augmented.onnx")),
        CalibrationMethod.Entropy,
        use_external_data_format=is_large,
        extra_options={"num_bins": _BINS},
    )
    calibrator.collect_data(_Reader(data))
    save_tensors_data(calibrator.compute_data(), ranges)


class _Reader:
    """A reader of calibration data for ``onnxruntime.quantization``."""

    def __init__(self, data: Samples) -> None:
        self._data = data
        self._left: Iterator[Mapping[str, torch.Tensor]] = iter(data)

    def get_next(self) -> dict[str, np.ndarray] | None:
        """The next call's inputs; ``None`` after the last call."""
        call = next(self._left, None)
        return None if call is None else {name: value.numpy() for name, value in call.items()}

    def rewind(self) -> None:
        """Begins again with the first call."""
        self._left = iter(self._data)


def _four_bits(model: ir.Model, settings: FourBits) -> ir.Model:
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    quantizer = MatMulNBitsQuantizer(
        to_proto(model),
        block_size=settings.block_size,
        is_symmetric=settings.symmetric,
        accuracy_level=settings.accuracy_level or None,
    )
    quantizer.process()
    return ir.from_proto(quantizer.model.model)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """A context that drops the quantiser's prints, and its advice on the root logger, which our users can't follow."""
    logging.root.addFilter(_is_no_advice)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.root.removeFilter(_is_no_advice)


def _is_no_advice(record: logging.LogRecord) -> bool:
    """Whether a record is an error, or doesn't come from ONNX Runtime's quantiser."""
    return record.levelno > logging.WARNING or _QUANTISER not in record.pathname
