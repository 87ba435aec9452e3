"""``ExtendedReferenceEvaluator``: ONNX models in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import onnx
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from onnxplug.build.dtypes import to_torch
from onnxplug.errors import UsageError
from onnxplug.host import plugin_host
from onnxplug.kinds import check_kind, check_lists
from onnxplug.plugins.runtime import reference_kernels
from onnxplug_reference.arrays import Arrays
from onnxplug_reference.control import CONTROL
from onnxplug_reference.engine import Engine, Frame, Hook, Step, Steps, drain
from onnxplug_reference.feeds import checked_feeds
from onnxplug_reference.graphs import Library, Preparer, ReadyGraph, Resolver
from onnxplug_reference.kernels import Kernel
from onnxplug_reference.loading import load_proto, opset_versions
from onnxplug_reference.resolve import NumpyResolver
from onnxplug_reference.tensors import from_torch, has_torch
from onnxplug_reference.trace import Trace


class ExtendedReferenceEvaluator(ReferenceEvaluator):
    """Runs a model node by node in NumPy: slow, and as close to ONNX's specification as we can make it.

    It is an ``onnx.reference.ReferenceEvaluator``, whose kernels it takes where it has none of its own. It adds all
    operators of ai.onnx, operators of ``com.microsoft`` that rewrites emit, element types narrower than float32
    computed in float32 and rounded once, functions in any order, hooks, steps, and memory freed after the last use.

    Args:
        proto: A path, the serialised model, a ``ModelProto``, ``GraphProto``, ``FunctionProto`` or ``NodeProto``, an
            ``onnx_ir.Model`` or an ``OnnxProgram``.
        opsets: Versions of the domains, which a GraphProto lacks.
        functions: Functions in addition to the model's, ``FunctionProto`` objects or evaluators of them.
        verbose: 0 nothing; 1 each node; 2 also dtype, shape and range of inputs, constants and results; 3 their first five
            elements; 10 all elements.
        new_ops: ``OpRun`` classes, which precede all other kernels.
        check_shape_annotations: A parameter of :class:`ReferenceEvaluator`; it must be ``False``.
        kernels: Further kernels, as functions, which precede ours.
        plugins: Names of the plugins whose ``ReferenceOp`` kernels are used. With ``None`` an ``OnnxProgram`` uses the
            plugins of its export, any other model all installed plugins.
        before: A function that is called with the :class:`~onnxplug_reference.engine.Step` before each node, nodes of
            subgraphs and functions included. A returned list replaces the node's inputs.
        after: A function that is called after each node; a returned list replaces the node's outputs.
        write: A function that takes each line of ``verbose``; the standard output when ``None``.

    Raises:
        UsageError: ``proto`` is not a model, or can't be read.
        EvaluationError: An operator has no kernel.
        PluginError: A named plugin is not installed, or its kernel is invalid.
    """

    def __init__(
        self,
        proto: Any,
        opsets: Mapping[str, int] | None = None,
        functions: Iterable[Any] | None = None,
        verbose: int = 0,
        new_ops: Iterable[type[OpRun]] | None = None,
        check_shape_annotations: bool = False,
        *,
        kernels: Iterable[Kernel] = (),
        plugins: Sequence[str] | None = None,
        before: Hook | None = None,
        after: Hook | None = None,
        write: Callable[[str], None] | None = None,
    ) -> None:
        if check_shape_annotations:
            raise UsageError("check_shape_annotations is onnx.reference.ReferenceEvaluator's alone")
        self.proto_ = load_proto(proto)
        self.opsets_ = dict(opsets) if opsets is not None else opset_versions(self.proto_)
        self.verbose = verbose
        functions = [getattr(function, "proto_", function) for function in functions or ()]
        for function in functions:
            if not isinstance(function, onnx.FunctionProto):
                raise UsageError(f"functions= takes FunctionProto objects or evaluators of them, got {function!r}")
        functions = [*getattr(self.proto_, "functions", ()), *functions]
        domains = {*self.opsets_, *(imported.domain for function in functions for imported in function.opset_import)}
        self.new_ops_ = {}
        for kernel in (*_checked_classes(new_ops or ()), *_plugin_classes(proto, domains, plugins)):
            self.new_ops_.setdefault((kernel.op_domain, kernel.__name__), kernel)
        for item in kernels:
            if not isinstance(item, Kernel):
                raise UsageError(f"kernels= takes Kernel objects, got {item!r}")
        trace = Trace(verbose, write)
        self._engine = Engine(self._arrays(), CONTROL, before, after, trace)
        resolver = self._resolver(NumpyResolver(self.new_ops_, self._nested(), trace), tuple(kernels), self.new_ops_)
        self._preparer = Preparer(resolver, self._engine.arrays, Library(functions), CONTROL)
        self._graph = self._ready(())
        self._describe()

    def _arrays(self) -> Arrays:
        """The operations on the evaluator's class of tensors."""
        return Arrays()

    def _resolver(
        self, numpy: NumpyResolver, kernels: Sequence[Kernel], classes: Mapping[tuple[str, str], type[OpRun]]
    ) -> Resolver:
        """The resolver of kernels; ``kernels`` are the evaluator's further kernels."""
        numpy.give(kernels)
        return numpy

    def _taken(self, value: Any) -> Any:
        """An input as a tensor of the evaluator's class."""
        return from_torch(value)

    def _as_arrays(self, value: Any) -> Any:
        """A value in the form that ``OpRun`` classes take."""
        return value

    def _result_as_fed(self, feeds: Mapping[str, Any]) -> Callable[[Any], Any]:
        """The function that converts results to the form of the inputs."""
        device = has_torch(feeds.values())
        return (lambda value: to_torch(value, device)) if device is not None else (lambda value: value)

    def _ready(self, attributes: Iterable[onnx.AttributeProto]) -> ReadyGraph:
        proto = self.proto_
        graph = _graph_of(proto)
        if graph is not None:
            return self._preparer.graph(graph, self.opsets_)
        if isinstance(proto, onnx.FunctionProto):
            return self._preparer.function(proto, attributes)
        return self._preparer.node(proto, self.opsets_)

    def _describe(self) -> None:
        """Sets the attributes of :class:`ReferenceEvaluator`."""
        proto = self.proto_
        types = self._graph.types
        self.onnx_graph_: Any = _graph_of(proto)
        self.input_names_, self.output_names_ = list(self._graph.inputs), list(self._graph.outputs)
        self.input_types_ = [types.get(name) for name in self.input_names_] if types else None
        self.output_types_ = [types.get(name) for name in self.output_names_] if types else None
        self.all_types_ = dict(types)
        self.attributes_ = list(getattr(proto, "attribute", ())) if isinstance(proto, onnx.FunctionProto) else []

    def _nested(self) -> Callable[..., Any]:
        """The function that makes evaluators of subgraphs for ``OpRun`` classes that run subgraphs themselves."""

        def make(proto: Any, opsets: Mapping[str, int] | None = None, **_: Any) -> _Subgraph:
            if isinstance(proto, onnx.FunctionProto):
                ready = self._preparer.function(proto)
            else:
                ready = self._preparer.graph(proto, opsets if opsets is not None else self.opsets_)
            return _Subgraph(proto, ready, self._engine, self._taken, self._as_arrays)

        return make

    @property
    def has_linked_attribute(self) -> bool:
        """``False``: attributes of functions are substituted before a run."""
        return False

    def run(  # type: ignore[override]
        self,
        output_names: Sequence[str] | None,
        feed_inputs: Mapping[str, Any],
        attributes: Mapping[str, Any] | None = None,
        intermediate: bool = False,
    ) -> list[Any] | dict[str, Any]:
        """Runs the model.

        Args:
            output_names: Names of the results to return, intermediate results included; the graph's outputs when
                ``None``.
            feed_inputs: Arrays or tensors by input name; lists of them for sequences, ``None`` for an empty optional.
                With torch tensors the results are torch tensors too, on the first tensor's device.
            attributes: Values of a FunctionProto's attributes.
            intermediate: Whether to return every value of the graph by name, of which none is freed.

        Returns:
            The results in order; by name when ``intermediate``.

        Raises:
            UsageError: Inputs are missing, unknown or of another type than the graph declares, or a result is unknown.
            EvaluationError: A node fails.
        """
        frame, convert = self._start(output_names, feed_inputs, attributes, intermediate)
        results = drain(self._engine.run(frame))
        if intermediate:
            return {name: convert(value) for name, value in frame.visible().items()}
        if output_names is not None:
            results = [frame[name] for name in output_names]
        return [convert(value) for value in results]

    def steps(self, feed_inputs: Mapping[str, Any], attributes: Mapping[str, Any] | None = None) -> Run:
        """Runs the model in steps: an iterator over the nodes that have run, nodes of subgraphs and functions included.

        Args:
            feed_inputs: As :meth:`run` takes them.
            attributes: As :meth:`run` takes them.

        Raises:
            UsageError: As :meth:`run`.
        """
        frame, convert = self._start(None, feed_inputs, attributes, False)
        return Run(self._engine.run(frame), convert)

    def _start(
        self,
        output_names: Sequence[str] | None,
        feeds: Mapping[str, Any],
        attributes: Mapping[str, Any] | None,
        intermediate: bool,
    ) -> tuple[Frame, Callable[[Any], Any]]:
        check_kind("feed_inputs", feeds, Mapping, "a dict from names of inputs to arrays")
        check_lists(output_names=() if output_names is None else output_names)
        graph = self._graph
        if attributes:
            _check_attributes(self.proto_, attributes)
            graph = self._ready([onnx.helper.make_attribute(name, value) for name, value in attributes.items()])
        if output_names is not None:
            made = {*graph.inputs, *graph.initializers, *(name for node in graph.nodes for name in node.proto.output)}
            unknown = [name for name in output_names if name not in made]
            if unknown:
                raise UsageError(
                    f"the model has no result {', '.join(map(repr, unknown))}; its outputs are {graph.outputs}"
                )
        values = checked_feeds(graph, {name: self._taken(value) for name, value in feeds.items()})
        self._engine.trace.start(graph.initializers, values)
        frame = Frame(graph, values, keep=None if intermediate else frozenset(output_names or ()))
        return frame, self._result_as_fed(feeds)


