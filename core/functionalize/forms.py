"""Functional forms of operators that write their arguments: they compute the new values without writing."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from onnxplug.capture.composites import composite_kernel
from onnxplug.capture.shape_env import layout_not_noted, restore, state_of, undone
from onnxplug.errors import CaptureError
from onnxplug.functionalize.effects import argument_of, effects_of, hides_writes, targets_of, writes, written_arguments
from onnxplug.torch_private import FakeTensor, FakeTensorMode, pytree

aten = torch.ops.aten

FILLED = torch.contiguous_format

Read = Callable[[torch.fx.Node], torch.fx.Node]
Functionalize = Callable[[torch.fx.Graph], Any]
"""Makes a graph functional: :func:`onnxplug.functionalize.inplace.make_functional`."""


class Form(NamedTuple):
    """The functional form of a call that writes its arguments.

    Attributes:
        values: The new value of each tensor that it writes, in the order of
            :func:`~onnxplug.functionalize.effects.written_arguments`.
        result: The call's own results; ``None`` where they are the tensors that it writes, or where it has none.
    """

    values: list[torch.fx.Node]
    result: torch.fx.Node | None = None


def functional_form(copy: torch.fx.Graph, node: torch.fx.Node, read: Read, functionalize: Functionalize) -> Form | None:
    """Appends the functional form of a call that writes its arguments; ``None`` where it has none.

    Args:
        copy: The graph to append to.
        node: The call, in the old graph.
        read: A node of the old graph to its node in the new graph.
        functionalize: Makes the trace of a composite operator functional.
    """
    if node.target is aten.batch_norm.default or node.target is aten.native_batch_norm.default:
        return _batch_norm(copy, node, read)
    target: Any = node.target
    if target.namespace != "aten":
        return _wrapped(copy, node, read)
    if is_expanded(node):
        kernel = item_by_item(target) if is_of_lists(target) else composite_kernel(target)
        return (
            _traced(copy, node, read, functionalize, kernel) if target._can_decompose() or is_of_lists(target) else None
        )
    effects = effects_of(target)
    if effects.appends:
        return _appended(copy, node, read)
    written = written_arguments(node)
    out = all(argument.kwarg_only for argument in _written_formals(node.target))
    if len(written) == 1 and not out:
        return Form([functional_call(copy, node, read)])
    return _replaced(copy, node, read, written, out)


def is_expanded(node: torch.fx.Node) -> bool:
    """Whether a call that writes is replaced by several operators, each of which sees the writes of the operators before it."""
    target: Any = node.target
    return target.namespace == "aten" and (
        effects_of(target).functional is None or hides_writes(node) or is_of_lists(target)
    )


def is_of_lists(target: Any) -> bool:
    """Whether an operator does the same to each tensor of a list."""
    return bool(target._schema.name.startswith("aten::_foreach_"))


def _vector_norm(x: torch.Tensor, ord: Any = 2, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.linalg.vector_norm(x, ord, dtype=dtype)


#: What an operator of lists does to each tensor, where a tensor has no method of its name with the same arguments.
_ITEMS: dict[str, Callable[..., Any]] = {"norm": _vector_norm, "zero": torch.zeros_like}
#: The methods that take a number where these take a tensor.
_OF_NUMBERS = {"maximum": "clamp_min", "maximum_": "clamp_min_", "minimum": "clamp_max", "minimum_": "clamp_max_"}


def item_by_item(target: Any) -> Callable[..., list[Any]]:
    """A function that computes ``_foreach_add`` or ``_foreach_add_`` and its like by the methods of tensors."""
    name = target._schema.name.removeprefix("aten::_foreach_")
    if any(a.name in ("scalar", "scalars") for a in target._schema.arguments):
        name = _OF_NUMBERS.get(name, name)

    def call(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if name in _ITEMS:
            return _ITEMS[name](tensor, *args, **kwargs)
        if isinstance(tensor, torch.Tensor):
            return getattr(tensor, name)(*args, **kwargs)
        return getattr(torch, name)(tensor, *args, **kwargs)  # a number to the power of each tensor

    def kernel(*args: Any, **kwargs: Any) -> list[Any]:
        count = next(len(a) for a in args if isinstance(a, list | tuple))
        results = []
        for i in range(count):
            items = [a[i] if isinstance(a, list | tuple) else a for a in args]
            named = {key: a[i] if isinstance(a, list | tuple) else a for key, a in kwargs.items()}
            if name.rstrip("_") in ("addcmul", "addcdiv") and len(items) > 3:
                named["value"] = items.pop()
            results.append(call(*items, **named))
        return results

    return kernel


def _written_formals(target: Any) -> list[Any]:
    """The arguments of a schema that are written."""
    return [a for a in target._schema.arguments if a.alias_info is not None and a.alias_info.is_write]


def functional_call(copy: torch.fx.Graph, node: torch.fx.Node, read: Read) -> torch.fx.Node:
    """Appends the functional form of an in-place operator that writes one tensor, with a cast where the functional form promotes.

    Args:
        copy: The graph to append to.
        node: The in-place operator, in the old graph.
        read: A node of the old graph to its node in the new graph.
    """
    functional = effects_of(node.target).functional
    assert functional is not None
    args = torch.fx.map_arg(node.args, read)
    kwargs = {**_own_defaults(node, functional), **torch.fx.map_arg(node.kwargs, read)}
    value = copy.call_function(functional, args, kwargs)
    value.meta = dict(node.meta)
    before = written_arguments(node)
    wanted = before[0].meta.get("val") if before else None
    promoted = _promoted_dtype(functional, args, kwargs)
    if isinstance(wanted, torch.Tensor) and promoted is not None and promoted != wanted.dtype:
        # The functional form promotes; the in-place operator writes back in the dtype of the written tensor.
        value.meta["val"] = _of_dtype(wanted, promoted)
        value = _cast(copy, value, wanted.dtype, node.meta["val"])
    return value


def _own_defaults(node: torch.fx.Node, functional: Any) -> dict[str, Any]:
    """Arguments with a default in the in-place form and without one in the functional form, such as ``p`` of bernoulli_."""
    required = {a.name for a in functional._schema.arguments if not a.has_default_value()}
    left = node.target._schema.arguments[len(node.args) :]  # type: ignore[union-attr]
    return {a.name: a.default_value for a in left if a.has_default_value() and a.name in required}


def _cast(copy: torch.fx.Graph, value: torch.fx.Node, dtype: torch.dtype, val: Any) -> torch.fx.Node:
    meta = value.meta
    value = copy.call_function(aten._to_copy.default, (value,), {"dtype": dtype})
    value.meta = {**meta, "val": val}
    return value


#: Operators whose functional form may return another dtype than that of all its arguments.
_OWN_DTYPES = frozenset(
    "eq ne lt le gt ge not_equal less less_equal greater greater_equal logical_and logical_or logical_xor logical_not "
    "cumsum cumprod".split()
)


def _promoted_dtype(target: Any, args: Any, kwargs: Any) -> torch.dtype | None:
    """The dtype of a functional call's result; ``None`` where it is that of its arguments."""
    nodes = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, torch.fx.Node)]
    tensors = [a.meta["val"] for a in nodes if isinstance(a.meta.get("val"), torch.Tensor)]
    if len({t.dtype for t in tensors}) < 2 and target._schema.name.partition("::")[2] not in _OWN_DTYPES:
        return None
    dtype = _dtypes(target, args, kwargs)
    return dtype if isinstance(dtype, torch.dtype) else None


