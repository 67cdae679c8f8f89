"""Masks, minimum lengths, sessions, windows, encoders and pooling, against the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from model_runner.simulated import SimulatedRunner, expected_pooled, expected_tokens
from rank_scheduler.config import CacheConfig, SchedulerConfig
from rank_scheduler.interface import KvGroup
from rank_scheduler.messages import EncoderInput, SamplingParams
from rank_scheduler.plan import EncoderRun, Extension
from tests.model_runner.driver import int32, sequence, step, tokens_of

PROMPT = [5, 6, 7, 8, 9, 10, 11, 0, 3]
BLOCKS = [3, 4, 9, 7, 1]
VOCAB_SIZE = 97
EOS = 2


def make(**options: Any) -> SimulatedRunner:
    scheduler = options.pop("scheduler", SchedulerConfig())
    cache = CacheConfig(block_size=4, num_blocks=64)
    fixed = {"vocab_size": VOCAB_SIZE, "eos_token_ids": frozenset({EOS})}
    return SimulatedRunner(scheduler=scheduler, cache=cache, **fixed, **options)


def only(*tokens: int) -> np.ndarray:
    allowed = np.zeros(VOCAB_SIZE, np.bool_)
    allowed[list(tokens)] = True
    return allowed


def test_masks_of_sampled_positions() -> None:
    """Three rows: one without a mask, one with masks at two of its three positions, one with a mask."""
    runner = make()
    new = [sequence(slot, PROMPT[slot:], [4 * slot + 1, 4 * slot + 2, 4 * slot + 3, 4 * slot + 4]) for slot in range(3)]
    first = tokens_of(step(runner, [(slot, 9 - slot, True) for slot in range(3)], new))
    choices: dict[int, Any] = {1: (17, 60), 3: (1, 2), 4: (31, 32, 96)}

    def after(slot: int, *masks: Any) -> list[int]:
        def allowed(generated: list[int]) -> Any:
            mask = [None, *masks][len(generated)]
            return None if mask is None else only(*mask)

        return expected_tokens(PROMPT[slot:], 1 + len(masks), VOCAB_SIZE, allowed=allowed)[1:]

    expected = [after(0, None), after(1, (17, 60), None, (1, 2)), after(2, (31, 32, 96))]
    assert [first[1], *expected[1]] != expected_tokens(PROMPT[1:], 4, VOCAB_SIZE)
    rows = [(0, 1, True), (1, 3, True), (2, 1, True)]
    result = step(runner, rows, drafts=[[], expected[1][:2], []], masks=choices)
    assert result.tokens.tolist() == [[expected[0][0], -1, -1], expected[1], [expected[2][0], -1, -1]]


def test_a_mask_that_allows_nothing_ends_one_request_and_no_step_after_it() -> None:
    runner = make()
    new = [sequence(0, PROMPT, [1, 2, 3]), sequence(1, PROMPT, [4, 5, 6])]
    result = step(runner, [(0, 9, True), (1, 9, True)], new, masks={1: ()})
    assert list(result.failed) == [1]
    assert tokens_of(result) == [*expected_tokens(PROMPT, 1, VOCAB_SIZE), -1]
    # Planned before the failure was known.
    again = step(runner, [(0, 1, True), (1, 1, True)])
    assert tokens_of(again)[0] == expected_tokens(PROMPT, 2, VOCAB_SIZE)[1]


def test_a_mask_that_allows_nothing_after_right_drafts_fails_only_when_it_is_reached() -> None:
    runner = make()
    expected = expected_tokens(PROMPT, 4, VOCAB_SIZE)
    step(runner, [(0, 9, True)], [sequence(0, PROMPT, [1, 2, 3, 4])])
    result = step(runner, [(0, 3, True)], drafts=[expected[1:3]], masks={2: ()})
    assert result.tokens.tolist() == [[*expected[1:3], -1]]
    assert not result.failed
    assert list(step(runner, [(0, 1, True)], masks={0: ()}).failed) == [0]


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_min_tokens(num_drafts: int) -> None:
    """The stop tokens are those that would come; after a preemption the count goes on."""
    free = expected_tokens(PROMPT, 6, VOCAB_SIZE)
    sampling = SamplingParams(seed=0, max_tokens=9, min_tokens=4, stop_token_ids=(*free, 10**6), num_logprobs=0)
    ending = {EOS, *free}

    def allowed(generated: list[int]) -> Any:
        return ~only(*ending) if len(generated) < 4 else None

    expected = expected_tokens(PROMPT, 6, VOCAB_SIZE, allowed=allowed)
    assert expected[:4] != free[:4]
    runner = make()
    known, tokens = [*PROMPT, expected[0]], expected[:1]
    result = step(runner, [(0, 10, True)], [sequence(0, known, BLOCKS, num_prompt=9, sampling=sampling)])
    tokens += tokens_of(result)
    while len(tokens) < 6:
        drafts = expected[len(tokens) : len(tokens) + num_drafts]
        result = step(runner, [(0, 1 + len(drafts), True)], drafts=[drafts])
        tokens += [token for token in result.tokens[0].tolist() if token >= 0]
        assert len(result.logprobs[0]) == (result.tokens >= 0).sum()
    assert tokens[:6] == expected


def test_session_goes_on_without_its_last_token_and_counts_min_tokens_anew() -> None:
    runner = make()
    sampling = SamplingParams(seed=0, max_tokens=9, min_tokens=1, num_logprobs=0)
    turn = expected_tokens(PROMPT, 3, VOCAB_SIZE)
    step(runner, [(0, 9, True)], [sequence(0, PROMPT, [*BLOCKS, 20], sampling=sampling)])
    # The last of these steps was planned before it was known that the third token ends the turn.
    for _ in range(3):
        step(runner, [(0, 1, True)])
    known = [*PROMPT, *turn[:2], 50, 51, 52]
    expected = expected_tokens(known, 3, VOCAB_SIZE)
    result = step(runner, [(0, 3, True)], extensions=[Extension(0, 11, int32([50, 51, 52]))])
    tokens = tokens_of(result)
    for _ in range(2):
        tokens += tokens_of(step(runner, [(0, 1, True)]))
    assert tokens == expected
    # The first token of the next turn is EOS, and may not be.
    known = [*known, *expected[:2]]
    start = next(t for t in range(5000) if expected_tokens([*known, t], 1, VOCAB_SIZE) == [EOS])
    result = step(runner, [(0, 1, True)], extensions=[Extension(0, 16, int32([start]))])
    assert tokens_of(result) == [EOS + 1]
    with pytest.raises(RuntimeError, match="extends slot 0 from token 19 to 20; it has 18 known"):
        step(runner, [], extensions=[Extension(0, 19, int32([1]))])


GROUPS = (KvGroup(), KvGroup(sliding_window=6), KvGroup(sliding_window=1))


def test_windows_read_only_what_they_see() -> None:
    """The windows' first blocks are null from the start; what slides out later is overwritten by others."""
    runner = make(kv_groups=GROUPS)
    prompt = list(range(20, 40))
    expected = expected_tokens(prompt, 8, VOCAB_SIZE, kv_groups=GROUPS)
    assert expected != expected_tokens(prompt, 8, VOCAB_SIZE)
    tables = [[1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14], [15, 16, 17, 18, 19, 20, 21]]
    whole = step(runner, [(0, 20, True)], [sequence(0, prompt, tables)])
    tokens = tokens_of(whole)
    # Another sequence shares what it may, and has null blocks where its windows see nothing.
    shared = [[*tables[0][:4], 31], [0, 0, 10, 11, 32], [0, 0, 0, 0, 33]]
    assert tokens_of(step(runner, [(1, 4, True)], [sequence(1, prompt, shared, computed=16)])) == tokens
    other = sequence(2, PROMPT, [[40, 41, 42], [8, 9, 43], [15, 16, 17]])
    tokens += tokens_of(step(runner, [(0, 1, True), (2, 9, True)], [other]))[:1]
    result = step(runner, [(0, 4, True)], drafts=[[*expected[2:4], expected[4] + 1]])
    tokens += result.tokens[0, :3].tolist()
    for _ in range(3):
        tokens += tokens_of(step(runner, [(0, 1, True)]))
    assert tokens == expected


