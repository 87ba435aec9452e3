"""Whether ONNX Runtime can verify a model of an opset."""

from __future__ import annotations

import functools

from onnxplug.errors import OnnxplugError
from onnxplug.opsets import MIN_OPSET, max_opset
from onnxplug.run.kernels import onnxruntime_module


@functools.cache
def loads_opset(opset: int) -> bool:
    """Whether the installed ONNX Runtime loads a model of an opset; tried with a model of one node."""
    import onnx
    import onnx.helper

    from onnxplug.run.session import make_session

    value = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])
    out = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["x"], ["y"])], "probe", [value], [out])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)], ir_version=10)
    try:
        make_session(model.SerializeToString())
    except Exception:
        return False
    return True


def newest_loadable_opset() -> int:
    """The newest opset that the installed ONNX Runtime loads; without ONNX Runtime, the newest opset that onnxplug has."""
    try:
        import onnxruntime  # noqa: F401
    except ImportError:
        return max_opset()
    return next((opset for opset in range(max_opset(), MIN_OPSET, -1) if loads_opset(opset)), MIN_OPSET)


def check_verifiable(opset: int) -> None:
    """Checks that ONNX Runtime is installed and loads models of an opset.

    Raises:
        OnnxplugError: It is not installed, or too old.
    """
    runtime = onnxruntime_module()
    if not loads_opset(opset):
        raise OnnxplugError(
            f"verification needs an ONNX Runtime that loads opset {opset}; version {runtime.__version__} is installed, which "
            f"loads opsets up to {newest_loadable_opset()}",
            hint="Install a newer one (pip install -U onnxruntime), or choose an older opset.",
        )
