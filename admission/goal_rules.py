"""What a goal must be, what a revision makes of it, and which scopes that touches. Pure."""

from admission import commands as cmd
from admission import events as ev
from admission.state import RunState
from admission.vocabulary import UpdateKind, canonical, digest, within


def goal_hash(goal: ev.Goal) -> str:
    """The name of a goal's exact content."""
    return digest(canonical(ev.goal_dict(goal)))


def goal_faults(goal: ev.Goal) -> list[str]:
    """Why a goal cannot be worked on, as sentences."""
    faults = []
    if goal.budget_effects is not None and goal.budget_effects < 0:
        faults.append("the budget of effects is negative")
    if not goal.plan:
        faults.append("the plan has no scope: name at least one, with the agent that works on it")
    for scope, plan in goal.plan.items():
        if not scope or any(not part for part in scope.split("/")):
            faults.append(f"scope name {scope!r} is empty or has an empty part")
        if not plan.agent:
            faults.append(f"scope {scope!r} names no agent")
        faults += [f"scope {scope!r}: an occurrence below 1" for action in plan.actions if action.occurrence < 1]
        for need in plan.needs:
            producer = need.split(":", 1)[0]
            if producer not in goal.plan:
                faults.append(f"scope {scope!r} needs {need!r}, but there is no scope {producer!r}")
            elif _needs_itself(goal, scope, producer):
                faults.append(f"scope {scope!r} needs {need!r}, which needs {scope!r}: needs must not form a circle")
    ids = [r.id for r in goal.requirements]
    faults += [f"requirement id {r!r} is used twice" for r in sorted({r for r in ids if ids.count(r) > 1})]
    return faults


def _needs_itself(goal: ev.Goal, scope: str, producer: str) -> bool:
    seen: set[str] = set()
    todo = [producer]
    while todo:
        name = todo.pop()
        if name == scope:
            return True
        if name not in seen and name in goal.plan:
            seen.add(name)
            todo += [need.split(":", 1)[0] for need in goal.plan[name].needs]
    return False


def next_goal(run: RunState, command: cmd.Revise) -> ev.Goal:
    """The whole goal that a revision leads to; what it does not name is carried over unchanged."""
    if command.kind is UpdateKind.REPLACE:
        return command.goal
    old = run.revisions[run.head].goal
    given = {r.id: r for r in command.goal.requirements}
    kept = [given.pop(r.id, r) for r in old.requirements if r.id not in command.remove]
    plan = {s: command.goal.plan.get(s, p) for s, p in old.plan.items() if s not in command.remove}
    plan |= {s: p for s, p in command.goal.plan.items() if s not in plan}
    budget = old.budget_effects if command.goal.budget_effects is None else command.goal.budget_effects
    return ev.Goal(
        text=command.goal.text or old.text, requirements=(*kept, *given.values()), plan=plan, budget_effects=budget
    )


def affected_scopes(run: RunState, goal: ev.Goal, kind: UpdateKind) -> tuple[str, ...]:
    """The scopes that a revision touches: those it changes and everything downstream; if unsure, all of them."""
    old = run.revisions[run.head].goal
    everything = tuple(dict.fromkeys((*run.gates, *goal.plan)))
    if kind is UpdateKind.REPLACE:
        return everything
    touched = {s for s in everything if old.plan.get(s) != goal.plan.get(s)}
    if not touched:
        return everything  # words changed and no scope was named: nobody can tell which branch may go on
    grew = True
    while grew:
        grew = False
        for scope, plan in goal.plan.items():
            upstream = {need.split(":", 1)[0] for need in plan.needs}
            below = any(within(scope, t) for t in touched)
            if scope not in touched and (below or touched & upstream):
                touched.add(scope)
                grew = True
    return tuple(s for s in everything if s in touched)


def revision_faults(run: RunState, command: cmd.Revise) -> list[str]:
    """Why a revision is refused, as sentences."""
    if command.kind not in (UpdateKind.CORRECT, UpdateKind.REPLACE):
        return [f"a revision corrects or replaces; {command.kind.value!r} is another command"]
    old = run.revisions[run.head].goal
    known = {r.id for r in old.requirements} | set(old.plan)
    faults = [f"cannot remove {name!r}: it is no requirement or scope" for name in command.remove if name not in known]
    goal = next_goal(run, command)
    faults += goal_faults(goal)
    if not faults and goal == old:
        faults.append("the revision changes nothing")
    return faults
