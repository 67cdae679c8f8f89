"""The first hours of some of the soak's days; `make soak` runs a million steps."""

import pytest

from tests.rank_scheduler.soak import Soak


@pytest.mark.parametrize("seed", range(16))
def test_a_random_day_ends_with_the_right_tokens_and_nothing_held(seed):
    assert Soak(seed).run(60) >= 60
