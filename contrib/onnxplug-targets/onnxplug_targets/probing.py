"""Asks a provider of ONNX Runtime which nodes it takes, and makes its table: ``python -m onnxplug_targets.probing openvino``.

The provider's own ``onnxruntime`` is what Python imports (``PYTHONPATH``); onnx and onnx_ir are needed beside it, torch is not.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from onnxplug_targets.features import features
from onnxplug_targets.forms import Form, forms, model_of, types_of, variants, versions_of
from onnxplug_targets.providers import PROVIDERS, Provider
from onnxplug_targets.table import DATA, NOWHERE, WRONG, condensed, text_of

_RANDOM = {
    "Bernoulli",
    "Dropout",
    "Multinomial",
    "RandomNormal",
    "RandomNormalLike",
    "RandomUniform",
    "RandomUniformLike",
}
#: ONNX Runtime's messages where neither the provider nor its CPU has a kernel.
_ABSENT = ("NOT_IMPLEMENTED", "Could not find an implementation", "Provider type for ")
_NO_HALF = "requires f16 but the device does not support it"
_MALFORMED = (
    "INVALID_GRAPH",
    "INVALID_ARGUMENT",
    "ShapeInference",
    "TypeInference",
    "is not supported in",
    "INVALID_PROTOBUF",
)
_COMMON = frozenset("fhilB")
Job = tuple[Form, int, dict[str, str]]


def jobs(provider: Provider, only: frozenset[str] = frozenset()) -> Iterator[Job]:
    """The nodes to ask about: each form at each version of its operator, all variants of usual types, then other types.

    The first form of an operator has all types, the other forms the types that models mostly have.
    """
    seen: set[tuple[str, int]] = set()
    for form in forms():
        if only and form.op not in only:
            continue
        for since in versions_of(form.op, provider.since, provider.until):
            if form.versions[0] <= since <= form.versions[1]:
                first = (form.op, since) not in seen
                seen.add((form.op, since))
                for index, types in enumerate(types_of(form, since)):
                    if index and not first and not _COMMON.issuperset(types.values()):
                        continue
                    for variant in variants(form) if index == 0 else (form,):
                        yield variant, since, types


def _question(job: Job) -> tuple[dict[str, Any], bytes, Mapping[str, Any]] | None:
    """The operator and features of a node, its model and values of the inputs; ``None`` for a malformed node."""
    import onnx
    import onnx_ir as ir

    form, since, types = job
    opset = max(since, 13)
    model, feed = model_of(form, since, types, opset)
    try:
        model = onnx.shape_inference.infer_shapes(model, strict_mode=True)
    except Exception:
        return None
    node = next(node for node in ir.from_proto(model).graph if node.name == "asked")
    question = {"op": form.op, "since": since, "features": sorted(features(node, opset))}
    return question, model.SerializeToString(), feed


def _outcome(provider: Provider, model: bytes, feed: Mapping[str, Any], *, compare: bool) -> tuple[str, str]:
    """The outcome of the node ``asked``: a provider ``takes`` it, ``leaves`` it, or ``breaks``; and the failure."""
    try:
        session = provider.session(model)
    except Exception as error:
        text = str(error)
        if any(word in text for word in _ABSENT):
            return "breaks", NOWHERE
        return ("malformed", "") if any(word in text for word in _MALFORMED) else ("breaks", _reason(text))
    if "asked" in provider.left(session):
        return "leaves", ""
    try:
        results = _run(session, feed)
    except Exception as error:
        return "breaks", _reason(str(error))
    try:
        expected = _run(provider.cpu(model), feed)
    except Exception:
        return "takes", ""  # the CPU has no kernel to compare with
    wrong = compare and not all(_is_close(*pair, provider.tolerance) for pair in zip(results, expected, strict=True))
    return ("breaks", WRONG) if wrong else ("takes", "")


def _is_determined(form: Form) -> bool:
    return form.op not in _RANDOM and form.attributes.get("sorted") != 0


def _run(session: Any, feed: Mapping[str, Any]) -> list[Any]:
    import onnxruntime

    feeds = {
        name: onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(value, 16)
        if value.dtype.name == "bfloat16"
        else onnxruntime.OrtValue.ortvalue_from_numpy(value)
        for name, value in feed.items()
    }
    return [_array(value) for value in session.run_with_ort_values(None, feeds)]


def _array(value: Any) -> np.ndarray:
    if value.data_type() != "tensor(bfloat16)":
        return np.asarray(value.numpy())
    bits = np.asarray(value.numpy()).view(np.uint16).astype(np.uint32) << 16
    return bits.view(np.float32)


def _is_close(one: np.ndarray, other: np.ndarray, tolerance: float) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.dtype.kind not in "f":
        return bool((one == other).all())
    loose = 2e-2 if one.dtype.itemsize < 4 else tolerance
    return np.allclose(one.astype(np.float64), other.astype(np.float64), rtol=loose, atol=loose, equal_nan=True)


def _reason(text: str) -> str:
    """The last line of a provider's message, which states the error."""
    if _NO_HALF in text:
        return "it needs shader-f16, which the adapter that was asked lacks"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][-160:] if lines else "an error without a message"


