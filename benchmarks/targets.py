"""What providers of ONNX Runtime really do with 50 models, beside what the tables of targets say of them.

    make targets                                    every provider that can be installed
    python benchmarks/targets.py openvino --models 10

A node that a table takes for computed and the provider leaves to the CPU is a false "supported", and so is a model without a node
that breaks which doesn't load or is wrong: the command then ends with 1. What is made stays in out/targets.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnxplug_targets.prediction import Fallback, fallbacks_of
from rich.console import Console

import onnxplug
from tests.models.measure import Architecture, architectures, small_model

OUT = Path("out/targets")
#: Target to the packages that pip installs for it.
PACKAGES: dict[str, Sequence[str]] = {
    "openvino": ["onnxruntime-openvino==1.24.1"],
    "webgpu": ["onnxruntime-webgpu==1.27.0"],
    "qnn": ["onnxruntime-qnn==2.7.0"],
}
#: Kind of architecture to the number of models that are taken, evenly spread.
KINDS = {"causal": 14, "masked": 8, "seq2seq": 8, "image": 8, "timm": 14, "torchvision": 8}
#: Kind of architecture to further models: quick ones with other operators, for providers that take long for larger
#: models.
QUICK = {
    "audio": "ASTForAudioClassification WhisperForAudioClassification",
    "causal": "BlenderbotForCausalLM BigBirdForCausalLM",
    "classification": "EsmcForTokenClassification JinaEmbeddingsV3ForSequenceClassification DebertaV2ForTokenClassification "
    "EuroBertForTokenClassification",
    "contrastive": "CLIPModel CLIPSegModel SiglipModel",
    "depth": "DPTForDepthEstimation",
    "detection": "YolosForObjectDetection",
    "image": "ViTMSNForImageClassification DeiTForImageClassification CLIPForImageClassification",
    "keypoints": "VitPoseForPoseEstimation",
    "masked": "FNetForMaskedLM DistilBertForMaskedLM ElectraForMaskedLM",
    "pixels": "ViTForMaskedImageModeling",
    "seq2seq": "MarianMTModel",
    "series": "PatchTSTForRegression PatchTSMixerForRegression",
    "speech": "ParakeetForCTC Wav2Vec2BertForCTC",
    "timm": "test_resnet test_efficientnet test_vit test_byobnet",
    "torchvision": "squeezenet1_1",
    "video": "VideoMAEForVideoClassification",
}
#: How far a model's results may be from the CPU's, as a part of the largest element: QNN computes in float16; WGSL allows a cosine
#: an error of 2**-11, and rotary embeddings of query and key multiply two.
DIFFERENCES = {"openvino": 1e-3, "webgpu": 4 * 2**-11, "qnn": 5e-2}
#: Chromium's Vulkan driver without a GPU, for WebGPU; Vulkan's loader lies beside it.
SWIFTSHADER = Path("/usr/lib/chromium/vk_swiftshader_icd.json")
console = Console()


def chosen() -> list[Architecture]:
    """The architectures."""
    of_kind: dict[str, list[Architecture]] = {}
    for architecture in architectures():
        of_kind.setdefault(architecture.kind, []).append(architecture)
    quick = [a for kind, models in QUICK.items() for a in of_kind[kind] if a.model in models.split()]
    spread = [a for kind, count in KINDS.items() for a in of_kind[kind][:: max(1, len(of_kind[kind]) // count)][:count]]
    return list(dict.fromkeys([*quick, *spread]))


def exported(architecture: Architecture, target: str | None) -> Path | None:
    """The file of a small model, with values of its inputs beside it; ``None`` where it can't be exported."""
    path = OUT / f"{architecture.kind}-{architecture.name}.{target or 'default'}.onnx"
    if not path.exists():
        try:
            example = small_model(architecture)
            program = onnxplug.to_onnx(
                example.module,
                example.args,
                kwargs=example.kwargs,
                dynamic_shapes=example.dynamic,
                **({"target": target} if target else {}),
            )
        except Exception as error:
            console.print(f"{path.stem}: not exported: {type(error).__name__}", markup=False)
            return None
        feed = {name: np.asarray(value) for name, value in program.feed(example.args, example.kwargs).items()}
        with open(f"{path}.npz", "wb") as file:
            np.savez(file, **feed)
        program.save(path.with_suffix(".part"), external_data=False)
        path.with_suffix(".part").rename(path)
    return path


