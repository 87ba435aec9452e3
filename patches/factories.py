"""Functions of torch that take numbers of elements as plain ints, computed by functions that take dynamic sizes.

``torch.hann_window(x.shape[0])`` would make the example's size a constant. torch.export's non-strict mode hands each call of a
torch function to a mode of its own; there a call with a dynamic size is replaced by a function of this module.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from onnxplug.capture.patching import patched
from onnxplug.plugin_api import Mentions
from onnxplug.torch_private import NonStrictFunctions, pytree

_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
_HALVES = (torch.float16, torch.bfloat16)


def _range(count: Any, options: dict[str, Any], dtype: torch.dtype | None = None) -> Tensor:
    return torch.arange(count, dtype=dtype, device=options.get("device"))


# -- evenly spaced numbers ---------------------------------------------------------------------------------------------


def linspace(start: Any, end: Any, steps: Any, **options: Any) -> Tensor:
    """As torch's own: from both ends to the middle; integers are cut from doubles."""
    dtype = options.get("dtype") or torch.get_default_dtype()
    if dtype in _INTEGERS:
        start, end = (x.to(dtype) if isinstance(x, Tensor) else int(x) for x in (start, end))
    else:
        start, end = (x.to(dtype) if isinstance(x, Tensor) else x for x in (start, end))
    places = _range(steps, options, torch.float64 if dtype in _INTEGERS else dtype)
    step = (end - start) / torch.sym_max(steps - 1, 1)
    rising, falling = start + step * places, end - step * (steps - 1 - places)
    return torch.where(places < steps // 2, rising, torch.where(places < 1, start, falling)).to(dtype)


def logspace(start: Any, end: Any, steps: Any, base: float = 10.0, **options: Any) -> Tensor:
    """Powers of a base, in the dtype of the result."""
    return torch.pow(base, linspace(start, end, steps, **options))


def fftfreq(n: Any, d: float = 1.0, **options: Any) -> Tensor:
    """0, 1, ... and then the negative frequencies, by ``1 / (n d)``."""
    places = _range(n, options)
    places = torch.where(places < (n + 1) // 2, places, places - n)
    return places.to(options.get("dtype") or torch.get_default_dtype()) * (1.0 / (n * d))


def rfftfreq(n: Any, d: float = 1.0, **options: Any) -> Tensor:
    """0, 1, ... up to ``n // 2``, by ``1 / (n d)``."""
    return _range(n // 2 + 1, options, options.get("dtype") or torch.get_default_dtype()) * (1.0 / (n * d))


# -- windows -----------------------------------------------------------------------------------------------------------


def _window(
    window_length: Any, periodic: bool, options: dict[str, Any], values: Callable[[Tensor, Any], Tensor]
) -> Tensor:
    """A window: 1 for a length of 1; a periodic window is the beginning of a window that is longer by an element.

    Args:
        values: From the places 0, 1, ..., and the last place of the whole window, which is at least 1.
    """
    last = window_length if periodic else torch.sym_max(window_length - 1, 1)
    places = _range(window_length, options, options.get("dtype") or torch.get_default_dtype())
    return torch.where(places + window_length < 2, 1.0, values(places, last))


def bartlett_window(window_length: Any, periodic: bool = True, **options: Any) -> Tensor:
    """``1 - |2 k / last - 1|``, in torch's own two halves."""

    def values(places: Tensor, last: Any) -> Tensor:
        rising = places * (2.0 / last)
        return torch.where(places < last // 2 + 1, rising, 2 - rising)

    return _window(window_length, periodic, options, values)


def blackman_window(window_length: Any, periodic: bool = True, **options: Any) -> Tensor:
    """``0.42 - 0.5 cos(2 pi k / last) + 0.08 cos(4 pi k / last)``"""

    def values(places: Tensor, last: Any) -> Tensor:
        angle = places * (math.pi / last)
        return torch.cos(angle * 4) * 0.08 - torch.cos(angle * 2) * 0.5 + 0.42

    return _window(window_length, periodic, options, values)


def hamming_window(
    window_length: Any, periodic: bool = True, alpha: float = 0.54, beta: float = 0.46, **options: Any
) -> Tensor:
    """``alpha - beta cos(2 pi k / last)``"""
    return _window(
        window_length, periodic, options, lambda k, last: torch.cos(k * (2 * math.pi / last)) * -beta + alpha
    )


def hann_window(window_length: Any, periodic: bool = True, **options: Any) -> Tensor:
    """Hamming's with equal halves."""
    return hamming_window(window_length, periodic, 0.5, 0.5, **options)


def kaiser_window(window_length: Any, periodic: bool = True, beta: float = 12.0, **options: Any) -> Tensor:
    """``I0(beta sqrt(1 - (2 k / last - 1)^2)) / I0(beta)``"""

    def values(places: Tensor, last: Any) -> Tensor:
        x = places * (2.0 / last) - 1
        return torch.i0(beta * torch.sqrt(1 - x * x)) / torch.i0(torch.full_like(x, beta))

    return _window(window_length, periodic, options, values)


# -- indices -----------------------------------------------------------------------------------------------------------


def _triangle(number: Any) -> Any:
    positive = torch.sym_max(number, 0)
    return positive * (positive + 1) // 2


def _in_lower_triangle(rows: Any, columns: Any, offset: int) -> Any:
    """How many elements are on and below a diagonal: the sum over the rows of ``clamp(row + offset + 1, 0, columns)``."""
    at_first = _triangle(rows + offset) - _triangle(offset)
    return at_first - _triangle(rows + offset - columns) + _triangle(offset - columns)


def tril_indices(row: Any, col: Any, offset: int = 0, **options: Any) -> Tensor:
    """Row by row, in two rows of a result whose length is an expression of the sizes."""
    rows, columns = _range(row, options).unsqueeze(1), _range(col, options)
    places = torch.nonzero_static(columns <= rows + offset, size=_in_lower_triangle(row, col, offset))
    return places.T.to(options.get("dtype") or torch.int64)


def triu_indices(row: Any, col: Any, offset: int = 0, **options: Any) -> Tensor:
    """The elements that are not below the previous diagonal."""
    rows, columns = _range(row, options).unsqueeze(1), _range(col, options)
    count = row * col - _in_lower_triangle(row, col, offset - 1)
    return torch.nonzero_static(columns >= rows + offset, size=count).T.to(options.get("dtype") or torch.int64)


def one_hot(input: Tensor, num_classes: Any = -1) -> Tensor:
    """Compared with each class."""
    return (input.unsqueeze(-1) == torch.arange(num_classes, device=input.device)).long()


def vander(x: Tensor, N: Any = None, increasing: bool = False) -> Tensor:
    """Powers 0, 1, ... as products; they begin with the largest unless they are to increase."""
    count = x.shape[0] if N is None else N
    x = x if x.dtype.is_floating_point or x.dtype.is_complex else x.long()
    factors = torch.where(torch.arange(count, device=x.device) < 1, torch.ones_like(x[:, None]), x[:, None])
    powers = factors.cumprod(1)
    return powers if increasing else powers.flip(1)


def combinations(input: Tensor, r: int = 2, with_replacement: bool = False) -> Tensor:
    """Elements at places that increase, or don't decrease, found in a table of r axes."""
    size: Any = input.shape[0]
    if r == 0:
        return input.new_empty((0,))
    if r == 1:
        return input.unsqueeze(1)
    places = torch.arange(size, device=input.device)
    axes = [places.view([-1 if axis == i else 1 for axis in range(r)]) for i in range(r)]
    pairs = [(a <= b) if with_replacement else (a < b) for a, b in itertools.pairwise(axes)]
    chosen = functools.reduce(torch.logical_and, pairs).expand([size] * r)
    # The number of choices of r among `size` things, or among `size + r - 1`.
    factors = [torch.sym_max(size + i if with_replacement else size - i, 0) for i in range(r)]
    count = math.prod(factors) // math.factorial(r)
    return input[torch.nonzero_static(chosen, size=count)]


def _istft_of(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def istft(
        input: Tensor,
        n_fft: int,
        hop_length: int | None = None,
        win_length: int | None = None,
        window: Tensor | None = None,
        center: bool = True,
        normalized: bool = False,
        onesided: bool | None = None,
        length: Any = None,
        return_complex: bool = False,
    ) -> Tensor:
        """As torch's own, also for a length beside dynamic sizes: a part of the whole signal, or the signal and zeros."""
        options = (normalized, onesided)
        if length is None or not any(isinstance(size, torch.SymInt) for size in (length, input.shape[-1])):
            return original(
                input, n_fft, hop_length, win_length, window, center, *options, length, return_complex=return_complex
            )
        whole = original(
            input, n_fft, hop_length, win_length, window, False, *options, None, return_complex=return_complex
        )
        start = n_fft // 2 if center else 0
        parts = [start, length, whole.shape[-1] - start]
        zeros = whole.new_zeros((*whole.shape[:-1], length))
        return torch.cat([whole, zeros], -1).split(parts, -1)[1]

    return istft


def _linspace_of(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def linspace_(start: Any, end: Any, steps: Any, **options: Any) -> Tensor:
        """As torch's own, also for a dynamic number of steps in the strict mode."""
        replacement = computed(linspace, options) if isinstance(steps, torch.SymInt) else None
        return (replacement or original)(start, end, steps, **options)

    return linspace_


def _data(data: Any, dtype: Any = None, device: Any = None, **_: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (data,), {"dtype": dtype, "device": device}


# -- the table of replacements -----------------------------------------------------------------------------------------

_OF_FLOATS = (
    *(linspace, logspace, fftfreq, rfftfreq),
    *(bartlett_window, blackman_window, hamming_window, hann_window, kaiser_window),
)
_BY_NUMBERS: dict[Any, Callable[..., Tensor]] = {
    torch.linspace: linspace,
    torch.logspace: logspace,
    torch.fft.fftfreq: fftfreq,
    torch.fft.rfftfreq: rfftfreq,
    torch.bartlett_window: bartlett_window,
    torch.blackman_window: blackman_window,
    torch.hamming_window: hamming_window,
    torch.hann_window: hann_window,
    torch.kaiser_window: kaiser_window,
    torch.tril_indices: tril_indices,
    torch.triu_indices: triu_indices,
    torch.nn.functional.one_hot: one_hot,
}
_BY_SHAPES: dict[Any, Callable[..., Tensor]] = {torch.vander: vander, torch.combinations: combinations}
_OF_DATA = frozenset((torch.as_tensor, torch.asarray))
_DRAWS = frozenset((torch.rand, torch.randn, torch.randint, torch.randperm))


def instead(func: Any, args: Any, kwargs: Any) -> Any:
    """The replacement of a torch function for these arguments, with its own arguments; ``None`` for the function itself."""
    if func in _BY_NUMBERS and has_symbols((args, kwargs)):
        replacement = computed(_BY_NUMBERS[func], kwargs)
        if replacement is not None:
            return replacement, args, kwargs
    replacement = _BY_SHAPES.get(func)
    if replacement is not None and has_symbols(
        [x.shape if isinstance(x, Tensor) else x for x in (*args, *kwargs.values())]
    ):
        return replacement, args, kwargs
    if func in _OF_DATA and has_symbols(args):
        return torch.tensor, *_data(*args, **kwargs)
    if getattr(func, "__name__", "") == "_shape_as_tensor":
        return torch.tensor, ([*args, *kwargs.values()][0].shape,), {"dtype": torch.int64}
    if func in _DRAWS and "generator" in kwargs and has_symbols((args, kwargs)):
        # The overloads with a generator, or with None for it, take plain ints; a runtime draws by a generator of its own.
        return func, args, {name: value for name, value in kwargs.items() if name != "generator"}
    return None


def computed(function: Callable[..., Tensor], options: dict[str, Any]) -> Callable[..., Tensor] | None:
    """A replacement for the dtype of the result; ``None`` where there is none, and for an ``out=`` tensor."""
    dtype = options.get("dtype") or torch.get_default_dtype()
    if options.get("out") is not None:
        return None
    of_floats = dtype in (torch.float32, torch.float64) or (function is linspace and dtype in _INTEGERS)
    if of_floats or function not in _OF_FLOATS:
        return function
    return _rounded(function) if dtype in _HALVES else None


def _rounded(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A replacement that computes in float32, and rounds once.

    torch's own results are up to two units of rounding from these; where, depends on the width of the processor's vectors.
    """

    @functools.wraps(function)
    def in_float(*args: Any, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
        return function(*args, dtype=torch.float32, **options).to(dtype or torch.get_default_dtype())

    return in_float


def has_symbols(arguments: Any) -> bool:
    """Whether a dynamic size, or a number computed from one, is among the leaves."""
    return any(isinstance(leaf, torch.SymInt | torch.SymFloat) for leaf in pytree.tree_leaves(arguments))


@contextlib.contextmanager
def factories_of_any_size(mentions: Mentions) -> Iterator[None]:
    """While it holds, these functions replace torch's own in torch.export's non-strict mode."""
    original = getattr(NonStrictFunctions, "_override", None)

    def override(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
        return original(mode, *(instead(func, args, kwargs or {}) or (func, args, kwargs)))  # type: ignore[misc]

    with contextlib.ExitStack() as stack:
        if original is not None:
            stack.enter_context(patched(NonStrictFunctions, "_override", override))
        if mentions(lambda name: name in ("linspace", "istft")):  # the strict mode has no such function mode
            stack.enter_context(patched(torch, "linspace", _linspace_of(torch.linspace)))
            istft = _istft_of(torch.istft)
            for owner in (torch, torch.functional, Tensor):
                stack.enter_context(patched(owner, "istft", istft))
        yield
