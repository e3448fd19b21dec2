"""How to follow the changes of some partitions without missing one, over doorbells that may be dropped.

Knows: bells carry the partition's commit number, one after the other without a hole, so a hole shows that bells were
lost (the feed is capped, a connection broke); what was missed is then looked up in the index of runs.
Does not know: where bells and index come from; both stores use it.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence

import anyio

DELAY_S_MIN, DELAY_S_MAX = 0.01, 0.5

#: Commit number, run, version of the run.
Bell = tuple[int, str, int]
#: Given the last commit number seen of each partition: newer bells, or nothing after a while.
Ring = Callable[[Mapping[int, int]], Awaitable[Mapping[int, Sequence[Bell]]]]
#: Given a partition and the last number seen: (run, version) of all that changed since, and the number that covers.
Missed = Callable[[int, int], Awaitable[tuple[Sequence[tuple[str, int]], int]]]


async def follow(
    marks: Mapping[int, int], *, ring: Ring, missed: Missed, lost: tuple[type[Exception], ...]
) -> AsyncGenerator[tuple[str, int], None]:
    """Run and version for each change after the marks; changes of one run may be told as one. Never ends by itself.

    Exceptions in `lost` mean "try again"; it then looks whether anything was missed meanwhile.
    """
    seen = dict(marks)
    doubtful = set(seen)  # at first, too: the marks may be older than the feed reaches
    delay_s = DELAY_S_MIN
    while True:
        told: dict[str, int] = {}
        try:
            for partition in sorted(doubtful):
                changed, seen[partition] = await missed(partition, seen[partition])
                told.update(changed)
                doubtful.discard(partition)
            if not told:
                for partition, bells in (await ring(seen)).items():
                    if bells[0][0] != seen[partition] + 1:
                        doubtful.add(partition)
                        continue
                    seen[partition] = bells[-1][0]
                    told.update((run, version) for _, run, version in bells)
                # A silence is looked into: a store that was put back to an older state would ring no bell for long.
                doubtful.update(() if told else seen)
            delay_s = DELAY_S_MIN
        except lost:
            doubtful.update(seen)
            await anyio.sleep(delay_s)
            delay_s = min(2 * delay_s, DELAY_S_MAX)
        for change in told.items():
            yield change
