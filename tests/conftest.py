"""What concerns all tests."""

import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def _quick_collections() -> None:
    """What is there before a module's tests, imported modules above all, is no garbage of theirs.

    Hundreds of tests look for what they left by collecting it, and each time would walk over half a million objects.
    """
    gc.collect()
    gc.freeze()
