"""Scheduler and torch runner together on the embedded model: no feature of the one changes a token of the other.

All engines share one loaded runner; `undisturbed` has what each request brings alone with its like, in a large pool.
"""

from __future__ import annotations

import asyncio
import json
import queue
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import pytest

from cluster.grammar_matcher import Vocabulary
from cluster.structured_output import GrammarCompiler
from model_runner.runner import Capacity
from model_runner.torch_runner import TorchRunner
from rank_scheduler.config import CacheConfig, SchedulerConfig
from rank_scheduler.messages import FinishReason, Grammar, GrammarKind, Repetition
from rank_scheduler.plan import StepPlan, StepResult
from router.tokenizer import ChatTokenizer
from tests.engine import Engine

pytestmark = pytest.mark.model

NUM_TOKENS = 24
MAX_NUM_SEQS = 24
PATIENCE_S = 60.0
REPETITIVE = (
    "The cat sat on the mat. The cat sat on the mat. The cat sat",
    "1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2,",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul(a, b):\n    return",
)
OTHERS = (
    "The history of the bicycle began when",
    "Once upon a time, a fox met a crow who",
    "Water boils at",
)
GREEDY: dict[str, Any] = {"temperature": 0.0}
SEEDED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 7}

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"type": "string", "enum": ["cat", "dog", "horse"]},
        "age": {"type": "integer", "minimum": 1, "maximum": 30},
        "names": {"type": "array", "items": {"type": "string", "maxLength": 8}, "minItems": 1, "maxItems": 2},
        "home": {
            "type": "object",
            "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}, "is_farm": {"type": "boolean"}},
            "required": ["zip", "is_farm"],
            "additionalProperties": False,
        },
    },
    "required": ["kind", "age", "names", "home"],
    "additionalProperties": False,
}
CHOICES = ["a fox", "a crow", "a fox and a crow"]
REGEX = r"[0-9]{1,3} (degrees|kelvin)( \([CF]\))?"


class Request(NamedTuple):
    text: str
    sampling: dict[str, Any]
    grammar: Grammar | None = None
    is_right: Callable[[str], bool] | None = None


