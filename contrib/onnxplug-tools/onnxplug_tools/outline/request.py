"""The request that ``functions=`` of an export makes."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from onnxplug.errors import UsageError
from onnxplug.text import type_with_article
from onnxplug.warn import warn

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from onnxplug_tools.outline.calls import ModuleCalls

DEFAULT_DOMAIN = "onnxplug.modules"
_DOMAIN = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]+)*")
#: Domains whose operators are defined elsewhere.
_TAKEN = re.compile(r"(ai\.onnx|com\.microsoft|com\.ms)(\.|$)")


class UnusedClassWarning(UserWarning):
    """No operator of the exported model comes from a module of a class that ``functions=`` names."""


@dataclass(frozen=True)
class Functions:
    """Which modules of the model become ONNX functions, and in which domain.

    Attributes:
        classes: Classes of modules, or their names (``"Block"``, ``"my.models.Block"``): each call of such a module becomes a
            call of a function. ``None``: the modules that the model repeats.
        domain: The functions' domain.

    Raises:
        UsageError: The domain is empty, malformed or one of ONNX's or ONNX Runtime's own, or a class is no class of
            modules.
    """

    classes: Sequence[type[Any] | str] | None = None
    domain: str = DEFAULT_DOMAIN

    def __post_init__(self) -> None:
        if not isinstance(self.domain, str) or not _DOMAIN.fullmatch(self.domain) or _TAKEN.match(self.domain):
            raise UsageError(
                f"functions can't be in the domain {self.domain!r}",
                hint="A domain of your own is letters, digits, hyphens and dots, such as 'my.blocks'; those of ONNX and of "
                "ONNX Runtime have operators already.",
            )
        if self.classes is None:
            return
        classes = [self.classes] if isinstance(self.classes, str | type) else self.classes
        if not isinstance(classes, Collection):
            raise UsageError(
                f"functions= takes classes of modules, got {type_with_article(classes)}", hint="functions=[Block]"
            )
        for item in classes:
            if not isinstance(item, str) and not _is_module_class(item):
                text = "a module, not its class" if _is_module_class(type(item)) else f"{item!r}"
                raise UsageError(
                    f"functions= takes classes of modules or their names, got {text}",
                    hint=f"functions=[{type(item).__name__}]" if _is_module_class(type(item)) else None,
                )
        object.__setattr__(self, "classes", tuple(classes))

    @classmethod
    def of_call(cls, functions: Any, model: Any) -> Functions:
        """The request of the argument ``functions`` of an export, which is neither ``None`` nor ``False``.

        Raises:
            UsageError: It is malformed, or names a class of which the model has no module.
        """
        wanted = functions if isinstance(functions, Functions) else cls() if functions is True else cls(functions)
        if classes := _classes_of(model):
            wanted.check(classes)
        return wanted

    def calls(self, program: ExportedProgram, model: Any) -> ModuleCalls:
        """The calls of modules in a captured program.

        Raises:
            UsageError: Neither the program nor the model has a module of a class that is asked for.
        """
        from onnxplug_tools.outline.calls import ModuleCalls

        calls = ModuleCalls()
        for node in program.graph.nodes:
            calls.of(node.meta.get("nn_module_stack"))
        self.check(calls.class_names() | _classes_of(model))
        return calls

    def names(self, class_name: str) -> bool:
        """Whether a class is asked for; its Python module goes before its name."""
        return self._position(class_name) is not None

    def _position(self, class_name: str) -> int | None:
        for position, item in enumerate(self.classes or ()):
            wanted = item if isinstance(item, str) else f"{item.__module__}.{item.__qualname__}"
            if class_name == wanted or (isinstance(item, str) and class_name.endswith(f".{wanted}")):
                return position
        return None

    def missing(self, class_names: Collection[str]) -> list[str]:
        """The classes asked for that are not among the given classes."""
        present = {self._position(name) for name in class_names}
        return [
            item if isinstance(item, str) else item.__qualname__
            for position, item in enumerate(self.classes or ())
            if position not in present
        ]

    def check(self, class_names: Collection[str]) -> None:
        """Checks that a model has every class that is asked for.

        Args:
            class_names: The classes of the model's modules, each with its Python module.

        Raises:
            UsageError: The model has no module of a class that is asked for.
        """
        missing = self.missing(class_names)
        if not missing:
            return
        known = sorted({name.rpartition(".")[2] for name in class_names})
        near = difflib.get_close_matches(missing[0].rpartition(".")[2], known, 2)
        meant = f"Did you mean {' or '.join(near)}? " if near else ""
        raise UsageError(
            f"functions= names {missing[0]}, and the model has no module of that class",
            hint=f"{meant}It has modules of {', '.join(known)}." if known else "What was captured knows no modules.",
        )

    def warn_of_unused(self, class_names: Collection[str]) -> None:
        """Warns of classes that are asked for and of which no function was made.

        Args:
            class_names: The classes of which functions were made.
        """
        missing = self.missing(class_names)
        if missing:
            warn(
                f"no function was made of {', '.join(missing)}: no operator of the exported model is one of such modules alone",
                UnusedClassWarning,
            )


def _classes_of(model: Any) -> set[str]:
    """The classes of a model's modules; empty where only the capture shows them: for a program, a script, a graph."""
    import torch

    if not isinstance(model, torch.nn.Module) or isinstance(model, torch.jit.ScriptModule | torch.fx.GraphModule):
        return set()
    classes = {type(module) for module in model.modules()}
    return {f"{cls.__module__}.{cls.__qualname__}" for cls in classes}


def _is_module_class(item: Any) -> bool:
    from torch.nn import Module

    return isinstance(item, type) and issubclass(item, Module)
