"""The agenda lists what is due for as long as it is due, and says when something else will be."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
from hypothesis import given

from admission import commands as cmd
from admission.agenda import (
    CLOSE_GRACE_MS,
    FIND_FOR_MS,
    LAUNCH_RETRY_MS,
    LAUNCHES_MAX,
    STOP_RETRY_MS,
    Action,
    Ask,
    Collect,
    Commit,
    FindTask,
    Launch,
    Observe,
    Plan,
    Stop,
    agenda,
    index_of,
)
from admission.live import live_part, restore
from admission.records import Child
from admission.rules_run import CANCEL_DEADLINE_MS
from admission.standing import attention_since, is_live
from admission.table import Answer
from admission.vocabulary import (
    AttemptState,
    Basis,
    Blocks,
    ChildMode,
    ChildState,
    ContractClass,
    Disposition,
    Finding,
    Method,
    RunPhase,
    TaskState,
    TryOutcome,
    UpdateKind,
)
from tests.unit.any_commands import DRAWS, Draw, played
from tests.unit.rules_stage import Stage, facts, goal, plan

#: Longer than any retry, deadline or backoff of a run.
AN_HOUR = 3_600_000


def _kinds(actions: tuple[Action, ...]) -> list[type[Action]]:
    return [type(a) for a in actions]


def _commits(actions: tuple[Action, ...]) -> list[type[cmd.Command]]:
    return [type(a.command) for a in actions if isinstance(a, Commit)]


# --- level-triggered: listed until done ------------------------------------------------------------------------------


def test_a_scope_is_planned_launched_observed_and_collected() -> None:
    stage = Stage(goal("a"))
    assert stage.agenda() == stage.agenda() == (Plan("a", 1, "hands"),)
    child = stage.planned("a")
    assert stage.agenda() == stage.agenda() == (Launch(child.id),)
    stage.ok(cmd.StartLaunch(child=child.id))
    assert stage.agenda() == (), "its answer is waited for"
    assert stage.agenda(LAUNCH_RETRY_MS) == (Launch(child.id),), "and then the same message is sent again"
    stage.ok(cmd.BindChild(child=child.id, task="t"))
    assert stage.agenda() == stage.agenda(AN_HOUR) == (Observe(child.id),)
    stage.ok(cmd.ClaimChild(child=child.id, scope="a", revision=1, task="t"))
    stage.seen(child, TaskState.COMPLETED)
    assert stage.agenda() == stage.agenda() == (Collect(child.id),)
    stage.file(child)
    assert _commits(stage.agenda()) == [cmd.Finish]
    stage.ok(cmd.Finish(epoch=1))
    assert stage.agenda() == ()
    assert not is_live(stage.run)


@pytest.mark.parametrize("state", [TaskState.FAILED, TaskState.REJECTED, TaskState.CANCELED])
def test_a_child_that_ended_without_a_result_is_followed_by_another(state: TaskState) -> None:
    stage = Stage(goal("a"))
    stage.seen(stage.running("a"), state)
    assert stage.agenda() == (Plan("a", 1, "hands"),)


def test_a_scope_waits_for_its_needs_and_a_dropped_scope_wants_nobody() -> None:
    stage = Stage(goal("a", b=plan(needs=("a",))))
    assert stage.agenda() == (Plan("a", 1, "hands"),)
    stage.finished("a")
    assert stage.agenda() == (Plan("b", 1, "hands"),)
    stage.revise(goal("c", text="new"), kind=UpdateKind.REPLACE)
    for scope in ("a", "b", "c"):
        stage.open(scope)
    assert stage.agenda() == (Plan("c", 2, "hands"),)


def test_a_redirect_stops_the_child_asks_about_the_attempt_and_then_opens() -> None:
    stage = Stage(goal("a"))
    child = stage.running("a")
    attempt = stage.sent(child)
    stage.change("a")
    assert stage.agenda() == (Observe(child.id), Stop(child.id))
    assert Ask(attempt.id) in stage.agenda(CLOSE_GRACE_MS), "a void need not wait for the time-out"
    assert cmd.OpenScope not in _commits(stage.agenda(AN_HOUR)), "not before the attempt is settled"
    stage.voided(attempt)
    assert _commits(stage.agenda()) == [], "who is asked to stop is written down before the checkpoint that names them"
    stage.ok(cmd.RequestStop(child=child.id, reason="superseded"))
    assert _commits(stage.agenda()) == [cmd.OpenScope]
    assert _commits(stage.agenda(AN_HOUR)) == [cmd.OpenScope], "a gated child that goes on does not delay it"
    stage.open("a")
    assert Plan("a", 2, "hands") in stage.agenda()
    assert Stop(child.id) in stage.agenda(AN_HOUR), "it is still asked to stop"


def test_stops_are_repeated_at_growing_distances_until_the_child_is_seen_to_end() -> None:
    stage = Stage(goal("a"))
    child = stage.running("a")
    stage.change("a")
    for n in range(1, 5):
        assert Stop(child.id) in stage.agenda()
        stage.ok(cmd.RequestStop(child=child.id, reason="superseded"))
        stage.do(cmd.RecordStop(child=child.id, refused=bool(n % 2), detail=str(n)))
        wait = STOP_RETRY_MS << (n - 1)
        assert Stop(child.id) not in stage.agenda(wait - 1)
        assert agenda(stage.run, stage.now).due_ms == stage.now + wait
        stage.now += wait
    stage.seen(child, TaskState.CANCELED)
    assert not {Stop, Observe} & set(_kinds(stage.agenda(AN_HOUR)))


def test_a_launch_that_nobody_answers_is_given_up_in_the_end() -> None:
    stage = Stage(goal("a"))
    child = stage.planned("a")
    for _ in range(LAUNCHES_MAX):
        assert Launch(child.id) in stage.agenda()
        stage.ok(cmd.StartLaunch(child=child.id))
        stage.now += LAUNCH_RETRY_MS
    assert _commits(stage.agenda()) == [cmd.DeclareLost]


@pytest.mark.parametrize("change", ["revise", "cancel"])
def test_a_launch_whose_child_is_superseded_is_looked_for_and_given_up_in_the_end(change: str) -> None:
    stage = Stage(goal("a"))
    child = stage.launched("a")
    _ = stage.change("a") if change == "revise" else stage.cancel()
    assert FindTask(child.id) in stage.agenda(LAUNCH_RETRY_MS)
    assert Launch not in _kinds(stage.agenda(AN_HOUR))
    assert cmd.DeclareLost not in _commits(stage.agenda(LAUNCH_RETRY_MS))
    assert cmd.DeclareLost in _commits(stage.agenda(FIND_FOR_MS))


def test_nothing_is_started_while_held_and_everything_goes_on_at_resume() -> None:
    stage = Stage(goal("a", "b", "c"))
    planned, launched = stage.planned("a"), stage.launched("b")
    stage.pause()
    assert stage.agenda() == ()
    assert not {Plan, Launch} & set(_kinds(stage.agenda(AN_HOUR)))
    stage.resume()
    assert set(stage.agenda(LAUNCH_RETRY_MS)) == {Launch(planned.id), Launch(launched.id), Plan("c", 1, "hands")}


def test_a_parked_result_is_collected_when_the_hold_ends() -> None:
    stage = Stage(goal("a"))
    child = stage.running("a")
    stage.pause()
    stage.seen(child, TaskState.COMPLETED)
    assert stage.file(child).verdict is Disposition.PARKED
    assert stage.agenda(AN_HOUR) == ()
    stage.resume()
    assert stage.agenda() == (Collect(child.id),)


# --- asking ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("contract_class", ContractClass)
def test_a_service_is_asked_when_its_gateway_had_time_to_report(contract_class: ContractClass) -> None:
    stage = Stage(goal("a"))
    attempt = stage.sent(stage.running("a"), contract=facts(contract_class, timeout_ms=5_000))
    assert Ask(attempt.id) not in stage.agenda(5_000)
    assert agenda(stage.run, stage.now).due_ms == attempt.reconcile_at
    assert Ask(attempt.id) in stage.agenda(attempt.reconcile_at - stage.now)


def test_an_attempt_in_doubt_is_asked_about_at_once_and_again_at_growing_distances() -> None:
    stage = Stage(goal("a"))
    attempt = stage.sent(stage.running("a"))
    stage.record(attempt, TryOutcome.IN_DOUBT)
    waits = []
    for _ in range(4):
        assert Ask(attempt.id) in stage.agenda()
        stage.question(attempt)
        due = agenda(stage.run, stage.now).due_ms
        assert due is not None
        waits.append(due - stage.now)
        assert Ask(attempt.id) not in stage.agenda(waits[-1] - 1)
        stage.now = due
    assert waits == [waits[0], waits[0] * 2, waits[0] * 4, waits[0] * 8]


def test_a_retry_that_is_meant_is_waited_for() -> None:
    stage = Stage(goal("a"))
    attempt = stage.sent(stage.running("a"))
    stage.record(attempt, TryOutcome.IN_DOUBT, retry_in=2_000)
    assert Ask(attempt.id) not in stage.agenda(2_000)
    assert Ask(attempt.id) in stage.agenda(2_500)


def test_a_retry_that_was_meant_and_is_no_longer_allowed_is_concluded_at_once() -> None:
    stage = Stage(goal("a"))
    attempt = stage.sent(stage.running("a"))
    stage.record(attempt, TryOutcome.NOT_EXECUTED, retry_in=60_000)
    stage.change("a")
    assert Ask(attempt.id) in stage.agenda()
    assert stage.classify(attempt, Finding.NOT_EXECUTED, Basis.SERVICE_REFUSED).accepted


@pytest.mark.parametrize("contract_class", ContractClass)
def test_an_unknown_attempt_is_asked_about_only_if_somebody_can_be_asked(contract_class: ContractClass) -> None:
    stage = Stage(goal("a"))
    attempt = stage.unknown(stage.running("a"), contract=facts(contract_class))
    asked = contract_class in (ContractClass.VOID, ContractClass.LOOKUP, ContractClass.NOT_AFTER)
    assert (Ask(attempt.id) in stage.agenda(AN_HOUR)) is asked
    assert attention_since(stage.run) == attempt.unknown_at


# --- blocked gates ---------------------------------------------------------------------------------------------------


def test_opening_is_not_listed_while_it_would_be_refused() -> None:
    """Each reason for which OpenScope is refused keeps it off the list, and is shown."""
    unknown = Stage(goal("a"))
    unknown.unknown(unknown.running("a"))
    unknown.change("a")
    child = Stage(goal("a"))
    lost = child.running("a", ChildMode.AUTONOMOUS)
    child.change("a")
    child.ok(cmd.DeclareLost(child=lost.id, detail="x"))
    budget = Stage(goal("a", budget=5))
    worker = budget.running("a")
    for n in range(3):
        budget.done(worker, f"o{n}")
    budget.revise(goal("a", text="cheaper", budget=1), kind=UpdateKind.REPLACE)
    for stage in (unknown, child, budget):
        assert not stage.decide(cmd.OpenScope(scope="a", revision=2, epoch=1)).accepted
        assert cmd.OpenScope not in _commits(stage.agenda(AN_HOUR))
        assert stage.phase() is RunPhase.BLOCKED
        assert attention_since(stage.run) is not None


def test_a_slot_that_is_unknown_does_not_keep_the_gate_closed() -> None:
    stage = Stage(goal("a"))
    child = stage.running("a")
    stage.unknown(child, contract=facts(ContractClass.OPAQUE, unknown_blocks=Blocks.SLOT))
    stage.change("a")
    stage.ok(cmd.RequestStop(child=child.id, reason="superseded"))
    assert cmd.OpenScope in _commits(stage.agenda())


@pytest.mark.parametrize("answer", ["accepts and goes on", "refuses", "unreachable", "lost", "never found"])
def test_an_agent_that_acts_past_the_gate_and_does_not_stop_is_shown(answer: str) -> None:
    stage = Stage(goal("a"))
    child = (
        stage.launched("a", ChildMode.AUTONOMOUS)
        if answer == "never found"
        else stage.running("a", ChildMode.AUTONOMOUS)
    )
    stage.change("a")
    for _ in range(4):
        match answer:
            case "lost":
                stage.do(cmd.DeclareLost(child=child.id, detail="x"))
            case "never found":
                pass
            case _:
                stage.ok(cmd.RequestStop(child=child.id, reason="x"))
                if answer != "accepts and goes on":
                    stage.do(cmd.RecordStop(child=child.id, refused=answer == "refuses", detail="x"))
        stage.now += 120_000
    assert stage.phase() is RunPhase.BLOCKED
    assert attention_since(stage.run) is not None
    if answer == "lost":
        assert Observe(child.id) in stage.agenda(), "only seeing it end opens the gate, so somebody has to look"


def test_a_need_that_can_never_be_met_is_shown() -> None:
    stage = Stage(goal("a", b=plan(needs=("a:report",))))
    stage.finished("a")
    assert stage.agenda(AN_HOUR) == ()
    assert (stage.phase(), attention_since(stage.run) is not None) == (RunPhase.BLOCKED, True)


@pytest.mark.parametrize("make", [Stage.launched, Stage.running])
def test_a_lost_agent_that_may_still_act_is_shown_and_nobody_is_sent_beside_it(make: Callable[..., Child]) -> None:
    stage = Stage(goal("a"))
    stage.ok(cmd.DeclareLost(child=make(stage, "a", ChildMode.AUTONOMOUS).id, detail="gone"))
    again = cmd.PlanChild(scope="a", revision=1, mode=ChildMode.AUTONOMOUS)
    assert stage.do(again).verdict is Answer.ALREADY
    assert not [action for action in stage.agenda(AN_HOUR) if isinstance(action, Plan)]
    assert not stage.do(cmd.Finish(epoch=1)).accepted
    assert (stage.phase(), attention_since(stage.run) is not None) == (RunPhase.BLOCKED, True)


def test_an_agent_outside_the_gate_is_not_sent_again_because_its_result_names_no_revision() -> None:
    """It has done what it did in the world; sending it once more would do that twice."""
    stage = Stage(goal("a"))
    first = stage.running("a", ChildMode.AUTONOMOUS)
    stage.seen(first, TaskState.COMPLETED)
    stage.file(first, stamp=None)
    stage.change("a")
    stage.open("a")
    second = stage.running("a", ChildMode.AUTONOMOUS)
    stage.seen(second, TaskState.COMPLETED)
    assert stage.file(second, stamp=None).verdict is Disposition.DROPPED
    assert stage.agenda(AN_HOUR) == ()
    assert (stage.phase(), attention_since(stage.run) is not None) == (RunPhase.BLOCKED, True)


def test_a_cancelled_run_comes_to_an_end_whatever_its_children_do() -> None:
    for make in (Stage.launched, Stage.running):
        stage = Stage(goal("a"))
        child = make(stage, "a")
        stage.cancel()
        if child.task:
            stage.ok(cmd.RequestStop(child=child.id, reason="cancelled"))
        deadline = stage.now + CANCEL_DEADLINE_MS
        assert cmd.Finish not in _commits(stage.agenda())
        while cmd.Finish not in _commits(stage.agenda()):
            due = agenda(stage.run, stage.now).due_ms
            assert due is not None, "somebody has to look again"
            assert due <= deadline + 1
            stage.now = due
        stage.ok(cmd.Finish(epoch=1))
        assert stage.phase() is RunPhase.CANCELLED_UNRESOLVED


# --- times and indexes -----------------------------------------------------------------------------------------------


@given(DRAWS)
def test_what_is_due_later_is_listed_then_and_not_before(draws: list[Draw]) -> None:
    stage = played(draws)
    now = stage.run.time
    for _ in range(8):
        found = agenda(stage.run, now)
        if found.due_ms is None:
            break
        assert found.due_ms > now
        if found.due_ms > now + 1:
            assert agenda(stage.run, found.due_ms - 1).actions == found.actions, "nothing changes before it is due"
        now = found.due_ms
    assert agenda(stage.run, now).actions == agenda(stage.run, now).actions


@given(DRAWS)
def test_indexes_depend_on_the_state_alone(draws: list[Draw]) -> None:
    stage = played(draws)
    stage.run.clock = stage.now + 10**9  # the time of some decision that was made on this copy
    first = index_of(stage.run)
    rows = sorted(stage.run.attempts.values(), key=lambda row: row.no)
    again = index_of(restore(copy.deepcopy(live_part(stage.run)), rows))
    assert again == first == index_of(stage.run)
    assert first.live or first.due_ms is None


@given(DRAWS)
def test_a_listed_commit_is_accepted(draws: list[Draw]) -> None:
    """What the agenda wants appended, the rules accept: otherwise the conductor would ask in a circle."""
    stage = played(draws)
    for later in (0, 400, 20_000, AN_HOUR):
        stage.now = max(stage.now, stage.run.time) + later
        for action in agenda(stage.run, stage.now, epoch=1).actions:
            command: cmd.Command
            match action:
                case Commit(command):
                    pass
                case Plan(scope, revision, _):
                    command = cmd.PlanChild(scope=scope, revision=revision, mode=ChildMode.MEDIATED)
                case Launch(child):
                    command = cmd.StartLaunch(child=child)
                case Stop(child):
                    command = cmd.RequestStop(child=child, reason="asked")
                case Ask(attempt) if (
                    stage.run.facts_of(stage.run.attempts[attempt]).contract_class is ContractClass.VOID
                ):
                    command = cmd.StartReconcile(attempt=attempt, method=Method.VOID, epoch=1)
                case _:
                    continue
            assert stage.decide(command).accepted, f"{action} is listed and then refused"


@given(DRAWS)
def test_what_is_open_is_followed_or_shown(draws: list[Draw]) -> None:
    """Within an hour every open attempt is asked about, or is unknown and waits in sight of a person."""
    stage = played(draws)
    listed = {a.attempt for a in agenda(stage.run, stage.now + AN_HOUR).actions if isinstance(a, Ask)}
    for attempt_id in stage.run.open_attempts:
        row = stage.run.attempts[attempt_id]
        assert attempt_id in listed or (row.state is AttemptState.UNKNOWN and attention_since(stage.run) is not None)
    for child in stage.run.children.values():
        if not child.settled and child.state not in (ChildState.PLANNED, ChildState.LAUNCHING):
            assert Observe(child.id) in agenda(stage.run, stage.now).actions
