"""Whether this release can read a file of that version; refused with the versions that it reads, and what to do."""

from __future__ import annotations

from ppas_core.errors import InvalidInput


def require_version(what: str, found: object, newest: int, *, again: str, oldest: int = 1) -> int:
    """`found`, a whole number from `oldest` to `newest`.

    what: names the file and its kind, before the word version. again: how such a file is made anew, for the remedy.
    Raises InvalidInput for anything else, with the value, the range and the remedy.
    """
    is_number = isinstance(found, int) and not isinstance(found, bool)
    if is_number and oldest <= found <= newest:  # type: ignore[operator]  # a number, as the line above says
        return found  # type: ignore[return-value]
    reads = f"version {newest}" if oldest == newest else f"versions {oldest} to {newest}"
    if is_number and found > newest:  # type: ignore[operator]
        remedy = f"a newer ppas wrote it: update ppas-autotune, or {again}"
    else:
        remedy = f"it is damaged, was changed by hand or is too old: {again}"
    raise InvalidInput(f"{what} version {found!r}; this release reads {reads}; {remedy}")
