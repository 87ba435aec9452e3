"""Models read from files to be looked at: nothing in them is run, and weights stay where they are."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import onnx_ir as ir

from onnxplug import logs
from onnxplug.errors import OnnxplugError, UsageError
from onnxplug_tools.onnx_file import as_ir, read_model

_LOGGER = logs.logger("run")
_ZIP, _ORT = b"PK\x03\x04", b"ORTM"
#: How Python's pickles begin, of the protocols that torch writes.
_PICKLES = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_TORCH_SUFFIXES = (".pt", ".pt2", ".pth", ".ckpt")


def load_model(path: str | Path, *, infer: bool = False) -> ir.Model:
    """A model as its file has it; external data is not touched.

    Args:
        infer: Infer the shapes that the file lacks, as far as ONNX's shape inference can.
    """
    path = Path(path)
    check_is_onnx(path)
    try:
        model = as_ir(read_model(path, to_run=False), str(path))
    except UsageError as error:
        raise OnnxplugError(error.message, hint=error.hint) from error
    # with a folder onnx_ir keeps external data within it
    folder = os.path.dirname(os.path.abspath(path))
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        ir.external_data.set_base_dir(graph, folder)
    return _with_shapes(model, path) if infer else model


def check_is_onnx(path: Path) -> None:
    """Checks by a file's first bytes and its name that it may be an ONNX model."""
    if os.path.isdir(path):  # False for a name that the system refuses
        raise UsageError(f"{path} is a folder, not an ONNX file")
    if not os.path.isfile(path):
        raise UsageError(f"there is no file {path}")
    try:
        with open(path, "rb") as file:
            start = file.read(8)
    except OSError as error:
        raise OnnxplugError(f"{path} can't be read: {error}") from error
    if start[:4] == _ZIP or start[:2] in _PICKLES or path.suffix.lower() in _TORCH_SUFFIXES:
        raise UsageError(
            f"{path} is a file of PyTorch, which holds pickled Python: code that runs when it is loaded. It is not opened",
            hint="Export it first, where you trust it: onnxplug export FILE.pt2 -o model.onnx",
        )
    if start[4:] == _ORT:
        raise UsageError(
            f"{path} is a model in ONNX Runtime's own format (.ort), not an ONNX file",
            hint="Give the ONNX file that it was made from.",
        )


def check_to_run(path: str | Path) -> None:
    """Checks a model that is to be run, and the places of its external data."""
    try:
        read_model(path)
    except UsageError as error:
        raise OnnxplugError(error.message, hint=error.hint) from error


def _with_shapes(model: ir.Model, path: Path) -> ir.Model:
    if all(value.shape is not None for node in model.graph.all_nodes() for value in node.outputs if value.name):
        return model
    from onnx_ir.passes.common import ShapeInferencePass

    log = logging.getLogger("onnx_ir")
    level = log.level
    log.setLevel(logging.CRITICAL)  # it logs a traceback for each shape that it can't infer
    try:
        return ShapeInferencePass(check_type=False, strict_mode=False, data_prop=True)(model).model
    except Exception as error:  # the model stays as the file has it: unknown shapes stay unknown
        _LOGGER.debug("shape inference of %s: %s", path, error)
        return model
    finally:
        log.setLevel(level)
