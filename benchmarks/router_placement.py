"""What placement costs a router, with ranks that are only figures: see `benchmarks.router`.

Every rank has thousands of blocks in its cache, some of prefixes that many ranks have. Each request is a prompt of its
own behind one of these prefixes. What is measured for a request is all that the router does for its place: the hashes
of its blocks, who has them, the choice, the rank's new figures. What comes of it, the rank's next frame with the blocks
that it has now and those that it gave up, is measured apart. Admission, a text's tokens and the bytes of messages are
in neither. All times are CPU times, so that they say the same beside other work.
"""

from __future__ import annotations

import random
import struct
import time
from collections import deque
from dataclasses import dataclass, field
from typing import cast

import msgspec

from benchmarks.serving import percentile
from rank_scheduler.messages import PrefixEvents, PrefixSnapshot, RankLoad
from rank_scheduler.prefix_chain import HASH_BYTES, chain, pack
from router.control_messages import RankRecord
from router.dispatcher import Dispatcher
from router.errors import ApiError, Cause
from router.placement import Leg, num_uncached_tokens
from router.placement_policies import load_policy
from router.placing import Placing
from router.prefix_index import PrefixIndex, PromptPrefix
from router.rank_link import RankLink
from router.rank_table import RankTable
from router.session_affinity import SessionAffinity
from router.waiting_line import Turn

BLOCK_SIZE = 16
NUM_PREFIXES = 64
PREFIX_TOKENS = 512
PROMPT_TOKENS = 2_048
LONG_PROMPT_TOKENS = 100_000
BLOCKS_PER_RANK = 4_096


@dataclass(slots=True)
class _Rank:
    load: RankLoad
    seq: int = 0
    blocks: deque[bytes] = field(default_factory=deque)
    """Packed hashes of prompts, the oldest first."""
    num_unseen: int = 0
    num_unseen_tokens: int = 0


@dataclass(frozen=True)
class _Link:
    """As much of a connection as a choice needs."""

    row: int
    is_open: bool = True


