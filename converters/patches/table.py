"""The patches of torch for single operators and functions, each with what it is for and the test that needs it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch.distributions import Distribution

from onnxplug.capture.patches import TorchPatch
from onnxplug.capture.patching import patched
from onnxplug.converters.patches.associative import associative_scans_of_any_size
from onnxplug.converters.patches.attention import attention_by_its_masks
from onnxplug.converters.patches.factories import factories_of_any_size
from onnxplug.converters.patches.norms import norms_of_any_size
from onnxplug.converters.patches.packed import packed_sequences
from onnxplug.converters.patches.shapes import shape_kernels
from onnxplug.plugin_api import CaptureRequest

PATCHES: tuple[TorchPatch, ...] = (
    TorchPatch(
        name="attention",
        target="torch.nn.modules.transformer._detect_is_causal_mask, torch.backends.mha",
        why="nn.Transformer branches on the values of a mask, and fuses a layer into an operator that ONNX lacks.",
        test="tests/capture/test_attention.py::test_masks_of_any_values_and_sizes",
        enter=lambda request: attention_by_its_masks(),
    ),
    TorchPatch(
        name="distributions",
        target="torch.distributions.Distribution._validate_args",
        why="Distributions branch on the values of their parameters and samples, unless they are made with validate_args=True.",
        test="tests/converters/test_distributions.py::test_densities_are_computed_unchecked",
        enter=lambda request: patched(Distribution, "_validate_args", False),
    ),
    TorchPatch(
        name="shape kernels",
        target="py_kernels of recurrent layers, fake quantisation, dequantize, gradients of interpolation, fractional pools, draws",
        why="Recurrent layers are traced step by step, which fixes their number; the others have no kernel for dynamic sizes.",
        test="tests/capture/test_patches.py::test_a_recurrent_layer_is_found_wherever_the_model_holds_it[closure]",
        enter=lambda request: shape_kernels(request.mentions),
    ),
    TorchPatch(
        name="norms",
        target="torch.nn.functional._verify_spatial_size, py_kernels of batch_norm and instance_norm",
        why="They ask for sizes that follow from data.",
        test="tests/capture/test_sizes.py::test_normalization_of_a_length_that_follows_from_data[instance_norm]",
        enter=lambda request: norms_of_any_size(request.mentions),
    ),
    TorchPatch(
        name="factories",
        target="torch._export.non_strict_utils._NonStrictTorchFunctionHandler._override, torch.linspace, istft",
        why="Windows, linspace, tensor(…), istft and the like make a constant of a dynamic size.",
        test="tests/capture/test_factories.py::test_windows_with_all_arguments",
        enter=lambda request: factories_of_any_size(request.mentions),
    ),
    TorchPatch(
        name="packed sequences",
        target="torch._VF._pack_padded_sequence and _pad_packed_sequence, nn.RNNBase and its layers, fake implementations",
        why="The numbers of rows and of sequences of a packed sequence are unknown, and torch's functions ask for both.",
        test="tests/converters/test_packed.py::test_lengths_as_a_list",
        enter=lambda request: packed_sequences(request.mentions),
    ),
    TorchPatch(
        name="associative scans",
        target="torch._higher_order_ops.associative_scan.generic_associative_scan",
        why="Its algorithm makes a dynamic number of elements a constant.",
        test="tests/capture/test_associative.py::test_named_dimensions",
        enter=lambda request: associative_scans_of_any_size(request.mentions),
    ),
)


@contextlib.contextmanager
def operators_patched(request: CaptureRequest) -> Iterator[None]:
    """While it holds, torch has these patches, as far as the model's code names what they are for."""
    with contextlib.ExitStack() as stack:
        for patch in PATCHES:
            stack.enter_context(patch.enter(request))
        yield
