"""What goes wrong with which request. The choice is a function of its arguments: same seed, same trouble.

Knows kinds, profiles and how often a request was seen. Does not know sockets, clocks or services.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

DELAY_MIN_MS, DELAY_MAX_MS = 100, 800
LATE_MIN_MS, LATE_MAX_MS = 300, 1500
FAULT_MS_MAX = 600_000
FAULTY_OCCURRENCES_MAX = 3
"""From the fourth arrival of the same key on nothing goes wrong, so that whoever keeps asking gets an answer."""


class FaultKind(StrEnum):
    """Ways in which a request and its reply part."""

    NONE = "none"
    DELAY = "delay"
    """Executed and recorded; the reply waits."""
    LOSE = "lose"
    """Executed and recorded; the connection is closed without a reply."""
    REJECT = "reject"
    """Answered 503 before any work."""
    RESET = "reset"
    """The connection is reset before any work."""
    LATE = "late"
    """The connection is dropped at once, and the request arrives later all the same."""


class Profile(StrEnum):
    """Mixtures of faults, in per cent, for the first arrival of a request."""

    NONE = "none"
    DELAYED = "delayed"
    LOST = "lost"
    MIXED = "mixed"


_PER_CENT: dict[Profile, tuple[tuple[FaultKind, int], ...]] = {
    Profile.NONE: (),
    Profile.DELAYED: ((FaultKind.DELAY, 60),),
    Profile.LOST: ((FaultKind.LOSE, 30), (FaultKind.LATE, 15)),
    Profile.MIXED: (
        (FaultKind.DELAY, 20),
        (FaultKind.LOSE, 14),
        (FaultKind.REJECT, 10),
        (FaultKind.RESET, 8),
        (FaultKind.LATE, 10),
    ),
}


@dataclass(frozen=True)
class Fault:
    """A kind and, where the kind has one, its time."""

    kind: FaultKind
    ms: int = 0


NO_FAULT = Fault(FaultKind.NONE)


@dataclass(frozen=True)
class FaultRule:
    """An explicit wish: the first `count` calls of `action` (`*` for any) fail in this way."""

    action: str
    kind: FaultKind
    ms: int | None
    count: int


class FaultSpecError(ValueError):
    """A `--fault` text that cannot be read; the message says how to write it."""


def parse_rule(text: str) -> FaultRule:
    """Read `ACTION:KIND[:MS][:COUNT]`. An empty MS means "from the seed": `cancel_pending_order:lose::2`.

    Raises:
        FaultSpecError: wrong shape, unknown kind, or a number out of range.
    """
    parts = text.split(":")
    form = "write ACTION:KIND[:MS][:COUNT], for example cancel_pending_order:delay:500 or *:lose::2"
    if not 2 <= len(parts) <= 4 or not parts[0]:
        raise FaultSpecError(f"fault {text!r}: {form}")
    try:
        kind = FaultKind(parts[1])
    except ValueError:
        raise FaultSpecError(f"fault {text!r}: unknown kind {parts[1]!r}, one of {', '.join(FaultKind)}") from None
    numbers = [*parts[2:], "", ""][:2]
    if any(number and not (number.isascii() and number.isdigit()) for number in numbers):
        raise FaultSpecError(f"fault {text!r}: MS and COUNT are whole numbers; {form}")
    ms = int(numbers[0]) if numbers[0] else None
    if ms is not None and ms > FAULT_MS_MAX:
        raise FaultSpecError(f"fault {text!r}: MS is at most {FAULT_MS_MAX}")
    return FaultRule(parts[0], kind, ms, int(numbers[1]) if numbers[1] else 1)


def choose(profile: Profile, *, seed: int, payload_sha256: str, occurrence: int) -> Fault:
    """The fault of one arrival. `occurrence` counts arrivals of the same key (or payload) from 1.

    The odds halve with each occurrence and end after `FAULTY_OCCURRENCES_MAX`.
    """
    if occurrence > FAULTY_OCCURRENCES_MAX:
        return NO_FAULT
    drawn = _draw(f"{seed}/{payload_sha256}/{occurrence}/kind", 0, 9_999)
    edge = 0.0
    for kind, per_cent in _PER_CENT[profile]:
        edge += per_cent * 100 / 2 ** (occurrence - 1)
        if drawn < edge:
            return timed(kind, seed=seed, payload_sha256=payload_sha256, occurrence=occurrence)
    return NO_FAULT


def timed(kind: FaultKind, *, seed: int, payload_sha256: str, occurrence: int) -> Fault:
    """Give a kind its time from the seed, in milliseconds; zero for the kinds that have none."""
    name = f"{seed}/{payload_sha256}/{occurrence}/ms"
    if kind is FaultKind.DELAY:
        return Fault(kind, _draw(name, DELAY_MIN_MS, DELAY_MAX_MS))
    if kind is FaultKind.LATE:
        return Fault(kind, _draw(name, LATE_MIN_MS, LATE_MAX_MS))
    return Fault(kind)


class FaultSchedule:
    """Counts arrivals and applies explicit rules before the profile. Counts are given back at a restart by `seen`."""

    def __init__(self, profile: Profile = Profile.NONE, *, seed: int = 0, rules: tuple[FaultRule, ...] = ()) -> None:
        self._profile = profile
        self._seed = seed
        self._rules = rules
        self._arrivals: Counter[str] = Counter()
        self._calls: Counter[str] = Counter()

    def seen(self, action: str, *, subject: str) -> None:
        """Count an arrival without choosing. `subject` is the key, or the payload hash where there is no key."""
        self._arrivals[subject] += 1
        self._calls[action] += 1

    def next(self, action: str, *, subject: str, payload_sha256: str) -> Fault:
        """Count this arrival and say what becomes of it."""
        self.seen(action, subject=subject)
        occurrence = self._arrivals[subject]
        for rule in self._rules:
            calls = self._calls.total() if rule.action == "*" else self._calls[action]
            if rule.action in (action, "*") and calls <= rule.count:
                if rule.ms is not None:
                    return Fault(rule.kind, rule.ms)
                return timed(rule.kind, seed=self._seed, payload_sha256=payload_sha256, occurrence=occurrence)
        return choose(self._profile, seed=self._seed, payload_sha256=payload_sha256, occurrence=occurrence)


def _draw(name: str, low: int, high: int) -> int:
    """A number in [low, high] from the name alone; the bias of the modulo is below one in 2**40."""
    return low + int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) % (high - low + 1)
