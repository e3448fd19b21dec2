"""What a worker is told: the brief, and who it is (stamp, grant, gateway), read from what came over the wire.

Knows the JSON of a brief and of the launching metadata. Does not know A2A's types, the gateway or any agent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from admission.wire import EXTENSION, Stamp, blot, read_stamp, whole

ACTIONS_MAX = 10_000


class BadLaunch(Exception):
    """The launching message cannot be worked on. The text says what to send instead and holds no value of it."""


def _none_is_empty(value: Any) -> Any:
    return [] if value is None else value


Records = Annotated[list[Any], BeforeValidator(_none_is_empty), Field(default_factory=list)]


class Action(BaseModel):
    """One step of a plan: what to ask the gateway for."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    service: str = Field(min_length=1)
    action: str = Field(min_length=1)
    arguments: dict[str, Any] = Field(default_factory=dict)
    occurrence: int = Field(default=1, ge=1)


class Brief(BaseModel):
    """What the child is to do, and what is known already. `done`, `artifacts` and `pending` are for reading only:
    the gateway answers `done_before` by itself for what has been done."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    run: str = Field(min_length=1)
    scope: str = Field(min_length=1)
    revision: int = Field(ge=1)
    goal_hash: str = ""
    goal: str = ""
    brief: str = ""
    follows: str | None = None
    requirements: Records
    actions: Annotated[
        list[Action], BeforeValidator(_none_is_empty), Field(default_factory=list, max_length=ACTIONS_MAX)
    ]
    done: Records
    artifacts: Records
    pending: Records


@dataclass(frozen=True, slots=True)
class Launch:
    """One child as it was launched. The grant is a secret: it is never shown, not even by repr."""

    stamp: Stamp
    gateway: str
    brief: Brief
    grant: str = field(repr=False)

    def without_grant(self, text: str) -> str:
        """A text with every piece of the grant blotted out."""
        return blot(text, self.grant)


def read_launch(metadata: Mapping[str, Any], brief: Any) -> Launch:
    """The launch in a request's metadata and its data part. Raises BadLaunch."""
    fields = metadata.get(EXTENSION)
    stamp = read_stamp(metadata)
    if not isinstance(fields, Mapping) or stamp is None:
        raise BadLaunch(
            f"the request's metadata lacks {EXTENSION} with run, scope, child, revision, goal_hash, grant and gateway"
        )
    grant, gateway = fields.get("grant"), fields.get("gateway")
    if not isinstance(grant, str) or not grant:
        raise BadLaunch(f"metadata {EXTENSION} lacks `grant`: launch with the one that was made for this child")
    if not isinstance(gateway, str) or urlsplit(gateway).scheme not in ("http", "https"):
        raise BadLaunch(f"metadata {EXTENSION} lacks `gateway`: the http(s) address of the gate")
    if not isinstance(brief, Mapping):
        raise BadLaunch("the message has no data part: send the brief as one JSON object")
    try:
        told = Brief.model_validate(whole(brief))
    except ValidationError as wrong:
        places = "; ".join(f"{'.'.join(str(p) for p in e['loc'])}: {e['msg']}" for e in wrong.errors()[:5])
        raise BadLaunch(blot(f"the brief is malformed: {places}", grant)) from None
    if (told.run, told.scope, told.revision) != (stamp.run, stamp.scope, stamp.revision):
        raise BadLaunch(
            "the brief's run, scope and revision differ from those in the metadata: send one child's of both"
        )
    return Launch(stamp, gateway.rstrip("/"), told, grant)
