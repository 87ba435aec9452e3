"""Gives files to one consumer.

``consumers.py`` starts this as a process of its own, with the consumer's packages on the path:

A line of the standard input is a file as JSON, a line of the standard output is its outcome: ``{"figure": 12}``, or
``{"error": "…"}``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

onnxruntime.set_default_logger_severity(4)
File = dict[str, Any]


def feed_of(file: File) -> dict[str, np.ndarray]:
    """The inputs that lie beside a file."""
    with np.load(file["feed"]) as stored:
        return {name: stored[name] for name in stored.files}


def runs(path: Path | str, file: File) -> None:
    """Loads a model and runs it once on the file's sample; all its results must be finite.

    Raises:
        ValueError: A result isn't finite.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    feed = feed_of(file)
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    taken = {
        x.name: feed[x.name].astype(np.float16) if x.type == "tensor(float16)" else feed[x.name]
        for x in session.get_inputs()
    }
    for meta, result in zip(session.get_outputs(), session.run(None, taken), strict=True):
        if result.dtype.kind == "f" and not np.isfinite(result).all():
            raise ValueError(f"{meta.name} isn't finite")


def count(path: Path | str, *kinds: str) -> int:
    """The number of a model's nodes of some kinds, nodes of subgraphs included."""
    found = Counter(node.op_type for node in _nodes(onnx.load(path, load_external_data=False).graph))
    return sum(found[kind] for kind in kinds)


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from _nodes(inner)


class Reader:
    """Calibration data: the file's own sample, once."""

    def __init__(self, file: File) -> None:
        self._left = [feed_of(file)]

    def get_next(self) -> dict[str, np.ndarray] | None:
        """The next sample; ``None`` when there are no more."""
        return self._left.pop() if self._left else None

    def rewind(self) -> None:
        """Does nothing: the sample is read once."""


def quantize_dynamic(file: File, out: Path) -> int:
    """The number of integer products after dynamic quantisation."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(file["path"], out, weight_type=QuantType.QUInt8)
    runs(out, file)
    return count(out, "MatMulInteger", "ConvInteger")


def quantize_static(file: File, out: Path) -> int:
    """The number of QuantizeLinear and DequantizeLinear after static quantisation."""
    from onnxruntime.quantization import quantize_static

    quantize_static(file["path"], out, Reader(file))
    runs(out, file)
    return count(out, "QuantizeLinear", "DequantizeLinear")


def qnn(file: File, out: Path) -> int:
    """The number of QuantizeLinear and DequantizeLinear after QNN's preprocessing and quantisation."""
    from onnxruntime.quantization import quantize
    from onnxruntime.quantization.execution_providers.qnn import get_qnn_qdq_config, qnn_preprocess_model

    path = out.with_suffix(".before.onnx")
    source = path if qnn_preprocess_model(file["path"], path) else file["path"]
    quantize(str(source), str(out), get_qnn_qdq_config(str(source), Reader(file)))
    runs(out, file)
    return count(out, "QuantizeLinear", "DequantizeLinear")


def four_bits(file: File, out: Path) -> int:
    """The number of products by weights of 4 bits after quantisation."""
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    quantizer = MatMulNBitsQuantizer(onnx.load(file["path"]), block_size=32)
    quantizer.process()
    quantizer.model.save_model_to_file(str(out))
    runs(out, file)
    return count(out, "MatMulNBits")


def transformers_optimizer(file: File, out: Path) -> int:
    """The number of fused operators after ONNX Runtime's optimizer of transformers."""
    from onnxruntime.transformers.optimizer import optimize_model

    model = optimize_model(file["path"], **file["optimizer"])
    model.save_model_to_file(str(out))
    runs(out, file)
    return sum(model.get_fused_operator_statistics().values())


def float16(file: File, out: Path) -> int:
    """Converts to float16, inputs and outputs included."""
    from onnxconverter_common import float16

    onnx.save(float16.convert_float_to_float16(onnx.load(file["path"])), out)
    runs(out, file)
    return 1


def symbolic_shapes(file: File, out: Path) -> int:
    """The number of values whose shapes symbolic inference finds."""
    from onnxruntime.tools.symbolic_shape_infer import SymbolicShapeInference

    # The exporter's own shapes are no inference.
    model = onnx.load(file["path"])
    model.graph.ClearField("value_info")
    made = SymbolicShapeInference.infer_shapes(model, auto_merge=False, guess_output_rank=False)
    onnx.save(made, out)
    runs(out, file)
    return sum(1 for value in made.graph.value_info if value.type.tensor_type.HasField("shape"))


def fixed_shapes(file: File, out: Path) -> int:
    """Fixes the inputs to the sizes of the sample."""
    from onnxruntime.tools.onnx_model_utils import fix_output_shapes, make_input_shape_fixed

    model, feed = onnx.load(file["path"]), feed_of(file)
    for value in model.graph.input:
        make_input_shape_fixed(model.graph, value.name, list(feed[value.name].shape))
    fix_output_shapes(model)
    onnx.save(model, out)
    runs(out, file)
    return 1


