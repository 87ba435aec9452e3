"""A model's custom operators, and the libraries and kernels that run them; plugins supply these."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from onnxplug.errors import OnnxplugError, UsageError
from onnxplug.host import CustomOperators, Kernels
from onnxplug.kinds import check_lists
from onnxplug.plugin_api import OrtLibrary, ReferenceOp
from onnxplug.text import in_a_line, shortened

if TYPE_CHECKING:
    import onnx_ir as ir

ONNX_DOMAINS = ("", "ai.onnx", "ai.onnx.ml", "ai.onnx.training", "ai.onnx.preview.training", "ai.onnx.preview")


def custom_operators(model: ir.Model | str | bytes) -> CustomOperators:
    """The custom operators of a model, its subgraphs and its functions; a file's external weights are not read.

    Raises:
        UsageError: The file is not an ONNX model.
    """
    import onnx
    import onnx_ir as ir

    if isinstance(model, str):
        if model.endswith(".ort"):  # the operators of ONNX Runtime's own format can't be read
            return CustomOperators()
        path = model
        try:
            model = ir.load(path)
        except Exception as error:  # a value is computed twice, for example
            text = f"{type(error).__name__}: {in_a_line(error)}"
            raise UsageError(f"{shortened(path, 300)} is not a sound ONNX model: {text}") from error
    elif isinstance(model, bytes):
        if is_ort_format(model):
            return CustomOperators()
        model = ir.serde.deserialize_model(onnx.load_from_string(model))
    nodes = {(n.domain, n.op_type) for n in model.graph.all_nodes()}
    for function in model.functions.values():
        nodes |= {(n.domain, n.op_type) for n in function.all_nodes()}
    custom = sorted(n for n in nodes if n[0] not in ONNX_DOMAINS)
    bodies = {(f.domain, f.name) for f in model.functions.values()}
    return CustomOperators(tuple(sorted({d for d, _ in custom})), tuple(n for n in custom if n not in bodies))


def is_ort_format(content: bytes) -> bool:
    """Whether the content of a file is of ONNX Runtime's own format."""
    return content[4:8] == b"ORTM"


def onnxruntime_module() -> Any:
    """ONNX Runtime.

    Raises:
        OnnxplugError: It isn't installed.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise OnnxplugError(
            "running the model needs ONNX Runtime, which is not installed", hint="pip install 'onnxplug[ort]'"
        ) from error
    return onnxruntime


def available_providers() -> list[str]:
    """The execution providers of the installed ONNX Runtime."""
    return list(onnxruntime_module().get_available_providers())


def checked_items(items: Iterable[Any]) -> tuple[OrtLibrary | ReferenceOp, ...]:
    """The items of ``runtime=`` as a tuple.

    Raises:
        UsageError: It holds anything but ``OrtLibrary`` and ``ReferenceOp`` objects.
    """
    if not isinstance(items, OrtLibrary | ReferenceOp):
        check_lists(runtime=items)
    checked = tuple([items] if isinstance(items, OrtLibrary | ReferenceOp) else items)
    for item in checked:
        if not isinstance(item, OrtLibrary | ReferenceOp):
            raise UsageError(
                f"runtime= takes OrtLibrary and ReferenceOp objects, got {item!r}", hint="OrtLibrary('lib.so')"
            )
    return checked


def lacks_operator(error: Exception) -> bool:
    """Whether ONNX Runtime refused a model because of an unknown operator."""
    return "is not a registered function/op" in str(error) or "No Op registered for" in str(error)


def missing_text(kernels: Kernels, host: Any, lacking: Sequence[tuple[str, str]], *, reference: bool = True) -> str:
    """Why nothing runs these operators: the missing part of each plugin that could supply them."""
    names = ", ".join(f"{domain}::{op}" for domain, op in lacking)
    missing = "no library for ONNX Runtime and no reference kernel has" if reference else "no library has"
    it = "it" if len(lacking) == 1 else "them"
    lines = [f"nothing runs {names}: {missing} {it}", *(f"{r[0].upper()}{r[1:]}." for r in kernels.passed_over)]
    lines += [host.explain_domain(domain) for domain in sorted({domain for domain, _ in lacking})]
    if kernels.libraries:
        lines.append(f"Libraries that were loaded: {', '.join(map(str, kernels.libraries))}.")
    return "\n".join(lines)


MISSING_HINT = (
    "A plugin supplies an OrtLibrary or a ReferenceOp through its hook onnxplug_runtime, a call through runtime=[…]; a "
    "rule may also give the operator a body: g.function(…)."
)


def lacking_kernels(custom: CustomOperators, kernels: Kernels) -> list[tuple[str, str]]:
    """Operators without a body that no reference kernel computes."""
    return [op for op in custom.bodiless if op not in kernels.reference]


def unknown_operators(error: Exception, custom: CustomOperators) -> list[tuple[str, str]]:
    """The operators that an error of ONNX Runtime names as unknown; all custom operators if it names none."""
    named = re.findall(r"([\w.\-]+):(\w+)\(-?\d+\) is not a registered", str(error))
    return [n for n in named if n in custom.bodiless] or list(custom.bodiless)
