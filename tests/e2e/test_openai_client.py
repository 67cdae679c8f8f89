"""The official client, unmodified, against the running system."""

import json

import httpx
import openai
import pytest

pytestmark = pytest.mark.ray

RAW = "The history of the bicycle began when"


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(base_url=f"{served.base_url}/v1", api_key="unused", max_retries=0, timeout=120) as client:
        yield client


def test_chat(client, served):
    answer = client.chat.completions.create(
        model=served.model,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
        max_tokens=40,
    )
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens > 20


def test_streamed_chat_with_usage_equals_the_answer_in_one_piece(client, served):
    question = {
        "model": served.model,
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name three colours."}],
        "temperature": 0,
        "max_completion_tokens": 48,
    }
    whole = client.chat.completions.create(**question)
    chunks = list(client.chat.completions.create(**question, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == [
        whole.choices[0].finish_reason
    ]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_completion_with_logprobs(client, served):
    answer = client.completions.create(model=served.model, prompt=RAW, temperature=0, max_tokens=12, logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 12
    assert "".join(logprobs.tokens) == answer.choices[0].text
    for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert top[token] == pytest.approx(logprob)
        assert logprob == max(top.values())


def test_chat_logprobs(client, served):
    answer = client.chat.completions.create(
        model=served.model,
        messages=[{"role": "user", "content": "Say yes."}],
        temperature=0,
        max_tokens=5,
        logprobs=True,
        top_logprobs=2,
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    assert all(len(entry.top_logprobs) == 2 and entry.top_logprobs[0].token == entry.token for entry in content)


def test_three_choices_differ_and_are_reproducible(client, served):
    def ask():
        answer = client.completions.create(model=served.model, prompt=RAW, n=3, max_tokens=16, temperature=1, seed=7)
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert answer.usage.completion_tokens == 48
        return [choice.text for choice in answer.choices]

    first = ask()
    assert len(set(first)) == 3
    assert ask() == first


def test_several_prompts_in_one_request(client, served):
    prompts = [RAW, "Water boils at"]
    answer = client.completions.create(model=served.model, prompt=prompts, max_tokens=6, temperature=0)
    single = [
        client.completions.create(model=served.model, prompt=p, max_tokens=6, temperature=0).choices[0].text
        for p in prompts
    ]
    assert [choice.text for choice in answer.choices] == single


def test_a_stop_string_that_spans_two_tokens(client, served):
    ask = {"model": served.model, "prompt": RAW, "temperature": 0, "max_tokens": 24}
    free = client.completions.create(**ask, logprobs=0).choices[0]
    tokens = free.logprobs.tokens
    stop = tokens[5][-1] + tokens[6][:2]
    cut = free.text[: free.text.index(stop)]
    stopped = client.completions.create(**ask, stop=stop).choices[0]
    assert (stopped.text, stopped.finish_reason) == (cut, "stop")
    streamed = list(client.completions.create(**ask, stop=[stop, "never seen"], stream=True))
    assert "".join(chunk.choices[0].text for chunk in streamed if chunk.choices) == cut


def test_stop_token_ids(client, served):
    ask = {"model": served.model, "prompt": RAW, "temperature": 0, "max_tokens": 24}
    free = client.completions.create(**ask).choices[0]
    ids = httpx.post(f"{served.base_url}/tokenize", json={"model": served.model, "prompt": free.text}).json()["tokens"]
    stopped = client.completions.create(**ask, extra_body={"stop_token_ids": [ids[6]]})
    assert stopped.choices[0].finish_reason == "stop"
    assert free.text.startswith(stopped.choices[0].text)
    assert stopped.usage.completion_tokens == ids.index(ids[6]) + 1


def test_utf8_that_spans_tokens_is_never_cut(client, served):
    ask = {"model": served.model, "prompt": "🙂🎉🙂🎉🙂🎉🙂🎉🙂🎉", "temperature": 0, "max_tokens": 48}
    whole = client.completions.create(**ask).choices[0].text
    pieces = [c.choices[0].text for c in client.completions.create(**ask, stream=True) if c.choices]
    assert "".join(pieces) == whole
    assert any(ord(character) > 0xFFFF for character in whole), whole
    assert not any("\ufffd" in piece for piece in pieces[:-1])


def test_closing_the_stream_frees_everything(client, served):
    stream = client.completions.create(
        model=served.model, prompt=RAW, max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    assert served.num_running() >= 1
    stream.close()
    served.wait_until_idle(timeout_s=10)


def test_a_client_that_leaves_before_its_answer_is_noticed(served):
    """Not streamed, with a prompt that takes a while to compute: the connection's end is the only sign."""

    def num_processed() -> int:
        loads = [rank["load"] for rank in served.ranks()]
        return sum(load["num_prompt_tokens"] + load["num_generated_tokens"] for load in loads)

    served.wait_until_idle(timeout_s=20)
    before = num_processed()
    body = {"model": served.model, "prompt": [100 + i % 5000 for i in range(6000)], "max_tokens": 2000}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{served.base_url}/v1/completions",
            json=body | {"ignore_eos": True},
            timeout=httpx.Timeout(30, read=1.0),
        )
    served.wait_until_idle(timeout_s=20)
    assert num_processed() - before < 8000


def test_tokenize_and_back(served):
    text = "Grüße, 世界 🙂"
    answer = httpx.post(f"{served.base_url}/tokenize", json={"model": served.model, "prompt": text}).json()
    assert answer["count"] == len(answer["tokens"])
    back = httpx.post(f"{served.base_url}/detokenize", json={"model": served.model, "tokens": answer["tokens"]})
    assert back.json()["prompt"] == text


def test_models_health_and_ready(client, served):
    assert [model.id for model in client.models.list()] == [served.model]
    assert httpx.get(f"{served.base_url}/health").status_code == 200
    assert httpx.get(f"{served.base_url}/ready").status_code == 200


def test_server_sent_events_are_framed_as_the_api_says(served):
    ask = {"model": served.model, "prompt": RAW, "max_tokens": 3, "temperature": 0, "stream": True}
    with httpx.stream("POST", f"{served.base_url}/v1/completions", json=ask, timeout=60) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = response.read().decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(json.loads(event.removeprefix("data: "))["object"] == "text_completion" for event in events[:-2])
