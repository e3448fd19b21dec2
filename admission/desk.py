"""The desk: one process's copies of runs, and how it asks the store to change them.

Theory of operation. A copy of a run is a folded state at a log position. Commands that wait for the same run are
decided one after the other on the copy, each seeing what the ones before it did, and go to the store as one commit.
Only when the store has confirmed the version that they were decided on is anybody answered, refused ones included: a
refusal from a stale copy would stop the wrong child. On conflict the copy takes in what it had not seen, and all are
decided again. What was folded ahead of the reply is taken back unless the store confirms it; when the outcome stays
unknown the copy is dropped. A command alone never waits for company: its own task decides and commits.

Commands that compare control go before the others, in commits of their own, so that no rate of effects delays a
redirect. Facts compare nothing. Commands under different fences never share a commit.

Knows: copies, groups, answers. Does not know: events and rules (machine.Machine brings them), nor the store's ways.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, assert_never

import anyio
import anyio.lowlevel
import msgspec
from anyio.abc import TaskGroup

from admission.copies import Answer, Ask, Decided, OutcomeUnknown, RunCopy, fail, lost_data, wake
from admission.machine import CommandT, DecisionT, EventT, Machine, State
from admission.snapshots import Prepared, SnapshotBook
from admission.storage import (
    COMMIT_BLOB_BYTES_MAX,
    Behind,
    Commit,
    Committed,
    Compare,
    Conflict,
    Entry,
    Far,
    Fenced,
    Store,
    StoreBehind,
    StoreFenced,
    StoreUnavailable,
)

__all__ = ["Answer", "Desk"]

Seen = TypeVar("Seen")

log = logging.getLogger("regate.desk")

COPIES_MAX = 1000
#: A group is closed when its events and blobs reach this size; the others go with the next.
GROUP_BYTES_MAX = 1024 * 1024
READ_ENTRIES = 2000
#: So many conflicts in a row on one group mean that something else is wrong.
CONFLICTS_MAX = 200
#: The store's time may be this far off our estimate of it before we believe that its clock was set back.
CLOCK_STEP_MS = 1000


class Desk(Generic[State, CommandT, EventT, DecisionT]):
    """Use it as `async with Desk(...) as desk`. One a process; all its methods belong to one event loop."""

    def __init__(
        self,
        store: Store,
        machine: Machine[State, CommandT, EventT, DecisionT],
        *,
        new_id: Callable[[], str],
        monotonic: Callable[[], float] = time.monotonic,
        copies_max: int = COPIES_MAX,
        writes_snapshots: bool = True,
    ) -> None:
        self._store = store
        self._machine = machine
        self._new_id = new_id
        self._monotonic = monotonic
        self._copies_max = copies_max
        self._writes_snapshots = writes_snapshots
        self._copies: dict[str, RunCopy[State, CommandT, DecisionT]] = {}
        self._tasks: TaskGroup | None = None
        self._time_ms = 0
        self._time_read_s = 0.0

    async def __aenter__(self) -> Self:
        self._learn(await self._store.now_ms())
        self._tasks = await anyio.create_task_group().__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        assert self._tasks is not None
        tasks, self._tasks = self._tasks, None
        tasks.cancel_scope.cancel()
        if isinstance(error, Exception):
            # Our tasks raise nothing, so the caller's own error must not come out wrapped in a group.
            await tasks.__aexit__(None, None, None)
            return None
        return await tasks.__aexit__(kind, error, trace)

    # --- what callers use

    async def submit(
        self, run: str, command: CommandT, *, fence: int | None = None, blobs: Mapping[str, bytes] | None = None
    ) -> Answer[DecisionT]:
        """Decide a command on the run's present state and make its events durable.

        `fence` is the lease epoch that must still be the partition's; `blobs` (by sha256, up to 64 kB each) are written
        with the events. Cancelling the caller does not undo what was already sent.

        Raises StoreUnavailable (outcome unknown: ask again, commands are safe to repeat), StoreFenced, StoreBehind, and
        whatever `decide` raises. OutcomeUnknown, a StoreUnavailable, has the commit that was sent without an answer.
        """
        for sha, data in (blobs or {}).items():
            if len(data) > COMMIT_BLOB_BYTES_MAX:
                raise ValueError(
                    f"blob {sha[:12]} has {len(data)} bytes; above {COMMIT_BLOB_BYTES_MAX} use put_blob first"
                )
        ask: Ask[CommandT, DecisionT] = Ask(command, self._machine.compare_of(command), fence, blobs or {})
        copy = self._copy(run)
        await self._ask(copy, ask)
        assert ask.answer is not None
        return ask.answer

    async def current(self, run: str) -> State:
        """The run's state, caught up and confirmed. It is the desk's own: use it before your next await.

        Raises StoreUnavailable and StoreBehind.
        """
        copy = self._copy(run)
        await self._ask(copy, Ask(None, Compare.LOG, None, {}))
        if copy.state is None:
            raise StoreUnavailable("the copy of the run was dropped at this moment; ask again")
        return copy.state

    async def reindex(self, run: str, *, fence: int | None = None) -> None:
        """Write the run's entries in the cross-run indexes anew, from the confirmed state.

        A commit from a copy that was behind leaves them alone and rings the run's timer instead: whoever answers that
        timer calls this, or what the commit brought up is in no index. Raises as `submit`.
        """
        await self._ask(self._copy(run), Ask(None, Compare.LOG, fence, {}, indexes=True))

    async def resend(self, commit: Commit) -> None:
        """Send a commit with an unknown outcome once more, so that it is known: a read alone never proves absence.

        When this returns, a commit that compares a version is in the log, or never will be: what is still under way
        meets another version. Others than its submitter may have shared it. Raises StoreUnavailable (as unknown as
        before) and StoreBehind.
        """
        reply = await self._store.commit(msgspec.structs.replace(commit, resend=True))
        if isinstance(reply, Behind):
            raise lost_data(commit.run, reply.version, commit.known)

    async def look(self, run: str, at: Callable[[State], Seen]) -> Seen:
        """What `at` makes of the confirmed state, so that nothing of the state leaves the desk."""
        return at(await self.current(run))

    def now_ms(self) -> int:
        """The store's time: that of its last reply and what has passed since. Goes back only if it is set back."""
        return self._time_ms + int((self._monotonic() - self._time_read_s) * 1000)

    # --- queue

    def _copy(self, run: str) -> RunCopy[State, CommandT, DecisionT]:
        copy = self._copies.pop(run, None)
        if copy is None:
            if len(self._copies) >= self._copies_max:
                idle = next((name for name, old in self._copies.items() if not old.busy), None)
                if idle is not None:
                    del self._copies[idle]
            codec = self._machine.snapshots
            copy = RunCopy(run, SnapshotBook(codec) if codec is not None else None)
        self._copies[run] = copy  # at the end: the copy that was not used for longest stands first
        return copy

    async def _ask(self, copy: RunCopy[State, CommandT, DecisionT], ask: Ask[CommandT, DecisionT]) -> None:
        """Return when the ask is answered; raise its failure."""
        if self._tasks is None:
            raise RuntimeError("the desk is not open: use it inside `async with`")
        queue = copy.control_asks if ask.compare is Compare.CONTROL else copy.asks
        if copy.busy:
            ask.done = anyio.Event()
            queue.append(ask)
            try:
                await ask.done.wait()
            except BaseException:
                if ask in queue:
                    queue.remove(ask)
                raise
        else:
            copy.busy = True
            try:
                await self._serve(copy, [ask])
            finally:
                self._hand_over(copy)
        if ask.failure is not None:
            raise ask.failure

    def _hand_over(self, copy: RunCopy[State, CommandT, DecisionT]) -> None:
        """We are done with the copy: let a task of the desk serve those who came meanwhile."""
        if not (copy.asks or copy.control_asks):
            copy.busy = False
        elif self._tasks is not None:
            self._tasks.start_soon(self._serve_all, copy)
        else:
            self._give_up(copy)

    async def _serve_all(self, copy: RunCopy[State, CommandT, DecisionT]) -> None:
        group: list[Ask[CommandT, DecisionT]] = []
        try:
            while copy.asks or copy.control_asks:
                group = copy.pick()
                await self._serve(copy, group)
                # Who looks at the state does so now, before the next group is folded ahead of its reply.
                await anyio.lowlevel.checkpoint()
        except BaseException:
            fail(group, StoreUnavailable("the desk was closed while the command was under way"))
            self._give_up(copy)
            raise
        copy.busy = False

    def _give_up(self, copy: RunCopy[State, CommandT, DecisionT]) -> None:
        for queue in (copy.control_asks, copy.asks):
            fail(queue, StoreUnavailable("the desk was closed before the command was sent"))
            queue.clear()
        copy.busy = False

    # --- one group

    async def _serve(self, copy: RunCopy[State, CommandT, DecisionT], group: list[Ask[CommandT, DecisionT]]) -> None:
        """Answer or fail every member of the group. Raises only what ends the task (cancellation)."""
        settled = False
        try:
            await self._serve_group(copy, group)
            settled = True
            self._take_snapshot(copy)
        except (StoreUnavailable, StoreBehind, StoreFenced) as error:
            fail(group, error)
        except Exception as error:  # noqa: BLE001
            # A bug in the rules or a damaged log: these callers learn of it, and no other run's callers do.
            fail(group, error)
        finally:
            if not settled:
                copy.state = None

    async def _serve_group(
        self, copy: RunCopy[State, CommandT, DecisionT], group: list[Ask[CommandT, DecisionT]]
    ) -> None:
        for _ in range(CONFLICTS_MAX):
            state = copy.state
            if state is None:
                state = copy.state = await self._load(copy)
            known, known_control = state.version, state.control
            decided = self._decide(copy, state, group)
            commit = Commit(
                run=copy.run,
                id=self._new_id(),
                events=tuple(decided.data),
                control=decided.control,
                compare=decided.compare,
                expected=known_control if decided.compare is Compare.CONTROL else known,
                known=known,
                fence=group[0].fence if group else None,
                index=self._machine.index_of(state) if decided.events or any(a.indexes for a in group) else None,
                blobs=decided.blobs,
            )
            if not group:
                state.undo()
                return
            try:
                reply = await self._store.commit(commit)
            except StoreUnavailable as error:
                raise OutcomeUnknown(str(error), commit) from error
            self._learn(reply.time_ms)
            if isinstance(reply, Committed):
                self._answer(group, reply, len(decided.events))
                await self._take_in(copy, state, decided, reply)
                return
            state.undo()
            self._after_refusal(copy, state, reply)
            if isinstance(reply, Conflict) and copy.state is not None and all(ask.only_looks for ask in group):
                wake(group)  # the conflict told what the log was at that moment, and the copy holds it now
                return
            group = self._facts_first(copy, group)
        raise StoreUnavailable(f"the run changed {CONFLICTS_MAX} times while the command was decided; ask again")

    def _decide(
        self, copy: RunCopy[State, CommandT, DecisionT], state: State, group: list[Ask[CommandT, DecisionT]]
    ) -> Decided[EventT]:
        """Decide all on the copy, one after the other. Takes members out that raised, or that are too many.

        What cannot be encoded fails before it is folded; after a fold that broke off, the others are decided anew.
        """
        machine, at = self._machine, self.now_ms()
        state.begin()
        decided: Decided[EventT] = Decided(group[0].compare)
        version, size, unconfirmed = state.version, 0, False
        for i, ask in enumerate(group):
            if size > GROUP_BYTES_MAX:
                queue = copy.control_asks if ask.compare is Compare.CONTROL else copy.asks
                queue.extendleft(reversed(group[i:]))
                del group[i:]
                break
            if ask.failure is not None:
                continue
            events: Sequence[Any] = ()
            if ask.command is not None:
                folding = False
                try:
                    ask.decision = machine.decide(state, ask.command, at)
                    events = ask.decision.events
                    data = [machine.encode(event) for event in events]
                    folding = True
                    for n, event in enumerate(events, version + 1):
                        machine.fold(state, n, event)
                except Exception as error:  # noqa: BLE001 (it is raised to the one who asked)
                    ask.failure = error
                    if not folding:
                        continue
                    state.undo()
                    return self._decide(copy, state, group)
                version += len(events)
                size += sum(map(len, data))
                decided.events += events
                decided.data += data
                decided.control += sum(map(machine.is_control, events))
            if events:
                decided.blobs.update(ask.blobs)
                size += sum(map(len, ask.blobs.values()))
            ask.last = len(decided.events)
            unconfirmed = unconfirmed or not events or ask.compare is Compare.LOG
        failed = [ask for ask in group if ask.failure is not None]
        if failed:
            group[:] = [ask for ask in group if ask.failure is None]
            wake(failed)
        if decided.compare is not Compare.CONTROL:
            # Facts stand whatever came in between. A fact that led to nothing is a refusal, and that must be confirmed.
            decided.compare = Compare.LOG if unconfirmed else Compare.NONE
        return decided

    def _answer(self, group: list[Ask[CommandT, DecisionT]], reply: Committed, events: int) -> None:
        before = reply.version - events
        for ask in group:
            if ask.decision is not None:
                ask.answer = Answer(ask.decision, before + ask.last, reply.time_ms)
        wake(group)

    async def _take_in(
        self, copy: RunCopy[State, CommandT, DecisionT], state: State, decided: Decided[EventT], reply: Committed
    ) -> None:
        """Make the copy what the log is now. Callers are answered already; a failure here only costs the copy."""
        known = state.version - len(decided.events)
        if reply.version == state.version:
            state.keep()
        else:
            state.undo()
            gap = reply.version - len(decided.events) - known
            if len(reply.unseen) == gap:
                self._fold(copy, state, reply.unseen)
                for n, event in enumerate(decided.events, state.version + 1):
                    self._machine.fold(state, n, event)
            else:
                await self._catch_up(copy, state)
                return
        if copy.book is not None:
            copy.book.grew(len(decided.events), sum(map(len, decided.data)))

    def _after_refusal(
        self, copy: RunCopy[State, CommandT, DecisionT], state: State, reply: Conflict | Far | Behind | Fenced
    ) -> None:
        """Make the copy fit to decide again. Raises StoreBehind and StoreFenced."""
        match reply:
            case Conflict():
                self._fold(copy, state, reply.entries)
                if state.version != reply.version or not reply.entries:
                    copy.state = None
            case Far():
                copy.state = None
            case Behind():
                raise lost_data(copy.run, reply.version, state.version)
            case Fenced():
                raise StoreFenced(reply.epoch)
            case _:
                assert_never(reply)

    def _facts_first(
        self, copy: RunCopy[State, CommandT, DecisionT], group: list[Ask[CommandT, DecisionT]]
    ) -> list[Ask[CommandT, DecisionT]]:
        """After a conflict: what was already sent is recorded without waiting for those who compare."""
        facts = [ask for ask in group if ask.compare is Compare.NONE]
        if not facts or len(facts) == len(group):
            return group
        copy.asks.extendleft(ask for ask in reversed(group) if ask.compare is not Compare.NONE)
        return facts

    # --- copies

    async def _load(self, copy: RunCopy[State, CommandT, DecisionT]) -> State:
        state = None
        if copy.book is not None:
            state = await copy.book.load(self._store, copy.run)
        if state is None:
            state = self._machine.new(copy.run)
        await self._catch_up(copy, state)
        return state

    async def _catch_up(self, copy: RunCopy[State, CommandT, DecisionT], state: State) -> None:
        while True:
            entries = await self._store.read(copy.run, state.version, READ_ENTRIES)
            self._fold(copy, state, entries)
            if len(entries) < READ_ENTRIES:
                return

    def _fold(self, copy: RunCopy[State, CommandT, DecisionT], state: State, entries: Sequence[Entry]) -> None:
        fold, decode, size = self._machine.fold, self._machine.decode, 0
        for entry in entries:
            fold(state, entry.n, decode(entry.data))
            size += len(entry.data)
        if copy.book is not None:
            copy.book.grew(len(entries), size)

    def _take_snapshot(self, copy: RunCopy[State, CommandT, DecisionT]) -> None:
        book, state, tasks = copy.book, copy.state, self._tasks
        if not self._writes_snapshots or book is None or not book.is_due or state is None or tasks is None:
            return
        try:
            prepared = book.prepare(state)
        except Exception:
            # A snapshot only saves time. What cannot be written into one must not keep its run from going on.
            log.exception("run %s: no snapshot can be made of it; it is loaded from its log", copy.run)
            copy.book = None
            return
        tasks.start_soon(self._write_snapshot, book, copy.run, prepared)

    async def _write_snapshot(self, book: SnapshotBook[State], run: str, prepared: Prepared) -> None:
        try:
            await book.write(self._store, run, prepared)
        except StoreUnavailable:
            return  # the log has it all; the next one will be written when the store is back

    def _learn(self, time_ms: int) -> None:
        """Take the time in a reply for the time now: it is late by the reply's way, and never early."""
        now_s = self._monotonic()
        ahead_ms = self._time_ms + (now_s - self._time_read_s) * 1000 - time_ms
        if ahead_ms < 0 or ahead_ms > CLOCK_STEP_MS:
            self._time_ms, self._time_read_s = time_ms, now_s
