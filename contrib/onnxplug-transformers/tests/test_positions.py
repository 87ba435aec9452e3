"""Positions of Funnel and the masks of CPM-Ant and FSMT at any length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import onnxplug

#: Tolerances that are looser than torch.testing's for float32, each with its reason.
LOOSER = {"reformer": ({"rtol": 1e-3, "atol": 1e-4}, "two layers of hashed attention, whose sums are in another order")}


@pytest.mark.parametrize("of_class", [True, False])
@pytest.mark.parametrize("cut", [True, False])
def test_distances_are_those_of_transformers(of_class: bool, cut: bool) -> None:
    from onnxplug_transformers.positions import get_position_embeds
    from transformers.models.funnel import modeling_funnel

    config = modeling_funnel.FunnelConfig(
        d_model=8, block_sizes=[1, 1, 1], separate_cls=of_class, truncate_seq=cut, attention_type="relative_shift"
    )
    structure = modeling_funnel.FunnelAttentionStructure(config).eval()
    for length in range(9, 24):
        known = torch.float32, torch.device("cpu")
        expected = structure.get_position_embeds(length, *known)
        torch.testing.assert_close(get_position_embeds(structure, length, *known), expected)


def _funnel(attention: str, of_class: bool) -> nn.Module:
    from transformers.models.funnel import modeling_funnel

    sizes = {"vocab_size": 99, "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 32, "num_decoder_layers": 1}
    settings = {"attention_type": attention, "separate_cls": of_class, "block_sizes": [1, 1, 1]}
    return modeling_funnel.FunnelModel._from_config(modeling_funnel.FunnelConfig(**sizes, **settings))


def _cpmant() -> nn.Module:
    from transformers.models.cpmant import modeling_cpmant

    sizes = {"vocab_size": 99, "hidden_size": 16, "num_attention_heads": 2, "dim_head": 8, "dim_ff": 32}
    settings = {"num_hidden_layers": 1, "prompt_length": 4, "prompt_types": 4, "use_cache": False}
    return modeling_cpmant.CpmAntModel._from_config(modeling_cpmant.CpmAntConfig(**sizes, **settings))


@pytest.mark.long
@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (_funnel, ("relative_shift", True)),
        pytest.param(_funnel, ("relative_shift", False), marks=pytest.mark.long),
        (_cpmant, ()),
    ],
)
def test_texts_of_any_length(make: Any, settings: tuple[Any, ...]) -> None:
    torch.manual_seed(0)
    model = make(*settings).eval()
    program = onnxplug.to_onnx(
        model,
        kwargs={"input_ids": torch.randint(1, 99, (2, 9))},
        dynamic_shapes={"input_ids": {0: "batch", 1: "sequence"}},
    )
    for size in ((2, 9), (3, 14), (1, 21)):
        ids = torch.randint(1, 99, size)
        ids[-1, :2] = 0  # padding on the left
        with torch.no_grad():
            expected = model(input_ids=ids)[0]
        torch.testing.assert_close(program(input_ids=ids)[0], expected)


def test_padding_of_any_batch() -> None:
    """FSMT's mask of padding stays where a batch has none."""
    from transformers.models.fsmt import modeling_fsmt

    sizes = {"src_vocab_size": 99, "tgt_vocab_size": 99, "d_model": 16, "max_position_embeddings": 64}
    layers = {f"{part}_{name}": n for part in ("encoder", "decoder") for name, n in (("layers", 1), ("ffn_dim", 24))}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "langs": ["en", "de"]}
    model = modeling_fsmt.FSMTModel(modeling_fsmt.FSMTConfig(**sizes, **layers, **heads, use_cache=False)).eval()

    def texts(rows: int, length: int, padding: int) -> dict[str, torch.Tensor]:
        ids, target = torch.randint(4, 99, (rows, length)), torch.randint(4, 99, (rows, length - 2))
        for texts in (ids, target):
            texts[-1, texts.shape[1] - padding :] = 1
        return {"input_ids": ids, "decoder_input_ids": target, "attention_mask": (ids != 1).long()}

    dynamic = {
        "input_ids": ("batch", "source"),
        "decoder_input_ids": ("batch", "target"),
        "attention_mask": ("batch", "source"),
    }
    program = onnxplug.to_onnx(
        model, kwargs=texts(2, 9, 0), dynamic_shapes={name: dict(enumerate(axes)) for name, axes in dynamic.items()}
    )
    for case in (texts(2, 9, 2), texts(3, 14, 0), texts(1, 7, 3)):
        with torch.no_grad():
            expected = model(**case)[0]
        torch.testing.assert_close(program(**case)[0], expected)


def _conformer(name: str) -> tuple[nn.Module, dict[str, torch.Tensor], Any]:
    import transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    config = getattr(transformers, f"{name}Config")(
        **sizes, position_embeddings_type="rotary", conv_depthwise_kernel_size=3
    )
    module = getattr(transformers.models, name.lower().replace("wav2vec2", "wav2vec2_"))
    modeling = getattr(module, f"modeling_{name.lower().replace('wav2vec2', 'wav2vec2_')}")
    encoder = getattr(modeling, f"{name}Encoder")(config)
    states = {"hidden_states": torch.randn(2, 9, 16)}
    return encoder, states, {"hidden_states": {0: "batch", 1: "frames"}}


