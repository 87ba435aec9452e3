"""Linear layers and embeddings with weights of few bits, which ONNX Runtime reads as they are: ``MatMulNBits``."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from onnxplug import UsageError
from onnxplug_transformers.caches import argument_of
from onnxplug_transformers.four_bit_experts import FourBitExperts, gate_of
from onnxplug_transformers.padding import layers_with_states
from onnxplug_transformers.rounding import in_steps, restored, rounded, stored

DOMAIN = "com.microsoft"
#: Sizes of blocks that the CPU's kernel has.
BLOCK_SIZES = (16, 32, 64, 128, 256)
#: Accuracy levels of products: 1 for float activations, 4 for activations rounded to bytes.
ACCURACY_LEVELS = (1, 4)
#: Stands for the layers whose errors count most.
MIXED = "mixed"
#: Names of projections of queries, keys and values, and of the last layer of an MLP.
_SENSITIVE = re.compile(r"\.(([qkv]|qkv|down)_proj|c_attn|query_key_value|mlp\.c_proj|fc2|dense_4h_to_h|fc_out)$")
#: Rows and tokens of the text that models are compared on.
_ROWS, _TOKENS = 4, 32
#: Projections of queries, keys and values: one product of all three is as good as three, and attention takes its result whole.
PROJECTIONS = ("q_proj", "k_proj", "v_proj")


@torch.library.custom_op("onnxplug_transformers::matmul_nbits", mutates_args=())
def matmul_nbits(
    x: torch.Tensor,
    levels: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    bits: int,
    step: bool,
) -> torch.Tensor:
    """Rows times a matrix of 4 or 8 bits.

    Args:
        x: [..., K] floats.
        levels: [N, blocks, size * bits / 8] bytes; of 4 bits two numbers in each, the first in its low half. The last
            block is filled up.
        scales: [N, blocks] of x's dtype, or stored in float16.
        zeros: [N, (blocks + 1) / 2] bytes, two zero points of 4 bits in each, or [N, blocks] of 8; ``None``: all are in
            the middle.
        bias: [N] of x's dtype.
        step: Whether blocks of ``x`` are rounded to 127 steps of their largest number, as ONNX Runtime does at accuracy level 4.

    Returns:
        [..., N].
    """
    weight = restored(levels, scales.to(x.dtype), bits, zeros)[:, : x.shape[-1]]
    return nn.functional.linear(in_steps(x, levels.shape[2] * 8 // bits) if step else x, weight, bias)


@matmul_nbits.register_fake
def _(x: torch.Tensor, levels: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], levels.shape[0]))


def convert(g: Any, node: Any) -> Any:
    """Emits MatMulNBits with float activations; :func:`set_accuracy_level` sets the level of a finished model.

    The parts of one product share one node, found here: the builder does not share nodes without a schema.
    """
    x, levels, scales, zeros, bias, bits, _ = node.args
    rows, _, size = levels.shape
    for other in x.consumers():
        same = other.op_type == "MatMulNBits" and other.inputs[0] is x and other.inputs[1] is levels
        if same and any(other is node for node in g.scope.innermost.nodes):
            return other.outputs[0]
    return g.domain(DOMAIN).MatMulNBits(
        x,
        levels,
        g.cast(scales, x.dtype),
        zeros,
        None,
        bias,
        K=x.shape[-1],
        N=rows,
        bits=bits,
        block_size=size * 8 // bits,
        accuracy_level=1,
    )


@torch.library.custom_op("onnxplug_transformers::gather_nbits", mutates_args=())
def gather_nbits(
    tokens: torch.Tensor, levels: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, bits: int, half: bool
) -> torch.Tensor:
    """Rows of a matrix of 4 or 8 bits.

    Args:
        levels: [N, blocks, size * bits / 8] bytes.
        scales: [N, blocks].
        zeros: As of :func:`matmul_nbits`.
        bits: Bits of a level, 4 or 8.
        half: Whether the result is of float16, not of float32.

    Returns:
        [..., blocks * size].
    """
    steps = scales[tokens].flatten(0, -2).to(torch.float16 if half else torch.float32)
    middles = None if zeros is None else zeros[tokens].flatten(0, -2)
    return restored(levels[tokens].flatten(0, -3), steps, bits, middles).unflatten(0, tokens.shape)


@gather_nbits.register_fake
def _(tokens: torch.Tensor, levels: torch.Tensor, scales: torch.Tensor, _: Any, bits: int, half: bool) -> torch.Tensor:
    shape = (*tokens.shape, levels.shape[1] * levels.shape[2] * 8 // bits)
    return scales.new_empty(shape, dtype=torch.float16 if half else torch.float32)


def convert_gather(g: Any, node: Any) -> Any:
    """Emits GatherBlockQuantized on the matrix that ``MatMulNBits`` may read too."""
    import onnx_ir as ir

    tokens, levels, scales, zeros, bits, half = node.args
    rows, blocks, size = levels.shape
    scales = g.cast(scales, ir.DataType.FLOAT16 if half else ir.DataType.FLOAT)
    flat = g.op.Reshape(levels, g.const([rows, blocks * size]))
    return g.domain(DOMAIN).GatherBlockQuantized(
        flat, tokens, scales, zeros, bits=bits, block_size=size * 8 // bits, gather_axis=0, quantize_axis=1
    )


class FourBitLinear(nn.Module):
    """A linear layer, or several with the same input, with weights of 16 or 256 levels in blocks of a row.

    Args:
        levels, scales, zeros, bias, bits: As :func:`matmul_nbits` takes them.
        widths: The output width of each layer in it.
        order: The index of each column's input; ``None``: the columns are in the order of the inputs.
    """

    #: Whether the activations are rounded too.
    step = False
    #: Mamba asks for the dtype of the weight of the layer of the logits, and converts that layer's input to it.
    weight = SimpleNamespace(dtype=torch.float32)
    levels: torch.Tensor
    scales: torch.Tensor
    bias: Any
    zeros: Any

    def __init__(
        self,
        levels: torch.Tensor,
        scales: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        zeros: torch.Tensor | None = None,
        widths: Sequence[int] = (),
        order: torch.Tensor | None = None,
        bits: int = 4,
    ) -> None:
        super().__init__()
        self.register_buffer("levels", levels)
        self.register_buffer("scales", stored(scales))
        self.register_buffer("zeros", zeros)
        self.register_buffer("bias", None if bias is None else bias.detach())
        self.register_buffer("order", order)
        self.widths, self.bits = list(widths), bits

    @classmethod
    def rounded(cls, linears: Sequence[nn.Linear], size: int, bits: int, zero_points: bool = False) -> FourBitLinear:
        """Joins layers into one, rounded in blocks of ``size`` numbers; its result has their results side by side."""
        whole = torch.cat([linear.weight.detach() for linear in linears])
        levels, scales, zeros = rounded(whole, size, bits, zero_points=zero_points)
        biases: list[torch.Tensor] = [x.weight.new_zeros(x.out_features) if x.bias is None else x.bias for x in linears]
        bias = torch.cat(biases) if any(x.bias is not None for x in linears) else None
        return cls(levels, scales, bias, zeros=zeros, widths=[linear.out_features for linear in linears], bits=bits)

    @classmethod
    def joined(cls, layers: Sequence[FourBitLinear]) -> FourBitLinear:
        """Joins layers of the same block size and bits, without an ``order``, into one; all have a bias, or none."""
        zeros: Any = None
        if any(layer.zeros is not None for layer in layers):
            rows = [layer.levels.shape[:2] for layer in layers]
            middle = [torch.full((n, (blocks + 1) // 2), 0x88, dtype=torch.uint8) for n, blocks in rows]
            zeros = torch.cat([m if x.zeros is None else x.zeros for x, m in zip(layers, middle, strict=True)])
        bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
        return cls(
            torch.cat([layer.levels for layer in layers]),
            torch.cat([layer.scales for layer in layers]),
            bias,
            zeros=zeros,
            widths=[layer.levels.shape[0] for layer in layers],
            bits=layers[0].bits,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] to [..., out]."""
        order: Any = self.order
        x = x if order is None else x[..., order]
        result: torch.Tensor = matmul_nbits(x, self.levels, self.scales, self.zeros, self.bias, self.bits, self.step)
        return result


