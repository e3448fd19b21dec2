"""A mail service as many are: it takes a message and forgets who asked. No keys, no lookup, no taking back.

Knows messages and its journal. Whoever sends twice, mails twice.
"""

from __future__ import annotations

import json

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from simulators.entrance import Arrival, Entrance, Reply, check_credential, read_arrival
from simulators.faults import Fault
from simulators.keyed import assembled, shared_routes

ACTION = "send_message"
"""The name under which faults and journal know a message."""

FIELDS = ("to", "template", "subject", "body")


class MailService:
    """Counts messages. The count survives a restart because the journal does."""

    def __init__(self, entrance: Entrance) -> None:
        self.entrance = entrance
        self._messages = sum(line["event"] == "executed" for line in entrance.journal.lines)
        for line in entrance.journal.lines:
            entrance.recall(line)

    async def process(self, arrival: Arrival, fault: Fault | None) -> Reply:
        """Take a message, or say what is wrong with it, and return once the journal holds it."""
        wrong, message = _checked(arrival.raw)
        if wrong:
            body = {"code": "policy", "rule": "message_invalid", "message": wrong}
            self.entrance.note("refused", arrival, fault, error=body)
            reply = Reply(422, body)
        else:
            self._messages += 1
            receipt = {"message": f"mail-{self._messages}"}
            self.entrance.note("executed", arrival, fault, arguments=message, receipt=receipt)
            reply = Reply(202, {"receipt": receipt})
        await self.entrance.journal.durable()
        return reply


def _checked(raw: bytes) -> tuple[str, dict[str, object]]:
    """What is wrong (empty when nothing is) and the message."""
    try:
        message = json.loads(raw)
    except (ValueError, RecursionError):
        return "the body must be a JSON object", {}
    if not isinstance(message, dict):
        return "the body must be a JSON object", {}
    unknown = sorted(set(message) - set(FIELDS))
    if unknown:
        return f"unknown field {unknown[0]!r}; a message has {', '.join(FIELDS)}", {}
    if any(not isinstance(value, str) for value in message.values()) or not message.get("to"):
        return "a message has texts only, and `to` is not empty", {}
    return "", message


def mail_app(service: MailService) -> Starlette:
    """The HTTP of the mail service."""

    async def messages(request: Request) -> Response:
        check_credential(request, service.entrance.credential)
        return await service.entrance.admit(await read_arrival(request, ACTION), service.process)

    return assembled(
        [Route("/messages", messages, methods=["POST"]), *shared_routes(service.entrance, "mail")], service.entrance
    )
