"""What this router asks all others, through the control actor, and waits for. Use from one event loop."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from router.control_messages import Inquiry, InquiryAction, InquiryAnswer


class Inquiries:
    def __init__(self, send: Callable[[Inquiry], bool]) -> None:
        """`send`: to the control actor; whether it is there."""
        self._send = send
        self._queries = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[InquiryAnswer]] = {}

    async def ask(self, action: InquiryAction, subject: str, account: str, timeout_s: float) -> InquiryAnswer | None:
        """None: nobody could say in time. An answer that comes later is dropped."""
        query = next(self._queries)
        answer: asyncio.Future[InquiryAnswer] = asyncio.get_running_loop().create_future()
        self._waiting[query] = answer
        try:
            if not self._send(Inquiry(query, action, subject, account)):
                return None
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            return None
        finally:
            del self._waiting[query]

    def answered(self, message: InquiryAnswer) -> bool:
        """Whether somebody waits for it."""
        answer = self._waiting.get(message.query)
        if answer is None or answer.done():
            return False
        answer.set_result(message)
        return True
