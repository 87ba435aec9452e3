"""Torchlib-style functions: plain Python over ``onnxscript`` opsets, traced as torch.onnx traces them."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from onnxplug.errors import ConversionError, Decline, UsageError
from onnxplug_torch_onnx.binding import Parameter, bind, mismatch, parameters_of
from onnxplug_torch_onnx.functions import check_meaning, function_body, is_function

_INSTALL = threading.RLock()


def onnxscript_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """A converter of a torchlib-style function: ``def my_op(x: TFloat, alpha: float = 1.0): return op.Mul(...)``.

    The function is called with the operator's arguments, and each ``op.Foo(...)`` in it emits a node. Parameters that
    are annotated as Python numbers, text or lists of them are attributes, all others inputs. An operator that was
    written with another version of the opset is emitted, and checked, at the target's version; one that means something
    else there is refused.

    Args:
        function: The function. An ``@onnxscript.script()`` function goes to :func:`function_body` instead.

    Returns:
        A converter ``(g, node)`` for a :class:`~onnxplug.Rule`; it declines a node whose dtypes the annotations exclude.
    """
    if is_function(function):
        return function_body(function)
    if not callable(function):
        raise UsageError(f"compat.onnxscript_function takes a function, got {function!r}")
    name = getattr(function, "__name__", repr(function))
    parameters = _parameters(function)

    def convert(g: Any, node: Any) -> Any:
        bound = bind(node, parameters, f"the function {name}")
        reason = mismatch(parameters, bound)
        if reason is not None:
            raise Decline(reason)
        recorder = _Recorder(g, name)
        with _evaluating(recorder):
            keywords = {k: recorder.wrap(v) for k, v in bound.items()}
            # By position as far as it goes: a parameter may be called self.
            first = list(itertools.takewhile(lambda p: not p.keyword and p.name in keywords, parameters))
            positional = [keywords.pop(p.name) for p in first]
            return recorder.unwrap(function(*positional, **keywords))

    convert.__module__ = getattr(function, "__module__", None) or __name__
    convert.__qualname__ = getattr(function, "__qualname__", name)
    convert.__doc__ = function.__doc__
    convert.onnxplug_converter = True  # type: ignore[attr-defined]
    return convert


def _parameters(function: Callable[..., Any]) -> list[Parameter]:
    import dataclasses
    import inspect

    from onnxscript.ir import _schemas

    by_keyword = {
        p.name for p in inspect.signature(function).parameters.values() if p.kind is inspect.Parameter.KEYWORD_ONLY
    }
    try:
        signature = _schemas.op_signature_from_function(function, "onnxplug", "function")
    except Exception:  # annotations that onnxscript does not know: every parameter takes anything
        return [
            Parameter(p.name, required=p.default is inspect.Parameter.empty, keyword=p.name in by_keyword)
            for p in inspect.signature(function).parameters.values()
        ]
    return [dataclasses.replace(p, keyword=p.name in by_keyword) for p in parameters_of(signature)]


@contextlib.contextmanager
def _evaluating(recorder: _Recorder) -> Iterator[None]:
    """Makes ``op.Foo(...)`` of this thread go to the recorder; onnxscript has one evaluator for the whole process."""
    from onnxscript import evaluator

    with _INSTALL:
        current = evaluator.default()
        if not isinstance(current, _PerThread):
            current = _PerThread(current)
            evaluator.set_default(current)
    before = getattr(current.local, "recorder", None)
    current.local.recorder = recorder
    try:
        yield
    finally:
        current.local.recorder = before


class _PerThread:
    """onnxscript's evaluator, except in a thread in which a converter runs."""

    def __init__(self, original: Any) -> None:
        self.original = original
        self.local = threading.local()

    def _current(self) -> Any:
        recorder = getattr(self.local, "recorder", None)
        return recorder if recorder is not None else self.original

    def eval_op(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Evaluates one operator."""
        return self._current().eval_op(op, args, kwargs)

    def eval_function(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Evaluates one onnxscript function."""
        return self._current().eval_function(function, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._current(), name)


class _Recorder:
    """Emits the operators that a torchlib-style function evaluates."""

    def __init__(self, g: Any, name: str) -> None:
        self._g = g
        self._name = name  # of the function

    def wrap(self, item: Any) -> Any:
        """Wraps values, so that they have Python's operators."""
        if isinstance(item, ir.Value):
            return Tensor(item, self)
        return [self.wrap(part) for part in item] if isinstance(item, list | tuple) else item

    def unwrap(self, item: Any) -> Any:
        """Unwraps values, as the builder takes them and a converter returns them."""
        if isinstance(item, Tensor):
            return item.value
        return [self.unwrap(part) for part in item] if isinstance(item, list | tuple) else item

    def eval_op(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Emits one operator, with its inputs and attributes sorted by its signature."""
        signature = op.op_signature
        inputs, attributes = [self.unwrap(a) for a in args], {k: self.unwrap(v) for k, v in kwargs.items()}
        outputs = attributes.pop("_outputs", None)
        if signature is not None:
            inputs, attributes = _sorted(signature, inputs, attributes)
        domain = op.domain
        if domain in ("", "ai.onnx"):
            check_meaning(op.name, op.opset.version, self._g.opset, self._name)
            opset = self._g.op
        else:
            opset = self._domain(domain, op.opset.version)
        count = len(outputs) if isinstance(outputs, list | tuple) else outputs
        if count is None:
            count = _output_count(signature, inputs, attributes) if signature is not None else 1
        return self.wrap(_emit(opset, op.name, inputs, attributes, count))

    def _domain(self, name: str, version: int) -> Any:
        known = self._g.version_of(name, version)
        return self._g.domain(name, known)

    def eval_function(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Traces an onnxscript function into the graph if it is traceable, else calls it as a model-local function."""
        if getattr(function, "traceable", False):
            return function.function(*args, **kwargs)
        from onnxplug_torch_onnx.functions import _called_by, _read, call

        main, parameters = _read(function)
        known = {f.identifier(): f for f in (_read(other)[0] for other in (function, *_called_by(function)))}
        names = [p.name for p in parameters]
        if len(args) > len(names):
            raise ConversionError(f"{function.name} takes {len(names)} arguments, got {len(args)}")
        bound = {
            **dict(zip(names, map(self.unwrap, args), strict=False)),
            **{k: self.unwrap(v) for k, v in kwargs.items()},
        }
        version = self._g.version_of(main.domain, function.opset.version)
        return self.wrap(call(self._g, main, parameters, bound, known, version=version))


def _sorted(signature: Any, inputs: list[Any], keywords: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Separates inputs, in order, from attributes, by name; a call may give either by position or by name."""
    params = list(signature.params)
    variadic = bool(params) and any(p.is_param() and p.variadic for p in params)
    formals = [p for p in params if p.is_param()]
    attributes = {k: v for k, v in keywords.items() if k not in {p.name for p in formals}}
    if variadic:
        flat = [part for item in inputs for part in (item if isinstance(item, list | tuple) else [item])]
        return flat, attributes
    placed: dict[str, Any] = {p.name: v for p, v in zip(params, inputs, strict=False)}
    if len(inputs) > len(params):
        raise ConversionError(f"{signature.name} takes {len(params)} arguments, got {len(inputs)}")
    placed.update({k: v for k, v in keywords.items() if k not in attributes})
    attributes.update({p.name: placed.pop(p.name) for p in params if p.is_attribute() and p.name in placed})
    ordered = [placed.get(p.name) for p in formals]
    return ordered, attributes


def _output_count(signature: Any, inputs: Sequence[Any], attributes: Mapping[str, Any]) -> int:
    """The number of outputs that onnxscript gives a call: all that the schema names, with onnxscript's exceptions."""
    if signature.domain == "":
        if signature.name == "BatchNormalization" and not attributes.get("training_mode"):
            return 1
        if signature.name in ("Dropout", "LayerNormalization"):
            return 1
        if signature.name == "Split":
            return _split_count(inputs, attributes)
        if signature.name in ("Loop", "Scan"):
            return len(attributes["body"].outputs) - (signature.name == "Loop")
    return len(signature.outputs)


def _split_count(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> int:
    if attributes.get("num_outputs"):
        return int(attributes["num_outputs"])
    if len(inputs) > 1 and isinstance(inputs[1], list | tuple):
        return len(inputs[1])
    if len(inputs) > 1 and isinstance(inputs[1], ir.Value) and inputs[1].const_value is not None:
        return int(inputs[1].const_value.size)
    raise ConversionError("Split: the number of its outputs can't be determined; give num_outputs, or a list of sizes")


def _emit(opset: Any, name: str, inputs: Sequence[Any], attributes: Mapping[str, Any], count: int) -> Any:
    kinds = {k: v for k, v in attributes.items() if v is not None}
    if name == "Constant" and "value" in kinds:
        return opset._builder.const(kinds["value"].numpy() if hasattr(kinds["value"], "numpy") else kinds["value"])
    return getattr(opset, name)(*inputs, _outputs=count, **kinds)


class Tensor:
    """A Value as a torchlib-style function sees it: with Python's operators, ``dtype``, ``shape`` and ``rank``."""

    __hash__ = object.__hash__

    def __init__(self, value: ir.Value, recorder: _Recorder) -> None:
        self.value = value
        self._recorder = recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self.value, name)

    @property
    def rank(self) -> int | None:
        """Number of dimensions, if it is known."""
        return len(self.value.shape) if self.value.shape is not None else None

    def _call(self, name: str, *inputs: Any, **attributes: Any) -> Any:
        recorder = self._recorder
        results = getattr(recorder._g.op, name)(*(recorder.unwrap(i) for i in inputs), **attributes)
        return recorder.wrap(results)

    def _mod(self, left: Any, right: Any) -> Any:
        floating = self.value.dtype is not None and self.value.dtype.is_floating_point()
        return self._call("Mod", left, right, fmod=1 if floating else None)

    def __mod__(self, other: Any) -> Any:
        return self._mod(self, other)

    def __rmod__(self, other: Any) -> Any:
        return self._mod(other, self)

    def __rpow__(self, other: Any) -> Any:
        # A power has the dtype of its base, and a number as the base the dtype of a real exponent.
        dtype = self.value.dtype
        real = isinstance(other, int | float) and dtype is not None and dtype.is_floating_point()
        return self._call("Pow", self._recorder._g.const(other, dtype) if real else other, self)

    def __neg__(self) -> Any:
        return self._call("Neg", self)

    def __ne__(self, other: Any) -> Any:
        return self._call("Not", self._call("Equal", self, other))


def _binary(name: str, swapped: bool = False) -> Callable[..., Any]:
    def method(self: Tensor, other: Any) -> Any:
        return self._call(name, other, self) if swapped else self._call(name, self, other)

    return method


for _method, _name in {
    "add": "Add",
    "sub": "Sub",
    "mul": "Mul",
    "truediv": "Div",
    "matmul": "MatMul",
    "pow": "Pow",
    "and": "And",
    "or": "Or",
}.items():
    setattr(Tensor, f"__{_method}__", _binary(_name))
    if _name != "Pow":
        setattr(Tensor, f"__r{_method}__", _binary(_name, swapped=True))
for _method, _name in {
    "eq": "Equal",
    "lt": "Less",
    "gt": "Greater",
    "le": "LessOrEqual",
    "ge": "GreaterOrEqual",
}.items():
    setattr(Tensor, f"__{_method}__", _binary(_name))
