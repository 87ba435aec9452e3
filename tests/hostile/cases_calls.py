"""Bad arguments of every public function."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
import torch

import onnxplug
from tests.hostile import models
from tests.hostile.arguments import MERE_NAMES, Model, an_input, bad_arguments, closed_file, raising
from tests.hostile.case import Case, call

ANY = ("OnnxplugError",)


def _to_onnx(name: str, make: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> Any:
        arguments: dict[str, Any] = {"model": Model().eval(), "args": (an_input(),)}
        if name == "examples":
            del arguments["args"]
        arguments[name] = make()
        return onnxplug.to_onnx(**arguments)

    return run


def _exports() -> list[Case]:
    results = []
    for name, values in bad_arguments().items():
        for kind, make in values.items():
            lenient = name in (
                "model",
                "args",
                "kwargs",
                "rules",
                "dynamic_shapes",
                "examples",
                "f",
                "plugins",
                "report",
                "opset_version",
            )
            expected: tuple[str, ...] = ANY if lenient else ("UsageError",)
            if name == "dynamic_shapes" and kind in MERE_NAMES:
                expected = ("OnnxplugError", "")
            results.append(call(f"to_onnx/{name}-{kind}", _to_onnx(name, make), expected))
    return results


def _torch_like() -> list[Case]:
    """Bad arguments of ``export``, which has torch's own signature."""
    values: dict[str, Mapping[str, Callable[[], Any]]] = {
        "model": {"none": lambda: None, "text": lambda: "x"},
        "args": {"number": lambda: 3, "too-many": lambda: (an_input(),) * 4, "wrong-shape": lambda: (an_input(3, 5),)},
        "f": {"number": lambda: 3, "folder": lambda: ".", "missing-folder": lambda: "no/x.onnx"},
        "kwargs": {"list": lambda: [1], "unknown": lambda: {"zzz": an_input()}},
        "input_names": {"text": lambda: "x", "twice": lambda: ["a", "a"]},
        "output_names": {"numbers": lambda: [1]},
        "opset_version": {"text": lambda: "x", "float": lambda: 1.5},
        "dynamic_axes": {
            "number": lambda: 3,
            "axis": lambda: {"x": [9]},
            "text": lambda: {"x": "batch"},
            "float": lambda: {"x": {0.5: "b"}},
        },
        "dynamic_shapes": {"number": lambda: 3, "unknown": lambda: {"zzz": {0: "b"}}},
        "custom_translation_table": {"number": lambda: 3},
        "custom_opsets": {"number": lambda: 3, "text": lambda: {"com.x": "y"}},
        "artifacts_dir": {"number": lambda: 3},
        "training": {"text": lambda: "train"},
    }

    def run(name: str, make: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: onnxplug.export(**{"model": Model().eval(), "args": (an_input(),), name: make()})

    return [
        call(f"export/{name}-{kind}", run(name, make), ANY)
        for name, table in values.items()
        for kind, make in table.items()
    ]


@cache
def _program() -> onnxplug.OnnxProgram:
    return onnxplug.to_onnx(Model().eval(), (an_input(),), dynamic_shapes=({0: "batch"},))


def _methods() -> list[Case]:
    saves: dict[str, dict[str, Any]] = {
        "none": {"destination": None},
        "number": {"destination": 3},
        "list": {"destination": ["x"]},
        "empty": {"destination": ""},
        "folder": {"destination": "."},
        "missing-folder": {"destination": "no/x.onnx"},
        "null-character": {"destination": "\0"},
        "text-file": {"destination": io.StringIO()},
        "closed-file": {"destination": closed_file()},
        "object-external": {"destination": io.BytesIO(), "external_data": True},
        "object-shard": {"destination": io.BytesIO(), "shard": "1GB"},
        "external-data-text": {"external_data": "yes"},
        "include-text": {"include_initializers": "no"},
        "keep-text": {"keep_initializers_as_inputs": "no"},
        "weights-number": {"weights": 3},
        "weights-empty-list": {"weights": []},
        "weights-list-of-numbers": {"weights": [1]},
        "weights-shape": {"weights": {"linear.weight": an_input(9, 9)}},
        "weights-text": {"weights": {"linear.weight": "x"}},
        "weights-dtype": {"weights": {"linear.weight": torch.ones(2, 4, dtype=torch.bool)}},
        "weights-complex": {"weights": {"linear.weight": torch.ones(2, 4, dtype=torch.complex64)}},
        "weights-number-as-name": {"weights": {1: an_input()}},
        "weights-strict": {"weights": {"linear.weight": an_input(2, 4)}, "strict": True},
        "weights-sparse": {"weights": {"linear.weight": an_input(2, 4).to_sparse()}},
        "weights-meta": {"weights": {"linear.weight": torch.empty(2, 4, device="meta")}},
        "weights-missing-file": {"weights": "no.safetensors"},
        "weights-folder": {"weights": "."},
        "strict-alone": {"strict": True},
        "strict-text": {"weights": {}, "strict": "yes"},
        "shard-text": {"shard": "x"},
        "shard-zero": {"shard": 0},
        "shard-negative": {"shard": -1},
        "shard-float": {"shard": 1.5},
        "shard-bool": {"shard": True},
        "shard-infinite": {"shard": float("inf")},
        "shard-list": {"shard": [1]},
        "shard-single": {"shard": "1GB", "external_data": False},
        "shard-without-weights": {"shard": "1GB", "include_initializers": False},
        "external-zip": {"external": "zip"},
        "external-bool": {"external": True},
        "external-nothing": {"external": "safetensors"},
        "progress": {"progress": 3},
    }

    def save(options: dict[str, Any]) -> Callable[[], Any]:
        return lambda: _program().save(**{"destination": "o.onnx", **options})

    verifies: dict[str, dict[str, Any]] = {
        "args-number": {"args": 3},
        "args-too-many": {"args": (an_input(),) * 3},
        "args-features": {"args": (an_input(3, 5),)},
        "args-dtype": {"args": (an_input().long(),)},
        "args-text": {"args": ("x",)},
        "kwargs-unknown": {"args": (an_input(),), "kwargs": {"zzz": an_input()}},
        "kwargs-list": {"args": (an_input(),), "kwargs": [1]},
        "rtol-text": {"rtol": "x"},
        "rtol-negative": {"rtol": -1.0},
        "rtol-nan": {"rtol": float("nan")},
        "atol-negative": {"atol": -1.0},
        "atol-text": {"atol": "x"},
        "seeds-number": {"seeds": 3},
        "seeds-text": {"seeds": ["a"]},
        "seed-text": {"seed": "x"},
        "seed-float": {"seed": 1.5},
    }

    def verify(options: dict[str, Any]) -> Callable[[], Any]:
        return lambda: _program().verify(**options)

    calls: dict[str, tuple[Any, ...]] = {
        "nothing": (),
        "too-many": (an_input(), an_input()),
        "rank": (an_input(4),),
        "features": (an_input(3, 5),),
        "dtype": (an_input().double(),),
        "array": (np.ones((3, 4), np.float32),),
        "none": (None,),
        "text": ("x",),
        "sparse": (an_input().to_sparse(),),
        "meta": (torch.empty(3, 4, device="meta"),),
    }

    def run(inputs: tuple[Any, ...], reference: bool) -> Callable[[], Any]:
        return lambda: (_program().call_reference if reference else _program())(*inputs)

    results = [call(f"save/{name}", save(options), ANY) for name, options in saves.items()]
    results += [call(f"program-verify/{name}", verify(options), ANY) for name, options in verifies.items()]
    for name, inputs in calls.items():
        results += [
            call(f"call/{name}", run(inputs, False), ANY),
            call(f"call-reference/{name}", run(inputs, True), ANY),
        ]
    results.append(call("call/keyword", lambda: _program()(zzz=an_input()), ANY))
    return results


def _others() -> list[Case]:
    """Everything else that is public: rules, plugins' objects, the evaluator, options of backends, helpers of tests."""

    def evaluator(*args: Any, **options: Any) -> Callable[[], Any]:
        def run() -> Any:
            from onnxplug_reference import ExtendedReferenceEvaluator

            return ExtendedReferenceEvaluator(*args, **options)

        return run

    def evaluated(feeds: Any, names: Any = None) -> Callable[[], Any]:
        def run() -> Any:
            from onnxplug_reference import ExtendedReferenceEvaluator

            return ExtendedReferenceEvaluator(models.good()).run(names, feeds)

        return run

    def options(**arguments: Any) -> Callable[[], Any]:
        def run() -> Any:
            from onnxplug_compile.options import parse_options

            return parse_options(arguments)

        return run

    def compat(name: str, *args: Any) -> Callable[[], Any]:
        def run() -> Any:
            import onnxplug.compat

            result = getattr(onnxplug.compat, name)(*args)
            if hasattr(result, "__enter__"):
                with result:
                    pass
            return result

        return run

    def graph(text: Any) -> Callable[[], Any]:
        def run() -> Any:
            from onnxplug.testing import expect_graph

            return expect_graph(_program(), text)

        return run

    good = {"x": np.ones((3, 4), np.float32), "y": np.ones((3, 2), np.float32)}
    tables: dict[str, dict[str, Callable[[], Any]]] = {
        "rule": {
            "empty": lambda: onnxplug.Rule("", raising),
            "number": lambda: onnxplug.Rule(3, raising),  # type: ignore[arg-type]
            "no-converter": lambda: onnxplug.Rule("aten::relu", 3),  # type: ignore[arg-type]
            "converter-none": lambda: onnxplug.Rule("aten::relu", None),  # type: ignore[arg-type]
            "opset-turned": lambda: onnxplug.Rule("aten::relu", raising, opset=(20, 13)),
            "opset-text": lambda: onnxplug.Rule("aten::relu", raising, opset="x"),  # type: ignore[arg-type]
            "opset-triple": lambda: onnxplug.Rule("aten::relu", raising, opset=(1, 2, 3)),  # type: ignore[arg-type]
            "when-number": lambda: onnxplug.Rule("aten::relu", raising, when=3),  # type: ignore[arg-type]
            "priority-text": lambda: onnxplug.Rule("aten::relu", raising, priority="x"),  # type: ignore[arg-type]
            "domains-number": lambda: onnxplug.Rule("aten::relu", raising, domains=3),  # type: ignore[arg-type]
        },
        "objects": {
            "domain-empty": lambda: onnxplug.Domain("", 1),
            "domain-zero": lambda: onnxplug.Domain("com.acme", 0),
            "domain-text": lambda: onnxplug.Domain("com.acme", "1"),  # type: ignore[arg-type]
            "library-number": lambda: onnxplug.OrtLibrary(3),  # type: ignore[arg-type]
            "library-none": lambda: onnxplug.OrtLibrary(None),  # type: ignore[arg-type]
            "reference-number": lambda: onnxplug.ReferenceOp(3),  # type: ignore[arg-type]
            "functions-number": lambda: onnxplug.Functions(3),  # type: ignore[arg-type]
            "functions-domain": lambda: onnxplug.Functions(None, ""),
            "functions-domain-onnx": lambda: onnxplug.Functions(None, "ai.onnx"),
            "metadata-level": lambda: onnxplug.Metadata("all"),
            "metadata-number": lambda: onnxplug.Metadata(3),  # type: ignore[arg-type]
        },
        "evaluator": {
            "none": evaluator(None),
            "number": evaluator(3),
            "empty": evaluator(""),
            "missing": evaluator("no.onnx"),
            "folder": evaluator("."),
            "device": evaluator("/dev/zero"),
            "null-character": evaluator("\0"),
            "bytes": evaluator(b"\x00\x01"),
            "no-bytes": evaluator(b""),
            "graph": evaluator(models.good().graph),
            "shape-annotations": evaluator(models.good(), check_shape_annotations=True),
            "new-ops": evaluator(models.good(), new_ops=[3]),
            "kernels": evaluator(models.good(), kernels=[3]),
            "functions": evaluator(models.good(), functions=[3]),
            "feeds-number": evaluated(3),
            "feeds-empty": evaluated({}),
            "feeds-missing": evaluated({"x": good["x"]}),
            "feeds-unknown": evaluated({**good, "zzz": good["x"]}),
            "feeds-dtype": evaluated({**good, "x": good["x"].astype(np.int64)}),
            "feeds-rank": evaluated({**good, "x": good["x"][0]}),
            "feeds-size": evaluated({**good, "x": np.ones((3, 5), np.float32)}),
            "feeds-text": evaluated({**good, "x": "text"}),
            "feeds-none": evaluated({**good, "x": None}),
            "feeds-objects": evaluated({**good, "x": np.array([object()])}),
            "feeds-ragged": evaluated({**good, "x": [[1.0], [1.0, 2.0]]}),
            "outputs-unknown": evaluated(good, ["nobody"]),
            "outputs-number": evaluated(good, 3),
        },
        "backend": {
            "unknown": options(fast=True),
            "exact": options(exact="yes"),
            "optimize": options(optimize=1),
            "fallback": options(fallback=None),
            "rewrites": options(rewrites=["x"]),
            "prefer": options(prefer=3),
            "rules": options(rules="x"),
            "transforms": options(transforms=3),
            "transforms-numbers": options(transforms=[3]),
            "providers": options(providers="CPUExecutionProvider"),
            "providers-unknown": options(providers=["NobodyExecutionProvider"]),
            "providers-number": options(providers=[3]),
            "providers-empty": options(providers=[()]),
            "providers-pair": options(providers=[("CPUExecutionProvider", 3)]),
            "runtime": options(runtime=3),
            "store": options(store=[]),
            "cache": options(cache=3),
            "dump-number": options(dump=3),
            "dump-device": options(dump="/dev/null/x"),
            "optimization": options(optimization="most"),
            "threads": options(threads=0),
            "threads-text": options(threads="two"),
            "opset": options(opset="x"),
            "target": options(target=3),
            "plugins": options(plugins=3),
        },
        "compat": {
            "autograd": compat("autograd_function", 3),
            "autograd-class": compat("autograd_function", int),
            "keep": compat("keep_autograd_functions", 3),
            "symbolic": compat("symbolic", 3),
            "onnxscript": compat("onnxscript_function", 3),
            "body": compat("function_body", 3),
            "table": compat("table_rules", 3),
            "table-of-numbers": compat("table_rules", {1: 2}),
        },
        "diagnose": {
            "limit-text": lambda: onnxplug.diagnose(Model(), (an_input(),), limit="x"),  # type: ignore[arg-type]
            "limit-negative": lambda: onnxplug.diagnose(Model(), (an_input(),), limit=-1),
            "args-number": lambda: onnxplug.diagnose(Model(), 3),
            "file": lambda: onnxplug.diagnose(Model(), (an_input(),), f="x.onnx"),
            "unknown": lambda: onnxplug.diagnose(Model(), (an_input(),), fast=True),
            "opset": lambda: onnxplug.diagnose(Model(), (an_input(),), opset_version=99),
            "model": lambda: onnxplug.diagnose(3, (an_input(),)),
            "progress": lambda: onnxplug.diagnose(Model(), (an_input(),), progress=3),  # type: ignore[arg-type]
        },
        "bisect": {
            "model": lambda: onnxplug.bisect(3, (an_input(),)),
            "args-number": lambda: onnxplug.bisect(Model().eval(), 3),
            "output-number": lambda: onnxplug.bisect(Model().eval(), (an_input(),), output=3),
            "output-device": lambda: onnxplug.bisect(Model().eval(), (an_input(),), output="/dev/null/x"),
            "seeds": lambda: onnxplug.bisect(Model().eval(), (an_input(),), seeds="x"),
            "unknown": lambda: onnxplug.bisect(Model().eval(), (an_input(),), fast=True),
            "opset": lambda: onnxplug.bisect(Model().eval(), (an_input(),), opset_version=99),
        },
        "testing": {
            "graph-empty": graph("("),
            "graph-number": graph(3),
        },
        "install": {
            "unknown": lambda: _entered(onnxplug.as_torch_onnx(fast=True)),  # type: ignore[call-arg]
            "target": lambda: _entered(onnxplug.as_torch_onnx(target=3)),  # type: ignore[typeddict-item]
        },
    }
    return [
        call(f"{group}/{name}", function, ("OnnxplugError",))
        for group, table in tables.items()
        for name, function in table.items()
    ]


def _entered(context: Any) -> None:
    with context:
        torch.onnx.export(Model().eval(), (an_input(),), io.BytesIO())


CASES = [*_exports(), *_torch_like(), *_methods(), *_others()]
