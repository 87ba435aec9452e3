"""Runs a script's graph node by node, as Python would run its source."""

from __future__ import annotations

import builtins
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from onnxplug.errors import CaptureError
from onnxplug_torchscript.containers import to_list
from onnxplug_torchscript.graphs import Block, ScriptGraph, Step, body_of_call
from onnxplug_torchscript.operators import function_of
from onnxplug_torchscript.types import is_instance
from onnxplug_torchscript.values import UNINITIALIZED, Instance, ScalarTensor, lists_in, mapped, named_tuple

#: Context managers that do not change what a graph computes.
_WITHOUT_EFFECT = re.compile(r"(no_grad|enable_grad|inference_mode|set_grad_enabled|record_function)$")

#: The values of a graph by their numbers.
Values = dict[int, Any]
#: A module that stands for a module of the script, and the name of an attribute of it.
Attribute = tuple[Any, str]


#: A function that runs a step with blocks.
Control = Callable[["Interpreter", Step, Values], list[Any]]


@dataclass(frozen=True)
class Shared:
    """A result of a step with blocks that shares memory with another tensor in the script, and not in the graph.

    In the graph it is a tensor of its own, which makes no difference as long as neither tensor is written in place.
    """

    step: Step
    tensors: tuple[torch.Tensor, torch.Tensor]
    versions: tuple[int, int]

    def check(self) -> None:
        """Checks that the two tensors are as they were.

        Raises:
            CaptureError: One of the tensors was written in place since.
        """
        if self.versions != (self.tensors[0]._version, self.tensors[1]._version):
            raise CaptureError(
                f"what the code at {self.step.place} gives depends on a tensor's values, and is one of the tensors that it uses "
                "in one case, or twice the same: the script writes to it in place later",
                hint="Give a copy (.clone()) there.",
            )


