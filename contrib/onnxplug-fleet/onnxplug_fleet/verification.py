"""Verification on data: an ONNX model beside PyTorch on samples, by metrics with thresholds."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnxplug.errors import UsageError, VerificationError
from onnxplug.text import counted
from onnxplug_fleet.data import Sample, open_data
from onnxplug_fleet.metrics import Metric, metric_of

#: The key of a threshold in a model's metadata, before the metric's name.
PREFIX = "onnxplug.threshold."


@dataclass(frozen=True)
class Measured:
    """The value of a metric over all samples.

    Attributes:
        metric: The metric's name.
        value: The mean over the samples, or the largest value.
        threshold: The threshold that the value must reach, or must not exceed; ``None`` for none.
        accepted: Whether the value meets the threshold.
        worst: The name of the worst sample.
        worst_value: The metric's value on the worst sample.
        file: The file with the worst sample's inputs and both models' results; ``None`` where nothing was saved.
    """

    metric: str
    value: float
    threshold: float | None
    accepted: bool
    worst: str
    worst_value: float
    file: str | None = None


@dataclass(frozen=True)
class DataReport:
    """The values of metrics on data.

    Attributes:
        samples: The number of samples that were compared.
        measured: A row for each metric.
    """

    samples: int
    measured: tuple[Measured, ...]

    @property
    def accepted(self) -> bool:
        """Whether each metric meets its threshold."""
        return all(row.accepted for row in self.measured)

    def problems(self) -> list[str]:
        """The thresholds that are missed, a sentence each."""
        return [
            f"{row.metric} is {row.value:.6g}, the threshold {row.threshold:.6g}; the worst of {counted(self.samples, 'sample')} "
            f"is {row.worst} with {row.worst_value:.6g}" + (f", saved as {row.file}" if row.file else "")
            for row in self.measured
            if not row.accepted
        ]


@dataclass
class _Worst:
    """The worst sample so far, of one metric."""

    value: float
    sample: Sample
    expected: Sequence[Any]
    actual: Sequence[Any]


def verify_data(program: Any, model: Any, data: Any, metric: Any = None, **settings: Any) -> DataReport:
    """Compares an ONNX model with a PyTorch model on samples.

    Args:
        program, model, data, metric, settings: As :func:`measure_data` takes them.

    Raises:
        VerificationError: A metric misses its threshold; the message names the worst sample.
        UsageError: An argument is malformed.
    """
    report = measure_data(program, model, data, metric, **settings)
    if not report.accepted:
        raise VerificationError("; ".join(report.problems()), hint="verify(intermediates=True) says who is wrong.")
    return report


def verify_program(program: Any, data: Any, metric: Any = None, **settings: Any) -> DataReport:
    """As :func:`verify_data`, with the model that the program was exported from.

    Raises:
        UsageError: The program was not made by ``to_onnx``.
    """
    captured = program.captured
    if captured is None:
        raise UsageError("the program knows no PyTorch model: use onnxplug_fleet.verify_data(program, model, data)")
    model = captured.reference if captured.reference is not None else program.exported_program.module()
    return verify_data(program, model, data, metric, **settings)


def measure_data(
    program: Any,
    model: Any,
    data: Any,
    metric: Any = None,
    *,
    thresholds: Mapping[str, float] | None = None,
    samples: int | None = None,
    labelled: bool = False,
    save: str | os.PathLike[str] | None = None,
) -> DataReport:
    """Compares an ONNX model with a PyTorch model on samples, and only reports the result.

    Args:
        program: An ``OnnxProgram``, or the path of an ONNX file.
        model: The PyTorch model, a Module or function.
        data: As :func:`onnxplug_fleet.data.open_data` takes it.
        metric: A name, a function of both models' results, or a list of these, beside the thresholds' metrics; the
            largest difference where there is neither.
        thresholds: Metric to threshold, a function by its ``__name__``; the thresholds that the model keeps when
            ``None``.
        samples: The number of samples to read at most.
        labelled: Items of the data are ``(inputs, label)``.
        save: A folder for the worst sample of each metric: inputs and both models' results, as ``.npz``.

    Raises:
        UsageError: An argument is malformed, or there is no sample.
        VerificationError: The model does not run.
    """
    kept = kept_thresholds(program) if thresholds is None else dict(thresholds)
    chosen = metric if isinstance(metric, list | tuple) else [metric] if metric is not None else []
    named = _by_name(chosen)
    metrics = [*named.values(), *(metric_of(name) for name in kept if name not in named)] or [metric_of("largest")]
    values: dict[str, list[float]] = {m.name: [] for m in metrics}
    worst: dict[str, _Worst] = {}
    run = _runner(program)
    with _evaluating(model):
        for sample in open_data(data, samples, batches=labelled):
            expected, actual = _eager(model, sample), run(sample)
            if len(actual) < len(expected):
                raise VerificationError(f"the model has {len(actual)} outputs, PyTorch {len(expected)} results")
            actual = actual[: len(expected)]  # mutated state follows
            for m in metrics:
                value = float(m.score(expected, actual))
                values[m.name].append(value)
                if m.name not in worst or m.is_worse(value, worst[m.name].value):
                    worst[m.name] = _Worst(value, sample, expected, actual)
    if not worst:
        raise UsageError("there is no sample in the data")
    rows = [_row(m, values[m.name], worst[m.name], kept.get(m.name), save) for m in metrics]
    return DataReport(len(values[metrics[0].name]), tuple(rows))


def _by_name(chosen: Sequence[Any]) -> dict[str, Metric]:
    """Each metric once, by the name that thresholds and results give it."""
    metrics: dict[str, Metric] = {}
    for metric in (metric_of(given) for place, given in enumerate(chosen) if given not in chosen[:place]):
        if metrics.setdefault(metric.name, metric) is not metric:
            raise UsageError(f"two metrics are called {metric.name!r}", hint="Give each function a name of its own.")
    return metrics


def _row(metric: Metric, values: list[float], worst: _Worst, threshold: float | None, save: Any) -> Measured:
    value = max(values) if metric.largest else sum(values) / len(values)
    if any(v != v for v in values):
        value = float("nan")
    accepted = threshold is None or metric.accepts(value, threshold)
    file = None if save is None else str(_save_worst(Path(save), metric.name, worst))
    return Measured(metric.name, value, threshold, accepted, worst.sample.name, worst.value, file)


def _save_worst(folder: Path, metric: str, worst: _Worst) -> Path:
    """Writes a sample and both models' results on it."""
    import numpy as np
    import torch

    from onnxplug.torch_private import pytree

    arrays = {f"input_{index}": value for index, value in enumerate(worst.sample.args)}
    arrays |= dict(worst.sample.kwargs)
    arrays |= {f"pytorch_{index}": value for index, value in enumerate(worst.expected)}
    arrays |= {f"onnx_{index}": value for index, value in enumerate(worst.actual)}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"worst-{''.join(c if c.isalnum() else '-' for c in metric)}.npz"
    numpy_arrays: dict[str, Any] = {}
    for name, value in arrays.items():
        leaves = pytree.tree_leaves(value)
        for place, leaf in enumerate(leaves):
            tensor = leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else torch.as_tensor(leaf)
            tensor = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
            numpy_arrays[name if len(leaves) == 1 else f"{name}_{place}"] = tensor.numpy()
    np.savez_compressed(path, **numpy_arrays)
    return path


