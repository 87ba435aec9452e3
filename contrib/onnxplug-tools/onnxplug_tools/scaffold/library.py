"""``onnxplug plugins new --for LIBRARY``: a package for the operators that a library registers, without the formulas."""

from __future__ import annotations

import builtins
import keyword
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnxplug.errors import UsageError
from onnxplug.text import did_you_mean
from onnxplug_tools.library.names import matches
from onnxplug_tools.library.operators import (
    LibraryOperator,
    distribution_and_version,
    namespace_of,
    read_library,
    summary,
)
from onnxplug_tools.scaffold.write import module_names, render, write_files

_TEMPLATES = Path(__file__).parent / "library_templates"
#: Names of arguments that hold positions, not numbers.
_POSITIONS = re.compile(r"ind(ex|ices)|offset|length|permute|segment|lookup|mapping")
#: A value for each type of argument; a list takes the value of its element type.
_VALUES = {
    "Tensor": "torch.randn(2, 3)",
    "int": "1",
    "SymInt": "1",
    "float": "1.0",
    "number": "1",
    "Scalar": "1",
    "bool": "False",
    "str": '""',
    "ScalarType": "torch.float32",
    "Device": 'torch.device("cpu")',
    "Layout": "torch.strided",
}


@dataclass(frozen=True)
class LibraryPackage:
    """The files that were written."""

    folder: Path
    operators: Sequence[LibraryOperator]
    summary: str


def write_library_package(
    library: str, folder: Path, name: str | None = None, patterns: Sequence[str] = ()
) -> LibraryPackage:
    """Writes a package with a rule, inputs and a test for each operator that a library registers; the formulas are missing.

    Args:
        library: The import name of the library, or of the module that registers the operators.
        folder: Where the package's own folder is made.
        name: The distribution's name; ``onnxplug-`` and the library's name unless given.
        patterns: Only operators of these names, as ``onnxplug ops`` takes them.
    """
    if not all(part.isidentifier() for part in library.split(".")):
        raise UsageError(
            f"--for {library!r} is not the name of a module",
            hint="Give the name by which Python imports it: --for fbgemm_gpu",
        )
    values = module_names(name or f"onnxplug-{library.partition('.')[0].strip('_').replace('_', '-')}")
    operators = read_library(library)
    if not operators:
        raise UsageError(
            f"importing {library} registers no operator with torch",
            hint=f"Name the module that registers them, such as {library}.ops. A library of Python functions needs no package: "
            "torch.export sees the operators that they call.",
        )
    wanted = [op for op in operators if op.needs_rule and (not patterns or any(matches(op.name, p) for p in patterns))]
    if not wanted:
        patterns_text = f" like {' or '.join(patterns)}" if patterns else ""
        needed = sorted(op.packet for op in operators if op.needs_rule)
        raise UsageError(
            f"{library} registers no operator{patterns_text} that needs a rule, but {summary(operators)}",
            hint=did_you_mean(patterns[0], needed, 3) if patterns else None,
        )
    described = _described(wanted)
    brought = distribution_and_version(library)
    version = brought[1].partition("+")[0] if brought else None
    values |= {
        "library": library,
        "version": version,
        "required": f"{brought[0]}>={version}" if brought else None,
        "tested": f"{brought[0]}=={version}" if brought else None,
        "namespaces": sorted({namespace_of(op.name) for op in wanted}),
        "operators": described,
        "fakes": list({op["packet"]: op for op in described if not op["has_fake"]}.values()),
        "others": _others(operators),
    }
    return LibraryPackage(write_files(folder, values["name"], render(values, _TEMPLATES)), wanted, summary(operators))


def _described(operators: Sequence[LibraryOperator]) -> list[dict[str, Any]]:
    """The values that the templates need for each operator."""
    plain = [_function(op) for op in operators]
    twice = {name for name, count in Counter(plain).items() if count > 1}
    names = [
        f"{namespace_of(op.name)}_{name}" if name in twice else name for op, name in zip(operators, plain, strict=True)
    ]
    return [_description(op, name) for op, name in zip(operators, names, strict=True)]


def _function(op: LibraryOperator) -> str:
    name, _, overload = op.name.partition("::")[2].partition(".")
    joined = name if overload == "default" else f"{name}_{overload}"
    return f"{joined}_" if keyword.iskeyword(joined) or joined in dir(builtins) else joined


def _description(op: LibraryOperator, function: str) -> dict[str, Any]:
    names = [f"{name}_" if keyword.iskeyword(name) or name in ("g", "node") else name for name, _, _ in op.arguments]
    missing = ["no formula yet"]
    if not op.has_fake:
        missing.append("no fake kernel")
    if not op.runs_on_cpu:
        missing.append("no kernel for the CPU to compare with")
    if op.mutates:
        missing.append(f"writes to {', '.join(op.mutates)}")
    needed = [index for index, (_, _, has_default) in enumerate(op.arguments) if not has_default]
    inputs = [_value(name, kind) for name, kind, _ in op.arguments[: needed[-1] + 1 if needed else 0]]
    return {
        "name": op.name,
        "packet": op.packet,
        "function": function,
        "schema": op.schema,
        "mutates": op.mutates,
        "has_fake": op.has_fake,
        "missing": "; ".join(missing),
        "unpacked": f"({names[0]},)" if len(names) == 1 else ", ".join(names),
        "inputs": f"{inputs[0]}," if len(inputs) == 1 else ", ".join(inputs),
        "parameters": ", ".join(
            f"{name}{'=None' if has_default else ''}"
            for name, (_, _, has_default) in zip(names, op.arguments, strict=True)
        ),
    }


def _value(name: str, kind: str) -> str:
    """Python for an argument, guessed from its name and its type."""
    match = re.fullmatch(r"(Optional|List)\[(.*)\]", kind)
    if match is None:
        is_position = kind == "Tensor" and _POSITIONS.search(name) is not None
        return "torch.tensor([0, 1])" if is_position else _VALUES.get(kind, "None")
    return "None" if match[1] == "Optional" else f"[{_value(name, match[2])}]"


def _others(operators: Sequence[LibraryOperator]) -> list[tuple[str, str]]:
    """The operators that need no rule, with the reason."""
    kinds = {
        "Torch computes these by other operators, which are translated": [
            op for op in operators if op.is_composite and not op.is_for_gradients
        ],
        "These compute gradients": [op for op in operators if op.is_for_gradients],
        "These write to an output that they are given": [
            op for op in operators if op.is_out_variant and not (op.is_composite or op.is_for_gradients)
        ],
    }
    return [(title, ", ".join(f"`{op.name}`" for op in ops)) for title, ops in kinds.items() if ops]
