import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rank_scheduler.encoder_cache import ChunkFit, EncoderCache, EncoderLimit, fit_chunk
from rank_scheduler.messages import EncoderInput

CERTAIN = settings(deadline=None, derandomize=True)

LENGTHS = {b"cat": 4, b"dog": 3, b"fox": 2, b"owl": 6, b"emu": 1}


def item(identifier=b"cat", offset=0, length=None):
    return EncoderInput(identifier, offset, LENGTHS[identifier] if length is None else length)


def fit(items, num_computed=0, num_new=100, *, cache=None, budget=100, **flags):
    return fit_chunk(items, num_computed, num_new, cache=cache or EncoderCache(100), budget=budget, **flags)


@st.composite
def prompts(draw):
    """Items in order, not overlapping; the same content may stand at several places."""
    items, offset = [], 0
    for identifier in draw(st.lists(st.sampled_from(sorted(LENGTHS)), max_size=6)):
        offset += draw(st.integers(0, 4))
        items.append(item(identifier, offset))
        offset += LENGTHS[identifier]
    return items


@st.composite
def filled_caches(draw):
    cache = EncoderCache(draw(st.integers(0, 16)))
    for identifier in draw(st.lists(st.sampled_from(sorted(LENGTHS)), max_size=4)):
        if cache.can_hold(LENGTHS[identifier]):
            cache.acquire("other", item(identifier))
    for identifier in draw(st.lists(st.sampled_from(sorted(LENGTHS)), max_size=4)):
        cache.release("other", identifier)
    return cache


class EncoderCacheMachine(RuleBasedStateMachine):
    """Against a list in order of use, a set of pairs, and a runner that does as the plans say."""

    def __init__(self):
        super().__init__()
        self.cache = EncoderCache(10)
        self.held: set[tuple[str, bytes]] = set()
        self.entries: list[bytes] = []
        """Unheld ones in order of release; held ones anywhere."""
        self.outputs: set[bytes] = set()
        """What the runner keeps."""
        self.to_run: list[bytes] = []

    def size(self, identifiers):
        return sum(LENGTHS[identifier] for identifier in identifiers)

    def held_identifiers(self):
        return {identifier for _, identifier in self.held}

    @rule(key=st.sampled_from("abc"), identifier=st.sampled_from(sorted(LENGTHS)))
    def acquire(self, key, identifier):
        new_size = self.size(self.held_identifiers() | {identifier})
        assert self.cache.can_hold(self.cache.growth(item(identifier))) == (new_size <= 10)
        if new_size > 10:
            if not self.cache.has(identifier):
                with pytest.raises(RuntimeError, match="does not fit"):
                    self.cache.acquire(key, item(identifier))
            return
        is_new = self.cache.acquire(key, item(identifier))
        assert is_new == (identifier not in self.entries)
        self.held.add((key, identifier))
        if is_new:
            unheld = [entry for entry in self.entries if entry not in self.held_identifiers()]
            while self.size(self.entries) + LENGTHS[identifier] > 10:
                self.entries.remove(unheld.pop(0))
            self.entries.append(identifier)
            self.to_run.append(identifier)

    @rule(key=st.sampled_from("abc"), identifier=st.sampled_from(sorted(LENGTHS)))
    def release(self, key, identifier):
        self.cache.release(key, identifier)
        self.forget_pair(key, identifier)

    @rule(key=st.sampled_from("abc"))
    def release_all(self, key):
        self.cache.release_all(key)
        for identifier in sorted(LENGTHS):
            self.forget_pair(key, identifier)

    def forget_pair(self, key, identifier):
        if (key, identifier) in self.held:
            self.held.remove((key, identifier))
            if identifier not in self.held_identifiers():
                self.entries.remove(identifier)
                self.entries.append(identifier)

    @precondition(lambda self: self.to_run)
    @rule()
    def undo_the_last_run(self):
        identifier = self.to_run.pop()
        holders = self.cache.discard(identifier)
        assert holders == {key for key, held in self.held if held == identifier}
        self.held = {pair for pair in self.held if pair[1] != identifier}
        if identifier in self.entries:
            self.entries.remove(identifier)
        self.to_run = [other for other in self.to_run if other != identifier]

    @rule()
    def execute_a_plan(self):
        freed = self.cache.take_freed()
        assert len(freed) == len(set(freed))
        self.outputs -= set(freed)
        self.outputs |= {identifier for identifier in self.to_run if identifier in self.entries}
        self.to_run.clear()
        assert self.outputs == set(self.entries)
        assert self.cache.take_freed() == []

    @rule()
    def a_plan_fails(self):
        """As `ResultIntake.fail`: nothing of it is computed, and the runner was not told what to forget."""
        for identifier in (*self.to_run, *self.cache.take_freed()):
            self.cache.discard(identifier)
            self.held = {pair for pair in self.held if pair[1] != identifier}
            if identifier in self.entries:
                self.entries.remove(identifier)
        self.to_run.clear()

    @invariant()
    def agrees(self):
        self.cache.check_integrity()
        assert {identifier for identifier in LENGTHS if self.cache.has(identifier)} == set(self.entries)
        assert self.cache.size == self.size(self.entries) <= 10
        assert self.cache.held_size == self.size(self.held_identifiers())


