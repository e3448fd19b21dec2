"""The independent checker: `python -m simulators.checker --log LOG.jsonl --journal shop=JOURNAL.jsonl`.

It reads the exported logs of runs and the services' own journals and says whether the protocol's promises were kept.
It shares no code with what it checks. Knows how to read its arguments and print its verdict; the checks are in
checks_*.py.
Exit code: 0 nothing is broken, 1 something is, 2 it could not be checked (the reason is on stderr).
"""

from __future__ import annotations

import argparse
import heapq
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from simulators.checks_attempts import ATTEMPT_CHECKS
from simulators.checks_control import CONTROL_CHECKS, Violation
from simulators.checks_input import Entry, InputError, Journal, Json, read_journal, read_log
from simulators.checks_journal import (
    Matched,
    check_given,
    check_hidden,
    check_payloads,
    check_s3,
    check_s4,
    check_s6,
    check_s7,
    match_effects,
    promises,
)
from simulators.checks_replay import World


def check(logs: Sequence[list[Entry]], journals: Sequence[Journal], *, margin_ms: int = 0) -> Json:
    """The verdict on these runs and journals, as one JSON object.

    Journals must be whole and all runs that used them be given, else their effects count as unledgered. `margin_ms`:
    how far the services' clocks may be ahead of the store's before an effect counts as landed after an opening.

    Raises:
        InputError: an event lacks a field that a check reads.
    """
    world = World(logs)
    violations: list[Violation] = []
    # Runs of a lineage share slots, so all logs are replayed together, in the order of the store's clock.
    for entry in heapq.merge(*logs, key=lambda one: one.at):
        run = world.runs[entry.run]
        for one_check in (*CONTROL_CHECKS, *ATTEMPT_CHECKS):
            violations.extend(one_check(world, run, entry))
        world.apply(entry)
    matched = match_effects(world, journals)
    services = [journal.service for journal in journals]
    violations.extend(check_s3(matched))
    violations.extend(check_s4(world, matched))
    violations.extend(check_s6(world, matched, services))
    violations.extend(check_s7(matched, margin_ms))
    violations.extend(check_payloads(world, journals))
    violations.extend(check_given(world, services))
    violations.extend(check_hidden(world))
    return {
        "violations": [violation.as_json() for violation in violations],
        **promises(world, matched, violations, margin_ms=margin_ms, services=services),
        "smallest_margin_ms": _smallest_margin(matched),
        "checked_against": [
            *(f"{journal.service}: {len(journal.effects)} effects" for journal in journals),
            *(f"run {log[0].run}: {len(log)} events" for log in logs),
        ],
    }


def _smallest_margin(matched: Matched) -> int | None:
    """How long before the opening for a newer revision the last older effect landed (ms); None when there was none."""
    margins = [a.passed.at - e.at_ms for e, a in matched.pairs if a.passed and not a.blocks_slot]
    return min(margins, default=None)


def _print_text(verdict: Json) -> None:
    for violation in verdict["violations"]:
        place = f"{violation['run']} " if violation["run"] else ""
        print(f"BROKEN {violation['check']} {place}at {violation['position']}: {violation['detail']}")
    for row in verdict["late_landings"]:
        when = f"{row['after_close_ms']} ms after {row['closed_by']}"
        print(f"late   {row['attempt']} {row['operation']} {row['target']}: {when}")
    for row in verdict["unresolved"]:
        what = f"{row['attempt']} {row['operation']} {row['target']}: {row['outcome']}"
        print(f"open   {what}{', ' + row['why'] if row['why'] else ''} (journal: {row['journal']})")
    counts = ", ".join(f"{verdict[name]} {name}" for name in ("duplicate_effects", "stale_effects", "hidden_unknowns"))
    print(f"{len(verdict['violations'])} violations, {counts}; checked against {', '.join(verdict['checked_against'])}")


def _journal_argument(text: str) -> tuple[str, Path]:
    service, equals, path = text.partition("=")
    if not (service and equals and path):
        raise argparse.ArgumentTypeError(f"{text!r} is not SERVICE=FILE")
    return service, Path(path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m simulators.checker", description="Check exported run logs against the services' own journals."
    )
    parser.add_argument("--log", action="append", type=Path, required=True, metavar="FILE", help="a run's log (JSONL)")
    parser.add_argument(
        "--journal",
        action="append",
        type=_journal_argument,
        default=[],
        metavar="SERVICE=FILE",
        help="a service's journal",
    )
    parser.add_argument(
        "--margin-ms", type=int, default=0, help="how far a service's clock may be ahead of the store's (default 0)"
    )
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text")
    given = parser.parse_args(arguments)
    try:
        logs = [read_log(path) for path in given.log]
        names = [log[0].run for log in logs]
        services = [service for service, _ in given.journal]
        for name in {name for name in names + services if (names + services).count(name) > 1}:
            raise InputError(f"{name} is given twice")
        verdict = check(logs, [read_journal(name, path) for name, path in given.journal], margin_ms=given.margin_ms)
    except InputError as error:
        print(f"cannot check: {error}", file=sys.stderr)
        return 2
    if given.output == "json":
        print(json.dumps(verdict, ensure_ascii=False))
    else:
        _print_text(verdict)
    kept = not (
        verdict["violations"] or verdict["duplicate_effects"] or verdict["stale_effects"] or verdict["hidden_unknowns"]
    )
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
