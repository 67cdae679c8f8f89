"""One request of the Responses API: behind what earlier ones said, and stored for later ones."""

from __future__ import annotations

from typing import Any

import msgspec

from router.protocol import ChatCompletionRequest, parse
from router.response_store import ResponseStore
from router.responses_api_format import ResponsesFormat
from router.responses_api_protocol import ResponsesRequest
from router.tokenizer import ChatTokenizer


class Conversation:
    """`parse` comes first, then `form`."""

    def __init__(self, store: ResponseStore, account: str) -> None:
        self._store = store
        self._account = account
        self._asked: ResponsesRequest | None = None
        self._earlier: list[dict[str, Any]] = []

    def parse(self, body: bytes) -> ChatCompletionRequest:
        """The chat completion that the request means. Raises ApiError, also for an earlier response nobody knows."""
        asked = self._asked = parse(body, ResponsesRequest)
        if asked.previous_response_id is not None:
            self._earlier = msgspec.json.decode(self._store.get(asked.previous_response_id, self._account).messages)
        return asked.chat(self._earlier)

    def form(
        self, chat: ChatCompletionRequest, request_id: str, model: str, tokenizer: ChatTokenizer
    ) -> ResponsesFormat:
        assert self._asked is not None
        return ResponsesFormat(self._asked, chat, request_id, model, tokenizer, self._keep)

    def _keep(self, response: dict[str, Any], message: dict[str, Any]) -> None:
        assert self._asked is not None
        if self._asked.store is not False:
            conversation = [*self._earlier, *self._asked.new_messages(), message]
            self._store.put(response, conversation, self._account)
