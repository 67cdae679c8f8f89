"""The ranks that this router knows: one link each, kept as long as the rank is a member.

Mutable state: `_keepers`, one task per member, by boot id, and `_links`, the open connections. A rank that is no
longer a member gets no new work, but its link stays open until what runs on it has ended: membership comes from
the control actor, whose restart must not cut streams. A rank that is really gone ends its own connection.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial

from kv_transfer.connection import Connection, connect
from router.control_messages import RankRecord
from router.dispatcher import Dispatcher
from router.errors import ApiError, Cause
from router.explanation import RankAnswer
from router.peer import PeerFault, keep_connected
from router.placement import Leg, num_uncached_tokens
from router.placement_policies import PlacementPolicy
from router.prefix_index import NOTHING_CACHED, CachedPrefix, PrefixIndex, PromptPrefix
from router.rank_link import RankLink
from router.rank_table import RankTable

logger = logging.getLogger(__name__)

MAX_BACKOFF_S = 2.0
CONNECT_TIMEOUT_S = 5.0


class RankPool:
    """Use from one event loop. `close` ends all links; what runs on them fails as lost with its rank."""

    def __init__(
        self,
        secret: bytes,
        name: str,
        *,
        policy: PlacementPolicy,
        wait_timeout_s: float,
        silence_timeout_s: float,
        count: Callable[[PeerFault], None],
        observe_wait: Callable[[float], None] = lambda _: None,
        falls_back: bool = True,
        by_priority: bool = False,
    ) -> None:
        """`falls_back`: where ranks of the right role are missing, others take their part.

        `observe_wait` is told how long each placing took.
        """
        self._secret = secret
        self._falls_back = falls_back
        self._name = name
        self._wait_timeout_s = wait_timeout_s
        self._silence_timeout_s = silence_timeout_s
        self._count = count
        self._members: dict[str, RankRecord] = {}
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._links: dict[str, RankLink] = {}
        self.prefixes = PrefixIndex()
        """What each connected rank has in its cache."""
        self.ranks = RankTable(name)
        """The figures of each connected rank."""
        self._links_by_row: dict[int, RankLink] = {}
        self.dispatcher = Dispatcher(
            self.ranks,
            policy,
            link_of=self._link_of,
            cached=self._cached,
            no_rank=self._no_rank,
            falls_back=falls_back,
            by_priority=by_priority,
            wait_timeout_s=wait_timeout_s,
            observe_wait=observe_wait,
        )
        """Who gets which rank, and when."""

    @property
    def links(self) -> list[RankLink]:
        """Open connections to members, by rank id."""
        links = [link for boot_id, link in self._links.items() if boot_id in self._members and link.is_open]
        return sorted(links, key=lambda link: link.record.rank_id)

    @property
    def num_members(self) -> int:
        return len(self._members)

    @property
    def num_live(self) -> int:
        """Sequences on all ranks."""
        return sum(link.num_live for link in self._links.values())

    def figures(self) -> dict[str, int]:
        """How many ranks there are for a new prompt."""
        links = self.links
        return {
            "num_ranks_known": self.num_members,
            "num_ranks_connected": len(links),
            "num_ranks_with_room": sum(self.ranks.has_room(link.row) for link in links),
        }

    def reconcile(self, members: Sequence[RankRecord]) -> None:
        """These ranks are live now: connect to new ones, leave those that are gone when they are idle."""
        self._members = {record.boot_id: record for record in members}
        for boot_id, link in list(self._links.items()):
            if link.is_open:
                self.ranks.set_member(link.row, boot_id in self._members and not link.is_leaving)
            if boot_id not in self._members and not link.num_live:
                link.close("the rank is no longer a member")
        for boot_id, keeper in list(self._keepers.items()):
            if boot_id not in self._members and boot_id not in self._links:
                keeper.cancel()
        for boot_id, record in self._members.items():
            if boot_id not in self._keepers:
                keeper = asyncio.get_running_loop().create_task(self._keep(record), name=f"rank {record.rank_id}")
                self._keepers[boot_id] = keeper
                keeper.add_done_callback(partial(self._on_kept, boot_id))
        self.dispatcher.ranks_changed()

    def expects(self, leg: Leg) -> bool:
        """Whether a rank that is made for this leg is connected, or must be waited for."""
        return not self._falls_back or self.ranks.suitable(leg, falls_back=False).size > 0

    def has_rank_for(self, leg: Leg) -> bool:
        """Whether there is one that could take it, once it has room."""
        return self.ranks.suitable(leg, falls_back=self._falls_back).size > 0

    def _cached(self, prompt: PromptPrefix) -> CachedPrefix:
        """What ranks have of it; nothing where there is no choice, and so no need to know."""
        return self.prefixes.find(prompt) if self._has_choice else NOTHING_CACHED

    @property
    def hashed_block_sizes(self) -> set[int]:
        """Of which a prompt's hashes will be asked for."""
        return self.prefixes.block_sizes if self._has_choice else set()

    @property
    def _has_choice(self) -> bool:
        return len(self._links) > 1

    def num_uncached_tokens(self, prompt: PromptPrefix, link: RankLink) -> int:
        """How many of the prompt's tokens this rank would have to compute, or load, as far as is known."""
        return num_uncached_tokens(prompt.num_tokens, self._cached(prompt).num_tokens(link.row))

    def least_uncached_tokens(self, prompt: PromptPrefix) -> int:
        """As many the rank would have to compute that has most of it cached."""
        most = max((num_tokens for _, num_tokens in self._cached(prompt).depths), default=0)
        return num_uncached_tokens(prompt.num_tokens, most)

    def _link_of(self, row: int) -> RankLink | None:
        link = self._links_by_row.get(row)
        return link if link is not None and link.is_open else None

    def _no_rank(self, leg: Leg) -> ApiError:
        num_suitable = self.ranks.suitable(leg, falls_back=self._falls_back).size
        return ApiError(
            Cause.NO_RANK_AVAILABLE,
            f"no rank can take the request ({self.num_members} known, {len(self.links)} connected, {num_suitable} of "
            f"them for its {leg} part); waited {self._wait_timeout_s:g} s for one, try again later",
        )

    async def explain(self, request_id: str, timeout_s: float) -> list[RankAnswer]:
        """What each connected rank knows of a request, those included that are no members any more."""
        links = sorted((link for link in self._links.values() if link.is_open), key=lambda link: link.record.rank_id)
        return await asyncio.gather(*(link.explain(request_id, timeout_s) for link in links))

    async def close(self) -> None:
        """Close all connections and end all tasks."""
        self._members = {}
        keepers = list(self._keepers.values())
        for link in list(self._links.values()):
            link.close("the router ends")
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)

    def check_integrity(self) -> None:
        """Raises AssertionError unless links and members agree."""
        assert self._members.keys() <= self._keepers.keys(), "a member has no keeper"
        for link in self._links.values():
            link.check_integrity()
        self.prefixes.check_integrity()
        self.ranks.check_integrity()
        self.dispatcher.check_integrity()

    async def _keep(self, record: RankRecord) -> None:
        """Hold a connection to the rank while it is a member."""
        await keep_connected(
            f"rank {record.rank_id} (boot {record.boot_id}, {record.host}:{record.port})",
            partial(
                connect,
                record.host,
                record.port,
                secret=self._secret,
                role="router",
                name=self._name,
                timeout_s=CONNECT_TIMEOUT_S,
            ),
            partial(self._use, record),
            is_wanted=lambda: record.boot_id in self._members,
            max_backoff_s=MAX_BACKOFF_S,
            count=self._count,
        )

    async def _use(self, record: RankRecord, connection: Connection) -> str:
        link = RankLink(
            record,
            connection,
            prefixes=self.prefixes,
            ranks=self.ranks,
            silence_timeout_s=self._silence_timeout_s,
            on_idle=self._close_if_no_member,
            on_frame=self.dispatcher.serve,
            on_leave=self.dispatcher.ranks_changed,
            count=self._count,
        )
        self._links[record.boot_id] = self._links_by_row[link.row] = link
        self.ranks.set_member(link.row, record.boot_id in self._members and not link.is_leaving)
        self.dispatcher.ranks_changed()
        try:
            return await asyncio.shield(link.closed)
        finally:
            del self._links[record.boot_id]
            if self._links_by_row.get(link.row) is link:
                del self._links_by_row[link.row]
            self.dispatcher.ranks_changed()

    def _on_kept(self, boot_id: str, keeper: asyncio.Task[None]) -> None:
        if self._keepers.get(boot_id) is keeper:
            del self._keepers[boot_id]
        if not keeper.cancelled() and (error := keeper.exception()) is not None:
            logger.error("the connection to rank %s is no longer kept", boot_id, exc_info=error)
        elif boot_id in self._members:  # it came back while its keeper was ending
            self.reconcile(list(self._members.values()))

    def _close_if_no_member(self, link: RankLink) -> None:
        if link.record.boot_id not in self._members and link.is_open:
            link.close("the rank is no longer a member")
