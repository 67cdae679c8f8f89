"""Which rank the policies choose, from figures alone."""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Sequence
from types import ModuleType

import msgspec
import pytest

from rank_scheduler.messages import KvTransferLoad, RankLoad
from router.control_messages import PoolRole, RankRecord
from router.errors import ApiError, Cause
from router.named_rank import named_rank
from router.placement import Candidate, Leg, Wanted, load_contains, num_uncached_tokens
from router.placement_policies import (
    MAX_WAIT_S,
    SHORTAGE_FACTOR,
    LeastLoaded,
    PlacementPolicy,
    Prefix,
    RoundRobin,
    load_policy,
)
from router.prefix_index import CachedPrefix
from router.rank_table import (
    DEFAULT_PREFILL_S_PER_TOKEN,
    LOADED_TOKENS_PER_COMPUTED,
    TOKENS_PER_SEQUENCE,
    RankTable,
)
from router.room import Room
from router.session_affinity import SessionAffinity


def record(row: int, role: PoolRole = PoolRole.MIXED, num_blocks: int = 10_000) -> RankRecord:
    return RankRecord(f"p/{row}", "p", f"boot-{row}", "h", 1, 1, "n", 4096, 64, num_blocks, 16, role)


def table(*ranks: RankLoad | PoolRole) -> RankTable:
    result = RankTable()
    for row, rank in enumerate(ranks):
        result.add(row, record(row, rank if isinstance(rank, PoolRole) else PoolRole.MIXED))
        if isinstance(rank, RankLoad):
            result.update(row, rank, 0, 0)
    return result


def wanted(num_tokens: int = 1_000, leg: Leg = Leg.WHOLE, **cached: int) -> Wanted:
    """`cached`: r0=32 for the rank of row 0."""
    return Wanted(leg, num_tokens, CachedPrefix(tuple((1 << int(name[1:]), count) for name, count in cached.items())))


def chosen(policy: PlacementPolicy, ranks: RankTable, what: Wanted | None = None) -> int | None:
    """The row."""
    what = what or wanted()
    candidates = ranks.candidates(what.leg, falls_back=False)
    index = policy.choose(what, candidates)
    ranks.check_integrity()
    return None if index is None else int(candidates.rows[index])


FREE = RankLoad(num_free_blocks=10_000)


@pytest.mark.parametrize("policy", [Prefix(), LeastLoaded()])
def test_the_emptier_rank_is_chosen(policy: PlacementPolicy) -> None:
    busy = RankLoad(num_running=4, num_waiting_tokens=900, num_free_blocks=10_000)
    calm = RankLoad(num_running=5, num_waiting_tokens=10, num_free_blocks=10_000)
    assert chosen(policy, table(busy, calm)) == 1


@pytest.mark.parametrize("policy", [Prefix(), LeastLoaded()])
def test_requests_that_wait_for_something_else_are_work_too(policy: PlacementPolicy) -> None:
    deferred, running = (
        RankLoad(num_deferred=3, num_free_blocks=10_000),
        RankLoad(num_running=2, num_free_blocks=10_000),
    )
    assert chosen(policy, table(deferred, running)) == 1


@pytest.mark.parametrize("policy", [Prefix(), LeastLoaded(), RoundRobin()])
def test_equals_take_turns(policy: PlacementPolicy) -> None:
    ranks = table(FREE, FREE, FREE)
    rows = [chosen(policy, ranks) for _ in range(6)]
    assert sorted(rows[:3]) == [0, 1, 2]
    assert rows[:3] == rows[3:]


def test_routers_do_not_all_begin_with_the_same_rank() -> None:
    def first(router: str) -> int | None:
        ranks = RankTable(router)
        for row in range(64):
            ranks.add(row, record(row))
        return chosen(Prefix(), ranks)

    firsts = [first(f"router-{number}") for number in range(8)]
    assert len(set(firsts)) >= 6
    assert first("router-0") == firsts[0]


def test_round_robin_goes_on_where_it_was_when_ranks_come_and_go() -> None:
    policy, ranks = RoundRobin(), table(FREE, FREE, FREE, FREE)
    assert [chosen(policy, ranks) for _ in range(2)] == [0, 1]
    ranks.set_room(2, Room.NONE)
    assert [chosen(policy, ranks) for _ in range(2)] == [3, 0]
    ranks.set_room(2, Room.ANYTHING)
    assert [chosen(policy, ranks) for _ in range(3)] == [1, 2, 3]


