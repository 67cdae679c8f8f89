"""Streams of all kinds at once, whose ranks are disturbed meanwhile: what they answer, and when each token came."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.pd.rig import Answer, PdSystem, make_prompts

NUM_TOKENS = 16
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 30, "logprobs": 2},
    {"n": 2, "temperature": 0.8},
    {"stop": [" the", "a."], "min_tokens": 3},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA}}, "max_tokens": 30},
    {"priority": 0, "ignore_eos": True},
    {"repetition_detection": {"max_pattern_size": 4, "min_count": 3}},
]
PROMPTS = make_prompts(16, seed=31, shortest=8, longest=24)


class Progress:
    """When the tokens of one round have come."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.times: dict[int, list[float]] = {index: [] for index in range(len(PROMPTS))}
        """Of each stream."""
        self._came = asyncio.Event()

    def token(self, stream: int) -> None:
        self.times[stream].append(asyncio.get_running_loop().time())
        self.num_tokens += 1
        self._came.set()

    async def wait_for(self, num_tokens: int, streams: list[asyncio.Task[list[Answer]]]) -> None:
        """Until so many have come, or all streams have ended."""
        while self.num_tokens < num_tokens and not all(stream.done() for stream in streams):
            self._came.clear()
            came = asyncio.ensure_future(self._came.wait())
            await asyncio.wait([came, *(s for s in streams if not s.done())], return_when="FIRST_COMPLETED")
            came.cancel()

    def around(self, stream: int, moment: float) -> tuple[float | None, float | None]:
        """When its last token before the moment came, and its first one after."""
        before = [time for time in self.times[stream] if time <= moment]
        after = [time for time in self.times[stream] if time > moment]
        return before[-1] if before else None, after[0] if after else None


def ask(pd: PdSystem, progress: Progress | None = None, count: int = len(PROMPTS)) -> list[asyncio.Task[list[Answer]]]:
    """So many streams, of all kinds in turn; a task each."""
    progress = progress or Progress()
    return [
        asyncio.create_task(
            pd.answer(
                prompt,
                on_token=lambda index=index: progress.token(index),
                **{"seed": index, "max_tokens": NUM_TOKENS, **KINDS[index % len(KINDS)]},
            )
        )
        for index, prompt in enumerate(PROMPTS[:count])
    ]
