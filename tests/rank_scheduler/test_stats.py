"""What a scheduler counts: every figure against the same figure counted another way."""

import numpy as np
import pytest

from rank_scheduler.config import SpeculativeConfig
from rank_scheduler.interface import KvGroup
from rank_scheduler.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from rank_scheduler.messages import Extend, Grammar, GrammarKind
from rank_scheduler.performance import PerformanceModel
from rank_scheduler.plan import StepPlan
from rank_scheduler.prefix_hash import ROOT_HASH, hash_blocks
from rank_scheduler.stats import StepStats
from tests.rank_scheduler.small_engine import BLOCK_SIZE, SmallEngine, item, prompt_of, tokens_after

# Prefix cache, events and groups are all here.
pytestmark = pytest.mark.usefixtures("on_both_twins")

PERFORMANCE = PerformanceModel(
    num_layer_weights=1000,
    num_head_weights=100,
    num_layers=3,
    num_attention_heads=2,
    head_dim=5,
    weight_dtype_size_bytes=2,
    kv_size_bytes_per_token=64,
    peak_flops_per_s=1e5,
    peak_bytes_per_s=1e4,
)


def stats_since(engine: SmallEngine) -> StepStats:
    return engine.scheduler.take_stats()


# ---- StepStats ----


def test_steps_and_tokens_are_counted_for_the_interval_and_in_all():
    engine = SmallEngine(max_num_batched_tokens=16)
    for request, length in ((1, 30), (2, 5)):
        engine.submit(request, prompt_of(length, start=request), max_tokens=4)
    engine.run()
    first = stats_since(engine)
    assert first.num_steps == len(engine.plans)
    assert (first.num_prompt_tokens, first.num_generated_tokens) == (35, 8)
    engine.submit(3, prompt_of(6, start=3), max_tokens=2)
    engine.run()
    second = stats_since(engine)
    assert (second.num_prompt_tokens, second.num_generated_tokens) == (6, 2)
    assert stats_since(engine) == StepStats()
    assert (engine.load.num_prompt_tokens, engine.load.num_generated_tokens) == (41, 10)
    assert engine.load.num_steps == first.num_steps + second.num_steps


def test_prompt_tokens_that_were_found_are_not_computed():
    engine = SmallEngine()
    engine.submit(1, prompt_of(18), max_tokens=1)
    engine.run()
    engine.submit(2, prompt_of(18), max_tokens=1)
    engine.run()
    assert engine.load.num_prompt_tokens == 18 + 2


def test_prefix_queries_and_hits_are_those_of_first_admissions():
    engine = SmallEngine()
    engine.submit(1, prompt_of(18), max_tokens=1)
    engine.run()
    stats = stats_since(engine)
    assert (stats.num_prefix_queries, stats.num_prefix_hits) == (18, 0)
    engine.submit(2, prompt_of(18), max_tokens=1)
    engine.submit(3, prompt_of(16), max_tokens=1)
    engine.submit(4, prompt_of(18), max_tokens=1, fields={"reads_prefix_cache": False})
    engine.submit(5, prompt_of(18), max_tokens=1, fields={"cache_salt": "mine"})
    engine.run()
    stats = stats_since(engine)
    assert (stats.num_prefix_queries, stats.num_prefix_hits) == (18 + 16 + 18, 16 + 15)
    assert (stats.num_preempted_prefix_queries, stats.num_preempted_prefix_hits) == (0, 0)
    assert (engine.load.num_prefix_queries, engine.load.num_prefix_hits) == (18 + 52, 31)


def test_a_request_that_waits_is_looked_up_often_and_counted_once():
    engine = SmallEngine(num_blocks=17, max_head_bypasses=0)
    engine.submit(1, prompt_of(40), max_tokens=12)
    engine.step()
    engine.submit(2, prompt_of(40, start=2), max_tokens=1)
    engine.steps(5)
    assert stats_since(engine).num_prefix_queries == 40
    engine.run()
    assert stats_since(engine).num_prefix_queries == 40


def test_lookups_of_preempted_requests_are_counted_apart():
    engine = SmallEngine(num_blocks=17)
    for request in (1, 2):
        engine.submit(request, prompt_of(20, start=request), max_tokens=30)
    engine.run()
    stats = stats_since(engine)
    assert (stats.num_prefix_queries, stats.num_prefix_hits) == (40, 0)
    assert stats.num_preemptions == engine.load.num_preemptions == len(engine.preempted()) > 0
    resumed = [
        entry.cause for request in (1, 2) for entry in engine.explain(request).timeline if entry.event == "resumed"
    ]
    found = [[int(word) for word in cause.split() if word.isdigit()] for cause in resumed]
    assert stats.num_preempted_prefix_hits == sum(hit for hit, _ in found)
    assert stats.num_preempted_prefix_queries == sum(known for _, known in found)


