"""The FX nodes that a module's trace adds, and copies of them for others."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from onnxplug.capture.block_calls import PlainValue, Site, apart_from_trace, is_plain, symbol_count, type_of
from onnxplug.capture.sameness import Reads, attributes_of, class_attributes, read_otherwise
from onnxplug.torch_private import CapturedTraceback, disable_current_modes, pytree, snapshot_fake, track_tensor

#: A module of fewer nodes is traced: a copy would save less than finding out costs.
FEWEST_NODES = 3
#: What torch calls the tensors that code makes of numbers.
_CONSTANT = "_tensor_constant"
_SIZES_OF = (
    torch.ops.aten.sym_size.int,
    torch.ops.aten.sym_stride.int,
    torch.ops.aten.sym_numel.default,
    torch.ops.aten.sym_storage_offset.default,
)


def _argument(tensor: Any) -> Any:
    """Stands for an argument while a module is traced, so that what else refers to the same tensor is told from it."""
    return tensor


class Recording:
    """The nodes that a module's trace adds."""

    def __init__(self, site: Site, calls: list[str]) -> None:
        self.site = site
        self.size = 0
        self.reads = Reads(site.tree)
        #: By module without children what each call of it passed on, or ``None``.
        self.passed: dict[int, list[Any]] = {}
        self._all_calls = calls
        self._first_call = len(calls)
        tracer = site.tracer
        graph = tracer.graph
        self._depth = len(tracer.module_stack)
        self._counts = dict(tracer.torch_fn_counts)
        self._stack = _stack(tracer)
        self._symbols = symbol_count(site)
        self._markers: list[torch.fx.Node] = []
        stand_ins: dict[int, torch.Tensor] = {}
        with apart_from_trace(tracer):
            for tensor, node in zip(site.tensors[: site.arguments], site.nodes, strict=False):
                marker = graph.create_node("call_function", _argument, (node,), name="block_argument")
                stand_in = stand_ins[id(tensor)] = snapshot_fake(tensor)
                marker.meta["val"] = tensor
                track_tensor(stand_in, tracer.proxy(marker), constant=None, tracer=tracer)
                self._markers.append(marker)
        self._stand_ins = [stand_ins[id(tensor)] for tensor in site.tensors[: site.arguments]]
        self.leaves = [stand_ins.get(id(leaf), leaf) for leaf in site.leaves]
        self._last = next(reversed(graph.nodes))

    def _tracked(self) -> list[torch.fx.Node]:
        """The nodes of arguments, parameters and buffers after the trace."""
        tracker = self.site.tracer.tensor_tracker
        tensors = [*self._stand_ins, *self.site.tensors[self.site.arguments :]]
        return [tracker.get(tensor).proxy.node for tensor in tensors]

    def template(self, result: Any) -> tuple[Any, Template | None]:
        """The module's own result, and its trace to be copied; ``None`` where it can't be."""
        site = self.site
        before = [*self._markers, *site.nodes[site.arguments :]]
        nodes = []
        node = self._last.next
        while node.op != "root":
            nodes.append(node)
            node = node.next
        self.size = len(nodes)
        after = self._tracked()
        with apart_from_trace(site.tracer):
            found = self._template(nodes, before, after, result) if self.size >= FEWEST_NODES else None
            # What was done in place to a stand-in was done to the argument.
            for tensor, was, now in zip(site.tensors, before[: site.arguments], after, strict=False):
                if now is not was:
                    site.tracer.tensor_tracker[tensor] = site.tracer.tensor_tracker[self._stand_ins[before.index(was)]]
            back = {id(s): t for s, t in zip(self._stand_ins, site.tensors, strict=False)}
            result = pytree.tree_map(lambda leaf: back.get(id(leaf), leaf), result)
        self.finish()
        return result, found

    def finish(self) -> None:
        """Puts the arguments in the place of what stood for them."""
        for marker in self._markers:
            marker.replace_all_uses_with(marker.args[0])  # type: ignore[arg-type]
            marker.graph.erase_node(marker)
        self._markers = []

    def _template(
        self, nodes: list[torch.fx.Node], before: list[Any], after: list[Any], result: Any
    ) -> Template | None:
        site, tracer = self.site, self.site.tracer
        settled = self.reads.settled()
        if (
            settled is None
            or any(_is_bound_to_its_place(node, tracer) for node in nodes)
            or symbol_count(site) != self._symbols
        ):
            return None
        leaves, spec = pytree.tree_flatten(result)
        inside = set(nodes)
        outputs: list[Any] = []
        stand_ins = {id(t): i for i, t in enumerate(self._stand_ins)}
        weights = {id(t): i for i, t in enumerate(site.tensors) if i >= site.arguments}
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                entry = tracer.tensor_tracker.get(leaf)
                if entry is None or entry.constant is not None or leaf.requires_grad:
                    return None
                if id(leaf) in stand_ins:
                    outputs.append(stand_ins[id(leaf)])
                elif id(leaf) in weights:
                    outputs.append(weights[id(leaf)])
                elif entry.proxy.node in inside:
                    outputs.append((leaf, entry.proxy.node))
                else:
                    return None
            elif is_plain(leaf):
                outputs.append(PlainValue(leaf))
            else:
                return None
        if [type_of(t) for t in self._stand_ins] != [type_of(t) for t in site.tensors[: site.arguments]]:
            return None
        return Template(self, site, nodes, before, after, outputs, spec, settled)


