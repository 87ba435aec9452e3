"""How long models take, measured in turns in one process, and where their time goes."""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from onnxplug.errors import OnnxplugError, SaveError, UsageError
from onnxplug.host import CPU, Kernels, RuntimeHost, plugin_host
from onnxplug.plugins.runtime import kernels_for
from onnxplug.run.kernels import custom_operators, onnxruntime_module
from onnxplug.run.save import weight_bytes
from onnxplug.run.session import LOG_SEVERITY, make_session, to_ort_value
from onnxplug_tools.inspection.feeds import OTHER_INPUTS, feed_of_other, make_feed
from onnxplug_tools.inspection.load import load_model
from onnxplug_tools.inspection.ort_profile import Profile, operators_of, read_profile
from onnxplug_tools.inspection.pages import check_writable
from onnxplug_tools.inspection.view import view_with_model

#: Runs before anything is measured, and runs that are profiled.
_WARMUP, _PROFILED = 3, 10
#: The graph that ONNX Runtime runs is written with its weights beside it above this size.
_BESIDE = 512 << 20
EAGER = "PyTorch, eager"


@dataclass(frozen=True, slots=True)
class Timing:
    """How long a run takes.

    Attributes:
        median, p10, p90: Seconds.
        ratio: The median divided by the first model's.
    """

    name: str
    runs: int
    median: float
    p10: float
    p90: float
    ratio: float


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements of a model.

    Attributes:
        loading: Seconds that making the session took.
        operators: How often each operator occurs in the file.
        profile: The time by operator and by module; ``None`` where it wasn't asked for.
    """

    timing: Timing
    loading: float
    operators: dict[str, int]
    profile: Profile | None


@dataclass(frozen=True, slots=True)
class Bench:
    """The measurements of all models.

    Attributes:
        sizes: Sizes of dynamic dimensions by name.
        assumed: Names of the dimensions without a given size: they are 1.
        threads: Threads within an operator; ``None`` for the runtimes' own choice.
        models: The models, in the order in which they were given.
        eager: The PyTorch model, if there is one.
    """

    inputs: dict[str, str]
    sizes: dict[str, int]
    assumed: tuple[str, ...]
    threads: int | None
    providers: tuple[str, ...]
    models: tuple[Measured, ...]
    eager: Timing | None


@dataclass(frozen=True)
class Limits:
    """The limits of a measurement, in rounds and in seconds; the seconds end it after three rounds at the earliest.

    Attributes:
        repeat: Rounds: in each, every model runs once.
        seconds: Seconds of all rounds.
    """

    repeat: int = 100
    seconds: float = 10.0


def bench(
    paths: Sequence[Path],
    *,
    given: Sequence[tuple[str | None, Any]] = (),
    sizes: Mapping[str, int] | None = None,
    threads: int | None = None,
    providers: Sequence[str] = (),
    limits: Limits | None = None,
    profile: bool = True,
    optimized: Path | None = None,
    eager: Callable[[], Any] | None = None,
    host: RuntimeHost | None = None,
    progress: Callable[[str], None] = lambda stage: None,
) -> Bench:
    """Measures models on the same inputs, in turns: each runs once in a round, and rounds begin with different models.

    Args:
        paths: ONNX files that take inputs of the same names.
        given, sizes: Inputs, and sizes of dynamic dimensions (:func:`onnxplug_tools.inspection.feeds.make_feed`).
        providers: Execution providers; the CPU's is added to them.
        profile: Also profile each model, by itself.
        optimized: Where to write the graph that ONNX Runtime runs, of a single model.
        eager: Runs a PyTorch model; it takes its turns with the ONNX models.
        host: The plugins whose libraries run custom operators; all that are installed when ``None``.
        progress: Called with the name of each step as it begins.
    """
    if optimized is not None and len(paths) != 1:
        raise UsageError("the optimised graph can be written of one model at a time")
    if optimized is not None:
        check_writable(optimized, "optimised graph", paths)
    chosen = _providers(providers)
    models = [load_model(path) for path in paths]
    feed = make_feed(models[0], given, sizes)
    subjects = []
    for path, model in zip(paths, models, strict=True):
        progress(f"loading {path.name}")
        subjects.append(_Subject(path, model, feed_of_other(model, feed, str(path)), threads, chosen, host))
    runs: list[Callable[[], Any]] = [subject.run for subject in subjects]
    if eager is not None:
        runs.append(eager)
    progress("measuring")
    names = _names(paths)
    with _torch_threads(threads):
        timings = _timings([*names, *([EAGER] if eager is not None else [])], _in_turns(runs, limits or Limits()))
    measured = []
    for subject, timing in zip(subjects, timings, strict=False):
        subject.session = None  # its memory is free for the next models
        profiled = None
        if profile or optimized is not None:
            progress(f"profiling {subject.path.name}")
            profiled = subject.profiled(optimized)
        measured.append(Measured(timing, subject.loading, operators_of(subject.model), profiled if profile else None))
    return Bench(
        feed.texts,
        feed.sizes,
        feed.assumed,
        threads,
        tuple(chosen),
        tuple(measured),
        timings[-1] if eager is not None else None,
    )


def _names(paths: Sequence[Path]) -> list[str]:
    """The files' names, or their whole paths where two names are equal."""
    names = [path.name for path in paths]
    return names if len(set(names)) == len(names) else [str(path) for path in paths]


