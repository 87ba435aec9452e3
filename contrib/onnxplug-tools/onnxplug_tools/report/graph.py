"""A model's graph by its modules, as text for Mermaid: few enough boxes to be read."""

from __future__ import annotations

import heapq
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from onnxplug.text import counted, printable

if TYPE_CHECKING:
    from onnxplug_tools.inspection.view import ModelView, ModuleView, NodeView, ValueView

#: The most boxes that modules are expanded into.
MOST_BOXES = 40
#: The most inputs, and outputs, that have a box each.
_MOST_ENDS = 8
#: The most edges: Mermaid draws no more than 500 by default.
_MOST_EDGES = 400
#: Stands between the names of the first and the last of several modules that share a box.
_TO = " … "
#: Characters that Mermaid, Markdown or HTML takes for markup.
_MARKUP = re.compile(r"""["#&<>`\\\n\t]""")
#: How Mermaid draws each kind of box.
_SHAPES = {"module": ("[", "]"), "own": ("(", ")"), "input": ("([", "])"), "output": ("([", "])")}


@dataclass
class Box:
    """A part of the graph.

    Attributes:
        kind: ``"module"``, ``"own"`` (nodes of a module that are of none of its submodules), ``"input"`` or ``"output"``.
    """

    label: str
    about: str = ""
    kind: str = "module"
    module: str = ""


def flowchart(view: ModelView, most: int = MOST_BOXES) -> str:
    """The graph in Mermaid's language. Takes time linear in its nodes."""
    boxes, edges = boxes_of(view, most)
    lines = ["flowchart TD"]
    for number, box in enumerate(boxes):
        left, right = _SHAPES[box.kind]
        below = f"<br>{_text(box.about)}" if box.about else ""
        lines.append(f'  n{number}{left}"{_text(box.label) or "the model"}{below}"{right}')
    lines += [f"  n{source} --> n{target}" for source, target in list(edges)[:_MOST_EDGES]]
    if len(edges) > _MOST_EDGES:
        lines.append(f'  more("and {len(edges) - _MOST_EDGES} more edges")')
    return "\n".join(lines)


def boxes_of(view: ModelView, most: int) -> tuple[list[Box], Counter[tuple[int, int]]]:
    """The boxes, and the number of values that go from one box to another, by the positions of both."""
    sketch = _Sketch(view, most)
    return sketch.boxes, sketch.edges


def _text(text: str) -> str:
    return _MARKUP.sub(lambda match: f"#{ord(match[0])};", printable(text))


