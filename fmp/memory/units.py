"""Sizes as people read them: GB are 10^9 bytes, GiB are 2^30."""

UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def unit_bytes(unit: str) -> int:
    """Returns the bytes of a unit.

    Raises:
        ValueError: If it is not one of `UNITS`.

    Example:
        >>> unit_bytes("GB"), unit_bytes("GiB")
        (1000000000, 1073741824)
    """
    if not isinstance(unit, str) or unit not in UNITS:
        raise ValueError(f"unit must be one of {', '.join(UNITS)}, got {unit!r}")
    return UNITS[unit]


def in_unit(nbytes: int, unit: str) -> str:
    """Writes a size.

    Example:
        >>> in_unit(7 * 10**9, "GB"), in_unit(7 * 10**9, "GiB"), in_unit(7, "B")
        ('7.00', '6.52', '7')
    """
    return f"{nbytes:,}" if unit == "B" else f"{nbytes / unit_bytes(unit):,.2f}"
