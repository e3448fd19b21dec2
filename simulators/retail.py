"""The shop as a service: its rules behind keys, and its tables for those who want to look."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from simulators.entrance import Entrance, Reply
from simulators.keyed import KeyedService, assembled, keyed_routes, shared_routes
from simulators.shop import ACTIONS, Database, DataError, Shop, canonical


class RetailService(KeyedService):
    """One shop with its key table."""

    def __init__(self, database: Database, entrance: Entrance, *, can_void: bool = True, work_ms: int = 0) -> None:
        """Raises JournalError: the journal's executions do not happen again on this database."""
        self.database = database
        self.shop = Shop(database)
        super().__init__(self.shop, entrance, can_void=can_void, work_ms=work_ms)


def retail_app(service: RetailService) -> Starlette:
    """The HTTP of the shop."""
    entrance = service.entrance

    def record(table: str) -> Callable[[Request], Awaitable[Response]]:
        async def read(request: Request) -> Response:
            found = service.shop.read(table, request.path_params["id"])
            if found is None:
                body = {"code": "not_found", "message": f"{table} has no {request.path_params['id']}"}
                return Reply(404, body).response()
            return JSONResponse(found)

        return read

    async def database(request: Request) -> Response:
        return Response(canonical(service.shop.tables()), media_type="application/json")

    async def database_hash(request: Request) -> Response:
        user_id = request.query_params.get("user_id")
        if user_id is None:
            return JSONResponse({"sha256": service.shop.database_hash()})
        try:
            return JSONResponse({"sha256": service.shop.customer_hash(user_id), "user_id": user_id})
        except DataError as unknown:
            return Reply(404, {"code": "not_found", "message": str(unknown)}).response()

    routes = [
        *keyed_routes(service, ACTIONS),
        Route("/orders/{id}", record("orders")),
        Route("/users/{id}", record("users")),
        Route("/products/{id}", record("products")),
        Route("/database", database),
        Route("/database/hash", database_hash),
        *shared_routes(entrance, "retail"),
    ]
    return assembled(routes, entrance)
