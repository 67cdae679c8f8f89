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
    ids = [members.register(record(boot)).rank_id for boot in "abc"]
    assert ids == ["mixed/0", "mixed/1", "mixed/2"]
    assert members.lost("mixed/1", "b")
    assert members.register(record("d")).rank_id == "mixed/1"
    assert members.register(record("e", pool="prefill")).rank_id == "prefill/0"


def test_records_are_in_order_of_their_index() -> None:
    members = Membership()
    for index in range(11):
        members.register(record(str(index)))
    assert [member.rank_id for member in members.records()] == [f"mixed/{index}" for index in range(11)]


def test_the_loss_of_an_earlier_holder_does_not_touch_the_present_one() -> None:
    members = Membership()
    members.register(record("a"))
    members.lost("mixed/0", "a")
    members.register(record("b"))
    version = members.version
    assert not members.lost("mixed/0", "a")
    assert members.version == version
    assert [member.boot_id for member in members.records()] == ["b"]


def test_an_incarnation_that_comes_back_keeps_its_id() -> None:
    members = Membership()
    members.register(record("a"))
    members.register(record("b"))
    version = members.version
    assert members.register(record("b")).rank_id == "mixed/1"
    assert members.version == version
    assert members.register(record("b", port=7001)).rank_id == "mixed/1"
    assert members.version == version + 1


def test_the_id_that_a_rank_had_before_is_given_again_if_it_is_free() -> None:
    members = Membership()
    assert members.register(record("b", rank_id="mixed/1")).rank_id == "mixed/1"
    assert members.register(record("new")).rank_id == "mixed/0"
    assert members.register(record("a", rank_id="mixed/0")).rank_id == "mixed/2"
    assert members.register(record("b", rank_id="mixed/7")).rank_id == "mixed/1"
    members.check_integrity()


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (record("a", pool="a/b"), "a/b"),
        (record("a", port=0), "port 0"),
        (record("a", rank_id="prefill/0"), "prefill/0"),
        (record("a", rank_id="mixed/"), "mixed/"),
        (record("a", rank_id="mixed/-1"), "mixed/-1"),
        (record("a", rank_id="mixed/007"), "mixed/007"),
        (record("a", rank_id="mixed/0/1"), "mixed/0/1"),
        (record("a", rank_id="mixed/" + "9" * 5000), "mixed/999"),
    ],
)
def test_senseless_registrations_are_refused(bad: RankRecord, named: str) -> None:
    members = Membership()
    with pytest.raises(MembershipError, match=named):
        members.register(bad)
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
        rank_id = self.members.register(record(boot_id, pool=pool)).rank_id
        expected = next(f"{pool}/{index}" for index in range(100) if f"{pool}/{index}" not in taken)
        assert rank_id == expected
        self.ids[boot_id] = rank_id
        return boot_id

    @rule(target=alive, pool=st.sampled_from(["mixed", "prefill"]), index=st.integers(0, 3))
    def register_with_a_wish(self, pool: str, index: int) -> str:
        boot_id, wish = str(self.num_boots), f"{pool}/{index}"
        self.num_boots += 1
        is_free = wish not in self.ids.values()
        rank_id = self.members.register(record(boot_id, pool=pool, rank_id=wish)).rank_id
        assert (rank_id == wish) == is_free
        self.ids[boot_id] = rank_id
        return boot_id

    @rule(boot_id=alive, says_its_id=st.booleans())
    def register_again(self, boot_id: str, says_its_id: bool) -> None:
        rank_id = self.ids[boot_id]
        again = record(boot_id, pool=rank_id.split("/")[0], rank_id=rank_id if says_its_id else "")
        assert self.members.register(again).rank_id == rank_id

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