TestEncoderCacheMachine = EncoderCacheMachine.TestCase
TestEncoderCacheMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)


def test_the_least_recently_released_goes_first():
    cache = EncoderCache(9)
    for identifier in (b"cat", b"dog", b"fox"):
        assert cache.acquire("a", item(identifier))
    for identifier in (b"dog", b"cat", b"fox"):
        cache.release("a", identifier)
    cache.acquire("b", item(b"emu"))
    assert cache.take_freed() == [b"dog"]
    assert not cache.acquire("b", item(b"cat"))


def test_an_entry_stays_while_one_request_holds_it():
    cache = EncoderCache(4)
    cache.acquire("a", item(b"cat"))
    assert not cache.acquire("b", item(b"cat"))
    cache.release_all("a")
    assert not cache.can_hold(1)
    cache.release_all("b")
    assert cache.can_hold(4)
    assert cache.take_freed() == []


def test_what_is_cached_again_is_not_freed():
    cache = EncoderCache(4)
    cache.acquire("a", item(b"cat"))
    cache.release_all("a")
    cache.acquire("a", item(b"dog"))
    cache.release_all("a")
    assert cache.acquire("a", item(b"cat"))
    assert cache.take_freed() == [b"dog"]


def test_what_a_failed_plan_should_have_freed_is_freed_by_the_next():
    cache = EncoderCache(4)
    cache.acquire("a", item(b"cat"))
    cache.release_all("a")
    cache.acquire("a", item(b"dog"))
    assert cache.take_freed() == [b"cat"]
    assert cache.discard(b"cat") == frozenset()
    cache.check_integrity()
    assert cache.take_freed() == [b"cat"]


def test_items_are_released_once_their_last_position_is_executed():
    cache = EncoderCache(100)
    items = [item(b"cat", 2), item(b"dog", 6), item(b"cat", 20)]
    for needed in items:
        cache.acquire("a", needed)
    cache.release_executed("a", items, 8)
    assert cache.held_size == 7
    cache.release_executed("a", items, 9)
    assert cache.held_size == 4, "the second cat still needs it"
    cache.release_executed("a", items, 24)
    assert cache.held_size == 0
    assert cache.size == 7


def test_an_encoder_decoders_item_is_released_with_the_first_token():
    cache = EncoderCache(100)
    audio = item(b"owl", 0)
    cache.acquire("a", audio)
    cache.release_executed("a", [audio], 0, is_encoder_decoder=True)
    assert cache.held_size == 6
    cache.release_executed("a", [audio], 1, is_encoder_decoder=True)
    assert cache.held_size == 0


def test_a_negative_capacity_is_refused():
    with pytest.raises(ValueError, match="-1 embeddings"):
        EncoderCache(-1)


def test_without_items_a_chunk_is_as_asked_for():
    assert fit([], 3, 7, budget=0) == ChunkFit(7, 0)


def test_items_outside_the_chunk_cost_nothing():
    assert fit([item(b"cat", 0), item(b"dog", 10)], 4, 6, budget=0) == ChunkFit(6, 0)


def test_each_content_is_computed_once():
    items = [item(b"cat", 0), item(b"dog", 4), item(b"cat", 8)]
    fitted = fit(items, cache=EncoderCache(7), budget=7)
    assert fitted == ChunkFit(100, 0, (items[0], items[1]))


