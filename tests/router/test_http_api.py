"""The whole router over real sockets, with the unmodified OpenAI client."""

from __future__ import annotations

import asyncio
import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from openai import APIStatusError, NotFoundError

from router.control_messages import Members, QueueCounts
from tests.router.fake_cluster import MODEL, in_loop, running, until
from tests.router.small_tokenizer import IM_END, byte_tokenizer
from tests.router.test_tools import TOOLS


def sse(text: str) -> list[dict[str, object] | str]:
    """The events of a stream, decoded."""
    assert text.endswith("\n\n")
    events = [event.removeprefix("data: ") for event in text.split("\n\n")[:-1]]
    return [event if event == "[DONE]" else json.loads(event) for event in events]


@in_loop
async def test_chat_is_answered(tmp_path: Path) -> None:
    async with running(tmp_path) as cluster:
        answer = await cluster.openai.chat.completions.create(
            model=MODEL,
            messages=[
                {"role": "developer", "content": "be brief"},
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            ],
        )
        assert answer.choices[0].message.content == "Hello, world!"
        assert answer.choices[0].message.role == "assistant"
        assert answer.choices[0].finish_reason == "stop"
        rank = cluster.ranks[0]
        assert rank.prompt_text() == (
            "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\n"
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(rank.prompt())
        assert answer.usage.completion_tokens == len("Hello, world!") + 1  # with the end-of-sequence token
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == 3
        assert rank.submits[0].sampling.max_tokens == 256 - len(rank.prompt())


@in_loop
async def test_chat_streams_with_usage(tmp_path: Path) -> None:
    async with running(tmp_path) as cluster:
        stream = await cluster.openai.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello, world!"
        assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["stop"]
        assert chunks[-1].choices == []
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 14
        assert all(chunk.usage is None for chunk in chunks[:-1])
        assert len({chunk.id for chunk in chunks}) == 1


@in_loop
async def test_a_stream_ends_with_done_and_has_no_usage_unless_asked(tmp_path: Path) -> None:
    async with running(tmp_path) as cluster:
        response = await cluster.chat(stream=True)
        assert response.headers["content-type"].startswith("text/event-stream")
        events = sse(response.text)
        assert events[-1] == "[DONE]"
        assert all("usage" not in event for event in events[:-1])


@in_loop
async def test_the_first_token_is_sent_at_once(tmp_path: Path) -> None:
    async with running(tmp_path) as cluster:
        cluster.ranks[0].allowance = 1
        async with cluster.client.stream(
            "POST", "/v1/completions", json={"model": MODEL, "prompt": "hi", "stream": True}
        ) as response:
            lines = response.aiter_lines()
            first = json.loads((await anext(lines)).removeprefix("data: "))
            assert first["choices"][0]["text"] == "H"
            cluster.ranks[0].allow(float("inf"))
            assert [line async for line in lines][-2] == "data: [DONE]"


@in_loop
async def test_tokens_are_sent_by_the_stream_interval(tmp_path: Path) -> None:
    async with running(tmp_path, reply="abcdefgh", stream_interval=3) as cluster:
        rank = cluster.ranks[0]
        rank.allowance = 2
        async with cluster.client.stream(
            "POST", "/v1/completions", json={"model": MODEL, "prompt": "hi", "stream": True, "n": 2}
        ) as response:
            lines = response.aiter_lines()

            async def events(num_events: int) -> dict[int, str]:
                texts = {}
                while len(texts) < num_events:
                    if line := await anext(lines):
                        choice = json.loads(line.removeprefix("data: "))["choices"][0]
                        texts[choice["index"]] = choice["text"]
                return texts

            assert await events(2) == {0: "a", 1: "a"}
            for text in ("bcd", "efg"):
                for _ in text:
                    rank.allow(2)  # one for each choice
                    await until(lambda: rank.allowance == 0)
                assert await events(2) == {0: text, 1: text}
            rank.allow(float("inf"))
            rest = [json.loads(line[6:])["choices"][0] async for line in lines if line and "[DONE]" not in line]
        assert sorted((choice["index"], choice["text"], choice["finish_reason"]) for choice in rest) == [
            (0, "h", "stop"),
            (1, "h", "stop"),
        ]


@pytest.mark.parametrize("stream_interval", [2, 5, 100])
@in_loop
async def test_the_stream_interval_changes_no_text(tmp_path: Path, stream_interval: int) -> None:
    text = "日本語 😀 é and the end"
    async with running(tmp_path, reply=text, stream_interval=stream_interval) as cluster:
        for fields in ({}, {"stop": "the end"}, {"logprobs": 1}):
            whole = (await cluster.complete(max_tokens=60, **fields)).json()["choices"][0]
            events = sse((await cluster.complete(max_tokens=60, stream=True, **fields)).text)
            choices = [event["choices"][0] for event in events[:-1]]  # type: ignore[index, call-overload]
            assert "".join(choice["text"] for choice in choices) == whole["text"]
            assert choices[-1]["finish_reason"] == whole["finish_reason"] == "stop"
            if "logprobs" in fields:
                tokens = [token for choice in choices for token in choice["logprobs"]["tokens"]]
                assert tokens == whole["logprobs"]["tokens"]
            assert len(choices) <= 2 + len(text.encode()) // stream_interval


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_a_request_that_repeats_itself_ends_with_that_reason(tmp_path: Path, stream: bool) -> None:
    async with running(tmp_path, reply="abababab") as cluster:
        cluster.ranks[0].repeats_after = 6
        text = (await cluster.complete(stream=stream)).text
        last = (sse(text)[-2] if stream else json.loads(text))["choices"][0]  # type: ignore[index, call-overload]
        assert (last["finish_reason"], last["stop_reason"]) == ("repetition", None)
        assert stream or last["text"] == "ababab"


@in_loop
async def test_completions_with_logprobs(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    euro = tokenizer.encode("€").ids
    reply = [*tokenizer.encode("ab").ids, *euro]
    async with running(tmp_path, reply=reply) as cluster:
        answer = await cluster.openai.completions.create(model=MODEL, prompt="hi", logprobs=2, max_tokens=5)
        choice = answer.choices[0]
        assert choice.text == "ab€"
        assert choice.finish_reason == "length"
        assert choice.logprobs is not None
        assert choice.logprobs.tokens == ["a", "b", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac"]
        assert choice.logprobs.token_logprobs == [-0.5] * 5
        assert choice.logprobs.top_logprobs is not None
        assert choice.logprobs.top_logprobs[0] == {"!": -1.0, '"': -2.0}
        assert choice.logprobs.text_offset is not None
        assert choice.logprobs.text_offset[:3] == [0, 1, 2]

        stream = await cluster.openai.completions.create(
            model=MODEL, prompt="hi", logprobs=0, max_tokens=5, stream=True
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].text for chunk in chunks) == "ab€"
        assert sum(len(chunk.choices[0].logprobs.tokens or []) for chunk in chunks if chunk.choices[0].logprobs) == 5


@in_loop
async def test_chat_logprobs_carry_bytes(tmp_path: Path) -> None:
    async with running(tmp_path, reply="é") as cluster:
        answer = await cluster.openai.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], logprobs=True, top_logprobs=1
        )
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.content is not None
        assert [entry.bytes for entry in logprobs.content] == [[0xC3], [0xA9]]  # none for the end of sequence
        assert logprobs.content[0].top_logprobs[0].logprob == -1.0