class SimulatedRouter:
    """The deciding parts of a router, and what its ranks would tell it. Needs a running event loop."""

    def __init__(self, num_ranks: int, seed: int) -> None:
        self._random = random.Random(seed)
        self._index, self._table = PrefixIndex(), RankTable()
        self._links: dict[int, RankLink] = {row: cast(RankLink, _Link(row)) for row in range(num_ranks)}
        self._dispatcher = Dispatcher(
            self._table,
            SessionAffinity(load_policy("prefix")),
            link_of=self._links.get,
            cached=self._index.find,
            no_rank=lambda leg: ApiError(Cause.NO_RANK_AVAILABLE, f"no rank for {leg}"),
            falls_back=True,
            by_priority=False,
            wait_timeout_s=1.0,
            observe_wait=lambda seconds: None,
        )
        self._prefixes = [self._tokens(PREFIX_TOKENS) for _ in range(NUM_PREFIXES)]
        self._ranks: list[_Rank] = []
        for row in range(num_ranks):
            record = RankRecord(
                f"mixed/{row}", "mixed", f"boot-{row}-{seed}", "h", 1, 1, "n", 131_072, 256, 65_536, BLOCK_SIZE
            )
            self._table.add(self._index.add(record.boot_id, BLOCK_SIZE), record)
            self._ranks.append(_Rank(RankLoad(num_free_blocks=65_536, num_blocks=65_536)))
            self._fill(row)

    def _tokens(self, count: int) -> bytes:
        return struct.pack(f"<{count}i", *(self._random.randrange(100, 32_000) for _ in range(count)))

    def _fill(self, row: int) -> None:
        """Some of the common prefixes, and prompts of its own."""
        rank = self._ranks[row]
        for prefix in self._random.sample(self._prefixes, NUM_PREFIXES // 4):
            rank.blocks.append(pack(chain(prefix, BLOCK_SIZE, None)))
        while sum(map(len, rank.blocks)) < BLOCKS_PER_RANK * HASH_BYTES:
            rank.blocks.append(self._random.randbytes(HASH_BYTES * PROMPT_TOKENS // BLOCK_SIZE))
        snapshot = PrefixSnapshot(rank.seq, b"".join(rank.blocks))
        self._index.take_snapshot(self._name(row), snapshot)

    def _name(self, row: int) -> str:
        return self._table.records[row].boot_id

    def prompt(self, num_tokens: int = PROMPT_TOKENS) -> bytes:
        """Behind one of the common prefixes."""
        return self._random.choice(self._prefixes) + self._tokens(num_tokens - PREFIX_TOKENS)

    def place(self, token_ids: bytes) -> int:
        """The row that a request goes to, and its figures after that."""
        prompt = PromptPrefix(token_ids, "")
        link = self._dispatcher.try_now(Placing(Leg.WHOLE, prompt, Turn(""), "request"))
        assert link is not None, "no rank has room"
        row = link.row
        rank = self._ranks[row]
        rank.num_unseen += 1
        rank.num_unseen_tokens += num_uncached_tokens(prompt.num_tokens, self._index.find(prompt).num_tokens(row))
        self._table.update(row, rank.load, rank.num_unseen, rank.num_unseen_tokens)
        return row

    def frame(self, row: int, token_ids: bytes) -> tuple[RankLoad, PrefixEvents]:
        """What the rank says after it has computed that prompt, in two steps."""
        rank = self._ranks[row]
        stored = pack(chain(token_ids, BLOCK_SIZE, None))
        rank.blocks.append(stored)
        # The common prefixes are used all the time, and stay.
        while (removed := rank.blocks.popleft()) and len(removed) == HASH_BYTES * PREFIX_TOKENS // BLOCK_SIZE:
            rank.blocks.append(removed)
        rank.seq += 1
        load = msgspec.structs.replace(
            rank.load,
            num_running=min(rank.load.num_running + 1, 32),
            num_steps=rank.load.num_steps + 2,
            num_prompt_tokens=rank.load.num_prompt_tokens + PROMPT_TOKENS,
            busy_s=rank.load.busy_s + PROMPT_TOKENS * 1e-4 * self._random.uniform(0.8, 1.2),
        )
        kept = {stored[at : at + HASH_BYTES] for at in range(0, HASH_BYTES * PREFIX_TOKENS // BLOCK_SIZE, HASH_BYTES)}
        gone = [removed[at : at + HASH_BYTES] for at in range(0, len(removed), HASH_BYTES)]
        return load, PrefixEvents(rank.seq, stored, b"".join(each for each in gone if each not in kept))

    def take(self, row: int, load: RankLoad, events: PrefixEvents) -> None:
        """What a router does with a frame's figures."""
        rank = self._ranks[row]
        rank.load, rank.num_unseen, rank.num_unseen_tokens = load, 0, 0
        self._index.take_events(self._name(row), events)
        self._table.update(row, load, 0, 0)


async def measure_placement(num_ranks: int, num_requests: int, seed: int) -> dict[str, float]:
    """`placements_per_s`, `placement_p99_ms` and `frame_us` with that many ranks, on the core that runs this."""
    router = SimulatedRouter(num_ranks, seed)
    placing: list[float] = []
    taking: list[float] = []
    num_warm_ups = num_requests // 10
    for number in range(num_warm_ups + num_requests):
        prompt = router.prompt()
        start = time.thread_time()
        row = router.place(prompt)
        placed = time.thread_time()
        load, events = router.frame(row, prompt)
        told = time.thread_time()
        router.take(row, load, events)
        if number >= num_warm_ups:
            placing.append(placed - start)
            taking.append(time.thread_time() - told)
    return {
        "placements_per_s": len(placing) / sum(placing),
        "placement_p99_ms": 1e3 * percentile(placing, 99),
        "placement_frame_us": 1e6 * sum(taking) / len(taking),
    }


async def measure_long_prompt(num_ranks: int, num_rounds: int, seed: int) -> float:
    """CPU milliseconds for the place of a prompt of LONG_PROMPT_TOKENS that some rank has whole, median."""
    router = SimulatedRouter(num_ranks, seed)
    prompt = router.prompt(LONG_PROMPT_TOKENS)
    row = router.place(prompt)
    router.take(row, *router.frame(row, prompt))
    took = []
    for _ in range(num_rounds):
        start = time.thread_time()
        row = router.place(prompt)
        took.append(time.thread_time() - start)
        router.take(row, *router.frame(row, router.prompt()))
    return 1e3 * percentile(took, 50)
