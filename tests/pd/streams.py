"""Streams of all kinds at once, whose ranks are disturbed meanwhile: what they answer, and how long they pause."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.pd.rig import Answer, PdSystem, make_prompts

NUM_TOKENS = 24
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 30, "logprobs": 2},
    {"n": 2, "temperature": 0.8},
    {"stop": [" the", "a."], "min_tokens": 3},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA}}, "max_tokens": 40},
    {"priority": 0, "ignore_eos": True},
    {"repetition_detection": {"max_pattern_size": 4, "min_count": 3}},
]
PROMPTS = make_prompts(16, seed=31, shortest=10, longest=40)


class Progress:
    """The tokens of one round: how many have come, and the longest wait of any stream for its next one."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._came = asyncio.Event()
        self._last: dict[int, float] = {}
        self.pauses: dict[int, float] = {}
        """The longest of each stream that has had a token."""

    def token(self, stream: int) -> None:
        now = asyncio.get_running_loop().time()
        if stream in self._last:
            self.pauses[stream] = max(self.pauses.get(stream, 0.0), now - self._last[stream])
        self._last[stream] = now
        self.num_tokens += 1
        self._came.set()

    async def wait_for(self, num_tokens: int, streams: list[asyncio.Task[list[Answer]]]) -> None:
        """Until so many have come, or all streams have ended."""
        while self.num_tokens < num_tokens and not all(stream.done() for stream in streams):
            self._came.clear()
            came = asyncio.ensure_future(self._came.wait())
            await asyncio.wait([came, *(s for s in streams if not s.done())], return_when="FIRST_COMPLETED")
            came.cancel()


def ask(pd: PdSystem, progress: Progress | None = None, **fields: Any) -> list[asyncio.Task[list[Answer]]]:
    """A stream of each kind for each of two prompts; a task each. `fields`: of all of them."""
    progress = progress or Progress()
    return [
        asyncio.create_task(
            pd.answer(
                prompt,
                on_token=lambda index=index: progress.token(index),
                **{"seed": index, "max_tokens": NUM_TOKENS, **KINDS[index % len(KINDS)], **fields},
            )
        )
        for index, prompt in enumerate(PROMPTS)
    ]
