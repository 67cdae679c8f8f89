from collections.abc import Iterator

import pytest

from tests.e2e.system import Served, ServeProcess

MAX_NUM_QUEUED_REQS = 100


@pytest.fixture(scope="package")
def served() -> Iterator[Served]:
    """Two ranks of the embedded model and a router; one start for all tests here, and gone before those elsewhere."""
    with ServeProcess("--num-ranks", "2", "--max-num-queued-reqs", str(MAX_NUM_QUEUED_REQS)) as process:
        system = Served(process.wait_until_ready(), MAX_NUM_QUEUED_REQS)
        try:
            yield system
        finally:
            system.close()
