"""What can never run is refused when it arrives, in a sentence that says what to change."""

import msgspec
import numpy as np
import pytest

from rank_scheduler.config import SchedulerConfig, SpeculativeConfig
from rank_scheduler.interface import KvGroup, SchedulerSetup
from rank_scheduler.messages import (
    EncoderInput,
    End,
    Extend,
    FinishReason,
    Grammar,
    GrammarKind,
    Repetition,
    SamplingParams,
    Submit,
)
from rank_scheduler.scheduler import Scheduler
from tests.rank_scheduler.small_engine import VOCAB_SIZE, SmallEngine, item, prompt_of, tokens_after

GRAMMAR = Grammar(GrammarKind.JSON_OBJECT)
WITH_ENCODER = {
    "is_multimodal_model": True,
    "max_num_encoder_input_tokens": 12,
    "encoder_cache_size": 10,
    "max_num_batched_tokens": 16,
}


def answer(engine: SmallEngine, prompt: list[int], *, max_tokens: int = 4, sampling=None, **fields) -> End:
    """The end of a request that is refused: at once, without a step, and with nothing left of it."""
    engine.submit(1, prompt, max_tokens=max_tokens, fields=fields, **(sampling or {}))
    assert engine.scheduler.has_work()
    engine.take(engine.scheduler.take_frames())
    assert engine.scheduler.take_compile_actions() == []
    engine.check_empty()
    assert not engine.scheduler.has_work()
    assert engine.scheduler.schedule(1.0) is None
    assert engine.tokens == {}
    assert engine.ends[1].reason is FinishReason.ERROR
    return engine.ends[1]


def items(*places: tuple[int, int]) -> tuple[EncoderInput, ...]:
    return tuple(item(offset, length, number) for number, (offset, length) in enumerate(places))


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "the prompt is empty: send at least one token"),
        (
            prompt_of(64),
            {},
            "the prompt has 64 tokens, which with one generated token exceeds max_model_len (64); shorten it",
        ),
        (prompt_of(1000), {}, "the prompt has 1000 tokens, which with one generated token exceeds max_model_len (64)"),
        ([1, VOCAB_SIZE], {}, "the prompt has token ids outside [0, 50): check the tokenizer"),
        ([1, -1], {}, "the prompt has token ids outside [0, 50): check the tokenizer"),
        ([1], {"max_tokens": 0}, "max_tokens is 0: ask for at least one"),
        ([1], {"max_tokens": -3}, "max_tokens is -3: ask for at least one"),
        (
            [1],
            {"max_tokens": 4, "sampling": {"min_tokens": 5}},
            "min_tokens (5) is more than max_tokens (4): lower min_tokens",
        ),
        (
            prompt_of(60),
            {"max_tokens": 2**63 - 1, "sampling": {"min_tokens": 5}},
            "min_tokens is 5, and after 60 prompt tokens there is room for 4 until max_model_len (64): lower it",
        ),
        ([1], {"max_tokens": 2**63 - 1, "sampling": {"min_tokens": 2**63 - 1}}, "min_tokens is 9223372036854775807"),
        ([1], {"sampling": {"temperature": 1e39}}, "temperature is 1e+39: it must be from 0 to 3.4e+38"),
        ([1], {"sampling": {"temperature": -1.0}}, "temperature is -1.0: it must be from 0 to 3.4e+38"),
        ([1], {"sampling": {"top_p": float("nan")}}, "top_p is nan: it must be from 0 to 3.4e+38"),
        ([1], {"sampling": {"min_p": float("inf")}}, "min_p is inf: it must be from 0 to 3.4e+38"),
        (
            [1],
            {"sampling": {"repetition_penalty": 0.0}},
            "repetition_penalty is 0.0: it must be above 0, up to 3.4e+38",
        ),
        ([1], {"sampling": {"repetition_penalty": float("nan")}}, "repetition_penalty is nan: it must be above 0"),
        ([1], {"sampling": {"frequency_penalty": float("inf")}}, "frequency_penalty is inf: it must be finite"),
        ([1], {"sampling": {"presence_penalty": float("nan")}}, "presence_penalty is nan: it must be finite"),
        ([1], {"sampling": {"logit_bias": ((1, 1e39),)}}, "logit_bias has a value that is not finite: leave it out"),
        ([1], {"sampling": {"logit_bias": ((50, 1.0),)}}, "logit_bias has token id 50: the model's vocabulary has 50"),
        ([1], {"sampling": {"allowed_token_ids": (3, -1)}}, "allowed_token_ids has token id -1: the model's"),
        ([1], {"sampling": {"bad_words": ((3, 99),)}}, "bad_words has token id 99: the model's vocabulary has 50"),
        ([1], {"sampling": {"bad_words": ((3,), ())}}, "bad_words has an empty word: leave it out"),
        (
            [1],
            {"sampling": {"repetition": Repetition(max_pattern_size=2, min_count=2, min_pattern_size=3)}},
            "repetition.min_pattern_size (3) is more than max_pattern_size (2): lower it",
        ),
        (
            [1],
            {"is_session": True, "grammar": GRAMMAR},
            "a streaming session cannot have a grammar: leave one of them out",
        ),
        (
            prompt_of(8),
            {"encoder_inputs": items((0, 4))},
            "encoder_inputs: this model has no encoder (scheduler.is_multimodal_model is off); send text only",
        ),
    ],
)
def test_text_requests(prompt, options, message):
    assert answer(SmallEngine(), prompt, **options).message.startswith(message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grammar": GRAMMAR}, "a pooling model generates nothing: leave grammar and is_session out"),
        ({"is_session": True}, "a pooling model generates nothing: leave grammar and is_session out"),
    ],
)
def test_pooling_requests(options, message):
    assert answer(SmallEngine(runner_type="pooling"), prompt_of(4), **options).message == message


