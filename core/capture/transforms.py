"""Transforms of functions within a model: ``torch.func``, ``torch.vmap`` and ``torch.autograd.grad``.

torch.export records the operators of a model before autograd and functorch see them, so that a gradient is out of its reach,
and ``torch.vmap`` is only a pair of calls that open and close it (:mod:`onnxplug.interpret.last_resort` dissolves them). A
model with other transforms is captured in two steps: the operators of its ``forward`` below autograd and functorch are traced
first, and torch.export records these.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd import forward_ad

from onnxplug.capture.mentions import Mentions
from onnxplug.capture.patching import patched
from onnxplug.errors import CaptureError
from onnxplug.fake import is_fake
from onnxplug.torch_private import (
    DispatchKey,
    OpOverload,
    detect_fake_mode,
    disable_current_modes,
    disable_torch_function,
    is_transformed,
    pytree,
    torch_c,
    transforms_depth,
    undo_transforms,
)

#: Names by which a model's code calls a transform.
_NAMES = frozenset(
    "vmap grad grad_and_value vjp jvp jacrev jacfwd jacobian hessian linearize functionalize forward_ad backward".split()
)


def names_transforms(mentions: Mentions) -> bool:
    """Whether a model's code names a transform."""
    return mentions(_NAMES.__contains__)


@contextlib.contextmanager
def transforms_closed() -> Iterator[None]:
    """Closes the transforms that a failed trace has left open: they would apply to later code of the process."""
    depth = transforms_depth()
    try:
        yield
    except BaseException:
        # Where the model's code opens a level of forward-mode derivatives, torch closes it; where a graph opens it, nobody does.
        if vars(forward_ad).get("_current_level", -1) < 0:
            with contextlib.suppress(RuntimeError):  # none is open
                torch_c._exit_dual_level(level=0)
        raise
    finally:
        if transforms_depth() > depth:
            undo_transforms(depth)


def is_lost(tensor: Any) -> bool:
    """Whether a constant of an exported program is only a tensor of the trace, without values."""
    return is_fake(tensor) or (isinstance(tensor, torch.Tensor) and is_transformed(tensor))


def check_constants(program: torch.export.ExportedProgram) -> None:
    """Checks that no constant that a result needs is only a tensor of the trace, as traces within transforms leave them.

    Raises:
        CaptureError: There is such a constant.
    """
    buffers = program.graph_signature.non_persistent_buffers  # fake constants are weights without numbers
    lost = {name for name, tensor in program.constants.items() if name not in buffers and is_lost(tensor)}
    if not lost:
        return
    inputs = zip(program.graph.nodes, program.graph_signature.input_specs, strict=False)
    pending = [node for node, spec in inputs if spec.target in lost]
    reached = set(pending)
    while pending:
        for user in pending.pop().users:
            if user.op == "output":
                raise CaptureError(
                    "torch.export can't capture the model: it keeps a tensor that the model's code makes within a transform of "
                    "torch.func as a constant, without its values",
                    hint="Make the tensor outside of the function that is transformed.",
                )
            if user not in reached:
                reached.add(user)
                pending.append(user)


def check_tangents(program: torch.export.ExportedProgram) -> None:
    """Checks that no tangent of a forward-mode derivative goes through a composite operator.

    torch decomposes a program with composite operators kept whole, and these have no derivative of their own.

    Raises:
        CaptureError: A tangent does.
    """
    duals: set[torch.fx.Node] = set()
    for node in program.graph.nodes:
        name = getattr(node.target, "__name__", "").partition(".")[0]
        if name == "_unpack_dual" or (name != "_make_dual" and duals.isdisjoint(node.all_input_nodes)):
            continue
        duals.add(node)
        key = DispatchKey.CompositeImplicitAutograd
        if isinstance(node.target, OpOverload) and node.target.has_kernel_for_dispatch_key(key):
            raise CaptureError(
                f"torch can't decompose the program: a tangent of torch.func.jvp goes through {node.target}, a composite operator",
                hint="Without strict=True the operators below autograd are captured.",
            )


@contextlib.contextmanager
def traced_below(module: torch.nn.Module) -> Iterator[None]:
    """Makes torch.export record the operators of a module's ``forward`` below autograd and functorch.

    Composite operators come out decomposed.
    """
    original = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with patched(module, "forward", original):
            return _run_traced(module, args, kwargs)

    with patched(module, "forward", functools.wraps(original)(forward)):
        yield


def _run_traced(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
    """Calls a module on fake tensors: its graph is traced first, outside of the caller's modes, and then run within them."""
    from torch.fx.experimental.proxy_tensor import make_fx

    state = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    flat, spec = pytree.tree_flatten((state, args, kwargs))
    places = [i for i, item in enumerate(flat) if isinstance(item, torch.Tensor | torch.SymInt | torch.SymFloat)]
    inputs = [flat[i] for i in places]
    structure: Any = None

    def call(*values: Any) -> list[Any]:
        nonlocal structure
        leaves_of_call = list(flat)
        for place, value in zip(places, values, strict=True):
            leaves_of_call[place] = value
        results = torch.func.functional_call(module, *pytree.tree_unflatten(leaves_of_call, spec))
        leaves, structure = pytree.tree_flatten(results)
        return leaves

    mode = detect_fake_mode(inputs)
    with disable_torch_function(), disable_current_modes(), mode if mode is not None else contextlib.nullcontext():
        graph = make_fx(call, tracing_mode="real", _allow_non_fake_inputs=True)(*inputs)
    return pytree.tree_unflatten(graph(*inputs), structure)
