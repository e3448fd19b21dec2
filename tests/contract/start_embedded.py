"""A process of its own that calls ensure_server, prints one JSON line about the outcome, and may stay alive after it.

Usage: python start_embedded.py DATA_DIR BINARY [--stay]. Not a test: test_embedded.py runs it.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
from pathlib import Path

import anyio

from admission.embedded import StoreRefused, StoreUnavailable, ensure_server


async def main(data_dir: str, binary: str) -> None:
    try:
        server = await ensure_server(Path(data_dir), binary=binary, start_timeout_s=30)
    except (StoreRefused, StoreUnavailable) as failure:
        outcome: dict[str, object] = {"error": type(failure).__name__, "sentence": str(failure)}
    else:
        outcome = dataclasses.asdict(server)
    print(json.dumps(outcome, default=str), flush=True)


if __name__ == "__main__":
    anyio.run(main, sys.argv[1], sys.argv[2])
    if "--stay" in sys.argv:
        signal.pause()
