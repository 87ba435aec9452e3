"""ONNX Runtime sessions, and an evaluator where ONNX Runtime lacks a kernel."""

from __future__ import annotations

import ctypes
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from onnxplug import logs
from onnxplug.build.dtypes import ONNX_TO_TORCH, as_array, to_torch
from onnxplug.errors import EvaluationError, OnnxplugError, PluginError, VerificationError
from onnxplug.host import CPU, Kernels, Library, RuntimeHost, plugin_host
from onnxplug.run.kernels import (
    MISSING_HINT,
    custom_operators,
    lacking_kernels,
    lacks_operator,
    missing_text,
    onnxruntime_module,
    unknown_operators,
)
from onnxplug.run.save import LARGE_MODEL_BYTES, save_model, to_bytes, weight_bytes
from onnxplug.run.weights import check_numbers
from onnxplug.strings import STRING
from onnxplug.text import in_a_line
from onnxplug.warn import warn

_LOGGER = logs.logger("run")

#: Metadata key of the runtime that a model is made for, in its graph's metadata or, without them, in its ``meta``.
TARGET = "onnxplug.target"
#: ONNX Runtime's log level on stderr: errors. Tests set it to 2, warnings (onnxplug.testing.shape_warnings).
LOG_SEVERITY = 3

#: Element types that numpy has no dtype for: they travel as integers of the same width.
_VIEWS = {
    torch.bfloat16: (torch.uint16, ir.DataType.BFLOAT16),
    torch.float8_e4m3fn: (torch.uint8, ir.DataType.FLOAT8E4M3FN),
    torch.float8_e4m3fnuz: (torch.uint8, ir.DataType.FLOAT8E4M3FNUZ),
    torch.float8_e5m2: (torch.uint8, ir.DataType.FLOAT8E5M2),
    torch.float8_e5m2fnuz: (torch.uint8, ir.DataType.FLOAT8E5M2FNUZ),
    torch.float4_e2m1fn_x2: (torch.uint8, ir.DataType.UINT8),
}


def make_session(
    model: str | bytes,
    threads: int | None = None,
    *,
    libraries: Sequence[Library] = (),
    providers: Sequence[Any] = (CPU,),
    options: Any = None,
    **settings: Any,
) -> Any:
    """An ``InferenceSession`` that logs errors only.

    Args:
        model: A file's path, or the model itself.
        threads: Threads within an operator; ONNX Runtime's own choice when ``None``.
        libraries: Libraries of custom operators to load.
        providers: Execution providers; by default only the CPU.
        options: ``SessionOptions`` to use instead of quiet options.
        settings: Additional arguments of ``InferenceSession``.

    Raises:
        PluginError: A library can't be loaded.
    """
    runtime = onnxruntime_module()
    if options is None:
        options = runtime.SessionOptions()
        options.log_severity_level = LOG_SEVERITY
    if threads is not None:
        options.intra_op_num_threads = threads
    for library in libraries:
        try:
            options.register_custom_ops_library(library.path)
        except Exception as error:
            raise PluginError(
                f"ONNX Runtime can't load the library {library}: {error}",
                hint="It must be built for this machine and export RegisterCustomOps; build the package again.",
            ) from error
    try:
        return runtime.InferenceSession(model, options, providers=list(providers), **settings)
    except Exception as error:
        if "Domain already set" not in str(error):
            raise
        raise PluginError(
            f"two libraries implement one domain, and ONNX Runtime loads one: {'; '.join(map(str, libraries))}",
            hint="Leave one plugin out: plugins=[…], or --no-plugin NAME. One given by runtime=[…] replaces a plugin's "
            "where it says what it implements: OrtLibrary(path, domains=[…]). What was registered in the session options by "
            "hand counts too.",
        ) from error


def model_source(model: ir.Model) -> tuple[str | bytes, tempfile.TemporaryDirectory[str] | None]:
    """The source of a session: the model's bytes, or a file in a temporary folder that lives as long as it is referenced.

    Raises:
        WeightsError: A weight has no numbers.
    """
    check_numbers(model.graph.initializers.values(), "the model can't run")
    if weight_bytes(model) <= LARGE_MODEL_BYTES:
        return to_bytes(model), None
    folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    source = str(Path(folder.name) / "model.onnx")
    save_model(model, source, external_data=True)
    return source, folder


