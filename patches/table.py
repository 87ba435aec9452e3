"""onnxplug's patches of torch, each with its purpose and the test that needs it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal

from onnxplug.capture.patches import TorchPatch
from onnxplug.patches.assigned import assigned_tensors_noted
from onnxplug.patches.associative import associative_scans_of_any_size
from onnxplug.patches.attention import attention_by_its_masks
from onnxplug.patches.complex_sizes import sizes_beside_complex_numbers
from onnxplug.patches.conversions import conversions_that_change_nothing
from onnxplug.patches.copies import copies_of_tensors
from onnxplug.patches.data_sizes import sizes_that_follow_from_data
from onnxplug.patches.distributions import samples_drawn_in_the_graph
from onnxplug.patches.factories import factories_of_any_size
from onnxplug.patches.fakes import results_in_one_step
from onnxplug.patches.handled import handled_errors
from onnxplug.patches.indices import indices_without_numbers
from onnxplug.patches.kept_weights import weights_replaced_everywhere
from onnxplug.patches.kinds import kinds_as_in_pytorch
from onnxplug.patches.known_numbers import numbers_of_buffers
from onnxplug.patches.lengths import lengths_stay_dynamic
from onnxplug.patches.lists import lists_of_any_length
from onnxplug.patches.members import members_are_compared
from onnxplug.patches.norms import norms_of_any_size
from onnxplug.patches.onnx_flag import onnx_export_flag, onnx_export_flag_in_dynamo
from onnxplug.patches.operator_calls import operator_calls_repeated, repeats_calls
from onnxplug.patches.packed import packed_sequences
from onnxplug.patches.padded_sizes import sizes_rounded_up
from onnxplug.patches.plain_numbers import numbers_stay_dynamic
from onnxplug.patches.quotients import quotients_cancelled
from onnxplug.patches.seeds import is_needed, seeds_kept
from onnxplug.patches.shapes import shape_kernels
from onnxplug.patches.state import state_of
from onnxplug.patches.tensor_classes import classes_named
from onnxplug.patches.timing import modules_timed
from onnxplug.patches.tracing import lean_tracing
from onnxplug.plugin_api import CaptureRequest

PATCHES: tuple[TorchPatch, ...] = (
    TorchPatch(
        name="onnx flag",
        target="torch.onnx._flags._is_onnx_exporting",
        why="Models branch on torch.onnx.is_in_onnx_export(), which is true in torch.onnx.export alone.",
        test="tests/capture/test_attempts.py::test_a_model_sees_that_it_is_being_exported[None]",
        enter=lambda request: onnx_export_flag(),
    ),
    TorchPatch(
        name="conversions",
        target="torch.nn.Module._apply",
        why="module.to(...) swaps fake parameters for themselves: an error, or a write to the parameter.",
        test="tests/capture/test_conversions.py::test_a_conversion_that_changes_nothing_is_no_write",
        enter=lambda request: conversions_that_change_nothing(),
    ),
    TorchPatch(
        name="copies",
        target="torch._subclasses.fake_tensor.FakeTensor.__deepcopy__",
        why="copy.deepcopy(tensor) asks where the tensor's numbers are: an error.",
        test="tests/capture/test_copies.py::test_a_deep_copy_of_a_tensor",
        enter=lambda request: copies_of_tensors(),
    ),
    TorchPatch(
        name="len",
        target="len, in the Python modules of the model's code",
        why="len(tensor) is a plain number, which makes a dynamic size a constant.",
        test="tests/capture/test_lengths.py::test_length_of_a_tensor",
        enter=lambda request: lengths_stay_dynamic(request.mentions),
    ),
    TorchPatch(
        name="attention",
        target="torch.nn.modules.transformer._detect_is_causal_mask, torch.backends.mha",
        why="nn.Transformer branches on the values of a mask, and fuses a layer into an operator that ONNX lacks.",
        test="tests/capture/test_attention.py::test_masks_of_any_values_and_sizes",
        enter=lambda request: attention_by_its_masks(),
    ),
    TorchPatch(
        name="distributions",
        target="torch.distributions.Distribution._validate_args, von_mises._rejection_sample, Wishart.rsample",
        why="Distributions branch on the values of parameters, unless they are made with validate_args=True, and of samples.",
        test="tests/converters/test_distributions.py::test_densities_are_computed_unchecked",
        enter=lambda request: samples_drawn_in_the_graph(),
    ),
    TorchPatch(
        name="shape kernels",
        target="py_kernels of recurrent layers, fake quantisation, dequantize, gradients of interpolation, pools, norms, draws",
        why="Recurrent layers are traced step by step, which fixes their number; the others have no kernel for dynamic sizes.",
        test="tests/capture/test_patches.py::test_a_recurrent_layer_is_found_wherever_the_model_holds_it[closure]",
        enter=lambda request: shape_kernels(request.mentions),
    ),
    TorchPatch(
        name="norms",
        target="torch.nn.functional._verify_spatial_size and local_response_norm, py_kernels of batch_norm and instance_norm",
        why="They ask for sizes that follow from data.",
        test="tests/capture/test_sizes.py::test_local_response_norm_of_a_size_that_follows_from_data[LocalResponseNorm-0-3]",
        enter=lambda request: norms_of_any_size(request.mentions),
    ),
    TorchPatch(
        name="sizes that follow from data",
        target="NonStrictFunctions._override (take_along_dim, kron, multi_dot, chain_matmul, gradient, cov, corrcoef), "
        "torch.nn.AdaptiveLogSoftmaxWithLoss, "
        "ShapeEnv._constrain_range_for_size, FakeImplCtx.create_unbacked_symint",
        why="These functions need sizes as plain numbers, the layer branches on how many targets a cluster has, and torch divides "
        "the bound of a number of elements in floats: an error where the number is said to be a multiple of a size. It takes "
        "2 for the least number of results of a custom operator.",
        test="tests/capture/test_sizes.py::test_functions_that_need_plain_sizes[cov]",
        enter=lambda request: sizes_that_follow_from_data(request.mentions),
    ),
    TorchPatch(
        name="factories",
        target="torch._export.non_strict_utils._NonStrictTorchFunctionHandler._override, torch.linspace, istft",
        why="Windows, linspace, tensor(…), istft and the like make a constant of a dynamic size.",
        test="tests/capture/test_factories.py::test_windows_with_all_arguments",
        enter=lambda request: factories_of_any_size(request.mentions),
    ),
    TorchPatch(
        name="indices",
        target="torch._export.non_strict_utils._NonStrictTorchFunctionHandler._override",
        why="Indices are read as plain numbers: a size becomes a constant, a tensor without axes an error, and True is 1.",
        test="tests/capture/test_indices.py::test_written_at_an_index_that_follows_from_data",
        enter=lambda request: indices_without_numbers(),
    ),
    TorchPatch(
        name="packed sequences",
        target="torch._VF._pack_padded_sequence and _pad_packed_sequence, nn.RNNBase and its layers, fake implementations",
        why="The numbers of rows and of sequences of a packed sequence are unknown, and torch's functions ask for both.",
        test="tests/converters/test_packed.py::test_lengths_as_a_list",
        enter=lambda request: packed_sequences(request.mentions),
    ),
    TorchPatch(
        name="quotients",
        target="the name sympy in torch.utils._sympy.functions",
        why="torch has sympy simplify quotients of sizes: minutes where sizes come from many layers.",
        test="tests/capture/test_quotients.py::test_sizes_of_many_layers",
        enter=lambda request: quotients_cancelled(),
    ),
    TorchPatch(
        name="complex sizes",
        target="torch._prims_common.dtype_to_type_ctor",
        why="complex(size) makes a dynamic size a constant, in means and variances of complex tensors.",
        test="tests/capture/test_complex_sizes.py::test_sizes_beside_complex_tensors[mean]",
        enter=lambda request: sizes_beside_complex_numbers(),
    ),
    TorchPatch(
        name="padded sizes",
        target="Mod, PythonMod, FloorDiv, CeilToInt, Max and Min in torch.utils._sympy.functions",
        why="Sizes that are divided or padded to a multiple have a form for each way to write them, which grows with the layers.",
        test="tests/capture/test_padded_sizes.py::test_convolutions_that_keep_sizes",
        enter=lambda request: sizes_rounded_up(),
    ),
    TorchPatch(
        name="associative scans",
        target="torch._higher_order_ops.associative_scan.generic_associative_scan",
        why="Its algorithm makes a dynamic number of elements a constant.",
        test="tests/capture/test_associative.py::test_named_dimensions",
        enter=lambda request: associative_scans_of_any_size(request.mentions),
    ),
    TorchPatch(
        name="state of the model",
        scope="attempt",
        target="the model, and what its code reaches",
        why="The model's code keeps tensors of the trace, which its next call and the next attempt would find.",
        test="tests/capture/test_state.py::test_eager_after_an_export",
        enter=lambda request: state_of(request).restored(request.warnings),
    ),
    TorchPatch(
        name="assigned tensors",
        scope="attempt",
        target="torch.export._trace.register_buffer_assignment_hook, hooks of the model",
        why="torch.export records no assignment to a buffer of an inner module, for the outermost module copies one by one, and "
        "leaves away without a word what is assigned to other tensors.",
        test="tests/capture/test_assigned.py::test_written[inner-mean]",
        enter=assigned_tensors_noted,
    ),
    TorchPatch(
        name="onnx flag in Dynamo",
        scope="attempt",
        target="torch._dynamo.variables.torch.tracing_state_functions",
        why="The strict mode takes torch.onnx.is_in_onnx_export() for the constant False.",
        test="tests/capture/test_attempts.py::test_a_model_sees_that_it_is_being_exported[True]",
        enter=lambda request: onnx_export_flag_in_dynamo(),
        needed=lambda request: request.strict,
    ),
    TorchPatch(
        name="members in Dynamo",
        scope="attempt",
        target="torch._dynamo.variables.lists.iter_contains",
        why="The strict mode takes no size to be equal to a number that it is searched among, and asks nothing.",
        test="tests/capture/test_questions.py::test_a_form_of_asking_is_right_or_said[number in shape-True]",
        enter=lambda request: members_are_compared(),
        needed=lambda request: request.strict,
    ),
    TorchPatch(
        name="kinds",
        scope="attempt",
        target="isinstance, type and id in the Python modules of the model, FakeTensor.__class__, FakeTensorMode.from_tensor",
        why="Traced tensors and sizes have other classes, and not the attributes that were set on weights and inputs.",
        test="tests/capture/test_kinds.py::test_classes_and_attributes[isinstance of a size]",
        enter=lambda request: kinds_as_in_pytorch(request.mentions),
        needed=lambda request: not request.strict,
    ),
    TorchPatch(
        name="plain numbers",
        scope="attempt",
        target="the code of the model's functions that calls int, float, divmod, max or min, math.sqrt, torch.Size.numel",
        why="int(size) makes a dynamic size a constant, and int(tensor) asks for a number.",
        test="tests/capture/test_plain_numbers.py::test_sizes[int(n)]",
        enter=lambda request: numbers_stay_dynamic(request.mentions),
        needed=lambda request: not request.strict,
    ),
    TorchPatch(
        name="lists",
        scope="attempt",
        target="torch.SymInt.__mul__ and __rmul__, torch._export.non_strict_utils._NonStrictTorchFunctionHandler._override",
        why="[x] * n and list(range(n)) make a dynamic size a constant.",
        test="tests/capture/test_lists.py::test_a_list_that_a_function_takes[stack]",
        enter=lambda request: lists_of_any_length(request.mentions),
        needed=lambda request: not request.strict,
    ),
    TorchPatch(
        name="kept weights",
        scope="attempt",
        target="torch.nn.utils.stateless._reparametrize_module",
        why="A weight in a list or a closure is another tensor than the traced one in its module.",
        test="tests/capture/test_kept_weights.py::test_identity[list]",
        enter=weights_replaced_everywhere,
        needed=lambda request: not request.strict,
    ),
    TorchPatch(
        name="lean tracing",
        scope="attempt",
        target="functions of torch.fx.experimental.proxy_tensor, torch.export._trace and torch.export's passes",
        why="Half of the time of a trace goes into what nobody reads: stack traces, code of graphs between passes, …",
        test="tests/capture/test_export_passes.py::test_no_code_is_made_of_a_graph_that_nobody_runs",
        enter=lambda request: lean_tracing(),
        needed=lambda request: not request.strict,
    ),
    TorchPatch(
        name="equal operator calls",
        scope="attempt",
        target="torch.fx.experimental.proxy_tensor.proxy_call",
        why="Every call is traced, though nearly all are equal to an earlier one.",
        test="tests/capture/test_operator_calls.py::test_training",
        enter=lambda request: operator_calls_repeated(request.counts),
        needed=repeats_calls,
    ),
    TorchPatch(
        name="known numbers",
        scope="attempt",
        target="torch.fx.experimental.proxy_tensor.proxy_call",
        why="A number that code reads from a buffer which nothing writes counts as unknown, and no branch may depend on it.",
        test="tests/capture/test_known_numbers.py::test_a_branch[1.0-buffer]",
        enter=numbers_of_buffers,
        needed=is_needed,
    ),
    TorchPatch(
        name="seeds",
        scope="attempt",
        target="torch.fx.experimental.proxy_tensor.proxy_call, torch.default_generator and the generators of the model",
        why="Random numbers after torch.manual_seed are the same at each call of the model; an operator of the graph draws anew.",
        test="tests/capture/test_seeds.py::test_numbers_after_a_seed_are_constants[manual_seed]",
        enter=seeds_kept,
        needed=is_needed,
    ),
    TorchPatch(
        name="classes of tensors",
        scope="attempt",
        target="nothing: it warns",
        why="torch.export takes weights and inputs of classes of their own for plain tensors.",
        test="tests/capture/test_kinds.py::test_an_input_of_such_a_class",
        enter=lambda request: classes_named(request),
    ),
    TorchPatch(
        name="results in one step",
        scope="attempt",
        target="FakeTensorMode._dispatch_impl, py_kernels of linear, layer_norm, batch_norm and interpolate's operators",
        why="The kind of a result is computed by decompositions in Python, up to 16 ms a call.",
        test="tests/capture/test_fakes.py::test_a_batch_norm_asks_nothing",
        enter=lambda request: results_in_one_step(),
        needed=lambda request: not request.strict,
    ),
    TorchPatch(
        name="handled errors",
        scope="attempt",
        target="torch._export.non_strict_utils._NonStrictTorchFunctionHandler, proxy_tensor.proxy_call, FakeTensorMode.dispatch",
        why="The model's code may handle errors that only tensors without numbers raise, or never raise, and go another way.",
        test="tests/capture/test_handled.py",
        enter=handled_errors,
    ),
    TorchPatch(
        name="seconds of modules",
        scope="attempt",
        target="torch.fx.experimental.proxy_tensor._ModuleStackTracer.call_module",
        why="torch doesn't say how long each module takes; only an export with a profile needs it.",
        test="contrib/onnxplug-tools/tests/profiling/test_chrome.py::test_of_an_export",
        enter=lambda request: modules_timed(),
    ),
)


@contextlib.contextmanager
def torch_patched(scope: Literal["capture", "attempt"], request: CaptureRequest) -> Iterator[None]:
    """While it holds, torch has the patches of a scope that a capture needs."""
    with contextlib.ExitStack() as stack:
        for patch in PATCHES:
            if patch.scope == scope and patch.needed(request):
                stack.enter_context(patch.enter(request))
        yield
