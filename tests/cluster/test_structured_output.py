"""Grammars on real vocabularies: masks, acceptance and text agree, and nobody waits for a compiler without end."""

from __future__ import annotations

import itertools
import json
import queue
import random
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from cluster import structured_output
from cluster.grammar_matcher import Matcher, Vocabulary
from cluster.structured_output import GrammarCompiler
from rank_scheduler.messages import Grammar, GrammarKind
from rank_scheduler.structured_output import CompileGrammar, GrammarMatcher
from tests.router.small_tokenizer import IM_END, IM_START, byte_tokenizer

VOCAB_SIZE = 299  # 260 of them are the tokenizer's; not a multiple of 32
TIMEOUT_S = 30.0
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {"node": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2}},
    "type": "object",
    "properties": {"root": {"$ref": "#/$defs/node"}, "kind": {"enum": ["oak", "日本", 'a"b']}},
    "required": ["root", "kind"],
    "additionalProperties": False,
}
WORDS = ["yes", "no", "nothing", "😀", 'say "hi"\n', "<think>", "back\\slash/\x7f"]


def schema(value: Any) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(value))


GRAMMARS = {
    "person": schema(PERSON),
    "tree": schema(TREE),
    "object": Grammar(GrammarKind.JSON_OBJECT),
    "regex": Grammar(GrammarKind.REGEX, r"(ab|c/d)+[0-9]{2,4}(é|[α-ω])?"),
    "regex that may go on": Grammar(GrammarKind.REGEX, "a[bc]*"),
    "choice": Grammar(GrammarKind.CHOICE, json.dumps(WORDS)),
    "lark": Grammar(GrammarKind.LARK, 'start: expr\nexpr: N | "(" expr OP expr ")"\nOP: /[-+*]/\nN: /[0-9]{1,3}/\n'),
    "special token": Grammar(GrammarKind.LARK, 'start: <think> "x"+'),
}


def matches(name: str, text: str) -> bool:
    """Whether a finished output is what its grammar asks for, as somebody else's code sees it."""
    match name:
        case "person":
            value = json.loads(text)
            assert re.fullmatch(r"0|[1-9][0-9]?", str(value["age"]))
            return list(value) == ["name", "age"] and len(value["name"]) <= 6
        case "tree":
            value = json.loads(text)
            return (
                list(value) == ["root", "kind"] and value["kind"] in ("oak", "日本", 'a"b') and _is_tree(value["root"])
            )
        case "object":
            return isinstance(json.loads(text), dict)
        case "regex":
            return re.fullmatch(r"(ab|c/d)+[0-9]{2,4}(é|[α-ω])?", text) is not None
        case "regex that may go on":
            return re.fullmatch("a[bc]*", text) is not None
        case "choice":
            return text in WORDS
        case "lark":
            return re.fullmatch(r"[-+*()0-9]+", text) is not None and isinstance(eval(_without_zeros(text)), int)
        case "special token":
            return re.fullmatch("<think>x+", text) is not None
    raise KeyError(name)


