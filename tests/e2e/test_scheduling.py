"""What a client sees of the scheduler: formats, priorities, explanations, drafts. A cluster of one small rank."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import jsonschema
import openai
import pytest

from tests.e2e.system import Served, ServeProcess, metric, wait_for

pytestmark = [pytest.mark.ray, pytest.mark.model]

MAX_NUM_SEQS = 2
NUM_BLOCKS = 257
STREAM_INTERVAL = 4
CONFIG = f"""
model:
  max_model_len: 1024
pools:
  mixed:
    num_ranks: 1
    threads_per_rank: 1
cache:
  num_blocks: {NUM_BLOCKS}
scheduler:
  policy: priority
  max_num_seqs: 7  # the command line says otherwise
  speculative:
    num_speculative_tokens: 2
    prompt_lookup_max: 4
"""
FLAGS = (
    *("--max-num-seqs", str(MAX_NUM_SEQS), "--stream-interval", str(STREAM_INTERVAL)),
    *("--speculative-num-tokens", "4"),
)
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Rome", "Oslo"]},
        "year": {"type": "integer", "minimum": 1900, "maximum": 2030},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 6}, "minItems": 1, "maxItems": 2},
        "place": {
            "type": "object",
            "properties": {"is_port": {"type": "boolean"}},
            "required": ["is_port"],
            "additionalProperties": False,
        },
    },
    "required": ["city", "year", "tags", "place"],
    "additionalProperties": False,
}
REPETITIVE = "1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2,"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    config = tmp_path_factory.mktemp("config") / "serve.yaml"
    config.write_text(CONFIG)
    with ServeProcess("--config", str(config), *FLAGS) as process:
        system = Served(process.wait_until_ready())
        try:
            yield system
        finally:
            system.close()


@pytest.fixture(scope="module")
def client(small: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{small.base_url}/v1", api_key="unused", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture(autouse=True)
def _leaves_nothing(small: Served) -> Iterator[None]:
    yield
    small.wait_until_idle(timeout_s=30)
    small.check_integrity()


def rank(served: Served) -> dict:
    (figures,) = served.ranks()
    return figures


def explain(served: Served, request_id: str) -> dict:
    """The only sequence of a request; a request that no rank knows yet has none."""
    answer = httpx.get(f"{served.base_url}/v1/requests/{request_id}/explain", timeout=30)
    sequences = answer.json().get("sequences") or [{"state": "unknown"}]
    assert len(sequences) == 1
    return sequences[0]


class Background:
    """Requests under names of the client's choosing, each on a thread; `ended` has their names in order of end."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._threads: list[threading.Thread] = []
        self.ended: list[str] = []
        self.answers: dict[str, dict] = {}

    def start(self, name: str, **body: object) -> None:
        def run() -> None:
            answer = httpx.post(
                f"{self._served.base_url}/v1/completions",
                json={"model": self._served.model, "temperature": 0, "ignore_eos": True, **body},
                headers={"x-request-id": name},
                timeout=120,
            )
            self.ended.append(name)
            self.answers[name] = answer.json()

        thread = threading.Thread(target=run)
        self._threads.append(thread)
        thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(120)
        assert len(self.ended) == len(self._threads)


@contextmanager
def endless(served: Served, name: str) -> Iterator[None]:
    """A stream that has begun, and is left in the end."""
    body = {"model": served.model, "prompt": "Once upon a time", "max_tokens": 900, "ignore_eos": True, "stream": True}
    url = f"{served.base_url}/v1/completions"
    with httpx.stream("POST", url, json=body, headers={"x-request-id": name}, timeout=60) as response:
        lines = response.iter_lines()  # whose end would close the connection
        assert next(lines).startswith("data: ")
        yield
        lines.close()


def until_waiting(served: Served, name: str, num_before: int) -> dict:
    """The explanation of a request once it waits in the router for room, with so many before it."""
    found: dict = {}

    def is_so() -> bool:
        nonlocal found
        found = explain(served, f"cmpl-{name}")
        return found["state"] == "in_router" and found["figures"].get("num_before") == num_before

    wait_for(is_so, 30, lambda: f"{name} waits behind {num_before}; it is {found}")
    return found


@pytest.mark.parametrize("temperature", [0, 1])
def test_an_answer_of_a_schema(client: openai.OpenAI, small: Served, temperature: int) -> None:
    answer = client.chat.completions.create(
        model=small.model,
        messages=[{"role": "user", "content": "Tell me about the capital of France as JSON."}],
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}},
        temperature=temperature,
        seed=3,
        max_tokens=120,
    )
    assert answer.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(answer.choices[0].message.content), SCHEMA)