def _clvp() -> tuple[nn.Module, dict[str, torch.Tensor], Any]:
    from transformers.models.clvp import modeling_clvp

    sizes = {"vocab_size": 99, "hidden_size": 64, "intermediate_size": 24, "projection_dim": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "bos_token_id": 97, "eos_token_id": 98}
    model = modeling_clvp.ClvpEncoder(modeling_clvp.ClvpEncoderConfig(**sizes, **heads))
    return model, {"input_ids": torch.randint(1, 90, (2, 9))}, {"input_ids": {0: "batch", 1: "sequence"}}


@pytest.mark.parametrize(
    ("make", "settings"), [(_clvp, ()), (_conformer, ("Wav2Vec2Conformer",)), (_conformer, ("Wav2Vec2Bert",))]
)
def test_rotary_positions_of_an_earlier_call(make: Any, settings: tuple[Any, ...]) -> None:
    """A model that was called before keeps its positions for that length; the exported model takes any length."""
    torch.manual_seed(0)
    model, inputs, dynamic = make(*settings)
    model.eval()
    with torch.no_grad():
        model(**inputs)
    kept = {name: vars(part).get("cached_sequence_length") for name, part in model.named_modules()}
    assert 9 in kept.values()
    program = onnxplug.to_onnx(model, kwargs=inputs, dynamic_shapes=dynamic)
    assert kept == {name: vars(part).get("cached_sequence_length") for name, part in model.named_modules()}
    for batch, length in ((2, 9), (1, 5), (3, 21)):
        changed = {
            name: torch.randn(batch, length, *one.shape[2:])
            if one.is_floating_point()
            else torch.randint(1, 90, (batch, length))
            for name, one in inputs.items()
        }
        program.verify(kwargs=changed, seeds=())


def _reformer(**changes: Any) -> nn.Module:
    import transformers

    sizes: dict[str, Any] = {"vocab_size": 50, "hidden_size": 32, "num_attention_heads": 2, "attention_head_size": 16}
    sizes |= {"feed_forward_size": 32, "axial_pos_embds_dim": [8, 24], "axial_pos_shape": [8, 5], "is_decoder": False}
    sizes |= {
        "max_position_embeddings": 40,
        "lsh_attn_chunk_length": 64,
        "local_attn_chunk_length": 64,
        "use_cache": False,
    }
    config = transformers.ReformerConfig(**{**sizes, **changes}, attn_layers=["local", "lsh"])
    model = transformers.ReformerModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.eval()
    return model


def test_positions_in_a_grid_of_any_batch() -> None:
    torch.manual_seed(0)
    names = ("input_ids", "attention_mask", "position_ids")

    def case(batch: int, length: int) -> dict[str, torch.Tensor]:
        places = torch.stack([torch.randperm(40)[:length] for _ in range(batch)])
        mask = torch.arange(length) < torch.randint(1, length + 1, (batch, 1))
        return dict(zip(names, (torch.randint(1, 50, (batch, length)), mask.long(), places), strict=True))

    dynamic = {name: {0: "batch", 1: "sequence"} for name in names}
    program = onnxplug.to_onnx(_reformer(), kwargs=case(2, 9), dynamic_shapes=dynamic)
    for batch, length in ((1, 9), (3, 1), (5, 40), (2, 17)):
        program.verify(kwargs=case(batch, length), seeds=(), **LOOSER["reformer"][0])


def test_seeded_hashes_of_any_batch() -> None:
    """Texts of several chunks are hashed by rotations, which are the same in each call by the configured seed."""
    torch.manual_seed(0)
    chunks = {"lsh_attn_chunk_length": 8, "local_attn_chunk_length": 8, "num_buckets": 4, "hash_seed": 3}
    dynamic = {"input_ids": {0: "batch", 1: "sequence"}}
    example = {"input_ids": torch.randint(1, 50, (2, 24))}
    program = onnxplug.to_onnx(_reformer(**chunks), kwargs=example, dynamic_shapes=dynamic)
    for batch, length in ((2, 24), (1, 16), (3, 40)):
        program.verify(kwargs={"input_ids": torch.randint(1, 50, (batch, length))}, seeds=(), **LOOSER["reformer"][0])


def test_embeddings_in_a_grid_are_those_of_transformers() -> None:
    from onnxplug_transformers.positions import positions_of_any_length

    torch.manual_seed(0)
    embeddings = _reformer().embeddings.position_embeddings  # type: ignore[union-attr]
    for case in (torch.randint(0, 40, (3, 7)), torch.arange(40)[None], torch.zeros(2, 1, dtype=torch.int64)):
        with torch.no_grad(), positions_of_any_length():
            result = embeddings(case)  # type: ignore[operator]
        torch.testing.assert_close(result, embeddings(case), rtol=0, atol=0)  # type: ignore[operator]
    for case in (torch.zeros(1, 41, dtype=torch.int64), torch.full((1, 2), 40), torch.full((1, 2), -1)):
        with pytest.raises((ValueError, IndexError, RuntimeError)):
            embeddings(case)  # type: ignore[operator]
        with positions_of_any_length(), pytest.raises((ValueError, IndexError, RuntimeError)):
            embeddings(case)  # type: ignore[operator]