@pytest.mark.parametrize(
    ("tables", "column"),
    [
        ([[1, 0, 3, 4, 5], [0, 0, 10, 11, 12], [0, 0, 0, 0, 19]], "group 0 .* at column 1"),
        ([[1, 2, 3, 4, 5], [0, 0, 0, 11, 12], [0, 0, 0, 0, 19]], "group 1 .* at column 2"),
        ([[1, 2, 3, 4, 5], [0, 0, 10, 11, 12], [0, 0, 0, 0, 0]], "group 2 .* at column 4"),
    ],
)
def test_null_block_within_a_window(tables: list[list[int]], column: str) -> None:
    runner = make(kv_groups=GROUPS)
    with pytest.raises(RuntimeError, match=column):
        step(runner, [(0, 4, True)], [sequence(0, range(20), tables, computed=16)])


def test_blocks_of_another_group_give_other_tokens() -> None:
    groups = (KvGroup(), KvGroup())
    runner = make(kv_groups=groups)
    step(runner, [(0, 9, True)], [sequence(0, PROMPT, [[1, 2, 3], [4, 5, 6]])])
    right = sequence(1, PROMPT, [[1, 2, 7], [4, 5, 8]], computed=8)
    swapped = sequence(2, PROMPT, [[4, 5, 9], [1, 2, 10]], computed=8)
    tokens = tokens_of(step(runner, [(1, 1, True), (2, 1, True)], [right, swapped]))
    assert tokens[0] == expected_tokens(PROMPT, 1, VOCAB_SIZE, kv_groups=groups)[0] != tokens[1]
    with pytest.raises(ValueError, match="1 block tables into slot 3, and the model has 2 KV groups"):
        step(runner, [], [sequence(3, PROMPT, [1, 2, 3])])