def _of_dtype(val: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A fake tensor of the same shape."""
    return val if val.dtype == dtype else val.new_empty(val.shape, dtype=dtype)


def _dtypes(target: Any, args: Any, kwargs: Any) -> torch.dtype | list[torch.dtype]:
    """The dtype of a call's result, or of each of its results, as torch computes it for the example's sizes.

    The program has the call already, and capture its sizes: what torch asks about dynamic sizes meanwhile is no guard of it.

    Args:
        args, kwargs: Its arguments, nodes among them.

    Raises:
        CaptureError: torch rejects the call.
    """
    nodes = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, torch.fx.Node)]
    modes = [a.meta["val"].fake_mode for a in nodes if isinstance(a.meta.get("val"), FakeTensor)]
    try:
        results = _called(target, args, kwargs, lambda n: _of_example(n.meta["val"]))
    except Exception:  # sizes that the example does not tell, or an operator without a kernel for the device meta
        env = getattr(modes[0], "shape_env", None) if modes else None
        try:
            with modes[0] if modes else contextlib.nullcontext(), undone(env):
                results = _called(target, args, kwargs, lambda n: n.meta["val"])
        except Exception as error:
            raise CaptureError(f"{target} can't be made functional: {error}") from error
    return [result.dtype for result in results] if isinstance(results, list | tuple) else results.dtype


def _called(target: Any, args: Any, kwargs: Any, value_of: Callable[[torch.fx.Node], Any]) -> Any:
    given_args, given = torch.fx.map_arg((args, kwargs), value_of)
    with torch.no_grad():
        return target(*given_args, **given)


def _of_example(value: Any) -> Any:
    """A tensor on the device meta, or a number, of the example's sizes."""
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        if value.node.hint is None:
            raise ValueError(f"the example does not tell {value}")
        return value.node.hint
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty([_of_example(size) for size in value.shape], dtype=value.dtype, device="meta")


def _item(copy: torch.fx.Graph, value: torch.fx.Node, index: int) -> torch.fx.Node:
    """One result of a call that has several."""
    item = copy.call_function(operator.getitem, (value, index))
    item.meta = {**value.meta, "val": value.meta["val"][index]}
    return item


#: Operators that convert their operand to the dtype of ``out`` first, where ``dtype`` is not given; others convert their result.
_COMPUTED_IN_DTYPE_OF_OUT = frozenset(f"aten::{name}" for name in "sum nansum prod cumsum cumprod mean".split())


def _replaced(
    copy: torch.fx.Graph, node: torch.fx.Node, read: Read, written: Sequence[torch.fx.Node], out: bool
) -> Form | None:
    """For overloads with ``out=``, and for several tensors: the functional overload returns the new values."""
    functional = effects_of(node.target).functional
    names = {name for _, name in effects_of(node.target).written} if out else set()
    positional = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    args = torch.fx.map_arg(tuple(a for a, name in zip(node.args, positional, strict=False) if name not in names), read)
    kwargs = torch.fx.map_arg({name: a for name, a in node.kwargs.items() if name not in names}, read)
    returned = node.meta["val"]
    if out and node.target._schema.name in _COMPUTED_IN_DTYPE_OF_OUT and kwargs.get("dtype") is None:  # type: ignore[union-attr]
        kwargs = {**kwargs, "dtype": returned.dtype}
    found = _dtypes(functional, args, kwargs)
    several, dtypes = (True, found) if isinstance(found, list) else (False, [found])
    if len(dtypes) != len(written) or (out and returned is None):
        return None
    if out:
        # Sizes that depend on data keep their names in the program.
        wanted = returned if isinstance(returned, list | tuple) else [returned]
    else:
        wanted = [tensor.meta["val"] for tensor in written]
    vals = [_of_dtype(val, dtype) for val, dtype in zip(wanted, dtypes, strict=True)]
    call = copy.call_function(functional, args, kwargs)  # type: ignore[arg-type]
    call.meta = {**node.meta, "val": tuple(vals) if several else vals[0]}
    values = [_item(copy, call, i) for i in range(len(written))] if several else [call]
    for i, (value, val) in enumerate(zip(values, wanted, strict=True)):
        if value.meta["val"].dtype != val.dtype:
            values[i] = _cast(copy, value, val.dtype, val)
    return Form(values)


def _appended(copy: torch.fx.Graph, node: torch.fx.Node, read: Read) -> Form:
    """For operators whose functional overload returns their own results, then the new values."""
    written = written_arguments(node)
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), read)
    returned = node.meta["val"]
    own = list(returned) if isinstance(returned, list | tuple) else [returned]
    return _call_appending(copy, node, effects_of(node.target).functional, args, kwargs, own, written)


