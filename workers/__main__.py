"""`python -m workers plan`: an agent as a process, with nothing but the core dependencies."""

from __future__ import annotations

import argparse
import os
import sys

# Read by the A2A SDK when it is imported: tracing costs a fifth of its speed and goes nowhere here.
os.environ.setdefault("OTEL_INSTRUMENTATION_A2A_SDK_ENABLED", "false")

from workers.plan_agent import plan_agent
from workers.serving import Address, serve


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port <= 65_535:
        raise argparse.ArgumentTypeError("a port is 0 to 65535")
    return port


def _milliseconds(text: str) -> int:
    value = int(text)
    if not 0 <= value <= 600_000:
        raise argparse.ArgumentTypeError("0 to 600000 milliseconds")
    return value


def main(arguments: list[str] | None = None) -> int:
    """Parse and run; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m workers", description=__doc__)
    kinds = parser.add_subparsers(dest="kind", required=True)
    plan = kinds.add_parser("plan", help="carries out the actions of its brief in their order")
    plan.add_argument("--host", default="127.0.0.1", help="address to listen on")
    plan.add_argument("--port", type=_port, default=0, help="0 takes a free one")
    plan.add_argument("--name", default="plan", help="the agent's name in its card")
    plan.add_argument("--think-ms", type=_milliseconds, default=0, help="pause between two actions")
    given = parser.parse_args(arguments)
    try:
        serve(plan_agent(given.think_ms), kind=given.kind, name=given.name, address=Address(given.host, given.port))
    except OSError as failure:
        print(f"cannot listen on {given.host}:{given.port}: {failure}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
