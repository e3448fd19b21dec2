"""The HTTP API of the orchestrator: people's commands go in, views of runs come out.

Knows the routes, how a request becomes a command, and how an answer of the rules becomes a status. Does not decide
anything: it submits to the desk, which answers only what the store has confirmed. Everything that goes wrong is a
problem document (problems.py); every change has a request id, so that it is safe to send twice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from http import HTTPStatus
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from admission import commands as cmd
from admission.foreign_json import ForeignJsonError, read_object
from admission.storage import Store, StoreBehind, StoreUnavailable
from admission.table import Answer, Decision
from admission.vocabulary import RunPhase, UpdateKind, run_id_for
from orchestrator import api_bodies as bodies
from orchestrator.api_parts import ApiDesk, ApiParts, resolve_attempt
from orchestrator.api_reads import add_reads
from orchestrator.directory import RunDirectory
from orchestrator.goals import problems
from orchestrator.problems import PROBLEM_TYPE, Entrance, Problem, malformed
from orchestrator.views import change_row, effect_row, run_view
from orchestrator.views_lines import Brief, brief_of, summary_line

PRINCIPAL = "local"
BY_DEFAULT = "operator"
log = logging.getLogger("regate.api")

B = TypeVar("B", bound=BaseModel)


def api_app(desk: ApiDesk, store: Store, token: str, *, new_id: Callable[[], str], **parts: Any) -> FastAPI:
    """The application. `parts` as in ApiParts. `desk` and `store` must be open for as long as it is served."""
    return make_app(ApiParts(desk=desk, store=store, new_id=new_id, **parts), token)


def make_app(parts: ApiParts, token: str) -> FastAPI:
    """The same, from its parts."""
    app = FastAPI(title="regate", docs_url=None, redoc_url=None)
    runs = RunDirectory(parts.store)
    changes = Changes(parts, runs)
    app.post("/v1/runs", status_code=201)(changes.start)
    app.post("/v1/runs/{run}/revisions")(changes.revise)
    app.post("/v1/runs/{run}/{verb}")(changes.steer)
    app.post("/v1/effects/{attempt}/resolve")(changes.resolve)
    add_reads(app, parts, runs)
    _add_problems(app, parts)
    app.add_middleware(Entrance, token=token)
    return app


def _add_problems(app: FastAPI, parts: ApiParts) -> None:
    def answer(problem: Problem) -> JSONResponse:
        return JSONResponse(problem.body(), problem.status, problem.headers(), media_type=PROBLEM_TYPE)

    @app.exception_handler(Problem)
    async def problem(request: Request, error: Problem) -> JSONResponse:
        return answer(error)

    @app.exception_handler(RequestValidationError)
    async def query(request: Request, error: RequestValidationError) -> JSONResponse:
        words = [f"{'.'.join(str(s) for s in e['loc'])}: {e['msg']}" for e in error.errors()]
        return answer(malformed(words))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        if error.status_code == 404:
            return answer(Problem(404, "no-such-route", f"there is no {request.method} {request.url.path}"))
        return answer(Problem(error.status_code, "http", str(error.detail) or HTTPStatus(error.status_code).phrase))

    @app.exception_handler(StoreUnavailable)
    async def unavailable(request: Request, error: StoreUnavailable) -> JSONResponse:
        words = f"the store is not available ({error})"
        if request.method == "GET":
            return answer(Problem(503, "store-unavailable", f"{words}; look again when it is back"))
        words += "; whether a change was made is not known: send it again with the same request_id, that is safe"
        return answer(Problem(503, "store-unavailable", words))

    @app.exception_handler(StoreBehind)
    async def behind(request: Request, error: StoreBehind) -> JSONResponse:
        parts.alarm(error)
        return answer(Problem(503, "store-behind", f"the store lost acknowledged data, this process stops: {error}"))

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> JSONResponse:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return answer(Problem(500, "internal", "this is a fault of regate; the server's log has more"))


async def read_body(request: Request, kind: type[B]) -> B:
    """The request's JSON body, checked. Raises Problem."""
    raw = await request.body()
    try:
        fields = read_object(raw or b"{}")
    except ForeignJsonError as error:
        raise Problem(422, "malformed", f"the body must be a JSON object: {error}") from None
    fields.setdefault("request_id", request.headers.get("idempotency-key"))
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise malformed(problems(error)) from None