def evaluator_of(source: str | bytes, kernels: Iterable[type[OpRun]]) -> ExtendedReferenceEvaluator:
    """The evaluator of a model with plugins' kernels, for the hook ``onnxplug_evaluators``."""
    return ExtendedReferenceEvaluator(source, new_ops=kernels, plugins=())


class Run:
    """A run in steps, an iterator.

    Attributes:
        outputs: The model's outputs after the last node's run; ``None`` before.
    """

    def __init__(self, steps: Steps, convert: Callable[[Any], Any]) -> None:
        self._steps = steps
        self._convert = convert
        self.outputs: list[Any] | None = None

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        try:
            return next(self._steps)
        except StopIteration as end:
            if self.outputs is None:
                self.outputs = [self._convert(value) for value in end.value or ()]
            raise StopIteration from None


class _Subgraph(ReferenceEvaluator):
    """The evaluator of a subgraph for ``OpRun`` classes, which give inputs and captured values in one dict."""

    def __init__(
        self,
        proto: Any,
        graph: ReadyGraph,
        engine: Engine,
        taken: Callable[[Any], Any],
        as_arrays: Callable[[Any], Any],
    ) -> None:
        self.proto_ = proto
        self.onnx_graph_ = proto
        self.input_names_, self.output_names_ = list(graph.inputs), list(graph.outputs)
        self.attributes_ = list(getattr(proto, "attribute", ())) if isinstance(proto, onnx.FunctionProto) else []
        self._graph = graph
        self._engine = engine
        self._taken = taken
        self._as_arrays = as_arrays

    @property
    def has_linked_attribute(self) -> bool:
        return False

    def run(  # type: ignore[override]
        self, output_names: Sequence[str] | None, feed_inputs: Mapping[str, Any], **_: Any
    ) -> list[Any]:
        """Runs the subgraph."""
        keep = frozenset(output_names or ())
        outer = self._engine.trace.frame
        values = {name: self._taken(value) for name, value in feed_inputs.items() if name}
        frame = Frame(self._graph, values, outer, ("subgraph",), keep)
        results = drain(self._engine.run(frame))
        wanted = results if output_names is None else [frame[name] for name in output_names]
        return [self._as_arrays(value) for value in wanted]


