"""What the courier takes from agents: an agent may quote all that it was sent, and no grant comes back with it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anyio.abc import SocketStream
from google.protobuf.json_format import MessageToDict

from admission.vocabulary import TaskState
from admission.wire import EXTENSION, Grant, Stamp, sign_grant
from orchestrator.courier import Courier, Launch, Refused, Seen, Unreachable
from simulators.children.serving import child_card
from tests.contract.raw_service import Arrival, RawService, raw_service, reply

pytestmark = pytest.mark.anyio

STAMP = Stamp("run-1", "orders", "run-1-orders-r1-1", 1, "goalhash")
GRANT = sign_grant(Grant("run-1", "orders", STAMP.child, 1, expires_ms=2**42), b"k" * 32)
#: Looks like a grant to a log, and is a result that somebody may want: two long names with a dot between.
NAMES = f"{'n' * 40}.{'m' * 43}"


class Agent:
    """An agent of sockets: `answer` is the JSON-RPC result or error that every call gets."""

    def __init__(self, **answer: Any) -> None:
        self.answer = answer
        self.asked: list[dict[str, Any]] = []
        self.service = RawService()

    async def behave(self, stream: SocketStream, arrival: Arrival) -> bool:
        if arrival.line.startswith("GET"):
            card = MessageToDict(child_card("late", self.service.url, speaks_extension=True))
            await stream.send(reply(200, card))
        else:
            asked = json.loads(arrival.body)
            self.asked.append(asked)
            await stream.send(reply(200, {"jsonrpc": "2.0", "id": asked["id"], **self.answer}))
        return True

    async def launched(self, grant: str = GRANT) -> object:
        async with raw_service(self.behave) as self.service, Courier() as courier:
            launch = Launch(
                agent=self.service.url, child=STAMP.child, context="x-1", stamp=STAMP, grant=grant,
                gateway="http://127.0.0.1:9" if grant else "", brief={"run": "run-1"},
            )  # fmt: skip
            assert GRANT not in repr(launch)
            return await courier.launch(launch)

    async def looked_at(self) -> object:
        async with raw_service(self.behave) as self.service, Courier() as courier:
            return await courier.look(self.service.url, "t-1")


def task(**fields: Any) -> dict[str, Any]:
    return {"id": "t-1", "contextId": "x-1", "status": {"state": "TASK_STATE_COMPLETED"}, **fields}


def pieces() -> list[str]:
    return [GRANT, *GRANT.split(".")]


@pytest.mark.parametrize("code", [-32602, -32603, -32000])
@pytest.mark.parametrize("quoted", pieces(), ids=["whole", "body", "mac"])
@pytest.mark.parametrize("before", ["invalid metadata: ", "no, " * 30])
async def test_an_error_that_quotes_the_grant_is_kept_without_it(code: int, quoted: str, before: str) -> None:
    agent = Agent(error={"code": code, "message": f"{before}{quoted}"})
    sent = await agent.launched()
    assert isinstance(sent, (Refused, Unreachable))
    assert before[:20] in sent.detail
    assert "[grant]" in sent.detail
    assert quoted[:20] not in sent.detail
    assert agent.asked[0]["params"]["metadata"][EXTENSION]["grant"] == GRANT


async def test_an_error_of_a_later_call_is_kept_without_the_grant() -> None:
    seen = await Agent(error={"code": -32000, "message": f"no such thing: {GRANT}"}).looked_at()
    assert isinstance(seen, Unreachable)
    assert "no such thing: [grant]" in seen.detail


async def test_a_result_that_holds_the_grant_is_kept_without_it() -> None:
    told = {"grant": GRANT, "said": [f"I am {GRANT}", NAMES], GRANT: 1}
    stamp = {EXTENSION: {"run": GRANT, "scope": "a", "child": "c", "revision": "1", "goal_hash": "h"}}
    parts = [{"data": told}, {"text": f"with {GRANT}"}, {"url": f"http://x/{GRANT}"}]
    agent = Agent(result=task(artifacts=[{"artifactId": "a", "name": GRANT, "parts": parts, "metadata": stamp}]))
    seen = await agent.looked_at()
    assert isinstance(seen, Seen)
    assert seen.state is TaskState.COMPLETED
    [artifact] = seen.artifacts
    assert artifact.parts == [
        {"grant": "[grant]", "said": ["I am [grant]", NAMES], "[grant]": 1},
        "with [grant]",
        {"url": "http://x/[grant]"},
    ]
    assert artifact.name == "[grant]"
    assert artifact.stamp is not None
    assert artifact.stamp.run == "[grant]"


async def test_a_task_that_is_named_by_the_grant_is_not_taken() -> None:
    sent = await Agent(result={"task": task(id=GRANT)}).launched()
    assert isinstance(sent, Unreachable)
    assert "holds the grant" in sent.detail
    assert not any(piece in repr(sent) for piece in pieces())


async def test_without_a_grant_the_metadata_is_the_stamp_alone() -> None:
    agent = Agent(result={"task": task()})
    assert await agent.launched(grant="") == Seen("t-1", TaskState.COMPLETED)
    fields = agent.asked[0]["params"]["metadata"][EXTENSION]
    assert set(fields) == {"run", "scope", "child", "revision", "goal_hash"}
