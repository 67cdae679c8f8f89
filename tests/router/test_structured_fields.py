"""Fields about the output's form, and about scheduling: what reaches the rank, and what is refused by name."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rank_scheduler.messages import Grammar, GrammarKind, Repetition, Submit
from router import grammar_check
from tests.router.fake_cluster import MODEL, TIMEOUT_S, Cluster, in_loop, running
from tests.router.test_bad_input import check_error

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}, "required": ["b", "a"]}
SCHEMA_TEXT = json.dumps(SCHEMA, separators=(",", ":"))
LARK = 'start: "a" | "b"'


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[asyncio.Runner, Cluster]]:
    """One router for the many cases, on a loop that turns only while a case runs."""
    with asyncio.Runner() as runner:
        context = running(tmp_path_factory.mktemp("model"))
        cluster = runner.run(context.__aenter__())
        yield runner, cluster
        runner.run(context.__aexit__(None, None, None))


def ask(shared: tuple[asyncio.Runner, Cluster], route: str, fields: dict[str, Any]) -> httpx.Response:
    runner, cluster = shared
    work = cluster.chat(**fields) if route == "chat" else cluster.complete(**fields)
    return runner.run(asyncio.wait_for(work, TIMEOUT_S))


def json_schema(**fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": fields}}


GOOD: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "text": ({"response_format": {"type": "text"}}, {}),
    "null": ({"response_format": None, "structured_outputs": None, "guided_json": None, "priority": None}, {}),
    "json_object": ({"response_format": {"type": "json_object"}}, {"grammar": Grammar(GrammarKind.JSON_OBJECT)}),
    "json_schema": (
        json_schema(name="answer", schema=SCHEMA, strict=True, description="an answer"),
        {"grammar": Grammar(GrammarKind.JSON_SCHEMA, SCHEMA_TEXT)},
    ),
    "schema beyond ASCII": (
        json_schema(name="x", schema={"const": "日本 😀"}),
        {"grammar": Grammar(GrammarKind.JSON_SCHEMA, '{"const":"日本 😀"}')},
    ),
    "structured json": (
        {"structured_outputs": {"json": SCHEMA, "regex": None}},
        {"grammar": Grammar(GrammarKind.JSON_SCHEMA, SCHEMA_TEXT)},
    ),
    "structured json as text": (
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        {"grammar": Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))},
    ),
    "structured regex": (
        {"structured_outputs": {"regex": "[a-z/]+"}},
        {"grammar": Grammar(GrammarKind.REGEX, "[a-z/]+")},
    ),
    "structured choice": (
        {"structured_outputs": {"choice": ["yes", "né"]}},
        {"grammar": Grammar(GrammarKind.CHOICE, '["yes","né"]')},
    ),
    "structured grammar": ({"structured_outputs": {"grammar": LARK}}, {"grammar": Grammar(GrammarKind.LARK, LARK)}),
    "structured json_object": (
        {"structured_outputs": {"json_object": True}},
        {"grammar": Grammar(GrammarKind.JSON_OBJECT)},
    ),
    "guided_json": ({"guided_json": SCHEMA}, {"grammar": Grammar(GrammarKind.JSON_SCHEMA, SCHEMA_TEXT)}),
    "guided_regex": ({"guided_regex": "a|b"}, {"grammar": Grammar(GrammarKind.REGEX, "a|b")}),
    "guided_choice": ({"guided_choice": ["a"]}, {"grammar": Grammar(GrammarKind.CHOICE, '["a"]')}),
    "guided_grammar": ({"guided_grammar": LARK}, {"grammar": Grammar(GrammarKind.LARK, LARK)}),
    "text and another": (
        {"response_format": {"type": "text"}, "guided_regex": "a"},
        {"grammar": Grammar(GrammarKind.REGEX, "a")},
    ),
    "priority 0": ({"priority": 0}, {}),
    "cache_salt": ({"cache_salt": "tenant-ü"}, {"cache_salt": "tenant-ü"}),
    "skip_reading_prefix_cache": ({"skip_reading_prefix_cache": True}, {"reads_prefix_cache": False}),
    "read the prefix cache": ({"skip_reading_prefix_cache": False}, {}),
    "min_tokens": ({"min_tokens": 5, "max_tokens": 5}, {"min_tokens": 5}),
    "min_tokens with a grammar": (
        {"min_tokens": 2, "guided_regex": "aa+"},
        {"min_tokens": 2, "grammar": Grammar(GrammarKind.REGEX, "aa+")},
    ),
    "min_tokens 0": ({"min_tokens": 0}, {}),
    "repetition": (
        {"repetition_detection": {"max_pattern_size": 20, "min_pattern_size": 2, "min_count": 4}},
        {"repetition": Repetition(20, 4, 2)},
    ),
    "repetition of any size": (
        {"repetition_detection": {"max_pattern_size": 1, "min_count": 2}},
        {"repetition": Repetition(1, 2, 1)},
    ),
}


@pytest.mark.parametrize("route", ["chat", "completions"])
@pytest.mark.parametrize("case", GOOD)
def test_what_reaches_the_rank(shared: tuple[asyncio.Runner, Cluster], case: str, route: str) -> None:
    fields, expected = GOOD[case]
    response = ask(shared, route, fields)
    assert response.status_code == 200, response.text
    submit = shared[1].ranks[0].submits[-1]
    assert submit.request_id == response.json()["id"]
    plain = Submit(submit.id, submit.token_ids, submit.sampling, submit.request_id)
    found = {name: getattr(submit, name) for name in Submit.__struct_fields__}
    found = {name: value for name, value in found.items() if value != getattr(plain, name)}
    if submit.sampling.min_tokens:
        found["min_tokens"] = submit.sampling.min_tokens
    if submit.sampling.repetition is not None:
        found["repetition"] = submit.sampling.repetition
    assert found == expected


LONG = "x" * 65_537
BAD: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "format that is no object": ({"response_format": "json"}, "response_format", ("'json'",)),
    "format without type": ({"response_format": {}}, "response_format.type", ("missing",)),
    "unknown format": ({"response_format": {"type": "xml"}}, "response_format.type", ("'json_schema'", "'xml'")),
    "unknown field of a format": (
        {"response_format": {"type": "text", "x": 1}}, "response_format.x", ("unknown field",)
    ),
    "no schema": ({"response_format": {"type": "json_schema"}}, "response_format", ("json_schema goes with",)),
    "a schema too many": (
        {"response_format": {"type": "json_object", "json_schema": {"name": "x", "schema": {}}}},
        "response_format", ("json_schema goes with",),
    ),
    "schema without name": (json_schema(schema={}), "response_format.json_schema.name", ("missing",)),
    "schema with a wrong name": (json_schema(name="a b", schema={}), "response_format.json_schema.name", ("'a b'",)),
    "format without schema": (json_schema(name="x"), "response_format.json_schema.schema", ("missing",)),
    "schema as text": (
        json_schema(name="x", schema="{}"), "response_format.json_schema.schema", ("must be a JSON schema",)
    ),
    "schema too large": (
        json_schema(name="x", schema={"const": LONG}), "response_format.json_schema.schema",
        ("65549 bytes", "at most 65536"),
    ),
    "schema that is wrong": (
        json_schema(name="x", schema={"type": "objec"}), "response_format.json_schema",
        ("objec", "correct or simplify it"),
    ),
    "schema that nothing fits": (
        json_schema(name="x", schema={"allOf": [{"type": "string"}, {"type": "null"}]}),
        "response_format.json_schema", ("Unsatisfiable",),
    ),
    "nothing structured": ({"structured_outputs": {}}, "structured_outputs", ("exactly one of json, regex",)),
    "json_object false": ({"structured_outputs": {"json_object": False}}, "structured_outputs", ("exactly one of",)),
    "two at once": ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", ("exactly one of",)),
    "unknown structure": (
        {"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", ("unknown field",)
    ),
    "json of a wrong type": ({"structured_outputs": {"json": 5}}, "structured_outputs.json", ("a JSON schema",)),
    "json that is none": ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", ("or as its text",)),
    "json that is no object": ({"structured_outputs": {"json": "[]"}}, "structured_outputs.json", ("an object",)),
    "json that is too deep": (
        {"structured_outputs": {"json": "[" * 20_000}}, "structured_outputs.json", ("or as its text",)
    ),
    "empty regex": ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex", ("must not be empty",)),
    "wrong regex": ({"structured_outputs": {"regex": "a("}}, "structured_outputs.regex", ("unclosed group",)),
    "regex of a wrong type": ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex", ("string", "got 5")),
    "regex too large": ({"structured_outputs": {"regex": LONG}}, "structured_outputs.regex", ("65537", "65536")),
    "no choices": ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", ("one at least",)),
    "empty choice": ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice", ("none of them",)),
    "numbers to choose": ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice", ("list of strings",)),
    "too many choices": ({"structured_outputs": {"choice": ["a"] * 4097}}, "structured_outputs.choice", ("4096",)),
    "choices too large": (
        {"structured_outputs": {"choice": [LONG]}}, "structured_outputs.choice", ("at most 65536",)
    ),
    "wrong grammar": ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs.grammar", ("unknown name",)),
    "grammar too large": (
        {"structured_outputs": {"grammar": LARK + " " * 16_384}}, "structured_outputs.grammar", ("at most 16384",)
    ),
    "blank grammar": ({"structured_outputs": {"grammar": " "}}, "structured_outputs.grammar", ("must not be empty",)),
    "a chain of rules": (
        {"structured_outputs": {"grammar": "".join(f"r{i}: r{i + 1}\n" for i in range(1200)) + "r1200: r0\n"}},
        "structured_outputs.grammar", ("start",),
    ),
    "guided_json": ({"guided_json": {"type": 1}}, "guided_json", ("correct or simplify",)),
    "guided_regex": ({"guided_regex": "["}, "guided_regex", ("invalid regex",)),
    "guided_choice": ({"guided_choice": "a"}, "guided_choice", ("list of strings",)),
    "guided_grammar": ({"guided_grammar": "x"}, "guided_grammar", ("correct or simplify",)),
    "too fine": ({"guided_json": {"multipleOf": 99_999_989}}, "guided_json", ("multipleOf 99999989", "10000")),
    "two ways": (
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        "structured_outputs.regex", ("response_format already says", "give one of them"),
    ),
    "two older ways": ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", ("guided_regex already",)),
    "priority": ({"priority": -3}, "priority", ("-3", "'fcfs'", "policy 'priority'", "leave it out")),
    "priority of a wrong type": ({"priority": "high"}, "priority", ("integer", "'high'")),
    "priority beyond int32": ({"priority": 2**31}, "priority", ("2147483647",)),
    "empty cache_salt": ({"cache_salt": ""}, "cache_salt", ("at least 1",)),
    "long cache_salt": ({"cache_salt": "x" * 257}, "cache_salt", ("at most 256",)),
    "cache_salt of a wrong type": ({"cache_salt": 5}, "cache_salt", ("string", "got 5")),
    "skip_reading_prefix_cache": ({"skip_reading_prefix_cache": 1}, "skip_reading_prefix_cache", ("boolean",)),
    "min_tokens negative": ({"min_tokens": -1}, "min_tokens", ("greater than or equal to 0",)),
    "min_tokens over max_tokens": (
        {"min_tokens": 9, "max_tokens": 8}, "min_tokens", ("9", "the 8 tokens", "raise max_tokens")
    ),
    "min_tokens over the model": ({"min_tokens": 256}, "min_tokens", ("256",)),
    "repetition of a wrong type": ({"repetition_detection": True}, "repetition_detection", ("True",)),
    "repetition without count": (
        {"repetition_detection": {"max_pattern_size": 3}}, "repetition_detection.min_count", ("missing",)
    ),
    "repetition once": (
        {"repetition_detection": {"max_pattern_size": 3, "min_count": 1}}, "repetition_detection.min_count", ("2",)
    ),
    "repetition too large": (
        {"repetition_detection": {"max_pattern_size": 1025, "min_count": 2}},
        "repetition_detection.max_pattern_size", ("1024", "1025"),
    ),
    "repetition the wrong way round": (
        {"repetition_detection": {"max_pattern_size": 3, "min_pattern_size": 4, "min_count": 2}},
        "repetition_detection.min_pattern_size", ("4 is more than max_pattern_size 3",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_is_refused(shared: tuple[asyncio.Runner, Cluster], case: str) -> None:
    fields, param, words = BAD[case]
    for route in ("chat", "completions"):
        num_submits = len(shared[1].ranks[0].submits)
        error = check_error(ask(shared, route, fields), 400, "invalid_request", *words)
        assert error["param"] == param
        assert error["type"] == "invalid_request_error"
        assert error["message"].startswith(param)
        assert len(error["message"]) < 700
        assert len(shared[1].ranks[0].submits) == num_submits
    assert ask(shared, "chat", {}).status_code == 200


@in_loop
async def test_priorities_pass_where_the_policy_is_priority(tmp_path: Path) -> None:
    async with running(tmp_path, policy="priority") as cluster:
        for priority in (-3, 0, 2**31 - 1):
            assert (await cluster.chat(priority=priority)).status_code == 200
            assert cluster.ranks[0].submits[-1].priority == priority


@in_loop
async def test_all_sequences_of_a_request_have_its_name_and_its_grammar(tmp_path: Path) -> None:
    async with running(tmp_path) as cluster:
        response = await cluster.complete(["a", "b"], n=3, guided_regex="[a-z]+", cache_salt="s")
        assert response.status_code == 200
        submits = cluster.ranks[0].submits
        assert len({submit.id for submit in submits}) == 6
        assert {submit.request_id for submit in submits} == {response.json()["id"]}
        assert {submit.grammar for submit in submits} == {Grammar(GrammarKind.REGEX, "[a-z]+")}
        assert {submit.cache_salt for submit in submits} == {"s"}


@in_loop
async def test_a_streamed_answer_has_the_name_that_the_rank_knows(tmp_path: Path) -> None:
    async with running(tmp_path) as cluster:
        response = await cluster.chat(stream=True)
        events = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
        assert {json.loads(event)["id"] for event in events} == {cluster.ranks[0].submits[-1].request_id}


@in_loop
async def test_a_check_that_takes_too_long_is_left_to_the_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(tmp_path) as cluster:
        monkeypatch.setattr(grammar_check, "CHECK_TIMEOUT_S", 0)
        assert (await cluster.chat(guided_regex="a(")).status_code == 200
        assert cluster.ranks[0].submits[-1].grammar == Grammar(GrammarKind.REGEX, "a(")


@in_loop
async def test_a_panic_of_the_check_is_left_to_the_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class PanicException(BaseException):
        """As pyo3 raises it."""

    def panics(grammar: Grammar) -> str:
        raise PanicException("broken")

    async with running(tmp_path) as cluster:
        monkeypatch.setattr(grammar_check, "llguidance_grammar", panics)
        assert (await cluster.chat(guided_regex="never seen")).status_code == 200
        assert cluster.ranks[0].submits[-1].grammar == Grammar(GrammarKind.REGEX, "never seen")
        assert "llguidance cannot check a grammar of 10 characters" in caplog.text
        monkeypatch.undo()
        assert (await cluster.chat(guided_regex="a(")).status_code == 400


@in_loop
async def test_the_openai_client_parses_what_it_asked_for(tmp_path: Path) -> None:
    from pydantic import BaseModel

    class Answer(BaseModel):
        name: str
        age: int | None

    async with running(tmp_path, reply='{"name":"Ada","age":36}') as cluster:
        completion = await cluster.openai.chat.completions.parse(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], response_format=Answer
        )
        assert completion.choices[0].message.parsed == Answer(name="Ada", age=36)
        grammar = cluster.ranks[0].submits[-1].grammar
        assert grammar is not None
        assert json.loads(grammar.text)["required"] == ["name", "age"]
