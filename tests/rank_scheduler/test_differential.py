"""Our scheduler decides as the field's reference, vLLM's V1 scheduler: same workloads, compared step by step.

Compared in each step: who is admitted, in which order and with how long a cached prefix; who is preempted; how many
tokens each computes, in which order (except where all decode); then which tokens are delivered, and who ends for
which reason. Workloads are random: arrivals, lengths, shared prefixes, end-of-sequence, aborts, budgets, thresholds,
caps, watermark, cadence, priorities, sync and async.

Where the design differs on purpose, it is set to what the reference does or kept out of the workloads:

- victims by least lost work: `preemption_policy="last"`;
- later requests pass a head that does not fit: `max_head_bypasses=0`;
- a full prefix hit recomputes one token, not a block: every prompt ends with a token of its own;
- the blocks of a whole prompt are taken at admission, not only found to be free: where the pool is short, prompts
  are computed in one piece, or `scheduler_reserve_full_isl` is off;
- without chunked prefill there is no cap on long prompts: the two are not combined;
- a waiting request of higher priority preempts, and goes before the next chunk of a running prompt: with priorities
  there are no more requests than slots, blocks for all, and prompts in one piece;
- equal blocks that were computed twice are findable once: seldom enough not to show;
- impossible requests are refused when added: there are none;
- the cadence of prompts on a single engine is newer than the release it runs against: the rule is in the worker.

Needs a Python with vLLM: the current one or that of SERRIED_REFERENCE_PYTHON. Thousands of workloads:
`python -m tests.rank_scheduler.reference_worker --count 2000`.
"""

import json

import pytest

from benchmarks.reference_process import ReferenceMissingError, find_reference_python, run_with_reference
from tests.rank_scheduler.reference_worker import KINDS

WORKLOADS_PER_KIND = 10


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    try:
        find_reference_python()
    except ReferenceMissingError as missing:
        pytest.skip(str(missing))
    path = tmp_path_factory.mktemp("differential") / "outcome.json"
    arguments = ["--count", str(WORKLOADS_PER_KIND), "--json", str(path)]
    code = run_with_reference("tests.rank_scheduler.reference_worker", arguments, timeout=600)
    assert path.exists(), f"the worker ended with {code} before it was done"
    return json.loads(path.read_text())


@pytest.mark.parametrize("kind", KINDS)
def test_every_step_is_decided_as_the_reference_does(outcome, kind):
    assert outcome[kind]["differences"] == []
    counts = outcome[kind]["counts"]
    assert counts["finished"] > 10 * WORKLOADS_PER_KIND / 2
    assert counts["aborted"] > 0


def test_workloads_preempt(outcome):
    assert outcome["tight"]["counts"]["preempted"] > 10
    assert outcome["thrash"]["counts"]["preempted"] > 10