class Interpreter:
    """Runs graphs.

    Attributes:
        shared: Results that share their memory in the script, of this branch or body.
        borrowed: Lists of the outside that are given to the running function, branch or body.
        attributes: The present values of the modules' attributes that were read or set during the call.
        written: The step that set an attribute last.
        block: The block whose step runs.
    """

    def __init__(self, root: Any, control: Mapping[str, Control]) -> None:
        self.root = root
        self.control = control
        self.attributes: dict[Attribute, Any] = {}
        self.written: dict[Attribute, Step] = {}
        self.shared: list[Shared] = []
        self.borrowed: list[list[Any]] = []
        self.block = Block((), (), ())
        self._functions: dict[Step, Callable[..., Any]] = {}
        self._constants: dict[Step, Any] = {}
        self._bodies: dict[Any, ScriptGraph] = {}

    def call(self, graph: ScriptGraph, args: Sequence[Any]) -> Any:
        """The result of a graph for arguments; several results are a tuple."""
        values: Values = dict(zip(graph.body.inputs, args, strict=True))
        outside, self.borrowed = self.borrowed, list(lists_in(args))
        try:
            results = self.run(graph.body, values)
        finally:
            self.borrowed = outside
        return results[0] if len(results) == 1 else tuple(results)

    def run(self, block: Block, values: Values) -> list[Any]:
        """Runs a block.

        Args:
            values: The values that it uses, its inputs included; the results of its steps are added.
        """
        outside, self.block = self.block, block
        try:
            for step in block.steps:
                results = self._results(step, values)
                for number, result in zip(step.outputs, results, strict=True):
                    values[number] = result
        finally:
            self.block = outside
        return [values[number] for number in block.outputs]

    @contextmanager
    def scope(self, attributes: Mapping[Attribute, Any], operands: Sequence[Any]) -> Iterator[dict[Attribute, Any]]:
        """A scope for a branch or body: the attributes that it sets are its own."""
        outside, written, shared, borrowed = self.attributes, dict(self.written), self.shared, self.borrowed
        self.attributes, self.shared, self.borrowed = dict(attributes), [], list(lists_in(operands))
        try:
            yield self.attributes
            for one in self.shared:
                one.check()
        finally:
            self.attributes, self.written, self.shared, self.borrowed = outside, written, shared, borrowed

    def _results(self, step: Step, values: Values) -> Sequence[Any]:
        control = self.control.get(step.kind)
        if control is not None:
            return control(self, step, values)
        args = [values[number] for number in step.inputs]
        special = _SPECIAL.get(step.kind)
        result = special(self, step, args) if special is not None else step.place.call(self._function(step), *args)
        if len(step.outputs) == 1:
            return (result,)
        return tuple(result) if step.outputs else ()

    def _function(self, step: Step) -> Callable[..., Any]:
        function = self._functions.get(step)
        if function is None:
            function = self._functions[step] = function_of(step)
        return function

    # -- constants and attributes --------------------------------------------------------------------------------------

    def constant(self, step: Step, _: Sequence[Any]) -> Any:
        """``prim::Constant``."""
        held = self.root.own.constants.get(step)
        if held is not None:
            return self.attributes[held] if held in self.attributes else held[0].attribute(held[1])
        if step not in self._constants:
            self._constants[step] = _constant(step)
        return mapped(self._constants[step], lambda leaf: replace(leaf) if isinstance(leaf, ScalarTensor) else leaf)

    def get_attribute(self, step: Step, args: Sequence[Any]) -> Any:
        """``prim::GetAttr``."""
        (owner,) = args
        name = step.node.s("name")
        if isinstance(owner, Instance):
            return owner.attributes[name]
        if not hasattr(owner, "attribute"):
            return getattr(owner, name)
        key = (owner, name)
        if key not in self.attributes:
            value = owner.attribute(name)
            if not isinstance(value, list | dict):
                return value
            self.attributes[key] = value  # a container may be changed where it is
        return self.attributes[key]

    def set_attribute(self, step: Step, args: Sequence[Any]) -> None:
        """``prim::SetAttr``."""
        owner, value = args
        name = step.node.s("name")
        if isinstance(owner, Instance):
            owner.attributes[name] = value
        else:
            self.attributes[owner, name] = value
            self.written[owner, name] = step

    # -- calls ---------------------------------------------------------------------------------------------------------

    def call_method(self, step: Step, args: Sequence[Any]) -> Any:
        """``prim::CallMethod``."""
        owner = args[0]
        name = step.node.s("name")
        if isinstance(owner, Instance):
            return step.place.call(self.call, self.body(step, (owner.type_name, name)), args)
        if name == "forward" and owner is not self.root:
            return step.place.call(owner, *args[1:])  # as a module, whose path the nodes then have
        return step.place.call(self.call, owner.graph_of(name), args)

    def call_function(self, step: Step, args: Sequence[Any]) -> Any:
        """``prim::CallFunction``."""
        return step.place.call(self.call, self.body(step, args[0]), args[1:])

    def body(self, step: Step, key: Any) -> ScriptGraph:
        """The graph of a function or of a method of a class, which torch names by ``key``."""
        if key not in self._bodies:
            self._bodies[key] = body_of_call(step.node)
        return self._bodies[key]

    def fork(self, step: Step, args: Sequence[Any]) -> Any:
        """``prim::fork``: run at once."""
        key = ("fork", step)
        if key not in self._bodies:
            self._bodies[key] = ScriptGraph(step.node.g("Subgraph"))
        return self.call(self._bodies[key], args)

    def python(self, step: Step, args: Sequence[Any]) -> Any:
        """``prim::PythonOp``: a function that TorchScript ignores."""
        dynamic, constants = iter(args), iter(step.node.scalar_args())
        values = [next(dynamic if kind == "d" else constants) for kind in step.node.cconv()]
        return step.place.call(step.node.pyobj(), *values)


def _constant(step: Step) -> Any:
    output = step.node.output()
    if output.type().kind() == "FunctionType":
        return output.type().annotation_str
    value = constant_tensor(step) if output.type().kind() == "TensorType" else output.toIValue()
    if isinstance(value, torch.Tensor):
        if not value.dim() and value.dtype in (torch.int64, torch.bool, torch.float32, torch.float64):
            return ScalarTensor(value.item(), value.dtype)
        return value.detach()
    return value


