"""The arguments of a call of ``torch.onnx.export``, checked before the model is captured."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.onnx import OperatorExportTypes, TrainingMode

from onnxplug.errors import OpsetError, UsageError
from onnxplug.opsets import MIN_OPSET, max_opset
from onnxplug.text import type_with_article
from onnxplug.warn import warn as warn_user
from onnxplug_torch_onnx.old_opsets import OLDEST

#: torch 2.9 lacks it.
_EXPORTABLE: Any = getattr(torch.onnx, "ExportableModule", ())
#: The first version of ai.onnx whose models may have functions of their own.
_FUNCTIONS_SINCE = 15
_FLAGS = (
    "dynamo",
    "external_data",
    "report",
    "optimize",
    "verify",
    "profile",
    "dump_exported_program",
    "export_params",
    "do_constant_folding",
    "autograd_inlining",
)
#: Flags that may be ``None``, as callers of the exporter that was the default before torch 2.9 leave them.
_OPEN_FLAGS = ("verbose", "keep_initializers_as_inputs")
_MAPPINGS = {
    "kwargs": "a dict of the model's keyword inputs",
    "custom_translation_table": "a dict from operators to functions",
    "custom_opsets": "a dict from domains to versions: {'com.acme': 1}",
    "dynamic_axes": "a dict from names of inputs and outputs to axes: {'x': {0: 'batch'}} or {'x': [0]}",
}
#: Modules that only hold others: they are never called.
_HOLDERS = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.ParameterList, torch.nn.ParameterDict)


class ExportWarning(UserWarning):
    """An argument of ``torch.onnx.export`` has no effect, or another effect than it states."""


def warn(text: str) -> None:
    """Warns, at the line that calls the export, that an argument has no effect or another effect than it states."""
    warn_user(text, ExportWarning)


@dataclass
class Request:
    """A call of ``torch.onnx.export``; the attributes are its parameters.

    Attributes:
        model, args, f: The model, its example inputs, and the file to write.
        lowered_to: The opset to lower the finished model to, where it is older than the rules' opsets.
    """

    model: Any
    args: Any
    f: Any
    kwargs: Mapping[str, Any] | None
    verbose: bool | None
    input_names: Any
    output_names: Any
    opset_version: int | None
    dynamo: bool
    external_data: bool
    dynamic_shapes: Any
    custom_translation_table: Mapping[Any, Any] | None
    report: bool
    optimize: bool
    verify: bool
    profile: bool
    dump_exported_program: bool
    artifacts_dir: Any
    export_params: bool
    keep_initializers_as_inputs: bool | None
    dynamic_axes: Mapping[str, Any] | None
    training: Any
    operator_export_type: Any
    do_constant_folding: bool
    custom_opsets: Mapping[str, int] | None
    export_modules_as_functions: Any
    autograd_inlining: bool
    lowered_to: int | None = None

    def settle(self) -> None:
        """Checks the arguments, and settles those that follow from the model or from other arguments."""
        self._check_types()
        if isinstance(self.model, _EXPORTABLE):
            self._ask_the_model()
            self.dynamo = True
        if isinstance(self.model, torch.export.ExportedProgram):
            self.dynamo = True
        if isinstance(self.model, torch.nn.DataParallel):
            raise UsageError(
                "the model is a DataParallel, which runs copies of another one on several devices",
                hint="Export that one: model.module.",
            )
        if not self.dynamo and self.f is None:
            raise UsageError(
                "with dynamo=False the export returns no program, and f= names no file to write",
                hint="Give f, or leave dynamo=False out.",
            )
        self._settle_opset()
        self._settle_functions()
        if self.dynamo and self.training == TrainingMode.TRAINING:
            warn("training has no effect with dynamo=True, as in torch: call model.train() before the export")
        if self.operator_export_type == OperatorExportTypes.ONNX_ATEN:
            warn("operator_export_type=ONNX_ATEN has no effect: what has a translation gets it")
        if self.dynamic_axes is not None and self.dynamic_shapes is not None:
            warn("dynamic_axes is not looked at, because dynamic_shapes is given")
            self.dynamic_axes = None

    def _check_types(self) -> None:
        for name in (*_FLAGS, *_OPEN_FLAGS):
            value = getattr(self, name)
            if not isinstance(value, bool) and not (value is None and name in _OPEN_FLAGS):
                raise UsageError(f"{name} must be True or False, got {value!r}")
        for name, kinds in _MAPPINGS.items():
            value = getattr(self, name)
            if value is not None and not isinstance(value, Mapping):
                raise UsageError(f"{name} must be {kinds}, got {type_with_article(value)}")
        if {"", "ai.onnx"} & set(self.custom_opsets or ()):
            raise UsageError("custom_opsets has versions of custom domains; opset_version= has the version of ai.onnx")
        for domain, version in (self.custom_opsets or {}).items():
            if not isinstance(domain, str) or isinstance(version, bool) or not isinstance(version, int) or version < 1:
                raise UsageError(
                    f"custom_opsets has {domain!r}: {version!r}", hint=f"It is {_MAPPINGS['custom_opsets']}."
                )
        if not isinstance(self.artifacts_dir, str | os.PathLike):
            raise UsageError(f"artifacts_dir must be the path of a folder, got {self.artifacts_dir!r}")
        for name, kind in (("training", TrainingMode), ("operator_export_type", OperatorExportTypes)):
            value = getattr(self, name)
            if not isinstance(value, kind) and not (value is None and name == "operator_export_type"):
                known = ", ".join(kind.__members__)
                raise UsageError(
                    f"{name} must be a torch.onnx.{kind.__name__}, got {value!r}", hint=f"There are {known}."
                )
        opset = self.opset_version
        if opset is not None and (isinstance(opset, bool) or not isinstance(opset, int)):
            raise UsageError(
                f"opset_version must be a version of ai.onnx, got {opset!r}",
                hint="custom_opsets= has those of other domains.",
            )

    def _ask_the_model(self) -> None:
        """Takes the inputs, names and dynamic shapes of an ``ExportableModule`` for a call without inputs."""
        if not self.args and not self.kwargs:
            self.args, self.kwargs = self.model.example_arguments()
            for name in ("input_names", "output_names", "dynamic_shapes"):
                if getattr(self, name) is None:
                    setattr(self, name, getattr(self.model, name)())

    def _settle_opset(self) -> None:
        if self.opset_version is None or self.opset_version >= MIN_OPSET:
            return
        if self.opset_version < 1:
            raise OpsetError(
                f"there is no opset {self.opset_version}", hint=f"Opsets are {MIN_OPSET} to {max_opset()}."
            )
        if self.opset_version < OLDEST:
            warn(f"the model has opset {MIN_OPSET}, not {self.opset_version}, which is older than the oldest, {OLDEST}")
        else:
            self.lowered_to = self.opset_version
        self.opset_version = MIN_OPSET

    def _settle_functions(self) -> None:
        requested = self.export_modules_as_functions
        if not isinstance(requested, bool):
            if isinstance(requested, str | Mapping) or not isinstance(requested, Collection):
                raise UsageError(
                    f"export_modules_as_functions must be True, False or classes of modules, got {requested!r}",
                    hint="export_modules_as_functions={torch.nn.Linear}",
                )
            for item in requested:
                if not isinstance(item, type) or not issubclass(item, torch.nn.Module):
                    raise UsageError(
                        f"export_modules_as_functions has {item!r}, which is no class of modules",
                        hint="export_modules_as_functions={torch.nn.Linear}",
                    )
        if requested and self.opset_version is not None and self.opset_version < _FUNCTIONS_SINCE:
            raise UsageError(
                f"a model of opset {self.opset_version} has no functions, which export_modules_as_functions= asks for",
                hint=f"They are there from opset {_FUNCTIONS_SINCE} on.",
            )

    # -- the arguments as onnxplug takes them --------------------------------------------------------------------------

    def functions(self) -> Any:
        """``functions=`` of :func:`onnxplug.to_onnx`."""
        requested = self.export_modules_as_functions
        if not requested:
            return False
        from onnxplug import Functions

        if not isinstance(self.model, torch.nn.Module) or isinstance(self.model, torch.jit.ScriptModule):
            return True if requested is True else Functions(list(requested))
        present: set[type[torch.nn.Module]] = {
            type(module) for module in self.model.modules() if not isinstance(module, _HOLDERS)
        }
        wanted = present if requested is True else {cls for cls in present if cls in requested}
        if not wanted:
            warn("the model has no module of the classes that export_modules_as_functions= names")
        names = sorted(f"{cls.__module__}.{cls.__qualname__}" for cls in wanted)
        return Functions(names) if names else False

    @property
    def stored_as_inputs(self) -> bool:
        """Whether weights are listed as inputs of the file's graph."""
        # The exporter of old makes inputs of parameters that it does not store.
        return bool(self.keep_initializers_as_inputs) or not (self.dynamo or self.export_params)

    def inputs_in_order(self) -> None:
        """Brings keyword inputs into the order of the model's signature, as the exporter of old does."""
        import inspect

        if self.dynamo or not self.kwargs:
            return
        try:
            order = list(inspect.signature(getattr(self.model, "forward", self.model)).parameters)
        except (TypeError, ValueError):
            return
        place = {name: number for number, name in enumerate(order)}
        self.kwargs = dict(sorted(self.kwargs.items(), key=lambda item: place.get(item[0], len(order))))
