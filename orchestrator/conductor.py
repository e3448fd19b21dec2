"""The one loop that acts: feed and timers → agenda → act → commit.

Theory of operation. A conductor leases partitions. For each run of theirs that changes, or whose time has come, it
takes the agenda (a pure function of the state) and performs what is listed: commits what follows from the state, and
starts the outside acts (launch, stop, observe, collect, ask), each under a name so that it is not started twice. An
act ends by committing what was seen, which rings the run's doorbell again. Nothing is remembered between steps that
the log does not hold: after kill -9 the next conductor lists exactly what is left.

Does not know what may happen (rules.py), what is due (agenda.py), or what evidence proves (reconcile.py).
"""

import heapq
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

import anyio
import anyio.abc

from admission import agenda as ag
from admission import commands as cmd
from admission.agenda import Action, agenda
from admission.state import RunState
from admission.storage import Store, StoreBehind, StoreFenced, StoreUnavailable
from admission.vocabulary import partition_of
from orchestrator.acts import Acts
from orchestrator.courier import Courier

log = logging.getLogger("regate.conductor")

#: How long a lease lasts without renewal (ms), and how often it is renewed (seconds).
LEASE_TTL_MS = 6_000
LEASE_RENEW_S = 2.0
#: Longest that letting go of the leases may take at the end (seconds).
RELEASE_S = 2.0
#: Resolution of local timers, and how often the store's timers are read for what local ones missed (seconds).
TICK_S = 0.05
SWEEP_S = 1.0
#: Wait before a run is tended again after the store could not be reached (seconds).
STORE_RETRY_S = 0.5
#: Wait before a run is tended again after an error of our own (seconds).
FAULT_RETRY_S = 2.0
#: Commits that one tending may make before others get their turn.
COMMITS_MAX = 64


class DeskLike(Protocol):
    """What the conductor needs of a Desk."""

    async def submit(self, run: str, command: cmd.Command, *, fence: int | None = None) -> object: ...
    async def current(self, run: str) -> RunState: ...
    async def reindex(self, run: str, *, fence: int | None = None) -> None: ...
    def now_ms(self) -> int: ...