def _is_tree(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= 2 and all(map(_is_tree, value))


def _without_zeros(text: str) -> str:
    return re.sub(r"\b0+(?=[0-9])", "", text)


class Answers:
    """What a compiler called back, as a queue."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[tuple[int, int, GrammarMatcher | None, str, bool]] = queue.SimpleQueue()
        self.threads: set[str] = set()

    def __call__(
        self, owner: int, request_id: int, matcher: GrammarMatcher | None, error: str, is_request_fault: bool
    ) -> None:
        self.threads.add(threading.current_thread().name)
        self.queue.put((owner, request_id, matcher, error, is_request_fault))

    def take(self) -> tuple[int, int, GrammarMatcher | None, str, bool]:
        return self.queue.get(timeout=TIMEOUT_S)

    @property
    def is_empty(self) -> bool:
        return self.queue.empty()


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tokenizer.json"
    byte_tokenizer().save(str(path))
    return path


@pytest.fixture(scope="module")
def vocabulary(tokenizer_path: Path) -> Vocabulary:
    return Vocabulary(tokenizer_path, VOCAB_SIZE, EOS)


TOKENIZER = byte_tokenizer()
EOS = frozenset({TOKENIZER.token_to_id(IM_END), TOKENIZER.token_to_id(IM_START)})


@pytest.fixture
def answers() -> Answers:
    return Answers()


@pytest.fixture
def compiler(vocabulary: Vocabulary, answers: Answers) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(vocabulary, answers, timeout_s=TIMEOUT_S)
    yield compiler
    compiler.check_integrity()
    compiler.close()


def compiled(vocabulary: Vocabulary, grammar: Grammar) -> Matcher:
    answers = Answers()
    compiler = GrammarCompiler(vocabulary, answers, num_threads=1, timeout_s=TIMEOUT_S)
    compiler.compile(CompileGrammar(1, 1, grammar))
    _, _, matcher, error, _ = answers.take()
    compiler.close()
    assert isinstance(matcher, Matcher), error
    return matcher


@pytest.fixture(scope="module")
def starts(vocabulary: Vocabulary) -> dict[str, Matcher]:
    """A matcher per grammar, to be copied."""
    return {name: compiled(vocabulary, grammar) for name, grammar in GRAMMARS.items()}


def copied(matcher: Matcher) -> Matcher:
    return Matcher(matcher._matcher.deep_copy(), matcher._vocabulary)


def allowed(matcher: GrammarMatcher, vocab_size: int = VOCAB_SIZE) -> list[int]:
    mask = np.full((vocab_size + 31) // 32, 0xFFFFFFFF, np.uint32)
    matcher.fill_mask(mask)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return [int(token_id) for token_id in np.flatnonzero(bits)]


def text_of(token_ids: Sequence[int]) -> str:
    return str(TOKENIZER.decode([t for t in token_ids if t not in EOS], skip_special_tokens=False))


def walk(matcher: GrammarMatcher, rng: random.Random, max_tokens: int) -> list[int]:
    """Random allowed tokens, up to the first that ends the output; the end is preferred, so that it comes."""
    taken: list[int] = []
    while len(taken) < max_tokens and not (taken and taken[-1] in EOS):
        choices = allowed(matcher)
        ends = [token_id for token_id in choices if token_id in EOS]
        token_id = rng.choice(ends if ends and rng.random() < 0.3 else choices)
        assert matcher.accept(token_id), token_id
        taken.append(token_id)
    return taken


@pytest.mark.parametrize("name", GRAMMARS)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**32), length=st.integers(0, 30))
def test_a_token_is_in_the_mask_exactly_if_it_is_accepted(
    starts: dict[str, Matcher], name: str, seed: int, length: int
) -> None:
    matcher = copied(starts[name])
    taken = walk(matcher, random.Random(seed), length)
    in_mask = allowed(matcher)
    assert in_mask
    accepted = []
    for token_id in range(-1, VOCAB_SIZE + 40):
        is_valid = matcher.num_valid([token_id]) == 1
        assert matcher.accept(token_id) == is_valid
        if is_valid:
            accepted.append(token_id)
            matcher.rollback(1)
    assert accepted == in_mask
    assert allowed(matcher) == in_mask
    assert set(in_mask) & EOS in (set(), EOS)
    assert max(in_mask) < TOKENIZER.get_vocab_size()
    matcher.rollback(len(taken))
    assert allowed(matcher) == allowed(starts[name])


@pytest.mark.parametrize("name", GRAMMARS)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_what_follows_the_masks_is_what_was_asked_for(starts: dict[str, Matcher], name: str, seed: int) -> None:
    matcher = copied(starts[name])
    taken = walk(matcher, random.Random(seed), 400)
    if taken[-1] in EOS:
        assert matches(name, text_of(taken)), text_of(taken)
        assert set(allowed(matcher)) == EOS


def test_walks_do_end(starts: dict[str, Matcher]) -> None:
    """Else the test above has seen nothing."""
    for name, matcher in starts.items():
        ends = 0
        for seed in range(10):
            ends += walk(copied(matcher), random.Random(seed), 400)[-1] in EOS
        assert ends >= 5, name


@pytest.mark.parametrize("name", GRAMMARS)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32), num_back=st.integers(0, 40))
def test_what_is_taken_back_never_was(starts: dict[str, Matcher], name: str, seed: int, num_back: int) -> None:
    matcher, rng = copied(starts[name]), random.Random(seed)
    start = allowed(matcher)
    seen, taken = [start], []
    for _ in range(20):
        token_id = rng.choice(seen[-1])
        assert matcher.accept(token_id)
        taken.append(token_id)
        seen.append(allowed(matcher))
    num_back = min(num_back, len(taken))
    matcher.rollback(num_back)
    assert allowed(matcher) == seen[len(taken) - num_back]
    for i in range(len(taken) - num_back, len(taken)):
        assert matcher.accept(taken[i])
        assert allowed(matcher) == seen[i + 1]
    matcher.rollback(len(taken))
    assert allowed(matcher) == start
    with pytest.raises(ValueError, match="cannot take back 1 of 0"):
        matcher.rollback(1)


@pytest.mark.parametrize("name", GRAMMARS)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32), wrong_at=st.integers(0, 12), num_eos=st.integers(0, 2))
def test_num_valid_counts_what_would_be_accepted(
    starts: dict[str, Matcher], name: str, seed: int, wrong_at: int, num_eos: int
) -> None:
    matcher, rng = copied(starts[name]), random.Random(seed)
    before = walk(matcher, rng, rng.randrange(4))
    drafts = walk(matcher, rng, 10)
    matcher.rollback(len(drafts))
    drafts[wrong_at:wrong_at] = [rng.randrange(-1, VOCAB_SIZE + 5)]
    drafts += sorted(EOS)[:num_eos]
    mask = allowed(matcher)
    num_valid = matcher.num_valid(drafts)
    assert allowed(matcher) == mask
    num_accepted = len(list(itertools.takewhile(matcher.accept, drafts)))
    assert num_valid == num_accepted
    matcher.rollback(num_accepted + len(before))
    assert matcher.num_valid([]) == 0


def test_an_output_ends_where_the_grammar_may_end(starts: dict[str, Matcher]) -> None:
    matcher = copied(starts["regex that may go on"])
    a, b, x = (TOKENIZER.token_to_id(character) for character in "abx")
    end, other_end = sorted(EOS)
    assert not matcher.accept(end)
    assert matcher.accept(a)
    assert set(allowed(matcher)) >= EOS
    assert matcher.num_valid([b, end, other_end, b]) == 3
    assert matcher.accept(other_end)
    assert set(allowed(matcher)) == EOS
    assert not matcher.accept(b)
    assert not matcher.accept(x)
    assert matcher.accept(end)
    assert matcher.num_valid([end, end, b]) == 2
    matcher.rollback(3)
    assert allowed(matcher) == [a]


def test_masks_of_a_wrong_form_are_refused(starts: dict[str, Matcher]) -> None:
    for mask in (np.zeros(9, np.uint32), np.zeros(10, np.int64), np.zeros(20, np.uint32)[::2]):
        with pytest.raises(ValueError, match="10 contiguous uint32"):
            starts["regex"].fill_mask(mask)  # type: ignore[arg-type]


@pytest.mark.parametrize("vocab_size", [256, 257, 258, 260, 300, 1000])
def test_the_models_vocabulary_may_differ_from_the_tokenizers(tokenizer_path: Path, vocab_size: int) -> None:
    eos = frozenset({7, 5000})
    matcher = compiled(Vocabulary(tokenizer_path, vocab_size, eos), Grammar(GrammarKind.REGEX, "(?s:.)*"))
    tokens = allowed(matcher, vocab_size)
    assert 7 in tokens
    assert max(tokens) < min(vocab_size, 260)
    assert all(matcher.accept(token_id) == (token_id in tokens) for token_id in (vocab_size - 1, vocab_size, 259))


def test_a_model_that_cannot_end(tokenizer_path: Path) -> None:
    matcher = compiled(Vocabulary(tokenizer_path, VOCAB_SIZE, frozenset()), Grammar(GrammarKind.REGEX, "a"))
    assert matcher.accept(allowed(matcher)[0])
    with pytest.raises(ValueError, match="allows no token of this model here; loosen"):
        allowed(matcher)


def test_unusable_tokenizers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"structured output needs the tokenizer .*tokenizer\.json"):
        Vocabulary(tmp_path / "tokenizer.json", VOCAB_SIZE, EOS)
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match="structured output cannot use this model's tokenizer"):
        Vocabulary(tmp_path / "tokenizer.json", VOCAB_SIZE, EOS)


BAD: dict[str, tuple[Grammar, str]] = {
    "no JSON": (Grammar(GrammarKind.JSON_SCHEMA, "{"), "not valid JSON"),
    "no object": (Grammar(GrammarKind.JSON_SCHEMA, "[]"), "must be a JSON object"),
    "unknown type": (schema({"type": "objec"}), "objec"),
    "unknown format": (schema({"type": "string", "format": "blub"}), "blub"),
    "unknown keyword": (schema({"not": {}}), "not"),
    "remote reference": (schema({"$ref": "http://localhost:1/x"}), "localhost"),
    "false": (schema({"allOf": [{"type": "string"}, {"type": "integer"}]}), "Unsatisfiable"),
    "lengths": (schema({"type": "string", "minLength": 5, "maxLength": 2}), "minLength"),
    "itself": (schema({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}), "no output matches it"),
    "too fine": (schema({"type": "integer", "multipleOf": 99_999_989}), "99999989"),
    "too fine below one": (schema({"items": [{"multipleOf": 0.0123457}]}), "0.0123457"),
    "open regex": (Grammar(GrammarKind.REGEX, "a("), "unclosed group"),
    "look-ahead": (Grammar(GrammarKind.REGEX, "(?=a)b"), "look-around"),
    "empty regex": (Grammar(GrammarKind.REGEX, "[a&&b]"), "no output matches it"),
    "no choices": (Grammar(GrammarKind.CHOICE, "[]"), "not empty"),
    "choices that are numbers": (Grammar(GrammarKind.CHOICE, "[1]"), "strings"),
    "unknown rule": (Grammar(GrammarKind.LARK, "start: x"), 'unknown name: "x"'),
    "no start": (Grammar(GrammarKind.LARK, 'x: "a"'), "start"),
    "end of sequence in a grammar": (Grammar(GrammarKind.LARK, 'start: <|im_end|> "a"'), "no token of this model"),
    "too long": (Grammar(GrammarKind.LARK, "start: " + '"a" ' * 5_000), "at most 16384"),
    "long schema": (schema({"const": "x" * 65_536}), "at most 65536"),
    "many optional keys": (
        schema({"type": "object", "properties": {f"k{i}": {} for i in range(1000)}}), "Current row has"
    ),
    "many empty rules": (
        Grammar(GrammarKind.LARK, "start: r0\n" + "".join(f"r{i}: r{i + 1}*\n" for i in range(1000)) + 'r1000: "b"\n'),
        "Current row has",
    ),
    "deep": (Grammar(GrammarKind.JSON_SCHEMA, '{"items":' * 5000 + "{}" + "}" * 5000), "nested too deeply"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_wrong_grammars_are_answered_with_a_sentence(compiler: GrammarCompiler, answers: Answers, case: str) -> None:
    grammar, word = BAD[case]
    for request_id in (1, 2):  # the second answer is a remembered one
        compiler.compile(CompileGrammar(7, request_id, grammar))
        owner, answered, matcher, error, is_request_fault = answers.take()
        assert is_request_fault
        assert (owner, answered, matcher) == (7, request_id, None)
        assert word in error
        assert error.endswith("; correct or simplify it")
        assert structured_output._FIELDS[grammar.kind] in error
        assert len(error) < 700
    compiler.compile(CompileGrammar(7, 3, GRAMMARS["person"]))
    assert answers.take()[2] is not None


def test_long_chains_of_rules_do_not_end_the_process(compiler: GrammarCompiler, answers: Answers) -> None:
    rules = "".join(f'r{i}: "a" r{i + 1}\n' for i in range(1000))
    compiler.compile(CompileGrammar(1, 1, Grammar(GrammarKind.LARK, f'start: r0\n{rules}r1000: "b"\n')))
    terminals = "".join(f'R{i}: "a" R{i + 1}\n' for i in range(1000))
    compiler.compile(CompileGrammar(1, 2, Grammar(GrammarKind.LARK, f'start: R0\n{terminals}R1000: "b"\n')))
    references = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(1800)} | {"d1800": {"type": "null"}}
    compiler.compile(CompileGrammar(1, 3, schema({"$defs": references, "$ref": "#/$defs/d0"})))
    found = {answer[1]: answer[2] for answer in (answers.take(), answers.take(), answers.take())}
    for request_id, text in ((1, "a"), (2, "a"), (3, "n")):
        matcher = found[request_id]
        assert matcher is not None
        assert text in text_of(allowed(matcher))


def test_a_grammar_whose_tokens_take_too_long_is_refused(
    compiler: GrammarCompiler, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structured_output, "MAX_TOKEN_CPU_S", 0.0)
    compiler.compile(CompileGrammar(1, 1, GRAMMARS["person"]))
    assert "cannot be compiled: one token of it takes 0.0 s; correct or simplify it" in answers.take()[3]


def test_matchers_of_one_grammar_do_not_share_their_place(compiler: GrammarCompiler, answers: Answers) -> None:
    for request_id in range(5):
        compiler.compile(CompileGrammar(1, request_id, GRAMMARS["regex that may go on"]))
    matchers = [answers.take()[2] for _ in range(5)]
    a = TOKENIZER.token_to_id("a")
    assert matchers[0] is not None
    assert matchers[0].accept(a)
    for matcher in matchers[1:]:
        assert matcher is not None
        assert allowed(matcher) == [a]


class Gate:
    """Holds compilations up until it is opened; counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, held: Sequence[Grammar] = ()) -> None:
        self.started: queue.SimpleQueue[Grammar] = queue.SimpleQueue()
        self.opened = threading.Event()
        build = GrammarCompiler._build

        def held_build(compiler: GrammarCompiler, grammar: Grammar) -> Any:
            self.started.put(grammar)
            if not held or grammar in held:
                assert self.opened.wait(TIMEOUT_S)
            return build(compiler, grammar)

        monkeypatch.setattr(GrammarCompiler, "_build", held_build)

    def num_started(self) -> int:
        return self.started.qsize()