def test_blocks_appended_to_several_groups_and_twice_to_a_slot() -> None:
    groups = (KvGroup(), KvGroup(sliding_window=3))
    runner = make(kv_groups=groups)
    new = [sequence(slot, [slot, 1], [[slot + 1], [slot + 5]]) for slot in range(3)]
    tokens = [[token] for token in tokens_of(step(runner, [(slot, 2, True) for slot in range(3)], new))]
    appended = [(2, 20, 21), (0, 22, 23), (2, 24, 25), (1, 26, 27), (0, 28, 29), (2, 30, 31)]
    for index in range(8):
        result = step(
            runner, [(slot, 1, True) for slot in (1, 0, 2)][index > 5 :], appended=appended if not index else ()
        )
        for slot, token in zip((1, 0, 2)[index > 5 :], tokens_of(result), strict=True):
            tokens[slot].append(token)
    for slot in range(3):
        assert tokens[slot] == expected_tokens([slot, 1], len(tokens[slot]), VOCAB_SIZE, kv_groups=groups)


IMAGES = (EncoderInput(b"a", 1, 3, b"one"), EncoderInput(b"b", 5, 2, b"two"))


def test_encoder_items_stand_at_their_positions() -> None:
    runner = make()
    expected = expected_tokens(PROMPT, 3, VOCAB_SIZE, encoder_inputs=IMAGES)
    assert expected != expected_tokens(PROMPT, 3, VOCAB_SIZE)
    assert expected != expected_tokens(
        PROMPT, 3, VOCAB_SIZE, encoder_inputs=(IMAGES[0], EncoderInput(b"c", 5, 2, b"two"))
    )
    new = sequence(0, PROMPT, BLOCKS, encoder_inputs=IMAGES)
    step(runner, [(0, 5, False)], [new], encoder_runs=[EncoderRun(0, IMAGES[0])])
    result = step(runner, [(0, 4, True)], encoder_runs=[EncoderRun(0, IMAGES[1])], freed_encoder_outputs=[b"a"])
    tokens = tokens_of(result)
    for _ in range(2):
        tokens += tokens_of(step(runner, [(0, 1, True)]))
    assert tokens == expected
    # One output serves all that have the item.
    second = sequence(1, PROMPT, [20, 21, 22], encoder_inputs=IMAGES)
    assert tokens_of(step(runner, [(1, 9, True)], [second], encoder_runs=[EncoderRun(1, IMAGES[0])])) == tokens[:1]
    third = sequence(2, PROMPT, [30, 31, 32], encoder_inputs=IMAGES)
    step(runner, [(2, 2, False)], [third])
    with pytest.raises(RuntimeError, match="positions 2 to 3 of encoder item 61, whose output is not there"):
        step(runner, [(2, 7, True)], freed_encoder_outputs=[b"a"])
    with pytest.raises(RuntimeError, match="encodes 61 for slot 3, which has no such input"):
        step(runner, [], encoder_runs=[EncoderRun(3, IMAGES[0])])