def test_cached_items_cost_no_budget_and_are_acquired_first():
    cache = EncoderCache(7)
    cache.acquire("other", item(b"dog"))
    cache.release_all("other")
    items = [item(b"cat", 0), item(b"dog", 4)]
    fitted = fit(items, cache=cache, budget=4)
    assert fitted == ChunkFit(100, 0, (items[1], items[0]))


@pytest.mark.parametrize(("num_computed", "num_new"), [(0, 5), (5, 0), (6, 0)])
def test_too_little_budget_ends_the_chunk_before_the_item(num_computed, num_new):
    cat = item(b"cat", 5)
    fitted = fit([cat], num_computed, budget=3)
    assert fitted == ChunkFit(num_new, 3, limit=EncoderLimit.BUDGET)


def test_too_little_cache_ends_the_chunk_before_the_item():
    cache = EncoderCache(6)
    cache.acquire("other", item(b"dog"))
    items = [item(b"fox", 0), item(b"cat", 5)]
    fitted = fit(items, cache=cache)
    assert fitted == ChunkFit(5, 98, (items[0],), EncoderLimit.CACHE)


def test_two_items_that_fit_only_one_at_a_time_do_not_evict_each_other():
    cache = EncoderCache(4)
    cache.acquire("other", item(b"cat"))
    cache.release_all("other")
    fitted = fit([item(b"cat", 0), item(b"dog", 4)], cache=cache)
    assert (fitted.num_new, fitted.limit) == (4, EncoderLimit.CACHE)


@pytest.mark.parametrize(
    ("num_computed", "num_new", "expected"), [(0, 8, 5), (0, 9, 9), (5, 3, 0), (5, 4, 4), (6, 2, 0), (6, 3, 3)]
)
def test_an_item_that_must_not_be_cut_rolls_the_chunk_back_to_its_start(num_computed, num_new, expected):
    fitted = fit([item(b"cat", 5)], num_computed, num_new, disable_chunked_mm_input=True)
    assert fitted.num_new == expected
    assert (fitted.limit is EncoderLimit.WHOLE_ITEM) == (expected < num_new)
    assert fit([item(b"cat", 5)], num_computed, num_new).num_new == num_new


def test_an_encoder_decoders_first_chunk_needs_the_whole_item():
    audio = item(b"owl", 0)
    assert fit([audio], 0, 3, is_encoder_decoder=True, disable_chunked_mm_input=True) == ChunkFit(3, 94, (audio,))
    assert fit([audio], 0, 3, budget=5, is_encoder_decoder=True).num_new == 0
    assert fit([audio], 1, 3, budget=5, is_encoder_decoder=True) == ChunkFit(3, 5)


@CERTAIN
@given(
    items=prompts(),
    cache=filled_caches(),
    num_computed=st.integers(0, 30),
    num_new=st.integers(1, 40),
    budget=st.integers(0, 16),
    whole=st.booleans(),
)
def test_a_fitted_chunk_can_be_run(items, cache, num_computed, num_new, budget, whole):
    fitted = fit(items, num_computed, num_new, cache=cache, budget=budget, disable_chunked_mm_input=whole)
    end = num_computed + fitted.num_new
    overlapping = [o for o in items if max(o.offset, num_computed) < min(o.offset + o.length, end)]
    assert 0 <= fitted.num_new <= num_new
    assert {other.identifier for other in fitted.items} == {other.identifier for other in overlapping}
    to_run = [other for other in fitted.items if not cache.has(other.identifier)]
    assert sum(other.length for other in to_run) == budget - fitted.budget_left <= budget
    assert [other for other in fitted.items if cache.acquire("this", other)] == to_run
    cache.check_integrity()
    if whole:
        assert all(other.offset + other.length <= end for other in overlapping)
    if fitted.limit is None:
        assert fitted.num_new == num_new
    else:
        assert end == num_computed or end in [other.offset for other in items]


@CERTAIN
@given(items=prompts(), cache=filled_caches(), num_computed=st.integers(0, 30), budget=st.integers(0, 16))
def test_a_chunk_is_not_cut_without_need(items, cache, num_computed, budget):
    fitted = fit(items, num_computed, 40, cache=cache, budget=budget)
    if fitted.limit is None:
        return
    for needed in fitted.items:
        cache.acquire("this", needed)
    end = num_computed + fitted.num_new
    limiting = next(other for other in items if other.offset + other.length > end)
    if fitted.limit is EncoderLimit.BUDGET:
        assert limiting.length > fitted.budget_left
    else:
        assert not cache.can_hold(limiting.length)