class Template:
    """A module's trace, to be copied for others.

    Args:
        recording: How it was made.
        site: The call.
        nodes: The trace, in order.
        before, after: The nodes of arguments and weights when it begins and when it ends.
        outputs: For each leaf of the result the place of an argument or weight, a tensor and its node, or a plain value.
        spec: The structure of the result.
        reads: The attributes read.
    """

    def __init__(
        self,
        recording: Any,
        site: Site,
        nodes: list[torch.fx.Node],
        before: list[torch.fx.Node],
        after: list[torch.fx.Node],
        outputs: list[Any],
        spec: Any,
        reads: Any,
    ) -> None:
        tracer = site.tracer
        self._site = site
        self._spec, self._reads, self._of_classes = spec, reads, recording.reads.of_classes
        self._passed = {i: recording.passed.get(id(module), [None]) for i, (_, module) in enumerate(site.tree)}
        self._stack = recording._stack
        self._depth = recording._depth
        self._calls = recording._all_calls[recording._first_call :]
        counts = Counter(self._calls)
        self._base_counts = {path: tracer.num_calls.get(path, 0) - n for path, n in counts.items()}
        self._fn_base = {str(getattr(f, "__name__", f)): recording._counts.get(f, 0) for f in tracer.torch_fn_counts}
        self._fn_counts = {
            f: n - recording._counts.get(f, 0)
            for f, n in tracer.torch_fn_counts.items()
            if n != recording._counts.get(f, 0)
        }
        nodes = _without_idle_sizes(nodes, [*after, *(o[1] for o in outputs if isinstance(o, tuple))])
        inside = set(nodes)
        graph = torch.fx.Graph()
        copies: dict[torch.fx.Node, torch.fx.Node] = {}
        self._inputs: list[torch.fx.Node] = []
        for node in before:
            copies[node] = graph.placeholder("given")
            self._inputs.append(copies[node])
        #: Nodes that every copy refers to, as they are no part of the module.
        self._shared: list[tuple[torch.fx.Node, torch.fx.Node]] = []
        self._sized: dict[torch.fx.Node, tuple[torch.fx.Node, int, int]] = {}
        markers = {node: i for i, node in enumerate(before)}

        def known(node: torch.fx.Node) -> torch.fx.Node:
            if node not in copies:
                copies[node] = graph.placeholder("shared")
                self._shared.append((copies[node], node))
            return copies[node]

        self._nodes: list[torch.fx.Node] = []
        for node in nodes:
            if node.target in _SIZES_OF:
                of: Any = node.args[0]
                if of not in inside and of not in markers:
                    known(node)  # torch asks for a size of one tensor once
                    continue
                if of in markers and node.target is torch.ops.aten.sym_size.int:
                    copies[node] = graph.node_copy(node, known)
                    axis: Any = node.args[1]
                    self._sized[copies[node]] = (node, markers[of], axis)
                    self._nodes.append(copies[node])
                    continue
            copies[node] = graph.node_copy(node, known)
            self._nodes.append(copies[node])
        self._after = [(i, copies[b]) for i, (a, b) in enumerate(zip(before, after, strict=True)) if a is not b]
        self._outputs = [(o[0], copies[o[1]]) if isinstance(o, tuple) else o for o in outputs]

    def stands_for(self, site: Site) -> bool:
        """Whether the trace of a call is this one."""
        if self._site.spec != site.spec or self._site.alike != site.alike:
            return False
        if class_attributes(site.tree) != self._of_classes:
            return False
        return all(self._passes(place, site) for place in read_otherwise(self._reads, site.tree))

    def _passes(self, place: int | None, site: Site) -> bool:
        """Whether a part whose attributes differ passes on all that it is given, as that of the first module does.

        Such is stochastic depth of another probability, which does nothing but in training.
        """
        given = self._passed.get(place, [None]) if place is not None else [None]
        if any(argument is None for argument in given):
            return False
        module, graph = site.tree[place or 0][1], site.tracer.graph
        before, last = attributes_of(module), next(reversed(graph.nodes))
        results = [module.forward(argument) for argument in given]
        return (
            all(r is argument for r, argument in zip(results, given, strict=True))
            and attributes_of(module) == before
            and next(reversed(graph.nodes)) is last
        )

    def copied(self, site: Site, calls: list[str]) -> Any:
        """Adds the nodes for a call.

        Returns:
            The module's result.
        """
        with apart_from_trace(site.tracer):
            return self._copied(site, calls)

    def _copied(self, site: Site, calls: list[str]) -> Any:
        tracer, graph = site.tracer, site.tracer.graph
        made = dict(zip(self._inputs, site.nodes, strict=True))
        made.update(self._shared)
        place = _Place(self, site)
        for node in self._nodes:
            sized = self._sized.get(node)
            if sized is not None:
                original, i, axis = sized
                sizes: list[Any] = [call.tensors[i].shape[axis] for call in (self._site, site)]
                if sizes[0].node is sizes[1].node:
                    made[node] = original
                    continue
            if node.op == "get_attr":
                name = _own_constant(tracer, str(node.target)) if _is_made_by_code(node) else str(node.target)
                new = graph.create_node("get_attr", name)
                new.meta = dict(node.meta)
            else:
                new = graph.node_copy(node, made.__getitem__)
            made[node] = new
            place.write(new)
        for function, count in self._fn_counts.items():
            tracer.torch_fn_counts[function] = tracer.torch_fn_counts.get(function, 0) + count
        for path in self._calls:
            path = place.path(path)
            tracer.num_calls[path] = tracer.num_calls.get(path, 0) + 1
            calls.append(path)
        for i, node in self._after:
            track_tensor(site.tensors[i], tracer.proxy(made[node]), constant=None, tracer=tracer)
        return pytree.tree_unflatten([self._output(o, site, made) for o in self._outputs], self._spec)

    def _output(self, output: Any, site: Site, made: dict[torch.fx.Node, torch.fx.Node]) -> Any:
        if isinstance(output, PlainValue):
            return output.value
        if isinstance(output, int):
            return site.tensors[output]
        tensor, node = output
        new = snapshot_fake(tensor)
        track_tensor(new, site.tracer.proxy(made[node]), constant=None, tracer=site.tracer)
        return new


