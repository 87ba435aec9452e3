"""A model, and the state that its code keeps, are after an export as they were before, also where it fails."""

from __future__ import annotations

import contextvars
import functools
import itertools
import random
import threading
import warnings
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from onnxplug_tools.diagnosis.draft import draft_findings
from torch import nn

import onnxplug
from onnxplug.capture.mentions import Mentions
from onnxplug.patches.state import State

_TABLE: Any = None
_LENGTH = 0
_TABLES: dict[Any, Any] = {}
_CALLS: list[int] = []
_LOCAL = threading.local()
_VARIABLE: contextvars.ContextVar[Any] = contextvars.ContextVar("table", default=None)


def _made(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.shape[-1], dtype=x.dtype) + 1


class _Rotary:
    """A table that is made at the first call."""

    shared: Any = None

    def __init__(self) -> None:
        self.length, self.table = 0, None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.length < x.shape[-1]:
            self.length, self.table = x.shape[-1], _made(x)
        return self.table[: x.shape[-1]]


class _Slots:
    __slots__ = ("inner", "table")

    def __init__(self) -> None:
        self.inner = _Rotary()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "table"):
            self.table = _made(x)
        return self.table[: x.shape[-1]] + self.inner(x)


class _Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def table(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.table(x)


class _Object(_Base):
    def __init__(self) -> None:
        super().__init__()
        self.rotary = _Rotary()

    def table(self, x: torch.Tensor) -> torch.Tensor:
        return self.rotary(x)


class _ObjectInSlots(_Base):
    def __init__(self) -> None:
        super().__init__()
        self.kept = [(_Slots(),)]

    def table(self, x: torch.Tensor) -> torch.Tensor:
        return self.kept[0][0](x)


class _NewAttribute(_Base):
    def table(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self.linear, "extra"):
            self.linear.extra = {"tables": [_made(x)]}
        return self.linear.extra["tables"][0]


class _Containers(_Base):
    def __init__(self) -> None:
        super().__init__()
        self.tables: Any = OrderedDict(a=deque(maxlen=3), b=UserDict(), c=SimpleNamespace(), d=set())

    def table(self, x: torch.Tensor) -> torch.Tensor:
        queue, mapping, space, kept = self.tables.values()
        if not queue:
            queue.append(_made(x))
            mapping["table"] = space.table = queue[0] * 2
            kept.add(mapping["table"])
        (table,) = kept
        return queue[0] + mapping["table"] + space.table + table


class _OfTheClass(_Base):
    def table(self, x: torch.Tensor) -> torch.Tensor:
        if _Rotary.shared is None:
            _Rotary.shared = _made(x)
        if "tables" not in vars(type(self)):
            type(self).tables = {4: _made(x)}
        return _Rotary.shared + type(self).tables[4]


class _Global(_Base):
    def table(self, x: torch.Tensor) -> torch.Tensor:
        global _TABLE, _LENGTH, _NEW
        _CALLS.append(1)
        if x.shape[-1] > _LENGTH:
            _TABLE, _LENGTH = _made(x), x.shape[-1]
            _NEW = _TABLES[_LENGTH] = (_TABLE,)
        return _TABLE[: x.shape[-1]] + _NEW[0]


class _Closure(_Base):
    def __init__(self) -> None:
        super().__init__()
        result = None

        def find(x: torch.Tensor, kept: Any = {}) -> Any:  # noqa: B006
            nonlocal result
            if result is None:
                result = kept["table"] = find.table = _made(x)
            return result + kept["table"] + find.table

        self.find = find

    def table(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.find(x)
        return result


@functools.lru_cache
def _cached(length: int) -> torch.Tensor:
    return torch.arange(length, dtype=torch.float32)


class _LruCache(_Base):
    def table(self, x: torch.Tensor) -> torch.Tensor:
        return _cached(x.shape[-1])


class _Locals(_Base):
    def table(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(_LOCAL, "table"):
            _LOCAL.table = _made(x)
        if _VARIABLE.get() is None:
            _VARIABLE.set(_made(x))
        return _LOCAL.table + _VARIABLE.get()


class _Counter(_Base):
    def __init__(self) -> None:
        super().__init__()
        self.count, self.counts, self.log = 1, np.ones(2), bytearray(1)
        self.rotary = _Rotary()

    def table(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.rotary.length += 1
        self.counts[0] += 1
        self.log.append(1)
        return x * (self.count + self.rotary.length + float(self.counts[0]) + len(self.log))


@functools.lru_cache
def _results() -> dict[str, torch.Tensor]:
    return {}


class _ResultOfAFunction(_Base):
    """A table in the dict that a function with a cache gives, called before the export."""

    def __init__(self) -> None:
        super().__init__()
        _results().clear()

    def table(self, x: torch.Tensor) -> torch.Tensor:
        return _results().setdefault("table", _made(x))


class _StaticMethod(_Base):
    @staticmethod
    @functools.lru_cache
    def kept() -> dict[str, torch.Tensor]:
        return {}

    def table(self, x: torch.Tensor) -> torch.Tensor:
        return self.kept().setdefault("table", _made(x))


class _Namespace(_Base):
    def __init__(self) -> None:
        super().__init__()
        self.space: Any = SimpleNamespace()
        self.space.me = self.space

    def table(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self.space, "table"):
            self.space.table = _made(x)
        return self.space.me.table  # type: ignore[no-any-return]


_MODELS = [
    _ResultOfAFunction,
    _StaticMethod,
    _Namespace,
    _Object,
    _ObjectInSlots,
    _NewAttribute,
    _Containers,
    _OfTheClass,
    _Global,
    _Closure,
    _LruCache,
    _Locals,
]


def test_settings_of_torch_are_put_back() -> None:
    class Model(_Base):
        def table(self, x: torch.Tensor) -> torch.Tensor:
            torch.set_default_dtype(torch.float64)
            torch.use_deterministic_algorithms(True)
            return x

    onnxplug.to_onnx(Model(), (torch.ones(3, 4),))
    assert torch.get_default_dtype() == torch.float32
    assert not torch.are_deterministic_algorithms_enabled()


class _Failing(nn.Module):
    """A model that can't be captured, after the inner one has been called."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x)
        return y if y.sum() > 0 else y.flip(0)


@pytest.fixture(autouse=True)
def _nothing_kept() -> None:
    global _TABLE, _LENGTH
    _TABLE, _LENGTH, _Rotary.shared = None, 0, None
    globals().pop("_NEW", None)
    if "tables" in vars(_OfTheClass):
        del _OfTheClass.tables  # type: ignore[attr-defined]
    vars(_LOCAL).clear()
    _TABLES.clear()
    _CALLS.clear()
    _cached.cache_clear()
    _VARIABLE.set(None)


def _eager(model: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = model(x)
    assert type(y) is torch.Tensor
    return y


@pytest.mark.parametrize(
    ("kind", "strict"),
    [
        *((kind, None) for kind in (*_MODELS, _Counter)),
        *((kind, True) for kind in (_Object, _NewAttribute, _OfTheClass)),
    ],
)
def test_eager_after_an_export(kind: type[_Base], strict: bool | None) -> None:
    """The model has never been called before: the capture makes the values that the model keeps at the first call."""
    model, x = kind().eval(), torch.randn(3, 4)
    program = onnxplug.to_onnx(model, (x,), strict=strict)
    result = program(x)[0]
    torch.testing.assert_close(result, _eager(model, x))


@pytest.mark.parametrize("kind", _MODELS)
def test_eager_after_an_export_that_fails(kind: type[_Base]) -> None:
    model, x = _Failing(kind()).eval(), torch.randn(3, 4)
    with pytest.raises(onnxplug.CaptureError):
        onnxplug.to_onnx(model, (x,))
    after = _eager(model, x)
    torch.testing.assert_close(_eager(model, x), after)


@pytest.mark.parametrize("kind", _MODELS)
def test_eager_after_a_draft(kind: type[_Base]) -> None:
    model, x = _Failing(kind()).eval(), torch.randn(3, 4)
    draft_findings(model, (x,), {})
    _eager(model, x)


def test_the_next_attempt_finds_nothing_of_the_last_attempt() -> None:
    """The first attempt fails after the table was made; the strict mode captures the comparison of a value."""

    class Model(_Object):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            return y * max(float(y.sum()), 1.0)

    model, x = Model().eval(), torch.rand(3, 4)
    program = onnxplug.to_onnx(model, (x,), dynamic_shapes=({0: "batch"},))
    x = torch.randn(5, 4)
    torch.testing.assert_close(program(x)[0], _eager(model, x))


class _Hooked(nn.Module):
    """Gives its layer a hook at each call, as transformers does to capture outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.layer.register_forward_hook(lambda module, args, result: result + 1)
        return self.layer(x)  # type: ignore[no-any-return]


def test_a_hook_that_a_model_registers_is_taken_away() -> None:
    model, x = _Hooked().eval(), torch.randn(2, 3)
    expected = model.layer(x) + 1
    program = onnxplug.to_onnx(model, (x,))
    torch.testing.assert_close(program(x)[0], expected)
    assert not model.layer._forward_hooks


def test_shared_containers_stay_shared() -> None:
    """The containers are the same objects, with the same contents."""

    class Model(nn.Module):
        def __init__(self, shared: dict[str, Any]) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            self.shared = self.first.shared = self.second.shared = shared
            self.sizes = [1, [2]]
            self.inner = self.sizes[1]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.shared["count"] += 1
            self.inner.append(3)
            self.sizes.append(4)
            self.shared["y"] = self.first(x)
            return self.second(self.shared["y"]) + len(self.sizes[1])

    shared = {"count": 0}
    model, x = Model(shared), torch.randn(3, 4)
    sizes, inner = model.sizes, model.inner
    onnxplug.to_onnx(model, (x,))
    assert model.shared is model.first.shared is model.second.shared is shared
    assert shared == {"count": 0}
    assert model.sizes is sizes
    assert model.inner is inner is sizes[1]
    assert sizes == [1, [2]]
    _eager(model, x)
    assert model.first.shared["count"] == 1


def test_a_counter_of_the_model_is_put_back_and_a_log_of_its_code_goes_on() -> None:
    model = _Counter()
    onnxplug.to_onnx(model, (torch.randn(3, 4),))
    assert (model.count, model.rotary.length, model.counts.tolist(), len(model.log)) == (1, 0, [1, 1], 1)

    class Logged(_Base):
        def table(self, x: torch.Tensor) -> torch.Tensor:
            _CALLS.append(1)
            return x

    onnxplug.to_onnx(Logged(), (torch.randn(3, 4),))
    assert _CALLS


class _Counts(_Base):
    """Counts in an attribute, a list and a dict; the first two are the same one."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: Any = itertools.count(3)
        self.kept = [self.ids, {"steps": itertools.count(1, 2)}]
        self.step = _Rotary()
        self.step.table = itertools.count(0.5, 0.25)

    def table(self, x: torch.Tensor) -> torch.Tensor:
        return x * (next(self.ids) + next(self.kept[1]["steps"]) + next(self.step.table))


@pytest.mark.parametrize("strict", [None, False])
def test_counts_begin_where_they_were(strict: bool | None) -> None:
    model = _Counts()
    next(model.ids)
    onnxplug.to_onnx(model, (torch.randn(3, 4),), strict=strict)
    assert model.kept[0] is model.ids
    assert (next(model.ids), next(model.kept[1]["steps"]), next(model.step.table)) == (4, 1, 0.5)


class _Draws(_Base):
    """What draws from everything that gives random numbers to the model, and from those that are the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.own: Any = (random.Random(1), np.random.default_rng(2), np.random.RandomState(3))
        self.generator = torch.Generator().manual_seed(4)

    def table(self, x: torch.Tensor) -> torch.Tensor:
        return x * sum(self.drawn())

    def drawn(self) -> list[float]:
        python, numpy, older = self.own
        shared = [random.random(), float(np.random.rand()), float(np.random.standard_normal())]
        own = [python.random(), numpy.random(), older.rand(), older.standard_normal()]
        return [*shared, *map(float, own)]


@pytest.mark.filterwarnings("ignore")
def test_random_numbers_go_on_as_without_an_export() -> None:
    def seeded() -> _Draws:
        torch.manual_seed(0), random.seed(0), np.random.seed(0)
        return _Draws()

    def after(model: _Draws) -> list[float]:
        torchs = [torch.rand(1, generator=g).item() for g in (None, model.generator)]
        return [*model.drawn(), *torchs]

    x = torch.ones(3, 4)
    expected = after(seeded())
    model = seeded()
    onnxplug.to_onnx(model, (x,))
    assert after(model) == expected
    model = seeded()
    with pytest.raises(onnxplug.OnnxplugError):
        onnxplug.to_onnx(_Failing(model), (x,))
    assert after(model) == expected


@pytest.mark.parametrize("draws", [0, 1, 2])
def test_random_numbers_of_python_and_numpy_are_constants(draws: int) -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * [lambda: 2.0, random.random, np.random.rand][draws]() + torch.rand(x.shape)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        onnxplug.to_onnx(Model(), (torch.ones(3, 4),))
    assert sum("random numbers of Python or NumPy" in str(w.message) for w in caught) == bool(draws)


class _Table(_Base):
    """Counts in an array of this many bytes."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.calls = np.zeros(size, np.uint8)

    def table(self, x: torch.Tensor) -> torch.Tensor:
        self.calls[-1] += 1
        return x * float(self.calls[-1])


def test_large_arrays_are_put_back_or_refused() -> None:
    x = torch.ones(3, 4)
    model = _Table(1 << 26)
    onnxplug.to_onnx(model, (x,))
    assert model.calls[-1] == 0
    model = _Table((1 << 26) + 1)
    with pytest.raises(
        onnxplug.OnnxplugError, match=r"test_state\.py:\d+\) writes to a NumPy array of more than 64 MiB"
    ):
        onnxplug.to_onnx(model, (x,))
    assert model.calls[-1] == 0
    assert model.calls.flags.writeable


def test_objects_in_arrays_are_put_back() -> None:
    class Logs(_Base):
        def __init__(self) -> None:
            super().__init__()
            self.logs = np.array([[1, 2], None], dtype=object)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.logs[0].append(3)
            return x * float(len(self.logs[0]))

    model = Logs()
    program = onnxplug.to_onnx(model, (torch.ones(3, 4),))
    assert model.logs.tolist() == [[1, 2], None]
    torch.testing.assert_close(program(torch.ones(3, 4))[0], torch.full((3, 4), 3.0))


def test_objects_of_other_threads_and_lazy_ones_are_left_alone() -> None:
    class Lazy(dict[str, int]):
        def __iter__(self) -> Any:
            raise AssertionError("asked for its keys")

        keys = values = items = __iter__  # type: ignore[assignment]

    class Odd:
        @property
        def __dict__(self) -> Any:  # type: ignore[override]
            raise RuntimeError("no attributes")

    model = _Object()
    model.lazy, model.odd, model.event = Lazy(a=1), Odd(), threading.Event()
    state = State(model, Mentions(model))
    model.event.set()
    dict.__setitem__(model.lazy, "b", 2)
    model.rotary.table = torch.ones(1)
    state.restore()
    assert model.event.is_set()
    assert len(model.lazy) == 1
    assert model.rotary.table is None
    vars(model)["training"] = False
    state.restore()
    assert model.training


def test_the_dict_of_an_object_is_put_back() -> None:
    model = _Object()
    before = vars(model.rotary)
    state = State(model, Mentions(model))
    model.rotary.__dict__ = {"table": 1}
    del model.linear
    state.restore()
    assert vars(model.rotary) is before
    assert list(before) == ["length", "table"]
    assert list(dict(model.named_children())) == ["linear"]


def test_time_is_linear_in_the_number_of_modules() -> None:
    import time

    def seconds(layers: int) -> float:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(layers)))
        mentions = Mentions(model)
        _ = mentions.classes
        times = []
        for _ in range(5):
            start = time.process_time()
            State(model, mentions).restore()
            times.append(time.process_time() - start)
        return min(times)

    assert seconds(800) < 20 * seconds(100)