def test_nothing_is_looked_up_without_a_cache():
    engine = SmallEngine(setup={"enable_prefix_caching": False})
    for request in (1, 2):
        engine.submit(request, prompt_of(18), max_tokens=2)
    engine.run()
    stats = stats_since(engine)
    assert (stats.num_prefix_queries, stats.num_prefix_hits) == (0, 0)


def test_loaded_tokens_and_failed_loads_are_counted():
    engine = SmallEngine(with_connector=True)
    for request, external in ((1, 8), (2, 12), (3, 10)):
        fields = {"kv_transfer_params": {"external": external, "is_async": int(request != 3)}}
        engine.submit(request, prompt_of(12, start=request), max_tokens=1, fields=fields)
    engine.step()
    assert engine.load.num_loads == 2
    engine.end_load(1)
    engine.end_load(2, num_valid=4)
    engine.drain()
    stats = stats_since(engine)
    assert (stats.num_external_hits, stats.num_failed_loads) == (8 + 4 + 10, 1)
    assert stats.num_prefix_hits == 0
    for request in (1, 2, 3):
        assert engine.tokens[request] == tokens_after(prompt_of(12, start=request), 1)


def test_drafts_are_counted_by_their_place():
    engine = SmallEngine(speculative=SpeculativeConfig(num_speculative_tokens=3, prompt_lookup_min=1))
    for request in (1, 2, 3):
        engine.submit(request, prompt_of(6, start=request) * 5, max_tokens=30)
    accepted = [0, 0, 0]
    num_drafts = num_draft_tokens = 0
    execute = engine.execute

    def counting(plan):
        nonlocal num_drafts, num_draft_tokens
        result = execute(plan)
        if plan.num_drafts is not None:
            for tokens, count in zip(result.tokens, plan.num_drafts.tolist(), strict=True):
                if count:
                    num_drafts += 1
                    num_draft_tokens += count
                    for place in range(int((tokens >= 0).sum()) - 1):
                        accepted[place] += 1
        return result

    engine.execute = counting
    engine.run()
    stats = stats_since(engine)
    assert num_draft_tokens > sum(accepted) > 0
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (
        num_drafts,
        num_draft_tokens,
        sum(accepted),
    )
    assert stats.accepted_per_position == accepted
    assert accepted == sorted(accepted, reverse=True)
    load = engine.load
    assert (load.num_draft_tokens, load.num_accepted_tokens) == (num_draft_tokens, sum(accepted))
    assert load.num_generated_tokens == stats.num_generated_tokens == 90


@pytest.mark.parametrize("is_async", [False, True])
def test_flops_and_bytes_are_those_of_every_row(is_async):
    engine = SmallEngine(max_num_batched_tokens=16, setup={"performance": PERFORMANCE, "async_scheduling": is_async})
    for request, length in ((1, 30), (2, 5), (3, 9)):
        engine.submit(request, prompt_of(length, start=request), max_tokens=6)
    flops = size_bytes = 0.0
    execute = engine.execute

    def counting(plan: StepPlan):
        nonlocal flops, size_bytes
        batch = engine.runner._batch
        starts = {sequence.slot: sequence.num_computed_tokens for sequence in plan.new_sequences}
        attended = context = 0
        for slot, count in zip(plan.slots.tolist(), plan.num_tokens.tolist(), strict=True):
            start = starts.get(slot, int(batch.num_computed[slot]))
            context += start
            attended += sum(position + 1 for position in range(start, start + count))
        num_tokens, num_sampled = plan.total_tokens, int(plan.samples.sum())
        flops += 2 * 1000 * num_tokens + 2 * 100 * num_sampled * (num_sampled > 0) + 4 * 3 * 2 * 5 * attended
        size_bytes += 2 * (1000 + 100 * (num_sampled > 0)) + 64 * (context + num_tokens)
        return execute(plan)

    engine.execute = counting
    engine.run()
    stats = stats_since(engine)
    assert (stats.estimated_flops, stats.estimated_bytes) == (flops, size_bytes)
    assert (engine.load.estimated_flops, engine.load.estimated_bytes) == (flops, size_bytes)


def test_utilisation_is_that_of_the_latest_step_against_the_nearer_limit():
    engine = SmallEngine(setup={"performance": PERFORMANCE})
    engine.submit(1, prompt_of(10), max_tokens=2)
    for length, start, seconds in ((10, 0, 2.0), (1, 10, 0.5)):
        plan = engine.scheduler.schedule(engine.now)
        assert plan.total_tokens == length
        engine.now += seconds
        engine.take(engine.scheduler.update(plan, engine.runner.execute(plan), engine.now))
        attended = sum(position + 1 for position in range(start, start + length))
        flops = 2 * 1000 * length + 2 * 100 + 120 * attended
        size_bytes = 2 * 1100 + 64 * (start + length)
        expected = max(flops / 1e5, size_bytes / 1e4) / seconds
        assert engine.scheduler.take_stats().utilisation == pytest.approx(expected)


