"""The steps that a random chain is made of, as lines of PyTorch.

A step is a template of an expression over the values that the chain has so far. ``{f}`` stands for a floating-point
value, ``{f4}`` for one of rank 4 (``{f3}``, ``{f2}`` likewise), ``{i}`` for an integer one, ``{b}`` for a boolean one
and ``{x}`` for any; ``{p}``, ``{g}``, ``{h}`` and ``{q}`` are a positive number, any number, a small size and a small
integer of either sign. ``{w:2,f}`` is a parameter whose rank is 2 and whose last-but-one size is that of the last axis
of ``f``. A template that eager PyTorch refuses for the shapes at hand is drawn again, so none states its conditions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def u8(x: torch.Tensor) -> torch.Tensor:
    """Activations in unsigned bytes."""
    return torch.fake_quantize_per_tensor_affine(x, 0.03, 120, 0, 255)


def s8(x: torch.Tensor) -> torch.Tensor:
    """Activations in signed bytes."""
    return torch.fake_quantize_per_tensor_affine(x, 0.05, 0, -128, 127)


def w8(x: torch.Tensor) -> torch.Tensor:
    """A weight in signed bytes without the least one."""
    return torch.fake_quantize_per_tensor_affine(x, 0.02, 0, -127, 127)


def c8(x: torch.Tensor, axis: int = 0) -> torch.Tensor:
    """Signed bytes, with a scale for each place on an axis."""
    axis = range(x.dim())[axis]  # an IndexError for a tensor without axes
    count = x.shape[axis]
    zeros = torch.zeros(count, dtype=torch.int32)
    return torch.fake_quantize_per_channel_affine(x, torch.arange(1.0, count + 1) / 100, zeros, axis, -128, 127)


#: The functions that a step may call by name.
HELPERS: dict[str, Callable[..., torch.Tensor]] = {"u8": u8, "s8": s8, "w8": w8, "c8": c8}

#: One line a family; templates are separated by " | ". A family is drawn first, then one of its templates.
FAMILIES: dict[str, str] = {
    "scale": "{f} * {g} | {f} / {p} | {g} * {f} | {f} * {p} + {g} | {p} / ({f}.abs() + {p}) | -{f} | {f}.square()",
    "binary": "{f} + {f'} | {f} - {f'} | {f} * {f'} | {f} / ({f'}.abs() + 1) | torch.maximum({f}, {f'}) | torch.minimum({f}, {f'})"
    " | torch.pow({f}.abs() + 0.5, {p}) | torch.atan2({f}, {f'}) | torch.hypot({f}, {f'}) | torch.lerp({f}, {f'}, 0.3)"
    " | torch.addcmul({f}, {f'}, {f'}, value={g}) | torch.where({f} > {f'}, {f}, {f'}) | torch.fmod({f}, {p}) | torch.remainder({f}, {p})"
    " | torch.copysign({f}, {f'})",
    "activation": "F.relu({f}) | F.relu6({f}) | F.gelu({f}) | F.gelu({f}, approximate='tanh') | F.silu({f}) | F.hardswish({f})"
    " | F.hardsigmoid({f}) | F.leaky_relu({f}, {p}) | F.elu({f}, {p}) | F.selu({f}) | F.softplus({f}) | F.mish({f}) | torch.tanh({f})"
    " | torch.sigmoid({f}) | {f} * torch.sigmoid({p} * {f}) | F.celu({f}, {p}) | F.logsigmoid({f}) | F.softsign({f}) | F.hardtanh({f}, -{p}, {p})"
    " | F.hardshrink({f}, 0.5) | F.softshrink({f}, 0.5) | F.tanhshrink({f}) | F.threshold({f}, 0.1, {g}) | F.glu({f}, -1)",
    "clamp": "torch.clamp({f}, min={g}) | torch.clamp({f}, max={g}) | torch.clamp({f}, -{p}, {p}) | {f}.clamp_min(0.0) | {f}.clamp(0, 6)"
    " | F.relu({f}).clamp(max={p}) | F.relu(F.relu({f})) | torch.clamp(torch.clamp({f}, min=-{p}), max={p}) | torch.clamp(F.relu({f}), min=-{p})",
    "unary": "{f}.abs() | {f}.sin() | {f}.cos() | {f}.exp().clamp(max=50) | torch.log({f}.abs() + {p}) | torch.sqrt({f}.abs() + {p})"
    " | torch.rsqrt({f}.abs() + {p}) | torch.reciprocal({f}.abs() + {p}) | {f}.erf() | {f}.floor() | {f}.ceil() | {f}.round() | {f}.trunc() | {f}.frac() | {f}.sign()"
    " | {f}.atan() | {f}.expm1().clamp(max=50) | torch.log1p({f}.abs()) | torch.nan_to_num({f}) | {f}.asinh()",
    "matmul": "{f} @ {f'}.transpose(-1, -2) | torch.matmul({f}, {f'}) | {f} @ {w:2,f} | F.linear({f}, {w:2,f}.t()) | F.linear({f}, {w:2,f}.t(), ({g} * torch.ones(5)).to({f}.dtype))"
    " | ({f} * {p}) @ ({f'}.transpose(-1, -2) * {p}) | torch.matmul({f}.transpose(-1, -2), {f'}) | ({f} @ {w:2,f}) * {g} | ({f} / {p}) @ {w:2,f} | {f} @ ({w:2,f} * {p})"
    " | torch.einsum('...i,...i->...', {f}, {f'}) | torch.einsum('...ij,...kj->...ik', {f}, {f'}) | torch.addmm({f2}, {f2'}, {w:2,f2'}, alpha={p}, beta={g})"
    " | torch.baddbmm({f3}, {f3'}, {f3'}.transpose(1, 2), beta={p}, alpha={g}) | ({f} @ {w:2,f}) + {f'} | {f} @ {w:2,f} @ torch.ones(5, 3) | torch.outer({f}.flatten()[:4], {f'}.flatten()[:3])",
    "attention": "F.scaled_dot_product_attention({f4}, {f4}, {f4}) | F.scaled_dot_product_attention({f4}, {f4'}, {f4'}, scale={p})"
    " | F.scaled_dot_product_attention({f4}, {f4'}, {f4}, is_causal=True) | F.scaled_dot_product_attention({f3}, {f3'}, {f3'})"
    " | torch.softmax({f4} @ {f4'}.transpose(-1, -2) * {p}, -1) @ {f4'} | torch.softmax(({f3} @ {f3'}.transpose(1, 2)) / {p} + {g}, dim=-1) @ {f3'}",
    "softmax": "F.softmax({f}, -1) | F.softmax({f}, 0) | F.log_softmax({f}, -1) | F.softmax({f}, 1) | F.softmin({f}, -1) | torch.logsumexp({f}, -1) | F.softmax({f}.masked_fill({f} > {g}, -1e9), -1)"
    " | F.normalize({f}, dim=-1)",
    "norm": "F.layer_norm({f}, {f}.shape[-1:]) | F.layer_norm({f} + {f'}, {f}.shape[-1:]) | F.layer_norm({f}, {f}.shape[-1:], {v:f}, {v:f}) | F.batch_norm({f4}, {c:f4}, {c:f4}.abs() + 0.5, {c:f4}, {c:f4})"
    " | F.instance_norm({f4}) | F.group_norm({f4}, 2) | F.group_norm({f4}, 1, {c:f4}, {c:f4}) | F.rms_norm({f}, {f}.shape[-1:]) | {f} * torch.rsqrt({f}.pow(2).mean(-1, keepdim=True) + 1e-6) * {v:f}"
    " | F.batch_norm({f3}, {c:f3}, {c:f3}.abs() + 0.5) | F.local_response_norm({f4}, 3) | ({f} - {f}.mean(-1, keepdim=True)) / ({f}.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt() | F.instance_norm({f3})",
    "convolution": "F.conv2d({f4}, {k:f4,3}) | F.conv2d({f4}, {k:f4,3}, padding=1) | F.conv2d({f4}, {k:f4,1}, {g} * torch.ones(4)) | F.conv2d({f4}, {k:f4,3}, torch.ones(4), stride=2, padding=1)"
    " | F.conv2d({f4}, {d:f4,3}, padding=1, groups={f4}.shape[1]) | F.conv2d({f4}, {k:f4,3}, padding='same') | F.conv2d({f4}, {k:f4,3}, dilation=2, padding=2) | F.conv1d({f3}, {k:f3,3}, padding=1)"
    " | F.conv_transpose2d({f4}, {t:f4,3}, stride=2) | F.conv_transpose2d({f4}, {t:f4,3}, padding=1) | F.conv2d(F.pad({f4}, [1, 1, 1, 1]), {k:f4,3}) | F.conv2d(F.pad({f4}, [1, 0, 2, 1]), {k:f4,3})"
    " | F.conv2d({f4} * {c4:f4}, {k:f4,3}) | F.conv2d({f4}, {k:f4,1}) * {p} | F.conv2d({f4}, {k:f4,1}) + {g} | F.conv2d({f4}, {k:f4,1}) + torch.ones(4, 1, 1) | F.conv2d({f4}, {k:f4,1}) * torch.arange(4.0).view(4, 1, 1)"
    " | F.relu(F.conv2d({f4}, {k:f4,3}, padding=1)) | F.conv2d(F.pad({f4}, [1, 1, 1, 1], value={g}), {k:f4,3}) | F.conv2d({f4}, {k16:f4,3}, padding=1) | F.conv2d({f4}, {k:f4,1}) + F.conv2d({f4}, {k:f4,1})",
    "pool": "F.max_pool2d({f4}, 2) | F.max_pool2d({f4}, 3, 2, 1) | F.avg_pool2d({f4}, 2) | F.avg_pool2d({f4}, 3, 1, 1) | F.avg_pool2d({f4}, 3, 2, 1, count_include_pad=False) | F.adaptive_avg_pool2d({f4}, 1)"
    " | F.adaptive_avg_pool2d({f4}, (2, 1)) | F.adaptive_max_pool2d({f4}, 1) | F.max_pool2d(F.pad({f4}, [1, 1, 1, 1]), 3, 2) | F.avg_pool2d(F.pad({f4}, [1, 1, 1, 1]), 3) | F.max_pool2d({f4}, 2, ceil_mode=True)"
    " | F.avg_pool2d({f4}, 3, 2, ceil_mode=True) | F.max_pool1d({f3}, 2) | F.avg_pool1d({f3}, 2) | F.lp_pool2d({f4}, 2, 2) | F.max_pool2d(F.relu({f4}), 2) | F.max_pool2d({f4}, 2, return_indices=True)[0] | F.max_pool2d(F.pad({f4}, [1, 1, 1, 1], value={g}), 2)"
    " | F.avg_pool2d(F.pad({f4}, [1, 1, 1, 1]), 3, count_include_pad=False) | F.avg_pool2d(F.pad({f4}, [1, 1, 1, 1]), 3, 2, 1, count_include_pad=False) | F.avg_pool2d(F.pad({f4}, [0, 1, 0, 1]), 2, ceil_mode=True) | F.max_pool1d(F.pad({f3}, [1, 1]), 3) | F.max_pool2d(F.pad({f4}, [2, 2]), 3, 1, 1)",
    "pad": "F.pad({f}, [1, 2]) | F.pad({f}, [1, 1, 0, 2], value={g}) | F.pad({f}, [-1, 1]) | F.pad({f4}, [1, 1, 1, 1], mode='reflect') | F.pad({f3}, [1, 2], mode='replicate') | F.pad({f4}, [1, 1, 1, 1], mode='circular') | F.pad(F.pad({f}, [1, 1]), [0, 1]) | F.pad({f}, [0, 0])",
    "resize": "F.interpolate({f4}, scale_factor=2) | F.interpolate({f4}, size=(3, 5), mode='bilinear') | F.interpolate({f4}, scale_factor=2, mode='bilinear', align_corners=True) | F.interpolate({f4}, scale_factor=0.5, mode='bilinear')"
    " | F.interpolate({f4}, size=(4, 4), mode='bicubic') | F.interpolate({f3}, scale_factor=2.0, mode='linear') | F.pixel_shuffle({f4}, 2) | F.pixel_unshuffle({f4}, 2) | F.interpolate({f4}, size=(5, 3), mode='nearest-exact') | F.upsample({f4}, scale_factor=3)"
    " | F.interpolate({f4}, scale_factor=(2.0, 1.0)) | F.interpolate({f4}, size=(7, 4), mode='area') | F.interpolate({f4}, size=(3, 4), mode='bilinear', antialias=True) | F.interpolate({f3}, size=5) | F.interpolate({f4}, scale_factor=1.5, mode='bicubic', align_corners=True)"
    " | F.grid_sample({f4}, torch.stack(torch.meshgrid(torch.linspace(-1, 1, 3), torch.linspace(-0.9, 0.7, 4), indexing='ij'), -1).expand({f4}.shape[0], -1, -1, -1), align_corners=False) | F.channel_shuffle({f4}, 2)",
    "shape": "{x}.transpose(-1, -2) | {x}.permute(*reversed(range({x}.dim()))) | {x}.flatten(1) | {x}.unsqueeze(0) | {x}.unsqueeze(-1) | {x}.squeeze() | {x}.reshape({x}.shape[0], -1) | {x}.flip(-1) | {x}.movedim(0, -1)"
    " | {x4}.permute(0, 2, 3, 1) | {x4}.permute(0, 3, 1, 2) | {x3}.transpose(0, 1) | {x}.unsqueeze(1).squeeze(1) | {x}.transpose(0, 1).transpose(0, 1) | {x}.roll(1, -1) | {x}.reshape(-1) | {x}.unflatten(-1, (-1, 2)) | {x4}.transpose(1, 2).reshape({x4}.shape[0], {x4}.shape[2], -1)"
    " | {x}.t() | {x3}.permute(2, 0, 1) | {x}.swapaxes(0, -1) | torch.rot90({x4}, 1, (2, 3)) | {x}.contiguous().view(-1, {x}.shape[-1])",
    "slice": "{x}[..., 1:] | {x}[:, ::2] | {x}[..., :-1] | {x}[:, -1] | {x}[..., 0] | {x}.narrow(-1, 0, 2) | {x}[:, 1:][:, :-1] | {x}[None, ..., 1:3] | {x}.select(-1, 1) | {x}.diagonal(0, -1, -2) | {x}.tril() | {x}.triu(1)"
    " | {x}.index_select(-1, torch.tensor([1, 0, 1])) | {x}[:, [0, 1, 0]] | {x}.gather(-1, {x}.long().abs().remainder({x}.shape[-1])) | {x}.unfold(-1, 2, 1) | {x}[..., [-1, 0]] | {x}.take_along_dim({x}.argsort(stable=True, dim=-1), -1)",
    "join": "torch.cat([{f}, {f'}], -1) | torch.cat([{f}, {f}], 1) | torch.stack([{f}, {f'}], 1) | torch.cat({f}.split(1, -1)[::-1], -1) | torch.cat({f}.chunk(2, 1), 0) | sum({f}.unbind(-1)) | torch.cat([{f}, {f} * {g}], 0) | torch.stack({f}.unbind(0), -1)"
    " | {f}.chunk(2, -1)[0] * {f}.chunk(2, -1)[1] | torch.cat([{f}[..., 1:], {f}[..., :1]], -1) | torch.cat([-{f}.chunk(2, -1)[1], {f}.chunk(2, -1)[0]], -1) | torch.hstack([{f}, {f'}]) | {f}.split([1, {f}.shape[-1] - 1], -1)[1]",
    "expand": "{x}.unsqueeze(0).expand(2, *{x}.shape) | {x}.repeat(2, *[1] * ({x}.dim() - 1)) | {x}.repeat_interleave(2, -1) | torch.tile({x}, (2,)) | {f} + torch.zeros_like({f}) | {f} * torch.ones_like({f}) | {f}.unsqueeze(1).expand(-1, 3, *[-1] * ({f}.dim() - 1)) | {f} + {f}.mean(-1, keepdim=True).expand_as({f})",
    "reduce": "{f}.mean(-1) | {f}.sum(1) | {f}.mean(-1, keepdim=True) | {f}.amax(-1, keepdim=True) | {f}.amin(0) | {f}.sum() | {f}.mean((-1, -2)) | {f}.var(-1) | {f}.std(0) | {f}.norm(dim=-1) | {f}.prod(-1) | {f}.max(-1)[0] | {f}.abs().sum(-1, keepdim=True) | torch.logsumexp({f}, 0)"
    " | {f}.cumsum(-1) | {f}.mean((2, 3), keepdim=True) | {f}.square().sum(-1).sqrt() | {f}.norm(p=1, dim=0) | {f}.sum((0, -1)) | {f}.median(-1)[0] | {f}.sort(-1)[0] | {f}.topk(2, -1)[0] | {f}.flip(0).cumsum(0) | {f}.cumprod(-1) | {f}.max() - {f}.min() | {f}.std(-1, unbiased=False)",
    "integer": "{f}.argmax(-1) | {f}.argmin(0) | ({f} * 3).long() | ({f} * 3).to(torch.int32) | {i} + {q} | {i} * {q} | {i} // 3 | {i} % 5 | {i} - {i'} | torch.div({i}, -2, rounding_mode='floor') | {i}.sum(-1) | {i}.cumsum(-1) | {i}.clamp(-3, 3) | {i}.float() * {g} | {f}.sort(-1)[1] | {f}.topk(2, -1)[1]"
    " | {i}.to(torch.uint8) | {i}.abs() | {i}.float() / {p} | F.one_hot({i}.long().abs().remainder(4), 4) | {i} & 3 | {i} << 1 | {i}.long().bitwise_xor(5) | {i}.amax(-1) | {i}.float().mean(-1) | {i} * {f} | {i}.to(torch.int8) | {i}.pow(2) | {i}.neg() | {b}.long().sum(-1) | F.embedding({i}.long().abs().remainder(6), torch.arange(18.0).view(6, 3)) | {f}.long().float() | torch.arange({f}.shape[-1]) + {q}",
    "boolean": "{f} > {g} | {f} <= {f'} | {f}.isnan() | {b} & {b'} | {b} | {b'} | ~{b} | {b} ^ {b'} | {b}.any(-1) | {b}.all(0) | {f}.masked_fill({f} > {g}, {g}) | torch.where({b}, {f}, {g}) | torch.where({b}, {f}, {f'}) | {b}.float() | {i} == {i'} | ~({f} == {f'}) | {f} * ({f} > 0) | {b} * {f} | ~({f} < {g}) | {f}.bool() | torch.where(~{b}, {f}, {f'}) | {i} > {q}"
    " | {f}.masked_fill(~{b}, -1e9) | torch.logical_xor({b}, {b'}) | (1.0 - {b}.float()) * torch.finfo(torch.float32).min",
    "cast": "{f}.double().float() | {f}.half().float() | {f}.to(torch.bfloat16).float() | {f}.int().float() | {f}.long().int().float() | {f}.bool().float() | {i}.double().float() | {i}.to(torch.int32).long() | {f}.double().mean(-1).float() | ({f}.double() * {g}).float() | {f}.half().double().float()",
    "scatter": "{f}.index_fill(-1, torch.tensor([0]), {g}) | {f}.index_add(0, torch.tensor([0, 0]), {f}[:2]) | {f}.masked_fill(torch.ones({f}.shape[-1]).cumsum(0) > 2, {g}) | torch.zeros_like({f}).scatter(-1, {f}.argsort(stable=True, dim=-1), {f}) | {f}.scatter_add(-1, {f}.argsort(stable=True, dim=-1), {f}) | {f}.index_copy(0, torch.tensor([1, 0]), {f}[:2])"
    " | torch.scatter_reduce({f}, -1, {f}.argsort(stable=True, dim=-1), {f} * 2, 'amax') | {f}.index_put((torch.tensor([0]),), {f}[:1] * {g})",
    "quantise": "torch.fake_quantize_per_tensor_affine({f}, 0.1, 3, 0, 255) | torch.fake_quantize_per_tensor_affine({f}, 0.05, 0, -128, 127) | torch.fake_quantize_per_tensor_affine({f} @ {w:2,f}, 0.1, 0, -128, 127)"
    " | F.conv2d(torch.fake_quantize_per_tensor_affine({f4}, 0.1, 3, 0, 255), torch.fake_quantize_per_tensor_affine({k:f4,3}, 0.02, 0, -127, 127)) | F.linear(torch.fake_quantize_per_tensor_affine({f}, 0.1, 0, -128, 127), torch.fake_quantize_per_tensor_affine({w:2,f}.t(), 0.02, 0, -127, 127))"
    " | torch.fake_quantize_per_channel_affine({f4}, torch.full(({f4}.shape[1],), 0.1), torch.zeros({f4}.shape[1], dtype=torch.int32), 1, -128, 127) | {f}.relu().mul(10).round().clamp(0, 255).to(torch.uint8)",
    "quantised layers": "u8(u8({f}) + u8({f'})) | s8(s8({f}) * s8({f'})) | s8(s8({f}) - u8({f'})) | u8(torch.sigmoid(u8({f}))) | s8(F.leaky_relu(s8({f}), 0.1)) | s8(F.softmax(s8({f}), -1)) | u8(F.avg_pool2d(u8({f4}), 2))"
    " | u8(F.max_pool2d(u8({f4}), 2)) | u8(torch.cat([u8({f}), u8({f'})], -1)) | s8(F.relu(s8({f}))) | u8({f}).clamp(0, 6) | u8(F.relu({f})) | u8(F.conv2d(u8({f4}), w8({k:f4,3}))) | u8(F.relu(F.conv2d(u8({f4}), c8({k:f4,3}), padding=1)))"
    " | u8(F.linear(u8({f}), w8({w:2,f}.t()))) | s8(F.linear(s8({f}), c8({w:2,f}.t()))) | F.linear({f}, w8({w:2,f}.t())) | F.linear({f}, c8({w:2,f}.t())) | {f} @ w8({w:2,f}) | {f} @ c8({w:2,f}, 1) | u8({f}) @ w8({w:2,f}) | s8({f}) @ c8({w:2,f}, 0)"
    " | s8(s8({f}) @ s8({f'}).transpose(-1, -2)) | s8({f}) @ u8({f'}).transpose(-1, -2) | u8(torch.where({b}, u8({f}), u8({f}))) | u8(F.interpolate(u8({f4}), scale_factor=2)) | u8({f}).transpose(-1, -2) | s8({f}).reshape(-1) | u8(u8({f4}).mean((2, 3)))"
    " | u8({f}).argmax(-1) | u8({f}).split(1, -1)[0] | s8(F.hardswish(s8({f}))) | u8(F.gelu(u8({f}))) | F.conv2d({f4}, w8({k:f4,3}), padding=1) | F.conv2d({f4}, c8({k:f4,1})) | F.conv_transpose2d(u8({f4}), w8({t:f4,3}), stride=2) | s8(F.adaptive_avg_pool2d(s8({f4}), 1))"
    " | torch.quantize_per_tensor({f}, 0.1, 3, torch.quint8).dequantize() | c8({f}, -1) | u8(u8({f}).unsqueeze(1)) | torch.addmm({f2}, u8({f2'}), w8({w:2,f2'})) | F.layer_norm(u8({f}), {f}.shape[-1:]) | u8(F.pad(u8({f}), [1, 1])) | s8(s8({f}).sum(-1)) | F.embedding({i}.long().abs().remainder(6), w8(torch.arange(18.0).view(6, 3) / 10))",
    "quantised beside float": "s8(F.conv2d(s8({f4}), {k:f4,3})) | u8(F.relu(F.conv2d(u8({f4}), {k:f4,3}, torch.ones(4), padding=1))) | s8(F.linear(s8({f}), {w:2,f}.t(), torch.ones(5))) | u8(F.conv_transpose2d(u8({f4}), {t:f4,3})) | u8(u8({f}) + {f'}) | s8({f} @ {w:2,f}) | u8(u8({f}) * {g})"
    " | s8({f}).mT @ {f} | {f3} @ w8({f3'}).mT | torch.bmm(s8({f3}), c8({f3'}, -1).mT) | F.conv1d({f3}, w8({k:f3,3})) | F.conv1d(s8({f3}), w8({k:f3,3})) | s8({f})[..., 1:] | F.max_pool2d(s8({f4}), 2) | w8({f}).transpose(-1, -2) | w8({f}).reshape(-1)[1:] | u8(s8({f})) | s8(w8({f}).transpose(-1, -2))"
    " | u8({f}.clamp(-1, 1)) | w8({f}) + {f'} | torch.einsum('...ij,...kj->...ik', s8({f}), s8({f'})) | F.scaled_dot_product_attention(s8({f4}), s8({f4}), u8({f4})) | {f} @ w8({w:2,f} / {p}) | {f} @ w8({w:2,f}.abs()) | s8({f}) @ w8({w:2,f}) @ w8(torch.ones(5, 3)) | F.embedding({i}.long().abs().remainder(6), s8(torch.arange(18.0).view(6, 3))) @ w8(torch.ones(3, 2))",
    "fused": "F.gelu({f} + {v:f}) | F.silu({f}) * {f'} | F.layer_norm({f} + {f'} + {v:f}, {f}.shape[-1:], {v:f}, {v:f}) | 0.5 * {f} * (1 + torch.erf({f} / 1.4142135623730951)) | 0.5 * {f} * (1 + torch.tanh(0.7978845608028654 * ({f} + 0.044715 * {f}.pow(3))))"
    " | {f} * torch.sigmoid({f} * 1.702) | F.batch_norm(F.conv2d({f4}, {k:f4,3}, padding=1), torch.arange(4.0) / 4, torch.ones(4) * 2, torch.arange(4.0) + 0.5, torch.ones(4)) | F.relu(F.conv2d({f4}, {k:f4,3}, padding=1) + F.conv2d({f4}, {k:f4,1}))"
    " | F.relu({f} @ {w:2,f}) | F.relu(F.linear({f}, {w:2,f}.t(), torch.ones(5))) | F.batch_norm(F.linear({f2}, {w:2,f2}.t()), torch.ones(5), torch.ones(5) * 2) | F.relu({f} + {v:f}) + {f} | torch.where({f} > 0, {f}, {f} * {p}) | {f}.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)"
    " | {f4} * {f4}.cos() + torch.cat([-{f4}[..., {f4}.shape[-1] // 2 :], {f4}[..., : {f4}.shape[-1] // 2]], -1) | F.sigmoid(F.conv2d({f4}, {k:f4,1})) | F.leaky_relu(F.conv2d({f4}, {k:f4,3}), {p}) | F.hardtanh(F.conv2d({f4}, {k:f4,1}), -{p}, {p}) | F.conv2d({f4}, {k:f4,3}, padding=1) * F.sigmoid(F.conv2d({f4}, {k:f4,3}, padding=1))"
    " | F.relu(F.batch_norm({f4}, {c:f4}, {c:f4}.abs() + 0.5)) | F.conv2d(F.batch_norm({f4}, {c:f4}, {c:f4}.abs() + 0.5), {k:f4,1}) | F.conv2d(F.relu({f4}), {k:f4,3}) + {g} | ({f} - {f}.mean()) / ({f}.std() + {p}) | F.dropout({f}, 0.5, False) * {f'} | ({f} * {p} + {f'}) * {p} | {f} * {v:f} + {v:f}"
    " | F.conv_transpose2d({f4}, {t:f4,3}) + torch.ones(3, 1, 1) | F.layer_norm({f}.double(), {f}.shape[-1:]).float() | F.softmax({f}.half().float(), -1) | torch.softmax({f}, -1) * {f'} | F.max_pool2d(F.relu(F.conv2d({f4}, {k16:f4,3}, padding=1)), 2) | F.log_softmax({f} @ {w:2,f}, -1) | {f}.exp() / {f}.exp().sum(-1, keepdim=True)",
    "masks": "F.scaled_dot_product_attention({f4}, {f4'}, {f4'}, attn_mask=({f4} @ {f4'}.transpose(-1, -2)) > {g}) | F.scaled_dot_product_attention({f4}, {f4'}, {f4'}, attn_mask={f4} @ {f4'}.transpose(-1, -2))"
    " | torch.softmax(({f4} @ {f4'}.transpose(-1, -2)).masked_fill(torch.ones({f4}.shape[-2], {f4'}.shape[-2]).triu(1) > 0, float('-inf')), -1) @ {f4'} | {f}.masked_fill(torch.ones({f}.shape[-2], {f}.shape[-1]).tril() == 0, {g}) | torch.where({b}, {f}, torch.zeros_like({f}))"
    " | torch.where(torch.where({b}, {f}, {g}) > 0, {f}, -{f}) | {f} * ~{b} | torch.softmax({f3} @ {f3'}.transpose(1, 2) + ({f3} @ {f3'}.transpose(1, 2) > {g}).float() * -1e4, -1) | F.softmax({f}.masked_fill(torch.zeros({f}.shape[-1]) > 0, float('-inf')), -1) | {f}.tril() + {f}.triu(1)",
    "einsum": "torch.einsum('...ij,jk->...ik', {f}, {w:2,f}) | torch.einsum('bchw,bchw->bc', {f4}, {f4'}) | torch.einsum('bij,bkj->bik', {f3}, {f3'}) | torch.einsum('ij->ji', {f2}) | torch.einsum('bij->bj', {f3}) | torch.einsum('bhqd,bhkd->bhqk', {f4}, {f4'}) | torch.einsum('ij,kj->ik', {f2}, {f2'})"
    " | torch.einsum('i,j->ij', {f}.flatten()[:4], {f'}.flatten()[:3]) | torch.einsum('b...,b...->b...', {f}, {f'}) | torch.einsum('bhqk,bhkd->bqhd', {f4} @ {f4'}.transpose(-1, -2), {f4'}) | torch.einsum('...i,i->...', {f}, {v:f}) | torch.tensordot({f}, {w:2,f}, 1) | torch.einsum('bij,bjk,bkl->bil', {f3}, {f3'}.transpose(1, 2), {f3})",
    "places": "{f}.index_put((torch.tensor([0, 1, 0]),), {f}[:1], accumulate=True) | torch.zeros(6, {f2}.shape[-1], dtype={f2}.dtype).index_add(0, {f2}.argmax(-1).remainder(6), {f2}) | {x}[{x}.shape[0] - 1] | {x}[torch.arange({x}.shape[0] - 1, -1, -1)] | {x}.index_select(0, torch.arange({x}.shape[0] - 1, -1, -1)) | {x}[torch.arange({x}.shape[0]) // 2]"
    " | {f}.gather(0, {f}.argsort(0, stable=True)) | torch.searchsorted(torch.arange(-2.0, 3.0), {f}) | torch.bucketize({f}, torch.tensor([-1.0, 0.0, 1.0]), right=True) | torch.isin({i}, torch.tensor([1, 2])) | torch.count_nonzero({f} > {g}, -1) | {f}.cummax(-1)[0] | {f}.diff(dim=-1) | {f}.kthvalue(1, -1)[0] | {x}[..., [0], :] | {x}[[0, 0], ..., -1] | {x}.take(torch.tensor([0, 3, 1]))"
    " | {f}.logcumsumexp(-1) | {f}.msort() | {f}[..., torch.arange({f}.shape[-1]) % 2 == 0] | {f}.scatter(0, torch.zeros_like({f}, dtype=torch.int64)[:1], {g}) | {x}[torch.arange(0, {x}.shape[0], 2)] | {x}[:, torch.arange({x}.shape[1] - 1, 0, -1)] | {f}.repeat_interleave(torch.tensor([2, 1]), 0) | {x}[-1:] | {x}[:, -2:]",
    "split": "torch.cat({f}.split([1, {f}.shape[-1] - 1], -1)[::-1], -1) | {f}.tensor_split(2, -1)[0] | {f}[:, 0] * {f}[:, 1] | {f}[..., 0::2] + {f}[..., 1::2] | torch.stack([{f}[..., 0], {f}[..., 1]], -1) | {f}.unbind(1)[0] - {f}.unbind(1)[1] | torch.cat([{f}[:, :1], {f}[:, 1:]], 1) | {f}.chunk(3, -1)[-1]"
    " | torch.cat([{f}, {f'}], 0)[1:] | torch.cat([{x}[..., -1:], {x}[..., :-1]], -1) | torch.stack([{f}, {f'}]).sum(0) | torch.cat([{f}.relu(), -{f}], 1).chunk(2, 1)[0] | sum({f}.chunk(2, 1)) | torch.cat([{f}.mean(-1, keepdim=True), {f}], -1) | torch.cat([{x}, {x}], -1).unflatten(-1, (2, -1)) | {f}.unfold(-1, 3, 2).mean(-1) | F.unfold({f4}, 2)",
    "sizes": "{f} * {f}.shape[0] | {f} / {f}.shape[-1] ** 0.5 | {f}.reshape({f}.shape[0], 2, -1) | {f}.view(-1, {f}.shape[0]) | {f}.sum(0) / {f}.shape[0] | torch.ones({f}.shape[0]) * {p} | torch.arange({x}.shape[0]) | {f}.new_full(({f}.shape[0], 3), {g}) | {f} + torch.arange({f}.shape[-1]) | torch.linspace(0, 1, {f}.shape[-1]) * {f}"
    " | {f}.expand(2, *{f}.shape) | {f}[: {f}.shape[0] // 2 + 1] | F.pad({f}, [0, {f}.shape[0]]) | {f}.reshape(-1, *{f}.shape[2:]) | {f}.flatten(0, 1) | {f}.unsqueeze(-1).expand(*{f}.shape, 2).flatten(-2) | torch.eye({f}.shape[-1]) @ {f}.transpose(-1, -2) | torch.full(({f}.shape[-1],), {g}) + {f} | {x}.repeat_interleave({x}.shape[0], 0) | {f}.narrow(0, 0, 1)",
    "loss": "F.mse_loss({f}, {f'}, reduction='none') | F.l1_loss({f}, {f'}) | F.smooth_l1_loss({f}, {f'}, reduction='none') | F.kl_div(F.log_softmax({f}, -1), F.softmax({f'}, -1), reduction='batchmean') | F.cosine_similarity({f}, {f'}, dim=-1) | F.cross_entropy({f2}, {f2}.argmax(-1)) | torch.cdist({f3}, {f3'}) | F.pairwise_distance({f2}, {f2'})",
}

TEMPLATES: dict[str, list[str]] = {
    name: [t.strip() for t in text.replace("{b} | {b'}", "{b}.logical_or({b'})").split(" | ")]
    for name, text in FAMILIES.items()
}
