"""What the desk promises: groups, confirmed answers, the control lane, and copies that are never ahead of the log."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import pytest

from admission.memory import MemoryStore
from admission.storage import Compare, Store, StoreBehind, StoreFenced, StoreUnavailable
from admission.vocabulary import partition_of
from tests.contract.desk_room import (
    Bug,
    Claim,
    Claimed,
    NamesDesk,
    Note,
    Order,
    Watched,
    commits_of,
    desk_on,
    folded,
    until,
)
from tests.contract.store_room import committed, plain

pytestmark = pytest.mark.anyio

RUN = "aaaa"


def wire(*events: Any) -> list[bytes]:
    return [msgspec.json.encode(event) for event in events]


async def by_another(store: Any, *events: Any, control: int = 0, run: str = RUN) -> None:
    """Somebody else appends these."""
    version = (await store.head(run))[0]
    committed(await store.commit(plain(run, *wire(*events), known=version, control=control)))


@pytest.fixture
def watched(memory_store: MemoryStore) -> Watched:
    """A store whose replies can be held back; they are not, at first."""
    return Watched(memory_store)


# --- groups


async def test_a_command_is_decided_and_durable_when_it_is_answered(store: Store) -> None:
    async with desk_on(store) as desk:
        answer = await desk.submit(RUN, Claim("x", "me"))
        assert (answer.decision.says, answer.version) == ("yours", 1)
        assert [e.data for e in await store.read(RUN, 0)] == wire(Claimed("x", "me"))
        assert (await desk.submit(RUN, Claim("x", "you"))).decision.says == "taken by me"
        assert (await store.head(RUN))[0] == 1


async def test_commands_that_wait_together_are_one_commit_and_answered_together(watched: Watched) -> None:
    answers: dict[str, tuple[str, int]] = {}

    async def claim(name: str, by: str) -> None:
        answer = await desk.submit(RUN, Claim(name, by))
        answers[by] = (answer.decision.says, answer.version)

    async with desk_on(watched) as desk, anyio.create_task_group() as tasks:
        watched.close()
        tasks.start_soon(claim, "first", "0")
        await until(lambda: len(watched.commits) == 1)
        for i in range(1, 5):
            tasks.start_soon(claim, "same" if i > 2 else f"own{i}", str(i))
        await anyio.wait_all_tasks_blocked()
        assert (len(watched.commits), answers) == (1, {}), "nobody is answered before the store has confirmed"
        watched.open.set()
        watched.close()
        await until(lambda: len(watched.commits) == 2)
        await anyio.wait_all_tasks_blocked()
        assert list(answers) == ["0"]
        assert len(watched.commits[1].events) == 3
        watched.open.set()
    assert answers == {
        "0": ("yours", 1), "1": ("yours", 2), "2": ("yours", 3), "3": ("yours", 4), "4": ("taken by 3", 4),
    }  # fmt: skip
    assert len(commits_of(await watched.store.read(RUN, 0))) == 2


async def test_a_caller_alone_waits_for_nobody(watched: Watched) -> None:
    """Its own task commits: no other task has to run first, and no time has to pass."""
    async with desk_on(watched) as desk:
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await anyio.lowlevel.checkpoint()

        async with anyio.create_task_group() as tasks:
            await desk.submit(RUN, Claim("warm"))
            tasks.start_soon(count)
            await anyio.lowlevel.checkpoint()
            before = turns
            await desk.submit(RUN, Claim("x"))
            assert turns - before <= 2, "one turn for the store in memory, and none for company"
            tasks.cancel_scope.cancel()


async def test_many_callers_on_one_run_all_get_their_own_answer(store: Store) -> None:
    says: dict[int, str] = {}

    async def claim(i: int) -> None:
        for k in range(5):
            says[i * 5 + k] = (await desk.submit(RUN, Claim(f"{i % 25}-{k}", str(i)))).decision.says

    async with desk_on(store) as desk, anyio.create_task_group() as tasks:
        for i in range(50):
            tasks.start_soon(claim, i)
    entries = await store.read(RUN, 0)
    assert len(entries) == 125
    assert sorted(says.values())[-125:] == ["yours"] * 125
    assert len(commits_of(entries)) < 60


async def test_two_desks_on_one_run_never_answer_differently(store: Store) -> None:
    says: list[tuple[str, int]] = []

    async def claim(desk: NamesDesk, who: str) -> None:
        for k in range(40):
            answer = await desk.submit(RUN, Claim(str(k), who))
            says.append((answer.decision.says, k))

    async with desk_on(store) as one, desk_on(store) as two, anyio.create_task_group() as tasks:
        for i in range(5):
            tasks.start_soon(claim, one, f"one{i}")
            tasks.start_soon(claim, two, f"two{i}")
    assert sorted(k for said, k in says if said == "yours") == list(range(40))
    assert (await store.head(RUN))[0] == 40


async def test_a_large_group_is_split(watched: Watched) -> None:
    async with desk_on(watched) as desk, anyio.create_task_group() as tasks:
        watched.close()
        tasks.start_soon(desk.submit, RUN, Claim("first"))
        await until(lambda: len(watched.commits) == 1)
        for i in range(8):
            tasks.start_soon(desk.submit, RUN, Claim(str(i), pad=300_000))
        await anyio.wait_all_tasks_blocked()
        watched.open.set()
    assert [len(c.events) for c in watched.commits] == [1, 4, 4]
    assert sorted((await folded(watched.store, RUN)).claims) == [*map(str, range(8)), "first"]


async def test_a_group_is_counted(watched: Watched) -> None:
    async with desk_on(watched) as desk, anyio.create_task_group() as tasks:
        for i in range(600):
            tasks.start_soon(desk.submit, RUN, Claim(str(i)))
    assert [len(c.events) for c in watched.commits] == [1, 256, 256, 87]


# --- conflict


async def test_on_conflict_all_members_are_decided_again(watched: Watched) -> None:
    answers: dict[str, str] = {}

    async def claim(name: str) -> None:
        answers[name] = (await desk.submit(RUN, Claim(name, "me"))).decision.says

    async with desk_on(watched) as desk:
        await desk.submit(RUN, Claim("warm"))
        async with anyio.create_task_group() as tasks:
            watched.close()
            tasks.start_soon(claim, "x")
            await until(lambda: len(watched.commits) == 2)
            for name in ("a", "b", "c"):
                tasks.start_soon(claim, name)
            await anyio.wait_all_tasks_blocked()
            await by_another(watched.store, Claimed("b", "other"))
            watched.open.set()
        assert answers == {"x": "yours", "a": "yours", "b": "taken by other", "c": "yours"}
        assert (await desk.current(RUN)).facts() == (await folded(watched.store, RUN)).facts()


async def test_a_refusal_from_a_stale_copy_is_not_an_answer(store: Store) -> None:
    async with desk_on(store) as desk:
        await desk.submit(RUN, Order("one", after=0))
        await by_another(store, {"type": "Ordered", "text": "two"}, control=1)
        # The copy says one order came before, the log says two.
        assert (await desk.submit(RUN, Order("three", after=2))).decision.says == "ordered"
        assert (await store.head(RUN)) == (3, 3)


async def test_a_fact_that_leads_to_nothing_is_confirmed(watched: Watched) -> None:
    async with desk_on(watched) as desk:
        await desk.submit(RUN, Note("a"))
        assert (await desk.submit(RUN, Note("a"))).decision.says == "known"
        assert [(c.compare, len(c.events)) for c in watched.commits] == [(Compare.NONE, 1), (Compare.LOG, 0)]


async def test_far_behind_the_log_the_run_is_loaded_again(store: Store) -> None:
    async with desk_on(store) as desk:
        await desk.submit(RUN, Claim("x", "me"))
        for i in range(0, 300, 50):
            await by_another(store, *[Claimed(f"y{k}", "other") for k in range(i, i + 50)])
        assert (await desk.submit(RUN, Claim("y299"))).decision.says == "taken by other"
        assert (await desk.submit(RUN, Claim("z"))).version == 302


async def test_facts_do_not_wait_for_those_who_compare(watched: Watched) -> None:
    """A mixed group meets a conflict: the fact goes first, and alone."""
    async with desk_on(watched) as desk, anyio.create_task_group() as tasks:
        await desk.submit(RUN, Claim("warm"))
        watched.close()
        tasks.start_soon(desk.submit, RUN, Claim("x"))
        await until(lambda: len(watched.commits) == 2)
        tasks.start_soon(desk.submit, RUN, Claim("y"))
        tasks.start_soon(desk.submit, RUN, Note("fact"))
        await anyio.wait_all_tasks_blocked()
        await by_another(watched.store, Claimed("z", "other"))
        watched.open.set()
    assert [c.compare for c in watched.commits[2:]] == [Compare.LOG, Compare.NONE, Compare.LOG]
    assert [len(c.events) for c in watched.commits[2:]] == [2, 1, 1]
    state = await folded(watched.store, RUN)
    assert (state.notes, sorted(state.claims)) == (["fact"], ["warm", "x", "y", "z"])


# --- control


async def test_control_goes_before_what_waits_longer(watched: Watched) -> None:
    async with desk_on(watched) as desk, anyio.create_task_group() as tasks:
        watched.close()
        tasks.start_soon(desk.submit, RUN, Claim("first"))
        await until(lambda: len(watched.commits) == 1)
        for i in range(20):
            tasks.start_soon(desk.submit, RUN, Claim(str(i)))
        tasks.start_soon(desk.submit, RUN, Order("stop", 0))
        await anyio.wait_all_tasks_blocked()
        watched.open.set()
    assert [(c.compare, len(c.events)) for c in watched.commits] == [
        (Compare.LOG, 1), (Compare.CONTROL, 1), (Compare.LOG, 20),
    ]  # fmt: skip


async def test_no_rate_of_effects_delays_control(store: Store) -> None:
    """Each try of a log comparison would meet a conflict here; a control commit needs one."""

    class Hot(Watched):
        async def commit(self, commit: Any) -> Any:
            self.commits.append(commit)
            await by_another(self.store, Claimed(f"hot{len(self.commits)}", "other"))
            return await self.store.commit(commit)

    hot = Hot(store)
    async with desk_on(hot) as desk:
        answer = await desk.submit(RUN, Order("stop", 0))
        assert (answer.decision.says, answer.version) == ("ordered", 2)
        assert len(hot.commits) == 1
        hot.commits.clear()
        await desk.submit(RUN, Note("fact"))
        assert len(hot.commits) == 1, "nor does it delay facts"
    async with desk_on(store) as desk:
        assert (await desk.current(RUN)).facts() == (await folded(store, RUN)).facts()


@pytest.mark.parametrize("others", [1, 255, 256, 300])
async def test_a_copy_takes_in_what_came_between(store: Store, others: int) -> None:
    async with desk_on(store) as desk:
        await desk.submit(RUN, Note("first"))
        for start in range(0, others, 50):
            await by_another(store, *[Claimed(str(k), "other") for k in range(start, min(start + 50, others))])
        answer = await desk.submit(RUN, Order("stop", 0))
        assert answer.version == others + 2
        assert (await desk.current(RUN)).facts() == (await folded(store, RUN)).facts()
        assert (await desk.submit(RUN, Claim("0"))).decision.says == "taken by other"


# --- fences


async def test_commands_under_different_fences_share_no_commit(watched: Watched) -> None:
    store = watched.store
    lease = await store.lease(partition_of(RUN, store.partitions), "a", "1", 60_000)
    failed: list[int] = []

    async def claim(name: str, fence: int | None) -> None:
        try:
            await desk.submit(RUN, Claim(name), fence=fence)
        except StoreFenced as error:
            failed.append(error.epoch)

    async with desk_on(watched) as desk, anyio.create_task_group() as tasks:
        watched.close()
        tasks.start_soon(claim, "first", None)
        await until(lambda: len(watched.commits) == 1)
        for i, fence in enumerate((None, lease.epoch, lease.epoch + 1, None, lease.epoch)):
            tasks.start_soon(claim, str(i), fence)
        await anyio.wait_all_tasks_blocked()
        watched.open.set()
    assert [(c.fence, len(c.events)) for c in watched.commits[1:]] == [(None, 2), (1, 2), (2, 1)]
    assert failed == [lease.epoch]
    assert sorted((await folded(store, RUN)).claims) == ["0", "1", "3", "4", "first"]


async def test_a_refusal_under_an_old_fence_is_no_answer_either(store: Store) -> None:
    partition = partition_of(RUN, store.partitions)
    old = await store.lease(partition, "a", "1", 60_000)
    async with desk_on(store) as desk:
        await desk.submit(RUN, Claim("x"), fence=old.epoch)
        await store.lease(partition, "a", "2", 60_000)
        for name in ("x", "y"):
            with pytest.raises(StoreFenced):
                await desk.submit(RUN, Claim(name), fence=old.epoch)
        assert (await desk.submit(RUN, Claim("y"))).decision.says == "yours"


# --- what goes wrong


@pytest.mark.parametrize("victim", [0, 1, 2])
async def test_a_cancelled_caller_breaks_no_other(watched: Watched, victim: int) -> None:
    """The first commits by itself, the others wait for the next group; either may be cancelled."""
    answers: list[int] = []
    scopes = [anyio.CancelScope() for _ in range(4)]

    async def claim(i: int) -> None:
        with scopes[i]:
            await desk.submit(RUN, Claim(str(i)))
            answers.append(i)

    async with desk_on(watched) as desk:
        async with anyio.create_task_group() as tasks:
            watched.close()
            tasks.start_soon(claim, 0)
            await until(lambda: len(watched.commits) == 1)
            for i in (1, 2, 3):
                tasks.start_soon(claim, i)
            await anyio.wait_all_tasks_blocked()
            scopes[victim].cancel()
            await anyio.wait_all_tasks_blocked()
            watched.open.set()
        assert sorted(answers) == [i for i in range(4) if i != victim]
        state = await desk.current(RUN)
        assert state.facts() == (await folded(watched.store, RUN)).facts()
        assert set(map(str, answers)) <= set(state.claims)


async def test_after_an_unknown_outcome_the_copy_is_loaded_again(memory_store: MemoryStore) -> None:
    async with desk_on(memory_store) as desk:
        await desk.submit(RUN, Claim("x", "me"))
        memory_store.faults.unknown_outcomes = 1
        with pytest.raises(StoreUnavailable):
            await desk.submit(RUN, Claim("y", "me"))
        assert (await desk.submit(RUN, Claim("y", "me again"))).decision.says == "taken by me"
        memory_store.faults.unavailable = True
        with pytest.raises(StoreUnavailable):
            await desk.submit(RUN, Claim("z"))
        with pytest.raises(StoreUnavailable):
            await desk.current(RUN)
        memory_store.faults.unavailable = False
        assert (await desk.submit(RUN, Claim("z"))).version == 3


async def test_a_lost_reply_is_invisible(memory_store: MemoryStore) -> None:
    async with desk_on(memory_store) as desk:
        memory_store.faults.lost_replies, memory_store.faults.lost_requests = 2, 1
        assert (await desk.submit(RUN, Claim("x"))).version == 1
        assert memory_store.arrivals == 3
        assert await memory_store.head(RUN) == (1, 0)


async def test_a_bug_in_the_rules_reaches_only_the_one_who_asked(watched: Watched) -> None:
    outcomes: dict[str, str] = {}

    async def ask(name: str, command: Any) -> None:
        try:
            outcomes[name] = (await desk.submit(RUN, command)).decision.says
        except ZeroDivisionError as error:
            outcomes[name] = str(error)

    async with desk_on(watched) as desk, anyio.create_task_group() as tasks:
        watched.close()
        tasks.start_soon(ask, "first", Claim("first"))
        await until(lambda: len(watched.commits) == 1)
        for name, command in (("a", Claim("a")), ("bug", Bug()), ("b", Claim("b"))):
            tasks.start_soon(ask, name, command)
        await anyio.wait_all_tasks_blocked()
        watched.open.set()
    assert outcomes == {"first": "yours", "a": "yours", "b": "yours", "bug": "a bug in the rules"}
    async with desk_on(watched.store) as desk:
        with pytest.raises(ZeroDivisionError):
            await desk.submit(RUN, Bug())


async def test_a_log_that_lost_acknowledged_events_is_an_alarm(store: Store) -> None:
    class Amnesiac(Watched):
        """After a while it shows another, shorter store, as a server that was put back from an old copy would."""

        async def commit(self, commit: Any) -> Any:
            return await self.store.commit(msgspec.structs.replace(commit, run="bbbb"))

    async with desk_on(store) as desk:
        await desk.submit(RUN, Claim("x"))
        for command in (Claim("x"), Claim("y"), Note("z"), Order("z", 0)):
            desk._store = store
            await desk.current(RUN)
            desk._store = Amnesiac(store)
            with pytest.raises(StoreBehind, match="acknowledged data was lost"):
                await desk.submit(RUN, command)


async def test_a_damaged_event_fails_those_who_ask_for_its_run(store: Store) -> None:
    committed(await store.commit(plain(RUN, b"garbage")))
    async with desk_on(store) as desk:
        with pytest.raises(msgspec.DecodeError):
            await desk.submit(RUN, Claim("x"))
        assert (await desk.submit("bbbb", Claim("x"))).version == 1


async def test_closing_the_desk_fails_those_who_wait(watched: Watched) -> None:
    failures: list[str] = []

    async def claim(name: str) -> None:
        try:
            await desk.submit(RUN, Claim(name))
        except StoreUnavailable as error:
            failures.append(str(error))

    async with anyio.create_task_group() as tasks:
        async with desk_on(watched) as desk:
            await desk.submit(RUN, Claim("warm"))
            watched.close()
            tasks.start_soon(claim, "a")
            await until(lambda: len(watched.commits) == 2)
            for name in "bcd":
                tasks.start_soon(claim, name)
            await anyio.wait_all_tasks_blocked()
            watched.open.set()
            watched.close()
            await until(lambda: len(watched.commits) == 3)
    assert len(failures) == 3
    with pytest.raises(RuntimeError, match="not open"):
        await desk.submit(RUN, Claim("e"))
