"""The ledger against a model that recounts everything, and its rules one by one."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from router.control_messages import Granted, Holding, Refused
from router.ledger import Ledger

ROUTERS = st.sampled_from(["a", "b", "c"])
KEYS = st.integers(1, 4)
GRACE_S = 10.0


class LedgerMachine(RuleBasedStateMachine):
    """Any mixture of messages in any order, against sums over plain dictionaries."""

    @initialize(requests=st.none() | st.integers(0, 12), tokens=st.none() | st.integers(0, 60))
    def start(self, requests: int | None, tokens: int | None) -> None:
        self.max_requests, self.max_tokens = requests, tokens
        self.ledger = Ledger(requests, tokens, holder_grace_s=GRACE_S)
        self.held: dict[str, dict[int, list[int]]] = {}
        self.drop_at: dict[str, float] = {}
        self.now = 0.0
        self.is_resumed_above = False

    def total(self, index: int) -> int:
        return sum(amounts[index] for keys in self.held.values() for amounts in keys.values())

    @rule(router=ROUTERS, key=KEYS, requests=st.integers(0, 5), tokens=st.integers(0, 30))
    def acquire(self, router: str, key: int, requests: int, tokens: int) -> None:
        answer = self.ledger.acquire(router, key, requests, tokens, self.now)
        fits_requests = not requests or self.max_requests is None or self.total(0) + requests <= self.max_requests
        fits_tokens = not tokens or self.max_tokens is None or self.total(1) + tokens <= self.max_tokens
        if fits_requests and fits_tokens:
            assert answer == Granted(key)
            amounts = self.held.setdefault(router, {}).setdefault(key, [0, 0])
            amounts[0] += requests
            amounts[1] += tokens
        else:
            assert isinstance(answer, Refused)
            assert answer.field == ("max_num_queued_tokens" if fits_requests else "max_num_queued_reqs")
            assert answer.current + answer.requested > answer.limit
            assert 1 <= answer.retry_after_s <= 60

    @rule(router=ROUTERS, key=KEYS, tokens=st.integers(-3, 40))
    def prefill_done(self, router: str, key: int, tokens: int) -> None:
        self.ledger.prefill_done(router, key, tokens, self.now)
        amounts = self.held.get(router, {}).get(key)
        if amounts is not None:
            amounts[1] -= min(max(0, tokens), amounts[1])

    @rule(router=ROUTERS, key=KEYS)
    def release(self, router: str, key: int) -> None:
        self.ledger.release(router, key, self.now)
        self.held.get(router, {}).pop(key, None)

    @rule(router=ROUTERS)
    def lose(self, router: str) -> None:
        self.ledger.router_lost(router, self.now)
        if self.held.get(router):
            self.drop_at.setdefault(router, self.now + GRACE_S)

    @rule(router=ROUTERS, holdings=st.dictionaries(KEYS, st.tuples(st.integers(0, 5), st.integers(0, 30))))
    def resume(self, router: str, holdings: dict[int, tuple[int, int]]) -> None:
        self.ledger.resume(router, [Holding(key, *amounts) for key, amounts in holdings.items()], self.now)
        self.held[router] = {key: list(amounts) for key, amounts in holdings.items()}
        self.drop_at.pop(router, None)
        self.is_resumed_above = True

    @rule(seconds=st.floats(0, 15))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        dropped = self.ledger.tick(self.now)
        expired = {router for router, at in self.drop_at.items() if self.now >= at}
        assert set(dropped) >= {router for router in expired if self.held.get(router)}
        for router in expired:
            self.held.pop(router, None)
            del self.drop_at[router]

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "ledger"):
            return
        self.ledger.check_integrity()
        counts = self.ledger.counts()
        assert (counts.num_requests, counts.num_tokens) == (self.total(0), self.total(1))
        if not self.is_resumed_above:
            assert self.max_requests is None or counts.num_requests <= self.max_requests
            assert self.max_tokens is None or counts.num_tokens <= self.max_tokens

    def teardown(self) -> None:
        if not hasattr(self, "ledger"):
            return
        for router, keys in self.held.items():
            for key in keys:
                self.ledger.release(router, key, self.now)
        counts = self.ledger.counts()
        assert counts.num_requests == counts.num_tokens == 0


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)


def test_the_candidate_counts() -> None:
    ledger = Ledger(2, None)
    assert ledger.acquire("a", 1, 2, 0, 0.0) == Granted(1)
    refused = ledger.acquire("a", 2, 1, 0, 0.0)
    assert isinstance(refused, Refused)
    assert (refused.limit, refused.current, refused.requested) == (2, 2, 1)
    assert ledger.counts().num_refused_requests == 1


def test_zero_refuses_everything() -> None:
    assert isinstance(Ledger(0, None).acquire("a", 1, 1, 0, 0.0), Refused)
    assert isinstance(Ledger(None, 0).acquire("a", 1, 0, 1, 0.0), Refused)


def test_a_refusal_of_tokens_leaves_the_requests_in_place() -> None:
    ledger = Ledger(5, 10)
    ledger.acquire("a", 1, 1, 0, 0.0)
    assert isinstance(ledger.acquire("a", 1, 0, 11, 0.0), Refused)
    assert ledger.counts().num_requests == 1
    ledger.release("a", 1, 0.0)
    assert ledger.counts().num_requests == 0


def test_a_lost_router_keeps_its_place_until_the_grace_is_over() -> None:
    ledger = Ledger(1, None, holder_grace_s=5.0)
    ledger.acquire("a", 1, 1, 0, 0.0)
    ledger.router_lost("a", 1.0)
    assert ledger.tick(5.9) == []
    assert isinstance(ledger.acquire("b", 1, 1, 0, 5.9), Refused)
    assert ledger.tick(6.0) == ["a"]
    assert ledger.acquire("b", 1, 1, 0, 6.0) == Granted(1)


def test_a_router_that_resumes_in_time_loses_nothing() -> None:
    ledger = Ledger(None, None, holder_grace_s=5.0)
    ledger.acquire("a", 1, 1, 7, 0.0)
    ledger.router_lost("a", 1.0)
    ledger.resume("a", [Holding(1, 1, 7)], 3.0)
    assert ledger.tick(100.0) == []
    assert ledger.counts().num_tokens == 7


def test_retry_after_follows_the_drain_rate() -> None:
    ledger = Ledger(10, None)
    for key in range(10):
        ledger.acquire("a", key, 1, 0, 0.0)
    for second in range(1, 11):  # one request leaves per second, another takes its place
        ledger.release("a", second - 1, float(second))
        ledger.acquire("a", second + 9, 1, 0, float(second))
    one = ledger.acquire("a", 99, 1, 0, 10.0)
    five = ledger.acquire("a", 99, 5, 0, 10.0)
    assert isinstance(one, Refused)
    assert isinstance(five, Refused)
    assert 1.0 <= one.retry_after_s <= 1.2
    assert 4.5 <= five.retry_after_s <= 5.5


def test_retry_after_grows_while_nothing_leaves() -> None:
    ledger = Ledger(1, None)
    ledger.acquire("a", 1, 1, 0, 0.0)
    waits = []
    for now in (0.5, 7.0, 25.0, 500.0):
        refused = ledger.acquire("a", 2, 1, 0, now)
        assert isinstance(refused, Refused)
        waits.append(refused.retry_after_s)
    assert waits == [1.0, 7.0, 25.0, 60.0]


def test_nonsense_is_counted_and_ignored() -> None:
    ledger = Ledger(5, 5)
    ledger.release("nobody", 1, 0.0)
    ledger.prefill_done("nobody", 1, 1, 0.0)
    ledger.router_lost("nobody", 0.0)
    ledger.acquire("a", 1, -3, 0, 0.0)
    ledger.resume("b", [Holding(1, 1, 1), Holding(1, 1, 1), Holding(2, -1, 0)], 0.0)
    assert ledger.num_ignored == 6
    assert ledger.counts().num_requests == 1
    ledger.check_integrity()