@in_loop
async def test_n_choices_have_seeds_of_their_own(tmp_path: Path) -> None:
    async with running(tmp_path) as cluster:
        answer = await cluster.openai.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], n=3, seed=-1
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert {choice.message.content for choice in answer.choices} == {"Hello, world!"}
        assert [submit.sampling.seed for submit in cluster.ranks[0].submits] == [2**64 - 1, 0, 1]
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 3 * 14

        stream = await cluster.openai.completions.create(model=MODEL, prompt="hi", n=3, stream=True)
        texts = {0: "", 1: "", 2: ""}
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].text
        assert set(texts.values()) == {"Hello, world!"}
        assert len({submit.sampling.seed for submit in cluster.ranks[0].submits[3:]}) == 3


@in_loop
async def test_several_prompts_are_indexed_prompt_major(tmp_path: Path) -> None:
    async with running(tmp_path) as cluster:
        answer = await cluster.openai.completions.create(model=MODEL, prompt=["a", "bc"], n=2, seed=7, max_tokens=3)
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        rank = cluster.ranks[0]
        assert [rank.prompt_text(i) for i in range(4)] == ["a", "a", "bc", "bc"]
        assert [submit.sampling.seed for submit in rank.submits] == [7, 8, 7, 8]
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == 3
        await cluster.openai.completions.create(model=MODEL, prompt=[[1, 2], [3]], max_tokens=1)
        assert [rank.prompt(4), rank.prompt(5)] == [[1, 2], [3]]
        await cluster.openai.completions.create(model=MODEL, prompt=[5, 6, 7], max_tokens=1)
        assert rank.prompt() == [5, 6, 7]


