"""A ScriptModule or ScriptFunction as an ordinary module whose forward interprets its graph."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from onnxplug.build.names import Names
from onnxplug.capture.locations import runs_models
from onnxplug.errors import CaptureError, UsageError
from onnxplug.torch_private import is_alias_of, wrap_script
from onnxplug_torchscript import (
    branches,
    loops,
    numbers,
)
from onnxplug_torchscript.graphs import ScriptGraph, Step
from onnxplug_torchscript.interpreter import Attribute, Interpreter, constant_tensor
from onnxplug_torchscript.values import (
    ScalarTensor,
    holds_stacked,
    is_symbolic,
    leaves,
    mapped,
    structure,
    tensors_in,
)

#: The mark of TorchScript in the names of further types of one class.
_MANGLED = re.compile(r"___torch_mangle_\d+\.")
_CONTROL = {"prim::If": branches.branch, "prim::Loop": loops.loop}


def _number(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A conversion of tensors of one element to numbers, as TorchScript converts arguments; a number stays."""
    return lambda value: convert(value) if isinstance(value, torch.Tensor) else value


#: The conversion of an argument, by its type.
_CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "int": _number(numbers.as_int),
    "bool": _number(numbers.as_bool),
    "float": lambda value: float(value) if type(value) is int else _number(numbers.as_float)(value),
    "number": _number(numbers.as_item),
}


