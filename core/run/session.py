"""ONNX Runtime sessions and the reference evaluator."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from onnxplug.build.dtypes import ONNX_TO_TORCH, as_array
from onnxplug.errors import OnnxplugError, VerificationError
from onnxplug.run.save import LARGE_MODEL_BYTES, save_model, to_bytes, weight_bytes

#: Element types that numpy has no dtype for: they travel as integers of the same width.
_VIEWS = {
    torch.bfloat16: (torch.uint16, ir.DataType.BFLOAT16),
    torch.float8_e4m3fn: (torch.uint8, ir.DataType.FLOAT8E4M3FN),
    torch.float8_e4m3fnuz: (torch.uint8, ir.DataType.FLOAT8E4M3FNUZ),
    torch.float8_e5m2: (torch.uint8, ir.DataType.FLOAT8E5M2),
    torch.float8_e5m2fnuz: (torch.uint8, ir.DataType.FLOAT8E5M2FNUZ),
}


def onnxruntime_module() -> Any:
    """ONNX Runtime.

    Raises:
        OnnxplugError: It isn't installed.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise OnnxplugError(
            "running the model needs ONNX Runtime, which is not installed", hint="pip install 'onnxplug[ort]'"
        ) from error
    return onnxruntime


def make_session(model: str | bytes, threads: int | None = None) -> Any:
    """An ``InferenceSession`` on the CPU, quiet.

    Args:
        model: A file's path, or the model itself.
        threads: Threads within an operator; ONNX Runtime's own choice when ``None``.
    """
    runtime = onnxruntime_module()
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    if threads is not None:
        options.intra_op_num_threads = threads
    return runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


class Runner:
    """Runs a model: by ONNX Runtime, or by ``onnx.reference`` where ONNX Runtime has no kernel.

    Attributes:
        runtime: ``"onnxruntime"`` or ``"onnx.reference"``: what ran it.
    """

    def __init__(self, model: ir.Model | str) -> None:
        self._tempdir: tempfile.TemporaryDirectory[str] | None = None
        self._model = model
        self.runtime = "onnxruntime"
        self._session: Any = None
        source: str | bytes
        if isinstance(model, str):
            source = model
        elif weight_bytes(model) > LARGE_MODEL_BYTES:
            self._tempdir = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
            source = str(Path(self._tempdir.name) / "model.onnx")
            save_model(model, source, external_data=True)
        else:
            source = to_bytes(model)
        try:
            self._session = make_session(source)
        except OnnxplugError:
            raise
        except Exception as error:
            if not lacks_kernel(error):
                raise VerificationError(f"ONNX Runtime can't load the model: {error}") from error
            self.runtime = "onnx.reference"
            self._reference = _evaluator(source)

    @property
    def input_names(self) -> list[str]:
        """Names of the graph's inputs, in order."""
        if self._session is not None:
            return [i.name for i in self._session.get_inputs()]
        return list(self._reference.input_names)

    @property
    def output_names(self) -> list[str]:
        """Names of the graph's outputs, in order."""
        if self._session is not None:
            return [o.name for o in self._session.get_outputs()]
        return list(self._reference.output_names)

    def __call__(self, feed: Mapping[str, Any]) -> list[torch.Tensor]:
        """Runs the model on tensors or numbers by input name.

        Raises:
            VerificationError: The model does not run.
        """
        try:
            if self._session is None:
                return [_to_tensor(v) for v in self._reference.run(None, {k: as_array(v) for k, v in feed.items()})]
            values = {name: to_ort_value(value) for name, value in feed.items()}
            return [from_ort_value(v) for v in self._session.run_with_ort_values(None, values)]
        except OnnxplugError:
            raise
        except Exception as error:
            raise VerificationError(f"the model does not run: {error}") from error


def lacks_kernel(error: Exception) -> bool:
    """Whether ONNX Runtime refused a model for want of a kernel, not because the model is wrong."""
    return "NOT_IMPLEMENTED" in str(error) or type(error).__name__ == "NotImplemented"


def _evaluator(source: str | bytes) -> Any:
    import onnx
    import onnx.reference

    model = onnx.load_from_string(source) if isinstance(source, bytes) else onnx.load(source)
    return onnx.reference.ReferenceEvaluator(model)


def _to_tensor(array: Any) -> torch.Tensor:
    array = np.asarray(array)
    dtype = ONNX_TO_TORCH[ir.DataType.from_numpy(array.dtype)]
    if dtype in _VIEWS:
        return torch.from_numpy(array.view(np.uint16 if array.itemsize == 2 else np.uint8)).view(dtype)
    return torch.from_numpy(np.array(array, copy=True))


def to_ort_value(value: Any) -> Any:
    """An OrtValue of a tensor or Python number."""
    ort_value = onnxruntime_module().OrtValue
    tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value)
    if isinstance(value, float):
        tensor = torch.tensor(value, dtype=torch.float64)
    tensor = tensor.detach().cpu().contiguous()
    view = _VIEWS.get(tensor.dtype)
    if view is not None:
        return ort_value.ortvalue_from_numpy_with_onnx_type(tensor.view(view[0]).numpy(), int(view[1]))
    return ort_value.ortvalue_from_numpy(tensor.numpy())


def from_ort_value(value: Any) -> torch.Tensor:
    """A tensor of an OrtValue."""
    dtype = ONNX_TO_TORCH[ir.DataType(value.element_type())]
    if dtype in _VIEWS:
        return torch.utils.dlpack.from_dlpack(value._get_c_value()).clone()
    return torch.from_numpy(np.array(value.numpy(), copy=True))


def check_names(names: Sequence[str], wanted: Sequence[str]) -> None:
    """Holds the inputs of a model file against those that a target gives.

    Raises:
        VerificationError: They differ.
    """
    if list(names) != list(wanted):
        raise VerificationError(f"the model takes {list(names)}, the target gives {list(wanted)}")