@in_loop
async def test_sampling_parameters_reach_the_rank(tmp_path: Path) -> None:
    async with running(tmp_path) as cluster:
        response = await cluster.complete(
            temperature=0, top_p=0.5, top_k=-1, min_p=0.25, seed=5, stop="zz", stop_token_ids=[9], ignore_eos=True,
            max_tokens=4, user="u", best_of=1, presence_penalty=0, logit_bias=None, echo=False,
        )  # fmt: skip
        assert response.status_code == 200
        sampling = cluster.ranks[0].submits[0].sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.0, 0.5, 0, 0.25)
        assert (sampling.seed, sampling.stop, sampling.stop_token_ids) == (5, ("zz",), (9,))
        assert sampling.ignore_eos
        assert sampling.max_tokens == 4


@in_loop
async def test_default_max_tokens(tmp_path: Path) -> None:
    async with running(tmp_path) as cluster:
        await cluster.complete("hi")
        await cluster.complete("x" * 250)
        await cluster.chat("hi")
        sampled = [submit.sampling.max_tokens for submit in cluster.ranks[0].submits]
        assert sampled == [16, 6, 256 - len(cluster.ranks[0].prompt())]


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_a_stop_string_across_tokens_is_cut(tmp_path: Path, stream: bool) -> None:
    async with running(tmp_path, reply="one STOP two") as cluster:
        response = await cluster.complete(stop=["never", "STOP"], stream=stream)
        if stream:
            events = [event["choices"][0] for event in sse(response.text)[:-1]]  # type: ignore[index, call-overload]
            text, last = "".join(event["text"] for event in events), events[-1]
        else:
            last = response.json()["choices"][0]
            text = last["text"]
        assert text == "one "
        assert (last["finish_reason"], last["stop_reason"]) == ("stop", "STOP")


@in_loop
async def test_what_only_looked_like_a_stop_string_is_sent_in_the_end(tmp_path: Path) -> None:
    async with running(tmp_path, reply="one STO") as cluster:
        answer = (await cluster.complete(stop="STOP")).json()["choices"][0]
        assert (answer["text"], answer["finish_reason"], answer["stop_reason"]) == ("one STO", "stop", None)


@in_loop
async def test_a_stop_token_leaves_no_text(tmp_path: Path) -> None:
    bang = byte_tokenizer().token_to_id("!")
    async with running(tmp_path, reply="a!b") as cluster:
        answer = (await cluster.complete(stop_token_ids=[bang])).json()["choices"][0]
        assert (answer["text"], answer["finish_reason"], answer["stop_reason"]) == ("a", "stop", bang)


