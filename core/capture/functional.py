"""Preparation: a functional graph with named inputs and outputs."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.export.graph_signature import ConstantArgument, TensorArgument
from torch.export.graph_signature import InputKind as TorchInput
from torch.export.graph_signature import OutputKind as TorchOutput
from torch.fx.experimental import _config as fx_config

from onnxplug.capture.naming import assign_names, result_names
from onnxplug.capture.signature import Captured, FunctionalGraph, InputKind, InputSlot, OutputKind, OutputSlot
from onnxplug.errors import CaptureError, UsageError

_aten = torch.ops.aten
_STATE = {
    TorchInput.PARAMETER: InputKind.PARAMETER,
    TorchInput.BUFFER: InputKind.BUFFER,
    TorchInput.CONSTANT_TENSOR: InputKind.CONSTANT,
}
_MUTATIONS = {
    TorchOutput.BUFFER_MUTATION: OutputKind.BUFFER_MUTATION,
    TorchOutput.USER_INPUT_MUTATION: OutputKind.INPUT_MUTATION,
}
#: Composite operators of aten whose result is always new memory. Any other composite without alias annotations may
#: return its argument or a view of it (einsum, meshgrid, dropout in eval mode).
_FRESH = frozenset(
    """linear matmul conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d _convolution batch_norm
    instance_norm group_norm layer_norm rms_norm relu6 selu celu prelu square softmax log_softmax where
    scaled_dot_product_attention embedding cross_entropy_loss nll_loss max_pool1d max_pool2d max_pool3d
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d std var var_mean
    std_mean one_hot index_select gather take_along_dim isfinite isinf true_divide multiply subtract divide negative
    absolute greater greater_equal less less_equal not_equal clip lstm gru rnn_tanh rnn_relu upsample_nearest1d
    upsample_nearest2d upsample_nearest3d upsample_bilinear2d upsample_bicubic2d upsample_linear1d upsample_trilinear3d
    hstack vstack dstack concat concatenate column_stack row_stack stack cat tile repeat_interleave cosine_similarity
    pairwise_distance max min logsumexp diff outer argwhere bilinear _fused_rms_norm conv_tbc gelu mish silu pad
    __and__ __or__ __xor__""".split()
)
#: Their result is the argument itself, whole, as long as nothing is converted.
_IDENTITIES = frozenset([_aten.detach.default, _aten.alias.default, _aten.detach_.default])
_DROPOUTS = frozenset(
    getattr(getattr(_aten, name + suffix), "default")
    for name in ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
    for suffix in ("", "_")
)
#: In-place operators whose functional form is not found by name and argument types.
_FUNCTIONAL_NAMES = {
    "__iand__": "bitwise_and",
    "__ior__": "bitwise_or",
    "__ixor__": "bitwise_xor",
    "__ilshift__": "bitwise_left_shift",
    "__irshift__": "bitwise_right_shift",
    "normal_": "normal_functional",
}
#: They change the shape or the storage of what they write, so other names of the same memory see something else.
_RESHAPING = frozenset("resize resize_as set as_strided t transpose squeeze unsqueeze swapaxes swapdims".split())
_NO_EFFECT_NAMES = frozenset(
    """_assert_tensor_metadata _assert_scalar _assert_async sym_constrain_range sym_constrain_range_for_size
    _functional_sym_constrain_range _functional_sym_constrain_range_for_size _functional_assert_async
    _set_grad_enabled _guards_fn _functional_assert_scalar""".split()
)


class _Kind(NamedTuple):
    """What a target does to memory.

    Attributes:
        written: Positions and names of the arguments that it writes.
        aliased: Arguments that a result may share memory with; ``None``: any.
        functional: The overload that computes the same without writing.
        out: Whether the written argument is an ``out=`` that isn't read.
    """

    written: tuple[tuple[int, str], ...]
    aliased: tuple[tuple[int, str], ...] | None
    functional: Any
    out: bool


def is_effect_free_noop(target: Any) -> bool:
    """Whether a node of this target without users can go: assertions, range hints and gradient modes."""
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.partition("::")[2] in _NO_EFFECT_NAMES
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return name in _NO_EFFECT_NAMES


# -- what operators do to memory ---------------------------------------------------------------------------------------


@functools.cache
def _kind(target: Any) -> _Kind:
    if not isinstance(target, torch._ops.OpOverload):
        return _Kind((), None, None, False)
    arguments = list(enumerate(target._schema.arguments))
    annotated = [(i, a) for i, a in arguments if a.alias_info is not None]
    written = tuple((i, a.name) for i, a in annotated if a.alias_info.is_write)
    if written:
        functional, out = _functional_overload(target) if len(written) == 1 else (None, False)
        return _Kind(written, None, functional, out)
    aliased: tuple[tuple[int, str], ...] | None = ()
    if any(r.alias_info is not None for r in target._schema.returns):
        aliased = tuple((i, a.name) for i, a in annotated)
    elif _may_return_argument(target):
        aliased = None
    return _Kind((), aliased, None, False)


def _may_return_argument(target: torch._ops.OpOverload) -> bool:
    """Only a composite of aten may share memory without saying so."""
    namespace, _, name = target._schema.name.partition("::")
    if namespace != "aten" or name in _FRESH or is_effect_free_noop(target):
        return False
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd"))


def _functional_overload(target: torch._ops.OpOverload) -> tuple[Any, bool]:
    """``aten.add.Tensor`` for ``aten.add_.Tensor`` and for ``aten.add.out``, and whether it was the latter."""
    namespace, _, name = target._schema.name.partition("::")
    arguments = target._schema.arguments
    out = bool(arguments) and arguments[-1].is_out
    base = _FUNCTIONAL_NAMES.get(name, name if out else name.removesuffix("_"))
    if namespace != "aten" or (base == name and not out) or base in _RESHAPING:
        return None, False
    packet = getattr(_aten, base, None)
    wanted = [_type_of(a) for a in (arguments[:-1] if out else arguments)]
    same_name = [target._schema.overload_name or "default", "default"]
    for overload_name in dict.fromkeys([*same_name, *(packet.overloads() if packet is not None else ())]):
        found = getattr(packet, overload_name, None)
        if found is None or found._schema.is_mutable or len(found._schema.returns) != 1:
            continue
        if [_type_of(a) for a in found._schema.arguments] == wanted and "Tensor" in str(found._schema.returns[0].type):
            return found, out
    return None, False


def _type_of(argument: Any) -> tuple[str, bool]:
    return str(argument.type), argument.kwarg_only


def mutates(node: torch.fx.Node) -> bool:
    """Whether a node's schema says that it writes an argument."""
    return node.op == "call_function" and bool(_kind(node.target).written)