def expire(compiler: GrammarCompiler) -> None:
    """Let all deadlines pass."""
    with compiler._lock:
        for job in compiler._jobs.values():
            job.deadline = 0.0
        compiler._has_deadline.notify()


def choice(number: int) -> Grammar:
    return Grammar(GrammarKind.CHOICE, json.dumps([f"choice {number}"]))


def test_one_grammar_is_compiled_once_however_many_wait(
    vocabulary: Vocabulary, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    compiler = GrammarCompiler(vocabulary, answers, timeout_s=TIMEOUT_S)
    for request_id in range(128):
        compiler.compile(CompileGrammar(1, request_id, GRAMMARS["person"]))
    compiler.check_integrity()
    gate.opened.set()
    found = sorted(answers.take()[1] for _ in range(128))
    assert found == list(range(128))
    compiler.compile(CompileGrammar(2, 1, GRAMMARS["person"]))
    assert answers.take()[2] is not None
    assert gate.num_started() == 1
    compiler.close()


def test_nothing_is_compiled_for_nobody(
    vocabulary: Vocabulary, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    compiler = GrammarCompiler(vocabulary, answers, num_threads=1, timeout_s=TIMEOUT_S)
    compiler.compile(CompileGrammar(1, 0, choice(0)))
    assert gate.started.get(timeout=TIMEOUT_S) == choice(0)
    for request_id in range(1, 2000):  # one client that asks and leaves, again and again
        compiler.compile(CompileGrammar(1, request_id, choice(request_id)))
        compiler.cancel(1, request_id)
    for request_id in range(20):
        compiler.compile(CompileGrammar(2, request_id, choice(10_000 + request_id)))
    compiler.compile(CompileGrammar(3, 1, choice(20_000)))
    compiler.cancel_owner(2)
    compiler.cancel(1, 0)
    compiler.cancel(1, 0)
    compiler.check_integrity()
    assert compiler.num_waiting == 1
    gate.opened.set()
    assert answers.take()[:2] == (3, 1)
    assert gate.started.get_nowait() == choice(20_000)
    compiler.check_integrity()
    compiler.close()
    assert gate.started.empty()
    assert answers.is_empty


def test_too_many_waiting_grammars_are_refused_at_once(
    vocabulary: Vocabulary, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    monkeypatch.setattr(structured_output, "MAX_NUM_JOBS", 3)
    compiler = GrammarCompiler(vocabulary, answers, num_threads=1, timeout_s=TIMEOUT_S)
    compiler.compile(CompileGrammar(1, 0, choice(0)))
    gate.started.get(timeout=TIMEOUT_S)
    for number in range(1, 6):
        compiler.compile(CompileGrammar(1, number, choice(number)))
    compiler.compile(CompileGrammar(1, 6, choice(1)))  # waits with another
    refused = [answers.take(), answers.take()]
    assert [answer[1] for answer in refused] == [4, 5]
    assert all("3 grammars wait to be compiled already; send the request again later" in a[3] for a in refused)
    assert not any(answer[4] for answer in refused), "it is no fault of theirs"
    gate.opened.set()
    assert sorted(answers.take()[1] for _ in range(5)) == [0, 1, 2, 3, 6]
    compiler.close()


def test_a_grammar_that_takes_too_long_is_given_up_and_others_go_on(
    vocabulary: Vocabulary, answers: Answers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slow = [choice(number) for number in range(2)]
    gate = Gate(monkeypatch, slow)
    compiler = GrammarCompiler(vocabulary, answers, num_threads=2, timeout_s=TIMEOUT_S)
    for request_id, grammar in enumerate(slow):
        compiler.compile(CompileGrammar(1, request_id, grammar))
        gate.started.get(timeout=TIMEOUT_S)
    expire(compiler)
    given_up = sorted([answers.take(), answers.take()], key=lambda answer: answer[1])
    assert [answer[:3] for answer in given_up] == [(1, 0, None), (1, 1, None)]
    assert all("the choices" in a[3] and "cannot be compiled within 30 s; simplify it" in a[3] for a in given_up)
    assert all(answer[4] for answer in given_up)
    assert "gave up a grammar" in caplog.text
    # Both threads still work on them; others do not notice, and the same grammar is not tried again.
    for request_id in range(2, 10):
        compiler.compile(CompileGrammar(1, request_id, choice(request_id)))
        assert answers.take()[2] is not None
    compiler.compile(CompileGrammar(1, 20, slow[0]))
    assert "cannot be compiled within" in answers.take()[3]
    assert gate.num_started() == 8
    compiler.check_integrity()
    assert len(compiler._workers) == 4
    gate.opened.set()
    compiler.close(TIMEOUT_S)
    assert not compiler._workers
    assert answers.is_empty


def test_the_threads_that_are_stuck_are_bounded(
    vocabulary: Vocabulary, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    monkeypatch.setattr(structured_output, "MAX_NUM_STUCK", 2)
    compiler = GrammarCompiler(vocabulary, answers, num_threads=1, timeout_s=TIMEOUT_S)
    for number in range(3):
        compiler.compile(CompileGrammar(1, number, choice(number)))
        assert gate.started.get(timeout=TIMEOUT_S) == choice(number)
        expire(compiler)
        assert "cannot be compiled within" in answers.take()[3]
    compiler.compile(CompileGrammar(1, 3, choice(3)))
    expire(compiler)
    late = answers.take()
    assert "waited 30 s to be compiled; send the request again later" in late[3]
    assert not late[4], "it is no fault of its"
    assert len(compiler._workers) == 3
    compiler.compile(CompileGrammar(1, 4, choice(4)))
    gate.opened.set()  # the first thread that is done works again
    assert answers.take()[2] is not None
    compiler.close(TIMEOUT_S)
    assert not compiler._workers


def test_panics_and_failing_callbacks_end_one_request_only(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class PanicException(BaseException):
        """As pyo3 raises it."""

    def panics(grammar: Grammar) -> str:
        if grammar == choice(1):
            raise PanicException("broken")
        return str(whole(grammar))

    whole = structured_output.llguidance_grammar
    monkeypatch.setattr(structured_output, "llguidance_grammar", panics)
    answers = Answers()

    def fails_for_two(owner: int, request_id: int, matcher: GrammarMatcher | None, error: str, is_fault: bool) -> None:
        answers(owner, request_id, matcher, error, is_fault)
        if request_id == 2:
            raise RuntimeError("nobody listens")

    compiler = GrammarCompiler(vocabulary, fails_for_two, num_threads=1, timeout_s=TIMEOUT_S)
    for number in (1, 2, 3):
        compiler.compile(CompileGrammar(1, number, choice(number)))
    assert "llguidance failed with PanicException; correct or simplify it" in answers.take()[3]
    assert answers.take()[1] == 2
    assert answers.take()[2] is not None
    compiler.close()
    assert "nobody listens" in caplog.text


def test_only_so_many_compiled_grammars_are_kept(
    vocabulary: Vocabulary, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    gate.opened.set()
    compiler = GrammarCompiler(vocabulary, answers, timeout_s=TIMEOUT_S, cache_size=2)
    for number in (0, 1, 0, 2, 0, 1):  # 2 pushes 1 out, not 0
        compiler.compile(CompileGrammar(1, 1, choice(number)))
        assert answers.take()[2] is not None
        compiler.check_integrity()
    assert [gate.started.get_nowait() for _ in range(gate.num_started())] == [choice(n) for n in (0, 1, 2, 1)]
    compiler.close()


def test_every_request_of_many_threads_is_answered_once(vocabulary: Vocabulary, answers: Answers) -> None:
    compiler = GrammarCompiler(vocabulary, answers, num_threads=3, timeout_s=TIMEOUT_S, cache_size=4)

    def ask(owner: int) -> None:
        rng = random.Random(owner)
        for request_id in range(100):
            compiler.compile(CompileGrammar(owner, request_id, choice(rng.randrange(12))))

    threads = [threading.Thread(target=ask, args=(owner,)) for owner in range(4)]
    for thread in threads:
        thread.start()
    found = [answers.take() for _ in range(400)]
    for thread in threads:
        thread.join()
    assert len({answer[:2] for answer in found}) == 400
    assert all(matcher is not None for _, _, matcher, _, _ in found)
    compiler.check_integrity()
    assert compiler.num_waiting == 0
    compiler.close()
    assert answers.is_empty


def test_deadlines_pass_by_the_clock(vocabulary: Vocabulary, answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    compiler = GrammarCompiler(vocabulary, answers, num_threads=1, timeout_s=0.01)
    for number in range(2):
        compiler.compile(CompileGrammar(1, number, choice(number)))
    assert sorted((answers.take()[:3], answers.take()[:3])) == [(1, 0, None), (1, 1, None)]
    gate.opened.set()
    compiler.close(TIMEOUT_S)
    assert answers.is_empty


def test_after_close_nothing_is_answered(
    vocabulary: Vocabulary, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    compiler = GrammarCompiler(vocabulary, answers, num_threads=1, timeout_s=TIMEOUT_S)
    compiler.compile(CompileGrammar(1, 1, choice(1)))
    gate.started.get(timeout=TIMEOUT_S)
    compiler.compile(CompileGrammar(1, 2, choice(2)))
    compiler.close(timeout_s=0)
    compiler.compile(CompileGrammar(1, 3, choice(1)))
    gate.opened.set()
    compiler.close(TIMEOUT_S)
    compiler.close()
    assert not compiler._workers
    assert not compiler._watchdog.is_alive()
    assert answers.is_empty


@pytest.mark.model
def test_the_embedded_models_vocabulary() -> None:
    from model_runner.embedded import embedded_model_dir

    path = embedded_model_dir(lambda _: None) / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    vocab_size, end = 49152, tokenizer.token_to_id("<|im_end|>")
    vocabulary = Vocabulary(path, vocab_size, frozenset({end}))
    for name in ("person", "tree", "choice", "regex"):
        matcher = compiled(vocabulary, GRAMMARS[name])
        for seed in range(5):
            rng = random.Random(seed)
            taken: list[int] = []
            while len(taken) < 300 and not (taken and taken[-1] == end):
                tokens = allowed(matcher, vocab_size)
                for token_id in rng.sample(range(vocab_size), 20) + rng.sample(tokens, min(5, len(tokens))):
                    is_accepted = matcher.accept(token_id)
                    assert is_accepted == (token_id in tokens)
                    if is_accepted:
                        matcher.rollback(1)
                taken.append(end if end in tokens else rng.choice(tokens))
                assert matcher.accept(taken[-1])
            if taken[-1] == end:
                assert matches(name, tokenizer.decode(taken[:-1], skip_special_tokens=False))
            matcher.rollback(len(taken))
    text = json.dumps({"name": "Ada", "age": 36})
    matcher = compiled(vocabulary, GRAMMARS["person"])
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert matcher.num_valid([*token_ids, end]) == len(token_ids) + 1
