"""Capture: any kind of model becomes a ``torch.export.ExportedProgram``, undecomposed."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import itertools
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.export.graph_signature import OutputKind

from onnxplug.capture.attempts import Attempt, export_program
from onnxplug.capture.dynamic import (
    Example,
    check_expressions,
    declared_multiples,
    dimension_names,
    parse_dynamic_shapes,
)
from onnxplug.capture.input_names import by_argument
from onnxplug.capture.mentions import Mentions
from onnxplug.capture.patching import ONE_AT_A_TIME, is_of_attempt, made_by, patched
from onnxplug.capture.quantised import PACKAGE as QUANTISED, is_quantised
from onnxplug.capture.release import clear_size_caches
from onnxplug.capture.signature import Captured
from onnxplug.capture.size_guards import bound_warnings, narrowed, size_guards, warning_text
from onnxplug.capture.squeezes import squeezed_sizes, squeezed_text
from onnxplug.capture.weightless import tensors_without_numbers, weights_beside, with_numbers
from onnxplug.errors import CaptureError, UsageError
from onnxplug.packages import load
from onnxplug.plugin_api import CaptureMode, CaptureRequest, Patch
from onnxplug.text import type_with_article
from onnxplug.torch_private import is_traceable_wrapper_subclass, pytree, unset_fake_temporarily, warn_if_untested
from onnxplug.warn import warn


def capture(
    model: Any,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    strict: bool | None = None,
    input_names: Sequence[str] | None = None,
    patches: Sequence[Patch] = (),
    examples: Sequence[Example] = (),
    make_module: Callable[[Any], torch.nn.Module] | None = None,
    request: CaptureRequest | None = None,
) -> Captured:
    """Captures a model.

    Args:
        model: A Module, a function, an ``ExportedProgram`` (used as it is), a ``GraphModule``, or an argument of ``make_module``.
        args: Positional example inputs: a tuple or list, or a single tensor.
        dynamic_shapes: See :func:`onnxplug.to_onnx`.
        strict: ``torch.export``'s mode; ``None`` tries the non-strict mode, then the strict mode.
        input_names: The user's names of graph inputs; ``dynamic_shapes`` may use them.
        patches: The patches that hold during capture (:data:`onnxplug.plugin_api.Patch`).
        examples: Inputs of other calls; sizes that differ among the calls are dynamic.
        make_module: Makes the module to capture from a model of another kind.
        request: The export's options and rules, for patches.

    Raises:
        UsageError: The inputs don't fit the model's signature, or ``dynamic_shapes`` doesn't fit the inputs.
        CaptureError: torch.export failed, or a dimension that should be dynamic came out static.
    """
    warn_if_untested(torch.__version__, platform.python_version())
    positional = _as_tuple(args)
    keywords = dict(kwargs or {})
    positional, keywords, examples = with_numbers((positional, keywords, list(examples)))
    if isinstance(model, torch.export.ExportedProgram):
        captured = _of_program(model, positional, keywords, dynamic_shapes)
        captured.examples = list(examples)
        return captured
    started = time.perf_counter()
    module = as_module(model) if make_module is None else make_module(model)
    if make_module is not None:
        _refuse_strict(strict, f"a {type(model).__name__}")
        strict = False
    for args_, kwargs_ in ((positional, keywords), *examples):
        _check_signature(module, args_, kwargs_)
    module = _without_subclasses(module)
    clear_size_caches()
    with contextlib.ExitStack() as stack:
        stack.enter_context(unset_fake_temporarily())
        if make_module is None:
            stack.enter_context(weights_beside(module, (positional, keywords)))
        stack.enter_context(_keywords_spelled_out(module, keywords))
        mentions = Mentions(module)
        stack.enter_context(ONE_AT_A_TIME)
        about = dataclasses.replace(
            request or CaptureRequest(), module=module, args=positional, kwargs=keywords, mentions=mentions
        )
        offered: list[Sequence[CaptureMode]] = []
        of_attempts = [patch for patch in patches if is_of_attempt(patch)]
        for patch in (patch for patch in patches if not is_of_attempt(patch)):
            contexts = made_by(patch, module, about)
            if isinstance(contexts, contextlib.AbstractContextManager):
                stack.enter_context(contexts)
            elif contexts:
                offered.append(contexts)
        if make_module is None and not offered and is_quantised(module, mentions):
            raise UsageError(
                f"can't export a quantised model without the package {QUANTISED}", hint=f"pip install {QUANTISED}"
            )
        # Under the patches: a plugin's pytree nodes define the structure of inputs.
        dynamic_shapes = by_argument(dynamic_shapes, module, positional, keywords, input_names)
        calls = [(positional, keywords), *examples]
        inferred = load("examples=").shapes_of(module, calls) if examples else None
        shapes = parse_dynamic_shapes(dynamic_shapes or inferred, module, positional, keywords)
        if inferred is not None and dynamic_shapes:
            load("examples=").check_covered(shapes, parse_dynamic_shapes(inferred, module, positional, keywords))
        for call in calls:
            check_expressions(shapes, pytree.tree_leaves(call))
        try:
            export = functools.partial(
                export_program,
                module,
                positional,
                keywords,
                shapes,
                mentions=mentions,
                patches=of_attempts,
                request=about,
            )
            attempt = _exported(export, strict, offered)
        except CaptureError as error:
            if not offered and not strict and mentions(lambda name: name.startswith("quantize_per_")):
                install = f"Quantised tensors are captured by the package {QUANTISED}: pip install {QUANTISED}"
                error.hint = "\n".join(filter(None, (error.hint, install)))
            if lost := tensors_without_numbers(module):
                error.hint = (
                    f"The model keeps tensors on the device meta, which no weights can be given to, as plain attributes: "
                    f"{', '.join(lost)}. Register them as buffers, or make the model under onnxplug.fake_weights()."
                )
            raise
    result = _captured(attempt.program, model, positional, keywords, attempt.strategy, started)
    result.conditions, result.assumptions, result.repeated = attempt.conditions, attempt.assumptions, attempt.repeated
    result.bounds, result.numbers = attempt.bounds, attempt.numbers
    result.dim_names = {**attempt.names, **dimension_names(attempt.program, shapes)}
    result.multiples = declared_multiples(attempt.program, shapes)
    result.examples = list(examples)
    return result


def _refuse_strict(strict: bool | None, kind: str) -> None:
    if strict:
        raise UsageError(f"{kind} is captured in torch.export's non-strict mode, but strict=True is given")


def _exported(export: Callable[..., Attempt], strict: bool | None, offered: Sequence[Sequence[CaptureMode]]) -> Attempt:
    """The capture in the first combination of the patches' modes in which it succeeds.

    Raises:
        CaptureError: It succeeds in none; the first error is raised.
    """
    failed: list[CaptureError] = []
    for modes in itertools.product(*offered):
        strictness = next((mode.strict for mode in modes if mode.strict is not None), None)
        try:
            with contextlib.ExitStack() as stack:
                for mode in modes:
                    stack.enter_context(mode.context())
                return export(strict=strict if strict is not None else strictness)
        except CaptureError as error:
            failed.append(error)
    raise failed[0]


def _captured(
    program: torch.export.ExportedProgram, model: Any, args: Any, kwargs: Any, strategy: str, started: float
) -> Captured:
    return Captured(
        program=program,
        reference=model,
        args=args,
        kwargs=kwargs,
        strategy=strategy,
        seconds=time.perf_counter() - started,
    )


def _of_program(program: torch.export.ExportedProgram, args: Any, kwargs: Any, dynamic_shapes: Any) -> Captured:
    if dynamic_shapes is not None:
        raise UsageError(
            "dynamic_shapes can't be given with an ExportedProgram: its shapes are fixed already",
            hint="Pass them to torch.export.export instead.",
        )
    program = _with_gradients_in_structure(program)
    if not args and not kwargs and program.example_inputs is not None:
        args, kwargs = program.example_inputs
    guards = size_guards(program, {}, one_size=False)  # the user who exported it has named the sizes
    squeezed = squeezed_sizes(program, narrowed({}, guards.bounds), of_ones=True)
    conditions = [*guards.conditions, *squeezed, *(bound for bound in guards.bounds if bound.of_code)]
    captured = Captured(program=program, args=tuple(args), kwargs=dict(kwargs), conditions=conditions)
    names = captured.size_names()
    texts = [warning_text(condition, names) for condition in guards.conditions]
    texts += [*bound_warnings(guards.bounds, names), *(squeezed_text(condition, names) for condition in squeezed)]
    for text in texts:
        warn(text)
    return captured


def _with_gradients_in_structure(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program itself, or a copy whose result structure includes the gradients that torch has added to its loss.

    Otherwise the program's module would not run.
    """
    signature = program.graph_signature
    if all(spec.kind is not OutputKind.LOSS_OUTPUT for spec in signature.output_specs):
        return program
    beside = (OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION, OutputKind.TOKEN)
    results = [spec for spec in signature.output_specs if spec.kind not in beside]
    structure = pytree.tree_structure(tuple(range(len(results))))
    program, calls = copy.copy(program), list(program.module_call_graph)
    assert calls[0].signature is not None
    calls[0] = dataclasses.replace(calls[0], signature=dataclasses.replace(calls[0].signature, out_spec=structure))
    program._module_call_graph = calls
    return program


