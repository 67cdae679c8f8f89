import numpy as np

from rank_scheduler.prefix_hash import extend_block_hashes


def hashes_of(tokens, block_size=4):
    hashes: list[bytes] = []
    extend_block_hashes(hashes, np.array(tokens, np.int32), block_size)
    return hashes


def test_only_full_blocks_have_a_hash():
    assert [len(hashes_of(range(n))) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_a_hash_names_the_whole_prefix_not_the_block_alone():
    assert hashes_of([1, 2, 3, 4, 9, 9, 9, 9])[1] != hashes_of([5, 6, 7, 8, 9, 9, 9, 9])[1]
    assert hashes_of([1, 2, 3, 4, 9, 9, 9, 9])[0] == hashes_of([1, 2, 3, 4, 8, 8, 8, 8])[0]


def test_extending_gives_the_same_as_hashing_at_once():
    tokens = np.arange(40, dtype=np.int32)
    grown: list[bytes] = []
    for end in (3, 4, 17, 40):
        extend_block_hashes(grown, tokens[:end], 4)
    assert grown == hashes_of(range(40))


def test_hashes_are_the_same_in_every_process():
    assert hashes_of([0, 1, 2, 3])[0].hex() == "caf99748968e1785d7ffb0f2abb5be3370fa26a6ef86054933c4214018d8ddde"
