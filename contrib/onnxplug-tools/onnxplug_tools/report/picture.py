"""A picture of a model's graph by its modules: few enough boxes to be read, in layers from the inputs to the outputs."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from onnxplug.text import counted

if TYPE_CHECKING:
    from onnxplug_tools.inspection.view import ModelView, ModuleView, NodeView, ValueView

#: The most boxes that modules are expanded into.
MOST_BOXES = 40
#: The most inputs, and outputs, that have a box each.
_MOST_ENDS = 8
#: Longer edges than these, all together, are drawn straight.
_MOST_BENDS = 4000
_WIDTH, _HEIGHT, _GAP_X, _GAP_Y, _LANE = 176.0, 46.0, 22.0, 44.0, 14.0
_SWEEPS = 4
#: Between the names of the first and the last of several modules that have a box together.
_TO = " … "


@dataclass
class Box:
    """A part of the graph.

    Attributes:
        label: What stands in it.
        about: What stands below that.
        title: More, for who points at it.
        kind: ``"module"``, ``"own"`` (nodes of a module that are of none of its submodules), ``"input"`` or ``"output"``.
        module: The path of the module.
        share: Its share of the estimated operations, 0 to 1.
        x, y: The middle of its upper edge.
        width, height: Its size.
    """

    label: str
    about: str = ""
    title: str = ""
    kind: str = "module"
    module: str = ""
    share: float = 0.0
    x: float = 0.0
    y: float = 0.0
    width: float = _WIDTH
    height: float = _HEIGHT


@dataclass(frozen=True)
class Line:
    """Values that go from one box to another.

    Attributes:
        path: How the line goes, as SVG's attribute ``d``.
        title: What goes there.
        backward: Whether it goes up, to a box that comes before.
    """

    path: str
    title: str
    backward: bool = False


@dataclass
class Picture:
    """Boxes and lines.

    Attributes:
        boxes, lines: All of them.
        bounds: Left, top, width and height of everything.
        focus: The middle of the first layer, where reading begins.
    """

    boxes: list[Box] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    bounds: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    focus: float = 0.0


def picture(view: ModelView, most: int = MOST_BOXES) -> Picture:
    """The picture of a model. Takes time linear in its nodes.

    Args:
        view: The model.
        most: About how many boxes there may be.
    """
    sketch = _Sketch(view, most)
    drawing = _Drawing(sketch.boxes, sketch.edges)
    return drawing.drawn()


class _Sketch:
    """Which boxes there are, and what goes from one to another."""

    def __init__(self, view: ModelView, most: int) -> None:
        self.boxes: list[Box] = []
        self.edges: Counter[tuple[int, int]] = Counter()
        self._view = view
        self._modules = {module.path: module for module in _all(view.root)}
        self._whole = view.root.total_flops or 1
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
        """Leaves out boxes of a module's own nodes that nothing goes to or from: they compute sizes."""
        joined = {number for edge in self.edges for number in edge}
        kept = [number for number, box in enumerate(self.boxes) if box.kind != "own" or number in joined]
        if not joined or len(kept) == len(self.boxes):
            return
        fresh = {number: position for position, number in enumerate(kept)}
        self.boxes = [self.boxes[number] for number in kept]
        self.edges = Counter({(fresh[source], fresh[target]): count for (source, target), count in self.edges.items()})

    def _key(self, path: str) -> object:
        """The module or the group of modules that has a box, of a node of a module; an expanded one for nodes of its own."""
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
            # What stands for several modules leads to the one around them.
            module = label.partition(_TO)[0].rpartition(".")[0] if _TO in label else label
            self.boxes.append(Box(label, kind=kind, module=module))
        return number

    def _describe(self, box: Box, nodes: Sequence[NodeView]) -> None:
        flops = sum(node.flops or 0 for node in nodes if "/" not in node.graph)
        box.share = min(1.0, flops / self._whole)
        operators = Counter(node.operator for node in nodes).most_common()
        listed = ", ".join(f"{name} {count}" if count > 1 else name for name, count in operators[:8])
        box.title = (
            f"{box.label or 'the model'}: {counted(len(nodes), 'node')}: {listed}{', …' if len(operators) > 8 else ''}"
        )
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
            title = ", ".join(name for name, _ in names[:20])
            self.boxes.append(Box(f"{len(names)} {kind}s", title=title, kind=kind))
            return [(name, len(self.boxes) - 1) for name, _ in names]
        found = []
        for name, type_ in names:
            found.append((name, len(self.boxes)))
            self.boxes.append(Box(name, type_, f"{kind} {name}: {type_}", kind))
        return found


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
    """The modules that have a box, each with the box's label, and those that are shown by what is in them.

    The largest are expanded first. Children that would be too many share boxes, neighbours together.
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


class _Drawing:
    """Where boxes and lines are: in layers, so that lines go down; what goes back up is drawn beside everything."""

    def __init__(self, boxes: list[Box], edges: Counter[tuple[int, int]]) -> None:
        self._boxes = boxes
        # Nodes come in order, so boxes do too as far as they can: what goes to an earlier one goes back up.
        order = {number: position for position, number in enumerate(_in_order(boxes))}
        self._forward = {edge: n for edge, n in edges.items() if order[edge[0]] < order[edge[1]]}
        self._backward = {edge: n for edge, n in edges.items() if order[edge[0]] >= order[edge[1]]}
        self._layer = self._layers(order)
        #: The boxes and bends of each layer; a bend is a number beyond those of boxes.
        self._rows: list[list[int]] = [[] for _ in range(max(self._layer.values(), default=-1) + 1)]
        self._chains: dict[tuple[int, int], list[int]] = {}
        self._x: dict[int, float] = {}
        for number in sorted(order, key=order.__getitem__):
            self._rows[self._layer[number]].append(number)
        self._bend()

    def _layers(self, order: dict[int, int]) -> dict[int, int]:
        """The longest way from an input to each box; inputs stand right above what first reads them."""
        layer = dict.fromkeys(order, 0)
        targets: dict[int, list[int]] = {}
        for source, target in self._forward:
            targets.setdefault(source, []).append(target)
        for number in sorted(order, key=order.__getitem__):
            for target in targets.get(number, ()):
                layer[target] = max(layer[target], layer[number] + 1)
        for number, box in enumerate(self._boxes):
            if box.kind == "input" and targets.get(number):
                layer[number] = max(0, min(layer[target] for target in targets[number]) - 1)
        return layer

    def _bend(self) -> None:
        """Gives lines that pass layers a lane in each, which those from one box share."""
        lanes: dict[tuple[int, int], int] = {}
        bends = sum(self._layer[target] - self._layer[source] - 1 for source, target in self._forward)
        next_number = len(self._boxes)
        for source, target in self._forward:
            chain = [source]
            if bends <= _MOST_BENDS:
                for row in range(self._layer[source] + 1, self._layer[target]):
                    if (source, row) not in lanes:
                        lanes[source, row] = next_number
                        self._rows[row].append(next_number)
                        next_number += 1
                    chain.append(lanes[source, row])
            self._chains[source, target] = [*chain, target]

    def drawn(self) -> Picture:
        """The picture."""
        above: dict[int, list[int]] = {}
        below: dict[int, list[int]] = {}
        for chain in self._chains.values():
            for source, target in pairwise(chain):
                if target not in below.setdefault(source, []):
                    below[source].append(target)
                    above.setdefault(target, []).append(source)
        for sweep in range(_SWEEPS):
            downward = sweep % 2 == 0
            self._sort(above if downward else below, downward)
        for row in self._rows:
            self._place(row, {})
        for sweep in range(_SWEEPS):
            neighbours = above if sweep % 2 == 0 else below
            for row in self._rows if sweep % 2 == 0 else self._rows[::-1]:
                self._place(row, neighbours)
        for number, box in enumerate(self._boxes):
            box.x, box.y = self._x[number], self._layer[number] * (_HEIGHT + _GAP_Y)
        return self._finished()

    def _sort(self, neighbours: dict[int, list[int]], downward: bool) -> None:
        """Puts what is in a layer in the order of what it is connected with, so that few lines cross."""
        position = {number: index / max(1, len(row)) for row in self._rows for index, number in enumerate(row)}
        for row in self._rows if downward else self._rows[::-1]:
            wanted = {
                number: sum(position[n] for n in found) / len(found)
                if (found := neighbours.get(number))
                else position[number]
                for number in row
            }
            row.sort(key=wanted.__getitem__)
            for index, number in enumerate(row):
                position[number] = index / max(1, len(row))

    def _place(self, row: list[int], neighbours: dict[int, list[int]]) -> None:
        """Gives what is in a layer places below or above what it is connected with, in its order."""
        wanted = [
            sum(self._x[n] for n in found) / len(found)
            if (found := neighbours.get(number))
            else self._x.get(number, 0.0)
            for number in row
        ]
        placed: list[float] = []
        for index, number in enumerate(row):
            least = (
                placed[-1] + (self._width(row[index - 1]) + self._width(number)) / 2 + _GAP_X
                if placed
                else wanted[index]
            )
            placed.append(max(least, wanted[index]))
        shift = sum(w - p for w, p in zip(wanted, placed, strict=True)) / len(row) if row else 0.0
        for number, x in zip(row, placed, strict=True):
            self._x[number] = x + shift

    def _width(self, number: int) -> float:
        return self._boxes[number].width if number < len(self._boxes) else _LANE

    def _finished(self) -> Picture:
        lines = [
            Line(self._way(chain), self._title(*edge, self._forward[edge])) for edge, chain in self._chains.items()
        ]
        halves = [box.width / 2 for box in self._boxes]
        left = min((box.x - half for box, half in zip(self._boxes, halves, strict=True)), default=0.0)
        right = max((box.x + half for box, half in zip(self._boxes, halves, strict=True)), default=0.0)
        left, right = min(left, *self._x.values(), right), max(right, *self._x.values(), left)
        bottom = max((box.y + box.height for box in self._boxes), default=0.0)
        for lane, (source, target) in enumerate(self._backward):
            x = right + _LANE * (lane + 1)
            a, b = self._boxes[source], self._boxes[target]
            start, end = (a.x + a.width / 2, a.y + a.height / 2), (b.x + b.width / 2, b.y + b.height / 2)
            path = (
                f"M{start[0]:.0f} {start[1]:.0f}C{x:.0f} {start[1]:.0f} {x:.0f} {end[1]:.0f} {end[0]:.0f} {end[1]:.0f}"
            )
            lines.append(Line(path, self._title(source, target, self._backward[source, target]), backward=True))
        right += _LANE * (len(self._backward) + 1) if self._backward else 0.0
        margin = 16.0
        bounds = (left - margin, -margin, right - left + 2 * margin, bottom + 2 * margin)
        first = [box.x for box in self._boxes if box.y == 0.0]
        return Picture(self._boxes, lines, bounds, sum(first) / len(first) if first else 0.0)

    def _way(self, chain: Sequence[int]) -> str:
        first, last = self._boxes[chain[0]], self._boxes[chain[-1]]
        x, y = first.x, first.y + first.height
        parts = [f"M{x:.0f} {y:.0f}"]
        row = self._layer[chain[0]]
        for number in chain[1:]:
            row += 1
            is_last = number == chain[-1]
            end_x, end_y = self._x[number], last.y if is_last else row * (_HEIGHT + _GAP_Y)
            middle = (y + end_y) / 2
            parts.append(f"C{x:.0f} {middle:.0f} {end_x:.0f} {middle:.0f} {end_x:.0f} {end_y:.0f}")
            x, y = end_x, end_y
            if not is_last:
                y += _HEIGHT
                parts.append(f"V{y:.0f}")
        return "".join(parts)

    def _title(self, source: int, target: int, count: int) -> str:
        def name(box: Box) -> str:
            return box.label or "the model"

        return f"{name(self._boxes[source])} → {name(self._boxes[target])}: read {counted(count, 'time')}"


def _in_order(boxes: Sequence[Box]) -> list[int]:
    """The boxes with inputs first and outputs last."""
    place = {"input": 0, "output": 2}
    return sorted(range(len(boxes)), key=lambda number: (place.get(boxes[number].kind, 1), number))
