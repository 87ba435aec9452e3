"""Reads the element types of the CPU kernels from the installed ONNX Runtime, and writes the table of them.

``python -m onnxplug.plugins.kernels`` writes ``plugins/onnxruntime_cpu.py`` anew; a test compares it with the installed version.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

from onnxplug.build.kernels import LETTERS
from onnxplug.opsets import MIN_OPSET

_OPEN = 2**31 - 1
_NAMES = {dtype.name.lower(): letter for letter, dtype in LETTERS.items()}
_Constraints = tuple[tuple[str, str], ...]


def installed_kernels() -> dict[str, str]:
    """The CPU kernels of the installed ONNX Runtime, written as ``onnxplug.build.kernels.Kernels`` reads them."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    kernels: dict[str, dict[tuple[int, int], set[_Constraints]]] = defaultdict(lambda: defaultdict(set))
    for kernel in state.get_all_opkernel_def():
        first, last = kernel.version_range
        if kernel.provider != "CPUExecutionProvider" or kernel.domain or last < MIN_OPSET:
            continue
        constraints = tuple(sorted((n, c) for n, types in kernel.type_constraints.items() if (c := _letters(types))))
        if len(constraints) == sum(1 for types in kernel.type_constraints.values() if types):
            kernels[kernel.op_name][first, last].add(constraints)
    return {op: _text(versions) for op, versions in sorted(kernels.items())}


def _letters(types: list[str]) -> str:
    return "".join(sorted({_NAMES[n] for t in types if (n := t.removeprefix("tensor(").removesuffix(")")) in _NAMES}))


def _text(versions: dict[tuple[int, int], set[_Constraints]]) -> str:
    parts = []
    for (first, last), rows in sorted(versions.items()):
        span = f"{first}-" if last == _OPEN else f"{first}-{last}"
        parts += [" ".join([span, *(f"{n}={letters}" for n, letters in row)]) for row in sorted(_merged(rows))]
    return "; ".join(parts)


def _merged(rows: set[_Constraints]) -> set[_Constraints]:
    """The same combinations in fewer rows: two rows that differ in one type variable are merged."""
    merged = set(rows)
    while pair := _mergeable(merged):
        one, other, both = pair
        merged = (merged - {one, other}) | {both}
    return merged


def _mergeable(rows: set[_Constraints]) -> tuple[_Constraints, _Constraints, _Constraints] | None:
    ordered = sorted(rows)
    for one in ordered:
        for other in ordered:
            if one == other or [n for n, _ in one] != [n for n, _ in other]:
                continue
            differ = [i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]
            if len(differ) == 1:
                at = differ[0]
                joined = "".join(sorted({*one[at][1], *other[at][1]}))
                return one, other, (*one[:at], (one[at][0], joined), *one[at + 1 :])
    return None


def render(version: str, table: dict[str, str]) -> str:
    """The text of ``plugins/onnxruntime_cpu.py``."""
    lines = [
        '"""ONNX Runtime\'s CPU kernels: written by `python -m onnxplug.plugins.kernels`, not by hand."""',
        "",
        "# ruff: noqa: E501",
        "# fmt: off",
        f'VERSION = "{version}"',
        "# Operator of ai.onnx: versions, then the letters of element types (onnxplug.build.kernels.LETTERS) a type variable.",
        "KERNELS: dict[str, str] = {",
        *(f'    "{op}": "{text}",' for op, text in table.items()),
        "}",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """Writes the table into the source tree."""
    import onnxruntime

    path = Path(__file__).with_name("onnxruntime_cpu.py")
    table = installed_kernels()
    path.write_text(render(onnxruntime.__version__, table), encoding="utf-8")
    sys.stdout.write(f"{path}: kernels of {len(table)} operators, ONNX Runtime {onnxruntime.__version__}\n")


if __name__ == "__main__":
    main()