@pytest.mark.parametrize("policy", [Prefix(), LeastLoaded()])
def test_what_was_submitted_since_the_last_frame_counts(policy: PlacementPolicy) -> None:
    ranks = table(FREE, RankLoad(num_waiting_tokens=100, num_free_blocks=10_000))
    ranks.update(0, FREE, 1, 500)
    assert chosen(policy, ranks) == 1


@pytest.mark.parametrize("policy", [Prefix(), LeastLoaded()])
def test_a_burst_without_any_frame_is_spread_evenly(policy: PlacementPolicy) -> None:
    rng = random.Random(7)
    ranks, unseen = table(FREE, FREE), [[0, 0], [0, 0]]
    for _ in range(200):
        num_tokens = rng.choice([10, 50, 2000])
        row = chosen(policy, ranks, wanted(num_tokens))
        assert row is not None
        unseen[row][0] += 1
        unseen[row][1] += num_tokens
        ranks.update(row, FREE, *unseen[row])
    total = sum(tokens for _, tokens in unseen)
    assert min(tokens for _, tokens in unseen) >= 0.4 * total


def test_figures_contain_a_submit_after_a_step_that_began_later() -> None:
    assert not load_contains(5, RankLoad(num_steps=5))
    assert not load_contains(5, RankLoad(num_steps=6))
    assert load_contains(5, RankLoad(num_steps=7))


def test_a_rank_that_has_the_prefix_is_chosen_until_its_load_outweighs_it() -> None:
    def choice(num_running: int) -> int | None:
        holder = RankLoad(num_running=num_running, num_free_blocks=10_000)
        return chosen(Prefix(), table(FREE, holder), wanted(1_000, r1=980))

    num_worth_it = 980 // TOKENS_PER_SEQUENCE
    assert [choice(count) for count in (0, num_worth_it, num_worth_it + 1)] == [1, 1, 0]


def test_the_least_loaded_and_the_next_in_turn_are_so_whatever_they_have_cached() -> None:
    busy = RankLoad(num_running=1, num_free_blocks=10_000)
    assert chosen(LeastLoaded(), table(FREE, busy), wanted(1_000, r1=980)) == 0
    assert chosen(RoundRobin(), table(FREE, busy), wanted(1_000, r1=980)) == 0


def test_the_last_token_is_never_cached() -> None:
    assert [num_uncached_tokens(32, cached) for cached in (0, 16, 31, 32)] == [32, 16, 1, 1]
    assert wanted(32, r2=32).num_uncached_tokens(2) == 1