def installed(target: str) -> Path:
    """The folder of a provider's own packages, installed if it isn't there."""
    folder = OUT / "packages" / "-".join(PACKAGES[target])
    if not folder.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        subprocess.run([*pip, *PACKAGES[target]], check=True)
    return folder.resolve()


def environment(target: str) -> dict[str, str]:
    """The environment in which Python imports a provider."""
    folder = installed(target)
    paths = [str(folder), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, paths))}
    libraries = [folder / "onnxruntime/capi", folder / "onnxruntime_qnn.libs"]
    if target == "webgpu" and SWIFTSHADER.exists():
        libraries.append(SWIFTSHADER.parent)
        found |= dict.fromkeys(("VK_ICD_FILENAMES", "VK_DRIVER_FILES"), str(SWIFTSHADER)) | {"XDG_RUNTIME_DIR": "/tmp"}
    found["LD_LIBRARY_PATH"] = os.pathsep.join(map(str, libraries))
    return found


def asked(target: str, path: Path, seconds: float) -> dict[str, Any]:
    """The provider's assignment of a file's nodes, and its results (:mod:`onnxplug_targets.asking`).

    Raises:
        subprocess.TimeoutExpired: It takes longer than these seconds.
    """
    command = [sys.executable, "-m", "onnxplug_targets.asking", target, str(path)]
    settings: dict[str, Any] = {"env": environment(target), "capture_output": True, "text": True, "timeout": seconds}
    done = subprocess.run(command, **settings, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    died = {"error": f"the process ends ({done.returncode}): {done.stderr[-200:]}", "left": [], "difference": None}
    return json.loads(lines[-1]) if lines else died


def compared(target: str, path: Path, seconds: float) -> tuple[Counter[str], list[str]]:
    """Counts of a model's nodes by prediction and truth, and the faults of the prediction."""
    try:
        truth = asked(target, path, seconds)
    except subprocess.TimeoutExpired:
        return Counter({"too slow": 1}), []
    operators = {
        node.name: node.op_type
        for node in onnx.load(path, load_external_data=False).graph.node
        if node.op_type != "Constant"
    }
    predicted: dict[str, Fallback] = {found.node: found for found in fallbacks_of(path, target)}
    breaks = [found for found in predicted.values() if found.breaks]
    ran = truth["difference"] is not None and truth["difference"] <= DIFFERENCES[target]
    left = set(truth["left"]) if ran else set()
    counts = Counter(
        {
            "models": 1,
            "nodes": len(operators),
            "run": int(ran),
            "do not run, as predicted": int(not ran and bool(breaks)),
            "left": len(left),
            "predicted": len(predicted),
        }
    )
    wrong = [
        f"{operators[node]} {node} is left to the CPU" for node in sorted(left & operators.keys() - predicted.keys())
    ]
    if not ran and not breaks:
        wrong.append(f"it does not run: {truth['error'] or truth['difference']}")
    counts["false supported"] = len(wrong)
    alarms = [found for node, found in predicted.items() if ran and node in operators and node not in left]
    counts["false alarms"] = len(alarms)
    kinds = Counter(f"{found.operator}: {found.reason}" for found in alarms)
    return counts, [*wrong, *(f"(taken all the same: {count} {kind})" for kind, count in kinds.most_common(3))]


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", default=list(PACKAGES), metavar="TARGET")
    parser.add_argument("--models", type=int, default=None, help="how many, evenly spread")
    parser.add_argument(
        "--seconds", type=float, default=240, help="how long a provider may take for a model; default 240"
    )
    parser.add_argument("--default", action="store_true", help="export for ONNX Runtime, not for the target")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    OUT.mkdir(parents=True, exist_ok=True)
    models = chosen()
    models = models[:: max(1, len(models) // given.models)] if given.models else models
    failed = 0
    for target in given.targets:
        total: Counter[str] = Counter()
        for architecture in models:
            path = exported(architecture, None if given.default else target)
            if path is None:
                continue
            counts, lines = compared(target, path, given.seconds)
            total += counts
            console.print(f"{path.stem}: {dict(counts)}", markup=False)
            for line in lines:
                console.print(f"    {line}", markup=False)
        console.print(f"{target}: {dict(total)}", markup=False)
        failed += total["false supported"]
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