def _graph_of(proto: Any) -> onnx.GraphProto | None:
    """The graph of a model, or a graph itself; ``None`` for a function or node."""
    graph = proto.graph if isinstance(proto, onnx.ModelProto) else proto
    return graph if isinstance(graph, onnx.GraphProto) else None


def _check_attributes(proto: Any, attributes: Mapping[str, Any]) -> None:
    """Checks that a function has the attributes that a run gives.

    Raises:
        UsageError: It lacks one, or it is no function.
    """
    if not isinstance(proto, onnx.FunctionProto):
        raise UsageError("attributes= gives the attributes of a FunctionProto, and this is another model")
    known = [*proto.attribute, *(attribute.name for attribute in proto.attribute_proto)]
    unknown = [name for name in attributes if name not in known]
    if unknown:
        raise UsageError(
            f"the function has no attribute {', '.join(map(repr, unknown))}; it has {', '.join(known) or 'none'}"
        )


def _checked_classes(classes: Iterable[Any]) -> list[type[OpRun]]:
    """The classes of ``new_ops``.

    Raises:
        UsageError: An item is no ``OpRun`` class.
    """
    classes_ = list(classes)
    for kernel in classes_:
        if not isinstance(kernel, type) or not issubclass(kernel, OpRun):
            raise UsageError(f"new_ops takes OpRun classes, got {kernel!r}", hint="kernels= takes functions.")
    return classes_


def _plugin_classes(model: Any, domains: Iterable[str], plugins: Sequence[str] | None) -> list[type[OpRun]]:
    """The kernels of plugins for the custom ones of a model's domains."""
    custom = frozenset(name for name in domains if name and not name.startswith("ai.onnx"))
    if not custom:
        return []
    host = getattr(model, "host", None) if plugins is None else None
    return list(reference_kernels(custom, (host or plugin_host(plugins)).runtimes()).values())
