"""JSON that others wrote: read into plain values that our log can surely hold, or refused.

Knows: what the log's encoder cannot write (deep nesting, huge numbers, NaN, half surrogates). Evidence that cannot be
written down would be lost at the moment it matters, so it is turned away where it comes in. Knows no field names.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

DEPTH_MAX = 32
INTEGER_BITS_MAX = 63


class ForeignJsonError(ValueError):
    """Not a JSON object that we can keep. The message says why and holds nothing of the content."""


def read_object(raw: bytes, *, depth_max: int = DEPTH_MAX, unique_keys: bool = True) -> dict[str, Any]:
    """The JSON object in `raw`. Raises ForeignJsonError.

    Of two equal keys in one object nobody can tell which was meant; without `unique_keys` the last one counts.
    """
    try:
        value = json.loads(raw, parse_constant=_no_constant, object_pairs_hook=_unique if unique_keys else None)
    except ForeignJsonError:
        raise
    except (ValueError, RecursionError):
        raise ForeignJsonError("it is not JSON") from None
    if not isinstance(value, dict):
        raise ForeignJsonError("it is JSON, but not an object")
    _check(value, depth_max)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ForeignJsonError("a key stands twice in one object; send it once")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ForeignJsonError(f"{name} is not a JSON number")


def _check(value: Any, depth_left: int) -> None:
    if isinstance(value, str):
        if not value.isascii() and any(0xD800 <= ord(sign) <= 0xDFFF for sign in value):
            raise ForeignJsonError("a text holds half a surrogate pair")
    elif isinstance(value, bool) or value is None:
        return
    elif isinstance(value, int):
        if value.bit_length() > INTEGER_BITS_MAX:
            raise ForeignJsonError(f"a whole number needs more than {INTEGER_BITS_MAX} bits; send it as a string")
    elif isinstance(value, float):
        if value in (float("inf"), float("-inf")):
            raise ForeignJsonError("a number is too large; send it as a string")
    elif depth_left == 0:
        raise ForeignJsonError(f"it is nested deeper than {DEPTH_MAX} levels")
    elif isinstance(value, dict):
        for key, inner in value.items():
            _check(key, depth_left)
            _check(inner, depth_left - 1)
    else:
        for inner in value:
            _check(inner, depth_left - 1)
