"""The options of the ``torch.compile`` backends, checked."""

from __future__ import annotations

import dataclasses
import difflib
import tempfile
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from onnxplug.errors import UsageError
from onnxplug.host import CPU
from onnxplug.opsets import resolve_opsets
from onnxplug.registry.rule import Rule
from onnxplug.registry.target import DEFAULT_RUNTIME
from onnxplug.run.kernels import checked_items, onnxruntime_module

#: Levels of ONNX Runtime's own graph optimisation, as ``GraphOptimizationLevel`` names them.
LEVELS = {
    "disable": "ORT_DISABLE_ALL",
    "basic": "ORT_ENABLE_BASIC",
    "extended": "ORT_ENABLE_EXTENDED",
    "all": "ORT_ENABLE_ALL",
}
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


@dataclass(frozen=True)
class BackendOptions:
    """The options of ``torch.compile(model, backend="onnxplug", options={...})``.

    Attributes:
        opset: Version of ai.onnx, or of several domains, as ``to_onnx(opset_version=)`` takes it.
        exact, rules, plugins, prefer, runtime, optimize: As ``to_onnx`` takes them.
        target: As ``to_onnx`` takes it; ``"auto"`` is ``"onnxruntime:cpu"`` where the CPU is the only provider, whose
            kernels lack types that other providers have, else ``"onnxruntime"``.
        rewrites: Name of a rewrite to whether it is used; rewrites not named are used.
        providers: Execution providers of ONNX Runtime, each a name or a name with a dict of its options.
        session_options: An ``onnxruntime.SessionOptions``, or a dict of its attributes.
        optimization: How far ONNX Runtime optimises the graph: ``"disable"``, ``"basic"``, ``"extended"`` or ``"all"``.
        threads: Threads within an operator. When ``None``: the session options' ``intra_op_num_threads``, else as many
            as PyTorch takes (``torch.set_num_threads``) when a graph is compiled.
        transforms: Functions ``(onnx_ir.Model) -> Model | None`` that change each model before its session is made.
        cache: Folder in which converted models are kept for later processes.
        store: A dict that receives, under ``"graphs"``, one :class:`~onnxplug_compile.backend.StoredGraph` for each graph.
        dump: Folder in which each graph is kept: its model, its inputs, and PyTorch's results from them.
        fallback: Run a graph by eager PyTorch, with one warning, when it can't be converted or run; ``False`` raises.

    Raises:
        UsageError: A value is malformed.
    """

    opset: int | Mapping[str, int] | None = None
    target: str | None = "auto"
    exact: bool = False
    rules: Sequence[Rule] = ()
    plugins: Sequence[str] | None = None
    prefer: Mapping[str, str] | None = None
    runtime: Sequence[Any] = ()
    optimize: bool = True
    rewrites: Mapping[str, bool] = field(default_factory=dict)
    providers: Sequence[Any] = (CPU,)
    session_options: Any = None
    optimization: str | None = None
    threads: int | None = None
    transforms: Sequence[Callable[..., Any]] = ()
    cache: str | Path | None = None
    store: MutableMapping[str, Any] | None = None
    dump: str | Path | None = None
    fallback: bool = True

    def __post_init__(self) -> None:
        for name in ("exact", "optimize", "fallback"):
            _expect(name, getattr(self, name), bool, "True or False")
        _expect("target", self.target, (str, type(None)), "the name of a runtime")
        if isinstance(self.plugins, str):
            raise UsageError(f"options['plugins'] is a list of names, got {self.plugins!r}")
        _expect("plugins", self.plugins, (Sequence, type(None)), "a list of names")
        for name in ("rewrites", "prefer"):
            _expect(name, getattr(self, name), (Mapping, type(None)), "a dict")
        for name in ("rules", "transforms", "providers", "runtime"):
            if isinstance(getattr(self, name), str | bytes) or not isinstance(getattr(self, name), Sequence):
                raise UsageError(f"options[{name!r}] is a list, got {getattr(self, name)!r}")
        _expect("store", self.store, (MutableMapping, type(None)), "a dict, which is filled")
        _expect("cache", self.cache, (str, Path, type(None)), "a folder")
        _expect("dump", self.dump, (str, Path, type(None)), "a folder")
        if self.dump is not None:
            _check_folder("dump", self.dump)
        if any(not callable(transform) for transform in self.transforms):
            raise UsageError(f"options['transforms'] holds functions of a model, got {list(self.transforms)!r}")
        if self.optimization is not None and self.optimization not in LEVELS:
            raise UsageError(f"options['optimization'] is one of {', '.join(LEVELS)}, got {self.optimization!r}")
        if self.threads is not None and (type(self.threads) is not int or self.threads < 1):
            raise UsageError(f"options['threads'] is a positive number, got {self.threads!r}")
        resolve_opsets(self.opset)
        checked_items(self.runtime)
        _check_providers(self.providers)


