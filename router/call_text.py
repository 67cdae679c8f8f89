"""Calls out of a model's text, as it comes: text, names and arguments, never more than once, never half a marker.

Every reader is fed the text of one choice in pieces and answers with what they bring. Arguments are passed on as they
were written, which is JSON; what turns out to be no call is text after all.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Text:
    """Of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next piece of a call's arguments."""

    index: int
    text: str


Event = Text | CallBegun | Arguments


class CallReader(Protocol):
    def feed(self, text: str) -> list[Event]: ...

    def end(self) -> list[Event]:
        """What was held back, when no more comes."""
        ...


class _At(Enum):
    START = "before the object"
    KEY = "before a key, or the object's end"
    COLON = "behind a key"
    VALUE = "before a value"
    WITHIN = "within a value"
    BEHIND = "behind a value"
    DONE = "behind the object"
    WRONG = "no object that could be a call"


class CallObject:
    """One `{"name": …, "arguments": {…}}`, read by character; Llama calls the latter `parameters`.

    Arguments that come before the name are held until it is known.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self._at = _At.START
        self._key = ""
        self._is_key = False
        """The value that is being read is a key."""
        self._value: list[str] = []
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._held: list[str] = []
        """Of the arguments, not passed on yet."""
        self.has_arguments = False

    @property
    def is_done(self) -> bool:
        return self._at is _At.DONE

    @property
    def is_wrong(self) -> bool:
        return self._at is _At.WRONG

    def take_arguments(self) -> str:
        """What has come of them since the last call; nothing before the name is known."""
        if self.name is None:
            return ""
        text, self._held = "".join(self._held), []
        return text

    def feed(self, text: str) -> int:
        """Read up to the object's end, or to where it turns out wrong; returns how many characters were read."""
        for place, character in enumerate(text):
            self._step(character)
            if self._at in (_At.DONE, _At.WRONG):
                return place + 1
        return len(text)

    def _step(self, character: str) -> None:
        if self._at is _At.WITHIN:
            self._within(character)
        elif character in " \t\r\n":
            return
        elif self._at is _At.START:
            self._at = _At.KEY if character == "{" else _At.WRONG
        elif self._at is _At.KEY:
            if character == '"':
                self._begin_value(character, is_key=True)
            else:
                self._at = _At.DONE if character == "}" and self.name is not None else _At.WRONG
        elif self._at is _At.COLON:
            self._at = _At.VALUE if character == ":" else _At.WRONG
        elif self._at is _At.VALUE:
            self._begin_value(character, is_key=False)
        elif self._at is _At.BEHIND:
            if character == ",":
                self._at = _At.KEY
            else:
                self._at = _At.DONE if character == "}" and self.name is not None else _At.WRONG

    def _begin_value(self, character: str, *, is_key: bool) -> None:
        self._is_key = is_key
        self._value = []
        self._depth, self._in_string, self._is_escaped = 0, False, False
        self._at = _At.WITHIN
        self._within(character)

    def _within(self, character: str) -> None:
        is_bare = not self._in_string and self._depth == 0 and self._value
        if is_bare and character in ",}" and self._value[0] not in '"{[':
            self._end_value()  # a number, true, false or null ends where something else begins
            self._step(character)
            return
        self._value.append(character)
        if not self._is_key and self._key in ("arguments", "parameters"):
            self._held.append(character)
        if self._in_string:
            if self._is_escaped:
                self._is_escaped = False
            elif character == "\\":
                self._is_escaped = True
            elif character == '"':
                self._in_string = False
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
        is_closed = not self._in_string and self._depth == 0 and self._value[0] in '"{['
        if self._depth < 0:
            self._at = _At.WRONG
        elif is_closed:
            self._end_value()

    def _end_value(self) -> None:
        text = "".join(self._value)
        self._at = _At.COLON if self._is_key else _At.BEHIND
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            self._at = _At.WRONG
            return
        if self._is_key:
            self._key = value
        elif self._key == "name":
            if not isinstance(value, str) or not value:
                self._at = _At.WRONG
            else:
                self.name = value
        elif self._key in ("arguments", "parameters"):
            self.has_arguments = True


class _Calls:
    """Numbers calls, and turns what an object brings into events."""

    def __init__(self) -> None:
        self.num_begun = 0
        self._current: CallObject | None = None

    def events_of(self, call: CallObject) -> list[Event]:
        if call.name is None:
            return []
        events: list[Event] = []
        if call is not self._current:
            self._current = call
            self.num_begun += 1
            events.append(CallBegun(self.num_begun - 1, call.name))
        if text := call.take_arguments():
            events.append(Arguments(self.num_begun - 1, text))
        if call.is_done and not call.has_arguments:
            events.append(Arguments(self.num_begun - 1, "{}"))
        return events


