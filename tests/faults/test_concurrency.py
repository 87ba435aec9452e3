"""Many exports in one process and in threads, and processes that save one file: the results are those of one alone."""

from __future__ import annotations

import gc
import io
import os
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import onnxplug
from tests.faults.kinds import NEW, OLD, Model, number_in, program
from tests.run.saved import age
from tests.support.child import run_child

#: Megabytes by which a process's memory may grow from 200 to 1000 exports.
GROWTH = 48


class Branching(torch.nn.Module):
    """A model whose graph depends on its width, with a dynamic size, a branch and a buffer that it writes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, width)
        self.norm = torch.nn.LayerNorm(width)
        self.register_buffer("count", torch.zeros(()))
        with torch.no_grad():  # no random numbers: threads share their state
            for parameter in self.parameters():
                parameter.copy_(torch.linspace(-1, width, parameter.numel()).view_as(parameter))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        x = self.norm(self.linear(x))
        for _ in range(self.linear.out_features % 3):
            x = torch.nn.functional.gelu(x) + x.mean(0, keepdim=True)
        return x.reshape(x.shape[0], -1) * self.count


def exported(width: int, **options: Any) -> bytes:
    """The bytes of a model's export."""
    file = io.BytesIO()
    shapes = ({0: f"batch{width}"},)
    onnxplug.to_onnx(
        Branching(width).eval(), (torch.ones(3, 4),), dynamic_shapes=shapes, metadata="none", **options
    ).save(file)
    return file.getvalue()


def resident() -> float:
    """Megabytes of this process in memory."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def in_threads(*actions: Callable[[], Any]) -> list[Any]:
    """Does actions at the same time; returns the result of each, or the text of its error."""
    results: list[Any] = [None] * len(actions)
    start = threading.Barrier(len(actions))

    def run(position: int) -> None:
        start.wait()
        try:
            results[position] = actions[position]()
        except BaseException as error:
            results[position] = "".join(traceback.format_exception(error))

    threads = [threading.Thread(target=run, args=(position,)) for position in range(len(actions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive(), "a thread waits for ever"
    return results


def _exported_often(count: int) -> list[float]:
    first = exported(5)
    sizes = []
    for number in range(count):
        assert exported(5) == first, f"export {number} differs"
        if number % 100 == 99:
            sizes.append(resident())
    return sizes


def test_exports_in_one_process_are_equal() -> None:
    _exported_often(6)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_thousand_exports_in_one_process() -> None:
    """Each export equals the first, and memory does not grow. In a new process, as pytest keeps what torch logs."""
    code = "from tests.faults.test_concurrency import _exported_often; print(*_exported_often(1000))"
    child = run_child("-c", code, cwd=Path.cwd())
    assert child.returncode == 0, child.stderr
    sizes = [float(size) for size in child.stdout.splitlines()[-1].split()]
    assert len(sizes) == 10
    assert sizes[-1] - sizes[1] < GROWTH, sizes


@pytest.mark.parametrize("turns", [1, pytest.param(10, marks=pytest.mark.long)])
def test_threads_that_export_different_models(turns: int) -> None:
    widths = range(3, 11)
    alone = [exported(width) for width in widths]
    for _ in range(turns):
        together = in_threads(*[lambda width=width: exported(width) for width in widths])  # type: ignore[misc]
        assert [t if isinstance(t, str) else "" for t in together] == [""] * 8
        assert together == alone


def test_threads_that_export_and_verify(tmp_path: Path) -> None:
    def verified() -> int:
        return len(program(OLD).verify().cases)

    def saved(value: float, name: str) -> float | None:
        program(value).save(tmp_path / name, external_data=True)
        return number_in(tmp_path / name)

    alone, cases = exported(4), verified()
    together = in_threads(
        lambda: exported(4),
        verified,
        lambda: saved(OLD, "a.onnx"),
        lambda: saved(NEW, "b.onnx"),
        lambda: exported(4),
        verified,
    )
    assert together == [alone, cases, OLD, NEW, alone, cases]


def test_threads_with_a_backend() -> None:
    """Models are compiled and run in threads, not beside an export: torch traces one at a time (docs/security.md)."""
    models = [Model(value).eval() for value in (0.01, 0.02, 0.03)]
    inputs = torch.ones(2, 24)

    def compiled(model: Model) -> bool:
        with torch.no_grad():
            result = torch.compile(model, backend="onnxplug")(inputs)
            return torch.allclose(result, model(inputs))

    torch.compiler.reset()
    assert compiled(Model(0.04).eval())  # torch loads a backend at its first use, and two threads would load it twice
    assert in_threads(*[lambda model=model: compiled(model) for model in models]) == [True] * 3  # type: ignore[misc]


@pytest.mark.parametrize("turns", [6, pytest.param(60, marks=pytest.mark.long)])
@pytest.mark.parametrize("period", [1, 3, 0], ids=["data", "now and then", "single"])
def test_processes_that_save_one_file(tmp_path: Path, turns: int, period: int) -> None:
    """The file is whole in the end, with the data of its own model; a save two days later leaves only its own files.

    Args:
        period: The weights lie in a data file in each save (1), in two of three saves (3), or in none (0).
    """
    path = tmp_path / "model.onnx"
    external = period > 0
    program(OLD).save(path, external_data=external)
    program(NEW)
    children = []
    for worker in range(4):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                for turn in range(turns):
                    beside = external and (period == 1 or (worker + turn) % period != 0)
                    program((OLD, NEW)[(worker + turn) % 2]).save(path, external_data=beside)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 4
    assert number_in(path) in (OLD, NEW)
    age(tmp_path)
    program(NEW).save(path, external_data=external)
    assert number_in(path) == NEW
    assert len(list(tmp_path.iterdir())) == (2 if external else 1)
