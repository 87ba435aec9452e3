"""Bad .onnx files, given to every command and function that takes one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.hostile import models
from tests.hostile.case import DONE, FAILED, USAGE, Case, call, cli

_FEEDS = {"x": np.ones((3, 4), np.float32), "y": np.ones((3, 2), np.float32)}


def inspect(name: str, write: models.Write, expected: tuple[int, ...], words: tuple[str, ...] = ()) -> Case:
    return cli(f"inspect/{name}", "inspect", models.BAD, files=write, expected=expected, words=words)


def verify(name: str, write: models.Write, expected: tuple[int, ...] = (FAILED, USAGE)) -> Case:
    return cli(f"verify/{name}", "verify", models.BAD, "m.py:make", files=write, expected=expected)


def evaluate(name: str, write: models.Write, expected: tuple[str, ...] = ("UsageError", "EvaluationError")) -> Case:
    def run() -> Any:
        from onnxplug_reference import ExtendedReferenceEvaluator

        return ExtendedReferenceEvaluator(models.BAD).run(None, _FEEDS)

    return call(f"evaluate/{name}", run, expected, files=write)


def saved_beside(name: str, write: models.Write) -> Case:
    """A good model that is saved into the folder of a bad one: the bad one stays as it is."""

    def files(folder: Path) -> None:
        write(folder)
        Path(folder / "o.onnx.data").write_bytes(b"x" * 5000)

    return cli(
        f"save-beside/{name}",
        "export",
        "m.py:make",
        "-o",
        "o.onnx",
        "--external-data",
        files=files,
        expected=DONE,
        writes=("o.onnx", "o.onnx.data*"),
    )


def _unreadable() -> list[Case]:
    results = []
    for name, write in models.UNREADABLE.items():
        results += [
            inspect(f"unreadable-{name}", write, (FAILED, USAGE)),
            verify(f"unreadable-{name}", write),
            evaluate(f"unreadable-{name}", write, ("UsageError",)),
        ]
    for name in (
        "zeros",
        "random",
        "sparse-200-gigabytes",
        "fifo",
        "link-loop",
        "nested-messages-20000",
        "length-2-63",
        "groups",
    ):
        results.append(saved_beside(name, models.UNREADABLE[name]))
    return results


def _cut() -> list[Case]:
    """Files that end at a boundary of their messages may be whole models: the commands may accept them."""
    results = []
    for place, content in models.truncations(6):
        write = models.of_bytes(content)
        results += [inspect(f"cut-{place}", write, (DONE, FAILED, USAGE)), verify(f"cut-{place}", write)]
    for seed in range(60):
        write = models.of_bytes(_flipped(seed))
        results += [
            inspect(f"flipped-{seed}", write, (DONE, FAILED, USAGE)),
            evaluate(f"flipped-{seed}", write, ("UsageError", "EvaluationError", "")),
        ]
        if seed < 20:
            results.append(verify(f"flipped-{seed}", write, (DONE, FAILED, USAGE)))
    return results


def _flipped(seed: int) -> Callable[[], bytes]:
    return lambda: models.flipped(seed)


def _wrong() -> list[Case]:
    results = []
    for name, change in models.WRONG.items():
        write = models.changed(change)
        harmless = ("",) if name in models.HARMLESS else ()
        results += [
            inspect(f"wrong-{name}", write, (DONE, FAILED, USAGE)),
            verify(f"wrong-{name}", write),
            evaluate(f"wrong-{name}", write, ("UsageError", "EvaluationError", *harmless)),
        ]
    return results


def _outside() -> list[Case]:
    results = []
    for name, write in models.OUTSIDE.items():
        results += [
            inspect(f"data-{name}", write, (DONE, FAILED, USAGE)),
            verify(f"data-{name}", write),
            evaluate(f"data-{name}", write, ("UsageError",)),
        ]
    for name in ("beside", "link", "absolute", "folder-link", "fifo", "not-utf8", "long", "itself"):
        results.append(saved_beside(f"data-{name}", models.OUTSIDE[name]))
    return results


def _named() -> list[Case]:
    results = []
    for name, text in models.NAMES.items():
        results += [
            inspect(f"named-{name}", models.named(text), (DONE, FAILED, USAGE)),
            verify(f"named-{name}", models.named(text)),
        ]
    results += [
        inspect("named-not-utf8", models.not_utf8, (DONE, FAILED, USAGE)),
        verify("named-not-utf8", models.not_utf8, (DONE, FAILED, USAGE)),
        evaluate("named-not-utf8", models.not_utf8, ("UsageError", "EvaluationError")),
        inspect("many-nodes", models.changed(models.many(50_000)), (DONE, FAILED)),
        inspect("bombing-functions", models.changed(models.bombing_functions), (DONE, FAILED)),
        evaluate(
            "bombing-functions-unread", models.of_bytes(models.nested_types(90)), ("UsageError", "EvaluationError")
        ),
    ]
    return results


CASES = [*_unreadable(), *_cut(), *_wrong(), *_outside(), *_named()]