class Changes:
    """The routes that change a run."""

    def __init__(self, parts: ApiParts, runs: RunDirectory) -> None:
        self._parts = parts
        self._runs = runs

    async def start(self, request: Request) -> dict[str, Any]:
        """POST /v1/runs: create a run. Sent twice with one request id, it is one run."""
        body = await read_body(request, bodies.StartBody)
        self._check_agents(body.goal.plan.values())
        request_id = body.request_id or self._parts.new_id()
        run = run_id_for(PRINCIPAL, request_id)
        command = cmd.Start(
            by=body.by or BY_DEFAULT, run=run, principal=PRINCIPAL, request_id=request_id, goal=body.goal.goal(),
        )  # fmt: skip
        return await self._change(run, command)

    async def revise(self, request: Request, run: str) -> dict[str, Any]:
        """POST /v1/runs/RUN/revisions: replace the goal, or correct parts of it."""
        body = await read_body(request, bodies.ReviseBody)
        if body.kind is UpdateKind.REPLACE:
            try:
                body.goal.whole()
            except ValidationError as error:
                raise malformed([f"goal.{words}" for words in problems(error)]) from None
            if body.remove:
                raise malformed(["remove: only a correction removes; a replacement names the whole goal"])
        self._check_agents(body.goal.plan.values())
        command = cmd.Revise(
            by=body.by or BY_DEFAULT, kind=body.kind, request_id=body.request_id or self._parts.new_id(),
            goal=body.goal.goal(), remove=body.remove, expected_revision=body.expected_revision, reason=body.reason,
        )  # fmt: skip
        return await self._change(await self._runs.resolve(run), command)

    async def steer(self, request: Request, run: str, verb: str) -> dict[str, Any]:
        """POST /v1/runs/RUN/pause, /resume, /cancel."""
        kinds: dict[str, type[cmd.Pause] | type[cmd.Resume] | type[cmd.Cancel]] = {
            "pause": cmd.Pause, "resume": cmd.Resume, "cancel": cmd.Cancel,
        }  # fmt: skip
        if verb not in kinds:
            raise Problem(404, "no-such-route", f"a run has no {verb!r}; it has revisions, {', '.join(kinds)}")
        body = await read_body(request, bodies.SteerBody)
        command = kinds[verb](
            by=body.by or BY_DEFAULT, request_id=body.request_id or self._parts.new_id(),
            expected_revision=body.expected_revision, reason=body.reason,
        )  # fmt: skip
        return await self._change(await self._runs.resolve(run), command)

    async def resolve(self, request: Request, attempt: str) -> dict[str, Any]:
        """POST /v1/effects/ATTEMPT/resolve: a person says what became of an unknown attempt."""
        body = await read_body(request, bodies.ResolveBody)
        run, found = await resolve_attempt(self._parts, self._runs, attempt)
        command = cmd.Resolve(
            by=body.by or BY_DEFAULT, attempt=found, happened=body.happened, reason=body.reason,
            request_id=body.request_id or self._parts.new_id(), evidence=body.evidence,
        )  # fmt: skip
        answer = await self._change(run, command)
        answer["effect"] = await self._parts.desk.look(run, lambda state: effect_row(state, state.attempts[found]))
        return answer

    def _check_agents(self, plans: Collection[Any]) -> None:
        known = self._parts.agents
        if known is None:
            return
        unknown = sorted({plan.agent for plan in plans} - set(known))
        if unknown:
            names = ", ".join(sorted(known)) or "none; name one in [agents.NAME] of regate.toml"
            raise Problem(
                422, "unknown-agent", f"no agent is called {', '.join(map(repr, unknown))}; known: {names}",
                known=sorted(known),
            )  # fmt: skip

    async def _change(self, run: str, command: cmd.Command) -> dict[str, Any]:
        before = await self._parts.desk.look(run, brief_of)
        decision = (await self._parts.desk.submit(run, command)).decision
        if not decision.accepted:
            raise refused(run, decision, before)
        after, view = await self._parts.desk.look(run, lambda state: (brief_of(state), run_view(state)))
        return {
            "verdict": decision.verdict.value,
            "in_force": decision.detail.get("in_force", after.in_force),
            "changed": change_row(view) if isinstance(command, cmd.Revise) else {},
            "run": view,
            "line": summary_line(before, after),
        }


def refused(run: str, decision: Decision, before: Brief) -> Problem:
    """The problem that a refusal of the rules is."""
    in_force = decision.detail.get("in_force", before.in_force)
    more: dict[str, Any] = {"run": run, "in_force": in_force, "verdict": decision.verdict.value}
    now = f"it is {before.phase.value} under revision {before.in_force}"
    match decision.verdict:
        case Answer.INVALID:
            faults = [str(fault) for fault in decision.detail.get("faults", ())]
            return Problem(422, "invalid", "; ".join(faults), **more, faults=faults)
        case Answer.REUSED_ID:
            words = "this request id was used for something else before; use a new one for a new request"
            return Problem(422, "request-id-reused", words, **more)
        case Answer.CONFLICT:
            words = f"another revision is in force: revision {in_force}; look at it, then send again with that number"
            return Problem(409, "conflict", words, **more)
        case Answer.RUN_ENDED:
            phase = RunPhase(decision.detail.get("phase", before.phase.value))
            words = f"the run is {phase.value} and takes no more changes; start a new one"
            return Problem(409, "run-ended", words, **more, state=phase.value)
        case Answer.NO_SUCH_RUN:
            return Problem(404, "unknown-run", f"no run {run!r}", **more)
        case Answer.NOT_FOUND:
            return Problem(404, "unknown-effect", f"run {run!r} has no such effect", **more)
        case Answer.WRONG_STATE if "outcome" in decision.detail:
            outcome = decision.detail["outcome"]
            words = f"the effect is {outcome}: only an unknown one can be settled by hand"
            return Problem(409, "wrong-state", words, **more, outcome=outcome)
        case Answer.WRONG_STATE:
            return Problem(409, "wrong-state", f"the run is not paused: {now}", **more)
        case _:
            return Problem(409, str(decision.verdict.value), f"refused: {decision.verdict.value}; {now}", **more)
