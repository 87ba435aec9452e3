"""Values that the arguments of ``to_onnx`` can't have."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import onnxplug

DEEP = 3000


def an_input(*shape: int) -> torch.Tensor:
    return torch.ones(*(shape or (3, 4)))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def _nested(depth: int) -> Any:
    value: Any = an_input()
    for _ in range(depth):
        value = [value]
    return value


def bad_arguments() -> dict[str, dict[str, Callable[[], Any]]]:
    """Values that an argument of ``to_onnx`` can't have, by the argument; each is made when it is needed."""
    return {
        "model": {
            "none": lambda: None,
            "number": lambda: 3,
            "text": lambda: "model.py",
            "tensor": lambda: an_input(),
            "class": lambda: torch.nn.Linear,
            "dict": lambda: {"weight": an_input()},
            "empty-module": lambda: torch.nn.Module(),
            "raising": lambda: raising,
        },
        "args": {
            "none": lambda: None,
            "number": lambda: 3,
            "text": lambda: "x",
            "objects": lambda: (object(),),
            "too-many": lambda: (an_input(),) * 5,
            "too-few": lambda: (),
            "wrong-shape": lambda: (an_input(3, 5),),
            "wrong-dtype": lambda: (an_input().long(),),
            "scalar": lambda: (torch.tensor(1.0),),
            "sparse": lambda: (an_input().to_sparse(),),
            "array": lambda: (np.ones((3, 4), np.float32),),
            "generator": lambda: (value for value in (an_input(),)),
            "nested": lambda: (_nested(DEEP),),
            "strings": lambda: ("a", "b"),
            "huge-number": lambda: (10**400,),
            "unknown-keyword": lambda: ({"zzz": an_input()},),
            "number-as-keyword": lambda: ({1: an_input()},),
        },
        "kwargs": {
            "list": lambda: [1],
            "text": lambda: "x",
            "unknown": lambda: {"zzz": an_input()},
            "number-as-name": lambda: {1: an_input()},
            "twice": lambda: {"x": an_input()},
        },
        "examples": {
            "number": lambda: 3,
            "none-in-it": lambda: [None, None],
            "empty": list,
            "one": lambda: [()],
            "text": lambda: ["a", "b"],
            "other-names": lambda: [(an_input(),), {"y": an_input()}],
            "other-count": lambda: [(an_input(),), (an_input(), an_input())],
            "other-rank": lambda: [(an_input(),), (an_input(3, 4, 5),)],
            "other-dtype": lambda: [(an_input(),), (an_input().double(),)],
            "other-features": lambda: [(an_input(),), (an_input(3, 5),)],
        },
        "f": {
            "number": lambda: 3,
            "list": lambda: ["model.onnx"],
            "empty": lambda: "",
            "folder": lambda: ".",
            "missing-folder": lambda: "no/model.onnx",
            "null-character": lambda: "a\0b",
            "null-device": lambda: os.devnull,
            "text-file": lambda: io.StringIO(),
            "closed-file": lambda: closed_file(),
            "read-only-file": lambda: open(os.devnull, "rb"),
            "object-with-write": lambda: type("W", (), {"write": None})(),
            "long": lambda: "n" * 5000,
            "surrogate-folder": lambda: "\udcff/x",
        },
        "dynamic_shapes": {
            "number": lambda: 3,
            "text": lambda: "batch",
            "unknown-input": lambda: {"zzz": {0: "b"}},
            "unknown-axis": lambda: ({5: "b"},),
            "negative-axis": lambda: ({-7: "b"},),
            "float": lambda: ({0: 3.5},),
            "object": lambda: ({0: object()},),
            "other-size": lambda: ({0: 7},),
            "not-a-name": lambda: ({0: "1abc"},),
            "two-words": lambda: ({0: "a b"},),
            "empty-name": lambda: ({0: ""},),
            "half-an-expression": lambda: ({0: "a+"},),
            "code": lambda: ({0: "__import__('os').system('touch pwned')"},),
            "attribute": lambda: ({0: "a.__class__"},),
            "call": lambda: ({0: "open('pwned','w')"},),
            "power-tower": lambda: ({0: "9**9**9"},),
            "power": lambda: ({0: "a**999999999"},),
            "zero-divisor": lambda: ({0: "a//0"},),
            "remainder-of-zero": lambda: ({0: "a%0"},),
            "deep": lambda: ({0: "(" * 5000 + "a" + ")" * 5000},),
            "long": lambda: ({0: "a" + "+a" * 20000},),
            "huge-number": lambda: ({0: "a*" + "9" * 5000},),
            "shift": lambda: ({0: "1<<99999999999"},),
            "too-many": lambda: [{0: "b"}] * 3,
            "one-name": lambda: ({0: "b", 1: "b"},),
            "fixed": lambda: ({1: "features"},),
            "nested": lambda: ([[[{0: "b"}]]],),
            "axis-text": lambda: ({"zero": "b"},),
            "escape": lambda: ({0: "\x1b[2J"},),
        },
        "input_names": {
            "text": lambda: "x",
            "numbers": lambda: [1],
            "empty": lambda: [""],
            "twice": lambda: ["a", "a"],
            "too-many": lambda: ["a", "b", "c"],
            "none": lambda: [None],
            "number": lambda: 3,
            "bytes": lambda: b"x",
        },
        "output_names": {
            "text": lambda: "x",
            "numbers": lambda: [1],
            "empty": lambda: [""],
            "twice": lambda: ["a", "a"],
            "too-many": lambda: ["a", "b", "c"],
            "none": lambda: [None],
            "number": lambda: 3,
        },
        "opset_version": {
            "zero": lambda: 0,
            "twelve": lambda: 12,
            "ninety-nine": lambda: 99,
            "negative": lambda: -1,
            "huge": lambda: 10**400,
            "text": lambda: "21",
            "float": lambda: 21.0,
            "nan": lambda: float("nan"),
            "bool": lambda: True,
            "list": lambda: [21],
            "version-text": lambda: {"": "x"},
            "domain-number": lambda: {1: 21},
            "unknown-domain": lambda: {"com.nobody.at.all": 1},
            "negative-of-domain": lambda: {"com.microsoft": -1},
        },
        "rules": {
            "number": lambda: 3,
            "text": lambda: "aten::relu",
            "texts": lambda: ["aten::relu"],
            "none": lambda: [None],
            "objects": lambda: [object()],
            "unknown-operator": lambda: [onnxplug.Rule("aten::no_such_operator", raising)],
            "no-module": lambda: [
                onnxplug.Rule("aten::addmm", "no.such.module:x"),
                onnxplug.Rule("aten::linear", "no.such.module:x"),
            ],
            "raising": lambda: [onnxplug.Rule("aten::linear", raising)],
            "returning-text": lambda: [onnxplug.Rule("aten::linear", lambda g, node: "text")],
            "returning-nothing": lambda: [onnxplug.Rule("aten::linear", lambda g, node: None)],
            "returning-many": lambda: [onnxplug.Rule("aten::linear", lambda g, node: [node.args[0]] * 9)],
            "returning-an-input": lambda: [onnxplug.Rule("aten::linear", lambda g, node: node.args[0])],
        },
        "runtime": {"number": lambda: 3, "texts": lambda: ["lib.so"], "none": lambda: [None], "class": lambda: [int]},
        "plugins": {
            "unknown": lambda: ["nobody"],
            "number": lambda: 3,
            "numbers": lambda: [1],
            "text": lambda: "builtin",
            "malformed": lambda: [">>>"],
            "path": lambda: ["../x"],
        },
        "prefer": {"number": lambda: 3, "list": lambda: ["x"], "to-number": lambda: {"aten::relu": 3}},
        "custom_translation_table": {
            "number": lambda: 3,
            "to-number": lambda: {torch.ops.aten.relu.default: 1},
            "of-number": lambda: {3: raising},
            "of-none": lambda: {None: None},
            "unknown-name": lambda: {"aten::no_such_operator": raising},
        },
        "target": {
            "number": lambda: 3,
            "unknown": lambda: "nowhere",
            "empty": lambda: "",
            "unknown-part": lambda: ":::",
        },
        "functions": {
            "number": lambda: 3,
            "unknown": lambda: ["Nothing"],
            "numbers": lambda: [3],
            "not-a-module": lambda: [int],
            "empty-name": lambda: [""],
        },
        "profile": {"number": lambda: 3, "missing-folder": lambda: "no/x.json", "folder": lambda: "."},
        "strict": {"text": lambda: "yes", "number": lambda: 3},
        "capture": {"none": lambda: None, "text": lambda: "half", "number": lambda: 3, "list": lambda: ["blocks"]},
        "mutations": {"none": lambda: None, "text": lambda: "all", "list": list},
        "metadata": {"text": lambda: "all", "number": lambda: 3, "list": lambda: ["short"], "escape": lambda: "\x1b"},
        "decompositions": {
            "text": lambda: "all",
            "number": lambda: 3,
            "of-text": lambda: {"aten::relu": raising},
            "to-number": lambda: {torch.ops.aten.relu.default: 3},
        },
        "pieces": {
            "empty": list,
            "unknown": lambda: ["nothing"],
            "number": lambda: 3,
            "numbers": lambda: [1],
            "twice": lambda: ["linear", "linear"],
            "path": lambda: ["../linear"],
            "itself": lambda: [""],
        },
        "progress": {"number": lambda: 3, "text": lambda: "yes"},
        "registry": {"number": lambda: 3, "text": lambda: "x", "pair": lambda: (1, 2)},
        **{
            name: {"text": lambda: "no", "number": lambda: 3, "list": list}
            for name in ("present_names", "exact", "optimize", "verify", "checks", "external_data")
        },
        "report": {"number": lambda: 3, "list": list, "none": lambda: None, "device": lambda: "/dev/null/x"},
        "unknown": {"number": lambda: 3},
        "dynamic_axes": {"dict": lambda: {"x": [0]}},
    }


#: Texts that are no expressions are names of dimensions: nothing in them is computed, or run.
MERE_NAMES = set(
    "not-a-name two-words half-an-expression code attribute call power-tower power zero-divisor remainder-of-zero deep "
    "huge-number shift escape".split()
)


def raising(*_: Any) -> Any:
    raise ValueError("a word of the user's own code")


def closed_file() -> Any:
    file = io.BytesIO()
    file.close()
    return file