def constant_tensor(step: Step) -> Any:
    """The value of a constant that is a tensor, in the ordinary layout."""
    value = step.node.output().toIValue()
    if value is None and step.node.hasAttribute("value"):
        value = step.node.t("value")  # of prim::ConstantMKLDNNTensor
    return value.to_dense() if isinstance(value, torch.Tensor) and value.is_mkldnn else value


# -- nodes that need more than the values of their inputs ----------------------------------------------------------------


def _create(_: Interpreter, step: Step, __: Sequence[Any]) -> Any:
    return Instance(str(step.node.output().type().annotation_str))


def _tuple(_: Interpreter, step: Step, args: Sequence[Any]) -> Any:
    text = step.node.output().type().str()
    if not text.startswith("NamedTuple("):
        return tuple(args)
    fields = tuple(re.findall(r"(\w+) : ", text))
    name = str(step.node.output().type().annotation_str).rpartition(".")[2]
    return named_tuple(name, fields)(*args) if len(fields) == len(args) else tuple(args)


def _slice_of_tuple(_: Interpreter, step: Step, args: Sequence[Any]) -> Any:
    return tuple(args[0][step.node.i("beg") : step.node.i("end")])


def _chunks(_: Interpreter, step: Step, args: Sequence[Any]) -> Any:
    return step.place.call(torch.chunk, args[0], step.node.i("chunks"), step.node.i("dim"))


def _clamped(_: Interpreter, step: Step, args: Sequence[Any]) -> Any:
    """``MKLDNNClamp`` and ``MKLDNNHardTanh``, whose limits are attributes."""
    return step.place.call(torch.clamp, args[0], step.node.f("min_val"), step.node.f("max_val"))


def _is_instance(_: Interpreter, step: Step, args: Sequence[Any]) -> bool:
    return any(is_instance(args[0], kind) for kind in step.node.tys("types"))


def _listed(_: Interpreter, step: Step, args: Sequence[Any]) -> Any:
    value, axes, kind = args
    return step.place.call(to_list, value, kind, axes)


def _raise(_: Interpreter, step: Step, args: Sequence[Any]) -> None:
    message = str(args[0])
    name = str(args[1]).rpartition(".")[2] if len(args) > 1 and args[1] else "RuntimeError"
    error = getattr(builtins, name, RuntimeError)
    step.place.call(_raised, error if issubclass(error, Exception) else RuntimeError, message)


def _raised(error: type[Exception], message: str) -> None:
    raise error(message or "the script raises an error for these inputs")


def _enter(_: Interpreter, step: Step, args: Sequence[Any]) -> Any:
    name = args[0].type_name if isinstance(args[0], Instance) else type(args[0]).__name__
    off = isinstance(args[0], Instance) and args[0].attributes.get("_enabled") is False
    if not _WITHOUT_EFFECT.search(name) and not off:
        raise CaptureError(
            f"the script enters the context manager {name} at {step.place}, which onnxplug does not run",
            hint="Export the nn.Module that the script was made from.",
        )
    return args[0]


_SPECIAL: dict[str, Callable[[Interpreter, Step, Sequence[Any]], Any]] = {
    "prim::Constant": Interpreter.constant,
    "prim::ConstantMKLDNNTensor": Interpreter.constant,
    "prim::GetAttr": Interpreter.get_attribute,
    "prim::SetAttr": Interpreter.set_attribute,
    "prim::CallMethod": Interpreter.call_method,
    "prim::CallFunction": Interpreter.call_function,
    "prim::fork": Interpreter.fork,
    "prim::PythonOp": Interpreter.python,
    "prim::CreateObject": _create,
    "prim::TupleConstruct": _tuple,
    "prim::TupleSlice": _slice_of_tuple,
    "prim::ConstantChunk": _chunks,
    **dict.fromkeys(
        ("prim::MKLDNNClamp", "prim::MKLDNNClamp_", "prim::MKLDNNHardTanh", "prim::MKLDNNHardTanh_"), _clamped
    ),
    "prim::isinstance": _is_instance,
    "prim::tolist": _listed,
    "prim::RaiseException": _raise,
    "prim::Enter": _enter,
    "prim::Exit": lambda *_: None,
    "prim::Uninitialized": lambda *_: UNINITIALIZED,
}
