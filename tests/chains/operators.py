"""The steps that a random chain is made of, as lines of PyTorch.

A step is a template of an expression over the values that the chain has so far. ``{f}`` stands for a floating-point
value, ``{f4}`` for one of rank 4 (``{f3}``, ``{f2}`` likewise), ``{i}`` for an integer one, ``{b}`` for a boolean one
and ``{x}`` for any; ``{p}``, ``{g}``, ``{h}`` and ``{q}`` are a positive number, any number, a small size and a small
integer of either sign. ``{w:2,f}`` is a parameter whose rank is 2 and whose last-but-one size is that of the last axis
of ``f``. A template that eager PyTorch refuses for the shapes at hand is drawn again, so none states its conditions.
"""

from __future__ import annotations

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
    "matmul": "{f} @ {f'}.transpose(-1, -2) | torch.matmul({f}, {f'}) | {f} @ {w:2,f} | F.linear({f}, {w:2,f}.t()) | F.linear({f}, {w:2,f}.t(), {g} * torch.ones(5))"
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
    " | F.interpolate({f4}, size=(4, 4), mode='bicubic') | F.interpolate({f3}, scale_factor=2.0, mode='linear') | F.pixel_shuffle({f4}, 2) | F.pixel_unshuffle({f4}, 2) | F.interpolate({f4}, size=(5, 3), mode='nearest-exact') | F.upsample({f4}, scale_factor=3)",
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
    "loss": "F.mse_loss({f}, {f'}, reduction='none') | F.l1_loss({f}, {f'}) | F.smooth_l1_loss({f}, {f'}, reduction='none') | F.kl_div(F.log_softmax({f}, -1), F.softmax({f'}, -1), reduction='batchmean') | F.cosine_similarity({f}, {f'}, dim=-1) | F.cross_entropy({f2}, {f2}.argmax(-1)) | torch.cdist({f3}, {f3'}) | F.pairwise_distance({f2}, {f2'})",
}

TEMPLATES: dict[str, list[str]] = {
    name: [t.strip() for t in text.replace("{b} | {b'}", "{b}.logical_or({b'})").split(" | ")]
    for name, text in FAMILIES.items()
}
