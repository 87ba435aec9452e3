"""`--for transformers.js` and `--for optimum` without their clients: files, names, formats, and one error for each bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

from onnxplug.cli.app import run

STEPS = 10


def written(folder: Path, inputs: dict[str, torch.Tensor], start: int, suffix: str = "") -> list[list[int]]:
    """Text by the encoder and the merged decoder, greedily, as both clients call them."""
    encoder, decoder = (
        onnxruntime.InferenceSession(folder / f"{name}{suffix}.onnx")
        for name in ("encoder_model", "decoder_model_merged")
    )
    given = {name: value.numpy() for name, value in inputs.items()}
    (states,) = encoder.run(["last_hidden_state"], given)
    feed: dict[str, Any] = {"encoder_hidden_states": states}
    if "attention_mask" in given:
        feed["encoder_attention_mask"] = given["attention_mask"]
    batch = len(states)
    for value in decoder.get_inputs():
        if value.name.startswith("past_key_values."):  # a dimension whose name a client does not know is 0
            sizes = [{"batch_size": batch}.get(size, 0) if isinstance(size, str) else size for size in value.shape]
            assert sizes[:1] + sizes[2:3] == [batch, 0]
            feed[value.name] = np.zeros(sizes, np.float32)
    text = tokens = np.full((batch, 1), start)
    outputs = [value.name for value in decoder.get_outputs()]
    for step in range(STEPS):
        feed["use_cache_branch"] = np.array([step > 0])
        results = dict(zip(outputs, decoder.run(outputs, {**feed, "input_ids": tokens}), strict=True))
        tokens = results["logits"][:, -1:].argmax(-1)
        text = np.concatenate([text, tokens], 1)
        for name, value in results.items():
            if name != "logits" and (step == 0 or ".encoder." not in name):
                feed[name.replace("present", "past_key_values")] = value
    return text.tolist()  # type: ignore[no-any-return]


@pytest.mark.long
@pytest.mark.parametrize("name", ["t5", "whisper", pytest.param("bart", marks=pytest.mark.long)])
def test_the_merged_decoder_writes_the_text_of_transformers(
    name: str, saved: Callable[[str], Path], exported: Any
) -> None:
    from transformers import AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq

    folder = saved(name)
    output = exported(folder, "--for", "optimum", "--verify")
    loader = AutoModelForSpeechSeq2Seq if name == "whisper" else AutoModelForSeq2SeqLM
    model: Any = loader.from_pretrained(folder).eval()
    model.generation_config.eos_token_id = model.generation_config.forced_eos_token_id = None
    if name == "whisper":
        inputs = {"input_features": torch.randn(3, 16, 40)}
    else:
        ids, mask = torch.randint(3, 100, (3, 9)), torch.ones(3, 9, dtype=torch.long)
        ids[1, 4:] = mask[1, 4:] = 0
        inputs = {"input_ids": ids, "attention_mask": mask}
    start = model.config.decoder_start_token_id
    with torch.no_grad():
        text = model.generate(
            **inputs,
            decoder_input_ids=torch.full((3, 1), start),
            max_new_tokens=STEPS,
            do_sample=False,
            num_beams=1,
        )
    rows = text[:, -STEPS:].tolist()
    assert len({token for row in rows for token in row}) > 4
    assert [row[-STEPS:] for row in written(output, inputs, start)] == rows
    decoder = onnxruntime.InferenceSession(output / "decoder_model_merged.onnx")
    names = [value.name for value in decoder.get_inputs() if value.name.startswith("past_key_values.0.")]
    assert names == [f"past_key_values.0.{half}.{kind}" for half in ("decoder", "encoder") for kind in ("key", "value")]


@pytest.mark.long
def test_formats_and_their_notes(saved: Callable[[str], Path], tmp_path: Path, capsys: Any) -> None:
    """A file of each format, loaded and run; the first format is the default."""
    folder, output = saved("llama"), tmp_path / "onnx"
    options = ["--for", "transformers.js", "--dtypes", "q4,int8,uint8,q4f16", "--external-data"]
    assert run(["export", f"transformers:{folder}", "-o", str(output), *options]) == 0
    assert "MatMulNBits" in capsys.readouterr().err
    names = ["model_int8.onnx", "model_q4.onnx", "model_q4f16.onnx", "model_uint8.onnx"]
    assert sorted(path.name for path in (output / "onnx").glob("*.onnx")) == names
    assert sorted(path.name for path in (output / "onnx").glob("*_data*")) == [f"{name}_data" for name in names]
    about = json.loads((output / "config.json").read_text())["transformers.js_config"]
    assert about == {"dtype": "q4", "use_external_data_format": dict.fromkeys(names, 1)}
    for name in names:
        session = onnxruntime.InferenceSession(output / "onnx" / name)
        assert session.get_inputs()[0].shape == ["batch_size", "sequence_length"]
        kinds = {value.type for value in session.get_inputs() if value.name.startswith("past_key_values.")}
        assert kinds == {"tensor(float)"}  # without kv_cache_dtype, the client makes empty caches of float32


@pytest.mark.long
def test_weights_in_several_files(saved: Callable[[str], Path], tmp_path: Path, monkeypatch: Any) -> None:
    """Each file has at most the given number of bytes, or those of the largest tensor."""
    from onnxplug_transformers.export import export_folder

    monkeypatch.setattr("onnxplug_transformers.layouts._CHUNK_BYTES", 30_000)
    output = tmp_path / "onnx"
    export_folder(saved("llama"), output, layout="transformers.js", external_data=True)
    data = sorted(path.name for path in (output / "onnx").glob("*_data*"))
    assert len(data) > 2
    assert {"model.onnx_data", "model.onnx_data_1", f"model.onnx_data_{len(data) - 1}"} <= {*data}
    about = json.loads((output / "config.json").read_text())["transformers.js_config"]
    assert about["use_external_data_format"] == {"model.onnx": len(data)}
    onnxruntime.InferenceSession(output / "onnx" / "model.onnx")
    assert (output / "onnx" / "model.onnx").stat().st_size < 200_000


def test_a_processor_of_transformers_5(tmp_path: Path) -> None:
    """The processor is a part of processor_config.json; transformers.js reads preprocessor_config.json alone."""
    import transformers

    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=3)
    transformers.ResNetForImageClassification(config).save_pretrained(tmp_path / "model")
    processor = {"size": {"height": 40, "width": 40}, "image_processor_type": "ConvNextImageProcessor"}
    export = ["export", f"transformers:{tmp_path / 'model'}", "-o", str(tmp_path / "onnx"), "--for", "transformers.js"]
    assert run(export) == 2  # no processor
    (tmp_path / "model" / "processor_config.json").write_text(json.dumps({"image_processor": processor}))
    assert run(export) == 0
    assert json.loads((tmp_path / "onnx" / "preprocessor_config.json").read_text()) == processor
    assert json.loads((tmp_path / "onnx" / "config.json").read_text())["id2label"]["2"] == "LABEL_2"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--for", "tf.js"], "--for 'tf.js' is unknown"),
        (["--for", "transformers.js", "--dtypes", "fp32,fp8"], "--dtypes has no 'fp8'"),
        (["--for", "transformers.js", "--dtypes", "q4,q4"], "--dtypes names each format once"),
        (["--for", "transformers.js", "--dtypes", ""], "--dtypes has no ''"),
        (["--dtypes", "q4"], "--dtypes is for --for transformers.js and optimum"),
        (["--for", "transformers.js", "--int4"], "--int4 is for --for genai"),
        (["--for", "transformers.js", "--fused"], "--fused is for --for genai"),
        (["--for", "optimum", "--last-logits"], "--last-logits is for --for genai"),
        (["--for", "transformers.js", "--dtype", "float16"], "--dtype is for --for genai"),
        (["--with-processor", "--no-tokenizer"], "--with-processor and --no-tokenizer exclude one another"),
        (["--for", "optimum", "--task", "object-detection"], "optimum has no model for object-detection"),
    ],
)
def test_bad_input(options: list[str], message: str, saved: Callable[[str], Path], tmp_path: Path, capsys: Any) -> None:
    assert run(["export", f"transformers:{saved('llama')}", "-o", str(tmp_path / "onnx"), *options]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "onnx").exists()


def test_a_tokenizer_in_another_form(saved: Callable[[str], Path], tmp_path: Path, capsys: Any) -> None:
    folder = saved("llama")
    (folder / "tokenizer.json").rename(folder / "vocab.txt")
    export = ["export", f"transformers:{folder}", "-o", str(tmp_path / "onnx"), "--for", "transformers.js"]
    assert run(export) == 2
    assert "no tokenizer.json" in " ".join(capsys.readouterr().err.split())


@pytest.mark.long
def test_nothing_is_left_of_an_export_that_fails(
    saved: Callable[[str], Path], tmp_path: Path, monkeypatch: Any
) -> None:
    from onnxplug import ConversionError

    def fails(program: Any, name: str, samples: Any, model: Any) -> Any:
        if name == "q8":
            raise ConversionError("nothing was quantised")
        return program, None

    folder, output = saved("llama"), tmp_path / "out"
    output.mkdir()
    (output / "before").write_text("kept")
    monkeypatch.setattr("onnxplug_transformers.export.in_format", fails)
    options = ["--for", "transformers.js", "--dtypes", "fp32,q8", "--overwrite"]
    assert run(["export", f"transformers:{folder}", "-o", str(output), *options]) == 1
    assert [path.name for path in output.iterdir()] == ["before"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama", "out"]