def _as_tuple(args: Any) -> tuple[Any, ...]:
    if isinstance(args, torch.Tensor):
        return (args,)
    if isinstance(args, tuple | list):
        return tuple(args)
    raise UsageError(
        f"args must be a tuple of inputs, got {type_with_article(args)}", hint="Named inputs go into kwargs=."
    )


def as_module(model: Any) -> torch.nn.Module:
    """A model as a module; a function becomes the ``forward`` of a module.

    Raises:
        UsageError: It is neither; or it is a script, which torch.export does not accept.
    """
    if is_script(model):
        raise UsageError(
            f"can't export a {type(model).__name__} of TorchScript without the package onnxplug-torchscript",
            hint="pip install onnxplug-torchscript",
        )
    if isinstance(model, torch.nn.Module):
        return model
    if isinstance(model, type):
        raise UsageError(f"the model is the class {model.__name__}, not a model", hint=f"Give {model.__name__}().")
    if callable(model):
        module = torch.nn.Module().eval()
        # As an instance attribute the function's own signature names the inputs.
        module.forward = model if _has_signature(model) else _with_signature(model)
        _record_source_lines(model)
        return module
    raise UsageError(
        f"can't export {type_with_article(model)}",
        hint="Give a torch.nn.Module, a function, an ExportedProgram, a GraphModule or a ScriptModule.",
    )


