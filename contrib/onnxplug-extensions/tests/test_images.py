"""Files of images to pixels, and pixels to inputs of models, compared with Pillow and with transformers' processors."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pillow

pytest.importorskip("onnxruntime_extensions", reason="`make packages` tests with it, in an environment of its own")

import torch
import transformers
from onnxplug_extensions import Image, Pixels

import onnxplug
from onnxplug.cli.app import run

#: Tolerances looser than torch.testing's own, with their reasons.
LOOSER: dict[str, tuple[dict[str, float], str]] = {
    "steps": (
        {"rtol": 0, "atol": 2.01},
        "torchvision resizes with weights of 15 bits: integers after each axis may be others",
    ),
    "brightness": (
        {"rtol": 0, "atol": 2.0},
        "the library repeats colours of two pixels where Pillow smooths them: red, green and blue are rounded anew",
    ),
}


def drawn(*shape: int) -> np.ndarray:
    """Pixels that are smooth, with all values."""
    axes = (np.linspace(0, 1 + n % 3, size) for n, size in enumerate(shape))
    return (127.5 + 127.5 * np.sin(9 * sum(np.meshgrid(*axes, indexing="ij")))).astype(np.uint8)


def file_of(pixels: np.ndarray, kind: str = "PNG", mode: str = "RGB", **options: Any) -> torch.Tensor:
    """The bytes of a file."""
    content = io.BytesIO()
    Pillow.fromarray(pixels).convert(mode).save(content, kind, **options)
    return torch.from_numpy(np.frombuffer(content.getvalue(), np.uint8).copy())


@pytest.mark.parametrize("opset", [18, 21])
def test_files(opset: int) -> None:
    """PNG files of each kind of colours, and JPEG files with all colours."""
    files = [file_of(drawn(20, 17, 3), mode=mode) for mode in ("RGB", "L", "LA", "RGBA", "P", "1")]
    files += [file_of(drawn(1, 1, 3)), file_of(drawn(90, 161, 3)), file_of(drawn(30, 41, 3), "JPEG", mode="L")]
    program = onnxplug.to_onnx(Image(), (files[0],), dynamic_shapes=({0: "bytes"},), opset_version=opset)
    for data in files:
        torch.testing.assert_close(program(data)[0], Image()(data), rtol=0, atol=0)
    data = file_of(drawn(90, 161, 3), "JPEG", quality=90, subsampling=0)
    assert (program(data)[0].int() - Image()(data).int()).abs().max() <= 1
    assert len({tuple(program(data)[0].shape) for data in files}) == 4


def test_files_with_fewer_colours_than_pixels() -> None:
    """Files with subsampled colours: their brightness is Pillow's."""
    files = [file_of(drawn(size, 55, 3) // 4 + 90, "JPEG", quality=75, subsampling=2) for size in (40, 71)]
    program = onnxplug.to_onnx(Image(), (files[0],), dynamic_shapes=({0: "bytes"},))
    for data in files:
        got, wanted = (
            pixels.float() @ torch.tensor([0.299, 0.587, 0.114]) for pixels in (program(data)[0], Image()(data))
        )
        torch.testing.assert_close(got, wanted, **LOOSER["brightness"][0])
        assert wanted.std() > 10


def test_other_files(tmp_path: Path) -> None:
    """The bytes of other files end the process where the operator itself gets them; a damaged PNG file does not."""
    png = file_of(drawn(20, 17, 3))
    onnxplug.to_onnx(Image(), (png,), tmp_path / "image.onnx", dynamic_shapes=({0: "bytes"},))
    files = [file_of(drawn(9, 9, 3), "BMP"), png[:0], png[:9], png[:60], png[1:], torch.zeros(100, dtype=torch.uint8)]
    torch.save(files, tmp_path / "files.pt")
    code = (
        "import onnxplug, sys, torch\nfolder, session = sys.argv[1], onnxplug.runtime.inference_session(sys.argv[1] + '/image.onnx')\n"
        "for data in torch.load(folder + '/files.pt'):\n"
        "    try: session.run(None, {'data': data.numpy()})\n"
        "    except Exception as error: print('refused', 'ImageDecoder' in str(error))\n"
    )
    paths = {"PYTHONPATH": ":".join(filter(None, sys.path))}
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=paths, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == ["refused True"] * len(files) + [""]
    with pytest.raises(onnxplug.UsageError, match="neither a JPEG nor a PNG file"):
        Image()(files[0])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ViTImageProcessor", {}),
        ("ViTImageProcessor", {"do_resize": False, "do_rescale": False}),
        ("CLIPImageProcessor", {}),
        ("CLIPImageProcessorPil", {"size": {"shortest_edge": 64}, "crop_size": {"height": 48, "width": 64}}),
        ("DeiTImageProcessor", {"do_normalize": False}),
    ],
)
def test_processors(name: str, options: dict[str, Any]) -> None:
    """A batch; wider and higher images; images that are enlarged."""
    processor = getattr(transformers, name)(**options)
    module = Pixels(processor)
    images = [
        drawn(*shape) for shape in ((2, 300, 200, 3), (1, 224, 224, 3), (3, 64, 97, 3), (1, 37, 45, 3), (1, 90, 640, 3))
    ]
    shapes = ({0: "batch", 1: "height", 2: "width"},)
    program = onnxplug.to_onnx(module, (torch.from_numpy(images[0]),), dynamic_shapes=shapes)
    assert {node.domain for node in program.model.graph} <= {""}
    for image in images:
        got = program(torch.from_numpy(image))[0]
        torch.testing.assert_close(got, module(torch.from_numpy(image)))
        wanted = processor(list(image), return_tensors="pt", input_data_format="channels_last")["pixel_values"]
        assert got.shape == wanted.shape
        torch.testing.assert_close(got * module.divisor, wanted * module.divisor, **LOOSER["steps"][0])


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("EfficientNetImageProcessor", {}, "steps of 255 away"),
        ("ConvNextImageProcessor", {}, r"of 31×40 it makes \(1, 3, 384, 384\)"),
        ("ViTImageProcessor", {"resample": 0}, "its filter is Pillow's 0"),
        ("CLIPImageProcessor", {"size": {"shortest_edge": 20}}, "it crops to more than it resizes to"),
        ("DetrImageProcessor", {}, "its size has (shortest_edge, longest|longest_edge, shortest)_edge"),
    ],
)
def test_processors_that_do_something_else(name: str, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(onnxplug.UsageError, match=reason):
        Pixels(getattr(transformers, name)(**options))


@pytest.mark.parametrize("kind", ["ViTForImageClassification", "ViTModel"])
def test_export_of_a_folder(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxplug_transformers")
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=32, patch_size=8,
        id2label={0: "cat", 1: "dog", 2: "neither"},
    )  # fmt: skip
    model = getattr(transformers, kind)(config).eval()
    model.save_pretrained(tmp_path / "in")
    processor = transformers.ViTImageProcessor(size={"height": 32, "width": 32})
    processor.save_pretrained(tmp_path / "in")
    command = ["export", f"transformers:{tmp_path / 'in'}", "-o", str(tmp_path / "out"), "--with-processor", "--verify"]
    assert run(command) == 0
    session = onnxplug.runtime.inference_session(str(tmp_path / "out" / "model.onnx"))
    names = [value.name for value in session.get_outputs()]
    for images in (drawn(2, 48, 64, 3), drawn(1, 32, 32, 3), drawn(3, 200, 77, 3)):
        results = dict(zip(names, session.run(None, {"images": images}), strict=True))
        pixels = Pixels(processor)(torch.from_numpy(images))
        with torch.no_grad():
            wanted = model(pixel_values=pixels)[0]
        torch.testing.assert_close(torch.from_numpy(results[names[0]]), wanted)
        if kind != "ViTModel":
            assert results["label"].tolist() == [config.id2label[n] for n in wanted.argmax(-1).tolist()]