class _Sketch:
    """The boxes of a graph, and the edges between them."""

    def __init__(self, view: ModelView, most: int) -> None:
        self.boxes: list[Box] = []
        self.edges: Counter[tuple[int, int]] = Counter()
        self._view = view
        self._modules = {module.path: module for module in _all(view.root)}
        self._group_of, self._expanded = _chosen(view.root, most)
        self._made: dict[object, int] = {}
        self._nodes: dict[int, list[NodeView]] = {}
        self._draw()

    def _draw(self) -> None:
        functions = tuple(function.operator for function in self._view.functions)
        producers: dict[str, int] = {}
        for name, box in self._ends(self._view.inputs, "input"):
            producers[name] = box
        last: tuple[object, int] | None = None
        for node in self._view.nodes:
            if "::" in node.graph and node.graph.partition("/")[0] in functions:
                continue
            key = self._key(node.module)
            if key in self._expanded:  # nodes of its own: a box for each run of them
                number = last[1] if last is not None and last[0] == key else len(self.boxes)
                last = key, number
                box = self._box((key, number), "own")
            else:
                last = None
                box = self._box(key, "module")
            self._nodes.setdefault(box, []).append(node)
            for value in node.inputs:
                source = producers.get(value.name) if value.name and not _is_size(value) else None
                if source is not None and source != box:
                    self.edges[source, box] += 1
            for value in node.outputs:
                producers[value.name] = box
        for name, box in self._ends(self._view.outputs, "output"):
            if name in producers:
                self.edges[producers[name], box] += 1
        for number, nodes in self._nodes.items():
            self._describe(self.boxes[number], nodes)
        self._leave_out_alone()

    def _leave_out_alone(self) -> None:
        """Leaves out boxes of a module's own nodes that have no edge: they compute sizes."""
        joined = {number for edge in self.edges for number in edge}
        kept = [number for number, box in enumerate(self.boxes) if box.kind != "own" or number in joined]
        if not joined or len(kept) == len(self.boxes):
            return
        fresh = {number: position for position, number in enumerate(kept)}
        self.boxes = [self.boxes[number] for number in kept]
        self.edges = Counter({(fresh[source], fresh[target]): count for (source, target), count in self.edges.items()})

    def _key(self, path: str) -> object:
        """The key of the box for nodes of a module: the label of a module or group, or an expanded module's path."""
        start = path
        while path and path not in self._group_of and path not in self._expanded:
            path = path.rpartition(".")[0]
        if path in self._group_of:
            return self._group_of[path]
        return path if path in self._expanded else start

    def _box(self, key: object, kind: str) -> int:
        number = self._made.get(key)
        if number is None:
            number = self._made[key] = len(self.boxes)
            label = str(key[0] if isinstance(key, tuple) else key)
            # A box of several modules leads to the module around them.
            module = label.partition(_TO)[0].rpartition(".")[0] if _TO in label else label
            self.boxes.append(Box(label, kind=kind, module=module))
        return number

    def _describe(self, box: Box, nodes: Sequence[NodeView]) -> None:
        operators = Counter(node.operator for node in nodes).most_common()
        if box.kind == "own":
            box.label = ", ".join(name.rpartition("::")[2] for name, _ in operators[:3]) + (
                ", …" if len(operators) > 3 else ""
            )
            box.about = f"of {box.module}" if box.module else counted(len(nodes), "node")
            return
        classes = () if _TO in box.label else self._modules[box.module].classes
        kind = classes[0].rpartition(".")[2] if classes else ""
        box.about = f"{kind} · {counted(len(nodes), 'node')}" if kind else counted(len(nodes), "node")

    def _ends(self, values: Sequence[object], kind: str) -> Iterable[tuple[str, int]]:
        """The model's inputs or outputs with their boxes."""
        names = [(getattr(value, "name", ""), getattr(value, "type", "")) for value in values]
        if len(names) > _MOST_ENDS:
            self.boxes.append(Box(f"{len(names)} {kind}s", kind=kind))
            return [(name, len(self.boxes) - 1) for name, _ in names]
        ends = []
        for name, type_ in names:
            ends.append((name, len(self.boxes)))
            self.boxes.append(Box(name, type_, kind))
        return ends


def _is_size(value: ValueView) -> bool:
    """Whether a value is a size or a list of sizes, which nodes all over a model read."""
    return value.dtype == "int64" and value.shape is not None and len(value.shape) < 2


def _all(root: ModuleView) -> Iterable[ModuleView]:
    pending = [root]
    while pending:
        module = pending.pop()
        yield module
        pending.extend(module.children)


def _chosen(root: ModuleView, most: int) -> tuple[dict[str, str], set[object]]:
    """The modules that have a box, each with the box's label, and the expanded modules, whose submodules have boxes.

    The largest modules are expanded first. Where there are too many submodules, neighbours share boxes.
    """
    labels: dict[str, str] = {"": ""}
    expanded: set[object] = set()
    pending = [(-root.total_nodes, 0, root)]
    count, order = 1, 0
    while pending:
        _, _, module = heapq.heappop(pending)
        children = [child for child in module.children if child.total_nodes]
        if not children or module.path not in labels:
            continue
        room = most - count + 1
        if room < 2 and count > 1:
            continue
        del labels[module.path]
        expanded.add(module.path)
        size = -(-len(children) // max(room, 2))
        for start in range(0, len(children), size):
            group = children[start : start + size]
            label = group[0].path if len(group) == 1 else f"{group[0].path}{_TO}{group[-1].name}"
            for child in group:
                labels[child.path] = label
            count += 1
            if len(group) == 1:
                order += 1
                heapq.heappush(pending, (-group[0].total_nodes, order, group[0]))
        count -= 1
    return labels, expanded
