"""Answers that show their prompt: `echo`, and how likely its tokens were."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from tests.router.fake_cluster import Cluster, in_loop, running, until

REPLY = "Hello"


async def streamed(cluster: Cluster, **fields: Any) -> tuple[str, list[dict[str, Any]]]:
    """The text, and what stands in `logprobs`, one after the other."""
    response = await cluster.complete(stream=True, **fields)
    assert response.status_code == 200, response.text
    choices = [json.loads(line[6:])["choices"][0] for line in response.text.split("\n\n") if line.startswith("data: {")]
    return "".join(choice["text"] for choice in choices), [c["logprobs"] for c in choices if c["logprobs"]]


@in_loop
async def test_echo(tmp_path: Path) -> None:
    async with running(tmp_path, reply=REPLY) as cluster:
        for prompt, text in (("hi, é", "hi, é"), ([7, 8, 9], await cluster.service.tokenizer.decode([7, 8, 9]))):
            response = await cluster.complete(prompt, echo=True, n=2)
            assert [choice["text"] for choice in response.json()["choices"]] == [text + REPLY] * 2
            assert await streamed(cluster, prompt=prompt, echo=True) == (text + REPLY, [])
        response = await cluster.complete("hi", echo=True, truncate_prompt_tokens=1)
        assert response.json()["choices"][0]["text"] == "i" + REPLY
        assert cluster.ranks[0].submits[-1].sampling.num_prompt_logprobs is None


@in_loop
async def test_echo_with_logprobs(tmp_path: Path) -> None:
    async with running(tmp_path, reply=REPLY) as cluster:
        response = await cluster.complete("abc", echo=True, logprobs=2)
        shown = response.json()["choices"][0]["logprobs"]
        assert shown["tokens"] == list("abc" + REPLY)
        assert shown["token_logprobs"] == [None, -1.0, -2.0] + [-0.5] * len(REPLY)
        assert shown["top_logprobs"][0] is None
        assert [len(each) for each in shown["top_logprobs"][1:]] == [2] * (2 + len(REPLY))
        assert shown["text_offset"] == list(range(3 + len(REPLY)))
        text, parts = await streamed(cluster, prompt="abc", echo=True, logprobs=2)
        assert text == "abc" + REPLY
        for name, expected in shown.items():
            assert [value for part in parts for value in part[name]] == expected


@in_loop
async def test_prompt_logprobs(tmp_path: Path) -> None:
    async with running(tmp_path, reply=REPLY) as cluster:
        response = await cluster.complete(["ab", "c"], prompt_logprobs=1, max_tokens=1)
        first, second = (choice["prompt_logprobs"] for choice in response.json()["choices"])
        top, own = await cluster.service.tokenizer.encode("ab", add_special_tokens=False)
        assert top != 0
        assert first == [
            None,
            {
                "0": {"logprob": -0.1, "rank": 1, "decoded_token": "!"},
                str(own): {"logprob": -1.0, "rank": 7, "decoded_token": "b"},
            },
        ]
        assert second == [None]
        response = await cluster.chat("hi", prompt_logprobs=0, max_tokens=1)
        body = response.json()
        assert len(body["prompt_logprobs"]) == body["usage"]["prompt_tokens"]
        assert all(len(entry) == 1 for entry in body["prompt_logprobs"][1:])


@in_loop
async def test_they_are_not_asked_for_again_when_a_rank_is_lost(tmp_path: Path) -> None:
    async with running(tmp_path, reply=REPLY, num_ranks=2) as cluster:
        for rank in cluster.ranks:
            rank.allowance = 2
        waiting = asyncio.create_task(cluster.complete("abc", prompt_logprobs=0))
        await until(lambda: any(len(rank.live) == 1 and rank.allowance == 0 for rank in cluster.ranks))
        (rank,) = (rank for rank in cluster.ranks if rank.live)
        (other,) = (each for each in cluster.ranks if each is not rank)
        rank.kill()
        await until(lambda: len(other.submits) == 1)
        for each in cluster.ranks:
            each.allow(float("inf"))
        assert len((await waiting).json()["choices"][0]["prompt_logprobs"]) == 3
        assert other.submits[0].sampling.num_prompt_logprobs is None
