"""Tolerances of the tests that are looser than torch.testing's own, each with its reason: the only table for the tests.

Rows of torch's operator database stand in ``tests/opdb/tolerances.py``, whole models' in ``onnxplug.verification.compare``.
"""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """Relative and absolute tolerance, and the reason why torch.testing's are too narrow."""

    rtol: float
    atol: float
    reason: str


LOOSER: dict[str, Row] = {
    "autocast": Row(2e-2, 2e-2, "autocast rounds to 16 bits between the steps of a product"),
    "attention": Row(1e-4, 1e-5, "two products and a softmax, their sums in another order"),
    "attention, 16 bits": Row(2e-2, 2e-2, "PyTorch rounds to 16 bits between the steps of the decomposition"),
    "attention of GPUs": Row(1e-5, 1e-5, "a softmax and a logarithm of its sum, summed in another order"),
    "both ways": Row(1e-4, 1e-5, "products and a recurrence, summed in another order"),
    "branches and loops": Row(1e-4, 1e-5, "rounding adds up over the steps of a loop"),
    "core": Row(1e-4, 1e-4, "whole chains of sums and products"),
    "complex": Row(1e-5, 1e-5, "four sums of real products that nearly cancel"),
    "complex, hard numbers": Row(
        1e-5, 1e-12, "digits of small results count; a logarithm and its argument are rounded elsewhere"
    ),
    "complex, float": Row(1e-4, 1e-4, "Fourier transforms: sums of all elements"),
    "deviations": Row(0.05, 0.0, "standard deviations of thousands of draws at random"),
    "variances": Row(0.15, 0.1, "variances of thousands of matrices drawn at random"),
    "eigenvalues": Row(1e-4, 1e-5, "their sum, each off by rounding of all steps of the iteration"),
    "experts": Row(1e-4, 1e-5, "two products an expert, weighted and summed"),
    "fast forms": Row(1e-4, 1e-5, "products are summed in another order, scales multiply the weights"),
    "frequencies": Row(0.0, 0.02, "shares of 20,000 draws at random"),
    "fused": Row(1e-4, 1e-5, "a fused operator sums in another order"),
    "random programs": Row(1e-3, 1e-3, "steps of a random program add up the rounding of those before them"),
    "gradients": Row(1e-4, 1e-5, "sums over all places, in another order"),
    "gradients of models": Row(
        1e-3, 1e-4, "sums over all places, layer after layer; of gradients divided by the greatest"
    ),
    "graphs": Row(1e-4, 1e-5, "messages are summed in another order, layer after layer"),
    "grids, bfloat16": Row(1.6e-2, 4e-2, "torch computes the places of an image's elements in bfloat16"),
    "grouped, bfloat16": Row(1.6e-2, 1.6e-2, "sums of products in bfloat16"),
    "grouped, float16": Row(2e-3, 1e-2, "sums of products in float16"),
    "half": Row(1e-2, 1e-2, "torch rounds to half between the steps, ONNX Runtime doesn't"),
    "long sums": Row(3e-6, 0.0, "sums of millions of floats in steps, compared with doubles"),
    "images": Row(1e-5, 3e-5, "sixteen weights, rounded elsewhere than torch's"),
    "images, filters": Row(1e-5, 2e-5, "weights rounded elsewhere than torch's"),
    "images, grids": Row(1e-4, 1e-4, "where a point lies is rounded: the slope of the image enlarges it"),
    "images, sizes": Row(1e-4, 1e-5, "where a point lies depends on a rounded scale"),
    "onnx operators": Row(2e-5, 2e-6, "normalisation and rotation: sums in another order"),
    "properties": Row(1e-5, 1e-5, "sums of hundreds of products in another order"),
    "four-bit products": Row(1e-4, 2e-3, "ONNX Runtime sums a block's products in another order, before its scale"),
    "quantised at run time": Row(1e-4, 1e-4, "the scale comes from the extremes of the input, and is rounded"),
    "quantised layers": Row(1e-4, 1e-4, "products of restored weights, summed in another order"),
    "quantised layers, float16": Row(2e-3, 2e-3, "products of restored weights in float16"),
    "quantised layers, bfloat16": Row(1.6e-2, 1.6e-2, "products of restored weights in bfloat16"),
    "recurrent, float16": Row(5e-3, 5e-3, "torch rounds to half at every step"),
    "recurrent, bfloat16": Row(4e-2, 4e-2, "torch rounds to bfloat16 at every step"),
    "reference, functions": Row(1e-5, 1e-7, "NumPy and PyTorch round functions differently by some units"),
    "reference, products": Row(1e-4, 1e-5, "products are summed in another order"),
    "resize": Row(1e-5, 5e-5, "where a point lies is rounded elsewhere than torch's"),
    "resize, pyramid": Row(1e-4, 1e-4, "three resizes of sums of convolutions"),
    "restored weights": Row(1e-5, 1e-5, "products of restored weights, summed in another order"),
    "segmentation": Row(1e-3, 1e-4, "convolutions and resizes, summed in another order and level after level"),
    "special": Row(1e-5, 1e-5, "torch's float recurrences lose digits; ours, in double, don't"),
    "special, polynomials": Row(1e-4, 1e-5, "torch's float recurrences lose four digits near the zeros"),
    "streams": Row(1e-3, 1e-5, "twenty steps of a recurrent state enlarge the rounding of the first"),
    "training, convolutions": Row(2e-3, 1e-4, "fifty steps of an optimizer enlarge the rounding of the first"),
    "weight gradients": Row(1e-4, 1e-4, "each is a sum over all places of a batch, in another order"),
    "training": Row(1e-3, 1e-5, "twenty to fifty steps of Adam enlarge the rounding of the first"),
    "training, bfloat16": Row(4e-2, 1e-2, "fifty steps in which both round products to bfloat16, at other places"),
    "weights only": Row(1e-5, 1e-4, "products of restored weights, summed in another order"),
    "weights only, float16": Row(2e-3, 1e-2, "products of restored weights in float16"),
    "weights only, bfloat16": Row(1.6e-2, 1e-2, "products of restored weights in bfloat16"),
    "wide products": Row(1e-4, 1e-3, "sums of many large products, in another order"),
    "widened, one operator": Row(2**-7, 2**-9, "one rounding to bfloat16, whose step is 2**-7"),
    "widened, models": Row(2**-6, 2**-7, "several roundings to bfloat16, which torch makes at other places"),
    "float8 products": Row(0.13, 0.1, "the result is rounded to three bits of mantissa; a step is an eighth"),
    "float8 products, halves": Row(8e-3, 2e-2, "sums of products of 8-bit floats in half precision"),
}


def looser(name: str) -> dict[str, float]:
    """``rtol`` and ``atol`` of a row, as :func:`tests.support.check.check` and ``torch.testing.assert_close`` take them."""
    row = LOOSER[name]
    return {"rtol": row.rtol, "atol": row.atol}
