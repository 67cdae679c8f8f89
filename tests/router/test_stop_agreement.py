"""Rank and router look for stop strings each for themselves, and must see the same."""

from hypothesis import given, settings
from hypothesis import strategies as st

from rank_scheduler.stop_strings import StopStringMatcher
from router.detokenizer import StopText


class Pieces:
    """Token i is the i-th of some texts."""

    def __init__(self, texts):
        self.texts = texts

    def step(self, token_ids):
        return "".join(self.texts[token] for token in token_ids)


@settings(max_examples=500, deadline=None)
@given(
    stop=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    texts=st.lists(st.text("abc", max_size=3), min_size=1, max_size=12),
    min_tokens=st.integers(0, 6),
)
def test_both_end_at_the_same_token_with_the_same_string(stop, texts, min_tokens):
    matcher, watch = StopStringMatcher(stop, Pieces(texts)), StopText(stop)
    answer = ""
    for number, _ in enumerate(texts, 1):
        may_stop = number >= min_tokens
        matched = matcher.push(number - 1, may_stop=may_stop)
        answer += watch.feed(texts[number - 1], may_stop=may_stop)
        assert watch.matched == matched
        if matched is not None:
            text = "".join(texts[:number])
            assert text.startswith(answer + matched)
            assert may_stop
            exempt = len("".join(texts[: max(0, min_tokens - 1)]))
            assert len(answer + matched) > exempt, "what was complete before min_tokens does not count"
            return
    assert answer + watch.end(False) == "".join(texts)


def test_a_stop_string_within_min_tokens_stays_in_the_answer():
    matcher, watch = StopStringMatcher(["b"], Pieces("abab")), StopText(["b"])
    assert [matcher.push(token, may_stop=token >= 2) for token in range(4)] == [None, None, None, "b"]
    assert [watch.feed(text, may_stop=index >= 2) for index, text in enumerate("abab")] == ["a", "b", "a", ""]