def test_encoder_decoder() -> None:
    runner = make(is_encoder_decoder=True)
    assert runner.load().is_encoder_decoder
    audio = EncoderInput(b"speech", 0, 6, b"...")
    other = EncoderInput(b"speech", 0, 6, b"..!")
    expected = expected_tokens(PROMPT, 4, VOCAB_SIZE, cross_inputs=[audio])
    assert (
        len({tuple(expected_tokens(PROMPT, 4, VOCAB_SIZE, cross_inputs=each)) for each in ([], [audio], [other])}) == 3
    )
    new = sequence(0, PROMPT, BLOCKS, cross_block_ids=int32([30, 31]), encoder_inputs=(audio,))
    tokens = tokens_of(step(runner, [(0, 9, True)], [new], encoder_runs=[EncoderRun(0, audio)]))
    for index in range(3):
        tokens += tokens_of(step(runner, [(0, 1, True)], freed_encoder_outputs=[] if index else [b"speech"]))
    assert tokens == expected
    # Its cross-attention blocks are overwritten by another's.
    thief = sequence(1, PROMPT, [20, 21, 22], cross_block_ids=int32([40, 30]), encoder_inputs=(other,))
    step(runner, [(1, 9, True)], [thief], encoder_runs=[EncoderRun(1, other)])
    with pytest.raises(RuntimeError, match="slot 0 is computed, and its cross-attention blocks were not filled"):
        step(runner, [(0, 1, True)])
    with pytest.raises(RuntimeError, match="1 cross-attention blocks into slot 2, and its encoder input needs 2"):
        step(runner, [], [sequence(2, PROMPT, BLOCKS, cross_block_ids=int32([9]), encoder_inputs=(audio,))])


@pytest.mark.parametrize("samples", [True, False])
def test_pooling(samples: bool) -> None:
    runner = make(scheduler=SchedulerConfig(runner_type="pooling"))
    step(runner, [(0, 4, False)], [sequence(0, PROMPT, BLOCKS)])
    result = step(runner, [(0, 5, samples), (1, 2, False)], [sequence(1, PROMPT, [20, 21, 22])])
    assert result.pooled == {0: expected_pooled(PROMPT)}
    assert tokens_of(result) == [-1, -1]
    assert not result.failed
    values = np.frombuffer(result.pooled[0], "<f4")
    assert ((values >= 0) & (values < 1)).all()
    assert len(set(values.tolist())) == len(values)


def test_plans_without_rows() -> None:
    runner = make()
    assert step(runner, [], [sequence(0, PROMPT, BLOCKS[:2])]).tokens.shape[0] == 0
    step(runner, [], appended=[(0, 9)])
    assert tokens_of(step(runner, [(0, 9, True)])) == expected_tokens(PROMPT, 1, VOCAB_SIZE)
