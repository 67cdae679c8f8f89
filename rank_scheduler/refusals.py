"""Requests that can never run: the reason, in words that tell what to change."""

from __future__ import annotations

import numpy as np

from rank_scheduler.config import SchedulerConfig
from rank_scheduler.interface import SchedulerSetup
from rank_scheduler.messages import Submit

_MAX_FLOAT32 = float(np.finfo(np.float32).max)


def why_impossible(submit: Submit, config: SchedulerConfig, setup: SchedulerSetup) -> str | None:
    """Why this rank can never run the request; None if it can."""
    return (
        _tokens(submit.token_ids, config, setup)
        or _continuation(submit, config)
        or _sampling(submit, config, setup)
        or _encoder_inputs(submit, config, setup)
        or _blocks(submit, setup)
    )


def why_too_long(num_tokens: int, config: SchedulerConfig, setup: SchedulerSetup) -> str | None:
    """Why a prompt (or a session's context with its next input) of so many tokens cannot be continued."""
    needed = num_tokens + (0 if config.runner_type == "pooling" else 1)
    if needed <= setup.max_model_len:
        return None
    what = "exceeds" if config.runner_type == "pooling" else "with one generated token exceeds"
    return f"the prompt has {num_tokens} tokens, which {what} max_model_len ({setup.max_model_len}); shorten it"


def why_no_tokens(token_ids: bytes, setup: SchedulerSetup) -> str | None:
    """Why these bytes are no prompt."""
    if len(token_ids) % 4:
        return f"token_ids has {len(token_ids)} bytes: not a whole number of int32"
    if not token_ids:
        return "the prompt is empty: send at least one token"
    # Negative numbers are large ones here.
    numbers = np.frombuffer(token_ids, "<u4")
    # Half the time of `max`.
    if numbers[numbers.argmax()] >= setup.vocab_size:
        return f"the prompt has token ids outside [0, {setup.vocab_size}): check the tokenizer"
    return None


