"""The mark of the files of one save of pieces: the ``doc_string`` of each graph, which ``chain.py`` compares."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np

from onnxplug.program import OnnxProgram

#: The name of the mark in ``constants.npz``. ONNX Runtime shows a graph's ``doc_string``, but not its metadata.
KEY = "onnxplug.pieces"


def stamp(programs: Mapping[str, OnnxProgram], constants: Mapping[str, np.ndarray], chain: str) -> str:
    """Marks the models as pieces of one save.

    Args:
        programs: The pieces. Each gets the mark.
        constants: The content of ``constants.npz``.
        chain: How the pieces are chained; empty where there is no chain.

    Returns:
        The mark: a digest of the graphs, of the weights and of the chain, so that equal pieces make equal files, and that a
        ``chain.py`` of other code between the same pieces is not run.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(f"{chain}\n".encode())
    for path, program in programs.items():
        program.model.graph.doc_string = None
        digest.update(f"{path}\n{program.model}\n".encode())
        for name, value in program.model.graph.initializers.items():
            digest.update(f"{name}\n".encode())
            if value.const_value is not None:
                digest.update(value.const_value.tobytes())
    for name, array in constants.items():
        digest.update(f"{name} {array.dtype} {array.shape}\n".encode() + array.tobytes())
    mark = digest.hexdigest()
    for program in programs.values():
        program.model.graph.doc_string = mark
    return mark
