"""TARGET: the model that a command exports."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from onnxplug.cli.archive import check_archive
from onnxplug.cli.inputs import InputSpec, check_file
from onnxplug.cli.sources import find_source, load_from, takes_pretrained
from onnxplug.errors import OnnxplugError, UsageError
from onnxplug.text import did_you_mean, type_with_article

_FORMS = "package.module:callable, file.py:callable, FILE.pt2, timm:NAME, or SCHEME:NAME or FILE.SUFFIX of a plugin"


@dataclass
class Target:
    """A model with its example inputs.

    Attributes:
        model: The model.
        args, kwargs: Its example inputs.
        note: A note for the user; empty for none.
    """

    model: Any
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    note: str = ""


def load_target(text: str, inputs: Sequence[InputSpec] = (), *, pretrained: bool = False) -> Target:
    """Loads the model that TARGET names; ``--input`` replaces its example inputs.

    An ``--input`` without a name replaces the target's own positional inputs, one by one; an ``--input`` with a name replaces the
    input of that name. The target's other inputs stay.

    Args:
        text: TARGET.
        inputs: The ``--input``s.
        pretrained: Trained weights, for a scheme that has them.

    Raises:
        UsageError: There is no such file, module or function.
        OnnxplugError: The user's code raised; the message names its file and line.
    """
    import torch

    # A fixed seed: a factory with random weights gives the same model in `export` and in `verify`.
    torch.manual_seed(0)
    match = find_source(text)
    if pretrained and match is None:
        raise UsageError("--pretrained is for timm:NAME; a function that makes a model decides by itself")
    if text.endswith(".pt2"):
        target = _load_pt2(text)
    elif match is not None:
        source, name = match
        target = _unpack(load_from(source, name, pretrained=pretrained), text)
        if not pretrained and takes_pretrained(source):
            target.note = f"{text} has random weights; --pretrained takes the trained ones"
    elif ":" in text:
        target = _load_callable(text)
    elif text.endswith((".pt", ".ts")):
        raise UsageError(f"no plugin loads {text}", hint="Scripts of torch.jit.save: pip install onnxplug-torchscript")
    else:
        raise UsageError(f"TARGET {text!r} is none of {_FORMS}")
    positional = [i.value for i in inputs if i.name is None]
    args = [*positional, *target.args[len(positional) :]]
    names = _positional_names(target.model)
    for name, value in ((i.name, i.value) for i in inputs if i.name is not None):
        if name in names[: len(args)]:
            args[names.index(name)] = value
        else:
            target.kwargs[name] = value
    target.args = tuple(args)
    return target


def check_target_file(text: str) -> None:
    """Checks that the file of a target ``FILE.py:make`` or ``FILE.pt2`` is there: before torch is imported.

    Raises:
        UsageError: It is not.
    """
    file = text.rpartition(":")[0] if ".py:" in text else text
    if file != text or file.endswith(".pt2"):
        check_file(file)


def load_for_export(text: str, inputs: Sequence[InputSpec] = (), *, pretrained: bool = False) -> Target:
    """Loads TARGET by :func:`load_target`, prints its note, and puts it in evaluation mode."""
    import torch

    from onnxplug.cli.report import note

    loaded = load_target(text, inputs, pretrained=pretrained)
    if loaded.note:
        note(loaded.note)
    if isinstance(loaded.model, torch.nn.Module) and not isinstance(loaded.model, torch.jit.ScriptModule):
        loaded.model.eval()
    return loaded


def _positional_names(model: Any) -> list[str]:
    """The names of a model's positional parameters, as far as they have one."""
    try:
        parameters = inspect.signature(getattr(model, "forward", model)).parameters.values()
    except (TypeError, ValueError):
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.kind in kinds]


def _load_pt2(path: str) -> Target:
    check_file(path)
    check_archive(path)
    import torch

    from onnxplug.capture.quiet import quiet

    try:
        with quiet():
            return Target(torch.export.load(path))
    except Exception as error:
        raise OnnxplugError(f"{path} is not a program that torch.export.save wrote: {error}") from error


#: The hint where a library is missing or lacks a name, by the library: models of these libraries come from plugin packages.
_SOURCES = {
    library: f"{library}:{name} comes from the plugin package onnxplug-{library}, which is not active here."
    for library, name in (("torchvision", "NAME"), ("transformers", "FOLDER"), ("diffusers", "FOLDER"))
}


def _load_callable(text: str) -> Target:
    place, _, name = text.rpartition(":")
    module = _load_file(place) if place.endswith(".py") else _load_module(place)
    factory: Any = module
    for part in name.split("."):
        owner = factory
        factory = run_user_code(functools.partial(getattr, owner, part, None), text)
        if factory is None:
            attributes = getattr(owner, "__dict__", {})
            known = [n for n, value in attributes.items() if callable(value) and not n.startswith("_")]
            raise UsageError(f"{place} has no {name!r}", hint=did_you_mean(part, known, otherwise=_SOURCES.get(place)))
    import torch

    if isinstance(factory, torch.nn.Module | torch.export.ExportedProgram):
        return Target(factory)
    if not callable(factory):
        raise UsageError(f"{text} is {type_with_article(factory)}, not a function that makes a model")
    return _unpack(run_user_code(factory, f"{text}()"), text)


def _unpack(returned: Any, text: str) -> Target:
    import torch

    if isinstance(returned, torch.nn.Module | torch.export.ExportedProgram):
        return Target(returned)
    if isinstance(returned, tuple) and 2 <= len(returned) <= 3 and callable(returned[0]):
        model, args, *rest = returned
        args = (args,) if isinstance(args, torch.Tensor) else () if args is None else args
        kwargs = rest[0] if rest else {}
        if isinstance(args, tuple | list) and (kwargs is None or isinstance(kwargs, Mapping)):
            return Target(model, tuple(args), dict(kwargs or {}))
        wrong = f"{type_with_article(args)} as args" if not isinstance(args, tuple | list) else ""
        wrong = wrong or f"{type_with_article(kwargs)} as kwargs"
        raise UsageError(
            f"{text} returned {wrong}",
            hint="args is a tuple of the positional inputs, kwargs a dict of the named ones.",
        )
    raise UsageError(
        f"{text} returned {type_with_article(returned)}",
        hint="It must return a module, or (module, args) or (module, args, kwargs).",
    )


def _load_file(path: str) -> Any:
    if not os.path.isfile(path):
        raise UsageError(f"there is no file {path}")
    name = os.path.splitext(os.path.basename(path))[0]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} can't be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(name, module)
    folder = os.path.dirname(os.path.abspath(path))
    if folder not in sys.path:
        sys.path.insert(0, folder)
    loader = spec.loader
    run_user_code(lambda: loader.exec_module(module), path)
    return module


def _load_module(name: str) -> Any:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        module = None
    if module is None:
        raise UsageError(f"there is no module {name!r}", hint=_SOURCES.get(name, f"TARGET is {_FORMS}."))
    return run_user_code(lambda: importlib.import_module(name), name)


def run_user_code(function: Any, subject: str) -> Any:
    """Calls the user's code; its errors become a message with the user's own line.

    Raises:
        OnnxplugError: The code raised.
    """
    try:
        return function()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [f for f in frames if f.filename != __file__ and "importlib" not in f.filename]
        where = f" at {own[-1].filename}:{own[-1].lineno}" if own else ""
        raise OnnxplugError(f"{subject} raised {type(error).__name__}{where}: {error}") from error