class _Part(nn.Module):
    """The stand-in for a layer whose weight is in a joint layer: a part of the joint layer's result.

    Each part computes the joint layer, and the exported graph has it once. The parts are right for any inputs.
    """

    def __init__(self, joint: nn.Module, index: int) -> None:
        super().__init__()
        object.__setattr__(self, "_joint", joint)  # not a submodule: it belongs to the parent
        self.index = index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] to [..., out]."""
        joint: Any = self._joint
        part: torch.Tensor = joint(x).split(joint.widths, -1)[self.index]
        return part


class FewBitEmbedding(nn.Embedding):
    """An embedding with weights of 8 bits, or of as many as the layer that shares its weight.

    :func:`round_embedding` makes it of another embedding. A subclass that scales rows stays the first base class.
    """

    levels: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    bits: int
    is_half: bool

    @property
    def weight(self) -> Any:  # type: ignore[override]
        """An empty tensor of the former weight's dtype: code that reads more of it than the dtype fails."""
        return self.scales.new_empty(0, dtype=torch.float16 if self.is_half else torch.float32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The rows of tokens, [..., width]."""
        result: torch.Tensor = gather_nbits(tokens, self.levels, self.scales, self.zeros, self.bits, self.is_half)
        return result


def round_embedding(embedding: Any, size: int, shared: FourBitLinear | None) -> bool:
    """Rounds an embedding, in place.

    Args:
        embedding: An ``nn.Embedding``.
        shared: The layer of the logits, where its weight is the embedding's.

    Returns:
        Whether it was rounded: its class takes its rows from ``nn.Embedding``.
    """
    kind, weight, state = type(embedding), embedding.weight.detach(), dict(vars(embedding))
    levels, scales, zeros = rounded(weight, size, 8) if shared is None else (shared.levels, shared.scales, shared.zeros)
    embedding._parameters, embedding._buffers = {}, dict(embedding._buffers)
    embedding.register_buffer("levels", levels)
    embedding.register_buffer("scales", scales)
    embedding.register_buffer("zeros", zeros)
    embedding.bits, embedding.is_half = 8 if shared is None else shared.bits, weight.dtype == torch.float16
    bases = (FewBitEmbedding,) if kind is nn.Embedding else (kind, FewBitEmbedding)
    embedding.__class__ = type(f"FewBit{kind.__name__}", bases, {})
    try:
        with torch.no_grad():
            embedding(torch.zeros(1, 1, dtype=torch.long))
    except Exception:  # any error of a forward that reads the empty weight
        embedding.__class__ = kind
        vars(embedding).clear()
        vars(embedding).update(state)
        return False
    return True


@dataclass(frozen=True)
class Rounding:
    """The effects of rounding to few bits.

    Attributes:
        layers: The number of linear layers with weights of four bits.
        wide: The number of linear layers with weights of eight bits.
        experts: The number of layers of experts with weights of four bits.
        perplexity_before, perplexity_after: On text drawn at random from the unrounded model.
        agreement: The share of places where the most likely token of both models is the same.
    """

    layers: int
    wide: int
    experts: int
    bytes_before: int
    bytes_after: int
    perplexity_before: float
    perplexity_after: float
    agreement: float

    def __str__(self) -> str:
        wide = f", {self.wide} of 8" if self.wide else ""
        experts = f", and so have {self.experts} layers of experts" if self.experts else ""
        return (
            f"{self.layers} linear layers have weights of 4 bits{wide}{experts}, {self.bytes_before / 1e6:.2f} MB became "
            f"{self.bytes_after / 1e6:.2f} MB; perplexity of text that the model itself drew: "
            f"{self.perplexity_before:.2f} became {self.perplexity_after:.2f}; "
            f"the most likely token is the same at {100 * self.agreement:.1f} % of {_ROWS * _TOKENS} places"
        )


def check_settings(size: int, accuracy_level: int) -> None:
    """Checks the size of blocks and the accuracy level.

    Raises:
        UsageError: The kernel has no such blocks, or no such accuracy level.
    """
    if size not in BLOCK_SIZES:
        raise UsageError(f"--block-size {size} is none of {', '.join(map(str, BLOCK_SIZES))}")
    if accuracy_level not in ACCURACY_LEVELS:
        raise UsageError(f"--accuracy-level {accuracy_level} is none of {', '.join(map(str, ACCURACY_LEVELS))}")


def round_weights(
    model: Any,
    size: int,
    keep: Sequence[str] = (),
    accuracy_level: int = 4,
    wide: Sequence[str] = (),
    *,
    zero_points: bool = False,
) -> Rounding:
    """Rounds a language model's linear layers, its experts and the embedding of its tokens, in place.

    Projections of one attention that read the same rows become one layer.

    Args:
        keep: Names of modules that stay as they are, with ``*`` for anything.
        accuracy_level: The accuracy level of the products at which the perplexity is computed.
        wide: Names of linear layers that get 8 bits, with ``*`` for anything; :data:`MIXED` for the layers whose errors
            count most.
        zero_points: Whether blocks of 4 bits have a zero point of their own.
    """
    check_settings(size, accuracy_level)
    _as_linears(model)
    modules, mixed = dict(model.named_modules()), MIXED in wide
    embeddings = [n for n, m in modules.items() if m is model.get_input_embeddings() and _takes_few_bits(m, size)]
    layers = [n for n, m in modules.items() if type(m) is nn.Linear]
    gates = {name: gate for name, module in modules.items() if (gate := gate_of(module, size)) is not None}
    kept, wide = _matching([*layers, *embeddings, *gates], keep), [name for name in wide if name != MIXED]
    eight = _matching(layers, wide, "--int8-layers") | (_sensitive(model, layers) if mixed else set())
    rounded = [name for name in layers if name not in kept]
    if not rounded and not gates.keys() - kept:
        raise UsageError("--int4: no linear layer is left to round")
    text = _drawn(model)
    with _inputs_of(modules, rounded) as inputs:
        before, bytes_before = _scores(model, text), _bytes(model)
    # a layer with states may read the weight of a part itself, as of Mamba's dt_proj
    unread = {id(part) for layer in layers_with_states(model) for part in layer.children()}
    rounded = [name for name in rounded if name in inputs or id(modules[name]) not in unread]
    made: dict[str, Any] = {}
    for name in gates.keys() - kept:
        made[name] = FourBitExperts(modules[name], gates[name], size, zero_points=zero_points)
        made[name].step = accuracy_level == 4
        place(model, [name], made[name])
    kinds = {name: (id(inputs[name]), name in eight) if name in inputs else None for name in rounded}
    for names in joint_layers(kinds):
        bits = 8 if names[0] in eight else 4
        joint = FourBitLinear.rounded([modules[name] for name in names], size, bits, zero_points)
        joint.step = accuracy_level == 4
        made |= dict.fromkeys(names, joint)
        place(model, names, joint)
    for name in embeddings:
        if name not in kept:
            weight = modules[name].weight
            sharing = [other for other in layers if modules[other].weight is weight]
            if not kept.intersection(sharing):  # where a kept layer shares the matrix, it is there anyway
                round_embedding(modules[name], size, made[sharing[0]] if sharing else None)
    after = _scores(model, text)
    for joint in made.values():
        joint.step = False
    perplexities = [
        float(nn.functional.nll_loss(scores.flatten(0, 1), text[:, 1:].flatten()).exp()) for scores in (before, after)
    ]
    same = float((before.argmax(-1) == after.argmax(-1)).float().mean())
    count = len(eight.intersection(rounded))
    experts = len(gates.keys() - kept)
    return Rounding(
        len(rounded) - count, count, experts, bytes_before, _bytes(model), perplexities[0], perplexities[1], same
    )


def place(model: Any, names: Sequence[str], layer: nn.Module) -> None:
    """Puts a layer in the place of the layer, or of the layers, that it replaces."""
    if len(names) == 1:
        _put(model, names[0], layer)
        return
    owner, _, _ = names[0].rpartition(".")
    _put(model, f"{owner}.{'_'.join(name.rpartition('.')[2] for name in names)}", layer)
    for index, name in enumerate(names):
        _put(model, name, _Part(layer, index))


def joint_layers(kinds: Mapping[str, Any]) -> list[list[str]]:
    """Names of layers in groups: projections of one attention that are of the same kind, or a layer alone.

    Args:
        kinds: The kind of each layer by its name; ``None`` for a layer that stays alone.
    """
    groups: dict[Any, list[str]] = {}
    for name, kind in kinds.items():
        owner, _, last = name.rpartition(".")
        groups.setdefault((owner, kind) if last in PROJECTIONS and kind is not None else name, []).append(name)
    return [sorted(names, key=_place_of) for names in groups.values()]


def _place_of(name: str) -> int:
    last = name.rpartition(".")[2]
    return PROJECTIONS.index(last) if last in PROJECTIONS else 0


def set_accuracy_level(model: Any, level: int) -> None:
    """Sets the accuracy level of a finished model's products.

    Args:
        model: An ``onnx_ir`` model.
        level: 1 for float activations; 4: ONNX Runtime rounds them to bytes.
    """
    import onnx_ir as ir

    for node in model.graph.all_nodes():
        if node.op_type in ("MatMulNBits", "QMoE") and node.domain == DOMAIN:
            node.attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", level)


def _takes_few_bits(embedding: Any, size: int) -> bool:
    floats = isinstance(embedding, nn.Embedding) and "weight" in embedding._parameters
    return floats and embedding.max_norm is None and bool(embedding.embedding_dim % size == 0)


def _matching(names: Sequence[str], patterns: Sequence[str], option: str = "--int4-keep") -> set[str]:
    matching = set()
    for pattern in patterns:
        matches = fnmatch.filter(names, pattern)
        if not matches:
            raise UsageError(
                f"{option}: no linear layer is called {pattern!r}",
                hint=f"One of them is {next(iter(names), 'none')}.",
            )
        matching.update(matches)
    return matching


def _sensitive(model: Any, names: Sequence[str]) -> set[str]:
    """The layers whose errors count most, by the rule of llama.cpp.

    They are the layer of the logits and, in the first and last eighth of the model and in every third layer between,
    the projections of queries, keys and values and the last layer of the MLP.
    """
    places = {name: int(place[1]) for name in names if (place := re.search(r"\.(\d+)\.", name))}
    count = max(places.values(), default=-1) + 1
    head = model.get_output_embeddings()
    sensitive = {name for name in names if model.get_submodule(name) is head} | {
        name
        for name, i in places.items()
        if _SENSITIVE.search(name) and (i < count / 8 or i >= 7 * count / 8 or (i - round(count / 8)) % 3 == 2)
    }
    if not sensitive:
        raise UsageError(f"--int8-layers {MIXED}: {type(model).__name__} has no layers of the names known here")
    return sensitive


@contextmanager
def _inputs_of(modules: dict[str, Any], names: Sequence[str]) -> Iterator[dict[str, torch.Tensor]]:
    """Holds while the model is called: records the tensor that each layer reads, by its name."""
    inputs: dict[str, torch.Tensor] = {}
    with ExitStack() as stack:
        for name in names:
            hook = modules[name].register_forward_pre_hook(lambda _, args, name=name: inputs.update({name: args[0]}))
            stack.callback(hook.remove)
        yield inputs


#: Classes by their full names: a class of the same name in another library may compute something else.
_CONV1D = "transformers.pytorch_utils.Conv1D"
_FALCON_LINEAR = "transformers.models.falcon.modeling_falcon.FalconLinear"


def _as_linears(model: Any) -> None:
    """Makes linear layers of other classes (GPT-2's Conv1D, Falcon's) ``nn.Linear``, in place."""
    for name, module in list(model.named_modules()):
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        if kind in (_CONV1D, _FALCON_LINEAR):
            weight = module.weight.detach()
            weight = weight.T.contiguous() if kind == _CONV1D else weight
            linear = nn.Linear(weight.shape[1], weight.shape[0], bias=module.bias is not None, device="meta")
            linear.weight, linear.bias = nn.Parameter(weight, requires_grad=False), module.bias
            _put(model, name, linear)


def _put(model: Any, name: str, module: nn.Module) -> None:
    owner, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(owner), attribute, module)


def _drawn(model: Any) -> torch.Tensor:
    """[rows, tokens + 1]: text drawn from the model's own probabilities, after a first token drawn evenly."""
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(0, model.config.get_text_config().vocab_size, (_ROWS, 1), generator=generator)
    past: Any = None
    cache = argument_of(model)
    with torch.no_grad():
        for _ in range(_TOKENS):
            result = model(input_ids=text[:, -1:], use_cache=True, **{cache: past})
            past = result[cache]
            chances = result.logits[:, -1].float().softmax(-1)
            text = torch.cat([text, torch.multinomial(chances, 1, generator=generator)], 1)
    return text


def _scores(model: Any, text: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=text[:, :-1], use_cache=False).logits
    return logits.float().log_softmax(-1)


def _bytes(model: nn.Module) -> int:
    tensors = {t.data_ptr(): t.nbytes for t in (*model.parameters(), *model.buffers())}
    return sum(tensors.values())