def test_a_streamed_answer_of_a_schema(client: openai.OpenAI, small: Served) -> None:
    stream = client.chat.completions.create(
        model=small.model,
        messages=[{"role": "user", "content": "Tell me about the capital of Norway as JSON."}],
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}},
        temperature=0,
        max_tokens=120,
        stream=True,
    )
    choices = [chunk.choices[0] for chunk in stream if chunk.choices]
    jsonschema.validate(json.loads("".join(choice.delta.content or "" for choice in choices)), SCHEMA)
    assert choices[-1].finish_reason == "stop"


def test_a_format_that_min_tokens_outlast_ends_one_request_only(client: openai.OpenAI, small: Served) -> None:
    body = {"structured_outputs": {"choice": ["cat", "dog"]}}
    with pytest.raises(openai.InternalServerError) as failure:
        client.completions.create(model=small.model, prompt="A ", max_tokens=16, extra_body=body | {"min_tokens": 9})
    assert failure.value.code == "rank_error"
    assert "min_tokens" in failure.value.message
    answer = client.completions.create(model=small.model, prompt="A ", max_tokens=16, extra_body=body)
    assert answer.choices[0].text in {"cat", "dog"}


def test_a_choice_of_each_of_several(client: openai.OpenAI, small: Served) -> None:
    answer = client.completions.create(
        model=small.model,
        prompt="The best animal is the ",
        extra_body={"structured_outputs": {"choice": ["cat", "dog", "hedgehog"]}},
        n=4,
        seed=1,
        temperature=2,
    )
    texts = [choice.text for choice in answer.choices]
    assert set(texts) <= {"cat", "dog", "hedgehog"}
    assert len(set(texts)) > 1
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}


def test_bad_formats_are_refused_by_field(client: openai.OpenAI, small: Served) -> None:
    bad = {"type": "object", "properties": {"year": {"type": "yearly"}}}
    with pytest.raises(openai.BadRequestError) as refusal:
        client.chat.completions.create(
            model=small.model,
            messages=[{"role": "user", "content": "hi"}],
            response_format={"type": "json_schema", "json_schema": {"name": "bad", "schema": bad}},
        )
    assert refusal.value.param.startswith("response_format")
    assert "yearly" in refusal.value.message
    with pytest.raises(openai.BadRequestError) as refusal:
        client.completions.create(model=small.model, prompt="hi", extra_body={"structured_outputs": {"regex": "[a-z"}})
    assert refusal.value.param.startswith("structured_outputs")


def test_a_high_priority_overtakes_a_full_rank(small: Served) -> None:
    """Two run, one waits; the high one comes last and ends first, and who gave way gets its tokens all the same.

    That two run and no more is what the command line says, and the file does not.
    """
    before = rank(small)["load"]["num_preemptions"]
    background = Background(small)
    low = {f"low-{index}": f"A long story, number {index}: once upon a" for index in range(3)}
    for name, prompt in low.items():
        background.start(name, prompt=prompt, max_tokens=48, priority=10)

    def is_full() -> bool:
        text = httpx.get(f"{small.base_url}/metrics", timeout=30).text
        num_waiting = metric(text, "serried_router_waiting")['{of="requests"}']
        return (rank(small)["load"]["num_running"], num_waiting) == (MAX_NUM_SEQS, 1)

    wait_for(is_full, 30, lambda: f"full; {rank(small)}")
    assert rank(small)["load"]["num_blocks"] == NUM_BLOCKS - 1
    background.start("high", prompt="Water boils at", max_tokens=4, priority=-1)
    background.join()
    assert background.ended[0] == "high"
    victims = [name for name in low if explain(small, f"cmpl-{name}")["num_preemptions"]]
    assert len(victims) == 1
    assert rank(small)["load"]["num_preemptions"] == before + 1
    (victim,) = victims
    events = [event["event"] for event in explain(small, f"cmpl-{victim}")["timeline"]]
    assert events == ["queued", "scheduled", "first_token", "preempted", "resumed", "finished"]
    assert background.answers[victim]["usage"]["completion_tokens"] == 48
    background.start("again", prompt=low[victim], max_tokens=48)
    background.join()
    assert background.answers["again"]["choices"] == background.answers[victim]["choices"]


def test_a_priority_that_is_no_number_is_refused(small: Served) -> None:
    body = {"model": small.model, "prompt": "hi", "priority": 2**40}
    answer = httpx.post(f"{small.base_url}/v1/completions", json=body, timeout=30)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "priority")


