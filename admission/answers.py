"""The gate's answer to a worker that asks for an effect: its fields, and words where a verdict came without any.

Knows what a row of an attempt shows. Does not know how a verdict is reached, nor HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from admission.records import Attempt
from admission.vocabulary import Blocks, Verdict


@dataclass(frozen=True, slots=True)
class EffectAnswer:
    """The gate's answer; the fields that a row has are empty where there is no attempt."""

    verdict: Verdict
    revision_in_force: int
    attempt: str = ""
    blocks: Blocks | None = None
    detail: str = ""
    target: str = ""
    input_ref: str = ""
    operation_id: str = ""
    observed_result: dict[str, Any] | None = None
    revision: int = 0
    child: str = ""
    outcome: str = ""


def answer_of(
    row: Attempt,
    verdict: Verdict,
    *,
    in_force: int,
    blocks: Blocks | None = None,
    detail: str = "",
    observed: dict[str, Any] | None = None,
) -> EffectAnswer:
    """An answer that carries an attempt's row."""
    return EffectAnswer(
        verdict, in_force, row.id, blocks, detail, target=row.target, input_ref=row.input_ref, operation_id=row.key,
        observed_result=row.observed if observed is None else observed, revision=row.revision, child=row.child,
        outcome=row.state.value,
    )  # fmt: skip


def words_of(verdict: Verdict, in_force: int) -> str:
    """One line for an answer that came without a reason (the first refusal of a kind has one)."""
    match verdict:
        case Verdict.SUPERSEDED:
            return f"revision {in_force} is in force; stop"
        case Verdict.HELD:
            return "the run is paused; ask again when it is resumed"
        case Verdict.NOT_CURRENT:
            return "this task is not the child that works for the scope now; stop"
        case Verdict.DONE_BEFORE:
            return "the same effect was done before; this is its result"
        case Verdict.IN_FLIGHT:
            return "the same effect is being sent just now; ask again for its outcome"
        case Verdict.IN_DOUBT:
            return "its outcome is being found out; ask again later"
        case _:
            return verdict.value.replace("_", " ")