def is_of_schema(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


JSON = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
FREE = [Request(text, sampling) for sampling in (GREEDY, SEEDED) for text in (*REPETITIVE, *OTHERS)]
FORMATTED = [
    Request(text, sampling, grammar, is_right)
    for sampling in (GREEDY, SEEDED)
    for text, grammar, is_right in (
        ("An animal of my farm as JSON:\n", JSON, is_of_schema),
        ("Water boils at ", Grammar(GrammarKind.REGEX, REGEX), lambda text: bool(re.fullmatch(REGEX, text))),
        ("The story is about ", Grammar(GrammarKind.CHOICE, json.dumps(CHOICES)), lambda text: text in CHOICES),
        ("{", Grammar(GrammarKind.LARK, 'start: "[" (NUMBER ", ")~3 "7]"\nNUMBER: /[1-9]/'), None),
    )
]


class SharedRunner:
    """A loaded runner that one engine after the other may load. What an ended one left in its slots nobody reads."""

    def __init__(self, runner: TorchRunner) -> None:
        self._runner = runner
        self._capacity = runner.load()

    def load(self) -> Capacity:
        return self._capacity

    def execute(self, plan: StepPlan) -> StepResult:
        return self._runner.execute(plan)

    def close(self) -> None:
        self._runner.close()


@pytest.fixture(scope="module")
def runner(embedded_dir: Path) -> Iterator[SharedRunner]:
    runner = SharedRunner(
        TorchRunner(
            embedded_dir,
            scheduler=SchedulerConfig(max_num_seqs=MAX_NUM_SEQS),
            cache=CacheConfig(num_blocks=400),
            dtype="float32",
            num_threads=1,
            max_model_len=256,
        )
    )
    yield runner
    runner.close()


class Text:
    """The model's tokenizer, without its event loop."""

    def __init__(self, model_dir: Path) -> None:
        self._tokenizer = ChatTokenizer(model_dir)

    def encode(self, text: str) -> list[int]:
        return asyncio.run(self._tokenizer.encode(text, add_special_tokens=False))

    def chat(self, question: str) -> list[int]:
        messages = [{"role": "user", "content": question}]
        return self.encode(self._tokenizer.render_chat(messages, add_generation_prompt=True))

    def decode(self, token_ids: list[int]) -> str:
        return asyncio.run(self._tokenizer.decode(token_ids))

    def close(self) -> None:
        self._tokenizer.close()


@pytest.fixture(scope="module")
def text(embedded_dir: Path) -> Iterator[Text]:
    text = Text(embedded_dir)
    yield text
    text.close()


class ModelEngine(Engine):
    """An engine whose grammars are compiled by the rank's own compiler, as requests come."""

    def __init__(self, runner: SharedRunner, compiler: Compiler, config: dict[str, Any], **setup: Any) -> None:
        super().__init__(runner, SchedulerConfig(**({"max_num_seqs": MAX_NUM_SEQS} | config)), **setup)
        self._compiler = compiler

    def submit(self, *request: Any, **options: Any) -> None:
        super().submit(*request, **options)
        for action in self.scheduler.take_compile_actions():
            owner, request_id, matcher, error, _ = self._compiler(action)
            self.scheduler.grammar_compiled(owner, request_id, matcher, error, self.now)

    def assert_nothing_held(self) -> None:
        load = self.scheduler.load()
        held = (load.num_running, load.num_waiting, load.num_deferred, load.num_blocks - load.num_free_blocks)
        assert held == (0, 0, 0, 0)
        self.scheduler.check_integrity()


class Compiler:
    """`GrammarCompiler`, and the wait for its answer."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._answers: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._compiler = GrammarCompiler(vocabulary, lambda *answer: self._answers.put(answer), timeout_s=PATIENCE_S)

    def __call__(self, action: Any) -> tuple[Any, ...]:
        self._compiler.compile(action)
        return self._answers.get(timeout=2 * PATIENCE_S)

    def close(self) -> None:
        self._compiler.close()


MakeEngine = Callable[..., ModelEngine]


@pytest.fixture(scope="module")
def make_engine(runner: SharedRunner, embedded_dir: Path) -> Iterator[MakeEngine]:
    """Takes `num_blocks`, `max_model_len` and `async_scheduling` of the setup, and fields of the configuration."""
    capacity = runner.load()
    compiler = Compiler(Vocabulary(embedded_dir / "tokenizer.json", capacity.vocab_size, capacity.eos_token_ids))

    def make(**options: Any) -> ModelEngine:
        setup = {
            name: options.pop(name) for name in ("num_blocks", "max_model_len", "async_scheduling") if name in options
        }
        return ModelEngine(runner, compiler, options, **setup)

    yield make
    compiler.close()


def speculative(num_tokens: int = 4) -> dict[str, Any]:
    # The model's steps are small here, for which the configuration rightly warns.
    return {"speculative": {"num_speculative_tokens": num_tokens}}


def run(engine: ModelEngine, requests: list[Request], text: Text) -> list[list[int]]:
    """The tokens of all requests, which come at once."""
    for index, request in enumerate(requests):
        options = request.sampling | ({"ignore_eos": False, "max_tokens": 90} if request.grammar else {})
        engine.submit(
            index,
            text.encode(request.text),
            **({"max_tokens": NUM_TOKENS} | options),
            fields={"grammar": request.grammar},
        )
    engine.run()
    engine.assert_nothing_held()
    assert all(end.reason is not FinishReason.ERROR for end in engine.ends.values()), engine.ends
    return [engine.tokens[index] for index in range(len(requests))]


@pytest.fixture(scope="module")
def undisturbed(make_engine: MakeEngine, text: Text) -> list[list[int]]:
    """Of `FREE`."""
    return run(make_engine(), FREE, text)


@pytest.fixture(scope="module")
def formatted(make_engine: MakeEngine, text: Text) -> list[list[int]]:
    """Of `FORMATTED`."""
    return run(make_engine(), FORMATTED, text)


# ---- structured output ----


def test_outputs_have_their_format_and_end_with_it(
    formatted: list[list[int]], text: Text, runner: SharedRunner
) -> None:
    eos = runner.load().eos_token_ids
    outputs = [text.decode([token for token in tokens if token not in eos]) for tokens in formatted]
    for request, tokens, output in zip(FORMATTED, formatted, outputs, strict=True):
        assert tokens[-1] in eos
        assert request.is_right is None or request.is_right(output), output
    # The Lark grammar leaves a number in each of three places.
    for output in (outputs[3], outputs[7]):
        assert re.fullmatch(r"\[([1-9], ){3}7\]", output), output
    assert outputs[0] != outputs[4], "sampling found nothing to choose"


def test_a_format_changes_nothing_for_others(
    make_engine: MakeEngine, text: Text, undisturbed: list[list[int]], formatted: list[list[int]]
) -> None:
    requests = [FREE[0], FORMATTED[1], FREE[9], FORMATTED[6], FREE[4]]
    tokens = run(make_engine(), requests, text)
    assert tokens == [undisturbed[0], formatted[1], undisturbed[9], formatted[6], undisturbed[4]]


# ---- speculation ----


def test_speculation_changes_no_token(
    make_engine: MakeEngine, text: Text, undisturbed: list[list[int]], record_property: Callable[[str, object], None]
) -> None:
    engine = make_engine(**speculative())
    tokens = run(engine, FREE, text)
    assert tokens == undisturbed
    load, stats = engine.scheduler.load(), engine.scheduler.take_stats()
    record_property("draft_tokens", load.num_draft_tokens)
    record_property("accepted_tokens", load.num_accepted_tokens)
    print(f"accepted {load.num_accepted_tokens} of {load.num_draft_tokens} draft tokens")
    assert load.num_draft_tokens >= 40
    assert load.num_accepted_tokens >= 0.3 * load.num_draft_tokens
    assert sum(stats.accepted_per_position) == stats.num_accepted_tokens == load.num_accepted_tokens
    assert stats.accepted_per_position == sorted(stats.accepted_per_position, reverse=True)
    assert load.num_generated_tokens == len(FREE) * NUM_TOKENS


def test_speculation_takes_fewer_steps_where_text_repeats_itself(
    make_engine: MakeEngine, text: Text, undisturbed: list[list[int]]
) -> None:
    engine = make_engine(**speculative())
    assert run(engine, FREE[:1], text) == undisturbed[:1]
    assert len(engine.plans) <= NUM_TOKENS * 3 // 4


def test_speculation_within_a_format_changes_no_token(
    make_engine: MakeEngine, text: Text, formatted: list[list[int]]
) -> None:
    """Beside the others, words of few letters: drafts that come true, and such as the grammar does not allow."""
    words = Grammar(GrammarKind.REGEX, "(yes no |no yes ){9}end")
    more = [Request("yes no yes no yes no", sampling, words) for sampling in (GREEDY, SEEDED)]
    expected = formatted + run(make_engine(), more, text)
    engine = make_engine(**speculative())
    assert run(engine, [*FORMATTED, *more], text) == expected
    assert engine.scheduler.load().num_accepted_tokens > 10


@pytest.mark.parametrize("options", [speculative(), {"async_scheduling": True}], ids=["speculative", "async"])
def test_preemption_within_a_format_changes_no_token(
    make_engine: MakeEngine, text: Text, formatted: list[list[int]], options: dict[str, Any]
) -> None:
    engine = make_engine(num_blocks=9, max_model_len=128, **options)
    assert run(engine, FORMATTED, text) == formatted
    assert engine.scheduler.load().num_preemptions >= 1


# ---- priority, preemption, steps ahead ----


@pytest.mark.parametrize(("limits", "reason"), [({"max_num_seqs": 3}, "slots"), ({"num_blocks": 13}, "blocks")])
def test_a_high_priority_overtakes_a_full_batch(
    make_engine: MakeEngine, text: Text, limits: dict[str, int], reason: str
) -> None:
    """Three of four blocks each run; one of them gives way at once, and loses no token."""
    source = text.encode("\n".join((*REPETITIVE, *OTHERS)) * 3)
    low, waiting, high = (0, 1, 2), 3, 4

    def submit(engine: ModelEngine, index: int) -> None:
        fields = {"priority": 0 if index == high else 5}
        sampling = SEEDED if index % 2 else GREEDY
        engine.submit(index, source[5 * index :][:50], 4 if index == high else 12, fields=fields, **sampling)

    engine = make_engine(policy="priority", max_model_len=64, **limits)
    for index in (*low, waiting):
        submit(engine, index)
    for _ in range(5):
        engine.step()
    assert [len(engine.tokens[index]) for index in (*low, waiting)] == [5, 5, 5, 0]
    assert engine.explain(waiting).reason == reason
    submit(engine, high)
    plan = engine.step()
    assert plan is not None
    (arrived,) = plan.new_sequences
    assert arrived.token_ids.tolist() == source[5 * high :][:50]
    assert arrived.slot in plan.slots
    (victim,) = [index for index in low if engine.explain(index).num_preemptions]
    ended: list[int] = []
    while engine.scheduler.has_work():
        engine.step()
        ended += [index for index in engine.ends if index not in ended]
    engine.assert_nothing_held()
    assert ended[0] == high
    assert engine.scheduler.load().num_preemptions == engine.explain(victim).num_preemptions == 1
    assert [event.event for event in engine.explain(victim).timeline].count("resumed") == 1
    undisturbed = make_engine()
    for index in range(5):
        submit(undisturbed, index)
    undisturbed.run()
    assert engine.tokens == undisturbed.tokens


def test_steps_planned_ahead_change_no_token(make_engine: MakeEngine, text: Text, undisturbed: list[list[int]]) -> None:
    engine = make_engine(async_scheduling=True)
    assert engine.scheduler.max_num_steps_in_flight == 2
    assert run(engine, FREE, text) == undisturbed


def test_steps_planned_ahead_change_no_format(
    make_engine: MakeEngine, text: Text, undisturbed: list[list[int]], formatted: list[list[int]]
) -> None:
    engine = make_engine(async_scheduling=True)
    assert run(engine, [FREE[10], *FORMATTED[1:4], FREE[2]], text) == [undisturbed[10], *formatted[1:4], undisturbed[2]]


def test_preemption_with_steps_ahead_loses_no_token(
    make_engine: MakeEngine, text: Text, undisturbed: list[list[int]]
) -> None:
    engine = make_engine(async_scheduling=True, num_blocks=21)
    assert run(engine, FREE, text) == undisturbed
    assert engine.scheduler.load().num_preemptions >= 3
    num_sampled = sum(int(plan.samples.sum()) for plan in engine.plans)
    assert num_sampled == len(FREE) * NUM_TOKENS, "a token was computed twice"


def test_a_hundred_requests_through_room_for_five(make_engine: MakeEngine, text: Text) -> None:
    """Each has a prompt of 15 tokens, and most grow into a second block."""
    source = text.encode(" ".join((*REPETITIVE, *OTHERS)) * 3)
    prompts = [source[index : index + 15] for index in range(100)]

    def answers(engine: ModelEngine) -> list[list[int]]:
        for index, prompt in enumerate(prompts):
            engine.submit(index, prompt, 2 + index % 3, **(SEEDED if index % 2 else GREEDY))
        engine.run()
        engine.assert_nothing_held()
        assert {end.reason for end in engine.ends.values()} == {FinishReason.LENGTH}
        return [engine.tokens[index] for index in range(100)]

    small = make_engine(num_blocks=1 + 5 * 2, max_model_len=32)
    assert answers(small) == answers(make_engine())
    assert max(len(plan.slots) for plan in small.plans) <= 10
    assert small.scheduler.load().num_preemptions >= 5


# ---- how an output ends ----


def test_min_tokens_keep_a_short_answer_going(make_engine: MakeEngine, text: Text, runner: SharedRunner) -> None:
    eos = runner.load().eos_token_ids
    prompt = text.chat("What is the capital of France? Answer with one word.")
    engine = make_engine(**speculative())
    engine.submit(0, prompt, 40, ignore_eos=False)
    engine.run()
    shortest = len(engine.tokens[0])
    assert engine.tokens[0][-1] in eos
    assert shortest < 30
    engine.submit(1, prompt, 40, ignore_eos=False, min_tokens=shortest)
    engine.submit(2, prompt, 40, ignore_eos=False, min_tokens=shortest - 1)
    engine.run()
    engine.assert_nothing_held()
    assert len(engine.tokens[1]) > shortest
    assert engine.tokens[1][: shortest - 1] == engine.tokens[0][:-1]
    assert engine.tokens[1][shortest - 1] not in eos
    assert engine.tokens[2] == engine.tokens[0]


@pytest.mark.parametrize("is_speculative", [False, True])
def test_an_output_that_repeats_itself_ends(
    make_engine: MakeEngine, text: Text, undisturbed: list[list[int]], is_speculative: bool
) -> None:
    """The second of the free prompts goes round in a circle of 12 tokens."""
    engine = make_engine(**(speculative() if is_speculative else {}))
    engine.submit(1, text.encode(FREE[1].text), 2 * NUM_TOKENS, repetition=Repetition(12, 2, 2))
    engine.submit(2, text.encode(FREE[2].text), NUM_TOKENS, repetition=Repetition(1, 9))
    engine.run()
    engine.assert_nothing_held()
    assert engine.ends[1].reason is FinishReason.REPETITION
    assert engine.ends[2].reason is FinishReason.LENGTH
    tokens = engine.tokens[1]
    assert tokens == undisturbed[1]
    assert tokens[-12:] == tokens[-24:-12]
