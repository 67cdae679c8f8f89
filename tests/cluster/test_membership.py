import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from cluster.membership import Membership, MembershipError
from router.control_messages import RankRecord


def record(boot_id: str, pool: str = "mixed", **changes: object) -> RankRecord:
    base = RankRecord(
        rank_id="",
        pool=pool,
        boot_id=boot_id,
        host="127.0.0.1",
        port=7000,
        pid=1,
        node_id="node",
        max_model_len=128,
        max_num_seqs=4,
        num_blocks=16,
        block_size=16,
    )
    return msgspec.structs.replace(base, **changes)


def test_the_lowest_free_index_is_given_again() -> None:
    members = Membership()
    ids = [members.register(record(boot), 0.0).rank_id for boot in "abc"]
    assert ids == ["mixed/0", "mixed/1", "mixed/2"]
    assert members.lost("mixed/1", "b")
    assert members.register(record("d"), 1.0).rank_id == "mixed/1"
    assert members.register(record("e", pool="prefill"), 1.0).rank_id == "prefill/0"


def test_records_are_in_order_of_their_index() -> None:
    members = Membership()
    for index in range(11):
        members.register(record(str(index)), 0.0)
    assert [member.rank_id for member in members.records()] == [f"mixed/{index}" for index in range(11)]


def test_the_loss_of_an_earlier_holder_does_not_touch_the_present_one() -> None:
    members = Membership()
    members.register(record("a"), 0.0)
    members.lost("mixed/0", "a")
    members.register(record("b"), 1.0)
    version = members.version
    assert not members.lost("mixed/0", "a")
    assert members.version == version
    assert [member.boot_id for member in members.records()] == ["b"]


def test_an_incarnation_that_comes_back_keeps_its_id() -> None:
    members = Membership()
    members.register(record("a"), 0.0)
    members.register(record("b"), 0.0)
    version = members.version
    assert members.register(record("b"), 1.0).rank_id == "mixed/1"
    assert members.version == version
    assert members.register(record("b", port=7001), 2.0).rank_id == "mixed/1"
    assert members.version == version + 1


@pytest.mark.parametrize(
    ("bad", "named"),
    [(record("a", pool="a/b"), "a/b"), (record("a", rank_id="mixed/7"), "mixed/7"), (record("a", port=0), "port 0")],
)
def test_senseless_registrations_are_refused(bad: RankRecord, named: str) -> None:
    members = Membership()
    with pytest.raises(MembershipError, match=named):
        members.register(bad, 0.0)
    assert members.records() == []
    assert members.version == 0


class MembershipMachine(RuleBasedStateMachine):
    """Against a model: the set of live incarnations and the ids they were given."""

    alive = Bundle("alive")

    def __init__(self) -> None:
        super().__init__()
        self.members = Membership()
        self.ids: dict[str, str] = {}
        self.num_boots = 0
        self.seen_version = 0

    @rule(target=alive, pool=st.sampled_from(["mixed", "prefill"]))
    def register(self, pool: str) -> str:
        boot_id = str(self.num_boots)
        self.num_boots += 1
        taken = set(self.ids.values())
        rank_id = self.members.register(record(boot_id, pool=pool), 0.0).rank_id
        expected = next(f"{pool}/{index}" for index in range(100) if f"{pool}/{index}" not in taken)
        assert rank_id == expected
        self.ids[boot_id] = rank_id
        return boot_id

    @rule(boot_id=alive)
    def register_again(self, boot_id: str) -> None:
        rank_id = self.ids[boot_id]
        assert self.members.register(record(boot_id, pool=rank_id.split("/")[0]), 0.0).rank_id == rank_id

    @rule(boot_id=consumes(alive))
    def lose(self, boot_id: str) -> None:
        rank_id = self.ids.pop(boot_id)
        assert self.members.lost(rank_id, boot_id)
        assert not self.members.lost(rank_id, boot_id)

    @invariant()
    def agrees(self) -> None:
        self.members.check_integrity()
        assert {member.boot_id: member.rank_id for member in self.members.records()} == self.ids
        assert self.members.version >= self.seen_version
        self.seen_version = self.members.version


TestMembershipMachine = MembershipMachine.TestCase