def hides_mutation(node: torch.fx.Node) -> bool:
    """Whether a node writes running statistics although its schema doesn't say so."""
    if node.target is _aten.batch_norm.default:
        return bool(_argument(node, 5, "training")) and _argument(node, 3, "running_mean") is not None
    if node.target is _aten.instance_norm.default:
        return bool(_argument(node, 5, "use_input_stats")) and _argument(node, 3, "running_mean") is not None
    return False


def _argument(node: torch.fx.Node, position: int, name: str) -> Any:
    return node.args[position] if position < len(node.args) else node.kwargs.get(name)


def _is_idle_dropout(node: torch.fx.Node) -> bool:
    """Dropout in eval mode returns its argument itself."""
    return node.target in _DROPOUTS and not _argument(node, 2, "train")


# -- the linear pass ---------------------------------------------------------------------------------------------------


class _Group:
    """Values that may share memory, and how long they are read.

    Attributes:
        root: The value of the group that is read last; exact aliases of a value count as the value itself.
        last: Position of that last read.
        others: Position of the last read of any other root.
        outside: Roots whose memory the caller sees: placeholders and attributes.
    """

    __slots__ = ("last", "others", "outside", "root")

    def __init__(self, root: torch.fx.Node, last: int) -> None:
        self.root, self.last, self.others = root, last, -1
        self.outside = {root} if root.op in ("placeholder", "get_attr") else set()

    def add(self, root: torch.fx.Node, last: int, others: int = -1) -> None:
        if root is self.root:
            self.last, self.others = max(self.last, last), max(self.others, others)
        elif last > self.last:
            self.root, self.last, self.others = root, last, max(self.last, self.others, others)
        else:
            self.others = max(self.others, last, others)

    def last_read_besides(self, root: torch.fx.Node) -> int:
        return self.others if root is self.root else self.last


