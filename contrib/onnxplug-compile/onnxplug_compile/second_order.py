"""Second derivatives through a compiled graph, by eager PyTorch: AOTAutograd's backward graph has no backward graph.

A gradient penalty, a force that is trained on or a step of meta-learning differentiates a gradient. The gradient itself
is the backward graph's; its derivative is taken through the graph that Dynamo captured, run again by eager PyTorch on
the same inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from onnxplug.errors import OnnxplugError
from onnxplug.torch_private import HigherOrderOperator, keeps_graph

#: An autograd function may be called where Dynamo looks for code to compile.
_untraced = torch.compiler.disable


class SecondDerivativeError(OnnxplugError):
    """A gradient of a compiled graph is differentiated, and neither the graph nor eager PyTorch can do that."""


class SecondOrder:
    """Calls a graph that AOTAutograd compiled, and makes its gradients differentiable.

    Args:
        warn: Is called with a message when eager PyTorch runs the graph for the first time; ``None`` raises instead.
    """

    def __init__(
        self,
        compiled: Callable[..., Any],
        module: torch.fx.GraphModule,
        joint: torch.fx.GraphModule,
        warn: Callable[[str], None] | None,
    ) -> None:
        self._compiled = compiled
        self._module = module
        self._warn = warn
        self._reason = None if warn is not None else "options={'fallback': False} keeps eager PyTorch from it"
        self._reason = self._reason or _no_repetition(module, joint)
        self._is_known = False

    def __call__(self, *args: Any) -> Any:
        results = self._compiled(*args)
        if not self._is_known:  # AOTAutograd's autograd function is reached only from a result
            self._is_known = self._extend(results, args)
        return results

    def _extend(self, results: Any, args: Sequence[Any]) -> bool:
        node = next((n for r in results if isinstance(r, torch.Tensor) and (n := _compiled_node(r.grad_fn))), None)
        if node is None:
            return False
        function = type(node)._forward_cls
        self._reason = self._reason or _not_plain(function)
        forward, backward = function.forward, function.backward

        @_untraced
        def recording(ctx: Any, *inputs: Any) -> Any:
            ctx.onnxplug_inputs = _Inputs(inputs)
            return forward(ctx, *inputs)

        @_untraced
        def differentiable(ctx: Any, *arguments: Any) -> Any:
            if not torch.is_grad_enabled():
                if not keeps_graph():
                    ctx.onnxplug_inputs = None  # a loss that is kept does not keep the inputs
                return backward(ctx, *arguments)
            boxed = len(arguments) == 1 and isinstance(arguments[0], list)
            tangents = list(arguments[0] if boxed else arguments)
            kept = getattr(ctx, "onnxplug_inputs", None)

            def first() -> Any:
                return backward(ctx, list(tangents)) if boxed else backward(ctx, *tangents)

            # Without inputs a second derivative must still be an error, not a missing gradient.
            inputs = [torch.empty(0, requires_grad=True), *ctx.saved_tensors] if kept is None else kept.values
            return _Gradient.apply(self, kept, first, *inputs, *tangents)

        function.backward = staticmethod(differentiable)
        if self._reason is None:
            function.forward = staticmethod(recording)
            node.onnxplug_inputs = _Inputs(args)
        return True

    def refuse(self, kept: _Inputs | None, gradients: Sequence[Any]) -> None:
        """Checks that eager PyTorch can compute the gradients of the call.

        Raises:
            SecondDerivativeError: It can't; the message says why.
        """
        reason = self._reason
        if reason is None and (kept is None or len(kept.values) != len(gradients)):
            reason = "its inputs are not known any more"
        if reason is None and kept is not None and kept.versions != _versions(kept.values):
            reason = "one of its inputs was written to since the call"
        if reason is not None:
            raise SecondDerivativeError(
                f"a gradient of a graph compiled by onnxplug is differentiated, and {reason}",
                hint="With torch._dynamo.config.trace_autograd_ops = True a call of torch.autograd.grad within the compiled "
                "function is a part of the graph; torch.func.grad always is. Or keep what is differentiated twice out of "
                "the graph by torch.compiler.disable.",
            )
        if self._warn is not None:
            self._warn("the derivative of a graph's gradient is computed by eager PyTorch")
            self._warn = _quiet

    def gradients(self, inputs: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        """The gradients by eager PyTorch, to be differentiated; ``None`` for inputs without a gradient.

        Args:
            inputs: The graph's inputs; no input that requires a gradient is computed from another.
            tangents: The gradients of the graph's results.
        """
        return _gradients(self._module(*inputs), tangents, inputs, create_graph=True)


def _gradients(
    results: Sequence[Any], tangents: Sequence[Any], inputs: Sequence[Any], *, create_graph: bool
) -> list[Any]:
    """The gradients by the inputs; ``None`` for inputs that need no gradient.

    Args:
        results: Values computed from the inputs; numbers, and tensors that need no gradient, are left out.
        tangents: The gradients of the results; ``None`` for a result that is not read.
    """
    pairs = [
        (result, tangent)
        for result, tangent in zip(results, tangents, strict=True)
        if tangent is not None and isinstance(result, torch.Tensor) and result.requires_grad
    ]
    differentiated = [i for i, value in enumerate(inputs) if _is_wanted(value)]
    gradients = torch.autograd.grad(
        [result for result, _ in pairs],
        [inputs[i] for i in differentiated],
        [tangent for _, tangent in pairs],
        create_graph=create_graph,
        allow_unused=True,
    )
    by_place = dict(zip(differentiated, gradients, strict=True))
    return [by_place.get(i) for i in range(len(inputs))]


class _Inputs:
    """The inputs of a call, and how often each had been written to."""

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = values
        self.versions = _versions(values)


class _Gradient(torch.autograd.Function):
    """The gradients of a call: values by the backward graph, derivatives by eager PyTorch."""

    @staticmethod
    @_untraced
    def forward(ctx: Any, owner: SecondOrder, kept: _Inputs | None, first: Callable[[], Any], *values: Any) -> Any:
        ctx.set_materialize_grads(False)
        results = tuple(first())
        ctx.owner, ctx.kept, ctx.count = owner, kept, len(results)
        ctx.others = [None if isinstance(value, torch.Tensor) else value for value in values]
        ctx.save_for_backward(*[value if isinstance(value, torch.Tensor) else None for value in values])
        return results

    @staticmethod
    @_untraced
    def backward(ctx: Any, *seconds: Any) -> Any:
        ctx.owner.refuse(ctx.kept, seconds)
        goes_on = torch.is_grad_enabled()
        with torch.enable_grad():
            # Views, as an input may be computed from another, and these are partial derivatives.
            inputs = [
                other if saved is None else saved.view_as(saved) if _is_wanted(saved) else saved
                for saved, other in zip(ctx.saved_tensors, ctx.others, strict=True)
            ]
            gradients = ctx.owner.gradients(inputs[: ctx.count], inputs[ctx.count :])
            results = _gradients(gradients, seconds, inputs, create_graph=goes_on)
        return (None, None, None, *results)


def _compiled_node(node: Any) -> Any:
    """AOTAutograd's node behind a result, which may be a view of the node's output; ``None`` if there is none."""
    for _ in range(4):
        if node is None or hasattr(getattr(type(node), "_forward_cls", None), "compiled_bw"):
            return node
        node = node.next_functions[0][0] if node.next_functions else None
    return None


def _no_repetition(module: torch.fx.GraphModule, joint: torch.fx.GraphModule) -> str | None:
    """Why eager PyTorch, run again, may compute other results than the graph; ``None`` if it may not."""
    if any(torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) for node in joint.graph.nodes):
        return "it has random operators"
    if any(isinstance(node.target, HigherOrderOperator) for node in module.graph.nodes):
        return "it has operators with graphs of their own"
    if torch.is_autocast_enabled("cpu") or (torch.cuda.is_available() and torch.is_autocast_enabled("cuda")):
        return "it was called under torch.autocast"
    return None


def _not_plain(function: Any) -> str | None:
    """Why AOTAutograd's function has other inputs or outputs than Dynamo's graph; ``None`` if it has the same."""
    metadata = getattr(function, "metadata", None)
    if getattr(function, "maybe_subclass_metadata", True) is not None:
        return "it has tensor subclasses"
    try:
        if any(info.mutates_data or info.mutates_metadata for info in metadata.input_info):  # type: ignore[union-attr]
            return "it writes to its inputs or buffers"
        if metadata.num_outputs_aliased or metadata.num_intermediate_bases or metadata.tokens:  # type: ignore[union-attr]
            return "some of its outputs share memory"
    except AttributeError:
        return f"torch {torch.__version__} says too little about it"
    return None


def _versions(values: Sequence[Any]) -> list[int]:
    return [v._version for v in values if isinstance(v, torch.Tensor) and not v.is_inference()]


def _is_wanted(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _quiet(_: str) -> None:
    pass
