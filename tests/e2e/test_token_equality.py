"""Greedy float32 output against `transformers`, token for token, however the scheduler cuts and mixes the work.

The reference is teacher-forced: one forward pass of `transformers` over prompt and answer must have each answer
token as its most likely one. By induction over positions that is what greedy generation gives; for some prompts
`generate` is run as well.
"""

import asyncio
import random

import numpy as np
import pytest
import torch

from model_runner.embedded import embedded_model_dir
from model_runner.torch_runner import TorchRunner
from rank_scheduler.config import CacheConfig, SchedulerConfig
from router.tokenizer import ChatTokenizer
from tests.engine import Engine

pytestmark = pytest.mark.model

NUM_TOKENS = 64
MAX_MODEL_LEN = 1600
RAW_LENGTHS = (1, 2, 3, 5, 8, 13, 15, 16, 17, 31, 32, 33, 64, 100, 128, 200, 256, 400, 800, 1500)
QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain photosynthesis to a child in two sentences.",
    "List three prime numbers and say why they are prime.",
    "Translate 'good morning' into Spanish, French and German.",
    "How do I boil an egg?",
    "What is 17 + 25?",
    "Give me a short story about a fox and a crow.",
    "Why is the sky blue?",
    "Write a Python function that reverses a list.",
)


@pytest.fixture(scope="module")
def model_dir():
    return embedded_model_dir(lambda message: None)


@pytest.fixture(scope="module")
def prompts(model_dir):
    """20 raw prompts of 1 to 1,500 tokens and 20 chats, one and two turns long."""
    tokenizer = ChatTokenizer(model_dir)
    with open("LICENSE", encoding="utf-8") as file:
        text = asyncio.run(tokenizer.encode(file.read(), add_special_tokens=False))
    raw = [text[37 * index : 37 * index + length] for index, length in enumerate(RAW_LENGTHS)]
    chats = []
    for index, question in enumerate(QUESTIONS):
        turn = [{"role": "user", "content": question}]
        more = [{"role": "assistant", "content": "Let me think."}, {"role": "user", "content": QUESTIONS[index - 1]}]
        for messages in (turn, turn + more):
            rendered = tokenizer.render_chat(messages, add_generation_prompt=True)
            chats.append(asyncio.run(tokenizer.encode(rendered, add_special_tokens=False)))
    tokenizer.close()
    assert [len(prompt) for prompt in raw] == list(RAW_LENGTHS)
    return raw + chats


@pytest.fixture(scope="module")
def reference(model_dir):
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()


def make_engine(model_dir, *, budget=512, max_num_seqs=48, **options):
    config = SchedulerConfig(max_num_batched_tokens=budget, max_num_seqs=max_num_seqs)
    runner = TorchRunner(model_dir, scheduler=config, cache=CacheConfig(), dtype="float32", max_model_len=MAX_MODEL_LEN)
    return Engine(runner, config, **options)


def run_together(engine, prompts, order):
    for index in order:
        engine.submit(index, prompts[index], max_tokens=NUM_TOKENS)
    engine.run()
    engine.runner.close()
    return [engine.tokens[index] for index in range(len(prompts))]


def shuffled(prompts, seed):
    order = list(range(len(prompts)))
    random.Random(seed).shuffle(order)
    return order


@pytest.fixture(scope="module")
def answers(model_dir, prompts):
    """All prompts together, none sharing anything with another."""
    engine = make_engine(model_dir, enable_prefix_caching=False)
    return run_together(engine, prompts, range(len(prompts)))


def test_every_token_is_the_most_likely_one_by_transformers(prompts, answers, reference):
    for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        assert len(answer) == NUM_TOKENS
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == answer, f"prompt {index} of {len(prompt)} tokens"


def test_generate_gives_the_same(prompts, answers, reference):
    for index in (3, 20):
        inputs = torch.tensor([prompts[index]])
        generated = reference.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            do_sample=False,
            max_new_tokens=NUM_TOKENS,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert generated[0, len(prompts[index]) :].tolist() == answers[index]


def test_alone(model_dir, prompts, answers):
    engine = make_engine(model_dir, max_num_seqs=1, enable_prefix_caching=False)
    some = (0, 4, 9, 19, 23, 36)
    for index in some:
        engine.submit(index, prompts[index], max_tokens=NUM_TOKENS)
    engine.run()
    engine.runner.close()
    assert [engine.tokens[index] for index in some] == [answers[index] for index in some]


def test_together_in_random_order_with_prompts_cut_by_the_budget(model_dir, prompts, answers):
    engine = make_engine(model_dir, budget=97)
    assert run_together(engine, prompts, shuffled(prompts, 1)) == answers
    assert sum(not sampled for plan in engine.plans for sampled in plan.samples) > 20


def test_with_prefix_hits(model_dir, prompts, answers):
    """Every prompt twice in a row: the second finds the first one's blocks, whole prompts included."""
    engine = make_engine(model_dir)
    order = shuffled(prompts, 2)
    for index in order:
        engine.submit(index, prompts[index], max_tokens=2)
    engine.run()
    hits_before = engine.scheduler.load().num_prefix_hits
    engine.tokens.clear()
    engine.ends.clear()
    assert run_together(engine, prompts, order) == answers
    load = engine.scheduler.load()
    full = sum((len(prompt) - 1) // 16 * 16 for prompt in prompts)
    assert load.num_prefix_hits - hits_before >= full


def test_with_forced_preemption(model_dir, prompts, answers):
    engine = make_engine(model_dir, num_blocks=130, max_num_seqs=24)
    assert run_together(engine, prompts, shuffled(prompts, 3)) == answers
    assert engine.scheduler.load().num_preemptions >= 5


def test_prompts_have_the_lengths_they_should(prompts):
    lengths = np.array([len(prompt) for prompt in prompts])
    assert (lengths.min(), lengths.max(), len(lengths)) == (1, 1500, 40)