def test_time_that_steps_share_counts_once():
    engine = SmallEngine(setup={"async_scheduling": True})
    engine.submit(1, prompt_of(4), max_tokens=3)
    first = engine.scheduler.schedule(10.0)
    second = engine.scheduler.schedule(11.0)
    engine.scheduler.update(first, engine.runner.execute(first), 14.0)
    assert engine.load.busy_s == 4.0
    third = engine.scheduler.schedule(15.0)
    engine.scheduler.update(second, engine.runner.execute(second), 16.0)
    assert engine.load.busy_s == 6.0
    engine.scheduler.update(third, engine.runner.execute(third), 20.0)
    assert engine.load.busy_s == stats_since(engine).busy_s == 10.0


def test_time_between_steps_is_not_busy():
    engine = SmallEngine()
    for request, at in ((1, 10.0), (2, 50.0)):
        engine.submit(request, prompt_of(4, start=request), max_tokens=1)
        plan = engine.scheduler.schedule(at)
        engine.scheduler.update(plan, engine.runner.execute(plan), at + 1.5)
    assert engine.load.busy_s == 3.0
    engine.submit(3, prompt_of(4, start=3), max_tokens=1)
    plan = engine.scheduler.schedule(60.0)
    engine.scheduler.fail(plan, "broken", 62.0)
    assert engine.load.busy_s == 5.0
    assert stats_since(engine).num_steps == 3


# ---- RankLoad ----


def recount(engine: SmallEngine) -> tuple[int, int, int, int]:
    """(running, waiting, deferred, waiting tokens), sequence by sequence."""
    state = engine.scheduler._state
    running = waiting = deferred = tokens = 0
    for sequence in state.sequences.values():
        found = str(sequence.state)
        is_draining = bool(sequence.num_draining)
        running += found == "running"
        waiting += found in ("waiting", "preempted") and not is_draining
        deferred += found.startswith("waiting_for") or is_draining
        if sequence.slot >= 0:
            batch, slot = state.batch, sequence.slot
            tokens += max(0, int(batch.num_prompt[slot]) - int(batch.num_computed[slot]))
        else:
            tokens += len(sequence.token_ids) - sequence.num_computed
    return running, waiting, deferred, tokens


def assert_load_is_exact(engine: SmallEngine) -> None:
    load = engine.load
    counted = (load.num_running, load.num_waiting, load.num_deferred, load.num_waiting_tokens)
    assert counted == recount(engine)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_the_load_is_exact_at_every_moment(policy, is_async):
    engine = SmallEngine(
        num_blocks=19,
        max_num_seqs=4,
        max_num_batched_tokens=12,
        policy=policy,
        with_connector=True,
        setup={"async_scheduling": is_async},
    )
    for request in range(14):
        fields: dict[str, object] = {"priority": request % 3}
        if request % 4 == 1:
            fields["kv_transfer_params"] = {"external": 8, "is_async": 1}
        if request % 5 == 2:
            fields["is_session"] = True
        if request == 9:
            fields["grammar"] = Grammar(GrammarKind.JSON_OBJECT)
        engine.submit(request, prompt_of(10 + request, start=request), max_tokens=12, fields=fields)
        assert_load_is_exact(engine)
        engine.step()
        assert_load_is_exact(engine)
    for at in range(300):
        if at == 4:
            engine.scheduler.abort(0, 9, engine.now)
            engine.scheduler.abort(0, 11, engine.now)
        if at % 5 == 0:
            engine.end_loads()
        if at % 7 == 0:
            for request in (2, 7, 12):
                if engine.explain(request).state == "waiting_for_input":
                    turn = Extend(request, np.array(prompt_of(9), "<i4").tobytes(), max_tokens=3, is_last=True)
                    engine.scheduler.extend(0, turn, engine.now)
                    assert_load_is_exact(engine)
        engine.step()
        assert_load_is_exact(engine)
        if len(engine.ends) == 14:
            break
    assert len(engine.ends) == 14
    assert engine.load.num_preemptions > 0
    engine.check_empty()


def test_blocks_are_those_of_the_pool():
    engine = SmallEngine(num_blocks=33)
    engine.submit(1, prompt_of(17), max_tokens=3)
    assert (engine.load.num_free_blocks, engine.load.num_blocks) == (32, 32)
    engine.step()
    assert engine.load.num_free_blocks == 27
    engine.run()
    assert engine.load.num_free_blocks == 32


