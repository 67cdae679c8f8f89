"""Structured output: grammars compiled by llguidance, on threads of the compiler's own.

Ownership: from `compile` on, the compiler owes its caller exactly one `on_done` for that owner and id, at the
latest when its deadlines have passed; `cancel`, `cancel_owner` and `close` take that duty back. A grammar that
many requests wait for is compiled once; one for which nobody waits any more is not compiled at all.

llguidance cannot be interrupted. A thread whose grammar takes too long is given up, and replaced, and ends when
its grammar is done; `MAX_NUM_STUCK` of them at most, then further grammars wait in vain and are refused in time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable

import numpy as np
from llguidance import LLMatcher

from cluster.grammar_matcher import Matcher, Vocabulary
from rank_scheduler.messages import Grammar, GrammarKind
from rank_scheduler.structured_output import CompileGrammar, GrammarMatcher
from router.grammar_check import large_stacks, llguidance_grammar, parser_limits, shown_reason

logger = logging.getLogger(__name__)

MAX_NUM_JOBS = 1_024
"""Different grammars that wait for their turn."""
MAX_NUM_STUCK = 4
MAX_TOKEN_CPU_S = 0.5
"""Of the first mask and of the first token: the step loop would have to wait for others like them."""

_FIELDS = {
    GrammarKind.JSON_SCHEMA: "the JSON schema (response_format, structured_outputs.json)",
    GrammarKind.JSON_OBJECT: "the format json_object (response_format, structured_outputs)",
    GrammarKind.REGEX: "the regular expression (structured_outputs.regex)",
    GrammarKind.CHOICE: "the choices (structured_outputs.choice)",
    GrammarKind.LARK: "the Lark grammar (structured_outputs.grammar)",
}

OnDone = Callable[[int, int, GrammarMatcher | None, str, bool], None]


class _Job:
    """A grammar that is compiled or waits for it, and who waits for it. Guarded by the compiler's lock."""

    __slots__ = ("deadline", "grammar", "is_given_up", "is_running", "waiters")

    def __init__(self, grammar: Grammar, deadline: float) -> None:
        self.grammar = grammar
        self.deadline = deadline
        self.is_running = False
        self.is_given_up = False
        self.waiters: set[tuple[int, int]] = set()


