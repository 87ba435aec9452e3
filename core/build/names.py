"""The names of a model's values."""

from __future__ import annotations

from collections.abc import Iterable


class Names:
    """The names of a model's values: each is used once, as it is visible in every branch and body too."""

    def __init__(self) -> None:
        self._taken: set[str | None] = set()
        self._counters: dict[str, int] = {}

    def take(self, names: Iterable[str | None]) -> None:
        """Says that these are the names of values."""
        self._taken.update(names)

    def unique(self, stem: str) -> str:
        """The stem, with a number after it where that is taken; it is taken from now on."""
        name = stem
        while name in self._taken:
            number = self._counters[stem] = self._counters.get(stem, 0) + 1
            name = f"{stem}_{number}"
        self._taken.add(name)
        return name
