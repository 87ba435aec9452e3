"""torch's private names, and the replacements when a version of torch lacks one.

Nothing else imports a private name of torch: ``from onnxplug.torch_private import FakeTensor``. Each name is looked up at first
use. A missing name raises :class:`OnnxplugError`, unless it has a replacement.
"""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from onnxplug.errors import OnnxplugError
from onnxplug.warn import warn

if TYPE_CHECKING:
    from torch._C import DispatchKey as DispatchKey, DispatchKeySet as DispatchKeySet
    from torch._library.fake_impl import FakeImplCtx as FakeImplCtx
    from torch._ops import (
        HigherOrderOperator as HigherOrderOperator,
        OpOverload as OpOverload,
        OpOverloadPacket as OpOverloadPacket,
    )
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor, FakeTensorMode as FakeTensorMode
    from torch.utils import _pytree

    pytree = _pytree

#: The releases of torch that the suite runs on, by those of Python (docs/versions.md).
TESTED = {"3.11": ("2.9", "2.13"), "3.12": ("2.13",), "3.13": ("2.13", "2.15")}


class _Private(NamedTuple):
    """One private name.

    Attributes:
        place: Its module and, after a colon, the name there.
        purpose: The feature that needs it, for the error when it is missing.
        instead: Makes a replacement.
    """

    place: str
    purpose: str
    instead: Callable[[], Any] | None = None


def _alias_by_storage() -> Callable[[Any, Any], bool]:
    return lambda a, b: bool(a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr())


def _wraps_tensors() -> Callable[[Any], bool]:
    return lambda x: hasattr(type(x), "__tensor_flatten__") and hasattr(type(x), "__tensor_unflatten__")


def _no_op(*_: Any) -> None:
    """Replaces a function that only informs torch."""


def _no_tracer() -> type:
    return type("NoTracer", (), {"call_module": _no_op, "create_node": _no_op, "trace": _no_op})


def _graph_module() -> type:
    from torch.fx import GraphModule

    return GraphModule


def _sympy_notation() -> type:
    from sympy.printing.str import StrPrinter

    return StrPrinter


def _dim_hint() -> type:
    from torch.export import Dim

    return type(Dim.AUTO)