def test_a_waiting_request_is_explained_and_an_ended_one_remembered(small: Served) -> None:
    background = Background(small)
    with endless(small, "first"), endless(small, "second"):
        background.start("third", prompt="Water boils at", max_tokens=2)
        waiting = until_waiting(small, "third", 0)
        background.start("fourth", prompt="Water boils at", max_tokens=2)
        behind = until_waiting(small, "fourth", 1)
        running = explain(small, "cmpl-first")
    assert waiting["reason"] == behind["reason"] == "placement"
    assert "waits for room on one of 1 ranks" in waiting["message"]
    assert "1 before it" in behind["message"]
    assert (running["state"], running["reason"]) == ("running", "")
    assert running["num_generated_tokens"] >= 1
    background.join()
    assert explain(small, "cmpl-first")["state"] == "finished (abort)"
    ended = explain(small, background.answers["third"]["id"])
    assert ended["state"] == "finished (length)"
    assert ended["num_generated_tokens"] == 2
    assert ended["position"] is None
    assert [event["event"] for event in ended["timeline"]] == ["queued", "scheduled", "first_token", "finished"]
    times = [event["at_s"] for event in ended["timeline"]]
    assert times[0] == 0
    assert times == sorted(times)


def test_a_request_that_nobody_knows_is_not_found(small: Served) -> None:
    answer = httpx.get(f"{small.base_url}/v1/requests/cmpl-nobody/explain", timeout=30)
    assert answer.status_code == 404


def test_drafts_come_true_and_change_no_text(small: Served, served: Served) -> None:
    """`served` runs without speculation."""
    body = {"prompt": REPETITIVE, "max_tokens": 32, "temperature": 0, "ignore_eos": True}

    def ask(system: Served) -> dict:
        answer = httpx.post(f"{system.base_url}/v1/completions", json={"model": system.model} | body, timeout=60)
        return dict(answer.json()["choices"][0])

    def figures(system: Served) -> dict[str, float]:
        text = httpx.get(f"{system.base_url}/metrics", timeout=30).text
        names = ("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens", "engine_steps")
        return {name: sum(metric(text, f"serried_{name}_total").values()) for name in names}

    small.wait_until_idle(timeout_s=30)
    before = figures(small)
    assert ask(small) == ask(served)

    def grown() -> dict[str, float]:
        return {name: value - before[name] for name, value in figures(small).items()}

    # A rank tells its figures with every step and once a second.
    wait_for(lambda: grown()["engine_steps"] > 0, 10, lambda: f"{grown()}")
    assert grown()["spec_decode_num_accepted_tokens"] >= 0.5 * grown()["spec_decode_num_draft_tokens"] > 0
    assert grown()["engine_steps"] <= 16
    assert figures(served)["spec_decode_num_draft_tokens"] == 0


def test_an_output_that_repeats_itself_ends(client: openai.OpenAI, small: Served) -> None:
    answer = client.completions.create(
        model=small.model,
        prompt=REPETITIVE,
        temperature=0,
        max_tokens=60,
        extra_body={"repetition_detection": {"max_pattern_size": 12, "min_count": 2, "min_pattern_size": 4}},
    )
    assert answer.choices[0].finish_reason == "repetition"
    assert answer.usage.completion_tokens == 24


def test_a_prefix_is_shared_within_its_salt_only(small: Served) -> None:
    """A prompt of 40 tokens has two full blocks of 16."""
    background = Background(small)

    def num_cached(name: str, salt: str, **more: object) -> int:
        background.start(name, prompt=list(range(300, 340)), max_tokens=1, cache_salt=salt, **more)
        background.join()
        return int(explain(small, f"cmpl-{name}")["num_cached_tokens"])

    assert num_cached("salted", "a") == 0
    assert num_cached("salted-otherwise", "b") == 0
    assert num_cached("salted-again", "a") == 32
    assert num_cached("unread", "a", skip_reading_prefix_cache=True) == 0


def test_streams_come_in_pieces_of_several_tokens(client: openai.OpenAI, small: Served) -> None:
    stream = client.completions.create(
        model=small.model,
        prompt="The history of the bicycle began when",
        max_tokens=21,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    pieces = [chunk.choices[0].text for chunk in stream if chunk.choices]
    whole = client.completions.create(
        model=small.model,
        prompt="The history of the bicycle began when",
        max_tokens=21,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    assert "".join(pieces) == whole.choices[0].text
    assert 3 <= len([piece for piece in pieces if piece]) <= 2 + 20 // STREAM_INTERVAL
