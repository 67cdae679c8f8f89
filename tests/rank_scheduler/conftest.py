from importlib import import_module

import pytest

from kv_transfer import extension
from rank_scheduler import block_pool, kv_cache_manager, prefix_hash


@pytest.fixture(params=["python", "c"])
def on_both_twins(request, monkeypatch):
    """The test runs with the block pool and the hashing in Python, and with those in C, where they were built."""
    if request.param == "c":
        missing = extension.why_missing()
        if missing:
            pytest.skip("; ".join(missing.values()))
        twin = import_module("rank_scheduler._prefix_hash")
        pool, hash_run, hash_rows = import_module("rank_scheduler._block_pool").BlockPool, twin.hash_run, twin.hash_rows
    else:
        pool = block_pool.BlockPool
        hash_run, hash_rows = prefix_hash.hash_run_in_python, prefix_hash.hash_rows_in_python
    monkeypatch.setattr(kv_cache_manager, "make_block_pool", pool)
    monkeypatch.setattr(prefix_hash, "hash_run", hash_run)
    monkeypatch.setattr(prefix_hash, "hash_rows", hash_rows)