def _call_appending(
    copy: torch.fx.Graph,
    node: torch.fx.Node,
    target: Any,
    args: Any,
    kwargs: Any,
    own: Sequence[Any],
    written: Sequence[torch.fx.Node],
) -> Form:
    """Appends a call that returns a node's own results and then the new values; ``own`` are fake."""
    call = copy.call_function(target, args, kwargs)
    call.meta = {**node.meta, "val": (*own, *(tensor.meta["val"] for tensor in written))}
    values = [_item(copy, call, len(own) + i) for i in range(len(written))]
    return Form(values, call if isinstance(node.meta["val"], list | tuple) else _item(copy, call, 0))


def _batch_norm(copy: torch.fx.Graph, node: torch.fx.Node, read: Read) -> Form:
    """In training it returns the new running statistics too."""
    x, weight, bias, mean, variance, _, momentum, eps = (
        argument_of(node, i, name)
        for i, name in enumerate(
            ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")
        )
    )
    args = torch.fx.map_arg((x, weight, bias, mean, variance, True, momentum, eps), read)
    # The batch's mean and reciprocal deviation have the running statistics' shape.
    returned = node.meta["val"]
    own = list(returned) if isinstance(returned, list | tuple) else [returned, mean.meta["val"], variance.meta["val"]]
    return _call_appending(
        copy, node, aten._native_batch_norm_legit_functional.default, args, {}, own, [mean, variance]
    )


