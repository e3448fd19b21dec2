"""Where the gate of a child stands, and waiting until that changes.

One feed reader for the process rings a bell per run; whoever waits reads the run again and compares. Knows how a gate's
state is read from a run, and the store's feed. Does not know HTTP or grants' signatures.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import anyio

from admission.flights import Ledger
from admission.state import RunState
from admission.storage import Store, StoreUnavailable
from admission.vocabulary import GateState, scope_prefixes
from admission.wire import Grant

WAIT_MAX_MS = 30_000
#: A bell that was missed (a feed that broke) costs at most this long.
LOOK_AGAIN_S = 5.0
_FEED_BACKOFF_S = 0.5
#: Worst first: the gate of a scope is the worst on the way to it.
_WORST = (GateState.SEALED, GateState.CLOSED, GateState.HELD, GateState.OPEN)


@dataclass(frozen=True, slots=True)
class GateView:
    """The gate as one child sees it. `current` False: the child must stop, whatever the gate does later."""

    gate: GateState
    current: bool
    revision_in_force: int
    version: int


def gate_view(run: RunState, grant: Grant) -> GateView:
    """Read a child's gate from a run."""
    states = {run.gates[s].state for s in scope_prefixes(grant.scope) if s in run.gates}
    gate = next((state for state in _WORST if state in states), GateState.CLOSED)
    if run.finished:
        gate = GateState.SEALED
    child = run.children.get(grant.child)
    own = run.gates.get(grant.scope)
    current = (
        child is not None
        and child.revision == grant.revision
        and child.scope == grant.scope
        and not run.finished
        and run.is_current(child)
    )
    return GateView(gate, current, own.target if own and not own.sealed else run.head, run.version)


@dataclass(slots=True)
class _Bell:
    """Rung once, when its run changes. Kept for as long as somebody holds it."""

    rung: anyio.Event = field(default_factory=anyio.Event)
    holders: int = 0


class GateWatch:
    """Waits for changes of runs. `listen` must run in a task of its own for as long as anybody waits."""

    def __init__(self, desk: Ledger, store: Store) -> None:
        self._desk = desk
        self._store = store
        self._bells: dict[str, _Bell] = {}

    async def listen(self) -> None:
        """Ring the bells of runs that change. Ends only by cancellation."""
        while True:
            try:
                async for run, _ in self._store.feed(range(self._store.partitions)):
                    self._ring(run)
            except StoreUnavailable:
                pass
            await anyio.sleep(_FEED_BACKOFF_S)
            for run in list(self._bells):
                self._ring(run)

    def _ring(self, run: str) -> None:
        bell = self._bells.pop(run, None)
        if bell is not None:
            bell.rung.set()

    @contextmanager
    def _held(self, run: str) -> Iterator[anyio.Event]:
        """The run's bell. The last one to let go of it takes it away: most runs are asked about once."""
        bell = self._bells.setdefault(run, _Bell())
        bell.holders += 1
        try:
            yield bell.rung
        finally:
            bell.holders -= 1
            if not bell.holders and self._bells.get(run) is bell:
                del self._bells[run]

    async def wait(self, grant: Grant, *, known: tuple[GateState, bool] | None, wait_ms: int) -> GateView:
        """The gate at once, or when it is no longer as `known`, at the latest after `wait_ms`.

        Raises StoreUnavailable.
        """
        deadline = anyio.current_time() + min(wait_ms, WAIT_MAX_MS) / 1000
        while True:
            # The bell is taken before the look: a change after the look rings this one.
            with self._held(grant.run) as rung:
                view = gate_view(await self._desk.current(grant.run), grant)
                left_s = deadline - anyio.current_time()
                if known is None or (view.gate, view.current) != known or left_s <= 0:
                    return view
                with anyio.move_on_after(min(left_s, LOOK_AGAIN_S)):
                    await rung.wait()
