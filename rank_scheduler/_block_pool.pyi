"""The same class as its Python twin, method for method."""

from rank_scheduler.block_pool import BlockPool as BlockPool

SOURCE_HASH: str