def test_a_pooling_prompt_may_be_as_long_as_the_model_and_no_longer():
    message = "the prompt has 65 tokens, which exceeds max_model_len (64); shorten it"
    assert answer(SmallEngine(runner_type="pooling"), prompt_of(65)).message == message


@pytest.mark.parametrize(
    ("encoder_inputs", "fields", "message"),
    [
        (
            items((0, 11)),
            {},
            "encoder_inputs[0] has 11 embeddings, more than max_num_encoder_input_tokens (12) or encoder_cache_size "
            "(10): send a smaller one",
        ),
        (
            items((0, 4), (17, 4)),
            {},
            "encoder_inputs[1] stands at [17, 21), outside of the prompt's 20 tokens or over the item before it",
        ),
        (
            items((0, 4), (3, 4)),
            {},
            "encoder_inputs[1] stands at [3, 7), outside of the prompt's 20 tokens or over the item before it",
        ),
        (
            items((0, 4), (6, 10)),
            {"disable_chunked_mm_input": True, "max_num_scheduled_tokens": 9},
            "encoder_inputs[1] has 10 positions, and with disable_chunked_mm_input a step can hold 9 of one prompt: "
            "send a smaller item",
        ),
        (
            items((0, 7)),
            {"disable_chunked_mm_input": True, "long_prefill_token_threshold": 6},
            "encoder_inputs[0] has 7 positions, and with disable_chunked_mm_input a step can hold 6 of one prompt: "
            "send a smaller item",
        ),
    ],
)
def test_encoder_inputs(encoder_inputs, fields, message):
    engine = SmallEngine(**(WITH_ENCODER | fields))
    assert answer(engine, prompt_of(20), encoder_inputs=encoder_inputs).message == message


ENCODER_DECODER = WITH_ENCODER | {
    "enable_chunked_prefill": False,
    "disable_chunked_mm_input": True,
    "max_num_batched_tokens": 64,
}


@pytest.mark.parametrize(
    ("encoder_inputs", "message"),
    [
        ((), "encoder_inputs has 0 items: an encoder-decoder model needs exactly one, at offset 0"),
        (items((0, 4), (4, 4)), "encoder_inputs has 2 items: an encoder-decoder model needs exactly one, at offset 0"),
        (items((2, 4)), "encoder_inputs has 1 items: an encoder-decoder model needs exactly one, at offset 0"),
    ],
)
def test_encoder_decoder_requests(encoder_inputs, message):
    engine = SmallEngine(is_encoder_decoder=True, **ENCODER_DECODER)
    assert answer(engine, prompt_of(4), encoder_inputs=encoder_inputs).message == message


