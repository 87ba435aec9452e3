"""`onnxplug export diffusers:FOLDER`: each model of a pipeline gives PyTorch's numbers, at sizes that no example had."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch

from onnxplug.cli.app import run
from onnxplug.runtime import inference_session

diffusers = pytest.importorskip("diffusers")

#: Tolerances looser than torch.testing's, and why.
LOOSER: dict[str, tuple[dict[str, float], str]] = {
    "models": (
        {"rtol": 1e-4, "atol": 1e-4},
        "convolutions, norms and attention of a whole model, summed in another order",
    ),
}
#: Values of the dimensions; both sets differ from the example's, and the second has odd values.
SIZES = (
    {"batch": 1, "height": 12, "width": 8, "sequence": 5, "patches": 6, "rows": 4, "columns": 2},
    {"batch": 3, "height": 7, "width": 9, "sequence": 11, "patches": 15, "rows": 3, "columns": 7},
)
KINDS = [
    "stable-diffusion",
    "flux",
    *[
        pytest.param(kind, marks=pytest.mark.long)
        for kind in ("latent-consistency", "stable-diffusion-xl", "stable-diffusion-3")
    ],
]
FOLDERS = {
    "stable-diffusion": {"text_encoder", "unet", "vae_encoder", "vae_decoder"},
    "latent-consistency": {"text_encoder", "unet", "vae_encoder", "vae_decoder"},
    "stable-diffusion-xl": {"text_encoder", "text_encoder_2", "unet", "vae_encoder", "vae_decoder"},
    "stable-diffusion-3": {
        "text_encoder",
        "text_encoder_2",
        "text_encoder_3",
        "transformer",
        "vae_encoder",
        "vae_decoder",
    },
    "flux": {"text_encoder", "text_encoder_2", "transformer", "vae_encoder", "vae_decoder"},
}


def inputs_of(session: Any, sizes: dict[str, int]) -> dict[str, torch.Tensor]:
    """Random inputs of these sizes."""
    inputs: dict[str, torch.Tensor] = {}
    steps = 1 if "img_ids" in [value.name for value in session.get_inputs()] else 1000  # Flux has shares of 1000 steps
    for value in session.get_inputs():
        shape = [eval(d, {}, dict(sizes)) if isinstance(d, str) else d for d in value.shape]
        if "int64" in value.type:
            inputs[value.name] = torch.randint(0, 99, shape)
        else:
            inputs[value.name] = steps * torch.rand(shape) if value.name == "timestep" else torch.randn(shape)
    return inputs


def expected(model: Any, name: str, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The results of the pipeline's own model."""
    with torch.no_grad():
        if name == "vae_encoder":
            return {"latent_parameters": model.encode(inputs["sample"]).latent_dist.parameters}
        if name == "vae_decoder":
            return {"sample": model.decode(inputs["latent_sample"]).sample}
        if name == "unet":
            added = {key: inputs.pop(key) for key in ("text_embeds", "time_ids") if key in inputs}
            return {"out_sample": model(**inputs, added_cond_kwargs=added).sample}
        if name == "transformer":
            return {"out_hidden_states": model(**inputs).sample}
        found = model(**inputs, output_hidden_states=True)
    states = {f"hidden_states.{layer}": state for layer, state in enumerate(found.hidden_states)}
    return states | {key: value for key, value in found.items() if key != "hidden_states"}


@pytest.mark.parametrize("kind", KINDS)
def test_pipelines(kind: str, pipeline: Callable[[str], Path], tmp_path: Path, recwarn: Any) -> None:
    folder, output = pipeline(kind), tmp_path / "onnx"
    assert run(["export", f"diffusers:{folder}", "-o", str(output), "--verify"]) == 0
    assert [str(warning.message) for warning in recwarn if "is right only where" in str(warning.message)] == []
    assert {path.parent.name for path in output.glob("*/model.onnx")} == FOLDERS[kind]
    index = json.loads((folder / "model_index.json").read_text())
    assert json.loads((output / "model_index.json").read_text()) == index
    assert (output / "scheduler" / "scheduler_config.json").is_file()
    assert (output / "tokenizer" / "tokenizer_config.json").is_file()
    for name in sorted(FOLDERS[kind]):
        onnx.checker.check_model(output / name / "model.onnx")
        assert (output / name / "config.json").is_file()
        library, kind_of = index["vae" if name.startswith("vae") else name]
        source = folder / ("vae" if name.startswith("vae") else name)
        model = getattr(__import__(library), kind_of).from_pretrained(source).eval()
        session = inference_session(output / name / "model.onnx")
        if kind_of.startswith("CLIP"):  # optimum's text encoders look for these names
            first = "text_embeds" if kind_of.endswith("Projection") else "last_hidden_state"
            names = [value.name for value in session.get_outputs()]
            assert names[0] == first
            assert {f"hidden_states.{layer}" for layer in range(3)} < set(names)
        for sizes in SIZES:
            inputs = inputs_of(session, sizes)
            outputs = session.run(None, {key: tensor.numpy() for key, tensor in inputs.items()})
            exact = expected(model, name, dict(inputs))
            for value, result in zip(session.get_outputs(), outputs, strict=True):
                torch.testing.assert_close(torch.from_numpy(result), exact[value.name], **LOOSER["models"][0])


