"""The table of ONNX Runtime's CPU kernels agrees with the installed ONNX Runtime."""

from __future__ import annotations

import onnx
import onnx.helper as oh
import onnxruntime
import pytest
from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as NotImplemented_

from onnxplug.build.kernels import LETTERS, Kernels
from onnxplug.build.spec import onnx_spec
from onnxplug.plugins.kernels import installed_kernels
from onnxplug.plugins.onnxruntime_cpu import KERNELS, VERSION

#: Operators of one type variable T, with as many inputs of one shape.
SAMPLE = {"Add": 2, "Relu": 1, "MatMul": 2, "Softmax": 1, "Transpose": 1, "Neg": 1, "Max": 2, "Tanh": 1, "Mod": 2}
#: float16 is left out: ONNX Runtime itself computes operators without such a kernel in float32.
TYPES = {"float": 1, "double": 11, "bfloat16": 16, "int8": 3, "int16": 5, "uint8": 2, "int32": 6, "int64": 7}


def test_the_table_agrees_with_the_installed_version() -> None:
    if onnxruntime.__version__ != VERSION:
        pytest.skip(f"the table is of ONNX Runtime {VERSION}: python -m onnxplug.plugins.kernels writes it anew")
    assert installed_kernels() == KERNELS


@pytest.mark.parametrize("op_type", SAMPLE)
@pytest.mark.parametrize("opset", [13, 21])
def test_a_sample_of_it_loads_or_not(op_type: str, opset: int) -> None:
    """Each operator in a model by itself: it loads exactly where the table has a kernel."""
    spec = onnx_spec(op_type, opset)
    results, expected = {}, {}
    for name, number in TYPES.items():
        dtype = next(d for d in LETTERS.values() if d.name.lower() == name)
        names = [f"x{i}" for i in range(SAMPLE[op_type])]
        options = {"fmod": 1} if op_type == "Mod" and name in ("float", "double", "bfloat16") else {}
        graph = oh.make_graph(
            [oh.make_node(op_type, names, ["y"], **options)],
            "one",
            [oh.make_tensor_value_info(n, number, [2, 2]) for n in names],
            [oh.make_tensor_value_info("y", number, [2, 2])],
        )
        model = oh.make_model(graph, opset_imports=[oh.make_opsetid("", opset)], ir_version=8)
        try:
            onnx.checker.check_model(model, full_check=True)
        except Exception:
            continue  # the schema excludes the type
        try:
            onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
            results[name] = True
        except NotImplemented_:
            results[name] = False
        expected[name] = Kernels(KERNELS).takes(spec, {"T": dtype})
    assert results == expected
    assert results["float"]
