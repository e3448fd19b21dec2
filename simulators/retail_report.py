"""What a `retail` command says in the end: counts, shares, every unknown, every violation with what repeats it.

Pure: verdicts in, one JSON object or the lines of a table out. Knows what makes the command fail.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from simulators.faults import Profile
from simulators.retail_cases import BETWEEN_SHARE_MIN, IN_FLIGHT_SHARE_MIN, SPLIT_SHARE_MIN
from simulators.retail_stack import ContractKind
from simulators.retail_verdict import Hit, Outcome, Verdict
from simulators.tasks import Shift


@dataclass(frozen=True)
class Asked:
    """What the command was asked for, as far as it takes to repeat it."""

    data: str | None
    tasks: str
    faults: Profile
    contract: ContractKind
    only: tuple[str, ...] = ()

    def repeat(self, shift: Shift, seed: int) -> str:
        """The command line that repeats one round."""
        words = ["regate", "retail", *(["--data", self.data] if self.data else []), "--tasks", self.tasks]
        words += ["--faults", self.faults.value, "--contract", self.contract.value]
        return shlex.join([*words, "--shift", shift.value, "--seed", str(seed)])


@dataclass(frozen=True)
class Round:
    """One shift with one seed: its verdicts, and what kept it from being whole."""

    shift: Shift
    seed: int
    verdicts: tuple[Verdict, ...]
    not_redirectable: Mapping[str, str]
    seconds: float
    trouble: str = ""


@dataclass
class Report:
    """All rounds of a command."""

    asked: Asked
    rounds: list[Round] = field(default_factory=list)
    stopped: bool = False

    @property
    def verdicts(self) -> list[tuple[Round, Verdict]]:
        return [(one, verdict) for one in self.rounds for verdict in one.verdicts]

    def counts(self) -> dict[str, int]:
        """How many runs ended how."""
        found = Counter(verdict.outcome for _, verdict in self.verdicts)
        return {outcome.value: found[outcome] for outcome in Outcome}

    def hits(self) -> dict[str, int]:
        """How many redirects hit what, as the logs have it."""
        found = Counter(verdict.hit for _, verdict in self.verdicts)
        return {hit.value: found[hit] for hit in Hit}

    def shares(self) -> dict[str, float]:
        """Parts of all runs."""
        runs = len(self.verdicts) or 1
        hits = self.hits()
        split = sum(1 for _, verdict in self.verdicts if verdict.case.kept)
        return {
            "in_flight": hits[Hit.IN_FLIGHT] / runs,
            "between_two": hits[Hit.BETWEEN] / runs,
            "two_scopes": split / runs,
        }

    def failures(self) -> list[str]:
        """Why the command fails, one line each; empty when it does not."""
        found = [f"{one.shift.value}, seed {one.seed}: {one.trouble}" for one in self.rounds if one.trouble]
        counts = self.counts()
        if self.stopped:
            found.append("stopped before the end")
        if not self.verdicts:
            found.append("nothing was run")
        if counts[Outcome.VIOLATED]:
            found.append(f"{counts[Outcome.VIOLATED]} runs break what was promised")
        if counts[Outcome.BLOCKED] and self.asked.contract is not ContractKind.LOOKUP:
            found.append(f"{counts[Outcome.BLOCKED]} runs are blocked, though these shops can prove what happened")
        loses = self.asked.faults in (Profile.LOST, Profile.MIXED)
        if self.asked.contract is ContractKind.LOOKUP and loses and not counts[Outcome.BLOCKED]:
            found.append("requests were lost, and no run is blocked: something unproven was taken for proven")
        if not self.asked.only:
            found += self._short_shares()
        return found

    def _short_shares(self) -> Iterator[str]:
        least = {
            "in_flight": IN_FLIGHT_SHARE_MIN, "between_two": BETWEEN_SHARE_MIN, "two_scopes": SPLIT_SHARE_MIN
        }  # fmt: skip
        for name, share in self.shares().items():
            if share < least[name]:
                yield f"only {share:.0%} of the runs are {name}, at least {least[name]:.0%} are wanted"

    def as_json(self) -> dict[str, Any]:
        """Everything, as one object."""
        totals: Counter[str] = Counter()
        for _, verdict in self.verdicts:
            totals.update(verdict.counts)
        return {
            "ok": not self.failures(),
            "failures": self.failures(),
            "faults": self.asked.faults.value,
            "contract": self.asked.contract.value,
            "runs": len(self.verdicts),
            **self.counts(),
            "hits": self.hits(),
            "shares": {name: round(share, 3) for name, share in self.shares().items()},
            "totals": dict(totals),
            "rounds": [_round_row(one) for one in self.rounds],
            "not_redirectable": {task: why for one in self.rounds for task, why in one.not_redirectable.items()},
            "unknown": [
                {**_place(one, verdict), "what": what} for one, verdict in self.verdicts for what in verdict.unknown
            ],
            "violations": [
                {**_place(one, verdict), "what": what, "repeat": self.asked.repeat(one.shift, one.seed)}
                for one, verdict in self.verdicts
                for what in verdict.violations
            ],
            "seconds": round(sum(one.seconds for one in self.rounds), 1),
        }


def _place(one: Round, verdict: Verdict) -> dict[str, Any]:
    return {
        "shift": one.shift.value,
        "seed": one.seed,
        "task": verdict.case.task_id,
        "run": verdict.run,
        "hit": verdict.hit.value,
    }


def _round_row(one: Round) -> dict[str, Any]:
    outcomes = Counter(verdict.outcome for verdict in one.verdicts)
    hits = Counter(verdict.hit for verdict in one.verdicts)
    return {
        "shift": one.shift.value,
        "seed": one.seed,
        "runs": len(one.verdicts),
        **{outcome.value: outcomes[outcome] for outcome in Outcome},
        "not_redirectable": len(one.not_redirectable),
        "in_flight": hits[Hit.IN_FLIGHT],
        "between_two": hits[Hit.BETWEEN],
        "before_anything": hits[Hit.BEFORE],
        "other_moments": hits[Hit.AFTER] + hits[Hit.UNKNOWN] + hits[Hit.MISSED],
        "two_scopes": sum(1 for verdict in one.verdicts if verdict.case.kept),
        "seconds": round(one.seconds, 1),
    }


COLUMNS = (
    "shift", "seed", "runs", "passed", "blocked", "violated", "not_redirectable", "in_flight", "between_two",
    "before_anything", "other_moments", "two_scopes", "seconds",
)  # fmt: skip


def table_rows(report: Report) -> list[Sequence[str]]:
    """The rows under `COLUMNS`, and a last one with the sums when there is more than one."""
    rows = [_round_row(one) for one in report.rounds]
    shown: list[Sequence[str]] = [[str(row[name]) for name in COLUMNS] for row in rows]
    if len(rows) > 1:
        sums = {name: round(sum(row[name] for row in rows), 1) for name in COLUMNS if name not in ("shift", "seed")}
        shown.append(["all", "", *(str(sums[name]) for name in COLUMNS[2:])])
    return shown