def test_loads_in_progress_and_done_but_not_running_are_counted():
    engine = SmallEngine(with_connector=True, max_num_seqs=1, max_num_inflight_kv_loads=5)
    engine.submit(0, prompt_of(4), max_tokens=6)
    for request in (1, 2):
        fields = {"kv_transfer_params": {"external": 8, "is_async": 1}}
        engine.submit(request, prompt_of(12, start=request), max_tokens=2, fields=fields)
    engine.step()
    assert (engine.load.num_loads, engine.load.num_waiting, engine.load.num_deferred) == (2, 0, 2)
    engine.end_load(2)
    assert (engine.load.num_loads, engine.load.num_waiting, engine.load.num_deferred) == (2, 1, 1)
    engine.drain()


# ---- KV events ----


class Index:
    """What a reader of the events would know."""

    def __init__(self) -> None:
        self.known: set[tuple[bytes, int]] = set()

    def replay(self, engine: SmallEngine) -> int:
        events = engine.scheduler.take_kv_events()
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.known.clear()
            elif isinstance(event, BlockRemoved):
                self.known.remove((event.block_hash, event.group))
            else:
                self._store(event)
        return len(events)

    def _store(self, event: BlockStored) -> None:
        rows = np.array(event.token_ids, np.int32).reshape(-1, BLOCK_SIZE)
        assert len(rows) == len(event.block_hashes) > 0
        parent = event.parent_hash or ROOT_HASH
        for row, block_hash in zip(rows, event.block_hashes, strict=True):
            assert hash_blocks([parent], row[None]) == [block_hash], "these tokens do not have this hash"
            parent = block_hash
            self.known.add((block_hash, event.group))

    def assert_equals_pool(self, engine: SmallEngine) -> None:
        pool = engine.scheduler._state.kv.pool
        assert all(pool.find(block_hash, group) is not None for block_hash, group in self.known)
        assert len(self.known) == sum(map(pool.is_cached, range(1 + pool.num_usable_blocks)))


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("groups", [(KvGroup(),), (KvGroup(), KvGroup(sliding_window=9)), (KvGroup(sliding_window=6),)])
def test_replayed_events_are_the_prefix_cache(groups, is_async):
    engine = SmallEngine(
        num_blocks=1 + 18 * len(groups),
        max_num_seqs=4,
        max_num_batched_tokens=24,
        kv_groups=groups,
        with_connector=True,
        setup={"emit_kv_events": True, "async_scheduling": is_async},
    )
    index = Index()
    num_events = 0
    for request in range(16):
        fields = {"kv_transfer_params": {"external": 8, "is_async": 1}} if request % 4 == 1 else {}
        prompt = prompt_of(8, start=request % 3) + prompt_of(request, start=request)
        engine.submit(request, prompt, max_tokens=20, fields=fields)
    for at in range(400):
        engine.step()
        num_events += index.replay(engine)
        index.assert_equals_pool(engine)
        if at % 3 == 0:
            engine.end_loads()
            num_events += index.replay(engine)
            index.assert_equals_pool(engine)
        if at == 10:
            engine.scheduler.abort(0, engine.running[0], engine.now)
        if len(engine.ends) == 16:
            break
    assert len(engine.ends) == 16
    assert num_events > 20
    assert index.known
    assert engine.scheduler.reset_prefix_cache()
    index.replay(engine)
    assert not index.known
    index.assert_equals_pool(engine)


def test_a_failed_step_and_a_failed_row_take_back_what_they_announced():
    engine = SmallEngine(setup={"emit_kv_events": True})
    index = Index()
    for how in ("step", "row"):
        engine.submit(1, prompt_of(12), max_tokens=3)
        engine.now += 1
        plan = engine.scheduler.schedule(engine.now)
        if how == "step":
            engine.scheduler.fail(plan, "broken", engine.now)
        else:
            result = engine.runner.execute(plan)
            result.failed[0] = "logits are not finite"
            engine.scheduler.update(plan, result, engine.now)
        assert index.replay(engine) == 1 + 3
        assert not index.known
        index.assert_equals_pool(engine)


def test_no_events_unless_asked_for():
    engine = SmallEngine()
    engine.submit(1, prompt_of(12), max_tokens=3)
    engine.run()
    assert engine.scheduler.take_kv_events() == []


def test_salt_and_encoder_items_make_other_blocks():
    engine = SmallEngine(is_multimodal_model=True, setup={"emit_kv_events": True})
    stored = []
    for request, fields in enumerate(
        ({}, {"cache_salt": "a"}, {"encoder_inputs": (item(0, 4, 1),)}, {"encoder_inputs": (item(0, 4, 2),)})
    ):
        engine.submit(request, prompt_of(8), max_tokens=1, fields=fields)
        engine.run()
        (event,) = engine.scheduler.take_kv_events()
        assert event.parent_hash is None
        stored.append(event.block_hashes[0])
    assert len(set(stored)) == 4
