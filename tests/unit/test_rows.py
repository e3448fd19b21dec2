"""Attempts that stay packed: they read as what they are, and reading all of them keeps none unpacked."""

from __future__ import annotations

from admission.records import Attempt
from admission.rows import READ_ROWS_MAX, Rows, decode_rows, encode_rows
from admission.vocabulary import AttemptState

COUNT = READ_ROWS_MAX + 50


def attempt(no: int) -> Attempt:
    return Attempt(
        id=f"a{no}", no=no, scope="s", revision=1, child="c", slot=f"slot-{no}", generation=1, key="k", service="shop",
        operation="buy", target=f"t{no}", contract="f", input_ref="0", cost=1, state=AttemptState.SUCCEEDED,
        position=no, at=no, observed={"n": no}, settled=no,
    )  # fmt: skip


ALL = {f"a{no}": attempt(no) for no in range(COUNT)}


def packed_rows() -> Rows:
    rows = Rows()
    rows.hold(decode_rows(encode_rows(list(ALL.values()))))
    return rows


def test_whoever_walks_all_rows_leaves_them_packed() -> None:
    rows = packed_rows()
    before = list(rows.stored())
    for _ in range(2):
        assert list(rows.values()) == list(ALL.values())
        assert dict(rows.items()) == ALL
    assert rows._read == {}
    assert all(now is then for (_, now), (_, then) in zip(rows.stored(), before, strict=True))


def test_rows_read_by_their_id_are_kept_up_to_a_limit() -> None:
    rows = packed_rows()
    assert rows["a7"] is rows["a7"] is rows.get("a7"), "it is unpacked once"
    for key, row in ALL.items():
        assert rows[key] == row
        assert rows.get(key) == row
        assert len(rows._read) <= READ_ROWS_MAX
    assert rows["a0"] == ALL["a0"], "what had to go is unpacked again"
    assert rows.get("none") is None


def test_a_row_that_was_replaced_is_not_the_one_that_was_kept() -> None:
    rows = packed_rows()
    assert rows["a1"] == ALL["a1"]
    rows["a1"] = attempt(2)
    assert rows["a1"] == attempt(2) == rows.get("a1") == list(rows.values())[1]
