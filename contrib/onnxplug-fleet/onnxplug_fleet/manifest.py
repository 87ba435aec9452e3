"""Manifests: the models of a fleet in TOML, with globs of files and matrices of options; docs/fleet.md has every key."""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import itertools
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onnxplug.errors import OnnxplugError, UsageError
from onnxplug.text import did_you_mean, shortened, type_with_article
from onnxplug_fleet.flags import OptionError, arguments
from onnxplug_fleet.lines import Lines, key_text
from onnxplug_fleet.metrics import is_metric, metric_names

_SIZE = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[KMGT]?)i?B?", re.IGNORECASE)
_GLOB = re.compile(r"[*?\[]")
#: More jobs than this are a mistake in a matrix.
_MOST_JOBS = 10_000


@dataclass(frozen=True, kw_only=True)
class Job:
    """One model with one set of options.

    Attributes:
        name: Its name, unique in the manifest.
        target: The target of ``onnxplug export``.
        folder: The manifest's folder, in which the target is found.
        arguments: The command line's arguments beside the target and the output.
        data: Files of samples, or a function that gives them, as :func:`onnxplug_fleet.data.open_data` takes them.
        samples: The number of samples to read at most; ``None`` for all.
        metrics: Names of metrics, or ``file.py:function``.
        thresholds: Metric to the value that it must reach, or must not exceed.
        timeout: Seconds that it may take.
        memory: Bytes that its process may have; ``None`` for no limit.
        retries: The number of further tries when its process was killed.
        threads: Threads that PyTorch uses.
    """

    name: str
    target: str
    folder: str
    arguments: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    data: str | None = None
    samples: int | None = None
    metrics: tuple[str, ...] = ()
    thresholds: Mapping[str, float] = field(default_factory=dict)
    timeout: float = 3600.0
    memory: int | None = None
    retries: int = 1
    threads: int = 1


@dataclass(frozen=True)
class Manifest:
    """A manifest that was read.

    Attributes:
        workers: Jobs at the same time; ``None`` for a job for each processor.
        store: The store of artefacts; ``None`` for the fleet's own folder.
    """

    path: Path
    jobs: tuple[Job, ...]
    workers: int | None = None
    store: str | None = None

    @property
    def digest(self) -> str:
        """A digest of its jobs."""
        text = json.dumps([dataclasses.asdict(job) for job in self.jobs], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]


_LIST = "a list of texts"
#: The keys of tables, each with the types of its value and their name in words.
_FLEET: dict[str, tuple[tuple[type, ...], str]] = {
    "workers": ((int,), "a number of processes"),
    "store": ((str,), "a folder or a URL that fsspec knows"),
}
_SHARED: dict[str, tuple[tuple[type, ...], str]] = {
    "inputs": ((list,), _LIST),
    "dynamic": ((list,), _LIST),
    "options": ((dict,), "a table of options of onnxplug export"),
    "matrix": ((dict,), "a table of options, each with a list of values"),
    "data": ((str,), "files of samples, or file.py:function"),
    "samples": ((int,), "a number of samples"),
    "metrics": ((list,), _LIST),
    "thresholds": ((dict,), "a table of metrics with numbers"),
    "timeout": ((int, float), "a number of seconds"),
    "memory": ((int, str), "a number of bytes, or a text such as '4GB'"),
    "retries": ((int,), "a number of tries"),
}
_MODEL = {"name": ((str,), "a text"), "target": ((str,), "a text"), **_SHARED}
_TOP: dict[str, tuple[tuple[type, ...], str]] = {
    "fleet": ((dict,), "a table"),
    "defaults": ((dict,), "a table of keys of models"),
    "models": ((list,), "an array of tables: [[models]]"),
}