def from_script(script: Any) -> torch.nn.Module:
    """An ordinary module that computes the same as a ScriptModule or ScriptFunction.

    It has the parameters and buffers of the script, by the same names; a tensor in another attribute is a buffer of the
    attribute's name. The forward takes the arguments of the script's forward. Values that the script sets in its
    attributes are written into these buffers; the script itself stays as it is.

    Raises:
        CaptureError: The ScriptModule has no forward, or has hooks beside its graph.
    """
    runs_models(__file__)
    module = _Module(script if isinstance(script, torch.jit.ScriptModule) else None, {})
    if isinstance(script, torch.jit.ScriptModule):
        if not module.has_method("forward"):
            raise CaptureError(
                f"the ScriptModule {script.original_name} has no forward, only {', '.join(script._c._method_names()) or 'data'}",
                hint="Export a function or module that calls the method.",
            )
        _check_hooks(script)
        graph, schema = module.graph_of("forward"), script._c._get_method("forward").schema
    else:
        graph, schema = ScriptGraph(script.graph), script.schema
    _hold_tensors(module, graph)
    run = Interpreter(module, _CONTROL)
    for part in module.modules():
        if isinstance(part, _Module):
            part.own.interpreter = run
    signature, kinds = _signature(schema, method=isinstance(script, torch.jit.ScriptModule))

    def forward(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        inputs = [
            _CONVERSIONS[kind](value) if kind in _CONVERSIONS else value
            for kind, value in zip(kinds, bound.args, strict=True)
        ]
        return _called(run, module, graph, inputs)

    forward.__signature__ = signature  # type: ignore[attr-defined]
    module.__dict__["forward"] = forward
    return module


@contextlib.contextmanager
def interpreted_parts(model: torch.nn.Module) -> Iterator[None]:
    """Replaces the ScriptModules within an ordinary module by modules that compute the same, while the context holds.

    Raises:
        CaptureError: A ScriptModule has no forward, or hooks beside its graph.
    """
    owners = [part for part in model.modules() if not isinstance(part, torch.jit.ScriptModule)]
    parts = [
        (owner, name, child)
        for owner in owners
        for name, child in owner._modules.items()
        if isinstance(child, torch.jit.ScriptModule)
    ]
    made = {script._c: from_script(script) for *_, script in parts}
    try:
        for owner, name, script in parts:
            owner._modules[name] = made[script._c]
        yield
    finally:
        for owner, name, script in parts:
            owner._modules[name] = script


def _check_hooks(script: Any) -> None:
    """Refuses a script with hooks, which its graph lacks; hooks of its parts are in the graphs that call the parts."""
    if script._forward_hooks or script._forward_pre_hooks or script._c._get_forward_hooks():
        raise CaptureError(
            f"the ScriptModule {script.original_name} has forward hooks, which are not in its graph",
            hint="Script a module that calls it: the graph of the caller has the hooks.",
        )


@dataclass(eq=False)
class _Own:
    """The attributes of a module here beside an ordinary module's, as torch.export inspects dicts of the module itself.

    Attributes:
        script: The ScriptModule; ``None`` for a ScriptFunction.
        held: Attributes that are containers of tensors: lists, dicts and others.
    """

    script: Any
    held: dict[str, Any] = field(default_factory=dict)
    graphs: dict[str, ScriptGraph] = field(default_factory=dict)
    constants: dict[Step, Attribute] = field(default_factory=dict)
    interpreter: Interpreter | None = None


class _Module(torch.nn.Module):
    """Stands for a ScriptModule.

    Attributes:
        type_name: The qualified name of its class in graphs.
        original_name: The name of the class that it was scripted from.
    """

    own: _Own
    type_name: str
    original_name: str

    def __init__(self, script: Any, made: dict[Any, Any]) -> None:
        super().__init__()
        self.own = _Own(script)
        self.type_name = self.original_name = ""
        if script is None:
            self.training = False
            return
        made[script._c] = self
        self.type_name, self.original_name = str(script._c._type().annotation_str), script.original_name
        self.__class__ = _class_of(self.type_name, self.original_name)
        if script._c.hasattr("training"):
            self.training = bool(script._c.getattr("training"))
        for name, parameter in script.named_parameters(recurse=False, remove_duplicate=False):
            self._parameters[name] = made.setdefault(id(parameter), (parameter, _as_parameter(parameter)))[1]
        for name, buffer in script.named_buffers(recurse=False, remove_duplicate=False):
            self.register_buffer(name, buffer)
        # A module of torch.jit.freeze shows none of the submodules that it keeps.
        for name, child in (script._modules or wrap_script(script._c)._modules).items():
            if child is not None:
                self._modules[name] = made[child._c] if child._c in made else _Module(child, made)

    def forward(self, *args: Any) -> Any:
        """The script's forward, as other parts of the script call it."""
        assert self.own.interpreter is not None
        return self.own.interpreter.call(self.graph_of("forward"), [self, *args])

    def has_method(self, name: str) -> bool:
        """Whether the script has a method of a name."""
        return self.own.script is not None and bool(self.own.script._c._has_method(name))

    def graph_of(self, method: str) -> ScriptGraph:
        """The graph of a method."""
        if method not in self.own.graphs:
            self.own.graphs[method] = ScriptGraph(self.own.script._c._get_method(method).graph)
        graph: ScriptGraph = self.own.graphs[method]
        return graph

    def methods(self) -> Iterator[ScriptGraph]:
        """The graphs of all methods."""
        if self.own.script is not None:
            yield from (self.graph_of(name) for name in self.own.script._c._method_names())

    def attribute(self, name: str) -> Any:
        """A module, tensor or value that the ScriptModule has before the call; its tensors are the buffers here."""
        for held in (self._parameters, self._buffers):
            if name in held:
                return held[name]
        if name in self.own.held:
            part = self._modules.get(name)
            buffers = part.buffers() if part is not None else iter(())
            return mapped(self.own.held[name], lambda leaf: next(buffers) if isinstance(leaf, torch.Tensor) else leaf)
        if name in self._modules:
            return self._modules[name]
        return self.own.script._c.getattr(name)

    def hold(self, name: str) -> None:
        """Makes buffers of the tensors in an attribute that is no parameter, buffer or module."""
        if name in self.own.held or name in self._parameters or name in self._buffers or name in self._modules:
            return
        value = self.own.script._c.getattr(name)
        if isinstance(value, torch.Tensor):
            self.register_buffer(name, value.detach(), persistent=False)
        elif any(True for _ in tensors_in(value)):
            self.own.held[name] = value
            part = self._modules[name] = torch.nn.Module()
            for index, tensor in enumerate(tensors_in(value)):
                part.register_buffer(str(index), tensor.detach(), persistent=False)


def _as_parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
    """A tensor as a parameter: a loaded script has plain tensors in their place."""
    if isinstance(tensor, torch.nn.Parameter):
        return tensor
    return torch.nn.Parameter(tensor.detach(), requires_grad=tensor.requires_grad)


@functools.cache
def _class_of(type_name: str, original_name: str) -> type[_Module]:
    """A class with the name and Python module of the script's class: FX nodes name the classes of enclosing modules."""
    place = _MANGLED.sub("", type_name.removeprefix("__torch__.")).rpartition(".")[0]
    return type(original_name, (_Module,), {"__module__": place or "__main__"})


def _hold_tensors(root: _Module, graph: ScriptGraph) -> None:
    by_type: dict[str, list[_Module]] = {}
    parts = [part for part in root.modules() if isinstance(part, _Module)]
    for part in parts:
        by_type.setdefault(part.type_name, []).append(part)
    for owner in [graph, *(method for part in parts for method in part.methods())]:
        for step in owner.body.nested():
            if step.kind in ("prim::GetAttr", "prim::SetAttr"):
                for part in by_type.get(step.type_of_input(), ()):
                    part.hold(step.node.s("name"))
            elif step.kind in ("prim::Constant", "prim::ConstantMKLDNNTensor"):
                _hold_constant(root, step)


def _hold_constant(root: _Module, step: Step) -> None:
    """Makes a buffer of a constant tensor, which ``torch.jit.freeze`` names after the weight that it was."""
    value = constant_tensor(step) if step.node.output().type().kind() == "TensorType" else None
    if not isinstance(value, torch.Tensor) or not value.dim():
        return
    *path, name = step.node.output().debugName().removeprefix("self.").split(".")
    if not path and name.isdigit():
        name = f"constant_{len(root.own.constants)}"
    owner = root
    for part in path:
        child = owner._modules.setdefault(part, _Module(None, {}))
        if not isinstance(child, _Module):
            return
        owner = child
    if not hasattr(owner, name):
        owner.register_buffer(name, value.detach())
        root.own.constants[step] = (owner, name)


def _signature(schema: Any, *, method: bool) -> tuple[inspect.Signature, list[str]]:
    parameters, kinds = [], []
    names = Names()  # torch.jit.trace of *args gives inputs the names that submodules use, which may be equal
    for argument in schema.arguments[1 if method else 0 :]:
        kind = inspect.Parameter.KEYWORD_ONLY if argument.kwarg_only else inspect.Parameter.POSITIONAL_OR_KEYWORD
        default = argument.default_value if argument.has_default_value() else inspect.Parameter.empty
        parameters.append(inspect.Parameter(names.unique(argument.name), kind, default=default))
        kinds.append(str(argument.type).removeprefix("Optional[").removesuffix("]"))
    return _Signature(parameters), kinds


class _Signature(inspect.Signature):
    """A script's signature; the error of a call that does not fit it also shows the inputs on the command line."""

    def bind(self, *args: Any, **kwargs: Any) -> inspect.BoundArguments:
        """Binds the arguments of a call.

        Raises:
            UsageError: The call does not fit.
        """
        try:
            return super().bind(*args, **kwargs)
        except TypeError as error:
            needed = [p.name for p in self.parameters.values() if p.default is inspect.Parameter.empty]
            inputs = " ".join(f"--input '{name}=float32[2,3]'" for name in needed)
            raise UsageError(
                f"the inputs don't fit forward{self}: {error}",
                hint=f"onnxplug export FILE -o PATH {inputs}, each with its dtype and sizes; to_onnx has args= and kwargs=.",
            ) from None


# -- a call ------------------------------------------------------------------------------------------------------------


def _called(run: Interpreter, module: _Module, graph: ScriptGraph, args: Sequence[Any]) -> Any:
    with run.scope({}, args):
        run.written.clear()
        inputs = [module, *args] if module.own.script is not None else list(args)
        result = run.call(graph, inputs)
        changed = [pair for key, value in run.attributes.items() for pair in _changes(run, key, value)]
    if module is run.root and holds_stacked(result):
        raise CaptureError(
            "the script returns a list of tensors whose length is a dynamic size: an exported model has a fixed number of outputs",
            hint="Return torch.stack(items) or torch.cat(items).",
        )
    if changed:
        # New values first: a value may be another buffer, as when two attributes are exchanged.
        changed = [(buffer, _apart(value, [b for b, _ in changed])) for buffer, value in changed]
        result = mapped(result, lambda leaf: _apart(leaf, [b for b, _ in changed]))
        for buffer, value in changed:
            buffer.copy_(value)
    return mapped(result, lambda leaf: leaf.tensor() if isinstance(leaf, ScalarTensor) else leaf)


def _apart(value: Any, buffers: Sequence[torch.Tensor]) -> Any:
    """A value that no write to the buffers changes: a copy where they share memory."""
    shared = isinstance(value, torch.Tensor) and any(is_alias_of(value, buffer) for buffer in buffers)
    return value.clone() if shared else value


def _changes(run: Interpreter, key: Attribute, value: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The buffers of an attribute that have another value after the call, each with the new value."""
    module, name = key
    before = module.attribute(name)
    path = _path(run.root, module, name)
    place = f" at {run.written[key].place}" if key in run.written else ""
    if structure(before) != structure(value):
        raise CaptureError(
            f"the script{place} changes its attribute {path} from {_text(before)} to {_text(value)}: the state of an exported "
            "model has one structure",
            hint="Call the script once before the export if it keeps that structure from then on.",
        )
    for old, new in zip(leaves(before), leaves(value), strict=True):
        if old is new:
            continue
        new = new.tensor() if isinstance(new, ScalarTensor) else new
        if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
            if old.dtype != new.dtype or not _same_shape(old, new):
                raise CaptureError(
                    f"the script{place} changes its attribute {path} from {_text(old)} to {_text(new)}: the state of an "
                    "exported model keeps its shape and dtype",
                    hint="Call the script once before the export, with inputs of the sizes to export, if the attribute keeps "
                    "its shape from then on; the exported model begins with what it holds then.",
                )
            yield old, new
        elif not _equal(old, new):
            raise CaptureError(
                f"the script{place} changes its attribute {path} from {_text(old)} to {_text(new)}: only tensors are state of "
                "an exported model",
                hint="Call the script once before the export if the attribute keeps its value from then on, or make it a tensor.",
            )


def _same_shape(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dim() == b.dim() and all(statically_known_true(m == n) for m, n in zip(a.shape, b.shape, strict=True))


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return False
    if is_symbolic(a) or is_symbolic(b):
        return statically_known_true(a == b)
    return type(a) is type(b) and bool(a == b)


def _path(root: torch.nn.Module, module: torch.nn.Module, name: str) -> str:
    prefix = next((path for path, part in root.named_modules() if part is module), "")
    return repr(f"{prefix}.{name}" if prefix else name)


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)} and dtype {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, list | tuple | dict):
        return f"a {type(value).__name__} of {len(value)}"
    return repr(value)