def extract_model(file: File, out: Path) -> int:
    """Extracts about the first half of the nodes."""
    model = onnx.load(file["path"], load_external_data=False)
    typed = {value.name for value in model.graph.value_info}
    results = [name for node in model.graph.node for name in node.output if name in typed]
    inputs = [value.name for value in model.graph.input]
    onnx.utils.extract_model(file["path"], str(out), inputs, [results[len(results) // 2]])
    runs(out, file)
    return 1


def ort_format(file: File, out: Path) -> int:
    """Converts to ONNX Runtime's own format."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(out.with_suffix(".ort"))
    options.add_session_config_entry("session.save_model_format", "ORT")
    onnxruntime.InferenceSession(file["path"], options, providers=["CPUExecutionProvider"])
    runs(out.with_suffix(".ort"), file)
    return 1


def mobile(file: File, out: Path) -> int:
    """The checker's advice for NNAPI and the two forms of CoreML models, with sizes fixed: 2 for yes, 1 for perhaps."""
    from onnxruntime.tools.mobile_helpers.usability_checker import check_coreml_partitions, check_nnapi_partitions
    from onnxruntime.tools.onnx_model_utils import ModelProtoWithShapeInfo, optimize_model

    optimize_model(Path(file["path"]), out)
    model = ModelProtoWithShapeInfo(out).model_with_shape_info
    kinds = ("neuralnetwork", "mlprogram")
    found = [check_coreml_partitions(model, False, f"coreml_supported_{kind}_ops.md") for kind in kinds]
    return sum(int(checked.suitability()) for checked in (check_nnapi_partitions(model, False), *found))


def onnxslim(file: File, out: Path) -> int:
    """Simplifies."""
    import onnxslim

    onnx.save(onnxslim.slim(onnx.load(file["path"])), out)
    runs(out, file)
    return 1


def onnxsim(file: File, out: Path) -> int:
    """Simplifies."""
    import onnxsim

    onnx.save(onnxsim.simplify(onnx.load(file["path"]))[0], out)
    runs(out, file)
    return 1


def polygraphy(file: File, out: Path) -> int:
    """Folds constants."""
    from polygraphy.backend.onnx import fold_constants

    onnx.save(fold_constants(onnx.load(file["path"]), error_ok=False), out)
    runs(out, file)
    return 1


def openvino(file: File, out: Path) -> int:
    """Compares OpenVINO's results with ONNX Runtime's."""
    import openvino

    compiled = openvino.Core().compile_model(file["path"], "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    feed = feed_of(file)
    results = compiled({port.any_name: feed[port.any_name] for port in compiled.inputs})
    return _same([results[i] for i in range(len(results))], file)


def web_in_node(file: File, out: Path) -> int:
    """Compares the results of onnxruntime-web's wasm in Node with ONNX Runtime's."""
    script = Path(__file__).with_name("web.mjs")
    command = ["node", script, _modules(), _for_the_web(file, out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(done.stderr[-400:])
    return _same(json.loads(done.stdout), file)


def web_in_chromium(file: File, out: Path) -> int:
    """Compares the results of onnxruntime-web's wasm in a browser without a window with ONNX Runtime's."""
    from tests.support.browser import browser
    from tests.support.served import served

    html = """<!doctype html><script type="module">
        import * as ort from "/modules/onnxruntime-web/dist/ort.wasm.min.mjs";
        import { results } from "/here/web.mjs";
        ort.env.wasm.wasmPaths = "/modules/onnxruntime-web/dist/";
        const read = async (name) => new Uint8Array(await (await fetch(`/model/${name}`)).arrayBuffer());
        window.found = () => results(ort, read);
        </script>"""
    folders = {"modules": _modules(), "here": Path(__file__).parent, "model": _for_the_web(file, out)}
    with served(html, **folders) as address, browser() as page:
        page.navigate(address)
        return _same(json.loads(page.run("found()", timeout=900)), file)


def _modules() -> Path:
    return Path(sys.argv[2]).resolve() / "node_modules"


def _for_the_web(file: File, out: Path) -> Path:
    """A folder with the model, and its inputs as bytes."""
    folder = out.parent / "web"
    folder.mkdir()
    shutil.copy(file["path"], folder / "model.onnx")
    about = []
    for number, (name, array) in enumerate(_feed_of_model(file).items()):
        (folder / f"{number}.bin").write_bytes(array.tobytes())
        about.append({"name": name, "type": array.dtype.name, "dims": array.shape, "file": f"{number}.bin"})
    (folder / "feed.json").write_text(json.dumps(about))
    return folder


def _feed_of_model(file: File) -> dict[str, np.ndarray]:
    feed = feed_of(file)
    return {value.name: feed[value.name] for value in onnx.load(file["path"], load_external_data=False).graph.input}


def _same(results: Any, file: File) -> int:
    """1 where a runtime's results are ONNX Runtime's own.

    Raises:
        AssertionError: They differ.
    """
    session = onnxruntime.InferenceSession(file["path"], providers=["CPUExecutionProvider"])
    for result, value in zip(results, session.run(None, _feed_of_model(file)), strict=True):
        found = np.asarray(result, np.float64).reshape(value.shape)
        np.testing.assert_allclose(found, value, rtol=1e-2, atol=1e-3 * max(1.0, float(np.abs(value).max())))
    return 1


CONSUMERS: dict[str, Callable[[File, Path], int]] = {
    function.__name__: function
    for function in (
        quantize_dynamic,
        quantize_static,
        qnn,
        four_bits,
        transformers_optimizer,
        float16,
        symbolic_shapes,
        fixed_shapes,
        extract_model,
        ort_format,
        mobile,
        onnxslim,
        onnxsim,
        polygraphy,
        openvino,
        web_in_node,
        web_in_chromium,
    )
}


def main() -> None:
    """Gives files to the consumer until the input ends."""
    consume = CONSUMERS[sys.argv[1]]
    # Consumers print: their text goes to the standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        with tempfile.TemporaryDirectory() as folder:
            try:
                answer: dict[str, Any] = {"figure": consume(json.loads(line), Path(folder) / "model.onnx")}
            except (Exception, SystemExit) as error:
                answer = {"error": f"{type(error).__name__}: {error}"[:400]}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
