"""The indexes of a run after commits whose copy was behind, one after another; both stores."""

from __future__ import annotations

import pytest

from admission.storage import Compare, Index, Store
from admission.vocabulary import partition_of, run_id_for
from tests.contract.store_room import committed, plain

pytestmark = pytest.mark.anyio

RUN = run_id_for("tests", "indexes")


async def test_each_copy_that_is_not_exact_asks_anew_after_an_empty_commit_answered_the_last(
    store: Store,
) -> None:
    partition = partition_of(RUN, store.partitions)
    await store.commit(plain(RUN, b"{}", index=Index(True, None, None)))
    for version in (2, 3, 4):
        await store.commit(plain(RUN, b"{}", known=0, compare=Compare.NONE, index=Index(True, None, None)))
        assert await store.next_due_ms(partition) == 0, "whoever sweeps the timers has to hear of it, each time"
        committed(await store.commit(plain(RUN, known=version, index=Index(True, 500, None))))
        assert (await store.attention(), await store.next_due_ms(partition)) == ([(RUN, 500)], None)
