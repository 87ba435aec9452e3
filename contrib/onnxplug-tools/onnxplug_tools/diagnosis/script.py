"""A piece of a graph as a script of 30 lines at most, with its data in a file beside it."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from onnxplug.registry.rule import Rule
from onnxplug_tools.diagnosis.pieces import Piece

#: Lines that a script has at most.
LONGEST = 30
NAME = "reproduce"
_RELEASED = re.compile(r";  [\w = ]+ = None$", re.MULTILINE)
_KNOWN = {"inf", "nan", "device", "torch", "NoneType", "fx_pytree", "pytree"}


@dataclass(frozen=True)
class Script:
    """A script and its data.

    Attributes:
        data: The content of the ``torch.save`` file beside it: the inputs, and the tensors of the model's state by
            name or the expected outputs.
        program: The model as an exported program, where the script loads it instead of stating it.
    """

    text: str
    data: dict[str, Any]
    program: torch.export.ExportedProgram | None = None


class NotExpressed(Exception):
    """A part of the model or of the call can't be written into a script."""


def script_of(
    piece: Piece, title: str, options: Mapping[str, Any], *, stated: bool, imports: Sequence[str] = ()
) -> Script:
    """The script of a piece.

    Args:
        options: Arguments of ``to_onnx``.
        stated: State the model as code; otherwise it is loaded from an exported program.
        imports: Modules to import: ``"package.module"``.
    """
    module, state = _module(piece)
    inputs = [_own(leaf) for leaf in piece.leaves]
    head = [f'"""{title}"""', "", "import sys", "from pathlib import Path", ""]
    paths, rules = _rules(options.get("rules", ()))
    modules = [*imports, *(name for name in paths if name)]
    folders = sorted({folder for name in modules if (folder := _root(name)) is not None})
    head += ["import torch", "", "import onnxplug", ""]
    if folders:
        head.append(f"sys.path[:0] = {folders!r}")
    else:
        head.remove("import sys")
    head += [f"import {name}  # noqa: E402" for name in imports]
    call = ", ".join(["model", "tuple(data['inputs'])", *_arguments(options, rules)])
    load = [f'data = torch.load(Path(__file__).with_name("{NAME}.pt"))']
    program = None
    if stated:
        body = [
            *_class(module, state),
            "",
            "",
            *load,
            f"model = Model({'data[' + repr('state') + ']' if state else ''})",
        ]
    else:
        program = torch.export.export(module, tuple(inputs))
        body = [*load, f'model = torch.export.load(Path(__file__).with_name("{NAME}.pt2"))']
    end = [
        f"program = onnxplug.to_onnx({call})",
        "program.verify(seeds=(), intermediates=True)",
        'print("the fault does not show")',
    ]
    lines = [*head, *body, *end]
    if len(lines) > LONGEST:
        raise NotExpressed(f"the model has {len(piece.operators)} operators")
    return Script("\n".join(lines) + "\n", {"inputs": inputs, "state": state}, program)


def script_of_model(title: str, feed: Mapping[str, torch.Tensor], expected: Sequence[Any]) -> Script:
    """A script that runs the ONNX model beside it by ONNX Runtime, and compares the outputs with PyTorch's.

    Args:
        expected: PyTorch's result for each output.
    """
    lines = [
        f'"""{title}"""',
        "",
        "from pathlib import Path",
        "",
        "import onnxruntime",
        "import torch",
        "",
        f'data = torch.load(Path(__file__).with_name("{NAME}.pt"))',
        f'session = onnxruntime.InferenceSession(Path(__file__).with_name("{NAME}.onnx"))',
        'results = session.run(None, {name: x.numpy() for name, x in data["feed"].items()})',
        'for result, expected in zip(results, data["expected"], strict=True):',
        "    torch.testing.assert_close(torch.from_numpy(result), expected, equal_nan=True)",
        'print("the fault does not show")',
    ]
    return Script(
        "\n".join(lines) + "\n", {"feed": dict(feed), "expected": [_own(torch.as_tensor(x)) for x in expected]}
    )


def dynamic_shapes_of(piece: Piece) -> tuple[Any, ...] | None:
    """The dynamic dimensions of a piece's inputs, as ``to_onnx`` takes them; ``None`` where all are static."""
    axes: list[Any] = []
    for slot in piece.functional.inputs:
        if slot.position is None:
            continue
        val = slot.node.meta["val"]
        if isinstance(val, torch.Tensor):
            sizes: list[Any] = list(val.shape)
            axes.append({i: str(d.node.expr) for i, d in enumerate(sizes) if isinstance(d, torch.SymInt)} or None)
        else:
            axes.append(torch.export.Dim.DYNAMIC)
    return tuple(axes) if any(entry is not None for entry in axes) else None


