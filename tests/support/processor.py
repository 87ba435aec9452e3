"""What of a test's outcome is the processor's: products of 8-bit numbers.

Without the instructions for them (VNNI) ONNX Runtime's optimised kernels add pairs of products of uint8 and int8 numbers in 16 bits, which
overflow where both are large: `docs/numerics.md`. PyTorch's kernels round otherwise there, too.
"""

from __future__ import annotations

from pathlib import Path

import pytest

REASON = "ONNX Runtime's, or PyTorch's, products of 8-bit numbers overflow on a processor without VNNI"

#: Tests whose numbers are large enough, by the beginning of their names.
OVERFLOWING = (
    "tests/capture/quantized/test_dynamic.py::test_recurrent[qnnpack-LSTM-torch.qint8-one]",
    "tests/capture/quantized/test_dynamic.py::test_recurrent[qnnpack-GRU-torch.qint8-one]",
    "tests/capture/quantized/test_dynamic.py::test_recurrent_with_a_state[qnnpack-LSTM-static]",
    "tests/capture/quantized/test_dynamic.py::test_linear_of_static_shape[qnnpack-",
    *(
        f"tests/capture/quantized/test_layers.py::test_engines[{case}]"
        for case in ("qnnpack-conv2d", "onednn-linear", "x86-linear")
    ),
    *(
        f"tests/capture/quantized/test_layers.py::test_verification_finds_a_wrong_number[{number}-Quantised]"
        for number in ("scale_of_input", "scale_within", "scale_of_output", "bias")
    ),
    "tests/capture/quantized/test_layers.py::test_integers_between_two_quanta_may_go_either_way",
    "tests/capture/quantized/test_without_layers.py::test_layer_of_ones_own",
    "tests/rewrite/test_quantised.py::test_right_with_optimisations[weight read twice-13]",
    "tests/converters/test_weight_only.py::test_activations_are_not_rounded[channel-activations_too-18]",
)


def has_vnni() -> bool:
    """Whether the processor multiplies 8-bit numbers without overflow; taken for granted where that can't be read."""
    try:
        return "vnni" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return True


def mark_overflowing(items: list[pytest.Item]) -> None:
    """Expects failures of some tests where the processor lacks the instructions.

    Not strictly: which sums overflow depends on the kernels that a processor is given.
    """
    if has_vnni():
        return
    for item in items:
        if item.nodeid.startswith(OVERFLOWING):
            item.add_marker(pytest.mark.xfail(reason=REASON, strict=False))