class Runner:
    """Runs a model: by ONNX Runtime, or by an evaluator (:mod:`onnxplug.run.reference`) where ONNX Runtime has no kernel.

    A kernel that refuses an element type at run time counts as missing only for portable models (``target=None``): models for ONNX
    Runtime must not need it.

    Args:
        model: The model, or a file's path.
        host: The plugins whose libraries and reference kernels run its custom operators; all installed plugins when
            ``None``.
        reference: Run it by an evaluator in any case.

    Attributes:
        runtime: The runtime in use: ``"onnxruntime"``, or the evaluator's name, such as ``"onnx.reference"``.
        libraries: The libraries of custom operators that were loaded.

    Raises:
        PluginError: A library is missing, does not load, or there are two for a domain.
        VerificationError: ONNX Runtime can't load the model, or nothing runs one of its operators.
    """

    def __init__(self, model: ir.Model | str, host: RuntimeHost | None = None, *, reference: bool = False) -> None:
        self._model = model
        self.runtime = "onnxruntime"
        self._session: Any = None
        self._tempdir: tempfile.TemporaryDirectory[str] | None = None
        self._custom = custom_operators(model)
        self._host = host
        self._portable = (
            not isinstance(model, str)
            and (model.graph.metadata_props.get(TARGET) or model.meta.get(TARGET)) in _PORTABLE
        )
        self._kernels = Kernels()
        if self._custom.domains:
            self._host = host if host is not None else plugin_host()
            self._kernels = self._host.kernels_for(self._custom)
        self.libraries = list(self._kernels.libraries)
        self._source: str | bytes
        if isinstance(model, str):
            self._source = model
        else:
            self._source, self._tempdir = model_source(model)
        if reference:
            self._use_reference(None)
        else:
            self._use_session()

    def _use_session(self) -> None:
        started = time.perf_counter()
        try:
            self._session = make_session(self._source, libraries=self.libraries, providers=self._kernels.providers)
        except OnnxplugError:
            raise
        except Exception as error:
            if not lacks_kernel(error) and not lacks_operator(error):
                raise VerificationError(f"ONNX Runtime can't load the model: {in_a_line(error)}") from error
            self._use_reference(error)
        else:
            _LOGGER.debug(
                "a session of ONNX Runtime: %.3f s, libraries: %s", time.perf_counter() - started, self.libraries
            )

    def _use_reference(self, reason: Exception | None) -> None:
        """Goes on with an evaluator; ``reason`` is why ONNX Runtime does not run the model."""
        from onnxplug.run.reference import make_evaluator

        self._session = None
        host = self._host if self._host is not None else plugin_host()
        try:
            self.runtime, self._reference = make_evaluator(self._source, self._kernels.reference.values(), host)
        except EvaluationError as error:
            raise self._nothing_runs(error, reason, host) from (reason or error)
        _LOGGER.debug("%s runs the model: %s", self.runtime, reason if reason is not None else "it was asked to")
        if reason is not None and lacks_kernel(reason):
            warn(f"{_no_kernel_text(reason)}: {self.runtime} ran the model instead")

    def _nothing_runs(self, error: EvaluationError, reason: Exception | None, host: RuntimeHost) -> VerificationError:
        """The error for a model that no evaluator accepts: with the missing parts of plugins, or else the evaluators' errors."""
        if reason is None:
            return VerificationError(error.message, hint=error.hint)
        if lacks_operator(reason):
            lacking = lacking_kernels(self._custom, self._kernels)
            unknown = [op for op in unknown_operators(reason, self._custom) if op in lacking and op[1] in error.message]
            if unknown:
                return VerificationError(missing_text(self._kernels, host, unknown), hint=MISSING_HINT)
        return VerificationError(
            f"ONNX Runtime does not run the model ({in_a_line(reason)}), and {error.message}", hint=error.hint
        )

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
                results = self._reference.run(None, {name: as_array(value) for name, value in feed.items()})
                return [to_torch(value) for value in results]
            try:
                return run_session(self._session, feed)
            except Exception as error:
                if not self._portable or not _REFUSAL.search(str(error)):
                    raise
                self._use_reference(error)
            return self(feed)
        except EvaluationError as error:
            raise VerificationError(f"the model does not run: {error.message}", hint=error.hint) from error
        except OnnxplugError:
            raise
        except Exception as error:
            raise VerificationError(f"the model does not run: {in_a_line(error)}") from error


#: The runtime in the metadata of models made for no runtime.
_PORTABLE = frozenset({"portable", "portable, exact"})
#: ONNX Runtime's messages about kernels that are registered for an element type, and refuse it when they run.
_REFUSAL = re.compile(r"operator does not support \w+ yet|data type is not supported")
#: The node in the message of an error about a missing kernel.
_LACKING = re.compile(r"Could not find an implementation for .*")


def lacks_kernel(error: Exception) -> bool:
    """Whether ONNX Runtime refused a model because of a missing kernel, not because the model is wrong."""
    return "NOT_IMPLEMENTED" in str(error) or type(error).__name__ == "NotImplemented"


def _no_kernel_text(error: Exception) -> str:
    """The text that ONNX Runtime can't run a model, with the node that it names, without its codes."""
    match = _LACKING.search(str(error))
    return f"ONNX Runtime can't run the model ({match[0] if match else error})"


def run_session(session: Any, feed: Mapping[str, Any]) -> list[Any]:
    """The outputs of a session: tensors, arrays of strings, ``None`` for a sequence or an optional.

    Args:
        session: The session.
        feed: Tensors or Python numbers by the names of inputs.
    """
    strings = {n: as_array(v) for n, v in feed.items() if isinstance(v, torch.Tensor) and v.dtype == STRING}
    values = {name: to_ort_value(value) for name, value in feed.items() if name not in strings}
    if strings:  # there is no OrtValue of strings, and run() gives arrays, which don't exist for bfloat16
        results = session.run(None, {**values, **strings})
        return [to_torch(value) if isinstance(value, np.ndarray) else None for value in results]
    results = session.run_with_ort_values(None, values)
    return [from_ort_value(v) if v.is_tensor() and v.has_value() else None for v in results]


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


def from_ort_value(value: Any) -> Any:
    """A tensor of an OrtValue; an array of strings."""
    element = ir.DataType(value.element_type())
    if element == ir.DataType.STRING:
        return value.numpy()
    dtype = ONNX_TO_TORCH[element]
    if dtype is torch.bfloat16:
        return torch.utils.dlpack.from_dlpack(value._get_c_value()).clone()
    if dtype in _VIEWS:  # numpy and DLPack lack the 8-bit floats
        tensor = torch.empty(value.shape(), dtype=dtype)
        ctypes.memmove(tensor.data_ptr(), value.data_ptr(), tensor.nbytes)
        return tensor
    array = np.array(value.numpy(), copy=True)
    if dtype is torch.uint64:
        array = array.astype(np.uint64)  # it comes as C's unsigned long long, which torch doesn't know
    return torch.from_numpy(array)