_NAMES = {
    # Without these no export works.
    "FakeTensor": _Private("torch._subclasses.fake_tensor:FakeTensor", "types and shapes of a captured program"),
    "FakeImplCtx": _Private("torch._library.fake_impl:FakeImplCtx", "sizes that data decide, of custom operators"),
    "FakeTensorMode": _Private("torch._subclasses.fake_tensor:FakeTensorMode", "tracing an operator without computing"),
    "HigherOrderOperator": _Private("torch._ops:HigherOrderOperator", "telling torch.cond and its like from operators"),
    "OpOverload": _Private("torch._ops:OpOverload", "telling operators from functions"),
    "OpOverloadPacket": _Private("torch._ops:OpOverloadPacket", "finding the overloads of an operator"),
    "SingleLevelFunction": _Private(
        "torch.autograd.function:_SingleLevelFunction", "keeping an autograd.Function whole"
    ),
    "pytree": _Private("torch.utils._pytree:", "flattening inputs and outputs"),
    "DispatchKey": _Private("torch._C:DispatchKey", "kernels of single operators"),
    "DispatchKeySet": _Private("torch._C:DispatchKeySet", "kernels of single operators"),
    "detect_fake_mode": _Private("torch._guards:detect_fake_mode", "telling tracing from computing"),
    "fx_config": _Private("torch.fx.experimental._config:", "dynamic dimensions of size 0 and 1"),
    "ValueRanges": _Private("torch.utils._sympy.value_ranges:ValueRanges", "what ranges of sizes imply"),
    "bound_sympy": _Private("torch.utils._sympy.value_ranges:bound_sympy", "what ranges of sizes imply"),
    "prims_common": _Private("torch._prims_common:", "means of complex tensors"),
    "sympy_functions": _Private("torch.utils._sympy.functions:", "quotients of sizes"),
    "SymT": _Private("torch.utils._sympy.symbol:SymT", "dynamic dimensions of size 0"),
    "int_oo": _Private("torch.utils._sympy.numbers:int_oo", "ranges of sizes without an end"),
    # Without these a kind of model cannot be exported.
    "DynamicOutputShapeException": _Private(
        "torch._subclasses.fake_tensor:DynamicOutputShapeException", "packed sequences"
    ),
    "UnsupportedOperatorException": _Private(
        "torch._subclasses.fake_tensor:UnsupportedOperatorException", "errors that name operators without a fake kernel"
    ),
    "VF": _Private("torch._VF:", "packed sequences"),
    "fake_implementations": _Private("torch._subclasses.fake_impls:op_implementations_dict", "packed sequences"),
    "unwrap_tensor_subclass_parameters": _Private(
        "torch._functorch._aot_autograd.subclass_parametrization:unwrap_tensor_subclass_parameters",
        "weights that are tensor subclasses",
    ),
    "wrap_script": _Private("torch.jit._recursive:wrap_cpp_module", "the submodules that torch.jit.freeze keeps"),
    "inline_calls": _Private("torch._C:_jit_pass_inline", "functions that ScriptModules call"),
    "cond_op": _Private("torch._higher_order_ops.cond:cond_op", "branches of ScriptModules"),
    "while_loop_op": _Private("torch._higher_order_ops.while_loop:while_loop_op", "loops of ScriptModules"),
    "while_loop_stack_output": _Private(
        "torch._higher_order_ops.while_loop:while_loop_stack_output_op", "loops that keep the result of each iteration"
    ),
    "scans": _Private("torch._higher_order_ops.scan:", "lists that grow in loops of ScriptModules"),
    "scan": _Private("torch._higher_order_ops.scan:scan", "associative scans of dynamic length"),
    "associative_scans": _Private(  # sizes of an associative scan become constants
        "torch._higher_order_ops.associative_scan:", "associative scans of dynamic sizes", SimpleNamespace
    ),
    "quantized_operators": _Private("torch.ao.quantization.fx._decomposed:", "eager-mode quantised models"),
    "meta_registrations": _Private("torch._meta_registrations:", "sizes of pools in ceil mode"),
    "TorchDispatchMode": _Private("torch.utils._python_dispatch:TorchDispatchMode", "verifying quantised models"),
    "has_kernel_for_dispatch_key": _Private(
        "torch._C:_dispatch_has_kernel_for_dispatch_key", "operators of libraries without a kernel for shapes"
    ),
    **{
        name: _Private(f"torch._higher_order_ops.auto_functionalize:{name}", "custom operators that write arguments")
        for name in "get_mutable_args read_view_information_from_args NotView AsStridedViewInfo SliceViewInfo".split()
    },
    **{
        f"Jit{name}": _Private(f"torch._C:{name}", "TorchScript symbolic functions")
        for name in "Graph Value TensorType ListType NoneType StringType".split()
    },
    **{
        name: _Private(f"torch.onnx._internal.torchscript_exporter.{place}", "TorchScript symbolic functions")
        for name, place in {
            "GraphContext": "jit_utils:GraphContext",
            "JitScalarType": "_type_utils:JitScalarType",
            "torchscript_globals": "_globals:GLOBALS",
            "torchscript_registration": "registration:",
        }.items()
    },
    "torch_c": _Private("torch._C:", "LSTMs under torch.compile"),
    "TracingContext": _Private("torch._guards:TracingContext", "torch.compile of training"),
    "PythonPrinter": _Private("torch.utils._sympy.printers:PythonPrinter", "torch.compile with dynamic sizes"),
    "dynamo_config": _Private("torch._dynamo.config:", "higher-order operators"),
    "higher_order_utilities": _Private("torch._higher_order_ops.utils:", "higher-order operators"),
    "dynamo_instructions": _Private("torch._dynamo.symbolic_convert", "the identity of sizes, in the strict mode"),
    "dynamo_utilities": _Private(
        "torch._dynamo.utils:", "numbers that operations refuse, in the strict mode", SimpleNamespace
    ),
    "dynamo_lists": _Private("torch._dynamo.variables.lists", "a number among sizes, in the strict mode"),
    "SourcelessBuilder": _Private(
        "torch._dynamo.variables.builder:SourcelessBuilder", "a number among sizes, in the strict mode"
    ),
    "SymNodeVariable": _Private("torch._dynamo.variables:SymNodeVariable", "a number among sizes, in the strict mode"),
    "aot_autograd": _Private("torch._dynamo.backends.common:aot_autograd", "torch.compile backends"),
    "disable_current_modes": _Private("torch.utils._python_dispatch:_disable_current_modes", "torch.compile backends"),
    "min_cut_rematerialization_partition": _Private(
        "torch._functorch.partitioners:min_cut_rematerialization_partition", "torch.compile of training"
    ),
    "disable_torch_function": _Private("torch._C:DisableTorchFunction", "transforms of functions within a model"),
    # Without these an export is less precise.
    "NonStrictFunctions": _Private(  # windows and other tensors made of dynamic sizes are refused
        "torch._export.non_strict_utils:_NonStrictTorchFunctionHandler",
        "functions that make tensors of dynamic sizes",
        SimpleNamespace,
    ),
    "function_modes": _Private(  # a list as long as a dynamic size makes it a constant
        "torch.overrides:_get_current_function_mode_stack", "lists as long as dynamic sizes", lambda: list
    ),
    "function_mode_enabled": _Private(
        "torch._C:_is_torch_function_mode_enabled", "lists as long as dynamic sizes", lambda: bool
    ),
    "unset_fake_temporarily": _Private(  # an export under a FakeTensorMode sees tensors without numbers
        "torch._subclasses.fake_tensor:unset_fake_temporarily",
        "exports under a FakeTensorMode",
        lambda: contextlib.nullcontext,
    ),
    "compiled_codes": _Private(  # sizes of an earlier capture may make sizes of the next capture constants
        "torch._dynamo.convert_frame:input_codes", "higher-order operators", lambda: SimpleNamespace(seen=())
    ),
    "forget_compiled": _Private("torch._dynamo.eval_frame:remove_from_cache", "higher-order operators", lambda: _no_op),
    "is_transformed": _Private(
        "torch._C._functorch:is_functorch_wrapped_tensor",
        "transforms of functions within a model",
        lambda: lambda _: False,
    ),
    "transforms_depth": _Private(  # a capture that fails within torch.vmap leaves it open
        "torch._C._functorch:get_dynamic_layer_stack_depth", "transforms of functions within a model", lambda: lambda: 0
    ),
    "undo_transforms": _Private(
        "torch._C._functorch:pop_dynamic_layer_stack_and_undo_to_depth",
        "transforms of functions within a model",
        lambda: _no_op,
    ),
    "keeps_graph": _Private(  # inputs of compiled graphs live as long as their results
        "torch._C._autograd:_get_current_graph_task_keep_graph", "second derivatives", lambda: lambda: True
    ),
    "higher_order_operators": _Private(  # names of higher-order operators are not checked
        "torch._ops:_higher_order_ops", "the names of higher-order operators", dict
    ),
    "uninteresting_files": _Private(  # decompositions that ask about strides may be refused
        "torch.fx.experimental.symbolic_shapes:uninteresting_files", "telling what asks of sizes", lambda: frozenset
    ),
    "registered_operators": _Private(  # no suggestion for a misspelt operator
        "torch._C:_dispatch_get_all_op_names", "the names of all operators", lambda: list
    ),
    "operator_registry": _Private(
        "torch._library.simple_registry:singleton", "fake kernels of operators that another library registered"
    ),
    "is_alias_of": _Private("torch._C:_is_alias_of", "telling outputs that are inputs", _alias_by_storage),
    "is_traceable_wrapper_subclass": _Private(
        "torch.utils._python_dispatch:is_traceable_wrapper_subclass",
        "weights that are tensor subclasses",
        _wraps_tensors,
    ),
    "DimHint": _Private("torch.export.dynamic_shapes:_DimHint", "Dim.AUTO and its like", _dim_hint),
    "register_stack_trace_anchor": _Private(  # errors in functions that are not called forward name no line
        "torch.fx.proxy:_register_stack_trace_anchor", "the user's lines", lambda: _no_op
    ),
    "tracing_state_functions": _Private(  # torch.onnx.is_in_onnx_export() is False in the strict mode
        "torch._dynamo.variables.torch:tracing_state_functions", "is_in_onnx_export() in the strict mode", lambda: dict
    ),
    "python_notation": _Private(
        "torch.utils._sympy.printers:PythonPrinter", "conditions on sizes as Python", _sympy_notation
    ),
    "onnx_export_flags": _Private(  # torch.onnx.is_in_onnx_export() is False during capture
        "torch.onnx._internal.exporter._flags:", "is_in_onnx_export() during capture", SimpleNamespace
    ),
    "rename_axis": _Private("torch.onnx._internal.exporter._ir_passes:rename_axis", "names of dynamic_axes"),
    "interned_files": _Private(  # findings of draft_export name no line
        "torch._logging.structured:INTERN_TABLE", "the lines that torch.export.draft_export names", dict
    ),
    # Each operator call is traced.
    "ModuleStackTracer": _Private(
        "torch.fx.experimental.proxy_tensor:_ModuleStackTracer", "capture in less time", _no_tracer
    ),
    "proxies": _Private("torch.fx.experimental.proxy_tensor:", "capture in less time", SimpleNamespace),
    "export_trace": _Private("torch.export._trace:", "capture in less time", SimpleNamespace),
    "dispatch_utilities": _Private("torch._library.utils:", "capture in less time", SimpleNamespace),
    "operator_dispatch": _Private("torch._ops:", "capture in less time", SimpleNamespace),
    "set_grad_pass": _Private(
        "torch._export.passes.replace_set_grad_with_hop_pass:", "capture in less time", SimpleNamespace
    ),
    "exported_programs": _Private("torch.export.exported_program:", "capture in less time", SimpleNamespace),
    "make_graph_module": _Private(
        "torch.fx._lazy_graph_module:_make_graph_module", "capture in less time", _graph_module
    ),
    "is_functional_tensor": _Private("torch:_is_functional_tensor", "capture in less time", lambda: lambda _: True),
    "share_memory": _Private("torch:_functionalize_unsafe_set", "capture in less time", SimpleNamespace),
    "ProxyTensor": _Private("torch.fx.experimental.proxy_tensor:_ProxyTensor", "capture in less time", SimpleNamespace),
    "Thunk": _Private("torch.utils._thunk:Thunk", "capture in less time", SimpleNamespace),
    "pre_dispatch_modes": _Private(
        "torch._ops:_len_torch_dispatch_stack_pre_dispatch", "capture in less time", SimpleNamespace
    ),
    **{
        # The public names refuse after torch.backends.disable_global_flags(), which torch's test library calls.
        name: _Private(f"torch._C:{place}", "products of float32 in float32", instead)
        for name, place, instead in (
            ("get_float32_precision", "_get_fp32_precision_getter", lambda: lambda library, operator: "none"),
            ("set_float32_precision", "_set_fp32_precision_setter", lambda: _no_op),
            ("get_cudnn_allow_tf32", "_get_cudnn_allow_tf32", lambda: lambda: True),
            ("set_cudnn_allow_tf32", "_set_cudnn_allow_tf32", lambda: _no_op),
        )
    },
    "use_lazy_graph_module": _Private(  # graphs between torch.export's passes become Python code
        "torch.fx._lazy_graph_module:_use_lazy_graph_module", "capture in less time", lambda: contextlib.nullcontext
    ),
    # Operators without a rule are decomposed by their composite kernel alone.
    "decomposition_table": _Private("torch._decomp:decomposition_table", "torch's decompositions", dict),
    "references": _Private("torch._refs:", "torch's decompositions", SimpleNamespace),
    "custom_operators": _Private("torch._library.custom_ops:OPDEFS", "bodies of triton operators", dict),
    "triton_kernels": _Private("torch._library.triton:triton_ops_to_kernels", "bodies of triton operators", dict),
    "infer_torchscript_shapes": _Private(  # symbolic functions may see constants of an earlier export
        "torch._C:_jit_pass_onnx_graph_shape_type_inference", "TorchScript symbolic functions", lambda: _no_op
    ),
    "torchscript_max_opset": _Private(
        "torch.onnx._constants:ONNX_TORCHSCRIPT_EXPORTER_MAX_OPSET", "TorchScript symbolic functions", lambda: 20
    ),
}