def _module(piece: Piece) -> tuple[torch.fx.GraphModule, dict[str, torch.Tensor]]:
    """A piece as a module whose state is in buffers."""
    graph = torch.fx.Graph()
    root = torch.nn.Module()
    state: dict[str, torch.Tensor] = {}
    copies: dict[torch.fx.Node, Any] = {}
    for slot in piece.functional.inputs:
        if slot.position is not None:
            copies[slot.node] = graph.placeholder(slot.node.name)
    for slot in piece.functional.inputs:
        if slot.position is None and slot.tensor is not None:
            name = re.sub(r"\W", "_", slot.target or slot.name).lstrip("_") or "state"
            state[name] = _own(slot.tensor)
            root.register_buffer(name, state[name])
            copies[slot.node] = graph.get_attr(name)
        elif slot.position is None:
            copies[slot.node] = slot.value
    for node in piece.functional.graph.nodes:
        if node.op == "get_attr":
            name = str(node.target)
            owner: Any = piece.functional.graph.owning_module
            for part in name.split("."):
                owner = getattr(owner, part)
            setattr(root, name.replace(".", "_"), owner)
            copies[node] = graph.get_attr(name.replace(".", "_"))
            if isinstance(owner, torch.Tensor):
                state[name.replace(".", "_")] = _own(owner)
        elif node.op == "call_function":
            new = graph.call_function(
                node.target,
                torch.fx.node.map_arg(node.args, copies.get),
                torch.fx.node.map_arg(node.kwargs, copies.get),
            )
            copies[node] = new
    graph.output(tuple(copies[slot.value] for slot in piece.functional.outputs))
    return torch.fx.GraphModule(root, graph), state


def _class(module: torch.fx.GraphModule, state: Mapping[str, torch.Tensor]) -> list[str]:
    """The lines of a class that computes the same as a module."""
    if any(isinstance(child, torch.nn.Module) for _, child in module.named_children()):
        raise NotExpressed("the model has control flow")
    code = module.graph.python_code("self")
    if not set(code.globals) <= _KNOWN:
        raise NotExpressed(f"the code needs {', '.join(sorted(set(code.globals) - _KNOWN))}")
    source = _RELEASED.sub("", code.src).strip("\n")
    lines = ["    " + line for line in source.splitlines() if line.strip()]
    needed = [name for name in ("inf", "nan", "device") if re.search(rf"(?<![\w.]){name}(?![\w=])", source)]
    values = {"inf": "float('inf')", "nan": "float('nan')", "device": "torch.device"}
    head = [f"{', '.join(needed)} = {', '.join(values[n] for n in needed)}"] if needed else []
    init = [
        "    def __init__(self, state):",
        "        super().__init__()",
        "        for name, tensor in state.items():",
        "            self.register_buffer(name, tensor)",
        "",
    ]
    return [*head, "", "class Model(torch.nn.Module):", *(init if state else []), *lines]


def _own(value: Any) -> Any:
    """A value; a tensor is copied, so that it shares no memory with a larger tensor."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _arguments(options: Mapping[str, Any], rules: str) -> list[str]:
    arguments = []
    for name, value in options.items():
        if name == "rules" or (value is None and name != "target"):
            continue
        if name == "prefer" or isinstance(value, Mapping):
            value = dict(value)
        text = repr(value)
        if name == "dynamic_shapes":
            text = _shapes_text(value)
        elif "<" in text or (isinstance(value, list | tuple) and not all(isinstance(item, str) for item in value)):
            raise NotExpressed(f"{name}= is {text}")
        arguments.append(f"{name}={text}")
    return [*arguments, *([f"rules={rules}"] if rules else [])]


def _shapes_text(shapes: Sequence[Any]) -> str:
    parts = [repr(s) if s is None or isinstance(s, dict) else "torch.export.Dim.DYNAMIC" for s in shapes]
    return f"({', '.join(parts)},)"


def _rules(rules: Sequence[Rule]) -> tuple[list[str], str]:
    """The modules of rules, and the rules as code."""
    modules, texts = [], []
    for rule in rules:
        module, _, function = rule.name.partition(":")
        if module == "__main__" or "<" in function:
            raise NotExpressed(f"the rule {rule.name} is not a function of a module that can be imported")
        modules.append(module)
        parts = [repr(rule.op), repr(rule.name)]
        parts += [f"opset={rule.opset!r}"] if rule.opset != (None, None) else []
        parts += [f"target={rule.target!r}"] if rule.target else []
        parts += ["override=True"] if rule.override else []
        texts.append(f"onnxplug.Rule({', '.join(parts)})")
    return modules, f"[{', '.join(texts)}]" if texts else ""


def _root(name: str) -> str | None:
    """The folder from which a module is imported; ``None`` where Python finds it by itself."""
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None:
        return None
    path = Path(file).resolve()
    parts = name.count(".") + 1 + (path.name == "__init__.py")
    folder = path.parents[parts - 1]
    return None if "site-packages" in folder.parts else str(folder)
