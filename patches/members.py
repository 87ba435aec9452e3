"""``number in sizes`` and ``size is number`` in torch's strict mode, which compares nothing there by itself."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from typing import Any

from onnxplug.capture.patching import patched


@contextlib.contextmanager
def members_are_compared() -> Iterator[None]:
    """While it holds, the strict mode compares a number with each size of the list that ``in`` searches, and sizes for ``is``.

    By itself it assumes that no size equals a number, and that no size is another object. For ints, identity is equality here.
    """
    from onnxplug.torch_private import SourcelessBuilder, SymNodeVariable, dynamo_instructions, dynamo_lists

    def contains(items: Any, search: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        items = list(items)
        if not search.is_python_constant() or not any(isinstance(item, SymNodeVariable) for item in items):
            return iter_contains(items, search, tx, *args, **kwargs)
        equal = SourcelessBuilder.create(tx, operator.eq)
        for item in items:
            equality_holds = equal.call_function(tx, [item, search], {})
            if (
                equality_holds.evaluate_expr(tx.output)
                if isinstance(equality_holds, SymNodeVariable)
                else equality_holds.as_python_constant()
            ):
                return type(search).create(True)
        return type(search).create(False)

    def identical(name: str, equality: str) -> Any:
        def handler(tx: Any, sides: Any, kwargs: Any) -> Any:
            kinds = [number_type(side) for side in sides]
            if kinds[0] is kinds[1] is bool:
                truths = [s.evaluate_expr(tx.output) if isinstance(s, SymNodeVariable) else s for s in sides]
                sides = [SourcelessBuilder.create(tx, t) if isinstance(t, bool) else t for t in truths]
            elif kinds[0] is kinds[1] is int and any(isinstance(side, SymNodeVariable) for side in sides):
                return handlers[equality](tx, sides, kwargs)
            return handlers[name](tx, sides, kwargs)

        return handler

    def number_type(side: Any) -> type | None:
        return side.python_type() if isinstance(side, SymNodeVariable) or side.is_python_constant() else None

    iter_contains, handlers = dynamo_lists.iter_contains, dynamo_instructions.compare_op_handlers
    replaced = {**handlers, "is": identical("is", "=="), "is not": identical("is not", "!=")}
    with (
        patched(dynamo_lists, "iter_contains", contains),
        patched(dynamo_instructions, "compare_op_handlers", replaced),
    ):
        yield