def probe(provider: Provider, only: frozenset[str] = frozenset()) -> list[dict[str, Any]]:
    """The answers for all nodes, from another process; where a node ends it, a new one goes on with the next node."""
    count = sum(1 for _ in jobs(provider, only))
    answers: list[dict[str, Any]] = []
    begin = 0
    with tempfile.TemporaryDirectory() as folder:
        while begin < count:
            out = Path(folder, f"{begin}.jsonl")
            command = [sys.executable, "-m", __spec__.name, provider.target, "--worker", str(begin), "-o", str(out)]
            done = subprocess.run([*command, "--only", ",".join(only)], stdout=subprocess.DEVNULL, check=False)
            rows = [json.loads(line) for line in out.read_text().splitlines()]
            answers += [row["answer"] for row in rows if row.get("answer")]
            begin = rows[-1]["job"] + 1 if rows else begin
            if rows and "answer" not in rows[-1]:  # the node that ended the process
                answers.append(
                    {**rows[-1]["asked"], "outcome": "breaks", "why": f"the process ends ({done.returncode})"}
                )
            elif done.returncode == 0:
                break
            elif not rows:
                raise RuntimeError(f"the provider can't be asked: the process ends with {done.returncode}")
            sys.stderr.write(f"{begin} of {count}\n")
    return answers


def _work(provider: Provider, begin: int, only: frozenset[str], out: Path) -> None:
    with out.open("w") as file:
        for number, job in enumerate(jobs(provider, only)):
            if number < begin:
                continue
            question = _question(job)
            if question is None:
                continue
            about, model, feed = question
            at = file.tell()
            file.write(json.dumps({"job": number, "asked": about}))
            file.flush()
            outcome, why = _outcome(provider, model, feed, compare=_is_determined(job[0]))
            file.seek(at)
            file.truncate()
            answer = None if outcome == "malformed" else {**about, "outcome": outcome, "why": why}
            file.write(json.dumps({"job": number, "answer": answer}) + "\n")
            file.flush()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=sorted(PROVIDERS))
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--only", default="", help="operators, separated by commas")
    parser.add_argument("--answers", type=Path, help="keep each answer, a line of JSON")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    provider, only = PROVIDERS[arguments.target], frozenset(filter(None, arguments.only.split(",")))
    os.environ.setdefault("ALLOW_RELEASED_ONNX_OPSET_ONLY", "0")
    if arguments.worker is not None:
        _work(provider, arguments.worker, only, arguments.output)
        return
    answers = probe(provider, only)
    if arguments.answers:
        arguments.answers.write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    table = {**provider.facts(), **condensed(answers)}
    path = arguments.output or DATA / f"{provider.target}.json"
    path.write_text(text_of(table))
    sys.stdout.write(f"{len(answers)} answers about {len(table['operators'])} operators: {path}\n")


if __name__ == "__main__":
    main()
