"""Inputs of models that read images and text: as many image tokens as the model makes states of the images."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from tests.models.configurations import VOCABULARY

#: Inputs by name, and the dynamic dimensions of each by axis.
Inputs = tuple[dict[str, torch.Tensor], dict[str, dict[int, str]]]


class Sizes(NamedTuple):
    """The number of texts, with an image each; the tokens of a text; rows and columns of patches of a packed image."""

    batch: int = 2
    text: int = 5
    grid: tuple[int, int] = (4, 4)


#: The sizes of the example, and other sizes for the comparison.
SIZES = (Sizes(), Sizes(3, 8, (4, 8)), Sizes(1, 6, (8, 4)), Sizes(2, 9, (4, 8)), Sizes(2, 3), Sizes())


def depend_on_each_other(model: nn.Module, model_type: str, kind: str) -> bool:
    """Whether a model's inputs are drawn by this module."""
    return (
        kind == "multimodal"
        or not OWN.keys().isdisjoint((f"{kind} {model_type}", type(model).__name__))
        or (kind == "base" and "grid_thw" in inspect.signature(model.forward).parameters)
    )


def draw_images_and_text(model: nn.Module, config: Any, model_type: str, kind: str, sizes: Sizes) -> Inputs:
    """Example inputs.

    Args:
        model: The model.
        config: Its configuration.
        model_type: Its name in transformers.
        kind: One of :data:`tests.models.measure.TABLES`.
        sizes: Their sizes.
    """
    parameters = inspect.signature(model.forward).parameters
    draw = OWN.get(type(model).__name__) or OWN.get(f"{kind} {model_type}") or OWN.get(model_type)
    inputs, axes = (draw or next(draw for name, draw in _BY_PARAMETER if name in parameters))(config, sizes)
    for name, other in _OTHER_NAMES.items():
        if name in inputs and name not in parameters and other in parameters:
            inputs[other], axes[other] = inputs.pop(name), axes[name]
    if "input_ids" not in inputs and (count := _count_states(model, inputs) // sizes.batch):
        image = torch.full((sizes.batch, count), _image_token(config))
        if (start := getattr(config, "vision_start_token_id", None)) not in (None, _image_token(config)):
            image = torch.cat([torch.full((sizes.batch, 1), start), image], 1)
        text = _ids(sizes.batch, sizes.text)
        text[text == _image_token(config)] = 4  # an image token, which would have no state
        inputs["input_ids"] = torch.cat([image, text], 1)
        axes["input_ids"] = {0: "batch", 1: "sequence"}
    if "input_features" in inputs:
        inputs = {name: value for name, value in inputs.items() if name in parameters}
    of_places = next((found for part in model.modules() if (found := getattr(part, "get_rope_index", None))), None)
    if of_places is not None:
        known = inspect.signature(of_places).parameters
        kinds = {
            name: (inputs["input_ids"] == _image_token(config)).long() for name in known if name.endswith("type_ids")
        }
        given = {**inputs, **kinds, "attention_mask": torch.ones_like(inputs["input_ids"])}
        inputs["position_ids"] = of_places(**{name: value for name, value in given.items() if name in known})[0]
        axes["position_ids"] = {1: "batch", 2: "sequence"}
        inputs.update((name, value) for name, value in kinds.items() if name in parameters)
        axes.update((name, axes["input_ids"]) for name in kinds if name in parameters)
    if model_type in _PREFIXED:
        inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
        inputs["token_type_ids"][:, -2:] = 1
        axes["token_type_ids"] = axes["input_ids"]
    if "decoder_input_ids" in parameters and "decoder_input_ids" not in inputs:
        inputs["decoder_input_ids"], axes["decoder_input_ids"] = (
            _ids(sizes.batch, sizes.text + 2),
            {0: "batch", 1: "target"},
        )
    return inputs, {name: axes[name] for name in inputs}


def _ids(*sizes: int) -> torch.Tensor:
    return torch.randint(4, VOCABULARY, sizes)


def _image_token(config: Any) -> int:
    names = ("image_token_id", "image_token_index", "image_patch_id", "video_token_index", "audio_token_id")
    parts = (config, getattr(config, "vlm_config", None))
    return next(token for part in parts for name in names if (token := getattr(part, name, None)) is not None)


def _count_states(model: Any, images: Mapping[str, torch.Tensor]) -> int:
    """The number of states that the model makes of images."""
    names = ("get_image_features", "get_video_features", "get_audio_features")
    parts = (getattr(model, "model", None), *model.modules())
    make = next((found for part in parts for name in names if (found := getattr(part, name, None))), None)
    if make is None:
        return 0
    known = inspect.signature(make).parameters
    with torch.no_grad():
        made = make(**{name: value for name, value in images.items() if name in known})
    states = getattr(made, "pooler_output", None)
    if states is None:
        states = made.deepstack_features[0][1] if hasattr(made, "deepstack_features") else made.last_hidden_state
    rows = states if isinstance(states, list | tuple) else [states]
    return sum(row.numel() // row.shape[-1] for row in rows)


def _vision(config: Any) -> Any:
    return getattr(config, "vision_config", None) or config


def _number(config: Any, *names: str, otherwise: int = 0) -> int:
    """The first of these settings that the vision part's configuration has, else the whole configuration."""
    for part in (_vision(config), config, _vision(getattr(config, "vlm_config", config))):
        for name in names:
            value = getattr(part, name, None)
            if value:
                return int(value if isinstance(value, int) else value[0])
    return otherwise


def _channels(config: Any) -> int:
    return _number(config, "num_channels", "in_channels", "in_chans", otherwise=3)


def _picture(config: Any, sizes: Sizes) -> Inputs:
    side = _number(config, "image_size", otherwise=32)
    return {"pixel_values": torch.randn(sizes.batch, _channels(config), side, side)}, {"pixel_values": {0: "batch"}}


def _packed(config: Any, sizes: Sizes) -> Inputs:
    """All images' patches in one row."""
    rows, columns = sizes.grid
    frames = _number(config, "temporal_patch_size", "patch_temporal", otherwise=1)
    width = _channels(config) * frames * _number(config, "patch_size") ** 2
    inputs = {
        "pixel_values": torch.randn(sizes.batch * rows * columns, width),
        "image_grid_thw": torch.tensor([[1, rows, columns]] * sizes.batch),
    }
    return inputs, {"pixel_values": {0: "patches"}, "image_grid_thw": {0: "batch"}}


def _tiles(config: Any, sizes: Sizes) -> Inputs:
    """Two tiles of each image."""
    side = _number(config, "image_size", otherwise=32)
    inputs = {
        "pixel_values": torch.randn(sizes.batch, 2, _channels(config), side, side),
        "pixel_attention_mask": torch.ones(sizes.batch, 2, side, side, dtype=torch.bool),
    }
    return inputs, {name: {0: "batch"} for name in inputs}


def _sound(config: Any, sizes: Sizes) -> Inputs:
    """Frames of mel bins, none of them padding."""
    bins = getattr(config.audio_config, "asr_config", config.audio_config).num_mel_bins
    names = ("input_features_mask", "feature_attention_mask", "padding_mask")
    inputs = {"input_features": torch.randn(sizes.batch, bins, 80)}
    inputs |= {name: torch.ones(sizes.batch, 80, dtype=torch.long) for name in names}
    return inputs, {name: {0: "batch"} for name in inputs}


def _sound_by_frames(config: Any, sizes: Sizes) -> Inputs:
    """Frames before mel bins."""
    inputs, axes = _sound(config, sizes)
    return inputs | {"input_features": inputs["input_features"].transpose(1, 2).contiguous()}, axes


def _heard(config: Any, sizes: Sizes) -> Inputs:
    """A token for four frames."""
    inputs, axes = _sound(config, sizes)
    sound = torch.full((sizes.batch, 20), config.audio_token_id)
    inputs["input_ids"] = torch.cat([sound, _ids(sizes.batch, sizes.text)], 1)
    return inputs, {**axes, "input_ids": {0: "batch", 1: "sequence"}}


def _sized(config: Any, sizes: Sizes) -> Inputs:
    """Images with their heights and widths."""
    inputs, axes = _picture(config, sizes)
    inputs["image_sizes"] = torch.tensor([list(inputs["pixel_values"].shape[-2:])] * sizes.batch)
    return inputs, {**axes, "image_sizes": {0: "batch"}}


def _whole_and_part(config: Any, sizes: Sizes) -> Inputs:
    """Each image as it is, and its tiles: here one."""
    inputs, axes = _sized(config, sizes)
    return inputs | {"pixel_values": torch.stack([inputs["pixel_values"]] * 2, 1)}, axes


def _positioned(config: Any, sizes: Sizes) -> Inputs:
    """Rows of patches, with column and row of each."""
    rows, columns = sizes.grid
    side = _number(config, "model_patch_size", "patch_size")
    places = torch.stack([torch.arange(columns).repeat(rows), torch.arange(rows).repeat_interleave(columns)], -1)
    inputs = {
        "pixel_values": torch.rand(sizes.batch, rows * columns, 3 * side**2),
        "image_position_ids": places.repeat(sizes.batch, 1, 1),
    }
    return inputs, {name: {0: "batch", 1: "patches"} for name in inputs}


def _packed_squares(config: Any, sizes: Sizes) -> Inputs:
    """As :func:`_packed`, with an axis each for channels, rows and columns of a patch."""
    inputs, axes = _packed(config, sizes)
    side = _number(config, "patch_size")
    return inputs | {"pixel_values": inputs["pixel_values"].unflatten(1, (-1, side, side))}, axes


def _packed_tokens(config: Any, sizes: Sizes) -> Inputs:
    """As :func:`_packed`, with the pixels of each image token together, and sizes in image tokens."""
    inputs, axes = _packed(config, sizes)
    side = _vision(config).spatial_merge_size * _number(config, "patch_size")
    return inputs | {"pixel_values": torch.randn(len(inputs["pixel_values"]), side, side, 3)}, axes


def _packed_rows(config: Any, sizes: Sizes) -> Inputs:
    """As :func:`_packed`, with rows and columns of each image, and no frames."""
    inputs, axes = _packed(config, sizes)
    inputs["image_grid_hw"] = inputs.pop("image_grid_thw")[:, 1:]
    return inputs, {**axes, "image_grid_hw": {0: "batch"}}


def _packed_of_sizes(config: Any, sizes: Sizes) -> Inputs:
    """As :func:`_packed`, with the number of merged rows of patches of each image."""
    inputs, axes = _packed(config, sizes)
    return inputs | {"image_merge_sizes": torch.full((sizes.batch,), 2)}, axes | {"image_merge_sizes": {0: "batch"}}


def _masked_tiles(config: Any, sizes: Sizes) -> Inputs:
    """As :func:`_tiles`, with a mask of tiles, not of pixels."""
    inputs, axes = _tiles(config, sizes)
    return inputs | {"pixel_attention_mask": torch.ones(sizes.batch, 2, dtype=torch.bool)}, axes


def _rows(config: Any, sizes: Sizes) -> Inputs:
    """Images as rows of patches."""
    rows, columns = sizes.grid
    width = _channels(config) * _number(config, "patch_size") ** 2
    inputs = {
        "pixel_values": torch.randn(sizes.batch, rows * columns, width),
        "spatial_shapes": torch.tensor([[rows, columns]] * sizes.batch),
        "pixel_attention_mask": torch.ones(sizes.batch, rows * columns, dtype=torch.long),
    }
    return inputs, {
        "pixel_values": {0: "batch", 1: "patches"},
        "spatial_shapes": {0: "batch"},
        "pixel_attention_mask": {0: "batch", 1: "patches"},
    }


def _of(**shapes: tuple[str | int, ...]) -> Callable[[Any, Sizes], Inputs]:
    """Inputs of these shapes: ids and masks (all ones) by their names, floats otherwise; ``image`` is the size of images.

    Args:
        shapes: Numbers, and the names of dynamic dimensions.
    """

    def draw(config: Any, sizes: Sizes) -> Inputs:
        rows, columns = sizes.grid
        known = {"batch": sizes.batch, "sequence": sizes.text, "patches": rows * columns, "protein": sizes.text + 3}
        known["question"] = sizes.text + 1
        side = _number(config, "image_size", otherwise=32)
        inputs, axes = {}, {}
        for name, shape in shapes.items():
            size = [known.get(dim, side) if isinstance(dim, str) else dim for dim in shape]
            ones = name.endswith("mask")
            inputs[name] = (
                torch.ones(size).long() if ones else _ids(*size) if name.endswith("ids") else torch.rand(size)
            )
            axes[name] = {axis: dim for axis, dim in enumerate(shape) if isinstance(dim, str) and dim in known}
        return inputs, axes

    return draw


_PICTURE, _FILM, _TEXT = ("batch", 3, "image", "image"), ("batch", 4, 3, "image", "image"), ("batch", "sequence")
#: The question that InstructBLIP gets about a picture or a film.
_QUESTION = ("batch", "question")


def _side_by_side(config: Any, sizes: Sizes) -> Inputs:
    """An image in two tiles."""
    inputs, axes = _of(
        pixel_values=("batch", 1, 2, 3, "image", "image"),
        aspect_ratio_mask=("batch", 1, 2),
        input_ids=_TEXT,
        cross_attention_mask=("batch", "sequence", 1, 2),
    )(config, sizes)
    return inputs | {"aspect_ratio_ids": torch.full((sizes.batch, 1), 2)}, axes | {"aspect_ratio_ids": {0: "batch"}}


def _regions(config: Any, sizes: Sizes) -> Inputs:
    """Features of ten parts of each image, and their positions."""
    draw = _of(
        input_ids=_TEXT,
        visual_feats=("batch", 10, config.visual_feat_dim),
        visual_pos=("batch", 10, config.visual_pos_dim),
    )
    return draw(config, sizes)


def _cameras(config: Any, sizes: Sizes) -> Inputs:
    """Images of two cameras, and the noise from which actions are made."""
    vision = config.vlm_config.vision_config
    inputs, axes = _of(
        state=("batch", config.max_state_dim),
        noise=("batch", config.chunk_size, config.max_action_dim),
        timestep=("batch",),
        pixel_values=("batch", 2, 3, vision.image_size, vision.image_size),
    )(config, sizes)
    image = torch.full((sizes.batch, 2 * (vision.image_size // vision.patch_size) ** 2), _image_token(config))
    inputs["pixel_attention_mask"] = torch.ones(sizes.batch, 2, dtype=torch.bool)
    inputs["input_ids"] = torch.cat([image, _ids(sizes.batch, sizes.text)], 1)
    return inputs, axes | {"pixel_attention_mask": {0: "batch"}, "input_ids": {0: "batch", 1: "sequence"}}


def _after(draw: Callable[[Any, Sizes], Inputs], count: int) -> Callable[[Any, Sizes], Inputs]:
    """The inputs of ``draw`` with text after ``count`` image tokens."""

    def drawn(config: Any, sizes: Sizes) -> Inputs:
        inputs, axes = draw(config, sizes)
        image = torch.full((sizes.batch, count), _image_token(config))
        inputs["input_ids"] = torch.cat([image, _ids(sizes.batch, sizes.text)], 1)
        return inputs, {**axes, "input_ids": {0: "batch", 1: "sequence"}}

    return drawn


def _flattened(config: Any, sizes: Sizes) -> Inputs:
    """Row, column and pixels of each patch."""
    rows, columns = sizes.grid
    places = [torch.arange(rows).repeat_interleave(columns) + 1, torch.arange(columns).repeat(rows) + 1]
    width = config.vision_config.patch_embed_hidden_size
    patches = torch.cat(
        [torch.stack(places, 1).repeat(sizes.batch, 1, 1), torch.randn(sizes.batch, rows * columns, width)], 2
    )
    return {"flattened_patches": patches}, {"flattened_patches": {0: "batch", 1: "patches"}}


def _in_places(draw: Callable[[Any, Sizes], Inputs]) -> Callable[[Any, Sizes], Inputs]:
    """The inputs of ``draw`` with a mask of the places in the text for the image's states."""

    def drawn(config: Any, sizes: Sizes) -> Inputs:
        inputs, axes = draw(config, sizes)
        inputs["input_ids"] = _ids(sizes.batch, sizes.text + config.latent_query_num)
        places = torch.arange(sizes.text + config.latent_query_num) < config.latent_query_num
        inputs["image_embeds_position_mask"] = places.long().repeat(sizes.batch, 1)
        text = {0: "batch", 1: "sequence"}
        return inputs, {**axes, "input_ids": text, "image_embeds_position_mask": text}

    return drawn


def _strip(config: Any, sizes: Sizes) -> Inputs:
    """All images' patches as one row of one image."""
    rows, columns = sizes.grid
    side = _number(config, "patch_size")
    inputs = {
        "pixel_values": torch.randn(1, 3, side, sizes.batch * rows * columns * side),
        "target_sizes": torch.tensor([[rows, columns]] * sizes.batch),
    }
    return inputs, {"pixel_values": {3: f"{side}*patches"}, "target_sizes": {0: "batch"}}


def _pooled(config: Any, sizes: Sizes) -> Inputs:
    """A crop of each image, and the four patches of each state."""
    count = config.vision_config.num_position_embeddings
    width = 3 * config.vision_config.patch_size**2
    inputs = {
        "pixel_values": torch.randn(sizes.batch, 1, count, width),
        "image_token_pooling": torch.arange(sizes.batch * count).view(-1, 4),
        "image_grids": torch.tensor([[2, 2, 0, 0]] * sizes.batch),
    }
    return inputs, {"pixel_values": {0: "batch"}, "image_token_pooling": {0: "tokens"}, "image_grids": {0: "batch"}}


def _volumes(config: Any, sizes: Sizes) -> Inputs:
    """A patch of two frames for each image."""
    side = config.vision_config.patch_size
    return {"pixel_values": torch.randn(sizes.batch, 2, side, side, 3)}, {"pixel_values": {0: "batch"}}


def _actions(config: Any, sizes: Sizes) -> Inputs:
    """Images of two cameras, and the states of actions."""
    inputs, axes = _cameras(config, sizes)
    kept = {name: inputs[name] for name in ("pixel_values", "pixel_attention_mask", "input_ids")}
    kept["action_embeds"] = torch.randn(sizes.batch, sizes.text + 3, config.dit_config.hidden_size)
    return kept, {**axes, "action_embeds": {0: "batch", 1: "actions"}}


def _question_and_text(config: Any, sizes: Sizes) -> Inputs:
    """A question, two separators, a text and a third separator."""
    ids = _ids(sizes.batch, sizes.text + 6)
    ids[:, [4, 5, -1]] = config.sep_token_id
    return {"input_ids": ids}, {"input_ids": {0: "batch", 1: "sequence"}}


def _question_and_answers(config: Any, sizes: Sizes) -> Inputs:
    """A question with each of three answers, as :func:`_question_and_text` has them."""
    ids = torch.stack([_question_and_text(config, sizes)[0]["input_ids"] for _ in range(3)], 1)
    return {"input_ids": ids}, {"input_ids": {0: "batch", 2: "sequence"}}


def _questions(config: Any, sizes: Sizes) -> Inputs:
    """Texts with the positions of two questions in each."""
    inputs, axes = _of(input_ids=_TEXT)(config, sizes)
    return inputs | {"question_positions": torch.tensor([[0, 2]] * sizes.batch)}, axes | {
        "question_positions": {0: "batch"}
    }


#: Model types whose prefix attends to all of itself by token types: without them PyTorch's fused attention has no mask,
#: and any other attention has a causal mask.
_PREFIXED = ("paligemma",)
#: The names of inputs of whole models, and their names in encoders of images.
_OTHER_NAMES = {
    "image_grid_thw": "grid_thw",
    "image_merge_sizes": "merge_sizes",
    "image_position_ids": "pixel_position_ids",
    "pixel_values": "hidden_states",
}
#: Functions that draw inputs, by a parameter of ``forward``: the first parameter that the model has.
_BY_PARAMETER: tuple[tuple[str, Callable[[Any, Sizes], Inputs]], ...] = (
    ("image_grid_thw", _packed),
    ("grid_thw", _packed),
    ("image_position_ids", _positioned),
    ("spatial_shapes", _rows),
    ("pixel_attention_mask", _tiles),
    ("pixel_values", _picture),
    ("input_features", _sound),
    ("input_ids", _of(input_ids=_TEXT)),
)
_TOKENS_AND_BOXES = _of(input_ids=_TEXT, bbox=("batch", "sequence", 8))
_DOCUMENT = _of(pixel_values=_PICTURE, input_ids=_TEXT, bbox=("batch", "sequence", 4))
#: Functions that draw inputs, by model type, by kind and model type, or by class.
OWN: Mapping[str, Callable[[Any, Sizes], Inputs]] = {
    **dict.fromkeys("git vilt".split(), _of(pixel_values=_PICTURE, input_ids=_TEXT)),
    "blip": _of(pixel_values=_PICTURE, input_ids=_TEXT),
    **dict.fromkeys(
        "vision-encoder-decoder pp_formulanet".split(), _of(pixel_values=_PICTURE, decoder_input_ids=_TEXT)
    ),
    **dict.fromkeys("lighton_ocr mistral3 mistral_large4 emu3".split(), _sized),
    **dict.fromkeys("llava_next llava_next_video llava_onevision granite4_vision".split(), _whole_and_part),
    **dict.fromkeys("kimi_k25 paddleocr_vl".split(), _packed_squares),
    **dict.fromkeys("minicpm_ocr minicpmv4_6 minicpmv4_7".split(), _strip),
    "diffusion_gemma": _positioned,
    "granite_docling": _masked_tiles,
    "inkling2": _packed_tokens,
    "nemotron_h_omni": _packed_rows,
    "video_llama_3": _packed_of_sizes,
    "deepseek_vl_hybrid": _of(pixel_values=_PICTURE, high_res_pixel_values=_PICTURE),
    "evolla": _of(
        input_ids=_TEXT,
        attention_mask=_TEXT,
        protein_input_ids=("batch", "protein"),
        protein_attention_mask=("batch", "protein"),
    ),
    "fuyu": _of(pixel_values=("batch", "patches", 192)),
    **dict.fromkeys(
        ("idefics", "base idefics"),
        _of(
            pixel_values=("batch", 2, 3, "image", "image"),
            input_ids=_TEXT,
            image_attention_mask=("batch", "sequence", 2),
        ),
    ),
    "inkling_mm_model": _volumes,
    "instructblip": _of(pixel_values=_PICTURE, qformer_input_ids=_QUESTION),
    "instructblipvideo": _of(pixel_values=_FILM, qformer_input_ids=_QUESTION),
    "kosmos-2": _in_places(_picture),
    "kosmos-2.5": _in_places(_flattened),
    "mllama": _side_by_side,
    "mistral4": _of(input_ids=_TEXT),
    "molmo2": _pooled,
    **dict.fromkeys("colmodernvbert perception_lm".split(), _of(pixel_values=("batch", 2, 3, "image", "image"))),
    "nemo_speechlm": _sound_by_frames,
    "pi0": _cameras,
    "qwen2_audio": _heard,
    "pix2struct": _flattened,
    **dict.fromkeys(("base lxmert", "pretraining lxmert", "classification lxmert"), _regions),
    **dict.fromkeys(("base bros", "classification bros"), _TOKENS_AND_BOXES),
    **dict.fromkeys(
        (f"base {name}" for name in "aimv2 groupvit owlv2 owlvit vilt vision-text-dual-encoder".split()),
        _of(pixel_values=_PICTURE, input_ids=_TEXT),
    ),
    **dict.fromkeys((f"base minicpm{name}_vision" for name in ("_ocr", "v4_6", "v4_7")), _strip),
    "base blip_2_qformer": _of(query_embeds=("batch", 4, 32), encoder_hidden_states=("batch", "patches", 32)),
    "base gemma4_vision": _positioned,
    "base inkling2_vision": _packed_tokens,
    "base instructblip": _after(_of(pixel_values=_PICTURE, qformer_input_ids=_QUESTION), 4),
    "base instructblipvideo": _after(_of(pixel_values=_FILM, qformer_input_ids=_QUESTION), 16),
    "base kimi_k25_vision": _packed_squares,
    "base kosmos-2": _in_places(_picture),
    "base video_llama_3_vision": _packed_of_sizes,
    **dict.fromkeys(("udop", "base udop"), _DOCUMENT),
    "LongformerForQuestionAnswering": _question_and_text,
    "LongformerForMultipleChoice": _question_and_answers,
    "base pi0": _actions,
    "pretraining splinter": _questions,
    "speech fun_asr_nano": _of(input_features=("batch", "patches", 112), input_features_mask=("batch", "patches")),
    "speech vibevoice": _after(_of(input_values=("batch", 1, 6400), padding_mask=("batch", 6400)), 2),
}