def read_manifest(path: str | os.PathLike[str], *, threads: int = 1) -> Manifest:
    """Reads a manifest and checks all of it, before anything is exported.

    Args:
        threads: Threads that PyTorch uses in each job.

    Raises:
        UsageError: The manifest can't be read, or a key is wrong; the message has its line.
    """
    file = Path(path)
    try:
        text = file.read_bytes().decode("utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UsageError(f"the manifest {shortened(str(path), 300)} can't be read: {reason}") from None
    try:
        table = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        at = re.search(r"\(at line (\d+), column \d+\)", str(error))
        where = f"{file}:{at[1]}" if at is not None else str(file)
        raise UsageError(
            f"{where}: this is not TOML: {error}", hint="https://toml.io shows how it is written."
        ) from None
    return _Reader(file, Lines(text), threads).manifest(table)


class _Reader:
    """Reads the tables of one manifest.

    Args:
        threads: As in :func:`read_manifest`.
    """

    def __init__(self, path: Path, lines: Lines, threads: int) -> None:
        self._path, self._lines, self._threads = path, lines, threads
        self._folder = path.absolute().parent

    def error(self, at: tuple[str | int, ...], message: str, hint: str | None = None) -> UsageError:
        """The error about a key."""
        line = self._lines.line(at)
        where = f"{self._path}:{line}" if line is not None else str(self._path)
        key = f"{key_text(at)}: " if at else ""
        return UsageError(f"{where}: {shortened(f'{key}{message}', 1000)}", hint=hint)

    def manifest(self, table: Mapping[str, Any]) -> Manifest:
        """The manifest."""
        self._check(table, _TOP, ())
        fleet = table.get("fleet", {})
        self._check(fleet, _FLEET, ("fleet",))
        if fleet.get("workers", 1) < 1:
            raise self.error(("fleet", "workers"), f"takes a number of at least 1, got {fleet['workers']}")
        defaults = table.get("defaults", {})
        self._check(defaults, _SHARED, ("defaults",))
        if not table.get("models"):
            raise self.error(("models",), "there is no model", "Add a table [[models]] with a target.")
        jobs: dict[str, Job] = {}
        for index, model in enumerate(table["models"]):
            at = ("models", index)
            if not isinstance(model, dict):
                raise self.error(at, f"a model is a table, got {type_with_article(model)}", "Write it as [[models]].")
            self._check(model, _MODEL, at)
            for job in self._jobs(model, defaults, at):
                if job.name in jobs:
                    raise self.error(at, f"there are two models {job.name!r}", "Give each a name.")
                jobs[job.name] = job
                if len(jobs) > _MOST_JOBS:
                    raise self.error(
                        at, f"there are more than {_MOST_JOBS} jobs", "A matrix has the product of its lists."
                    )
        return Manifest(self._path, tuple(jobs.values()), fleet.get("workers"), fleet.get("store"))

    def _check(self, table: Any, keys: Mapping[str, tuple[tuple[type, ...], str]], at: tuple[str | int, ...]) -> None:
        """Checks the keys of a table and the kinds of their values."""
        for key, value in table.items():
            here = (*at, key)
            if key not in keys:
                listed = f"The keys are {', '.join(keys)}."
                raise self.error(here, "there is no such key", did_you_mean(key, keys, otherwise=listed))
            kinds, words = keys[key]
            if not isinstance(value, kinds) or isinstance(value, bool):
                raise self.error(here, f"takes {words}, got {shortened(repr(value), 100)}")
            if isinstance(value, list) and words == _LIST and not all(isinstance(item, str) and item for item in value):
                raise self.error(here, f"takes {words}, got {shortened(repr(value), 100)}")
            if isinstance(value, int | float) and not 0 <= value < float("inf"):
                raise self.error(here, f"takes {words}, not {value!r}")

    def _jobs(self, model: Mapping[str, Any], defaults: Mapping[str, Any], at: tuple[str | int, ...]) -> Iterator[Job]:
        """The jobs of a table: one for each file of a glob and each combination of a matrix."""
        if not model.get("target"):
            raise self.error(at, "a model needs a target", 'target = "my_model.py:make", as onnxplug export takes it')
        merged = {**defaults, **model}
        # A model's own options replace the defaults one by one, not as a whole table.
        options = {**defaults.get("options", {}), **model.get("options", {})}
        matrix = merged.get("matrix", {})
        for name, values in matrix.items():
            if not isinstance(values, list) or not values:
                raise self.error((*at, "matrix", name), f"takes a list of values, got {shortened(repr(values), 100)}")
        targets = list(self._targets(model["target"], at))
        for target in targets:
            stem = self._name(model, target, at, several=len(targets) > 1)
            for chosen in itertools.product(*matrix.values()):
                variant = dict(zip(matrix, chosen, strict=True))
                words = ",".join(f"{name}={_word(value)}" for name, value in variant.items())
                name = f"{stem}[{words}]" if words else stem
                yield self._job(name, target, merged, {**options, **variant}, at)

    def _name(self, model: Mapping[str, Any], target: str, at: tuple[str | int, ...], *, several: bool) -> str:
        """The name of a target's job, without the values of a matrix."""
        place = re.sub(r"\.py:.*$|\.\w+$", "", target)
        if "name" not in model:
            return place
        if not model["name"].strip():
            raise self.error((*at, "name"), "the name of a model is empty")
        return f"{model['name']}/{place.rpartition('/')[2]}" if several else str(model["name"])

    def _targets(self, target: str, at: tuple[str | int, ...]) -> Iterator[str]:
        """The targets of a target with a glob; the target itself where it has no glob."""
        if "\0" in target:
            raise self.error((*at, "target"), f"{target!r} has a null character")
        file, colon, name = target.rpartition(":") if re.search(r"\.py:", target) else (target, "", "")
        is_file = bool(colon) or target.endswith((".pt2", ".pt", ".ts"))
        if not is_file:
            yield target
        elif not _GLOB.search(file):
            if not (self._folder / file).is_file():
                raise self.error((*at, "target"), f"there is no file {file}", f"It is looked for in {self._folder}.")
            yield target
        else:
            files = sorted(glob.glob(file, root_dir=self._folder, recursive=True))
            if not files:
                raise self.error((*at, "target"), f"no file is called {file}", f"It is looked for in {self._folder}.")
            yield from (f"{path}{colon}{name}" for path in files)

    def _job(
        self, name: str, target: str, model: Mapping[str, Any], options: dict[str, Any], at: tuple[str | int, ...]
    ) -> Job:
        metrics = [*model.get("metrics", ()), *model.get("thresholds", {})]
        for metric, value in model.get("thresholds", {}).items():
            if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
                raise self.error((*at, "thresholds", metric), f"takes a number, got {shortened(repr(value), 100)}")
        for metric in metrics:
            if not is_metric(metric):
                key = "thresholds" if metric in model.get("thresholds", {}) else "metrics"
                hint = did_you_mean(metric, metric_names(), otherwise=f"The metrics are {', '.join(metric_names())}.")
                raise self.error((*at, key), f"{metric!r} is no metric", hint)
        if metrics and "data" not in model:
            raise self.error((*at, "data"), "metrics need data", 'data = "samples/*.npz", or data = "data.py:samples"')
        if model.get("samples") == 0 or model.get("timeout") == 0:
            key = "samples" if model.get("samples") == 0 else "timeout"
            raise self.error((*at, key), "takes a number above 0, got 0")
        options.setdefault("verify", "weights" not in options)
        return Job(
            name=name,
            target=target,
            folder=str(self._folder),
            arguments=tuple(self._arguments(target, model, options, at)),
            options=options,
            data=model.get("data"),
            samples=model.get("samples"),
            metrics=tuple(dict.fromkeys(metrics)) or (("largest", "mean") if "data" in model else ()),
            thresholds=model.get("thresholds", {}),
            timeout=float(model.get("timeout", Job.timeout)),
            memory=self._memory(model.get("memory"), at),
            retries=model.get("retries", Job.retries),
            threads=self._threads,
        )

    def _arguments(
        self, target: str, model: Mapping[str, Any], options: Mapping[str, Any], at: tuple[str | int, ...]
    ) -> list[str]:
        """The command line's arguments for a model."""
        from onnxplug.cli.inputs import parse_dynamic, parse_input

        try:
            made = arguments(target, options)
        except OptionError as error:
            table = "matrix" if error.option in model.get("matrix", {}) else "options"
            place = (*at, table, error.option) if error.option else (*at, table)
            raise self.error(place, error.message, error.hint) from None
        except OnnxplugError as error:
            raise self.error((*at, "target"), error.message, error.hint) from None
        for text in model.get("inputs", ()):
            try:
                parse_input(text)
            except OnnxplugError as error:
                raise self.error((*at, "inputs"), error.message.removeprefix("--input "), error.hint) from None
            made += ["--input", text]
        try:
            parse_dynamic(model.get("dynamic", ()))
        except OnnxplugError as error:
            raise self.error((*at, "dynamic"), error.message.removeprefix("--dynamic "), error.hint) from None
        return [*made, *(part for text in model.get("dynamic", ()) for part in ("--dynamic", text))]

    def _memory(self, size: int | str | None, at: tuple[str | int, ...]) -> int | None:
        if size is None or isinstance(size, int):
            return size
        match = _SIZE.fullmatch(size.strip())
        if match is None:
            raise self.error((*at, "memory"), f"{size!r} is no size", "Write it as '4GB' or '512MB'.")
        return int(float(match["number"]) * 1000 ** " KMGT".index(match["unit"].upper() or " "))


def _word(value: Any) -> str:
    return (
        str(value).lower()
        if isinstance(value, bool)
        else ",".join(map(str, value))
        if isinstance(value, list)
        else str(value)
    )
