"""What a running Redis or Valkey says of itself as far as it matters here: durability, eviction, replicas, memory.

Knows which settings a person needs to see. Does not judge them (check_persistence does) and changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import anyio

from admission.store import make_client

READ_TIMEOUT_S = 3.0
SETTINGS = ("appendonly", "appendfsync", "no-appendfsync-on-rewrite", "maxmemory-policy")
CANNOT_BE_READ = "cannot be read (CONFIG is forbidden here)"


async def read_store_settings(url: str) -> dict[str, Any]:
    """The settings under the server's own names; memory in bytes. Never raises: `problem` says why there is nothing."""
    client = make_client(url)
    try:
        with anyio.fail_after(READ_TIMEOUT_S):
            info = await client.info()
            found = {name: await _setting(client, name) for name in SETTINGS}
            limit = await _setting(client, "maxmemory")
    except Exception as error:  # noqa: BLE001 - the library's errors are not imported here, and all mean the same
        return {"problem": f"the server could not be asked ({type(error).__name__})"}
    finally:
        with anyio.CancelScope(shield=True):
            await client.aclose()
    return {"version": _version(info), "role": str(info.get("role", "")), **found, **_numbers(info, limit)}


def _version(info: Mapping[str, Any]) -> str:
    valkey = info.get("valkey_version")
    return f"Valkey {valkey}" if valkey else f"Redis {info.get('redis_version', 'of an unknown version')}"


def _numbers(info: Mapping[str, Any], limit: str) -> dict[str, Any]:
    maxmemory = int(limit) if limit.isdigit() else int(info.get("maxmemory", 0))
    return {
        "replicas": int(info.get("connected_slaves", 0)),
        "used_memory_bytes": int(info.get("used_memory", 0)),
        "maxmemory_bytes": maxmemory or "no limit",
        "aof_last_write": str(info.get("aof_last_write_status", "")) or None,
        "loading": bool(info.get("loading", 0)),
    }


async def _setting(client: Any, name: str) -> str:
    try:
        reply = await client.config_get(name)
    except Exception as error:
        if "conn" in type(error).__name__.lower():
            raise
        return CANNOT_BE_READ
    value = {_text(key): _text(value) for key, value in dict(reply).items()}.get(name)
    return value if value is not None else "not shown by this server"


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
