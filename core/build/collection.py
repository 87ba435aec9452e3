"""Python's cyclic garbage collector, held off while a model is converted."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_holders = 0
_was_enabled = False
#: Objects that _age moved since the last full collection. Python's own count does not include them, so that it would
#: not collect them before the process has grown by other means.
_aged = 0
#: How many full collections there had been then.
_collections = 0
#: How many such objects make a full collection due: two hundred exports of small models leave as many, or one of a
#: thousand nodes.
_DUE = 400_000
#: The same where the last one left more than twice as many: it visits them all.
_due_by_size = 0


def collect_if_due() -> None:
    """Frees what earlier conversions left, if that is much and the program lets the collector run."""
    global _due_by_size
    if _aged > max(_DUE, _due_by_size) and gc.isenabled() and _collections == _full_collections():
        gc.collect()
        if gc.get_freeze_count() == 0:
            gc.freeze()
            _due_by_size = gc.get_freeze_count() // 2
            gc.unfreeze()


def _full_collections() -> int:
    return gc.get_stats()[-1]["collections"]


@contextmanager
def collection_held() -> Iterator[None]:
    """Holds off collections, of which one visits every object of torch: longer than the conversion of a small model takes.

    What a conversion makes is wanted at its end, so there is next to nothing to collect. Nested and concurrent holders
    share one: the last to leave turns the collector on, if it was on.
    """
    global _holders, _was_enabled
    with _lock:
        if _holders == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _holders += 1
    try:
        yield
    finally:
        with _lock:
            _holders -= 1
            if _holders == 0 and _was_enabled:
                _age()
                gc.enable()


def _age() -> None:
    """Moves every young object to the oldest generation, without the visit of all of them that a collection is.

    The first allocation after the collector is on would otherwise collect whatever was made in the meantime.
    """
    global _aged, _collections
    if gc.get_freeze_count() == 0:  # else the program has frozen objects, which must stay so
        before, _collections = _collections, _full_collections()
        _aged = gc.get_count()[0] + (_aged if before == _collections else 0)
        gc.freeze()
        gc.unfreeze()