def is_script(model: Any) -> bool:
    """Whether a model is a TorchScript module or function."""
    return isinstance(model, torch.jit.ScriptModule | torch.jit.ScriptFunction)


@contextlib.contextmanager
def _keywords_spelled_out(module: torch.nn.Module, kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Gives a ``forward(..., **kwargs)`` the signature of the keywords that it is called with.

    torch.export (2.13) has no dynamic shapes for inputs within ``**kwargs``.
    """
    try:
        signature = inspect.signature(module.forward)
    except (TypeError, ValueError):
        yield
        return
    parameters = signature.parameters
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    extra = [name for name in kwargs if name not in parameters]
    if not open_ended or not extra:
        yield
        return
    original = module.forward

    def forward(*args: Any, **keywords: Any) -> Any:
        return original(*args, **keywords)

    kept = [p for p in parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    spelled = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in extra]
    forward.__signature__ = signature.replace(parameters=[*kept, *spelled])  # type: ignore[attr-defined]
    with patched(module, "forward", forward):
        yield


def _without_subclasses(module: torch.nn.Module) -> torch.nn.Module:
    """A copy of the model whose weights are plain tensors, where some are tensor subclasses (torchao's quantised weights).

    Otherwise torch.export hides their tensors behind operators that no exporter can translate.
    """
    if not any(is_traceable_wrapper_subclass(p) for p in (*module.parameters(), *module.buffers())):
        return module
    from onnxplug.torch_private import unwrap_tensor_subclass_parameters

    return unwrap_tensor_subclass_parameters(copy.deepcopy(module))


def _has_signature(function: Any) -> bool:
    try:
        inspect.signature(function)
    except (TypeError, ValueError):  # builtins of C
        return False
    return True


def _with_signature(function: Any) -> Any:
    def forward(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return forward


def _record_source_lines(function: Any) -> None:
    """Makes torch keep the lines of a function that isn't named ``forward``; otherwise errors name no line."""
    from onnxplug.torch_private import register_stack_trace_anchor

    register_stack_trace_anchor(function)


def _check_signature(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(module.forward)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise UsageError(
            f"the inputs don't fit forward{signature}: {error}",
            hint="args= holds the positional inputs, kwargs= the named ones.",
        ) from None
