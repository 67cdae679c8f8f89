"""The rank that a request asks for by name: that one, or an error that says which there are; pure."""

from __future__ import annotations

from router.errors import ApiError, Cause
from router.rank_table import RankTable

HEADER = "x-serried-rank"


def named_rank(ranks: RankTable, rank_id: str) -> int:
    """Its row. Raises ApiError if it is no member now: 503 if one of its pool's may be again, else 400."""
    row = ranks.row_of(rank_id)
    if row is not None:
        return row
    known = ranks.rank_ids
    if not known:
        raise ApiError(
            Cause.NO_RANK_AVAILABLE, f"{HEADER}: {rank_id!r} is not there, nor is any other; try again later", HEADER
        )
    remedy = f"there are {', '.join(known)}; name one of these, or send no such header"
    if rank_id.rpartition("/")[0] in {each.rpartition("/")[0] for each in known}:
        raise ApiError(Cause.NO_RANK_AVAILABLE, f"{HEADER}: {rank_id!r} is not there now; {remedy}", HEADER)
    raise ApiError(Cause.INVALID_REQUEST, f"{HEADER}: {rank_id!r} is a rank of no pool; {remedy}", HEADER)
