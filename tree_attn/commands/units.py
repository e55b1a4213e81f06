"""Numbers in words, by one rule of units everywhere: sizes, times, rates, ratios and counts."""

from collections.abc import Callable, Sequence


def size(num_bytes: float | None) -> str:
    """Formats a number of bytes: "3.6 kB", "1.31 GB"; "-" for None."""
    if num_bytes is None:
        return "-"
    return _largest_unit(num_bytes, ("B", "kB", "MB", "GB", "TB", "PB", "EB"), lambda number: f"{number:.3g}")


def time(microseconds: float | None) -> str:
    """Formats a time: "35.2 us", "1.42 ms", "2.50 s"; "-" for None."""
    if microseconds is None:
        return "-"
    return _largest_unit(microseconds, ("us", "ms", "s"), lambda number: f"{number:.{2 if number < 9.995 else 1}f}")


def rate(gb_per_s: float | None) -> str:
    """Formats a rate given in GB/s (1e9 bytes per second): "350 GB/s", "1.31 MB/s"; "-" for None."""
    return "-" if gb_per_s is None else f"{size(gb_per_s * 1e9)}/s"


def number(x: float, figures: int = 3) -> str:
    """Formats a number with so many figures, or all before the point: "0.0315", "1.4", "5,666"."""
    return f"{x:,.0f}" if abs(x) >= 10 ** (figures - 1) else f"{x:.{figures}g}"


def times_as(ratio: float) -> str:
    """Formats a ratio, with two figures or all before the point: "1.3", "14", "5,666"."""
    return f"{ratio:,.0f}" if ratio >= 9.95 else f"{ratio:.1f}"


def count(number: int, noun: str) -> str:
    """Formats a number of things: "1 device", "2,048 tokens"."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def length(keys: float) -> str:
    """Formats a number of keys or tokens: "700", "1.5k", "16k" for 16,000 and for 16,384, "1.28M"."""
    unit = 1024 if keys % 1024 == 0 and keys % 1000 else 1000
    for name, size in (("M", unit**2), ("k", unit)):
        if keys >= size:
            return f"{float(f'{keys / size:.3g}'):g}{name}"
    return f"{keys:g}"


def _largest_unit(number: float, units: Sequence[str], write: Callable[[float], str]) -> str:
    """Returns a number in the largest unit in which it is 1 or more as it is written: 999,999 bytes are "1 MB"."""
    *smaller, last = units
    for unit in smaller:
        if float(write(number)) < 1000:
            return f"{write(number)} {unit}"
        number /= 1000
    return f"{write(number)} {last}"