def _providers(requested: Sequence[str]) -> list[str]:
    """ONNX Runtime's names of the requested providers, ``CUDAExecutionProvider`` for ``cuda``, and the CPU's."""
    available = onnxruntime_module().get_available_providers()
    short = {name.removesuffix("ExecutionProvider").lower(): name for name in available}
    providers = []
    for name in requested:
        known = name if name in available else short.get(name.lower())
        if known is None:
            raise UsageError(
                f"the installed ONNX Runtime has no provider {name!r}", hint=f"It has {', '.join(sorted(short))}."
            )
        providers.append(known)
    return list(dict.fromkeys((*providers, CPU)))


@contextlib.contextmanager
def _torch_threads(threads: int | None) -> Iterator[None]:
    """Sets the number of PyTorch's threads while the context lasts; ``None`` leaves it as it is."""
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _in_turns(runs: Sequence[Callable[[], Any]], limits: Limits) -> list[list[float]]:
    """For each function, the seconds of each of its measured runs."""
    for _ in range(_WARMUP):
        for run in runs:
            run()
    seconds: list[list[float]] = [[] for _ in runs]
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()  # a collection would count as time of the model that runs then
    try:
        until = time.perf_counter() + limits.seconds
        for number in range(max(1, limits.repeat)):
            if number >= min(3, limits.repeat) and time.perf_counter() > until:
                break
            for turn in range(len(runs)):
                index = (turn + number) % len(runs)
                run = runs[index]
                start = time.perf_counter()
                run()
                seconds[index].append(time.perf_counter() - start)
    finally:
        if collecting:
            gc.enable()
    return seconds


def _timings(names: Sequence[str], seconds: Sequence[Sequence[float]]) -> list[Timing]:
    timings: list[Timing] = []
    for name, times in zip(names, seconds, strict=True):
        p10, median, p90 = (float(q) for q in np.percentile(times, [10, 50, 90]))
        first = timings[0].median if timings else median
        timings.append(Timing(name, len(times), median, p10, p90, median / first if first else 1.0))
    return timings


class _Subject:
    """A model with its session.

    Attributes:
        loading: Seconds that making the session took.
    """

    def __init__(
        self,
        path: Path,
        model: ir.Model,
        feed: Mapping[str, torch.Tensor],
        threads: int | None,
        providers: Sequence[str],
        host: RuntimeHost | None,
    ) -> None:
        self.path, self.model = path, model
        self._threads, self._providers = threads, list(providers)
        custom = custom_operators(model)
        self._kernels = Kernels()
        if custom.domains:
            self._kernels = kernels_for(custom, host if host is not None else plugin_host())
            self._providers = list(dict.fromkeys((*self._providers, *self._kernels.providers)))
        self._feed = {name: to_ort_value(value) for name, value in feed.items()}
        start = time.perf_counter()
        self.session = self._make()
        self.loading = time.perf_counter() - start

    def _make(self, options: Any = None) -> Any:
        try:
            return make_session(
                str(self.path),
                self._threads,
                libraries=self._kernels.libraries,
                providers=self._providers,
                options=options,
            )
        except OnnxplugError:
            raise
        except Exception as error:
            raise OnnxplugError(f"ONNX Runtime can't load {self.path}: {error}") from error

    def run(self) -> Any:
        """Runs the model once."""
        return self._run(self.session)

    def _run(self, session: Any) -> Any:
        try:
            return session.run_with_ort_values(None, self._feed)
        except Exception as error:
            raise OnnxplugError(
                f"{self.path} does not run on these inputs: {error}",
                hint=OTHER_INPUTS,
            ) from error

    def profiled(self, optimized: Path | None) -> Profile:
        """Profiles the model in a session of its own.

        Args:
            optimized: Where to write the graph that ONNX Runtime runs.
        """
        with _writing(optimized), tempfile.TemporaryDirectory(prefix=".onnxplug-", dir=_folder_of(optimized)) as made:
            folder = Path(made)
            name = optimized.name if optimized is not None else "optimized.onnx"
            options = onnxruntime_module().SessionOptions()
            options.log_severity_level = LOG_SEVERITY
            options.enable_profiling = True
            options.profile_file_prefix = str(folder / "profile")
            options.optimized_model_filepath = str(folder / name)
            beside = f"{name}.data" if weight_bytes(self.model) > _BESIDE else None
            if beside is not None:
                options.add_session_config_entry("session.optimized_model_external_initializers_file_name", beside)
            session = self._make(options)
            try:
                for _ in range(_WARMUP + _PROFILED):
                    self._run(session)
            finally:
                file = Path(session.end_profiling())
            graph = load_model(folder / name) if (folder / name).is_file() else None
            profile = read_profile(file, view_with_model(self.model), graph, _WARMUP)
            if optimized is not None:
                if beside is not None and (folder / beside).is_file():
                    os.replace(folder / beside, optimized.resolve().parent / beside)
                os.replace(folder / name, optimized)
        return profile


def _folder_of(optimized: Path | None) -> Path | None:
    """The folder in which the graph is written at first: beside its place, to which it is then moved in one step."""
    return None if optimized is None else optimized.resolve().parent


@contextlib.contextmanager
def _writing(optimized: Path | None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SaveError(f"can't write the optimised graph {optimized}: {error}") from error