def test_what_is_loaded_weighs_less_than_what_is_computed() -> None:
    num_saved = 1_600 // LOADED_TOKENS_PER_COMPUTED
    holder = RankLoad(num_running=num_saved // TOKENS_PER_SEQUENCE + 1, num_free_blocks=10_000)
    assert chosen(Prefix(), table(FREE, holder), wanted(1_600, Leg.DECODE, r1=1_599)) == 0
    assert chosen(Prefix(), table(FREE, holder), wanted(1_600, Leg.WHOLE, r1=1_599)) == 1


def test_ranks_made_for_another_part_take_it_only_where_the_right_ones_are_gone() -> None:
    ranks = table(PoolRole.PREFILL, PoolRole.DECODE, PoolRole.MIXED)
    assert ranks.candidates(Leg.PREFILL, falls_back=True).rows.tolist() == [0]
    assert ranks.candidates(Leg.DECODE, falls_back=True).rows.tolist() == [1, 2]
    ranks.set_room(0, Room.NONE)
    assert len(ranks.candidates(Leg.PREFILL, falls_back=True)) == 0, "it is there, and full"
    ranks.set_member(0, False)
    assert ranks.candidates(Leg.PREFILL, falls_back=True).rows.tolist() == [1, 2]
    assert len(ranks.candidates(Leg.PREFILL, falls_back=False)) == 0
    ranks.forget(0)
    ranks.add(40, record(40, PoolRole.PREFILL))
    assert ranks.candidates(Leg.PREFILL, falls_back=True).rows.tolist() == [40]


class MostTokens:
    """A policy of one's own; it sees candidates as a sequence."""

    def choose(self, wanted: Wanted, candidates: Sequence[Candidate]) -> int | None:
        if wanted.session_id == "patient":
            return None
        return max(range(len(candidates)), key=lambda index: candidates[index].load.num_waiting_tokens)


class NeedsAnArgument:
    def __init__(self, argument: int) -> None:
        pass


def test_a_policy_of_ones_own_is_found_by_its_dotted_name(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("site_policies")
    module.MostTokens = MostTokens  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "site_policies", module)
    policy = load_policy("site_policies:MostTokens")
    ranks = table(FREE, RankLoad(num_waiting_tokens=100), RankLoad(num_waiting_tokens=99))
    assert chosen(policy, ranks) == 1
    assert chosen(policy, ranks, Wanted(Leg.WHOLE, 10, session_id="patient")) is None
    last_two = ranks.candidates(Leg.WHOLE, falls_back=True)[1:]
    assert [(candidate.row, candidate.rank_id) for candidate in last_two] == [(1, "p/1"), (2, "p/2")]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("prefx", "is no placement policy; give one of prefix, least_loaded, round_robin, or module:Class"),
        ("router.placement_policies", "is no placement policy"),
        ("nowhere.at_all:Policy", "cannot be made: ModuleNotFoundError"),
        ("router.placement_policies:Nothing", "cannot be made: AttributeError"),
        ("tests.router.test_placement:NeedsAnArgument", "cannot be made: TypeError"),
        ("collections:OrderedDict", "has no method choose"),
    ],
)
def test_a_name_that_is_no_policy_is_refused_with_the_remedy(name: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as refused:
        load_policy(name)
    assert repr(name) in str(refused.value)
    assert "of a policy of your own" in str(refused.value)


# ---- speed ----

STEP_S, TOKEN_S = 0.02, 0.0005


def works(ranks: RankTable, row: int, slower: float = 1.0, *, num_running: int = 4, num_steps: int = 40) -> None:
    """It has decoded, and computed a prompt, at its pace; and is idle again."""
    load = ranks.candidate(row).load
    busy = msgspec.structs.replace(load, num_running=num_running)
    ranks.update(row, busy, 0, 0)
    decoded = msgspec.structs.replace(
        busy, num_steps=load.num_steps + num_steps, busy_s=load.busy_s + num_steps * STEP_S * slower
    )
    ranks.update(row, decoded, 0, 0)
    computed = msgspec.structs.replace(
        decoded,
        num_steps=decoded.num_steps + 1,
        num_prompt_tokens=load.num_prompt_tokens + 500,
        busy_s=decoded.busy_s + (STEP_S + 500 * TOKEN_S) * slower,
        num_running=0,
    )
    ranks.update(row, computed, 0, 0)


def test_speed_is_learnt_from_frames() -> None:
    ranks = table(FREE, FREE)
    assert ranks.candidate(0).prefill_s_per_token == DEFAULT_PREFILL_S_PER_TOKEN
    works(ranks, 0)
    works(ranks, 0)
    assert ranks.candidate(0).prefill_s_per_token == pytest.approx(TOKEN_S)
    assert ranks.candidate(1).prefill_s_per_token == pytest.approx(TOKEN_S), (
        "one that has shown nothing is as its peers"
    )
    assert ranks.candidate(1).lag == 1.0


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_a_rank_that_lags_gets_less(num_ranks: int) -> None:
    ranks = table(*[FREE] * num_ranks)
    for _ in range(3):
        for row in range(num_ranks):
            works(ranks, row, 3.0 if row == 1 else 1.0)
    assert [round(ranks.candidate(row).lag, 2) for row in range(num_ranks)] == [1.0, 3.0, *[1.0] * (num_ranks - 2)]
    assert ranks.candidate(1).prefill_s_per_token == pytest.approx(3 * TOKEN_S)
    for policy in (Prefix(), LeastLoaded()):
        counts = [0] * num_ranks
        for _ in range(100 * num_ranks):
            row = chosen(policy, ranks, wanted(20))
            assert row is not None
            counts[row] += 1
            ranks.update(row, ranks.candidate(row).load, counts[row], 20 * counts[row])
        assert 0 < counts[1] < 0.5 * min(count for row, count in enumerate(counts) if row != 1)
        for row in range(num_ranks):
            ranks.update(row, ranks.candidate(row).load, 0, 0)


def test_a_rank_that_is_as_fast_as_ever_again_is_forgiven() -> None:
    ranks = table(FREE, FREE)
    for slower in [4.0] * 3 + [1.0] * 12:
        works(ranks, 0)
        works(ranks, 1, slower)
        if slower == 4.0:
            assert ranks.candidate(1).lag > 1
    assert ranks.candidate(1).lag == 1.0


def test_longer_steps_of_more_sequences_are_no_lag() -> None:
    ranks = table(FREE, FREE)
    for _ in range(3):
        works(ranks, 0, 1.0, num_running=2)
        works(ranks, 1, 2.0, num_running=8)
    assert ranks.candidate(1).lag == 1.0


def test_ranks_that_differ_little_are_equals() -> None:
    ranks = table(FREE, FREE, FREE)
    for _ in range(3):
        for row, slower in enumerate([1.0, 1.1, 0.9]):
            works(ranks, row, slower)
    policy = Prefix()
    assert {chosen(policy, ranks) for _ in range(3)} == {0, 1, 2}


def test_figures_that_go_back_teach_nothing() -> None:
    ranks = table(FREE, FREE)
    works(ranks, 0)
    works(ranks, 1)
    before = ranks.candidate(0)
    ranks.update(0, FREE, 0, 0)
    works(ranks, 1)
    assert ranks.candidate(0).prefill_s_per_token == before.prefill_s_per_token


def test_measured_transfers_replace_the_guess() -> None:
    ranks = RankTable()
    for row in range(2):
        ranks.add(row, msgspec.structs.replace(record(row, PoolRole.DECODE), block_size_bytes=1_000))
    assert ranks.load_s_per_token[0] == DEFAULT_PREFILL_S_PER_TOKEN / LOADED_TOKENS_PER_COMPUTED
    for row in range(2):
        # 100 blocks of 16 tokens.
        ranks.update_transfers(row, KvTransferLoad(num_loaded_bytes=100_000, load_seconds_sum=1.6))
    assert ranks.load_s_per_token[:2].tolist() == pytest.approx([0.001, 0.001])


# ---- room ----


def test_a_rank_without_kv_room_for_the_prompt_is_worse() -> None:
    full = RankLoad(num_free_blocks=10)
    assert chosen(Prefix(), table(RankLoad(num_running=5, num_free_blocks=100), full), wanted(600)) == 0
    assert chosen(Prefix(), table(RankLoad(num_running=5, num_free_blocks=100), full), wanted(150)) == 1
    # Nor is it the end of the world: the prompt's prefix, if it is long, is worth the wait.
    num_lacking = 600 - 400 - 160
    assert SHORTAGE_FACTOR * num_lacking < 400
    assert chosen(Prefix(), table(FREE, full), wanted(600, r1=400)) == 1


def test_a_popular_prefix_does_not_drown_its_rank() -> None:
    ranks = table(*[FREE] * 4)
    for _ in range(400):
        row = chosen(Prefix(), ranks, wanted(2_000, r2=1_990))
        assert row is not None
        before = ranks.candidate(row)
        num_tokens = before.num_unseen_tokens + (10 if row == 2 else 2_000)
        ranks.update(row, FREE, before.num_unseen_sequences + 1, num_tokens)
        work = ranks.work
        # It has more to do than others by what its prefix saves, and what one request brings, at most.
        assert work[2] <= min(work[[0, 1, 3]]) + 1_990 + 10 + TOKENS_PER_SEQUENCE
    assert min(ranks.candidate(row).num_unseen_sequences for row in range(4)) > 0


# ---- waiting for a better one ----


def may_wait(waited_s: float, num_tokens: int = 1_000, session_id: str | None = None, **cached: int) -> Wanted:
    return dataclasses.replace(wanted(num_tokens, **cached), may_wait=True, waited_s=waited_s, session_id=session_id)


def test_one_waits_for_its_prefix_as_long_as_that_saves() -> None:
    ranks = table(FREE, FREE)
    ranks.set_room(1, Room.NONE)
    saves_s = 900 * DEFAULT_PREFILL_S_PER_TOKEN
    assert chosen(Prefix(), ranks, may_wait(0.99 * saves_s, r1=900)) is None
    assert chosen(Prefix(), ranks, may_wait(1.01 * saves_s, r1=900)) == 0
    assert chosen(Prefix(), ranks, wanted(1_000, r1=900)) == 0, "it may not"
    assert chosen(Prefix(), ranks, may_wait(0.0)) == 0, "there is nothing to wait for"
    assert chosen(Prefix(), ranks, may_wait(MAX_WAIT_S, 90_000, r1=80_000)) == 0
    assert chosen(Prefix(), ranks, may_wait(0.0, r0=900, r1=900)) == 0


# ---- sessions ----


def homes(ranks: RankTable, sessions: int = 200) -> list[int | None]:
    policy = SessionAffinity(LeastLoaded())
    return [chosen(policy, ranks, Wanted(Leg.WHOLE, 10, session_id=f"session-{index}")) for index in range(sessions)]


def test_all_routers_agree_on_a_sessions_rank_and_sessions_spread() -> None:
    first = homes(table(*[FREE] * 4))
    other_router = RankTable()
    for row in (3, 1, 0, 2):
        other_router.add(row + 5, record(row))
    assert [row + 5 for row in first if row is not None] == homes(other_router)
    assert min(first.count(row) for row in range(4)) >= 30


def test_only_the_sessions_of_a_rank_that_goes_move_and_they_come_back() -> None:
    ranks = table(*[FREE] * 4)
    before = homes(ranks)
    ranks.set_member(2, False)
    after = homes(ranks)
    assert [row for row in after if row == 2] == []
    assert all(now == then for now, then in zip(after, before, strict=True) if then != 2)
    assert len({now for now, then in zip(after, before, strict=True) if then == 2}) == 3
    ranks.set_member(2, True)
    assert homes(ranks) == before


def test_a_session_waits_for_its_rank_only_while_that_is_worth_it() -> None:
    ranks = table(FREE, FREE, FREE)
    policy = SessionAffinity(LeastLoaded())

    def row_of(waited_s: float, **cached: int) -> int | None:
        return chosen(policy, ranks, may_wait(waited_s, session_id="s", **cached))

    home = row_of(0.0)
    assert home is not None
    has_it = {f"r{home}": 900}
    ranks.set_room(home, Room.NONE)
    second = row_of(0.0)
    assert second not in (None, home), "nothing is cached there"
    assert row_of(0.5 * 900 * DEFAULT_PREFILL_S_PER_TOKEN, **has_it) is None
    assert row_of(1.5 * 900 * DEFAULT_PREFILL_S_PER_TOKEN, **has_it) == second
    ranks.set_room(home, Room.ANYTHING)
    assert row_of(0.0) == home


def test_what_belongs_to_no_session_is_the_policys() -> None:
    policy = SessionAffinity(RoundRobin())
    assert [chosen(policy, table(FREE, FREE)) for _ in range(3)] == [0, 1, 0]


# ---- a rank by name ----


def test_a_named_rank_is_that_one_or_an_error_that_says_which_there_are() -> None:
    ranks = table(FREE, FREE)
    assert [named_rank(ranks, "p/0"), named_rank(ranks, "p/1")] == [0, 1]
    ranks.set_member(1, False)
    for name, cause in [("p/1", Cause.NO_RANK_AVAILABLE), ("q/0", Cause.INVALID_REQUEST)]:
        with pytest.raises(ApiError, match=f"x-serried-rank: '{name}' is .*there are p/0; name one") as refused:
            named_rank(ranks, name)
        assert refused.value.cause is cause
    ranks.forget(0)
    with pytest.raises(ApiError, match="'p/0' is not there, nor is any other") as refused:
        named_rank(ranks, "p/0")
    assert refused.value.status == 503


def test_a_rank_that_came_back_in_another_row_keeps_its_name() -> None:
    ranks = table(FREE)
    ranks.add(1, msgspec.structs.replace(record(0), boot_id="another"))
    ranks.forget(0)
    assert named_rank(ranks, "p/0") == 1
