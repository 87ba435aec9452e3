"""Python's cyclic garbage collector, held off while a model is converted."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_holders = 0
_was_enabled = False


@contextmanager
def collection_held() -> Iterator[None]:
    """Holds off collections: a single collection visits every object of torch and takes longer than converting a small model.

    All that a conversion makes is needed at its end, so there is next to nothing to collect. Nested and concurrent holders
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
                gc.enable()
