"""Calls in a model's text, cut in pieces anywhere."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.call_text import Arguments, ArgumentsOnly, CallBegun, CallList, CallReader, Event, TaggedCalls, Text

Answer = tuple[str, list[tuple[str, str]]]
"""The text, and each call's name and arguments."""


def hermes() -> CallReader:
    return TaggedCalls("<tool_call>", "</tool_call>")


def llama() -> CallReader:
    return TaggedCalls("", "")


def joined(events: list[Event]) -> Answer:
    text, calls = "", list[tuple[str, str]]()
    for event in events:
        match event:
            case Text(more):
                assert more, "an empty piece"
                text += more
            case CallBegun(index, name):
                assert index == len(calls)
                calls.append((name, ""))
            case Arguments(index, more):
                assert index == len(calls) - 1
                assert more, "an empty piece"
                calls[-1] = (calls[-1][0], calls[-1][1] + more)
    return text, calls


def read(make: Callable[[], CallReader], pieces: list[str]) -> Answer:
    reader = make()
    events = [event for piece in pieces for event in reader.feed(piece)]
    return joined(events + reader.end())


def call(name: str, arguments: str, name_first: bool = True, key: str = "arguments") -> str:
    fields = [f'"name": {json.dumps(name)}', f'"{key}": {arguments}']
    return "{" + ", ".join(fields if name_first else fields[::-1]) + "}"


WEATHER = '{"city": "Köln \\"am Rhein\\"", "days": [1, 2, {"x": "}]"}], "unit": null}'

HERMES: dict[str, tuple[str, Answer]] = {
    "text only": ("It is 7 < 8 and <tool> is no call.", ("It is 7 < 8 and <tool> is no call.", [])),
    "a call": (f"<tool_call>\n{call('f', WEATHER)}\n</tool_call>", ("", [("f", WEATHER)])),
    "text before": (f"Let me see.\n\n<tool_call>{call('f', '{}')}</tool_call>", ("Let me see.", [("f", "{}")])),
    "two calls": (
        f"<tool_call>{call('f', WEATHER)}</tool_call>\n<tool_call>\n{call('g', '{}')}\n</tool_call>\n",
        ("", [("f", WEATHER), ("g", "{}")]),
    ),
    "arguments first": (f"<tool_call>{call('f', WEATHER, name_first=False)}</tool_call>", ("", [("f", WEATHER)])),
    "parameters": (f"<tool_call>{call('f', '{}', key='parameters')}</tool_call>", ("", [("f", "{}")])),
    "no arguments": ('<tool_call>{"name": "f"}</tool_call>', ("", [("f", "{}")])),
    "other keys": (
        '<tool_call>{"id": 12, "ok": true, "name": "f", "arguments": {"a": 1}, "x": -1.5e3 }</tool_call>',
        ("", [("f", '{"a": 1}')]),
    ),
    "text behind": (f"<tool_call>{call('f', '{}')}</tool_call> Done.", (" Done.", [("f", "{}")])),
    "no closing marker": (f"<tool_call>{call('f', '{}')}", ("", [("f", "{}")])),
    "cut off in arguments": (f"<tool_call>{call('f', WEATHER)}"[:40], ("", [("f", WEATHER[:2])])),
    "cut off in the name": ('a <tool_call>{"name": "we', ('a <tool_call>{"name": "we', [])),
    "cut off in the marker": ("a <tool_c", ("a <tool_c", [])),
    "no object": ("<tool_call>get_weather(city)</tool_call>", ("<tool_call>get_weather(city)</tool_call>", [])),
    "no name": ('<tool_call>{"a": 1}</tool_call>', ('<tool_call>{"a": 1}</tool_call>', [])),
    "a name that is none": ('<tool_call>{"name": 5}</tool_call>', ('<tool_call>{"name": 5}</tool_call>', [])),
    "wrong, then right": (
        f"<tool_call>x</tool_call><tool_call>{call('f', '{}')}</tool_call>",
        ("<tool_call>x</tool_call>", [("f", "{}")]),
    ),
}


@pytest.mark.parametrize("case", HERMES)
def test_marked_calls(case: str) -> None:
    text, expected = HERMES[case]
    assert read(hermes, [text]) == expected
    assert read(hermes, list(text)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (call("f", WEATHER, key="parameters"), ("", [("f", WEATHER)])),
        (f"{call('f', '{}')}; {call('g', WEATHER)}", ("", [("f", "{}"), ("g", WEATHER)])),
        ('  {"name": "f", "parameters": {}} \n', ("", [("f", "{}")])),
        ("It is sunny; {}", ("It is sunny; {}", [])),
        ('{"temperature": 5}', ('{"temperature": 5}', [])),
        ("", ("", [])),
    ],
)
def test_calls_without_markers(text: str, expected: Answer) -> None:
    assert read(llama, [text]) == expected
    assert read(llama, list(text)) == expected


@pytest.mark.parametrize("cut", [1, 2, 7, 1000])
def test_a_list_of_calls(cut: int) -> None:
    text = f" [{call('f', WEATHER)},\n {call('g', '{}')} ]\n"
    pieces = [text[i : i + cut] for i in range(0, len(text), cut)]
    assert read(CallList, pieces) == ("", [("f", WEATHER), ("g", "{}")])


def test_arguments_alone() -> None:
    assert read(lambda: ArgumentsOnly("f"), list(WEATHER)) == ("", [("f", WEATHER)])
    assert read(lambda: ArgumentsOnly("f"), []) == ("", [])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
calls = st.tuples(st.from_regex(r"[a-z_]{1,12}", fullmatch=True), st.dictionaries(st.text(), json_values, max_size=3))


@settings(max_examples=300, deadline=None)
@given(st.lists(calls, min_size=1, max_size=3), st.booleans(), st.booleans(), st.data())
def test_any_calls_cut_anywhere(
    made: list[tuple[str, dict[str, object]]], name_first: bool, is_ascii: bool, data: st.DataObject
) -> None:
    written = [(name, json.dumps(arguments, ensure_ascii=is_ascii)) for name, arguments in made]
    text = "\n".join(f"<tool_call>\n{call(*each, name_first)}\n</tool_call>" for each in written)
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[i:j] for i, j in zip([0, *places], [*places, len(text)], strict=True)]
    assert read(hermes, pieces) == ("", written)


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet='<tool_call>/{}"name:, \n12', max_size=60), st.data())
def test_what_is_told_does_not_depend_on_the_cuts(text: str, data: st.DataObject) -> None:
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[i:j] for i, j in zip([0, *places], [*places, len(text)], strict=True)]
    for make in (hermes, llama, CallList):
        assert read(make, pieces) == read(make, list(text))
