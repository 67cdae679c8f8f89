"""Random days in a scheduler's life: every feature, every message at any time, and all tokens checked.

    python -m tests.rank_scheduler.soak --seeds 200 --steps 1000000 --workers 0

Each seed draws a configuration and a load. After every call the scheduler's invariants are checked; at the end
every request has ended once, what was generated equals the simulated model's oracle, and nothing is held.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import numpy as np

from kv_transfer.connector import LoadFinished, SendFinished
from model_runner.simulated import SimulatedRunner, expected_tokens
from rank_scheduler.config import CacheConfig, SchedulerConfig, SpeculativeConfig
from rank_scheduler.interface import KvGroup, PauseState
from rank_scheduler.messages import (
    EncoderInput,
    Extend,
    FinishReason,
    Grammar,
    GrammarKind,
    Repetition,
    SamplingParams,
    Submit,
)
from rank_scheduler.performance import PerformanceModel
from rank_scheduler.plan import StepPlan, StepResult
from rank_scheduler.prefix_chain import pack, unpack
from tests.engine import Engine
from tests.rank_scheduler.simulated_connector import SimulatedConnector

VOCAB_SIZE = 40
EOS = 7
BLOCK_SIZE = 4
MAX_MODEL_LEN = 48
GROUPS = (
    (KvGroup(),),
    (KvGroup(), KvGroup(sliding_window=9)),
    (KvGroup(sliding_window=6),),
    (KvGroup(), KvGroup(sliding_window=5), KvGroup(sliding_window=12)),
)


class EveryThird:
    """A grammar that allows a third of the tokens, another third at each place, and the end from the fourth on."""

    def __init__(self) -> None:
        self.num_taken = 0

    def allows(self, token_id: int) -> bool:
        return token_id == EOS if self.num_taken > 6 else token_id % 3 == self.num_taken % 3

    def accept(self, token_id: int) -> bool:
        if not self.allows(token_id):
            return False
        self.num_taken += 1
        return True

    def num_valid(self, token_ids: list[int]) -> int:
        before = self.num_taken
        count = 0
        for token_id in token_ids:
            if not self.accept(token_id):
                break
            count += 1
        self.num_taken = before
        return count

    def fill_mask(self, mask: np.ndarray) -> None:
        allowed = np.array([self.allows(token) for token in range(VOCAB_SIZE)])
        packed = np.packbits(np.pad(allowed, (0, len(mask) * 32 - VOCAB_SIZE)), bitorder="little")
        mask[:] = packed.view("<u4")

    def rollback(self, num_tokens: int) -> None:
        self.num_taken -= num_tokens


def _allowed(generated: list[int]) -> np.ndarray:
    matcher = EveryThird()
    matcher.num_taken = len(generated)
    return np.array([matcher.allows(token) for token in range(VOCAB_SIZE)])


class Soak:
    """One seed."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.is_async = rng.random() < 0.4
        speculates = not self.is_async and rng.random() < 0.4
        self.is_encoder_decoder = rng.random() < 0.1
        self.has_encoder = self.is_encoder_decoder or rng.random() < 0.25
        groups = (KvGroup(),) if rng.random() < 0.5 else rng.choice(GROUPS)
        max_num_seqs = rng.randint(1, 8)
        budget = rng.randint(max(max_num_seqs, 4), 40)
        chunked = rng.random() < 0.85
        if self.is_encoder_decoder:
            chunked = False
        if not chunked:
            budget = MAX_MODEL_LEN + rng.randint(0, 8)
        fields = {
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": budget,
            "max_num_scheduled_tokens": rng.choice([None, budget if not chunked else rng.randint(4, budget)]),
            "max_num_active_seqs": rng.choice([None, rng.randint(1, max_num_seqs)]),
            "max_num_inflight_kv_loads": rng.choice([None, 1, 3]),
            "max_async_kv_loads_per_step": rng.choice([None, 1, 2]),
            "long_prefill_token_threshold": rng.choice([0, 0, 6]) if not self.has_encoder else 0,
            "long_prefill_token_threshold_adaptive": rng.random() < 0.5,
            "enable_chunked_prefill": chunked,
            "policy": rng.choice(["fcfs", "priority"]),
            "scheduler_reserve_full_isl": rng.random() < 0.7,
            "watermark": rng.choice([0.0, 0.0, 0.1]),
            "prefill_schedule_interval": rng.choice([1, 1, 3]),
            "cache_aware_admission_window": rng.choice([0, 4]),
            "cache_aware_admission_threshold": rng.choice([0.0, 0.5]),
            "max_head_bypasses": rng.choice([0, 2, 8]),
            "preemption_policy": rng.choice(["least_lost", "last"]),
            "max_kv_load_retries": rng.choice([0, 1]),
        }
        if chunked and fields["long_prefill_token_threshold"]:
            fields["short_prefill_tokens"] = rng.choice([0, 4, 12])
        if speculates:
            fields["speculative"] = SpeculativeConfig(
                num_speculative_tokens=rng.randint(1, 3), prompt_lookup_min=1, prompt_lookup_max=rng.randint(1, 3)
            )
        if self.has_encoder:
            fields |= {
                "is_multimodal_model": True,
                "max_num_encoder_input_tokens": rng.choice([8, 20]),
                "encoder_cache_size": rng.choice([8, 16, 40]),
                "disable_chunked_mm_input": self.is_encoder_decoder or rng.random() < 0.3,
            }
            # A step must be able to hold the largest item whole.
            fields["max_num_scheduled_tokens"] = None
            fields["max_num_batched_tokens"] = max(budget, 12)
        self.config = config = SchedulerConfig(**fields)
        columns = -(-MAX_MODEL_LEN // BLOCK_SIZE)
        num_blocks = 1 + columns * len(groups) + rng.randint(2 if self.is_encoder_decoder else 0, 40)
        self.groups = groups
        self.connector = SimulatedConnector() if not self.has_encoder and rng.random() < 0.5 else None
        self.runner = SimulatedRunner(
            scheduler=config,
            cache=CacheConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE),
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=frozenset({EOS}),
            kv_groups=groups,
            is_encoder_decoder=self.is_encoder_decoder,
        )
        if self.connector is not None:
            self.connector.runner = self.runner
            self.runner.kv_hooks = self.connector
        self.fails_steps = rng.random() < 0.2
        self.engine = Engine(
            self.runner,
            config,
            enable_prefix_caching=rng.random() < 0.8,
            kv_groups=groups,
            is_encoder_decoder=self.is_encoder_decoder,
            async_scheduling=self.is_async,
            emit_kv_events=rng.random() < 0.3,
            record_prefix_changes=True,
            connector=self.connector,
            kv_load_failure_policy=rng.choice(["recompute", "recompute", "fail"]),
            performance=_PERFORMANCE,
        )
        self.findable: set[int] = set()
        """Prefixes, by the changes that were told."""
        self.next_id = 0
        self.submits: dict[int, Submit] = {}
        self.turns: dict[int, list[Extend]] = {}
        self.given: dict[int, int] = {}
        """Extensions given to a session so far."""
        self.grammars: deque[tuple[int, int]] = deque()
        self.prefixes = [[rng.randrange(VOCAB_SIZE) for _ in range(20)] for _ in range(3)]
        self.num_steps = 0
        self.is_draining = False

    # ---- the world ----

    def submit(self) -> None:
        rng = self.rng
        request_id = self.next_id
        self.next_id += 1
        shared = rng.choice(self.prefixes)[: rng.choice([0, 8, 12, 16, 20])]
        prompt = shared + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(0 if shared else 1, 16))]
        if rng.random() < 0.1:
            prompt = (rng.choice([[1, 2], [3], [4, 5, 6]]) * 20)[: rng.randint(4, 24)]
        fields: dict[str, object] = {"priority": rng.choice([0, 0, 1, 5]), "request_id": f"r{request_id}"}
        if rng.random() < 0.1:
            fields["cache_salt"] = rng.choice(["a", "b"])
        if rng.random() < 0.1:
            fields["reads_prefix_cache"] = False
        is_session = not self.has_encoder and rng.random() < 0.1
        if is_session:
            fields["is_session"] = True
        elif rng.random() < 0.15:
            fields["grammar"] = Grammar(GrammarKind.LARK, "every third")
        if self.is_encoder_decoder:
            fields["encoder_inputs"] = (self._item(0, rng.randint(1, 8)),)
        elif self.has_encoder and len(prompt) > 10 and rng.random() < 0.5:
            first = rng.randint(0, 3)
            items = [self._item(first, rng.randint(1, 4))]
            if rng.random() < 0.5:
                items.append(self._item(first + items[0].length + rng.randint(0, 1), rng.randint(1, 2)))
            fields["encoder_inputs"] = tuple(items)
        if self.connector is not None and not is_session and rng.random() < 0.5:
            fields["kv_transfer_params"] = {
                "external": rng.randint(0, len(prompt)),
                "is_async": int(rng.random() < 0.8),
                "keep": int(rng.random() < 0.2),
                "unknown": rng.choice([0, 0, 2]),
            }
        sampling: dict[str, object] = {"min_tokens": rng.choice([0, 0, 2])} if "grammar" not in fields else {}
        if rng.random() < 0.1:
            sampling["repetition"] = Repetition(max_pattern_size=3, min_count=2)
        params = SamplingParams(
            seed=1,
            max_tokens=rng.randint(2, 20),
            temperature=0.0,
            ignore_eos=rng.random() < 0.5,
            stop_token_ids=tuple(rng.sample(range(VOCAB_SIZE), rng.choice([0, 0, 2]))),
            **sampling,
        )
        submit = Submit(request_id, np.array(prompt, "<i4").tobytes(), params, **fields)
        self.submits[request_id] = submit
        if is_session:
            self.turns[request_id] = [
                Extend(
                    request_id,
                    np.array([rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 6))], "<i4").tobytes(),
                    rng.randint(1, 4),
                )
                for _ in range(rng.randint(0, 2))
            ] + [Extend(request_id, is_last=True)]
            self.given[request_id] = 0
        self.engine.scheduler.add(request_id % 2, submit, self.engine.now)
        if rng.random() < 0.05:
            self.engine.scheduler.add(request_id % 2, submit, self.engine.now)

    def _item(self, offset: int, length: int) -> EncoderInput:
        number = self.rng.randint(0, 3)
        return EncoderInput(f"{number}/{length}".encode(), offset, length, bytes([number]))

    def happen(self) -> None:
        """Something from outside, at any time."""
        rng, scheduler, now = self.rng, self.engine.scheduler, self.engine.now
        self.answer()
        living = sorted(key[1] for key in scheduler._state.sequences)
        if living and rng.random() < 0.03:
            request_id = rng.choice(living)
            scheduler.abort(request_id % 2, request_id, now)
        if rng.random() < 0.05:
            nobody = self.next_id + 1000
            scheduler.abort(0, nobody, now)
            scheduler.extend(0, Extend(nobody, b"\0\0\0\0"), now)
            scheduler.grammar_compiled(0, nobody, None, "", now)
            scheduler.load_finished(LoadFinished((0, nobody)), now)
            scheduler.send_finished(SendFinished((0, nobody)), now)
        if rng.random() < 0.02:
            scheduler.set_pause(rng.choice([*PauseState, PauseState.UNPAUSED]), now)
        if living and rng.random() < 0.1:
            for explanation in scheduler.explain(f"r{rng.choice(living)}"):
                assert explanation.timeline
                is_waiting = explanation.state != "running" and not explanation.state.startswith("finished")
                assert (explanation.message != "") == is_waiting, explanation
        scheduler.take_kv_events()
        stored, removed = map(set, map(unpack, scheduler.take_prefix_changes()))
        assert not stored & removed
        self.findable = self.findable - removed | stored
        assert self.findable == set(unpack(pack(scheduler.findable_prefixes())))
        scheduler.check_integrity()

    def answer(self) -> None:
        """What the scheduler has asked for, sooner or later: grammars, loads, the next turn."""
        rng, scheduler, now = self.rng, self.engine.scheduler, self.engine.now
        self.grammars += [(action.owner, action.id) for action in scheduler.take_compile_actions()]
        if self.grammars and rng.random() < 0.6:
            owner, request_id = self.grammars.popleft()
            if rng.random() < 0.1:
                scheduler.grammar_compiled(owner, request_id, None, "no such grammar", now)
            else:
                scheduler.grammar_compiled(owner, request_id, EveryThird(), "", now)
        for request_id, turns in self.turns.items():
            if self.given[request_id] < len(turns) and rng.random() < 0.1:
                scheduler.extend(request_id % 2, turns[self.given[request_id]], now)
                self.given[request_id] += 1
        if self.connector is not None:
            if rng.random() < 0.4:
                event = self.connector.complete(rng, self.runner, fails=0.2)
                if event is not None:
                    scheduler.load_finished(event, now)
                    if rng.random() < 0.2:
                        scheduler.load_finished(event, now)
            if self.connector.kept and rng.random() < 0.2:
                key = rng.choice(sorted(self.connector.kept))
                self.connector.kept.discard(key)
                scheduler.send_finished(SendFinished(key), now)

    def step(self) -> None:
        engine, scheduler, rng = self.engine, self.engine.scheduler, self.rng
        engine.now += 1.0
        plan = scheduler.schedule(engine.now) if scheduler.has_work() else None
        if plan is not None:
            self.num_steps += 1
            assert plan.total_tokens <= self.config.num_scheduled_tokens_limit
            engine.in_flight.append(plan)
        self.check_caps(plan)
        if plan is None and not engine.in_flight:
            self.check_not_stuck()
        engine.take(scheduler.take_frames())
        scheduler.check_integrity()
        if not self.is_draining and rng.random() < 0.3:
            self.happen()
        if engine.in_flight and (plan is None or len(engine.in_flight) == scheduler.max_num_steps_in_flight):
            if self.fails_steps and rng.random() < 0.02:
                while engine.in_flight:
                    # The runner has not seen any of it, so it knows nothing of what only these plans carried.
                    plan = engine.in_flight.popleft()
                    engine.take(scheduler.fail(plan, "the step failed", engine.now))
                    if plan.connector_metadata is not None:
                        self.connector.start_load_kv(plan.connector_metadata)
                    scheduler.check_integrity()
            else:
                plan = engine.in_flight[0]
                engine.finish_step()
                if rng.random() < 0.03:
                    engine.take(scheduler.update(plan, StepResult(np.zeros((0, 1), np.int32)), engine.now))
                    engine.take(scheduler.fail(plan, "late", engine.now))

    def check_not_stuck(self) -> None:
        """A scheduler that waits for an event must have somebody who will bring one."""
        scheduler, state = self.engine.scheduler, self.engine.scheduler._state
        if scheduler.has_work() or state.pause is not PauseState.UNPAUSED:
            return
        may_go_on = [*state.waiting, *state.loaded, *state.load_candidates]
        may_go_on += [state.batch.at(slot) for slot in state.batch.order.tolist() if not state.batch.is_idle[slot]]
        assert not may_go_on or state.num_loading or state.quarantine or state.sending, "nothing wakes the scheduler"

    def check_caps(self, plan: StepPlan | None) -> None:
        state, config = self.engine.scheduler._state, self.config
        assert len(state.batch) <= config.active_seqs_limit
        if config.max_num_inflight_kv_loads is not None:
            assert state.num_loads <= config.max_num_inflight_kv_loads
        for sequence in state.waiting:
            assert sequence.num_bypasses <= config.max_head_bypasses, "a head was passed too often"

    # ---- a day ----

    def run(self, num_steps: int) -> int:
        """At least so many steps, then until everything has ended; returns the number of steps."""
        rng = self.rng
        while self.num_steps < num_steps:
            if len(self.engine.scheduler._state.sequences) < 14 and rng.random() < 0.5:
                self.submit()
            self.happen()
            for _ in range(rng.randint(1, 3)):
                self.step()
        self.drain()
        self.check_ends()
        return self.num_steps

    def drain(self) -> None:
        scheduler, engine = self.engine.scheduler, self.engine
        self.is_draining = True
        scheduler.set_pause(PauseState.UNPAUSED, engine.now)
        idle = 0
        while scheduler._state.sequences or engine.in_flight or scheduler.has_work():
            before = self.num_steps
            self.step()
            # Only what somebody waits for: any other message would wake a scheduler that had given up by mistake.
            self.answer()
            idle = 0 if self.num_steps > before else idle + 1
            assert idle < 1000, (
                f"nothing moves: {scheduler.load()} {[s.state for s in scheduler._state.sequences.values()]}"
            )
        if self.connector is not None:
            while (event := self.connector.complete(self.rng, self.runner)) is not None:
                scheduler.load_finished(event, engine.now)
            for key in sorted(self.connector.kept):
                scheduler.send_finished(SendFinished(key), engine.now)
        scheduler.check_integrity()
        load = scheduler.load()
        assert load.num_free_blocks == load.num_blocks, "blocks leaked"
        assert load.num_loads == load.num_waiting == load.num_running == load.num_deferred == 0, load
        assert load.num_waiting_tokens == 0, load

    def check_ends(self) -> None:
        engine = self.engine
        assert engine.ends.keys() == self.submits.keys()
        for request_id, submit in self.submits.items():
            end = engine.ends[request_id]
            if end.reason is FinishReason.ERROR:
                assert end.message
            if submit.is_session:
                continue
            prompt = np.frombuffer(submit.token_ids, "<i4").tolist()
            self.check_tokens(submit, prompt, engine.tokens[request_id], end.reason)

    def check_tokens(self, submit: Submit, prompt: list[int], tokens: list[int], reason: FinishReason) -> None:
        if not tokens:
            assert reason in (FinishReason.ABORT, FinishReason.ERROR)
            return
        items = submit.encoder_inputs
        sampling = submit.sampling

        def allowed(generated: list[int]) -> np.ndarray | None:
            mask = _allowed(generated) if submit.grammar is not None else None
            if len(generated) < sampling.min_tokens:
                mask = np.ones(VOCAB_SIZE, np.bool_) if mask is None else mask
                mask[[EOS, *sampling.stop_token_ids]] = False
            return mask

        right = expected_tokens(
            prompt,
            len(tokens),
            VOCAB_SIZE,
            kv_groups=self.groups,
            encoder_inputs=() if self.is_encoder_decoder else items,
            cross_inputs=items if self.is_encoder_decoder else (),
            allowed=allowed,
        )
        assert tokens == right, f"{submit.id}: wrong tokens"
        assert len(tokens) <= sampling.max_tokens
        if reason is FinishReason.LENGTH:
            assert len(tokens) == min(sampling.max_tokens, MAX_MODEL_LEN - len(prompt))


_PERFORMANCE = PerformanceModel(
    num_layer_weights=1000,
    num_head_weights=100,
    num_layers=2,
    num_attention_heads=2,
    head_dim=4,
    weight_dtype_size_bytes=4,
    kv_size_bytes_per_token=64,
    peak_flops_per_s=1e9,
    peak_bytes_per_s=1e9,
)


def run_seed(seed: int, num_steps: int) -> int:
    try:
        return Soak(seed).run(num_steps)
    except BaseException:
        print(f"seed {seed} failed: --first-seed {seed} --seeds 1 --steps {num_steps} repeats it", file=sys.stderr)
        raise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1_000_000, help="of all seeds together")
    parser.add_argument("--workers", type=int, default=1, help="processes; 0: one for each core")
    options = parser.parse_args()
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    run = partial(run_seed, num_steps=options.steps // options.seeds)
    with ProcessPoolExecutor(options.workers or os.cpu_count()) as pool:
        total = sum(pool.map(run, seeds))
    print(f"{total} steps over {options.seeds} seeds, all tokens right, nothing held")


if __name__ == "__main__":
    main()
