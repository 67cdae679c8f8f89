"""A waiting request explained over HTTP, by the router and a rank as they ship, with the simulated model."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

from cluster.rank_server import RankServer
from model_runner.simulated import SimulatedRunner
from rank_scheduler.config import CacheConfig, SchedulerConfig
from rank_scheduler.plan import StepPlan, StepResult
from router.control_messages import Members
from tests.router.fake_cluster import HOST, SECRET, FakeControl, in_loop, running, until
from tests.router.small_tokenizer import byte_tokenizer

TIMEOUT_S = 20.0
SCHEDULER = SchedulerConfig(max_num_batched_tokens=16, max_num_seqs=1, async_scheduling=False)
CACHE = CacheConfig(block_size=4, num_blocks=129)


class GatedRunner(SimulatedRunner):
    """The simulated model, whose steps wait for permits."""

    def __init__(self) -> None:
        super().__init__(
            scheduler=SCHEDULER, cache=CACHE, max_model_len=256, vocab_size=byte_tokenizer().get_vocab_size()
        )
        self.permits = threading.Semaphore(0)

    async def go_on(self) -> None:
        """Slowly, until cancelled."""
        while True:
            self.permits.release()
            await asyncio.sleep(0.02)

    def execute(self, plan: StepPlan) -> StepResult:
        assert self.permits.acquire(timeout=TIMEOUT_S), "the test let no step go on"
        return super().execute(plan)


@in_loop
async def test_a_waiting_request_is_explained_through_router_and_rank(tmp_path: Path) -> None:
    byte_tokenizer().save(str(tmp_path / "rank-tokenizer.json"))
    async with running(tmp_path, num_ranks=0, rank_wait_timeout_s=TIMEOUT_S) as cluster:
        control: FakeControl = cluster.control
        runner = GatedRunner()
        server = RankServer(
            runner,
            runner.load(),
            config=SCHEDULER,
            cache=CACHE,
            pool="mixed",
            secret=SECRET,
            control_address=control.address,
            advertise_host=HOST,
            node_id="node",
            tokenizer_path=tmp_path / "rank-tokenizer.json",
        )
        starting = asyncio.create_task(asyncio.to_thread(server.start))
        try:
            async with asyncio.timeout(TIMEOUT_S):
                control.tell(Members([await control.registered()]))
                await starting
            await until(lambda: len(cluster.service.pool.links) == 1)
            link = cluster.service.pool.links[0]
            # Choices of one prompt go to a rank together, though there is one slot only.
            answer = asyncio.create_task(cluster.complete("second", n=2, max_tokens=240, ignore_eos=True))
            await until(lambda: link.num_live == 2)
            runner.permits.release(3)
            await until(lambda: link.load.num_running == 1)
            (request_id,) = [flow.request_id for flow in cluster.service._flows]
            stepping = asyncio.create_task(runner.go_on())  # a rank answers between two steps
            body = (await cluster.client.get(f"/v1/requests/{request_id}/explain")).json()
            stepping.cancel()
            assert (body["id"], body["ranks"]) == (request_id, ["mixed/3"])
            running_one, sequence = sorted(body["sequences"], key=lambda each: each["state"])
            assert (running_one["state"], running_one["rank"]) == ("running", "mixed/3")
            assert (sequence["state"], sequence["position"], sequence["num_prompt_tokens"]) == ("waiting", 0, 6)
            assert sequence["reason"] in ("new", "slots")  # the latter once a step has been planned since it came
            assert sequence["message"]
            assert running_one["timeline"][0]["at_s"] == 0 <= sequence["timeline"][0]["at_s"]
            runner.permits.release(1000)
            assert (await answer).status_code == 200
        finally:
            runner.permits.release(1000)
            await asyncio.to_thread(server.stop)
            await asyncio.gather(starting, return_exceptions=True)