class Conductor:
    """One replica's loop. `run()` returns only when cancelled."""

    def __init__(
        self,
        *,
        store: Store,
        desk: "DeskLike",
        courier: Courier,
        gateway_url: str,
        agents: Mapping[str, str],
        internal_token: str,
        grant_key: bytes,
        instance: str,
        incarnation: str,
    ) -> None:
        self._store = store
        self._desk = desk
        self._instance = instance
        self._incarnation = incarnation
        self._epochs: dict[int, int] = {}
        self._tending: dict[str, bool] = {}
        self._busy: set[tuple[str, Action]] = set()
        self._timers: list[tuple[int, str]] = []
        self._due: dict[str, int] = {}
        self._overdue: set[str] = set()
        self._tasks: anyio.abc.TaskGroup | None = None
        self._acts = Acts(
            desk=desk, store=store, courier=courier, gateway_url=gateway_url, agents=agents,
            internal_token=internal_token, grant_key=grant_key,
        )  # fmt: skip

    @property
    def partitions(self) -> frozenset[int]:
        """The partitions that this replica holds now."""
        return frozenset(self._epochs)

    async def run(self) -> None:
        """Act until cancelled. Raises StoreBehind when acknowledged data is missing: then this process must stop."""
        try:
            await self._run()
        finally:
            with anyio.move_on_after(RELEASE_S, shield=True):
                await self._release()

    async def _release(self) -> None:
        """Let go of what we lead, so that another replica need not wait for the leases to run out."""
        for partition in list(self._epochs):
            try:
                await self._store.release(partition, self._instance, self._incarnation)
            except StoreUnavailable:
                return
        self._epochs.clear()

    async def _run(self) -> None:
        async with self._acts, anyio.create_task_group() as tasks:
            self._tasks = tasks
            try:
                await self._renew()
            except StoreUnavailable as error:
                log.warning("store unavailable at the start: %s", error)
            tasks.start_soon(self._forever, self._renew, LEASE_RENEW_S)
            tasks.start_soon(self._forever, self._sweep, SWEEP_S)
            tasks.start_soon(self._forever, self._tick, TICK_S)
            tasks.start_soon(self._listen)

    async def _forever(self, step: Callable[[], Awaitable[None]], interval_s: float) -> None:
        while True:
            await anyio.sleep(interval_s)
            try:
                await step()
            except StoreUnavailable as error:
                log.warning("store unavailable: %s", error)
                await anyio.sleep(STORE_RETRY_S)

    # -- what to look at ----------------------------------------------------------------------------------------------

    async def _renew(self) -> None:
        for partition in range(self._store.partitions):
            lease = await self._store.lease(partition, self._instance, self._incarnation, LEASE_TTL_MS)
            if not lease.mine:
                if self._epochs.pop(partition, None) is not None:
                    log.warning("partition %d is led by %s now", partition, lease.holder)
                continue
            if self._epochs.get(partition) != lease.epoch:
                self._epochs[partition] = lease.epoch
                for run in await self._store.live(partition):
                    self._wake(run)

    async def _sweep(self) -> None:
        now = self._desk.now_ms()
        for partition in list(self._epochs):
            for run in await self._store.due(partition, now, 1000):
                self._overdue.add(run)
                self._wake(run)

    async def _tick(self) -> None:
        now = self._desk.now_ms()
        while self._timers and self._timers[0][0] <= now:
            due, run = heapq.heappop(self._timers)
            if self._due.get(run) == due:  # an entry that a later agenda replaced rings no bell
                del self._due[run]
                self._wake(run)

    async def _listen(self) -> None:
        everything = range(self._store.partitions)
        while True:
            try:
                async for run, _version in self._store.feed(everything):
                    if partition_of(run, self._store.partitions) in self._epochs:
                        self._wake(run)
            except StoreUnavailable as error:
                log.warning("feed interrupted: %s", error)
                await anyio.sleep(STORE_RETRY_S)

    def _wake(self, run: str) -> None:
        if run in self._tending:
            self._tending[run] = True  # it changed while it was being tended: once more
            return
        assert self._tasks is not None
        self._tending[run] = False
        self._tasks.start_soon(self._tend, run)

    # -- what to do ---------------------------------------------------------------------------------------------------

    async def _tend(self, run: str) -> None:
        try:
            again = True
            while again:
                self._tending[run] = False
                try:
                    await self._step(run)
                except StoreFenced as fenced:
                    self._fenced(run, fenced)
                except StoreUnavailable as error:
                    log.warning("run %s: store unavailable: %s", run, error)
                    await anyio.sleep(STORE_RETRY_S)
                    self._tending[run] = True
                except StoreBehind:
                    raise
                except Exception:
                    # A bug that one run shows must not stop the others; it is looked at again, and it is in the log.
                    log.exception("run %s: could not be tended", run)
                    await anyio.sleep(FAULT_RETRY_S)
                    self._tending[run] = True
                again = self._tending[run]
        finally:
            del self._tending[run]

    async def _step(self, run: str) -> None:
        """Perform what is due; commits change the state, so the agenda is taken again until it has none."""
        for _ in range(COMMITS_MAX):
            epoch = self._epochs.get(partition_of(run, self._store.partitions))
            if epoch is None:
                return
            state = await self._desk.current(run)
            now = self._desk.now_ms()
            plan = agenda(state, now, epoch=epoch)
            commits = [action for action in plan.actions if isinstance(action, ag.Commit)]
            for action in plan.actions:
                if not isinstance(action, ag.Commit) and self._claim(run, action):
                    assert self._tasks is not None
                    self._tasks.start_soon(self._perform, run, action, epoch)
            self._remember(run, plan.due_ms)
            if not commits:
                if run in self._overdue:
                    # Its timer was rung by hand (a commit from a copy that was behind) or has passed: either way the
                    # indexes have to say again what is true, or nobody would be shown what that commit brought up.
                    self._overdue.discard(run)
                    await self._desk.reindex(run, fence=epoch)
                return
            for action in commits:
                await self._desk.submit(run, action.command, fence=epoch)
        self._tending[run] = True

    def _fenced(self, run: str, fenced: StoreFenced) -> None:
        """Somebody else leads the partition, or an act of ours has outlived our own earlier lease."""
        partition = partition_of(run, self._store.partitions)
        if self._epochs.get(partition) != fenced.epoch:
            self._epochs.pop(partition, None)
        log.warning("run %s: %s", run, fenced)

    def _remember(self, run: str, due_ms: int | None) -> None:
        if due_ms is None:
            self._due.pop(run, None)
        elif self._due.get(run) != due_ms:
            self._due[run] = due_ms
            heapq.heappush(self._timers, (due_ms, run))

    def _claim(self, run: str, action: Action) -> bool:
        name = (run, action)
        if name in self._busy:
            return False
        self._busy.add(name)
        return True

    async def _perform(self, run: str, action: Action, epoch: int) -> None:
        try:
            await self._acts.perform(run, action, epoch)
        except StoreFenced as fenced:
            self._fenced(run, fenced)
        except StoreUnavailable as error:
            log.warning("run %s, %s: store unavailable: %s", run, action, error)
            await anyio.sleep(STORE_RETRY_S)
        except StoreBehind:
            raise
        except Exception:
            log.exception("run %s: %s failed", run, action)
            await anyio.sleep(FAULT_RETRY_S)
        finally:
            self._busy.discard((run, action))
        self._wake(run)
