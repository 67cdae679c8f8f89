"""What is read from `kv_transfer_params`, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from kv_transfer.ticket import HandOff, Ticket, Unusable, parse_params

PARAMS: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "e",
    "remote_host": "10.0.0.1",
    "remote_port": 4000,
    "remote_lease_id": 3,
    "remote_block_ids": [1, 2, 3, 0, 5, 6],
    "num_groups": 2,
    "num_tokens": 9,
    "block_size": 4,
    "fingerprint": "f",
    "is_partial": False,
    "is_pushed": False,
}


def test_a_ticket_is_what_it_was_made_of() -> None:
    ticket = parse_params(json.loads(json.dumps(PARAMS)))
    assert isinstance(ticket, Ticket)
    assert ticket.params() == PARAMS
    assert ticket.table().tolist() == [[1, 2, 3], [0, 5, 6]]
    assert ticket.table().dtype == np.int32


def test_a_ticket_for_blocks_that_are_pushed_names_none() -> None:
    pushed = PARAMS | {"is_pushed": True, "remote_block_ids": []}
    ticket = parse_params(pushed)
    assert isinstance(ticket, Ticket)
    assert ticket.params() == pushed


def test_a_hand_off_is_asked_for() -> None:
    assert parse_params({"do_remote_decode": True}) == HandOff(True)
    assert parse_params({"do_remote_decode": True, "do_remote_prefill": False}) == HandOff(True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_tokens": None}, "num_tokens"),
        ({"num_tokens": True}, "num_tokens"),
        ({"num_tokens": "9"}, "num_tokens"),
        ({"num_tokens": 9.0}, "num_tokens"),
        ({"num_tokens": 0}, "num_tokens"),
        ({"num_tokens": 13}, "remote_block_ids has 6 ids"),
        ({"num_groups": 3}, "remote_block_ids has 6 ids"),
        ({"num_groups": 0}, "num_groups"),
        ({"block_size": 2**40}, "block_size"),
        ({"remote_block_ids": [1, 2, 3, 0, 5, -6]}, "remote_block_ids"),
        ({"remote_block_ids": [1, 2, 3, 0, 5, 2**31]}, "remote_block_ids"),
        ({"remote_block_ids": [1, 2, 3, 0, 5, "6"]}, "remote_block_ids"),
        ({"remote_block_ids": []}, "remote_block_ids"),
        ({"is_pushed": True}, "remote_block_ids has 6 ids; 9 tokens in blocks of 4 take 0 in 2 group"),
        ({"remote_port": 0}, "remote_port"),
        ({"remote_port": 65536}, "remote_port"),
        ({"remote_lease_id": 0}, "remote_lease_id"),
        ({"remote_lease_id": 2**70}, "remote_lease_id"),
        ({"remote_engine_id": ""}, "remote_engine_id"),
        ({"remote_host": "h" * 300}, "remote_host"),
        ({"do_remote_decode": True}, "both true"),
        ({"do_remote_prefill": 1}, "Expected `bool`"),
        ({"do_remote_prefill": False}, "unknown field"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_other_tickets_are_unusable(changes: dict[str, Any], message: str) -> None:
    parsed = parse_params(PARAMS | changes)
    assert isinstance(parsed, Unusable)
    assert message in parsed.message


@pytest.mark.parametrize("name", sorted(set(PARAMS) - {"do_remote_decode", "is_partial", "is_pushed"}))
def test_a_ticket_that_lacks_something_is_unusable(name: str) -> None:
    parsed = parse_params({key: value for key, value in PARAMS.items() if key != name})
    assert isinstance(parsed, Unusable)


@pytest.mark.parametrize(
    "params", [{"do_remote_decode": False}, {"do_remote_decode": 1}, {"x": 1}, {"do_remote_decode": True, "x": 1}]
)
def test_other_params_are_unusable(params: dict[str, Any]) -> None:
    assert isinstance(parse_params(params), Unusable)


_VALUES = st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5), st.lists(st.integers(), max_size=7))


@given(st.dictionaries(st.one_of(st.sampled_from(sorted(PARAMS)), st.text(max_size=5)), _VALUES), st.booleans())
def test_nothing_raises(changes: dict[str, Any], is_changed: bool) -> None:
    parsed = parse_params(PARAMS | changes if is_changed else changes)
    if isinstance(parsed, Ticket):
        assert parsed.table().shape == (parsed.num_groups, parsed.num_columns)