def check_unet(session: Any, folder: Path) -> None:
    """The UNet of a pipeline gives the numbers of diffusers at all sizes."""
    model = diffusers.UNet2DConditionModel.from_pretrained(folder / "unet").eval()
    for sizes in SIZES:
        inputs = inputs_of(session, sizes)
        (result,) = session.run(None, {key: tensor.numpy() for key, tensor in inputs.items()})
        exact = expected(model, "unet", dict(inputs))["out_sample"]
        torch.testing.assert_close(torch.from_numpy(result), exact, **LOOSER["models"][0])


def test_a_pipeline_that_refines(pipeline: Callable[[str], Path], tmp_path: Path) -> None:
    """Its UNet takes five numbers of sizes, as the pipeline's own settings say."""
    folder, output = pipeline("refiner"), tmp_path / "onnx"
    assert run(["export", f"diffusers:{folder}", "-o", str(output)]) == 0
    session = inference_session(output / "unet" / "model.onnx")
    shapes = {value.name: value.shape[1:] for value in session.get_inputs()}
    assert (shapes["text_embeds"], shapes["time_ids"]) == ([24], [5])
    check_unet(session, folder)


def texts_of_another_width(folder: Path, **settings: Any) -> Path:
    """The pipeline with a UNet that projects texts."""
    path = folder / "unet"
    unet = diffusers.UNet2DConditionModel.from_config(diffusers.UNet2DConditionModel.load_config(path), **settings)
    unet.save_pretrained(path)
    return folder


def test_a_unet_that_projects_texts(pipeline: Callable[[str], Path], tmp_path: Path) -> None:
    folder = texts_of_another_width(pipeline("stable-diffusion"), encoder_hid_dim=24, encoder_hid_dim_type="text_proj")
    assert run(["export", f"diffusers:{folder}", "-o", str(tmp_path / "onnx")]) == 0
    session = inference_session(tmp_path / "onnx" / "unet" / "model.onnx")
    check_unet(session, folder)


def left(path: Path) -> list[Path]:
    return sorted(path.rglob("*"))


def no_folder(folder: Path) -> Path:
    return folder / "nothing"


def no_index(folder: Path) -> Path:
    return folder / "unet"


def no_json(folder: Path) -> Path:
    (folder / "model_index.json").write_text("{")
    return folder


def changed(name: str, entry: list[str | None]) -> Callable[[Path], Path]:
    def change(folder: Path) -> Path:
        path = folder / "model_index.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {name: entry}))
        return folder

    return change


def of_images(folder: Path) -> Path:
    return texts_of_another_width(folder, encoder_hid_dim=24, encoder_hid_dim_type="image_proj")


def without(pattern: str) -> Callable[[Path], Path]:
    def remove(folder: Path) -> Path:
        for path in folder.glob(pattern):
            path.unlink()
        return folder

    return remove


def without_a_weight(folder: Path) -> Path:
    from safetensors.torch import load_file, save_file

    (path,) = (folder / "vae").glob("*.safetensors")
    tensors = load_file(path)
    del tensors["decoder.conv_in.weight"]
    save_file(tensors, path, {"format": "pt"})
    return folder


BAD: dict[str, tuple[Callable[[Path], Path], int, str]] = {
    "no folder": (no_folder, 2, "there is no folder"),
    "no pipeline": (no_index, 2, "has no model_index.json hint: It may be one for transformers:"),
    "damaged": (no_json, 1, "model_index.json can't be read"),
    "class": (changed("vae", ["diffusers", "AutoencoderDC"]), 2, "is a AutoencoderDC, which is not taken"),
    "texts of images": (of_images, 2, "of a kind that is not known here (encoder_hid_dim_type 'image_proj')"),
    "nothing denoises": (changed("unet", [None, None]), 2, "names neither unet nor transformer"),
    "no folder of a model": (without("text_encoder/config.json"), 2, "has no text_encoder/config.json"),
    "no weights": (without("vae/*.safetensors"), 1, "vae: the weights can't be loaded"),
    "a weight is missing": (without_a_weight, 1, "vae has no weights for decoder.conv_in.weight"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_folders(case: str, pipeline: Callable[[str], Path], tmp_path: Path, capsys: Any) -> None:
    spoil, code, message = BAD[case]
    source = spoil(pipeline("stable-diffusion"))
    before = left(tmp_path)
    assert run(["export", f"diffusers:{source}", "-o", str(tmp_path / "onnx")]) == code
    said = " ".join(capsys.readouterr().err.split())
    assert message in said
    assert "Traceback" not in said
    assert left(tmp_path) == before


def test_models_without_a_graph_are_reported(pipeline: Callable[[str], Path], tmp_path: Path, capsys: Any) -> None:
    """A model without a graph is reported, and left out of the index; without --overwrite the folder stays."""
    source = changed("safety_checker", ["stable_diffusion", "StableDiffusionSafetyChecker"])(
        pipeline("stable-diffusion")
    )
    output = tmp_path / "onnx"
    assert run(["export", f"diffusers:{source}", "-o", str(output)]) == 0
    assert "no graph is made of safety_checker" in " ".join(capsys.readouterr().err.split())
    assert json.loads((output / "model_index.json").read_text())["safety_checker"] == [None, None]
    assert run(["export", f"diffusers:{source}", "-o", str(output)]) == 2
    assert "is not empty" in capsys.readouterr().err