@in_loop
async def test_characters_across_tokens_come_whole(tmp_path: Path) -> None:
    text = "日本語 😀 é"
    async with running(tmp_path, reply=text) as cluster:
        events = sse((await cluster.complete(stream=True, max_tokens=40)).text)
        texts = [event["choices"][0]["text"] for event in events[:-1]]  # type: ignore[index, call-overload]
        assert "".join(texts) == text
        assert not any("\N{REPLACEMENT CHARACTER}" in part for part in texts)
        cut = (await cluster.complete(max_tokens=5, prompt="x")).json()["choices"][0]["text"]
        assert cut == "日本\N{REPLACEMENT CHARACTER}" or cut.startswith("日本")


@in_loop
async def test_models_tokenize_detokenize(tmp_path: Path) -> None:
    async with running(tmp_path) as cluster:
        assert [model.id async for model in cluster.openai.models.list()] == [MODEL]
        assert (await cluster.openai.models.retrieve(MODEL)).id == MODEL
        with pytest.raises(NotFoundError):
            await cluster.openai.models.retrieve("other/one")
        tokens = (await cluster.client.post("/tokenize", json={"prompt": "aé"})).json()
        assert tokens["count"] == 3
        assert tokens["max_model_len"] == 256
        back = await cluster.client.post("/detokenize", json={"tokens": tokens["tokens"]})
        assert back.json() == {"prompt": "aé"}
        chat = await cluster.client.post("/tokenize", json={"messages": [{"role": "user", "content": "x"}]})
        assert byte_tokenizer().token_to_id(IM_END) in chat.json()["tokens"]
        assert (await cluster.client.post("/detokenize", json={"tokens": [99_999]})).status_code == 400
        assert (await cluster.client.post("/tokenize", json={})).status_code == 400
        fields: dict[str, Any]
        for fields in ({"tools": TOOLS}, {"continue_final_message": True}, {"chat_template_kwargs": {"a": 1}}):
            refused = await cluster.client.post("/tokenize", json={"prompt": "a", **fields})
            assert refused.json()["error"]["param"] == next(iter(fields))


