"""Quantities as people write them ("80 GiB", "300 GB/s", "25 Gbps", "3 ms") and as the core
computes with them (bytes, bytes/s, s). A bare number where a unit is due is an error.
"""

import re
from collections.abc import Mapping
from math import inf

from planner.support.errors import UnitError

BYTES: Mapping[str, float] = {
    "B": 1,
    **{f"{prefix}B": 1000**k for k, prefix in enumerate(("K", "M", "G", "T"), start=1)},
    "kB": 1000,
    **{f"{prefix}iB": 1024**k for k, prefix in enumerate(("K", "M", "G", "T"), start=1)},
}
SECONDS: Mapping[str, float] = {
    "s": 1.0,
    "ms": 1e-3,
    "us": 1e-6,
    "µs": 1e-6,
    "ns": 1e-9,
    "min": 60.0,
}
BYTES_PER_S: Mapping[str, float] = {
    **{f"{unit}/s": factor for unit, factor in BYTES.items()},
    **{f"{p}bps": 1000**k / 8 for k, p in enumerate(("", "K", "M", "G", "T"))},
    **{f"{p}bit/s": 1000**k / 8 for k, p in enumerate(("", "K", "M", "G", "T"))},
    "kbps": 125.0,
    "kbit/s": 125.0,
}
FLOPS: Mapping[str, float] = {
    f"{p}FLOP/s": 1000.0**k for k, p in enumerate(("", "K", "M", "G", "T", "P"))
}

_QUANTITY = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*(\S.*?)?\s*")

# Of a quantity: the pattern takes more than the square of the length of what it does not match.
_MAX_LENGTH = 500
# More digits tell no two floats apart.
_MAX_DIGITS = 18


def _parse(text: str, units: Mapping[str, float], what: str, example: str) -> float:
    match = _QUANTITY.fullmatch(text) if len(text) <= _MAX_LENGTH else None
    if match is None or match[2] not in units:
        raise UnitError(f"expected {what} such as {example!r}, got {text!r:.60}")
    value = float(match[1]) * units[match[2]]
    if value == inf:
        raise UnitError(
            f"expected {what} such as {example!r}, got {text!r:.60}, which is too large"
        )
    return value


def parse_bytes(text: str) -> int:
    """Bytes in a size such as "80 GiB" or "16 GB" (the two differ).

    Raises:
        UnitError: if there is no unit, or one that is no size.

    >>> parse_bytes("1.5 KiB"), parse_bytes("16 GB")
    (1536, 16000000000)
    """
    return round(_parse(text, BYTES, "a size", "80 GiB"))


def parse_seconds(text: str, example: str = "5 us") -> float:
    """Seconds in a time such as "3 ms".

    Args:
        example: of a time, for messages.

    Raises:
        UnitError: if there is no unit, or one that is no time.

    >>> parse_seconds("3 ms")
    0.003
    """
    return _parse(text, SECONDS, "a time", example)


def parse_rate(text: str) -> float:
    """Bytes per s in a rate such as "300 GB/s" or "25 Gbps".

    Raises:
        UnitError: if there is no unit, or one that is no rate.

    >>> parse_rate("25 Gbps")
    3125000000.0
    """
    return _parse(text, BYTES_PER_S, "a rate", "300 GB/s")


def parse_flops(text: str) -> float:
    """FLOP per s in a speed such as "15.7 TFLOP/s".

    Raises:
        UnitError: if there is no unit, or one that is no speed of computation.

    >>> parse_flops("15.7 TFLOP/s")
    15700000000000.0
    """
    return _parse(text, FLOPS, "a speed", "15.7 TFLOP/s")


def _scaled(value: float, steps: tuple[tuple[float, str], ...]) -> str:
    for factor, unit in steps:
        if abs(value) >= factor:
            return (
                f"{value / factor:.3g} {unit}"
                if abs(value) < 999.5 * factor
                else f"{value / factor:.0f} {unit}"
            )
    factor, unit = steps[-1]
    return f"{round(value / factor, 3) + 0.0:.3g} {unit}"  # never "-0"


_SIZES = ((1024**4, "TiB"), (1024**3, "GiB"), (1024**2, "MiB"), (1024, "KiB"), (1, "B"))


def format_bytes(size_bytes: float) -> str:
    """A size for people, in binary units.

    >>> format_bytes(1536), format_bytes(0)
    ('1.5 KiB', '0 B')
    """
    return _scaled(size_bytes, _SIZES)


def format_bytes_apart(first: int, second: int) -> tuple[str, str]:
    """Two sizes for people: where they would read alike, in one unit, with as many digits as tell
    them apart.

    >>> format_bytes_apart(1536, 1024**2), format_bytes_apart(1_085_000_000, 1_084_000_000)
    (('1.5 KiB', '1 MiB'), ('1.0105 GiB', '1.0096 GiB'))
    >>> format_bytes_apart(2**30, 2**30 - 1), format_bytes_apart(7, 7)
    (('1 GiB', '0.999999999 GiB'), ('7 B', '7 B'))
    """
    factor, unit = next((one for one in _SIZES if max(first, second) >= one[0]), _SIZES[-1])
    for digits in range(3, _MAX_DIGITS):
        texts = [f"{size / factor:.{digits}g}" for size in (first, second)]
        if texts[0] != texts[1] and digits > 3:
            return f"{texts[0]} {unit}", f"{texts[1]} {unit}"
        if texts[0] != texts[1]:
            break
    return format_bytes(first), format_bytes(second)


def format_seconds(time_s: float) -> str:
    """A time for people.

    >>> format_seconds(0.00321), format_seconds(75)
    ('3.21 ms', '75 s')
    >>> format_seconds(0.9999), format_seconds(-1e-17)
    ('1000 ms', '0 ns')
    """
    return _scaled(time_s, ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")))


def format_rate(bytes_per_s: float) -> str:
    """A rate for people, in decimal units.

    >>> format_rate(3.125e9), format_rate(12_500_000)
    ('3.12 GB/s', '12.5 MB/s')
    """
    return _scaled(
        bytes_per_s, ((1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"), (1.0, "B/s"))
    )
