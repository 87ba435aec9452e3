"""The names of torch that are private, and what happens when a version of torch lacks one.

Nothing else imports a private name of torch: ``from onnxplug.torch_private import FakeTensor``. Each name is looked up when it is
first asked for. One that is gone raises :class:`OnnxplugError`, unless something else serves.
"""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from onnxplug.errors import OnnxplugError

if TYPE_CHECKING:
    from torch._ops import HigherOrderOperator as HigherOrderOperator
    from torch._ops import OpOverload as OpOverload
    from torch._ops import OpOverloadPacket as OpOverloadPacket
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch.utils import _pytree

    pytree = _pytree

#: The oldest and the newest release of torch that the suite runs on.
TESTED = ("2.13", "2.15")


class _Private(NamedTuple):
    """One private name.

    Attributes:
        place: Its module and, after a colon, the name there.
        purpose: What needs it, for the error where it is gone.
        instead: What makes something that serves in its place.
    """

    place: str
    purpose: str
    instead: Callable[[], Any] | None = None


def _alias_by_storage() -> Callable[[Any, Any], bool]:
    return lambda a, b: bool(a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr())


_NAMES = {
    # Without these nothing works.
    "FakeTensor": _Private("torch._subclasses.fake_tensor:FakeTensor", "types and shapes of a captured program"),
    "FakeTensorMode": _Private("torch._subclasses.fake_tensor:FakeTensorMode", "tracing an operator without computing"),
    "HigherOrderOperator": _Private("torch._ops:HigherOrderOperator", "telling torch.cond and its like from operators"),
    "OpOverload": _Private("torch._ops:OpOverload", "telling operators from functions"),
    "OpOverloadPacket": _Private("torch._ops:OpOverloadPacket", "finding the overloads of an operator"),
    "SingleLevelFunction": _Private(
        "torch.autograd.function:_SingleLevelFunction", "keeping an autograd.Function whole"
    ),
    "pytree": _Private("torch.utils._pytree:", "flattening inputs and outputs"),
    # Without these something is less precise.
    "higher_order_operators": _Private(  # names of higher-order operators are taken as given
        "torch._ops:_higher_order_ops", "the names of higher-order operators", dict
    ),
    "registered_operators": _Private(  # no suggestion for a misspelt operator
        "torch._C:_dispatch_get_all_op_names", "the names of all operators", lambda: list
    ),
    "is_alias_of": _Private("torch._C:_is_alias_of", "telling outputs that are inputs", _alias_by_storage),
}


@cache
def warn_if_untested(version: str) -> None:
    """Warns, once, about a torch that is newer than those that the suite runs on.

    Args:
        version: ``torch.__version__``.
    """
    if _release(version) > _release(TESTED[1]):
        warnings.warn(
            f"torch {version} is newer than those that onnxplug is tested with, {' to '.join(TESTED)}", stacklevel=4
        )


def _release(version: str) -> list[int]:
    """The first two numbers of a version: ``[2, 15]`` of ``2.15.0a0+cpu``."""
    return [int(number) for number in re.findall(r"\d+", version)[:2]]


def __getattr__(name: str) -> Any:
    """A private name of torch.

    Raises:
        OnnxplugError: This torch lacks it.
    """
    private = _NAMES.get(name)
    if private is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = private.place.partition(":")
    try:
        found = importlib.import_module(module)
        value = getattr(found, attribute) if attribute else found
    except (ImportError, AttributeError) as error:
        if private.instead is None:
            import torch

            raise OnnxplugError(
                f"torch {torch.__version__} has no {private.place.rstrip(':').replace(':', '.')}, which onnxplug needs for "
                f"{private.purpose}",
                hint=f"onnxplug is tested with torch {' to '.join(TESTED)}.",
            ) from error
        value = private.instead()
    globals()[name] = value
    return value
