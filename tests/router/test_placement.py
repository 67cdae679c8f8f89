"""Which rank the policies choose, from figures alone."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from types import ModuleType

import pytest

from rank_scheduler.messages import RankLoad
from router.control_messages import PoolRole, RankRecord
from router.placement import Candidate, Leg, Wanted, load_contains, num_uncached_tokens
from router.placement_policies import (
    LOADED_TOKENS_PER_COMPUTED,
    TOKENS_PER_SEQUENCE,
    LeastLoaded,
    PlacementPolicy,
    Prefix,
    RoundRobin,
    load_policy,
)
from router.prefix_index import CachedPrefix
from router.rank_table import RankTable


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


def test_round_robin_goes_on_where_it_was_when_ranks_come_and_go() -> None:
    policy, ranks = RoundRobin(), table(FREE, FREE, FREE, FREE)
    assert [chosen(policy, ranks) for _ in range(2)] == [0, 1]
    ranks.set_room(2, False)
    assert [chosen(policy, ranks) for _ in range(2)] == [3, 0]
    ranks.set_room(2, True)
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
    ranks.set_room(0, False)
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
