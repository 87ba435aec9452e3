"""Places and numbers as a report shows them."""

from __future__ import annotations


def split_place(place: str | None) -> tuple[str, int] | None:
    """File and line of ``file:line``; ``None`` for any other text."""
    file, colon, line = (place or "").rpartition(":")
    return (file, int(line)) if colon and file and line.isdigit() and int(line) > 0 else None


def seconds_text(seconds: float) -> str:
    """Seconds as people read them: ``"1.24 s"``, ``"3.1 ms"``."""
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1e3 * seconds:.1f} ms"


def number_text(number: float) -> str:
    """A count with a unit: ``"1,234"``, ``"12.3 M"``."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if number >= 0.9995 * limit and number >= 1e6:  # from there on three digits of the smaller unit would be 1000
            scaled = number / limit
            return f"{scaled:.3g} {unit}" if scaled < 999.5 else f"{scaled:,.0f} {unit}"
    return f"{number:,.0f}"
