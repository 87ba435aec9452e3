"""Linear layers with weights of four bits, which ONNX Runtime multiplies as they are: ``MatMulNBits``."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from onnxplug import UsageError

DOMAIN = "com.microsoft"
#: Sizes of blocks that the CPU's kernel has.
BLOCK_SIZES = (16, 32, 64, 128, 256)
#: Rows and tokens of the text that models are compared on.
_ROWS, _TOKENS = 4, 32


@torch.library.custom_op("onnxplug_transformers::matmul_nbits", mutates_args=())
def matmul_nbits(x: torch.Tensor, levels: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """Rows times a matrix of four bits.

    Args:
        x: [..., K] floats.
        levels: [N, blocks, size / 2] bytes, two numbers in each, the first one in its low half; the last block is filled up.
        scales: [N, blocks] of x's dtype.
        zeros: [N, (blocks + 1) / 2] bytes, two zero points in each.

    Returns:
        [..., N].
    """
    rows, blocks, half = levels.shape
    points = _apart(zeros)[:, :blocks, None]
    weight = (_apart(levels).to(x.dtype) - points.to(x.dtype)) * scales[:, :, None]
    return nn.functional.linear(x, weight.reshape(rows, blocks * 2 * half)[:, : x.shape[-1]])


@matmul_nbits.register_fake
def _(x: torch.Tensor, levels: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], levels.shape[0]))


def convert(g: Any, node: Any) -> Any:
    """matmul_nbits(Tensor x, Tensor levels, Tensor scales, Tensor zeros) -> Tensor"""
    x, levels, scales, zeros = node.args
    rows, _, half = levels.shape
    # accuracy_level 1: the activations stay float; with 4 they would be rounded to bytes.
    return g.domain(DOMAIN).MatMulNBits(
        x, levels, scales, zeros, K=x.shape[-1], N=rows, bits=4, block_size=2 * half, accuracy_level=1
    )


class FourBitLinear(nn.Module):
    """A linear layer whose weight is rounded to 16 levels in blocks of a row, each with a scale and a zero point.

    Args:
        linear: The layer; its bias stays as it is.
        size: Numbers in a block.
    """

    def __init__(self, linear: nn.Linear, size: int) -> None:
        super().__init__()
        weight = linear.weight.detach()
        missing = -weight.shape[1] % size
        blocks = nn.functional.pad(weight.float(), (0, missing)).unflatten(1, (-1, size))
        low, high = blocks.amin(-1).clamp(max=0), blocks.amax(-1).clamp(min=0)
        scales = ((high - low) / 15).to(weight.dtype)
        scales = torch.where(scales == 0, torch.ones_like(scales), scales)
        exact = scales.float()
        zeros = (-low / exact).round().clamp(0, 15)
        levels = (blocks / exact[..., None] + zeros[..., None]).round().clamp(0, 15)
        self.register_buffer("levels", _together(levels.to(torch.uint8)))
        self.register_buffer("scales", scales)
        self.register_buffer("zeros", _together(nn.functional.pad(zeros, (0, zeros.shape[1] % 2)).to(torch.uint8)))
        self.bias = linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] to [..., out]."""
        result: torch.Tensor = matmul_nbits(x, self.levels, self.scales, self.zeros)
        return result if self.bias is None else result + self.bias


def _together(numbers: torch.Tensor) -> torch.Tensor:
    """Two neighbours of the last axis in a byte."""
    return numbers[..., 0::2] | (numbers[..., 1::2] << 4)


def _apart(packed: torch.Tensor) -> torch.Tensor:
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


@dataclass(frozen=True)
class Rounding:
    """What four bits have changed.

    Attributes:
        layers: How many linear layers have weights of four bits.
        bytes_before, bytes_after: Of all parameters and buffers of the model.
        perplexity_before, perplexity_after: On text that the unrounded model wrote, drawn at random.
        agreement: The share of places where both find the same token most likely.
    """

    layers: int
    bytes_before: int
    bytes_after: int
    perplexity_before: float
    perplexity_after: float
    agreement: float

    def __str__(self) -> str:
        return (
            f"{self.layers} linear layers have weights of 4 bits, {self.bytes_before / 1e6:.2f} MB became "
            f"{self.bytes_after / 1e6:.2f} MB; perplexity of text that the model itself drew: "
            f"{self.perplexity_before:.2f} became {self.perplexity_after:.2f}; "
            f"the most likely token is the same at {100 * self.agreement:.1f} % of {_ROWS * _TOKENS} places"
        )


def check_block_size(size: int) -> None:
    """Raises:
    UsageError: The kernel has no such blocks.
    """
    if size not in BLOCK_SIZES:
        raise UsageError(f"--block-size {size} is none of {', '.join(map(str, BLOCK_SIZES))}")


def round_linears(model: Any, size: int, keep: Sequence[str] | None = None) -> Rounding:
    """Rounds a language model's linear layers, in place.

    Args:
        model: The model.
        size: Numbers in a block.
        keep: Names of modules that stay as they are, with ``*`` for anything; by default the one that computes the logits.

    Returns:
        What it has changed.

    Raises:
        UsageError: A name is that of no linear layer, or none is left to round.
    """
    check_block_size(size)
    linears = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    if keep is None:
        head = model.get_output_embeddings()
        kept = {name for name, module in linears.items() if module is head}
    else:
        kept = set()
        for pattern in keep:
            found = fnmatch.filter(linears, pattern)
            if not found:
                raise UsageError(
                    f"--int4-keep: no linear layer is called {pattern!r}",
                    hint=f"One of them is {next(iter(linears), 'none')}.",
                )
            kept.update(found)
    rounded = [name for name in linears if name not in kept]
    if not rounded:
        raise UsageError("--int4: no linear layer is left to round")
    text = _drawn(model)
    before, bytes_before = _scores(model, text), _bytes(model)
    for name in rounded:
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, FourBitLinear(linears[name], size))
    after = _scores(model, text)
    perplexities = [
        float(nn.functional.nll_loss(scores.flatten(0, 1), text[:, 1:].flatten()).exp()) for scores in (before, after)
    ]
    return Rounding(
        len(rounded),
        bytes_before,
        _bytes(model),
        perplexities[0],
        perplexities[1],
        float((before.argmax(-1) == after.argmax(-1)).float().mean()),
    )


def _drawn(model: Any) -> torch.Tensor:
    """[rows, tokens + 1]: text drawn from the model's own probabilities, after a first token drawn evenly."""
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(0, model.config.get_text_config().vocab_size, (_ROWS, 1), generator=generator)
    past: Any = None
    with torch.no_grad():
        for _ in range(_TOKENS):
            result = model(input_ids=text[:, -1:], past_key_values=past, use_cache=True)
            past = result.past_key_values
            chances = result.logits[:, -1].float().softmax(-1)
            text = torch.cat([text, torch.multinomial(chances, 1, generator=generator)], 1)
    return text


def _scores(model: Any, text: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=text[:, :-1], use_cache=False).logits
    return logits.float().log_softmax(-1)


def _bytes(model: nn.Module) -> int:
    tensors = {t.data_ptr(): t.nbytes for t in (*model.parameters(), *model.buffers())}
    return sum(tensors.values())
