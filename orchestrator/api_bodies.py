"""The bodies that the API takes, as pydantic models. Knows fields and limits; does not know what is done with them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StrictBool, StrictInt, StrictStr

from admission.vocabulary import UpdateKind
from orchestrator.goals import REQUIREMENTS_MAX, SCOPES_MAX, ChangePart, GoalPart, Part

RequestId = Annotated[StrictStr, Field(min_length=1, max_length=200, pattern=r"^[\x21-\x7e]+$")]
Reason = Annotated[StrictStr, Field(max_length=4_000)]


class _Request(Part):
    request_id: RequestId | None = None
    by: Annotated[StrictStr, Field(max_length=80)] = ""


class StartBody(_Request):
    """Create a run."""

    goal: GoalPart


class GoalOrChange(ChangePart):
    """A correction names parts of a goal, a replacement a whole one; which of them, the kind says."""

    def whole(self) -> GoalPart:
        """The same as a whole goal. Raises ValidationError."""
        return GoalPart.model_validate(self.model_dump(exclude_unset=True))


class ReviseBody(_Request):
    """Change the goal."""

    kind: Literal[UpdateKind.CORRECT, UpdateKind.REPLACE]
    goal: GoalOrChange = GoalOrChange()
    remove: Annotated[tuple[StrictStr, ...], Field(max_length=REQUIREMENTS_MAX + SCOPES_MAX)] = ()
    expected_revision: Annotated[StrictInt, Field(ge=1)] | None = None
    reason: Reason = ""


class SteerBody(_Request):
    """Pause, resume, cancel."""

    expected_revision: Annotated[StrictInt, Field(ge=1)] | None = None
    reason: Reason = ""


class ResolveBody(_Request):
    """Settle an unknown attempt by hand."""

    happened: StrictBool
    reason: Annotated[StrictStr, Field(min_length=1, max_length=4_000)]
    evidence: Annotated[StrictStr, Field(min_length=1, max_length=8_000)]