class GrammarCompiler:
    """Compiles grammars for one rank. All methods may be called from any thread; `close` it in the end.

    `on_done` gets owner, id, a matcher that is the caller's alone from then on, or else why there is none, and
    whether that is the grammar's fault (else another attempt may do). It is called from the compiler's threads, or
    within `compile` if the answer is known, and must not block; it may come just after a `cancel` that was too late.
    A grammar may wait `timeout_s` for its turn, and be compiled for as long.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        on_done: OnDone,
        *,
        num_threads: int = 2,
        timeout_s: float = 10.0,
        cache_size: int = 128,
    ) -> None:
        self._vocabulary = vocabulary
        self._on_done = on_done
        self._num_threads = num_threads
        self._timeout_s = timeout_s
        self._cache_size = cache_size
        self._lock = threading.Lock()
        self._has_jobs = threading.Condition(self._lock)
        self._has_deadline = threading.Condition(self._lock)
        self._queue: deque[_Job] = deque()
        self._jobs: dict[Grammar, _Job] = {}
        """Queued and running, by grammar; not those that were given up."""
        self._waiting: dict[tuple[int, int], _Job] = {}
        self._compiled: OrderedDict[Grammar, LLMatcher | str] = OrderedDict()
        """By latest use: what to copy for each request, or why the grammar is refused."""
        self._num_stuck = 0
        self._is_closed = False
        self._workers: set[threading.Thread] = set()
        for _ in range(num_threads):
            self._start_worker()
        self._watchdog = threading.Thread(target=self._watch, name="grammar-watchdog", daemon=True)
        self._watchdog.start()

    def compile(self, action: CompileGrammar) -> None:
        """Answered by `on_done`, once."""
        key, grammar = (action.owner, action.id), action.grammar
        is_request_fault = True
        with self._lock:
            if self._is_closed or key in self._waiting:
                return
            outcome = self._compiled.get(grammar)
            if outcome is not None:
                self._compiled.move_to_end(grammar)
            elif grammar not in self._jobs and len(self._queue) == MAX_NUM_JOBS:
                outcome = f"{MAX_NUM_JOBS} grammars wait to be compiled already; send the request again later"
                is_request_fault = False
            else:
                self._wait_for(grammar, key)
        if outcome is not None:
            self._answer([key], outcome, is_request_fault)

    def cancel(self, owner: int, request_id: int) -> None:
        """Nobody waits for this one any more. Ignored if it is answered already."""
        with self._lock:
            self._forget((owner, request_id))

    def cancel_owner(self, owner: int) -> None:
        with self._lock:
            for key in [key for key in self._waiting if key[0] == owner]:
                self._forget(key)

    def close(self, timeout_s: float = 2.0) -> None:
        """Answer nothing more; wait a moment for the threads to end. Idempotent."""
        with self._lock:
            self._is_closed = True
            self._queue.clear()
            self._jobs.clear()
            self._waiting.clear()
            self._has_jobs.notify_all()
            self._has_deadline.notify_all()
            threads = [self._watchdog, *self._workers]
        deadline = time.monotonic() + timeout_s
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    @property
    def num_waiting(self) -> int:
        with self._lock:
            return len(self._waiting)

    def check_integrity(self) -> None:
        """Raises AssertionError unless the books agree."""
        with self._lock:
            assert len(self._queue) <= MAX_NUM_JOBS
            assert {key: job for job in self._jobs.values() for key in job.waiters} == self._waiting
            assert all(job.is_running or job in self._queue for job in self._jobs.values())
            assert len(self._compiled) <= self._cache_size

    def _wait_for(self, grammar: Grammar, key: tuple[int, int]) -> None:
        job = self._jobs.get(grammar)
        if job is None:
            job = self._jobs[grammar] = _Job(grammar, time.monotonic() + self._timeout_s)
            self._queue.append(job)
            self._has_jobs.notify()
            self._has_deadline.notify()
        job.waiters.add(key)
        self._waiting[key] = job

    def _forget(self, key: tuple[int, int]) -> None:
        job = self._waiting.pop(key, None)
        if job is None:
            return
        job.waiters.discard(key)
        if not job.waiters and not job.is_running:
            self._queue.remove(job)
            del self._jobs[job.grammar]

    @property
    def _num_healthy(self) -> int:
        return len(self._workers) - self._num_stuck

    def _start_worker(self) -> None:
        worker = threading.Thread(target=self._work, name="grammar-compiler", daemon=True)
        self._workers.add(worker)
        with large_stacks():
            worker.start()

    def _work(self) -> None:
        while (job := self._next_job()) is not None:
            outcome = self._build(job.grammar)
            with self._lock:
                if self._is_closed:
                    break
                if job.is_given_up:
                    self._num_stuck -= 1
                    if self._num_healthy > self._num_threads:
                        break
                    continue
                self._remember(job.grammar, outcome)
                waiters = self._take_waiters(job)
            self._answer(waiters, outcome)
        with self._lock:
            self._workers.discard(threading.current_thread())

    def _next_job(self) -> _Job | None:
        """The next one, marked as running; None when the compiler is closed."""
        with self._lock:
            while not self._queue and not self._is_closed:
                self._has_jobs.wait()
            if self._is_closed:
                return None
            job = self._queue.popleft()
            job.is_running = True
            job.deadline = time.monotonic() + self._timeout_s
            return job

    def _watch(self) -> None:
        """Answer for what has passed its deadline."""
        while True:
            with self._lock:
                if self._is_closed:
                    return
                now = time.monotonic()
                late = [job for job in self._jobs.values() if job.deadline <= now]
                if not late:
                    soonest = min((job.deadline for job in self._jobs.values()), default=None)
                    self._has_deadline.wait(None if soonest is None else soonest - now)
                    continue
                answers = [self._give_up(job) for job in late]
            for waiters, message, is_request_fault in answers:
                self._answer(waiters, message, is_request_fault)

    def _give_up(self, job: _Job) -> tuple[list[tuple[int, int]], str, bool]:
        """Its waiters, what to tell them, and whether their grammar is at fault."""
        if not job.is_running:
            self._queue.remove(job)
            message = (
                f"{_FIELDS[job.grammar.kind]} waited {self._timeout_s:g} s to be compiled; send the request again later"
            )
            return self._take_waiters(job), message, False
        message = (
            f"{_FIELDS[job.grammar.kind]} cannot be compiled within {self._timeout_s:g} s; simplify it, or use a "
            "smaller one"
        )
        logger.warning("gave up a grammar of %d characters: %s", len(job.grammar.text), message)
        self._remember(job.grammar, message)
        waiters = self._take_waiters(job)
        job.is_given_up = True
        self._num_stuck += 1
        if self._num_stuck <= MAX_NUM_STUCK and self._num_healthy < self._num_threads:
            self._start_worker()
        return waiters, message, True

    def _take_waiters(self, job: _Job) -> list[tuple[int, int]]:
        """The job is over."""
        del self._jobs[job.grammar]
        for key in job.waiters:
            del self._waiting[key]
        return sorted(job.waiters)

    def _remember(self, grammar: Grammar, outcome: LLMatcher | str) -> None:
        self._compiled[grammar] = outcome
        self._compiled.move_to_end(grammar)
        while len(self._compiled) > self._cache_size:
            self._compiled.popitem(last=False)

    def _answer(self, waiters: list[tuple[int, int]], outcome: LLMatcher | str, is_request_fault: bool = True) -> None:
        for owner, request_id in waiters:
            if self._is_closed:
                return
            try:
                if isinstance(outcome, str):
                    self._on_done(owner, request_id, None, outcome, is_request_fault)
                else:
                    self._on_done(owner, request_id, Matcher(outcome.deep_copy(), self._vocabulary), "", False)
            except Exception:
                logger.exception("could not hand over the grammar of request %d", request_id)

    def _build(self, grammar: Grammar) -> LLMatcher | str:
        """A matcher at the grammar's start, or what to tell the caller."""
        what = _FIELDS[grammar.kind]
        try:
            matcher = LLMatcher(
                self._vocabulary.tokenizer, llguidance_grammar(grammar), log_level=0, limits=parser_limits()
            )
            reason = shown_reason(matcher.get_error()) or self._probe(matcher)
        except ValueError as error:
            reason = str(error)
        except BaseException as error:  # a panic of llguidance's is no Exception
            logger.exception("llguidance failed")
            reason = f"llguidance failed with {type(error).__name__}"
        return f"{what} cannot be compiled: {reason}; correct or simplify it" if reason else matcher

    def _probe(self, matcher: LLMatcher) -> str:
        """Make the first mask, which the step loop then finds made, and try a token of it; what is wrong with them."""
        mask = np.zeros(self._vocabulary.num_words, np.uint32)
        began_at = time.thread_time()
        try:
            Matcher(matcher, self._vocabulary).fill_mask(mask)
        except ValueError:
            return shown_reason(matcher.get_error()) or "it allows no token of this model"
        masked_at = time.thread_time()
        tokens = np.flatnonzero(np.unpackbits((mask & ~self._vocabulary.eos_mask).view(np.uint8), bitorder="little"))
        if tokens.size:
            trial = matcher.deep_copy()
            trial.try_consume_tokens([int(tokens[0])])
            trial.compute_bitmask()
            if trial.is_error() and not trial.is_accepting():
                return shown_reason(trial.get_error())
        cpu_s = max(masked_at - began_at, time.thread_time() - masked_at)
        return f"one token of it takes {cpu_s:.1f} s" if cpu_s > MAX_TOKEN_CPU_S else ""