def test_an_encoder_decoder_request_that_the_pool_can_never_hold():
    message = (
        "the request needs 18 KV blocks (its prompt, max_tokens and the encoder's input), and the pool has 17: "
        "shorten it or lower max_tokens"
    )
    # 61 positions are 16 blocks, and 8 embeddings two.
    for max_tokens in (1, 1000):
        engine = SmallEngine(num_blocks=18, is_encoder_decoder=True, **ENCODER_DECODER)
        inputs = items((0, 8))
        assert answer(engine, prompt_of(60), max_tokens=max_tokens, encoder_inputs=inputs).message == message
        engine.submit(2, prompt_of(56), max_tokens=4, fields={"encoder_inputs": items((0, 4))})
        engine.run()
        assert engine.ends[2].reason is FinishReason.LENGTH


def test_a_broken_token_buffer():
    engine = SmallEngine()
    engine.scheduler.add(0, Submit(1, b"abcde", SamplingParams(seed=0, max_tokens=1)), 0.0)
    engine.take(engine.scheduler.take_frames())
    assert engine.ends[1].message.startswith("token_ids has 5 bytes: not a whole number of int32")


# ---- what just fits is not refused ----


def test_the_longest_prompt_and_the_smallest_and_largest_token():
    engine = SmallEngine()
    engine.submit(1, prompt_of(63), max_tokens=1000)
    engine.submit(2, [0, VOCAB_SIZE - 1], max_tokens=2, min_tokens=2)
    engine.run()
    assert engine.tokens[1] == tokens_after(prompt_of(63), 1)
    assert engine.tokens[2] == tokens_after([0, VOCAB_SIZE - 1], 2)


@pytest.mark.parametrize(
    ("fields", "sampling"),
    [
        ({}, {"max_tokens": 2**64 - 1, "min_tokens": 60}),
        ({}, {"seed": 2**64 - 1}),
        ({}, {"top_k": 2**63 - 1}),
        ({}, {"num_logprobs": 2**63 - 1}),
        ({}, {"temperature": float(np.finfo(np.float32).max), "top_p": 1e38, "min_p": 1e38}),
        ({}, {"stop_token_ids": (-(2**63), -1, VOCAB_SIZE, 2**64 - 1), "min_tokens": 1}),
        ({"priority": 2**31 - 1}, {}),
        ({"priority": -(2**31)}, {}),
        ({"id": 2**63 - 1}, {}),
        ({"is_session": True}, {"max_tokens": 3}),
    ],
)
def test_the_largest_numbers_that_a_message_can_hold_harm_nobody(fields, sampling):
    engine = SmallEngine(policy="priority")
    engine.submit(1, prompt_of(4), max_tokens=9)
    wire_id = fields.get("id", 2)
    params = SamplingParams(**({"seed": 2, "max_tokens": 2**64 - 1, "temperature": 0.0, "ignore_eos": True} | sampling))
    message = Submit(**({"id": 2, "token_ids": np.array(prompt_of(4), "<i4").tobytes(), "sampling": params} | fields))
    engine.scheduler.add(0, msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Submit), engine.now)
    engine.run()
    num_tokens = 60
    if message.is_session:
        longest = Extend(2, b"\1\0\0\0", max_tokens=2**64 - 1, is_last=True)
        engine.tokens[2].clear()
        engine.scheduler.extend(0, msgspec.msgpack.decode(msgspec.msgpack.encode(longest), type=Extend), engine.now)
        engine.run()
        num_tokens = 64 - (4 + 2 + 1)
    assert engine.ends[1].reason is FinishReason.LENGTH
    assert engine.tokens[1] == tokens_after(prompt_of(4), 9)
    assert engine.ends[wire_id].reason is FinishReason.LENGTH
    assert len(engine.tokens[wire_id]) == num_tokens
    engine.check_empty()


def test_items_that_touch_and_fill_the_encoder():
    engine = SmallEngine(**WITH_ENCODER)
    inputs = items((0, 10), (10, 10))
    engine.submit(1, prompt_of(20), max_tokens=2, fields={"encoder_inputs": inputs})
    engine.run()
    assert engine.tokens[1] == tokens_after(prompt_of(20), 2, encoder_inputs=inputs)