def _tokens(token_ids: bytes, config: SchedulerConfig, setup: SchedulerSetup) -> str | None:
    return why_no_tokens(token_ids, setup) or why_too_long(len(token_ids) // 4, config, setup)


def _continuation(submit: Submit, config: SchedulerConfig) -> str | None:
    """A request that comes from another rank, or goes to one."""
    num_tokens, num_generated = len(submit.token_ids) // 4, submit.num_generated
    if num_generated >= num_tokens:
        return f"num_generated is {num_generated} of {num_tokens} tokens: at least one must be of the prompt"
    if num_generated and num_generated >= submit.sampling.max_tokens:
        return f"num_generated is {num_generated}, and max_tokens {submit.sampling.max_tokens}: it has ended already"
    for name in ("num_generated", "hands_off"):
        if getattr(submit, name) and (submit.is_session or config.runner_type == "pooling"):
            return f"{name}: neither a streaming session nor a pooling model moves to another rank; leave it out"
    return None


def _sampling(submit: Submit, config: SchedulerConfig, setup: SchedulerSetup) -> str | None:
    sampling, repetition = submit.sampling, submit.sampling.repetition
    if sampling.max_tokens < 1:
        return f"max_tokens is {sampling.max_tokens}: ask for at least one"
    if sampling.min_tokens > sampling.max_tokens:
        return f"min_tokens ({sampling.min_tokens}) is more than max_tokens ({sampling.max_tokens}): lower min_tokens"
    # A large max_tokens is no fault, the model's length ends the request; min_tokens could not be kept.
    num_prompt_tokens = len(submit.token_ids) // 4 - submit.num_generated
    if num_prompt_tokens + sampling.min_tokens > setup.max_model_len:
        return (
            f"min_tokens is {sampling.min_tokens}, and after {num_prompt_tokens} prompt tokens there is room for "
            f"{setup.max_model_len - num_prompt_tokens} until max_model_len ({setup.max_model_len}): lower it"
        )
    for name in ("temperature", "top_p", "min_p"):
        value = getattr(sampling, name)
        # Runners keep them as float32. Not a number fails every comparison.
        if not 0 <= value <= _MAX_FLOAT32:
            return f"{name} is {value}: it must be from 0 to {_MAX_FLOAT32:.1e}"
    if not 0 < sampling.repetition_penalty <= _MAX_FLOAT32:
        return f"repetition_penalty is {sampling.repetition_penalty}: it must be above 0, up to {_MAX_FLOAT32:.1e}"
    for name in ("frequency_penalty", "presence_penalty"):
        if not abs(getattr(sampling, name)) <= _MAX_FLOAT32:
            return f"{name} is {getattr(sampling, name)}: it must be finite"
    if not all(abs(bias) <= _MAX_FLOAT32 for _, bias in sampling.logit_bias):
        return "logit_bias has a value that is not finite: leave it out"
    for name, token_ids in (
        ("logit_bias", [token for token, _ in sampling.logit_bias]),
        ("allowed_token_ids", sampling.allowed_token_ids),
        ("bad_words", [token for word in sampling.bad_words for token in word]),
    ):
        for token in token_ids:
            if not 0 <= token < setup.vocab_size:
                return f"{name} has token id {token}: the model's vocabulary has {setup.vocab_size}"
    if not all(sampling.bad_words):
        return "bad_words has an empty word: leave it out"
    if repetition is not None and repetition.min_pattern_size > repetition.max_pattern_size:
        return (
            f"repetition.min_pattern_size ({repetition.min_pattern_size}) is more than max_pattern_size "
            f"({repetition.max_pattern_size}): lower it"
        )
    if config.runner_type == "pooling" and (submit.grammar is not None or submit.is_session):
        return "a pooling model generates nothing: leave grammar and is_session out"
    if submit.is_session and submit.grammar is not None:
        return "a streaming session cannot have a grammar: leave one of them out"
    return None


def _encoder_inputs(submit: Submit, config: SchedulerConfig, setup: SchedulerSetup) -> str | None:
    items = submit.encoder_inputs
    if not items and not setup.is_encoder_decoder:
        return None
    if setup.is_encoder_decoder:
        if len(items) != 1 or items[0].offset != 0:
            return f"encoder_inputs has {len(items)} items: an encoder-decoder model needs exactly one, at offset 0"
    elif items and not config.is_multimodal_model:
        return "encoder_inputs: this model has no encoder (scheduler.is_multimodal_model is off); send text only"
    end = 0
    num_prompt_tokens = len(submit.token_ids) // 4 - submit.num_generated
    for index, item in enumerate(items):
        if item.length > min(config.encoder_budget, config.encoder_cache_capacity):
            return (
                f"encoder_inputs[{index}] has {item.length} embeddings, more than max_num_encoder_input_tokens "
                f"({config.encoder_budget}) or encoder_cache_size ({config.encoder_cache_capacity}): send a smaller one"
            )
        if setup.is_encoder_decoder:
            continue
        if item.offset < end or item.offset + item.length > num_prompt_tokens:
            return (
                f"encoder_inputs[{index}] stands at [{item.offset}, {item.offset + item.length}), outside of the "
                f"prompt's {num_prompt_tokens} tokens or over the item before it"
            )
        longest = config.num_scheduled_tokens_limit
        if config.long_prefill_token_threshold and config.enable_chunked_prefill:
            longest = min(longest, config.long_prefill_token_threshold)
        if config.disable_chunked_mm_input and item.length > longest:
            return (
                f"encoder_inputs[{index}] has {item.length} positions, and with disable_chunked_mm_input a step can "
                f"hold {longest} of one prompt: send a smaller item"
            )
        end = item.offset + item.length
    return None


def _blocks(submit: Submit, setup: SchedulerSetup) -> str | None:
    """Only an encoder's blocks can make a request impossible: the pool holds the longest sequence without them."""
    if not setup.is_encoder_decoder:
        return None
    num_positions = min(len(submit.token_ids) // 4 + submit.sampling.max_tokens, setup.max_model_len)
    num_needed = -(-num_positions // setup.block_size) * len(setup.kv_groups)
    num_needed += sum(-(-item.length // setup.block_size) for item in submit.encoder_inputs)
    if num_needed > setup.num_blocks - 1:
        return (
            f"the request needs {num_needed} KV blocks (its prompt, max_tokens and the encoder's input), and the pool "
            f"has {setup.num_blocks - 1}: shorten it or lower max_tokens"
        )
    return None
