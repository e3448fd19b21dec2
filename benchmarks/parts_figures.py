"""Numbers of a benchmark: percentiles, how much of everything is measured, what is aimed at, and the printed table.

Knows: names and units of figures. Does not know how any of them is measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Size:
    """How much of everything is measured; one of SIZES."""

    rounds: int
    #: No round of single calls takes longer, however slow the machine is.
    part_s: float
    alone_calls: int
    settled_operations: int
    clients: int
    crowd_s: float
    gateway_calls: int
    gateway_s: float
    redirects: int
    redirects_in_rewrite: int
    load_events: tuple[int, ...]
    loads: int


SIZES: Mapping[str, Size] = {
    "smoke": Size(1, 0.3, 20, 200, 4, 0.1, 5, 0.2, 3, 2, (700, 1_000, 2_000), 1),
    "quick": Size(3, 1.0, 250, 10_000, 50, 0.5, 150, 0.8, 40, 25, (1_000, 10_000, 100_000), 3),
    "full": Size(5, 4.0, 1_000, 10_000, 50, 2.0, 600, 3.0, 150, 60, (1_000, 10_000, 100_000), 5),
}


@dataclass(frozen=True, slots=True)
class Aim:
    """One printed line: a figure by its name in the JSON, words, digits after the point, and what is aimed at."""

    name: str
    words: str
    digits: int = 0
    at_most: float | None = None
    at_least: float | None = None

    def told(self, value: float) -> str:
        """The aim, and whether the value meets it."""
        if self.at_most is None and self.at_least is None:
            return ""
        if self.at_most is not None:
            met, sign, limit = value <= self.at_most, "≤", self.at_most
        else:
            limit = self.at_least or 0.0
            met, sign = value >= limit, "≥"
        return f"{sign} {limit:>7,g}  {'met' if met else 'NOT MET'}"


LINES: tuple[Aim, ...] = (
    Aim("ping_us_p50", "PING, µs p50"),
    Aim("ping_us_p99", "PING, µs p99"),
    Aim("floor_us_p50", "floor: one EVALSHA append of the same bytes, µs p50"),
    Aim("floor_us_p99", "floor, µs p99"),
    Aim("commit_us_p50", "commit of one admission, µs p50"),
    Aim("commit_us_p99", "commit of one admission, µs p99"),
    Aim("commit_over_floor_p50", "commit / floor at p50", 2, at_most=1.4),
    Aim("many_runs_per_s", "many callers, a run each: commits/s", at_least=10_000),
    Aim("many_runs_ms_p50", "  ms p50", 2),
    Aim("many_runs_ms_p99", "  ms p99", 2, at_most=5),
    Aim("many_runs_cpu_us", "  CPU of the callers' process a commit, µs"),
    Aim("hot_run_per_s", "many callers on one run: commits/s", at_least=20_000),
    Aim("hot_run_ms_p50", "  ms p50", 2),
    Aim("hot_run_ms_p99", "  ms p99", 2, at_most=5),
    Aim("hot_run_cpu_us", "  CPU of the callers' process a commit, µs"),
    Aim("direct_ms_p50", "one effect, service called directly: ms p50", 2),
    Aim("gateway_ms_p50", "one effect through the gateway: ms p50", 2),
    Aim("gateway_added_ms_p50", "  added at p50, ms", 2, at_most=3),
    Aim("gateway_added_ms_p99", "  added at p99, ms", 2, at_most=8),
    Aim("direct_32_per_s", "32 callers directly: effects/s"),
    Aim("gateway_32_per_s", "32 callers through the gateway: effects/s"),
    Aim("gateway_over_direct_32", "  gateway / direct", 2, at_least=0.4),
    Aim("redirect_load_per_s", "two processes on one run: commits/s", at_least=1_000),
    Aim("redirect_ms_p50", "  a redirect closes the gate: ms p50", 2),
    Aim("redirect_ms_p99", "  a redirect closes the gate: ms p99", 2, at_most=20),
    Aim("redirect_reopen_ms_p50", "  from closed to open with a new child: ms p50", 2),
    Aim("rewrite_commit_over_floor_p50", "while the AOF is rewritten: commit / floor at p50", 2),
    Aim("rewrite_commit_us_p50", "  commit of one admission, µs p50"),
    Aim("rewrite_commit_us_p99", "  commit of one admission, µs p99"),
    Aim("rewrite_many_runs_per_s", "  many callers, a run each: commits/s"),
    Aim("rewrite_many_runs_ms_p99", "    ms p99", 2),
    Aim("rewrite_hot_run_per_s", "  many callers on one run: commits/s"),
    Aim("rewrite_hot_run_ms_p99", "    ms p99", 2),
    Aim("rewrite_redirect_ms_p50", "  a redirect closes the gate: ms p50", 2),
    Aim("rewrite_redirect_ms_p99", "  a redirect closes the gate: ms p99", 2),
    Aim("rewrites_finished", "  rewrites that ended meanwhile"),
    Aim("cold_load_ms", "cold load of the longest run from its snapshot, ms", 1, at_most=150),
    Aim("cold_load_without_snapshot_ms", "  and without a snapshot, ms", 1),
)


def percentile(values: Sequence[float], part: float) -> float:
    """The value that `part` (0 to 1) of all values do not exceed. ValueError when there is none."""
    if not values:
        raise ValueError("nothing was measured")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def p50(values: Sequence[float]) -> float:
    """The median."""
    return percentile(values, 0.5)


def p99(values: Sequence[float]) -> float:
    """What one in a hundred exceeds; the largest when there are fewer than a hundred."""
    return percentile(values, 0.99)


def rounded(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Figures with no more digits than they deserve."""
    return {
        name: rounded(value) if isinstance(value, Mapping) else round(value, 3) if isinstance(value, float) else value
        for name, value in figures.items()
    }


def table(mode: str, figures: Mapping[str, Any]) -> str:
    """All figures of one mode as text, each aim beside its figure. Aims are meant with fsync."""
    lines = [f"appendfsync {mode}" + ("" if mode == "always" else "   (aims are meant with always)")]
    for aim in LINES:
        value = figures[aim.name]
        lines.append(f"  {aim.words:<56} {value:>12,.{aim.digits}f}   {aim.told(value)}".rstrip())
    grown = ", ".join(f"{int(n):,} events {ms:,.1f} ms" for n, ms in figures["cold_load_ms_by_events"].items())
    lines.append(f"  how cold load grows: {grown}")
    return "\n".join(lines)
