"""What requests say of their tokens, and of their prompts, as it reaches a rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rank_scheduler.messages import SamplingParams
from router.errors import ApiError
from router.protocol import ChatCompletionRequest, CompletionRequest, parse
from tests.router.fake_cluster import MODEL, Cluster, in_loop, running


def completion(**fields: Any) -> CompletionRequest:
    return parse(json.dumps({"model": MODEL, "prompt": "hi", **fields}).encode(), CompletionRequest)


def chat(**fields: Any) -> ChatCompletionRequest:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}
    return parse(json.dumps(body).encode(), ChatCompletionRequest)


async def sampling_of(cluster: Cluster, **fields: Any) -> SamplingParams:
    response = await cluster.complete(max_tokens=1, **fields)
    assert response.status_code == 200, response.text
    return cluster.ranks[0].submits[-1].sampling


@in_loop
async def test_what_changes_logits(tmp_path: Path) -> None:
    async with running(tmp_path) as cluster:
        plain = await sampling_of(cluster)
        assert (plain.repetition_penalty, plain.frequency_penalty, plain.presence_penalty) == (1, 0, 0)
        assert (plain.logit_bias, plain.allowed_token_ids, plain.bad_words) == ((), (), ())
        sampling = await sampling_of(
            cluster,
            repetition_penalty=1.5,
            frequency_penalty=-0.5,
            presence_penalty=2,
            logit_bias={"5": -100, "7": 0.5},
            allowed_token_ids=[5, 6],
        )
        assert (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty) == (1.5, -0.5, 2)
        assert sampling.logit_bias == ((5, -100.0), (7, 0.5))
        assert sampling.allowed_token_ids == (5, 6)


@in_loop
async def test_bad_words_count_within_text_too(tmp_path: Path) -> None:
    async with running(tmp_path) as cluster:
        encode = cluster.service.tokenizer.encode
        sampling = await sampling_of(cluster, bad_words=["no", " yes"])
        spellings = ["no", " no", " yes"]
        assert sampling.bad_words == tuple([tuple(await encode(each, add_special_tokens=False)) for each in spellings])


@in_loop
async def test_the_end_of_a_long_prompt(tmp_path: Path) -> None:
    async with running(tmp_path) as cluster:
        rank = cluster.ranks[0]
        for prompt, most, expected in (
            ([1, 2, 3, 4], 2, [3, 4]),
            ([1, 2], 3, [1, 2]),
            (list(range(10)) * 60, -1, (list(range(10)) * 60)[-cluster.service.settings.max_model_len + 1 :]),
        ):
            response = await cluster.complete(prompt, truncate_prompt_tokens=most, max_tokens=1)
            assert response.status_code == 200, response.text
            assert rank.prompt() == expected
            assert response.json()["usage"]["prompt_tokens"] == len(expected)
        assert (await cluster.complete("x" * 1000, truncate_prompt_tokens=3, max_tokens=1)).status_code == 200
        assert len(rank.prompt()) == 3
        refused = await cluster.complete([1] * 600, max_tokens=1)
        assert refused.json()["error"]["code"] == "context_length_exceeded"


@in_loop
async def test_a_chat_that_goes_on_within_its_last_message(tmp_path: Path) -> None:
    async with running(tmp_path) as cluster:
        messages = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "It is"}]
        body = {"model": MODEL, "messages": messages, "max_tokens": 1, "continue_final_message": True}
        response = await cluster.client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        text = await cluster.service.tokenizer.decode(cluster.ranks[0].prompt())
        assert text.endswith("<|im_start|>assistant\nIt is")
        body["messages"] = [*messages[:1], {"role": "assistant", "content": ""}]
        refused = await cluster.client.post("/v1/chat/completions", json=body)
        assert refused.json()["error"]["param"] == "continue_final_message"


@in_loop
async def test_variables_of_the_chat_template(tmp_path: Path) -> None:
    async with running(tmp_path) as cluster:
        accepted = await cluster.chat("hi", chat_template_kwargs={"enable_thinking": False}, max_tokens=1)
        assert accepted.status_code == 200, accepted.text
        refused = await cluster.chat("hi", chat_template_kwargs={"messages": []})
        assert refused.status_code == 400
        assert refused.json()["error"]["message"].startswith("chat_template_kwargs: 'messages' is set by the server")


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"presence_penalty": 2.5}, "presence_penalty", ("less than or equal to 2", "2.5")),
        ({"frequency_penalty": -3}, "frequency_penalty", ("greater than or equal to -2", "-3")),
        ({"repetition_penalty": 0}, "repetition_penalty", ("greater than 0", "0")),
        ({"logit_bias": [5]}, "logit_bias", ()),
        ({"logit_bias": {"a": 1}}, "logit_bias", ("'a' is no token id", "such as '42'")),
        ({"logit_bias": {"-1": 1}}, "logit_bias", ("'-1' is no token id",)),
        ({"logit_bias": {"5": 101}}, "logit_bias", ("the bias of token 5 must be a number from -100 to 100",)),
        ({"logit_bias": {"5": True}}, "logit_bias", ("the bias of token 5",)),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", ("1025", "at most 1024")),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids[0]", ("greater than or equal to 0",)),
        ({"allowed_token_ids": [1] * 1025}, "allowed_token_ids", ("at most 1024",)),
        ({"bad_words": [""]}, "bad_words[0]", ("at least 1 character",)),
        ({"bad_words": ["a"] * 129}, "bad_words", ("at most 128",)),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", ("must be 1 or more, or -1", "got 0")),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", ("-2",)),
        ({"metadata": {"a": 1}}, "metadata.a", ("string",)),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata", ("at most 16",)),
    ],
)
def test_refused(fields: dict[str, Any], param: str, words: tuple[str, ...]) -> None:
    for make in (completion, chat):
        with pytest.raises(ApiError) as caught:
            make(**fields)
        assert caught.value.param == param
        for word in words:
            assert word in caught.value.message


@in_loop
async def test_tokens_outside_of_the_vocabulary_are_refused(tmp_path: Path) -> None:
    async with running(tmp_path) as cluster:
        for fields in ({"logit_bias": {"5000": 1}}, {"allowed_token_ids": [5000]}):
            refused = await cluster.complete(**fields)
            assert refused.status_code == 400
            assert "token id 5000 is not in the model's vocabulary" in refused.json()["error"]["message"]
        assert not cluster.ranks[0].submits


def test_a_chat_goes_on_or_begins_anew() -> None:
    with pytest.raises(ApiError, match="give one of them"):
        chat(continue_final_message=True, add_generation_prompt=True)
