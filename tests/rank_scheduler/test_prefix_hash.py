import hashlib

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rank_scheduler import prefix_chain
from rank_scheduler.prefix_chain import HASH_BYTES, chain, pack, unpack
from rank_scheduler.prefix_hash import ROOT_HASH, ExtraKeys, extend_block_hashes, hash_blocks

# One twin hashes all examples of a test.
CERTAIN = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])

pytestmark = pytest.mark.usefixtures("on_both_twins")


def hashes_of(tokens, block_size=4, extra=None):
    hashes: list[bytes] = []
    extend_block_hashes(hashes, np.array(tokens, np.int32), block_size, extra)
    return hashes


def differing(one, other):
    return [index for index, (left, right) in enumerate(zip(one, other, strict=True)) if left != right]


@st.composite
def extra_keys(draw, num_positions=48):
    salt = draw(st.sampled_from(["", "a", "tenant"]))
    cuts = draw(st.lists(st.integers(0, num_positions), unique=True, max_size=8).map(sorted))
    pairs = zip(cuts[::2], cuts[1::2], strict=False)
    identifiers = st.sampled_from([b"", b"cat", b"dog", b"\x00" * 9])
    return ExtraKeys(salt, tuple((draw(identifiers), start, end - start) for start, end in pairs))


def test_only_full_blocks_have_a_hash():
    assert [len(hashes_of(range(n))) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_a_hash_names_the_whole_prefix_not_the_block_alone():
    assert hashes_of([1, 2, 3, 4, 9, 9, 9, 9])[1] != hashes_of([5, 6, 7, 8, 9, 9, 9, 9])[1]
    assert hashes_of([1, 2, 3, 4, 9, 9, 9, 9])[0] == hashes_of([1, 2, 3, 4, 8, 8, 8, 8])[0]


def test_trailing_zero_tokens_count():
    assert hashes_of([1, 0, 0, 0])[0] == hashlib.sha256(ROOT_HASH + b"\x01" + bytes(15)).digest()


@CERTAIN
@given(extra=extra_keys(), ends=st.lists(st.integers(0, 48)).map(sorted), block_size=st.integers(1, 16))
def test_extending_gives_the_same_as_hashing_at_once(extra, ends, block_size):
    tokens = np.arange(48, dtype=np.int32)
    grown: list[bytes] = []
    for end in [*ends, 48]:
        extend_block_hashes(grown, tokens[:end], block_size, extra)
    assert grown == hashes_of(range(48), block_size, extra)


@CERTAIN
@given(extra=st.none() | extra_keys(), length=st.integers(0, 48), block_size=st.integers(1, 16))
def test_the_chain_over_bytes_is_that_over_arrays(extra, length, block_size):
    tokens = np.arange(length, dtype="<i4") - 7
    expected = hashes_of(tokens, block_size, extra)
    assert chain(tokens.tobytes(), block_size, extra) == expected
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_chain, "_hash_run", prefix_chain.hash_run_in_python)
        assert chain(tokens.tobytes(), block_size, extra) == expected


def test_hashes_go_by_their_first_bytes():
    hashes = hashes_of(range(40))
    assert unpack(pack(hashes)) == tuple(int.from_bytes(one[:HASH_BYTES], "little") for one in hashes)
    assert unpack(b"") == ()
    with pytest.raises(ValueError, match="15 bytes"):
        unpack(bytes(15))


def test_hashes_are_the_same_in_every_process():
    assert hashes_of([0, 1, 2, 3])[0].hex() == "caf99748968e1785d7ffb0f2abb5be3370fa26a6ef86054933c4214018d8ddde"
    keyed = hashes_of([0, 1, 2, 3], extra=ExtraKeys("salt", ((b"cat", 1, 2),)))
    assert keyed[0].hex() == "1470570b28fd7398b779814bd85cafde223e0530724caef3d19fb0dc3ea276df"


def test_a_non_contiguous_array_hashes_as_its_copy():
    tokens = np.arange(96, dtype=np.int32)[::2]
    assert hashes_of(tokens) == hashes_of(tokens.copy())


def test_rows_of_many_sequences_hash_as_each_alone():
    tokens = np.arange(40, dtype=np.int32)
    alone = hashes_of(tokens)
    assert hash_blocks([ROOT_HASH, *alone[:-1]], tokens.reshape(-1, 4)) == alone
    assert hash_blocks([], np.zeros((0, 4), np.int32)) == []
    with pytest.raises(ValueError, match="1 parents for 10 rows"):
        hash_blocks([ROOT_HASH], tokens.reshape(-1, 4))


def test_a_salt_stands_in_the_first_block_and_reaches_all():
    salted, other, plain = (hashes_of(range(12), extra=ExtraKeys(salt)) for salt in ("a", "b", ""))
    assert differing(salted, plain) == differing(salted, other) == [0, 1, 2]
    assert plain == hashes_of(range(12))
    assert ExtraKeys("a").for_block(4, 8) == b""


def test_an_item_marks_the_blocks_from_its_first_on():
    plain = hashes_of(range(20))
    assert differing(hashes_of(range(20), extra=ExtraKeys(items=((b"cat", 7, 2),))), plain) == [1, 2, 3, 4]


def test_equal_tokens_under_different_items_or_places_differ():
    variants = [((b"cat", 4, 8),), ((b"dog", 4, 8),), ((b"cat", 5, 8),), ((b"cat", 4, 4), (b"cat", 8, 4))]
    assert len({hashes_of(range(12), extra=ExtraKeys(items=items))[2] for items in variants}) == len(variants)


def test_a_block_within_an_item_has_its_negative_offset():
    assert ExtraKeys(items=((b"cat", 2, 9),)).for_block(4, 8) == (
        bytes(4) + b"\x03\x00\x00\x00cat" + (-2).to_bytes(8, "little", signed=True)
    )


@CERTAIN
@given(extra=extra_keys(), block_size=st.integers(1, 16))
def test_a_block_has_keys_exactly_if_salt_or_item_touches_it(extra, block_size):
    for start in range(0, 48, block_size):
        end = start + block_size
        touched = [item for item in extra.items if item[1] < end and item[1] + item[2] > start]
        keys = extra.for_block(start, end)
        assert bool(keys) == bool(touched or (start == 0 and extra.salt))
        assert not keys or start < extra.end
        assert all(keys.count(identifier) >= 1 for identifier, _, _ in touched)


@CERTAIN
@given(one=extra_keys(), other=extra_keys())
def test_keys_are_unambiguous(one, other):
    def content(extra):
        touched = tuple((name, offset) for name, offset, length in extra.items if offset < 8 and offset + length > 0)
        return extra.salt, touched

    assert (one.for_block(0, 8) == other.for_block(0, 8)) == (content(one) == content(other))
