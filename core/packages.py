"""Which package brings what core does not have, and where it is: an absent one is named in the error."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from onnxplug.errors import UsageError
from onnxplug.registry.rule import load_object

#: Option of ``to_onnx`` to the distribution that serves it, and the function of its value that makes the observer.
OBSERVERS = {
    "report": ("onnxplug-tools", "onnxplug.report.observer:observer"),
    "profile": ("onnxplug-tools", "onnxplug.profiling.observer:observer"),
}


def observer_of(option: str) -> Callable[..., Any]:
    """The function that makes the observer of an option.

    Raises:
        UsageError: The package that serves it is not installed.
    """
    distribution, place = OBSERVERS[option]
    module = place.partition(":")[0]
    if find_spec(module.rpartition(".")[0]) is None:
        raise UsageError(f"{option}= needs {distribution}, which is not installed", hint=f"pip install {distribution}")
    made: Callable[..., Any] = load_object(place, f"what serves {option}=")
    return made