class _Memory:
    """Union-find over values that may share memory, with the value that each root holds now."""

    def __init__(self, last_use: Mapping[torch.fx.Node, int]) -> None:
        self.last_use = last_use
        self.parent: dict[torch.fx.Node, torch.fx.Node] = {}
        self.groups: dict[torch.fx.Node, _Group] = {}
        self.roots: dict[torch.fx.Node, torch.fx.Node] = {}
        self.current: dict[torch.fx.Node, torch.fx.Node] = {}

    def root(self, node: torch.fx.Node) -> torch.fx.Node:
        return self.roots.get(node, node)

    def find(self, node: torch.fx.Node) -> torch.fx.Node:
        parent = self.parent
        if node not in parent:
            parent[node] = node
            self.groups[node] = _Group(self.root(node), self.last_use.get(node, -1))
        while parent[node] is not node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    def group(self, node: torch.fx.Node) -> _Group:
        return self.groups[self.find(node)]

    def join(self, a: torch.fx.Node, b: torch.fx.Node) -> None:
        a, b = self.find(a), self.find(b)
        if a is not b:
            other = self.groups.pop(b)
            group = self.groups[a]
            group.add(other.root, other.last, other.others)
            group.outside |= other.outside
            self.parent[b] = a

    def same(self, alias: torch.fx.Node, node: torch.fx.Node) -> None:
        """Makes ``alias`` another name of the whole of ``node``."""
        self.roots[alias] = self.root(node)
        self.join(node, alias)


class _Rewriter:
    """Copies a graph, in-place operators replaced by functional ones and later reads bound to their results."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        self.graph = graph
        last_use: dict[torch.fx.Node, int] = {}
        for index, node in enumerate(graph.nodes):
            for argument in node.all_input_nodes:
                last_use[argument] = index
        self.memory = _Memory(last_use)
        self.copy = torch.fx.Graph(owning_module=graph.owning_module)
        self.env: dict[torch.fx.Node, torch.fx.Node] = {}
        self.written: dict[torch.fx.Node, torch.fx.Node] = {}

    def run(self) -> bool:
        """Copies every node; ``False`` as soon as aliasing forbids it."""
        for index, node in enumerate(self.graph.nodes):
            if node.op != "call_function":
                self.env[node] = self.copy.node_copy(node, self.read)
                continue
            kind = _kind(node.target)
            source = node.args[0] if node.args else None
            if isinstance(source, torch.fx.Node) and (node.target in _IDENTITIES or _is_idle_dropout(node)):
                self.memory.same(node, source)
                self.env[node] = self.read(source)
            elif kind.written:
                if not self.write(node, kind, index):
                    return False
            elif not (is_effect_free_noop(node.target) and not node.users):
                self.env[node] = self.copy.node_copy(node, self.read)
                self.share(node, kind)
        self.copy._codegen = self.graph._codegen
        return True

    def read(self, node: torch.fx.Node) -> torch.fx.Node:
        current = self.memory.current.get(self.memory.root(node))
        return current if current is not None else self.env[node]

    def share(self, node: torch.fx.Node, kind: _Kind) -> None:
        """Puts the result of a node together with the memory that it may be a view of."""
        if kind.aliased == ():
            return
        if kind.aliased is None:
            if node.target is operator.getitem and _makes_new_memory(node.args[0]):
                return
            arguments = node.all_input_nodes
        else:
            arguments = []
            torch.fx.map_arg([_argument(node, *a) for a in kind.aliased], arguments.append)
        for argument in arguments:
            if _holds_tensors(argument) and not _converts(node, argument):
                self.memory.join(argument, node)

    def write(self, node: torch.fx.Node, kind: _Kind, index: int) -> bool:
        target = _argument(node, *kind.written[0])
        if kind.functional is None or not isinstance(target, torch.fx.Node):
            return False
        root, group = self.memory.root(target), self.memory.group(target)
        # Another name of the memory, read later or seen by the caller, would miss what is written here.
        if group.last_read_besides(root) > index or group.outside - {root}:
            return False
        value = self.functional_node(node, kind, target)
        if value is None:
            return False
        self.memory.current[root] = self.env[node] = value
        self.memory.same(node, target)
        if root.op == "placeholder":
            self.written[root] = value
        return root.op != "get_attr"

    def functional_node(self, node: torch.fx.Node, kind: _Kind, target: torch.fx.Node) -> torch.fx.Node | None:
        args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), self.read)
        parameters = node.target._schema.arguments
        if kind.out:
            kwargs.pop(parameters[-1].name, None)
            if not _same_shape(node, target):
                return None
        # The functional form may call an argument otherwise ("input" for "self").
        names = dict(zip((a.name for a in parameters), (a.name for a in kind.functional._schema.arguments), strict=False))
        kwargs = {names.get(name, name): value for name, value in kwargs.items()}
        value = self.copy.call_function(kind.functional, args, kwargs)
        value.meta = dict(node.meta)
        after = target.meta.get("val")
        if not isinstance(after, torch.Tensor):
            return None
        value.meta["val"] = after
        dtype = _result_dtype(kind.functional, args, kwargs)
        if dtype is None:
            return None
        if dtype != after.dtype:
            # The functional form promotes or compares; the in-place one writes back in the dtype of what it writes to.
            value.meta["val"] = torch.empty_like(after, dtype=dtype)
            value = self.copy.call_function(_aten._to_copy.default, (value,), {"dtype": after.dtype})
            value.meta = {**node.meta, "val": after}
        return value


def _holds_tensors(node: torch.fx.Node) -> bool:
    return not isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool | int | float)


def _makes_new_memory(node: Any) -> bool:
    """Whether the results of a node with several are new, so that taking one of them is no view."""
    return isinstance(node, torch.fx.Node) and node.op == "call_function" and _kind(node.target).aliased == ()


def _converts(node: torch.fx.Node, argument: torch.fx.Node) -> bool:
    """Whether ``to`` really converts: then its result is new."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target._schema.name not in ("aten::to", "aten::type_as"):
        return False
    before, after = argument.meta.get("val"), node.meta.get("val")
    return isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor) and before.dtype != after.dtype