def backed_values(env: Any) -> dict[Any, Any]:
    """The example's sizes of a ``ShapeEnv``, by their symbols; only symbols that the inputs have."""
    values: dict[Any, Any] = env.var_to_val if not hasattr(env, "backed_var_to_val") else env.backed_var_to_val  # 2.9
    return values


def decompositions_of(mode: Any) -> Any:
    """The decompositions that a ``ProxyTorchDispatchMode`` applies, by operators."""
    table = getattr(mode, "decomposition_table", None)  # torch 2.9 has a table for all modes
    return (
        importlib.import_module("torch.fx.experimental.proxy_tensor").CURRENT_DECOMPOSITION_TABLE
        if table is None
        else table
    )


def child_of(spec: Any, index: int) -> Any:
    """The child at an index of a ``TreeSpec``."""
    return spec.child(index) if hasattr(spec, "child") else spec.children_specs[index]  # the latter: torch 2.9


@cache
def warn_if_untested(torch_version: str, python_version: str) -> None:
    """Warns, once, about a torch and a Python that onnxplug was not tested with together."""
    if _release(torch_version) not in TESTED.get(_release(python_version), ()):
        warn(f"onnxplug was not tested with torch {torch_version} on Python {python_version}, but with {_tested()}")


def _tested() -> str:
    return ", ".join(f"torch {' and '.join(torchs)} on Python {python}" for python, torchs in TESTED.items())


def _release(version: str) -> str:
    """The first two numbers of a version: ``2.15`` of ``2.15.0a0+cpu``."""
    return ".".join(re.findall(r"\d+", version)[:2])


def __getattr__(name: str) -> Any:
    """A private name of torch.

    Raises:
        OnnxplugError: This torch lacks it.
    """
    private = _NAMES.get(name)
    if private is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = private.place.partition(":")
    try:
        imported = importlib.import_module(module)
        value = getattr(imported, attribute) if attribute else imported
    except (ImportError, AttributeError) as error:
        if private.instead is None:
            import torch

            raise OnnxplugError(
                f"torch {torch.__version__} has no {private.place.rstrip(':').replace(':', '.')}, which onnxplug needs for "
                f"{private.purpose}",
                hint=f"onnxplug is tested with {_tested()}.",
            ) from error
        value = private.instead()
    globals()[name] = value
    return value
