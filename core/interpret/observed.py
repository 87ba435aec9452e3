"""An interpreter that tells the profile and the log which rules it applies."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

from onnxplug import logs
from onnxplug.errors import Decline
from onnxplug.interpret.interpreter import DynamoInterpreter
from onnxplug.interpret.node import FxNode
from onnxplug.profiling.recorder import active
from onnxplug.registry.rule import Rule

LOGGER = logs.logger("convert")


class ObservedInterpreter(DynamoInterpreter):
    """Takes the place of :class:`DynamoInterpreter` where something is recorded, or the log tells of each decision."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._recorder = active()
        self._tells = LOGGER.isEnabledFor(logging.DEBUG)

    def convert_alone(self, call: FxNode, rules: Sequence[Rule] | None = None) -> Any:
        """Converts a call with no other one around it (:meth:`DynamoInterpreter.convert_alone`)."""
        with self._span(call.fx.name, "node", op=call.op_name, location=call.location):
            return super().convert_alone(call, rules)

    def _apply(self, rule: Rule, call: FxNode) -> Any:
        if self._recorder is not None and not rule.is_imported:
            started = time.perf_counter_ns()
            with suppress(Exception):  # raised again where its place is known
                rule.resolve()
            total = self._recorder.total("part", "imports of converters, once a process")
            total.calls += 1
            total.nanoseconds += time.perf_counter_ns() - started
        about = {"rule": rule.name, "package": rule.source or "rules of the call"}
        with self._span(call.op_name, "rule", **about) as span:
            try:
                results = super()._apply(rule, call)
            except Decline as decline:
                if span is not None:
                    span.about["declined"] = decline.reason
                if self._tells:
                    LOGGER.debug(
                        "%s (%s): %s declined: %s", call, call.name, rule.name, decline.reason or "no reason given"
                    )
                raise
        if self._tells:
            why = self._registry.reason(rule, call)
            LOGGER.debug("%s (%s): %s of %s: %s", call, call.name, rule.name, about["package"], why)
        return results

    def _span(self, name: str, kind: str, **about: Any) -> AbstractContextManager[Any]:
        return self._recorder.span(name, kind, **about) if self._recorder is not None else nullcontext()