# -- the models --------------------------------------------------------------------------------------------------------


def _eager(model: Any, sample: Sample) -> list[Any]:
    """PyTorch's results on a sample, flattened."""
    import torch

    from onnxplug.capture.eager import inference
    from onnxplug.torch_private import pytree

    copies = pytree.tree_map_only(torch.Tensor, torch.clone, (tuple(sample.args), dict(sample.kwargs)))
    try:
        with inference():
            results = model(*copies[0], **copies[1])
    except Exception as error:
        raise UsageError(f"the PyTorch model does not run on {sample.name}: {type(error).__name__}: {error}") from error
    return [torch.as_tensor(leaf) for leaf in pytree.tree_leaves(results) if leaf is not None]


def _runner(program: Any) -> Callable[[Sample], list[Any]]:
    """Makes the function that runs the ONNX model on a sample."""
    if not isinstance(program, str | os.PathLike):
        named = [slot.name for slot in program.inputs if slot.position is not None]

        def call(sample: Sample) -> list[Any]:
            by_position = program.captured is not None and not program.captured.kwargs
            if by_position and not sample.args and set(named) == set(sample.kwargs):
                return list(program(*(sample.kwargs[name] for name in named)))
            return list(program(*sample.args, **sample.kwargs))

        return call
    import torch
    from onnxplug_tools.onnx_file import read_model
    from onnxplug_tools.verification import input_order

    from onnxplug.run.session import Runner
    from onnxplug.torch_private import pytree

    read_model(program)
    runner = Runner(os.fspath(program))
    names = runner.input_names

    def run(sample: Sample) -> list[Any]:
        leaves = pytree.tree_leaves((tuple(sample.args), dict(sample.kwargs)))
        fed = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        if len(fed) != len(names):
            raise UsageError(
                f"the model takes {counted(len(names), 'input')} ({', '.join(names)}), {sample.name} has {len(fed)}"
            )
        order = input_order(names, fed, sample.args, sample.kwargs)
        return runner({name: leaves[position] for name, position in order.items()})

    return run


@contextlib.contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """The model in evaluation mode; each module is in its own mode again afterwards."""
    import torch

    modules = list(model.modules()) if isinstance(model, torch.nn.Module) else []
    modes = [(module, module.training) for module in modules]
    if any(mode for _, mode in modes):
        model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


# -- thresholds --------------------------------------------------------------------------------------------------------


def keep_thresholds(program: Any, thresholds: Mapping[str, float]) -> None:
    """Keeps thresholds in a program's metadata, which are saved with it.

    Args:
        program: An ``OnnxProgram``.
        thresholds: Metric to threshold.
    """
    for name, value in thresholds.items():
        program.model.metadata_props[f"{PREFIX}{name}"] = repr(float(value))


def kept_thresholds(program: Any) -> dict[str, float]:
    """The thresholds that a program or a file keeps.

    Args:
        program: An ``OnnxProgram``, or the path of an ONNX file.
    """
    if isinstance(program, str | os.PathLike):
        from onnxplug_tools.onnx_file import read_model

        properties = {entry.key: entry.value for entry in read_model(program).metadata_props}
    else:
        properties = dict(program.model.metadata_props)
    return {key.removeprefix(PREFIX): float(value) for key, value in properties.items() if key.startswith(PREFIX)}