def _same_shape(a: torch.fx.Node, b: torch.fx.Node) -> bool:
    x, y = a.meta.get("val"), b.meta.get("val")
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
        return False
    return [str(s) for s in x.shape] == [str(s) for s in y.shape]


_RESULT_DTYPES: dict[Any, torch.dtype | None] = {}


def _result_dtype(target: Any, args: Any, kwargs: Any) -> torch.dtype | None:
    """Dtype that a functional operator returns for these FX arguments; ``None`` where it can't be found out."""
    values = torch.fx.map_arg((args, kwargs), lambda n: n.meta.get("val"))
    found = [v for v in torch.utils._pytree.tree_leaves(values) if v is not None]
    key = (target, *((v.dtype, v.dim()) if isinstance(v, torch.Tensor) else type(v) for v in found))
    if key not in _RESULT_DTYPES:
        # Sizes don't matter for the dtype: tensors of size 1 without data leave torch's shape environment alone.
        small = torch.utils._pytree.tree_map_only(
            torch.Tensor, lambda t: torch.empty((1,) * t.dim(), dtype=t.dtype, device="meta"), values
        )
        _RESULT_DTYPES[key] = _dtype_of(target, *small) or _dtype_of(target, *values)
    return _RESULT_DTYPES[key]


def _dtype_of(target: Any, args: Any, kwargs: Any) -> torch.dtype | None:
    try:
        with torch.no_grad():
            result = target(*args, **kwargs)
    except Exception:
        return None
    return result.dtype if isinstance(result, torch.Tensor) else None


Functional = tuple[torch.fx.Graph, dict[torch.fx.Node, torch.fx.Node], dict[torch.fx.Node, torch.fx.Node]]


def make_functional(graph: torch.fx.Graph) -> Functional | None:
    """Copies a graph with its in-place operators made functional, in one linear pass.

    Returns:
        The copy, old nodes to new ones, and the placeholders that were written with the value they end with; ``None``
        where another value that may share the written memory is read later, or an operator has no functional form.
    """
    rewriter = _Rewriter(graph)
    return (rewriter.copy, rewriter.env, rewriter.written) if rewriter.run() else None