def test_a_refused_request_harms_nobody_and_its_number_is_free_again():
    engine = SmallEngine()
    engine.submit(1, prompt_of(5), max_tokens=3)
    engine.submit(2, [])
    engine.step()
    assert engine.ends.pop(2).reason is FinishReason.ERROR
    engine.submit(2, prompt_of(6, start=2), max_tokens=3)
    engine.run()
    assert engine.tokens[1] == tokens_after(prompt_of(5), 3)
    assert engine.tokens[2] == tokens_after(prompt_of(6, start=2), 3)
    assert engine.scheduler.num_ignored_messages == 0


# ---- sessions ----


@pytest.mark.parametrize(
    ("extend", "message"),
    [
        (Extend(1, b"", max_tokens=2), "the prompt is empty: send at least one token"),
        (Extend(1, b"\1\0\0", max_tokens=2), "token_ids has 3 bytes: not a whole number of int32"),
        (Extend(1, b"\x32\0\0\0", max_tokens=2), "the prompt has token ids outside [0, 50): check the tokenizer"),
        (Extend(1, b"\1\0\0\0", max_tokens=0), "max_tokens is 0: ask for at least one"),
        (
            Extend(1, np.zeros(59, "<i4").tobytes(), max_tokens=2),
            "the prompt has 64 tokens, which with one generated token exceeds max_model_len (64); shorten it",
        ),
    ],
)
@pytest.mark.parametrize("is_early", [False, True])
def test_an_input_that_cannot_be_taken_ends_the_session_and_says_why(extend, message, is_early):
    engine = SmallEngine()
    engine.submit(1, prompt_of(4), max_tokens=2, fields={"is_session": True})
    engine.submit(2, prompt_of(5, start=2), max_tokens=9)
    engine.step()
    if not is_early:
        engine.steps(3)
        assert engine.explain(1).state == "waiting_for_input"
    engine.scheduler.extend(0, extend, engine.now)
    engine.run()
    assert engine.ends[1].reason is FinishReason.ERROR
    assert engine.ends[1].message.startswith(message)
    assert engine.tokens[1] == tokens_after(prompt_of(4), 2)
    assert engine.tokens[2] == tokens_after(prompt_of(5, start=2), 9)
    engine.check_empty()


def test_the_longest_input_that_a_session_can_take():
    engine = SmallEngine()
    engine.submit(1, prompt_of(4), max_tokens=2, fields={"is_session": True})
    engine.run()
    engine.scheduler.extend(0, Extend(1, np.zeros(58, "<i4").tobytes(), max_tokens=9, is_last=True), engine.now)
    engine.run()
    first = tokens_after(prompt_of(4), 2)
    assert engine.tokens[1] == first + tokens_after([*prompt_of(4), first[0], *[0] * 58], 1)


# ---- a scheduler that cannot be ----


def make_scheduler(*, config=None, **setup) -> Scheduler:
    fields = {
        "max_model_len": 64,
        "vocab_size": VOCAB_SIZE,
        "eos_token_ids": frozenset(),
        "num_blocks": 17,
        "block_size": 4,
    }
    return Scheduler(
        config or SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=8), SchedulerSetup(**(fields | setup))
    )


def test_a_pool_that_cannot_hold_the_longest_sequence_is_refused():
    make_scheduler()
    with pytest.raises(ValueError, match=r"raise num_blocks to at least 17 or lower max_model_len"):
        make_scheduler(num_blocks=16)
    with pytest.raises(ValueError, match=r"2 of them for each 4 tokens.*raise num_blocks to at least 33"):
        make_scheduler(num_blocks=32, kv_groups=(KvGroup(), KvGroup(sliding_window=8)))


def test_what_does_not_work_together_is_refused():
    config = SchedulerConfig(
        max_num_batched_tokens=64, max_num_seqs=8, speculative=SpeculativeConfig(num_speculative_tokens=2)
    )
    with pytest.raises(ValueError, match=r"async_scheduling does not work with speculative: leave one of them out"):
        make_scheduler(config=config, async_scheduling=True)
    with pytest.raises(ValueError, match=r"set enable_chunked_prefill to false"):
        make_scheduler(is_encoder_decoder=True)