@dataclass(frozen=True)
class DebugOptions(BackendOptions):
    """The options of the backend ``onnxplug_debug``, beside the options of ``onnxplug``.

    Options of ONNX Runtime's sessions are accepted and change nothing.

    Attributes:
        compare: Compare the result of every operator with PyTorch's on the same inputs; an operator that differs is an
            error. With ``False`` the graphs are only run.
        verbose: The text written for each call: 0 nothing; 1 each node; 2 also dtype, shape and range of inputs,
            constants and results; 3 their first five elements; 10 all elements.
        write: A function that takes each line, or a file to which lines are appended; the standard output when
            ``None``.
        fallback: Run a graph by eager PyTorch, with one warning, when it can't be converted or run or differs; by
            default this raises.

    Raises:
        UsageError: A value is malformed.
    """

    compare: bool = True
    verbose: int = 0
    write: Callable[[str], None] | str | Path | None = None
    fallback: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _expect("compare", self.compare, bool, "True or False")
        if type(self.verbose) is not int or self.verbose < 0:
            raise UsageError(f"options['verbose'] is a level from 0 to 10, got {self.verbose!r}")
        if self.write is not None and not callable(self.write):
            _expect("write", self.write, (str, Path), "a function that takes a line, or a file")
            try:
                Path(self.write).open("a", encoding="utf-8").close()
            except OSError as error:
                raise UsageError(f"options['write']: {str(self.write)!r} can't be written: {error}") from error


Options = TypeVar("Options", bound=BackendOptions)


def runtime_of(options: BackendOptions) -> str | None:
    """The runtime that graphs are converted for."""
    if options.target != "auto":
        return options.target
    return f"{DEFAULT_RUNTIME}:cpu" if list(options.providers) == [CPU] else DEFAULT_RUNTIME


def parse_options(
    options: Mapping[str, Any] | None,
    mode: str | None = None,
    kind: type[Options] = BackendOptions,  # type: ignore[assignment]
) -> Options:
    """The options of a ``torch.compile`` call.

    Args:
        options: The argument ``options=``.
        mode: The argument ``mode=``. Torch's modes are accepted; they steer inductor and change nothing here.
        kind: The class of the backend's options.

    Raises:
        UsageError: An option or mode is unknown, or a value is malformed.
    """
    if mode is not None and mode not in MODES:
        raise UsageError(f"the mode {mode!r} is unknown; torch.compile's modes are {', '.join(MODES)}")
    if options is None:
        return kind()
    known = [f.name for f in dataclasses.fields(kind)]
    backend = "onnxplug_debug" if kind is DebugOptions else "onnxplug"
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=1)
            raise UsageError(
                f"the backend {backend!r} has no option {name!r}",
                hint=f"Did you mean {close[0]!r}?" if close else f"Its options are {', '.join(known)}.",
            )
    return kind(**options)


def _expect(name: str, value: Any, kind: Any, text: str) -> None:
    if not isinstance(value, kind):
        raise UsageError(f"options[{name!r}] is {text}, got {value!r}")


def _check_folder(name: str, folder: str | Path) -> None:
    """Makes a folder that an option names, and checks that it can be written to."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(f"options[{name!r}]: {str(folder)!r} is not a folder that can be written: {error}") from error


def _check_providers(providers: Sequence[Any]) -> None:
    available = onnxruntime_module().get_available_providers()
    for provider in providers:
        name = provider[0] if isinstance(provider, list | tuple) and provider else provider
        if isinstance(provider, list | tuple) and not (len(provider) == 2 and isinstance(provider[1], Mapping)):
            raise UsageError(f"a provider is a name, or a name with a dict of its options, got {provider!r}")
        if name not in available:
            raise UsageError(
                f"the installed ONNX Runtime has no execution provider {name!r}; it has {', '.join(available)}"
            )
