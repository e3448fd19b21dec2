"""What the desk promises when a command cannot become a commit, and when a commit was never answered."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import anyio
import msgspec
import pytest

from admission.copies import OutcomeUnknown
from admission.desk import Desk
from admission.memory import MemoryStore
from admission.storage import Commit, Committed, Conflict, Reply, Store, StoreBehind, StoreUnavailable
from tests.contract.desk_room import (
    MACHINE,
    Claim,
    Claimed,
    Event,
    Names,
    Note,
    Order,
    Watched,
    commits_of,
    desk_on,
    fold,
    folded,
    until,
)
from tests.contract.store_room import committed, new_id, plain

pytestmark = pytest.mark.anyio

RUN = "aaaa"
UNWRITABLE = "half a pair: \ud800"


def broken_fold(state: Names, n: int, event: Event) -> None:
    """Breaks off with the event half folded, if it is told to."""
    fold(state, n, event)
    if isinstance(event, Claimed) and event.name == "trap":
        raise ZeroDivisionError("a bug in the fold")


@pytest.mark.parametrize(
    ("bad", "words"),
    [(Claim(UNWRITABLE), "UnicodeEncodeError"), (Note(UNWRITABLE), "UnicodeEncodeError"),
     (Claim("trap"), "ZeroDivisionError")],
)  # fmt: skip
async def test_what_cannot_be_written_fails_only_the_one_who_asked(
    memory_store: MemoryStore, bad: Claim | Note, words: str
) -> None:
    watched, outcomes = Watched(memory_store), dict[str, str]()

    async def ask(name: str, command: Any) -> None:
        try:
            outcomes[name] = (await desk.submit(RUN, command)).decision.says
        except (UnicodeEncodeError, ZeroDivisionError) as error:
            outcomes[name] = type(error).__name__

    machine = dataclasses.replace(MACHINE, fold=broken_fold)
    async with Desk(watched, machine, new_id=new_id) as desk:
        async with anyio.create_task_group() as tasks:
            watched.close()
            tasks.start_soon(ask, "first", Claim("first"))
            await until(lambda: len(watched.commits) == 1)
            for name, command in (("fact", Note("paid")), ("bad", bad), ("after", Claim("x", "me"))):
                tasks.start_soon(ask, name, command)
            await anyio.wait_all_tasks_blocked()
            watched.open.set()
        assert outcomes == {"first": "yours", "fact": "noted", "bad": words, "after": "yours"}
        assert len(watched.commits) == 2, "the others still share one commit"
        assert (await desk.current(RUN)).facts() == (await folded(memory_store, RUN)).facts()
        await ask("alone", bad)
        assert outcomes["alone"] == words
        assert (await desk.submit(RUN, Claim("x"))).decision.says == "taken by me"


class Silent(Watched):
    """A store on the way to which the first commit with events is held up; its sender gets no answer."""

    def __init__(self, store: Any) -> None:
        super().__init__(store)
        self.held: list[Commit] = []

    async def commit(self, commit: Commit) -> Reply:
        if commit.events and not self.held:
            self.held.append(commit)
            raise StoreUnavailable("nobody answers")
        return await super().commit(commit)


async def unknown(desk: Desk[Any, Any, Any, Any], command: Any) -> Commit:
    with pytest.raises(OutcomeUnknown, match="nobody answers") as raised:
        await desk.submit(RUN, command)
    return raised.value.commit


@pytest.mark.parametrize("command", [Claim("x", "me"), Order("x", after=0)])
async def test_sent_again_a_commit_is_in_the_log_and_comes_no_second_time(store: Store, command: Claim | Order) -> None:
    silent = Silent(store)
    async with desk_on(silent) as desk:
        commit = await unknown(desk, command)
        assert (await store.head(RUN))[0] == 0, "a read shows nothing, and proves nothing"
        await desk.resend(commit)
        await desk.resend(commit)
        assert commits_of(await store.read(RUN, 0)) == [commit.id]
        assert isinstance(await store.commit(silent.held[0]), Conflict), "what was under way arrives too late"
        assert (await desk.submit(RUN, command)).decision.says in ("taken by me", "1 orders came before")


async def test_sent_again_after_others_a_commit_never_comes(store: Store) -> None:
    silent = Silent(store)
    async with desk_on(silent) as desk:
        commit = await unknown(desk, Claim("x", "me"))
        committed(await store.commit(plain(RUN, msgspec.json.encode(Claimed("x", "other")))))
        await desk.resend(commit)
        assert isinstance(await store.commit(silent.held[0]), Conflict)
        assert (await desk.submit(RUN, Claim("x"))).decision.says == "taken by other"


@pytest.mark.parametrize("command", [Claim("x", "me"), Note("x"), Order("x", after=0)])
async def test_sent_again_after_it_arrived_a_commit_is_found(store: Store, command: Claim | Note | Order) -> None:
    silent = Silent(store)
    async with desk_on(silent) as desk:
        commit = await unknown(desk, command)
        assert isinstance(await store.commit(silent.held[0]), Committed)
        await desk.resend(commit)
        assert (await store.head(RUN))[0] == 1


async def test_while_nobody_answers_the_outcome_stays_unknown(memory_store: MemoryStore) -> None:
    silent = Silent(memory_store)
    async with desk_on(silent) as desk:
        commit = await unknown(desk, Claim("x"))
        memory_store.faults.unavailable = True
        with pytest.raises(StoreUnavailable):
            await desk.resend(commit)


async def test_sending_again_notices_a_log_that_lost_acknowledged_events(
    memory_store: MemoryStore, other_store: Callable[[], MemoryStore]
) -> None:
    async with desk_on(memory_store) as desk:
        await desk.submit(RUN, Claim("warm"))
        desk._store = Silent(memory_store)
        commit = await unknown(desk, Claim("x"))
        desk._store = other_store()
        with pytest.raises(StoreBehind, match="acknowledged data was lost"):
            await desk.resend(commit)


@pytest.fixture
def other_store() -> Callable[[], MemoryStore]:
    """Makes an empty store, as a server that was put back from an old copy would be."""
    return lambda: MemoryStore(now_ms=lambda: 1)