class TaggedCalls:
    """Calls between markers, as Hermes, Qwen and many others write them; what is outside of them is text.

    With an empty `close` an object ends by itself, and with an empty `open` the text is calls from its first character
    on, or none (Llama 3).
    """

    def __init__(self, opening: str, closing: str) -> None:
        self._opening = opening
        self._closing = closing
        self._calls = _Calls()
        self._held = ""
        self._call: CallObject | None = None
        self._read = ""
        """Of the present call, its marker included: it is text after all if that is no call."""
        self._is_text = False
        """Nothing is a call any more."""

    def feed(self, text: str) -> list[Event]:
        self._held += text
        events: list[Event] = []
        while self._held:
            before = (self._held, self._call)
            events += self._read_call() if self._call is not None else self._read_text()
            if (self._held, self._call) == before:
                break
        return events

    def end(self) -> list[Event]:
        held, self._held = self._held, ""
        call, self._call = self._call, None
        if call is not None and call.name is None:
            held = self._read + held
        elif call is not None or (self._calls.num_begun and not held.strip()):
            held = ""  # it is cut off within a call, or blanks follow one
        return [Text(held)] if held else []

    def _read_text(self) -> list[Event]:
        if self._is_text:
            return self._all_as_text()
        if not self._opening:
            stripped = self._held.lstrip()
            if stripped and stripped[0] not in "{;":
                self._is_text = True
                return self._all_as_text()
            if stripped:
                self._held = stripped.lstrip("; \n")
                self._begin("")
            return []
        place = self._held.find(self._opening)
        if place >= 0:
            text, self._held = self._held[:place], self._held[place + len(self._opening) :]
            self._begin(self._opening)
            # Models put a line end before the marker, which nobody wants to read.
            text = text.rstrip("\n") if self._calls.num_begun == 0 else text.strip()
            return [Text(text)] if text else []
        keep = _overlap(self._held, self._opening)
        # After a call, blanks may be followed by another one.
        if self._calls.num_begun and not self._held[: len(self._held) - keep].strip():
            return []
        end = len(self._held) - keep
        while end and self._held[end - 1] == "\n":
            end -= 1
        text, self._held = self._held[:end], self._held[end:]
        return [Text(text)] if text else []

    def _all_as_text(self) -> list[Event]:
        text, self._held = self._held, ""
        return [Text(text)]

    def _begin(self, marker: str) -> None:
        self._call = CallObject()
        self._read = marker

    def _read_call(self) -> list[Event]:
        call = self._call
        assert call is not None
        if not call.is_done:
            num_read = call.feed(self._held)
            self._read += self._held[:num_read]
            self._held = self._held[num_read:]
            if call.is_wrong:
                return self._give_up(call)
            events = self._calls.events_of(call)
            if not call.is_done or self._closing:
                return events
            self._call = None
            return events
        # What stands between the object and its closing marker is nobody's.
        place = self._held.find(self._closing)
        if place >= 0:
            self._held = self._held[place + len(self._closing) :]
            self._call = None
        elif self._held.strip() and not _overlap(self._held, self._closing):
            self._call = None  # the marker was left out
        return []

    def _give_up(self, call: CallObject) -> list[Event]:
        """Text after all, unless its name has been told: then what is left of it is dropped."""
        self._call = None
        if call.name is not None:
            return []
        if not self._opening:
            self._is_text = True
        text, self._read = self._read, ""
        return [Text(text)]


class CallList:
    """A JSON list of calls and nothing else: what `tool_choice = required` forces."""

    def __init__(self) -> None:
        self._calls = _Calls()
        self._call: CallObject | None = None

    def feed(self, text: str) -> list[Event]:
        events: list[Event] = []
        while text:
            if self._call is None:
                text = text.lstrip("[,] \t\r\n")
                if not text:
                    break
                self._call = CallObject()
            num_read = self._call.feed(text)
            text = text[num_read:]
            events += self._calls.events_of(self._call)
            if self._call.is_done or self._call.is_wrong:
                self._call = None
        return events

    def end(self) -> list[Event]:
        return []


class ArgumentsOnly:
    """All text is the arguments of one call, whose name the request gave."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def feed(self, text: str) -> list[Event]:
        begun: list[Event] = [] if self._name is None or not text else [CallBegun(0, self._name)]
        if text:
            self._name = None
        return [*begun, Arguments(0, text)] if text else begun

    def end(self) -> list[Event]:
        return []


def _overlap(text: str, marker: str) -> int:
    """How many of the last characters of `text` may be the beginning of `marker`."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0