@in_loop
async def test_a_conversation_has_the_tokens_that_it_is_answered_by(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    forms: list[dict[str, Any]] = [{}, {"continue_final_message": True}, {"add_generation_prompt": False}]
    async with running(tmp_path) as cluster:
        for index, fields in enumerate(forms):
            body = {"messages": messages, **fields}
            told = (await cluster.client.post("/tokenize", json=body)).json()
            answer = await cluster.client.post("/v1/chat/completions", json={"max_tokens": 4, **body})
            assert answer.status_code == 200
            assert told["tokens"] == cluster.ranks[0].prompt(index)
        told = (await cluster.client.post("/tokenize", json={"messages": messages, "tools": TOOLS})).json()
        assert json.dumps(TOOLS[0]["function"]) in byte_tokenizer().decode(told["tokens"])


@in_loop
async def test_probes_and_the_version(tmp_path: Path) -> None:
    async with running(tmp_path) as cluster:
        for path in ("/health", "/ready"):
            assert (await cluster.client.head(path)).status_code == 200
        assert (await cluster.client.get("/version")).json() == {"version": metadata.version("serried")}


@in_loop
async def test_health_ready_metrics_openapi(tmp_path: Path) -> None:
    async with running(tmp_path) as cluster:
        assert (await cluster.client.get("/health")).status_code == 200
        ready = await cluster.client.get("/ready")
        assert (ready.status_code, ready.json()["num_ranks_connected"]) == (200, 1)
        await cluster.complete()
        await cluster.complete(max_tokens=0)
        metrics = (await cluster.client.get("/metrics")).text
        assert 'serried_kv_cache_usage_perc{pool="mixed",rank="mixed/0"} 0.25' in metrics
        assert 'serried_prompt_tokens_total{pool="mixed",rank="mixed/0"} 7.0' in metrics
        labels = '{pool="mixed",rank="mixed/0"}'
        assert f"serried_num_requests_deferred{labels} 2.0" in metrics
        assert f"serried_num_kv_loads{labels} 3.0" in metrics
        assert f"serried_spec_decode_num_draft_tokens_total{labels} 40.0" in metrics
        assert f"serried_spec_decode_num_accepted_tokens_total{labels} 30.0" in metrics
        assert f"serried_estimated_flops_total{labels} 5e+09" in metrics
        assert f"serried_estimated_bytes_total{labels} 6e+09" in metrics
        assert f"serried_engine_busy_seconds_total{labels} 1.5" in metrics
        assert 'serried_requests_total{outcome="finished"} 1.0' in metrics
        assert 'serried_refused_total{cause="invalid_request"} 1.0' in metrics
        assert "serried_time_to_first_token_seconds_count 1.0" in metrics
        assert "serried_num_requests_in_flight 0.0" in metrics
        paths = (await cluster.client.get("/openapi.json")).json()["paths"]
        schema = paths["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert "prompt" in schema["properties"]
        assert "$ref" not in json.dumps(schema)
        cluster.control.tell(QueueCounts(5, 7, 3, 2, 1))
        await until(lambda: cluster.counted("serried_queue_messages_ignored") == {"": 1})
        assert cluster.counted("serried_queue_refused") == {"max_num_queued_reqs": 3, "max_num_queued_tokens": 2}
        cluster.control.tell(Members([]))
        await until(lambda: not cluster.service.pool.links)
        ready = await cluster.client.get("/ready")
        assert ready.status_code == 503
        assert ready.json() == {
            "ready": False,
            "control_connected": True,
            "num_ranks_connected": 0,
            "shutting_down": False,
        }


@in_loop
async def test_request_ids_are_echoed(tmp_path: Path) -> None:
    async with running(tmp_path) as cluster:
        given = await cluster.client.get("/health", headers={"x-request-id": "abc"})
        assert given.headers["x-request-id"] == "abc"
        made = await cluster.client.get("/nowhere", headers={"x-request-id": "with space"})
        assert len(made.headers["x-request-id"]) == 32


@in_loop
async def test_requests_beyond_the_limit_are_refused_and_the_rest_is_served(tmp_path: Path) -> None:
    async with running(tmp_path, max_num_queued_reqs=4) as cluster:
        cluster.ranks[0].allowance = 0
        held = [asyncio.create_task(cluster.complete(max_tokens=2)) for _ in range(3)]
        await until(lambda: len(cluster.ranks[0].submits) == 3)
        refused = await cluster.complete(n=2)
        assert refused.status_code == 503
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        error = refused.json()["error"]
        assert (error["code"], error["type"]) == ("max_num_queued_reqs", "overloaded_error")
        assert "limit is 4" in error["message"]
        held.append(asyncio.create_task(cluster.complete(max_tokens=2)))
        await until(lambda: len(cluster.ranks[0].submits) == 4)
        with pytest.raises(APIStatusError) as caught:
            await cluster.openai.completions.create(model=MODEL, prompt="x")
        assert caught.value.status_code == 503
        cluster.ranks[0].allow(float("inf"))
        assert [response.status_code for response in await asyncio.gather(*held)] == [200] * 4


@in_loop
async def test_prompt_tokens_beyond_the_limit_are_refused_until_prefill_is_done(tmp_path: Path) -> None:
    async with running(tmp_path, max_num_queued_tokens=10) as cluster:
        cluster.ranks[0].allowance = 0
        held = asyncio.create_task(cluster.complete("x" * 8, max_tokens=2))
        await until(lambda: len(cluster.ranks[0].submits) == 1)
        refused = await cluster.complete("yyy")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "max_num_queued_tokens")
        assert cluster.taken.requests == 1
        cluster.ranks[0].allow(1)
        await until(lambda: cluster.taken.tokens == 0)
        accepted = asyncio.create_task(cluster.complete("yyy", max_tokens=2))
        await until(lambda: len(cluster.ranks[0].submits) == 2)
        cluster.ranks[0].allow(float("inf"))
        assert (await held).status_code == (await accepted).status_code == 200


@in_loop
async def test_a_limit_of_zero_refuses_everything(tmp_path: Path) -> None:
    async with running(tmp_path, max_num_queued_reqs=0) as cluster:
        assert (await cluster.chat()).status_code == 503
