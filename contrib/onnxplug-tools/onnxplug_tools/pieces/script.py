"""The small program beside exported pieces, which runs them one after the other by ONNX Runtime and NumPy."""

from __future__ import annotations

import pprint
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from onnxplug_tools.pieces.stamp import KEY


class Step(NamedTuple):
    """A call of a piece.

    Attributes:
        inputs: The file's inputs, each with the value that it takes.
        outputs: The file's outputs, each with the name of the value that it becomes.
    """

    file: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


_PROGRAM = '''"""Runs {files} one after the other, as {model} does. Made by onnxplug {version}.

Needs onnxruntime and numpy. As a program: python chain.py INPUTS.npz OUTPUTS.npz
"""

import sys
from pathlib import Path

import numpy
import onnxruntime

FOLDER = Path(__file__).resolve().parent
#: What the model takes, and what it returns by the names of the values.
INPUTS = {inputs}
OUTPUTS = {outputs}
#: Tensors of the model that are given to pieces from outside, in constants.npz.
CONSTANTS = {constants}
#: What each model has in its metadata: the files are of one save. A save that was stopped leaves some of another.
SAVE = {save!r}
#: For each call the file, its inputs with the values that they take, and its outputs with the values that they become.
STEPS = {steps}


def load(providers=("CPUExecutionProvider",)):
    """The sessions by file.

    Raises:
        RuntimeError: A file is of another save than this program.
    """
    sessions = {{}}
    for file, _, _ in STEPS:
        if file not in sessions:
            sessions[file] = onnxruntime.InferenceSession(str(FOLDER / file), providers=list(providers))
            _check(file, sessions[file].get_modelmeta().graph_description or SAVE)
    return sessions


def _check(file, save):
    if save != SAVE:
        raise RuntimeError(
            f"{{FOLDER / file}} and {{__file__}} are of different saves, as after one that was stopped half-way. "
            "Save the pieces again."
        )


def run(inputs, sessions=None):
    """The model's outputs in order, for a dict of arrays by input name."""
    sessions = load() if sessions is None else sessions
    missing = [name for name in INPUTS if name not in inputs]
    if missing:
        raise ValueError(f"inputs are missing: {{', '.join(missing)}}")
    values = dict(inputs)
    if CONSTANTS:
        constants = dict(numpy.load(FOLDER / "constants.npz"))
        _check("constants.npz", str(constants.pop("{key}")))
        values.update(constants)
    for file, takes, makes in STEPS:
        feed = {{name: values[value] for name, value in takes.items()}}
        values.update(zip(makes.values(), sessions[file].run(list(makes), feed)))
    return [values[name] for name in OUTPUTS]


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    results = run(dict(numpy.load(sys.argv[1])))
    numpy.savez(sys.argv[2], **{{f"output_{{index}}": array for index, array in enumerate(results)}})
'''


def program_text(
    model: str,
    version: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    constants: Sequence[str],
    save: str,
    steps: Sequence[Step],
) -> str:
    """The source of the program.

    Args:
        inputs, outputs: The names of the values that the model takes and returns.
        constants: The names of the values in ``constants.npz``.
        save: The mark of the save to which all files belong.
    """
    files = ", ".join(dict.fromkeys(step.file for step in steps))
    return _PROGRAM.format(
        files=files,
        model=model,
        version=version,
        inputs=list(inputs),
        outputs=list(outputs),
        constants=list(constants),
        key=KEY,
        save=save,
        steps=pprint.pformat([(s.file, dict(s.inputs), dict(s.outputs)) for s in steps], width=118, sort_dicts=False),
    )
