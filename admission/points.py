"""Named points at which a test may kill the process that reaches them.

Knows one folder, named by REGATE_POINTS when the process starts; without it `point` does nothing. With it every hit is
written to ROLE.hits there (role: REGATE_ROLE), and a file ROLE.kill with `NAME:N` in it ends the process with SIGKILL
at the N-th hit from then on. The order is taken away before it is carried out, so that it is carried out once. At the
start, REGATE_POINT=NAME:N is such an order too, unless ROLE.killed says that it was carried out. Does not know what
happens at any point.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path


class Points:
    """The points of one process."""

    def __init__(self, folder: Path, *, role: str, order: str = "") -> None:
        self._hits = folder / f"{role}.hits"
        self._kill = folder / f"{role}.kill"
        self._killed = folder / f"{role}.killed"
        self._order = ""
        self._counts: Counter[str] = Counter()
        if order and not self._killed.exists():
            self._kill.write_text(order, encoding="ascii")

    def hit(self, name: str) -> None:
        """This point was reached."""
        try:
            order = self._kill.read_text(encoding="ascii")
        except OSError:
            order = ""
        if order != self._order:
            self._order = order
            self._counts.clear()
        self._counts[name] += 1
        with self._hits.open("a", encoding="ascii") as file:
            file.write(f"{name}\n")
        if order == f"{name}:{self._counts[name]}":
            self._kill.rename(self._killed)
            os.kill(os.getpid(), signal.SIGKILL)


def _nothing(name: str) -> None:
    """No test asked for points."""


def made(environment: Mapping[str, str]) -> Callable[[str], None]:
    """`point` as the environment asks for it."""
    folder = environment.get("REGATE_POINTS")
    if not folder:
        return _nothing
    role, order = environment.get("REGATE_ROLE", "process"), environment.get("REGATE_POINT", "")
    return Points(Path(folder), role=role, order=order).hit


#: Say that a point was reached, by a name such as "store.commit.before".
point = made(os.environ)