class _Place:
    """Where copies stand: module paths, lines of the code that calls the module, numbers of calls."""

    def __init__(self, template: Template, site: Site) -> None:
        tracer = site.tracer
        self._template, self._site = template, site
        self._outer = {
            key: (path, cls if isinstance(cls, str) else f"{cls.__module__}.{cls.__qualname__}")
            for key, (path, cls) in tracer.module_stack.items()
        }
        self._from, self._to = template._site.path, site.path
        self._stack = _stack(tracer)
        self._stacks: dict[Any, dict[str, Any]] = {}
        self._traces: dict[str, str] = {}
        self._num_calls = dict(tracer.num_calls) if template._base_counts else {}
        self._fn_counts = {str(getattr(f, "__name__", f)): n for f, n in tracer.torch_fn_counts.items()}

    def path(self, path: str) -> str:
        """The path in this module of what is at a path in the first one."""
        inner = path.removeprefix(self._from + ".")
        return f"{self._to}.{inner}" if inner != path else path

    def write(self, node: torch.fx.Node) -> None:
        """Corrects what a copied node says of its place."""
        meta = node.meta
        stack = meta.get("nn_module_stack")
        if stack is not None:
            inner = tuple(itertools.islice(stack.items(), self._template._depth, None))
            found = self._stacks.get(inner)
            if found is None:
                found = self._stacks[inner] = {**self._outer, **dict(map(self._entry, inner))}
            meta["nn_module_stack"] = found
        trace = meta.get("stack_trace")
        if trace is not None and self._stack != self._template._stack:
            if trace not in self._traces:
                inner_frames = trace.removeprefix(self._template._stack)
                self._traces[trace] = f"{self._stack}{inner_frames}" if inner_frames != trace else trace
            meta["stack_trace"] = self._traces[trace]
        function = meta.get("torch_fn")
        if function is not None:
            name, _, number = function[0].rpartition("_")
            count = int(number) - self._template._fn_base.get(name, 0) + self._fn_counts.get(name, 0)
            meta["torch_fn"] = (f"{name}_{count}", function[1])

    def _entry(self, entry: tuple[str, tuple[str, str]]) -> tuple[str, tuple[str, str]]:
        key, (path, cls) = entry
        old, _, number = key.partition("@")
        base = self._template._base_counts.get(old, 0)
        new = self.path(old)
        count = int(number or 0) - base + self._num_calls.get(new, 0)
        return (f"{new}@{count}" if count else new), (self.path(path), cls)


