from rank_scheduler.stop_strings import StopStringMatcher


class Words:
    """A decoder over a fixed vocabulary."""

    vocabulary = ("He", "llo", " wor", "ld", "!", "", "wo")

    def step(self, token_ids):
        return "".join(self.vocabulary[token] for token in token_ids)


def first_match(stop, tokens):
    matcher = StopStringMatcher(stop, Words())
    for index, token in enumerate(tokens):
        matched = matcher.push(token)
        if matched is not None:
            return index, matched
    return None


def test_a_string_that_spans_tokens_is_found_at_the_token_that_completes_it():
    assert first_match(["lo w"], [0, 1, 2, 3]) == (2, "lo w")
    assert first_match(["Hello world!"], [0, 1, 2, 3, 4]) == (4, "Hello world!")


def test_no_match_without_the_string():
    assert first_match(["xyz", "worx"], [0, 1, 2, 3, 4]) is None


def test_the_earliest_beginning_counts_then_the_order_given():
    assert first_match(["rld", "wor"], [0, 1, 2]) == (2, "wor")
    assert first_match(["orld", "world"], [0, 1, 6, 3]) is None
    assert first_match(["r", "or", "wor"], [0, 1, 2]) == (2, "wor")
    assert first_match(["wo", "wor"], [2]) == (0, "wo")
    assert first_match(["wor", "wo"], [2]) == (0, "wor")


def test_tokens_without_text_match_nothing():
    assert first_match(["H"], [5, 5, 0]) == (2, "H")