def _wrapped(copy: torch.fx.Graph, node: torch.fx.Node, read: Read) -> Form | None:
    """For operators of libraries: torch's wrapper, which returns their results, then the new value of each written tensor."""
    target: Any = node.target
    if target._can_decompose() or any(r.alias_info is not None for r in target._schema.returns):
        return None
    written = written_arguments(node)
    if len(set(written)) < len(written):
        return None
    keywords: dict[str, Any] = {}
    names = {name for _, name in effects_of(target).written}
    count = 0
    for position, formal in enumerate(target._schema.arguments):
        is_passed = position < len(node.args) or formal.name in node.kwargs
        value = argument_of(node, position, formal.name)
        if formal.name not in names:
            if is_passed:
                keywords[formal.name] = torch.fx.map_arg(value, read)
            elif formal.has_default_value():
                keywords[formal.name] = formal.default_value
        elif isinstance(value, list | tuple):
            keywords[f"_{formal.name}_length"] = len(value)
            for i, item in enumerate(value):
                keywords[f"_{formal.name}_{i}_base_index"] = count if item is not None else None
                count += item is not None
        elif value is None and "[]" in str(formal.type):
            keywords[f"_{formal.name}_length"] = None
        else:
            keywords[f"_{formal.name}_base_index"] = count if value is not None else None
            count += value is not None
    keywords["_all_bases"] = [read(tensor) for tensor in written]
    returned = node.meta.get("val")
    own = list(returned) if isinstance(returned, list | tuple) else [returned]
    wrapper = torch.ops.higher_order.auto_functionalized_v2
    call = copy.call_function(wrapper, (target,), keywords)
    call.meta = {**node.meta, "val": (*own, *(tensor.meta["val"] for tensor in written))}
    values = [_item(copy, call, len(own) + i) for i in range(len(written))]
    count = len(target._schema.returns)
    return Form(values, call if count != 1 else _item(copy, call, 0))


def _lies_alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two fake tensors of the same shape have the same strides, and begin at the same place of their memory."""
    layouts = ([str(n) for n in (*t.stride(), t.storage_offset())] for t in (a, b))
    return next(layouts) == next(layouts)


def _traced(
    copy: torch.fx.Graph, node: torch.fx.Node, read: Read, functionalize: Functionalize, kernel: Callable[..., Any]
) -> Form | None:
    """For composite operators: the operators of their kernel, made functional."""
    from torch.fx.experimental.proxy_tensor import make_fx

    flat, spec = pytree.tree_flatten((list(node.args), dict(node.kwargs)))
    nodes = list(dict.fromkeys(item for item in flat if isinstance(item, torch.fx.Node)))
    vals = [item.meta["val"] for item in nodes]
    mode = next((v.fake_mode for v in vals if isinstance(v, FakeTensor)), None) or FakeTensorMode()
    target: Any = node.target

    def call(*values: Any) -> Any:
        known = dict(zip(nodes, values, strict=True))
        args, kwargs = pytree.tree_unflatten(
            [known[item] if isinstance(item, torch.fx.Node) else item for item in flat], spec
        )
        result = kernel(*args, **kwargs)
        return tuple(result) if isinstance(result, list | tuple) else (result,)

    env = getattr(mode, "shape_env", None)
    saved = state_of(env) if env is not None else {"guards": []}
    try:
        with mode, torch.no_grad(), layout_not_noted(env) if env is not None else contextlib.nullcontext():
            # Operators such as as_strided see the memory, which the new graph's values don't share: each gets its own.
            inputs = [torch.empty_like(v, memory_format=FILLED) if isinstance(v, torch.Tensor) else v for v in vals]
            module = make_fx(call, tracing_mode="real", _allow_non_fake_inputs=True)(*inputs)
    except Exception:
        module = None
    is_for_some_sizes = env is not None and len(env.guards) > len(saved["guards"])
    if module is None or is_for_some_sizes or target in targets_of(module.graph):
        if env is not None:
            restore(env, saved)
        return None
    functional = functionalize(module.graph) if writes(module.graph) else None
    written = written_arguments(node)
    if functional is None or functional.conditions:
        return None
    placeholders = [n for n in functional.graph.nodes if n.op == "placeholder"]
    copies: dict[torch.fx.Node, Any] = {}
    for placeholder, outer, val in zip(placeholders, nodes, inputs, strict=True):
        copies[placeholder] = read(outer)
        if isinstance(val, torch.Tensor) and not _lies_alike(val, outer.meta["val"]):
            copies[placeholder] = copy.call_function(aten.clone.default, (read(outer),), {"memory_format": FILLED})
            copies[placeholder].meta = {**node.meta, "val": val}
    mutated = {
        outer: functional.mutated.get(n)
        for n, outer in zip((n for n in module.graph.nodes if n.op == "placeholder"), nodes, strict=True)
    }
    if any(new is not None for outer, new in mutated.items() if outer not in written):
        return None
    results = functional.graph.output_node().args[0]
    for inner in functional.graph.nodes:
        if inner.op == "get_attr":
            return None
        if inner.op == "call_function":
            copies[inner] = copy.node_copy(inner, copies.__getitem__)
            copies[inner].meta = {**node.meta, "val": inner.meta.get("val")}
    values = [copies[mutated[t]] if mutated[t] is not None else read(t) for t in written]
    if effects_of(target).aliases or not target._schema.returns:
        return Form(values)
    return Form(values, copies[results[0]]) if len(results) == 1 and isinstance(results[0], torch.fx.Node) else None
