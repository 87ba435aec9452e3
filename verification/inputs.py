"""Inputs for verification: other sizes along dynamic dimensions, including 1, and other values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from onnxplug.capture.dimensions import Multiple, named
from onnxplug.capture.size_guards import Condition
from onnxplug.strings import STRING, string_array, string_tensor

#: Sizes that dynamic dimensions take in turn, as offsets from the exported size; ``None`` is the size 1.
_OFFSETS: tuple[int | None, ...] = (None, 1, 3, -1, 5)

#: How often sizes are drawn for a seed before it is given up: PyTorch refuses some sizes that no constraint excludes.
ATTEMPTS = 12


@dataclass
class Sizes:
    """The sizes of a program's inputs, as torch and the user know them.

    Attributes:
        exported: Size at the export of each independent symbol, in the order of their names.
        dependent: Symbol to the user's expression for it, of independent symbols.
        ranges: ``range_constraints`` of the program.
        conditions: The conditions of the model's code on the sizes.
        roots: The smallest and largest size of independent symbols on which others depend.
    """

    exported: dict[Any, int]
    dependent: dict[Any, Any]
    ranges: Mapping[Any, Any]
    conditions: Sequence[Condition] = ()
    roots: dict[Any, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        leaves: Sequence[Any],
        values: Sequence[Any],
        ranges: Mapping[Any, Any],
        names: Mapping[str, str],
        conditions: Sequence[Condition] = (),
        multiples: Mapping[str, Multiple] | None = None,
    ) -> Sizes:
        """Reads them off the flattened inputs.

        Args:
            leaves: The example inputs.
            values: torch's record of each: FakeTensor or symbolic number.
            ranges: ``range_constraints`` of the program.
            names: Symbol of torch to the user's name for it.
            conditions: The conditions of the model's code on the sizes.
            multiples: Symbol of torch to its size in terms of a ``Dim`` that is no size of an input.
        """
        from sympy import Symbol

        pairs = [(w.node.expr, size) for w, size in sized(leaves, values) if isinstance(w, torch.SymInt)]
        symbols = sorted({s for expr, _ in pairs for s in expr.free_symbols}, key=str)
        by_name = {str(named(names, s)): s for s in symbols}
        dependent = {}
        for symbol in symbols:
            expr = named(names, symbol)
            parts = {p: by_name.get(str(p)) for p in expr.free_symbols}
            if not expr.is_Symbol and None not in parts.values():
                dependent[symbol] = expr.xreplace(parts)
        known: dict[Any, int] = {expr: size for expr, size in pairs if expr.is_Symbol}
        for expr, size in pairs:
            _solve(expr, size, known)
        free = {s: known.get(s, 2) for s in symbols if s not in dependent}
        result = cls(free, dependent, ranges, conditions)
        for symbol in symbols:
            multiple = (multiples or {}).get(str(symbol))
            if multiple is not None and symbol in free:
                result._relate(symbol, multiple, by_name.get(multiple.root) or Symbol(multiple.root, integer=True))
        return result

    def _relate(self, symbol: Any, multiple: Multiple, root: Any) -> None:
        """Makes a symbol dependent on a root, unless the exported sizes are others."""
        size, rest = divmod(self.exported[symbol] - multiple.offset, multiple.factor)
        if rest or root in self.dependent or self.exported.get(root, size) != size:
            return
        low, high = self._limits(symbol)
        least, most = self._limits(root)
        least = max(least, -((multiple.offset - low) // multiple.factor))
        # A step of the root is ``factor`` elements: volumes of 3 axes would fill the memory.
        most = min(most, size + max(1, 16 // multiple.factor))
        self.roots[root] = least, min(most, (high - multiple.offset) // multiple.factor)
        self.dependent[symbol] = multiple.factor * root + multiple.offset
        del self.exported[symbol]
        self.exported[root] = size

    def draw(self, seed: int, attempt: int = 0) -> dict[Any, int]:
        """A size for each symbol; the same seed and attempt give the same sizes."""
        chosen = {s: self._clamp(s, size) for s, size in self._propose(seed, attempt).items()}
        return {**chosen, **{s: int(expr.xreplace(integers(chosen))) for s, expr in self.dependent.items()}}

    def allows(self, sizes: Mapping[Any, int], values: Sequence[Any]) -> bool:
        """Whether no size is negative, no expression is out of its range, and the model's conditions hold."""
        bounded = [(expr, self.ranges[expr]) for expr in self.ranges if not expr.is_Symbol or expr in self.dependent]
        numbers = integers(sizes)
        if not all(condition.allows(numbers) for condition in self.conditions):
            return False
        for expr, allowed in bounded:
            value = expr.xreplace(numbers)
            if value.is_Integer and not allowed.lower <= max(value, 2) <= allowed.upper:
                return False
        wanted = (w.node.expr.xreplace(numbers) for w, _ in sized(values, values) if isinstance(w, torch.SymInt))
        return all(not size.is_Integer or size >= 0 for size in wanted)

    def _propose(self, seed: int, attempt: int) -> dict[Any, int]:
        if attempt == 0:
            return {s: _offset(size, seed, place) for place, (s, size) in enumerate(self.exported.items())}
        if attempt == 1:  # sizes that were equal stay equal
            order = sorted(set(self.exported.values()))
            return {s: _offset(size, seed, order.index(size)) for s, size in self.exported.items()}
        if attempt == ATTEMPTS - 1:
            return dict(self.exported)
        if attempt % 2 == 0:  # multiples keep divisibility
            factor = 1 + (seed + attempt // 2) % 4
            factors = self._factors(factor, seed) if attempt == 2 else {}
            return {s: factors.get(size, factor) * size for s, size in self.exported.items()}
        generator = torch.Generator().manual_seed(seed * ATTEMPTS + attempt)
        return {s: int(torch.randint(1, size + 6, (), generator=generator)) for s, size in self.exported.items()}

    def _factors(self, most: int, seed: int) -> dict[int, int]:
        """By what each size grows, equal sizes alike: all together by 16 at most, so that volumes don't fill the memory."""
        counts = Counter(self.exported.values())
        order, left, factors = sorted(counts), 16, dict.fromkeys(counts, 1)
        for place in range(len(order)):  # another size first for each seed
            size = order[(place + seed) % len(order)]
            grown = [f for f in (most, 2) if 1 < f <= most and (f ** counts[size] <= left or (f == 2 and not place))]
            factors[size] = max(grown, default=1)
            left //= factors[size] ** counts[size]
        return factors

    def _clamp(self, symbol: Any, size: int) -> int:
        low, high = self._limits(symbol)
        return max(low, min(size, high))

    def _limits(self, symbol: Any) -> tuple[int, int]:
        """The smallest and largest size of a symbol."""
        if symbol in self.roots:
            return self.roots[symbol]
        low, high = 1, 1 << 30
        allowed = self.ranges.get(symbol)
        if allowed is not None:
            # torch's lower bound of 2 comes from its specialisation of 0 and 1, not from the model.
            low = int(allowed.lower) if allowed.lower.is_Integer and int(allowed.lower) > 2 else 1
            high = int(allowed.upper) if allowed.upper.is_Integer else high
        return low, high


def sized(leaves: Sequence[Any], values: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """torch's record of each size and number of the inputs, with its value."""
    for leaf, value in zip(leaves, values, strict=True):
        if isinstance(leaf, torch.Tensor) and isinstance(value, torch.Tensor):
            yield from zip(value.shape, leaf.shape, strict=True)
        elif isinstance(value, torch.SymInt):
            yield value, leaf


def _solve(expr: Any, size: int, known: dict[Any, int]) -> None:
    """Solves ``expr = size`` for its unknown symbol, if there is a single unknown that enters linearly."""
    unknown = [s for s in expr.free_symbols if s not in known]
    if len(unknown) != 1:
        return
    import sympy

    rest = expr.xreplace(integers({s: known[s] for s in expr.free_symbols if s in known}))
    if rest.is_polynomial(unknown[0]):
        solutions = sympy.solve(rest - size, unknown[0])
        known.update({unknown[0]: int(solutions[0])} if len(solutions) == 1 and solutions[0].is_Integer else {})


def _offset(size: int, seed: int, place: int) -> int:
    offset = _OFFSETS[(seed + (place if seed else 0)) % len(_OFFSETS)]
    return 1 if offset is None else max(1, size + offset)


def generated_inputs(
    leaves: Sequence[Any], values: Sequence[Any], sizes: Mapping[Any, int], seed: int, attempt: int = 0
) -> list[Any]:
    """Generated leaves for the flattened inputs.

    Args:
        leaves: The example inputs.
        values: torch's record of each (FakeTensor or symbolic number); static leaves are kept as they are.
        sizes: Symbol to size.
        seed, attempt: Decide the values; equal seeds and attempts give equal inputs. The later half of the attempts draws floats
            from the elements of the examples, for models that refuse other values.
    """
    generator = torch.Generator().manual_seed(seed + 1 + attempt * 65537)
    own = attempt >= ATTEMPTS // 2
    fresh: list[Any] = []
    for leaf, value in zip(leaves, values, strict=True):
        if isinstance(leaf, torch.Tensor) and isinstance(value, torch.Tensor):
            made = tensor_like(leaf, [_evaluate(size, sizes) for size in value.shape], generator, own)
            fresh.append(made.to(leaf.device))
        else:
            fresh.append(_evaluate(value, sizes) if isinstance(value, torch.SymInt) else leaf)
    return fresh


def _evaluate(size: Any, sizes: Mapping[Any, int]) -> int:
    return size if isinstance(size, int) else int(size.node.expr.xreplace(integers(sizes)))


def integers(sizes: Mapping[Any, int]) -> dict[Any, Any]:
    from sympy import Integer

    return {symbol: Integer(size) for symbol, size in sizes.items()}


def tensor_like(example: torch.Tensor, shape: Sequence[int], generator: torch.Generator, own: bool) -> torch.Tensor:
    """Random values of the example's kind: floats at its scale or from its ``own`` elements, integers in its range, its strings."""
    example, dtype = example.detach(), example.dtype
    if dtype is STRING:
        strings = string_array(example).flatten() if example.numel() else np.array([""], dtype=object)
        return string_tensor(strings[torch.randint(0, strings.size, list(shape), generator=generator).numpy()])
    if dtype is torch.bool:
        if example.numel() and bool(example.all()):
            return torch.ones(list(shape), dtype=dtype)  # a mask that hides no element stays as it is
        return torch.randint(0, 2, list(shape), generator=generator).bool()
    if dtype == torch.float4_e2m1fn_x2:  # two numbers in a byte, any byte
        return torch.randint(0, 256, list(shape), generator=generator, dtype=torch.uint8).view(dtype)
    if dtype.is_floating_point or dtype.is_complex:
        if example.element_size() == 1:  # torch has few functions of 8-bit floats
            example = example.float()
        finite = example[torch.isfinite(example)] if example.numel() else example
        if set(finite.flatten()[:64].tolist()) == {0.0, 1.0}:  # a mask
            return torch.randint(0, 2, list(shape), generator=generator).to(dtype)
        if own and finite.numel():
            return finite[torch.randint(0, finite.numel(), list(shape), generator=generator)].to(dtype)
        scale = float((finite.abs().double() / finite.numel()).sum()) if not dtype.is_complex else 1.0
        fresh = torch.randn(
            list(shape), generator=generator, dtype=torch.complex64 if dtype.is_complex else torch.float32
        )
        wide = fresh if dtype.is_complex else fresh.double()
        return (wide * (scale or 1.0)).to(dtype)
    return _integers_between(example, shape, generator)


def _integers_between(example: torch.Tensor, shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """Integers from the example's smallest to its largest; of a range beyond 2**63 the lower part."""
    array = example.cpu().numpy()  # torch has no minimum of unsigned integers
    low, high = (int(array.min()), int(array.max())) if array.size else (0, 1)
    offsets = torch.randint(0, min(high - low, 2**63 - 2) + 1, list(shape), generator=generator)
    start = torch.tensor(low, dtype=example.dtype)
    if example.dtype is torch.uint64:  # torch only adds signed integers; both wrap around alike
        return (offsets + start.view(torch.int64)).view(torch.uint64)
    return (offsets + start.to(torch.int64)).to(example.dtype)


def clone_leaves(leaves: Sequence[Any]) -> list[Any]:
    """Copies, so that a model that writes its inputs writes the copies."""
    return [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
