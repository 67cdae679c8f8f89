"""A KV connector whose other end is arithmetic: loads bring the KV that `SimulatedRunner` would compute."""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt

from kv_transfer.connector import ExternalMatch, KvRequest, LoadFinished, RequestKey
from kv_transfer.params import KvParams
from model_runner.simulated import SimulatedRunner

BLOCK_SIZE = 4


class SimulatedConnector:
    """Scheduler half and worker half in one.

    `params` of a request: `external` (tokens that can be loaded, from the prompt's start), `is_async`, `keep` (its
    blocks are kept after its end), `unknown` (how often `get_num_new_matched_tokens` does not know yet). Full blocks of
    a prompt that is to be handed off are offered in partial tickets, of the same kind.
    """

    def __init__(self) -> None:
        self.pending: list[tuple[KvRequest, np.ndarray, int, int]] = []
        self.loading: dict[RequestKey, tuple[KvRequest, np.ndarray, int, int]] = {}
        self.given_up: list[RequestKey] = []
        self.num_computed_at_end: dict[RequestKey, int] = {}
        self.kept: set[RequestKey] = set()
        self.finished: list[RequestKey] = []
        self.num_asked: dict[RequestKey, int] = {}
        self.known: set[RequestKey] = set()
        self.num_computed: dict[RequestKey, int] = {}
        """Of prompts that are being computed."""
        self.runner: SimulatedRunner
        self._local: dict[RequestKey, int] = {}

    def on_new_request(self, request: KvRequest) -> None:
        assert request.key not in self.known, f"{request.key} is announced twice"
        self.known.add(request.key)

    def may_load_async(self, request: KvRequest) -> bool:
        return bool(request.params.get("is_async"))

    def get_num_new_matched_tokens(self, request: KvRequest, num_computed_tokens: int) -> ExternalMatch | None:
        asked = self.num_asked.get(request.key, 0)
        if asked < request.params.get("unknown", 0):
            self.num_asked[request.key] = asked + 1
            return None
        self._local[request.key] = num_computed_tokens
        external = max(0, int(request.params.get("external", 0)) - num_computed_tokens)
        return ExternalMatch(external, bool(request.params.get("is_async")))

    def update_state_after_alloc(self, request: KvRequest, block_ids: np.ndarray, num_external_tokens: int) -> None:
        if num_external_tokens:
            first = self._local[request.key]
            self.pending.append((request, block_ids.copy(), first, first + num_external_tokens))

    def build_connector_meta(self) -> object | None:
        pending, self.pending = self.pending, []
        return pending or None

    def request_computed(self, key: RequestKey, num_tokens: int, block_ids: npt.NDArray[np.int32]) -> None:
        assert num_tokens > self.num_computed.get(key, 0)
        self.num_computed[key] = num_tokens

    def partial_ticket(self, key: RequestKey, num_tokens: int, block_ids: np.ndarray) -> KvParams | None:
        num_full = num_tokens - num_tokens % BLOCK_SIZE
        assert self.num_computed[key] == num_tokens <= block_ids.shape[1] * BLOCK_SIZE
        return {"external": num_full, "num_tokens": num_full, "is_async": 1} if num_full else None

    def still_wanted(self, key: RequestKey) -> None:
        """It has no leases."""

    def abandoned(self, key: RequestKey) -> None:
        self.given_up.append(key)

    def request_preempted(self, key: RequestKey) -> None:
        self.num_computed.pop(key, None)

    def request_finished(
        self, request: KvRequest, block_ids: np.ndarray, *, hands_off: bool
    ) -> tuple[bool, KvParams | None]:
        self.known.remove(request.key)
        self.num_computed.pop(request.key, None)
        self.finished.append(request.key)
        self.num_computed_at_end[request.key] = request.num_computed_tokens
        params = {"external": len(request.token_ids) - 1} if hands_off else None
        if request.params.get("keep"):
            self.kept.add(request.key)
            return True, params
        return False, params

    def has_pending_work(self) -> bool:
        return bool(self.pending)

    # ---- worker half ----

    def wait_for_layer_load(self, layer: int) -> None:
        raise AssertionError("a simulated model has no layers")

    save_kv_layer = wait_for_layer_load

    def start_load_kv(self, metadata: list[tuple[KvRequest, np.ndarray, int, int]]) -> None:
        """What the plan asks for: synchronous loads are done at once, asynchronous ones when `complete` says so."""
        for load in metadata:
            if load[0].params.get("is_async"):
                self.loading[load[0].key] = load
            else:
                self._fill(load, load[3], self.runner)

    def complete(self, rng: random.Random, runner: SimulatedRunner, *, fails: float = 0.0) -> LoadFinished | None:
        """End one of the loads in progress, well or (with probability `fails`) not."""
        if not self.loading:
            return None
        key = rng.choice(sorted(self.loading))
        load = self.loading.pop(key)
        _, _, first, last = load
        if rng.random() < fails:
            valid = rng.choice([0, first, rng.randint(first, last)])
            self._fill(load, valid, runner)
            return LoadFinished(key, valid, "peer_lost")
        self._fill(load, last, runner)
        return LoadFinished(key)

    def _fill(self, load: tuple[KvRequest, np.ndarray, int, int], last: int, runner: SimulatedRunner) -> None:
        request, table, first, _ = load
        if last > first:
            runner.write_kv(request.token_ids.tolist(), table, first, last)
