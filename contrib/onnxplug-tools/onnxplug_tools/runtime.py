"""``onnxplug.runtime``: runs models with custom operators by ONNX Runtime, outside of onnxplug.

A model whose operators come from plugins needs the plugins' libraries in its session; :func:`inference_session` puts them
in, and :func:`custom_op_libraries` names them for a program that makes its own session (in C++, on another machine).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnxplug.errors import OnnxplugError, PluginError, UsageError
from onnxplug.kinds import check_lists
from onnxplug.text import type_with_article

if TYPE_CHECKING:
    from onnxplug.host import CustomOperators, Kernels, RuntimeHost

__all__ = ["custom_op_libraries", "inference_session"]


def inference_session(
    model: Any,
    *,
    plugins: Sequence[str] | None = None,
    runtime: Iterable[Any] = (),
    providers: Sequence[Any] | None = None,
    session_options: Any = None,
    **settings: Any,
) -> Any:
    """An ``onnxruntime.InferenceSession`` with the libraries that the model's operators need.

    Args:
        model: A file's path, the serialised model, an ``onnx.ModelProto``, an ``onnx_ir.Model`` or an ``OnnxProgram``.
        plugins: Names of the plugins whose libraries to load. ``None``: the plugins with which an ``OnnxProgram`` was
            exported, all installed plugins for any other model.
        runtime: ``OrtLibrary`` objects of this call; they go before the plugins'.
        providers: Execution providers as ``InferenceSession`` takes them. ``None``: the CPU's, and the providers that
            a library needs.
        session_options: ``onnxruntime.SessionOptions``; the libraries are registered in them.
        settings: Further arguments of ``InferenceSession``.

    Returns:
        The session.

    Raises:
        PluginError: A library is missing, does not load, needs another provider, or there are two for one domain; or no
            plugin has an operator's kernel.
        UsageError: ``model`` is no model, there is no such file, ``runtime`` holds another object, or ``providers`` is no list.
        OnnxplugError: ONNX Runtime is not installed, or can't load the model.
    """
    from onnxplug.run.session import make_session

    if providers is not None:
        check_lists(providers=providers)
    source, folder, ir_model = _source(model)
    names = [p[0] if isinstance(p, tuple) else p for p in providers] if providers is not None else None
    custom, kernels, host = _kernels(model, ir_model, plugins, runtime, names)
    try:
        return make_session(
            source,
            libraries=kernels.libraries,
            providers=list(providers) if providers is not None else kernels.providers,
            options=session_options,
            **settings,
        )
    except OnnxplugError:
        raise
    except Exception as error:
        lacking = no_library_error(error, custom, kernels, host)
        raise lacking or OnnxplugError(f"ONNX Runtime can't load the model: {error}") from error
    finally:
        if folder is not None:
            folder.cleanup()


def no_library_error(
    error: Exception, custom: CustomOperators, kernels: Kernels, host: RuntimeHost | None
) -> PluginError | None:
    """The error for a session that lacks custom operators' libraries; ``None`` where ``error`` has another cause.

    Args:
        host: The plugins that could supply libraries; ``None`` where they are not known.
    """
    from onnxplug.run.kernels import MISSING_HINT, lacks_operator, missing_text, unknown_operators

    if host is None or not lacks_operator(error):
        return None
    text = missing_text(kernels, host, unknown_operators(error, custom), reference=False)
    return PluginError(text, hint=MISSING_HINT)


def custom_op_libraries(model: Any, *, plugins: Sequence[str] | None = None) -> list[str]:
    """Paths of the libraries that a session must register to run a model.

    Args:
        model: As :func:`inference_session` takes it.
        plugins: As :func:`inference_session` takes it.

    Raises:
        PluginError: A library is missing, or there are two for one domain.
        UsageError: ``model`` is no model, or there is no such file.
    """
    ir_model = _structure(model)
    return [library.path for library in _kernels(model, ir_model, plugins)[1].libraries]


def _kernels(
    model: Any,
    ir_model: Any,
    plugins: Sequence[str] | None,
    runtime: Iterable[Any] = (),
    providers: Sequence[str] | None = None,
) -> tuple[Any, Kernels, Any]:
    from onnxplug.host import CPU, Kernels, plugin_host
    from onnxplug.plugins.runtime import CallHost, kernels_for
    from onnxplug.run.kernels import checked_items, custom_operators

    items = checked_items(runtime)
    custom = custom_operators(ir_model)
    if not custom.domains:
        return custom, Kernels(providers=list(providers) if providers is not None else [CPU]), None
    host = getattr(model, "host", None) if plugins is None else None
    if host is None:
        host = plugin_host(plugins)
    if items:
        host = CallHost(host, items)
    return custom, kernels_for(custom, host, providers), host


def _structure(model: Any) -> Any:
    """The source that operators are read from: an ``onnx_ir.Model``, or the path or bytes of a model."""
    import onnx
    import onnx_ir as ir

    from onnxplug.program import OnnxProgram
    from onnxplug.run.kernels import is_ort_format
    from onnxplug_tools.onnx_file import as_ir, parse_model, read_model

    if isinstance(model, OnnxProgram):
        return model.model
    if isinstance(model, bytes) and not is_ort_format(model):
        parse_model(model)
    if isinstance(model, ir.Model | bytes):
        return model
    if isinstance(model, onnx.ModelProto):
        return as_ir(model, "the model")
    if not isinstance(model, str | os.PathLike):
        raise UsageError(
            f"{type_with_article(model)} is not an ONNX model", hint="Give a path, a ModelProto or an OnnxProgram."
        )
    path = os.fsdecode(model)
    if not Path(path).is_file():
        raise UsageError(f"there is no file {path}")
    if not path.endswith(".ort"):  # ONNX Runtime's own format
        read_model(path)
    return path


def _source(model: Any) -> tuple[str | bytes, Any, Any]:
    """The source of the session, its folder if that is temporary, and the source from which operators are read."""
    import onnx_ir as ir

    from onnxplug.run.session import model_source

    structure = _structure(model)
    if isinstance(structure, ir.Model):
        return (*model_source(structure), structure)
    return structure, None, structure