def _without_idle_sizes(nodes: list[torch.fx.Node], kept: Sequence[torch.fx.Node]) -> list[torch.fx.Node]:
    """The nodes without those that compute a size, or a condition on sizes, that no operator reads.

    torch works out layouts with them, and takes them away at the end; later modules find most of the answers known.
    """
    needed = set(kept)
    found = []
    for node in reversed(nodes):
        val = node.meta.get("val")
        of_sizes = isinstance(val, torch.SymInt | torch.SymBool | torch.SymFloat)
        if not of_sizes or node in needed:
            needed.update(node.all_input_nodes)
            found.append(node)
    return found[::-1]


def _stack(tracer: Any) -> str:
    """The lines of the model's code that are being run, as torch writes them beside FX nodes."""
    frames = tracer._filter_traceback_frames(CapturedTraceback.extract().summary())
    return "".join(frames.format()).strip() + "\n" if frames else ""


def _is_bound_to_its_place(node: torch.fx.Node, tracer: Any) -> bool:
    """Whether a node refers to what belongs to one place of the graph, such as a branch of torch.cond."""
    if node.op == "get_attr":
        is_constant = str(node.target).startswith(_CONSTANT)
        return not (is_constant and isinstance(getattr(tracer.root, str(node.target)), torch.Tensor))
    return node.op != "call_function"


def _is_made_by_code(constant: torch.fx.Node) -> bool:
    """Whether a constant comes from ``torch.tensor`` in the code; a tensor that the code refers to is one in every call."""
    return all(user.target is torch.ops.aten.lift_fresh_copy.default for user in constant.users)


def _own_constant(tracer: Any, name: str) -> str:
    """The name of a copy of a constant of the code, such as ``torch.tensor(0.5)``: each call of it makes its own."""
    with disable_current_modes():
        value = getattr(tracer.root, name).clone()
    new = str(tracer.get_fresh_qualname(_CONSTANT))
    setattr(tracer.root, new, value)
    tracer.tensor_attrs[value] = new
    return new
