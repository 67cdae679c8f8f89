"""The runner that computes: a Hugging Face checkpoint on torch, on the CPU or one CUDA device."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from kv_transfer.geometry import Geometry
from kv_transfer.memory import KvMemory
from model_runner.attention import plan_attention
from model_runner.batch import PersistentBatch, StepRows
from model_runner.calibration import calibrate
from model_runner.kv_pool import KvPool
from model_runner.llama import LlamaModel, expected_tensors
from model_runner.memory import available_memory_bytes, plan_memory
from model_runner.model_config import ModelConfig, read_model_config
from model_runner.prompt_logprobs import prompt_logprobs
from model_runner.runner import Capacity, KvHooks
from model_runner.sampling import SamplingRows, sample
from model_runner.token_masks import restrict
from model_runner.weights import checkpoint_fingerprint, load_tensors
from rank_scheduler.config import CacheConfig, SchedulerConfig
from rank_scheduler.plan import Int64Array, StepPlan, StepResult

logger = logging.getLogger(__name__)

DtypeName = Literal["auto", "float32", "bfloat16"]
DeviceName = Literal["cpu", "cuda"]


class TorchRunner:
    """One rank's model (see `ModelRunner`). Its mutable state: the persistent batch and the KV pool."""

    def __init__(
        self,
        model_dir: Path,
        *,
        scheduler: SchedulerConfig,
        cache: CacheConfig,
        dtype: DtypeName = "auto",
        device: DeviceName = "cpu",
        num_threads: int | None = None,
        max_model_len: int | None = None,
        memory_budget_bytes: int | None = None,
        shared_kv: bool = False,
        mirrored_kv: bool = False,
    ) -> None:
        """`num_threads` is set for the whole process, None leaves torch's choice; `max_model_len` None: the model's;
        `memory_budget_bytes` None: what is free on the device; `shared_kv`: the pool can be mapped by other processes;
        `mirrored_kv`: as a copy in host memory also on the CPU, as it is on other devices.
        """
        self._model_dir = model_dir
        self._scheduler = scheduler
        self._cache = cache
        self._dtype_name: DtypeName = dtype
        self._device_name: DeviceName = device
        self._num_threads = num_threads
        self._max_model_len = max_model_len
        self._memory_budget_bytes = memory_budget_bytes
        self._shared_kv = shared_kv
        self._is_kv_mirrored = shared_kv and (mirrored_kv or device != "cpu")
        self.kv_hooks: KvHooks | None = None
        self._model: LlamaModel | None = None
        self._pool: KvPool | None = None
        self._batch: PersistentBatch | None = None

    @property
    def pool(self) -> KvPool:
        """The KV pool, between `load` and `close`."""
        if self._pool is None:
            raise RuntimeError("the runner holds no KV pool: call load() first")
        return self._pool

    def load(self) -> Capacity:
        started = time.monotonic()
        config = read_model_config(self._model_dir)
        max_model_len = self._check_max_model_len(config)
        if self._device_name == "cuda" and not torch.cuda.is_available():
            raise ValueError("device is 'cuda', and torch sees no CUDA device: set device to 'cpu'")
        device = torch.device(self._device_name)
        dtype = _pick_dtype(self._dtype_name, self._device_name)
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)
        memory = plan_memory(
            config,
            self._scheduler,
            self._cache,
            max_model_len=max_model_len,
            dtype_size_bytes=dtype.itemsize,
            available_bytes=torch.cuda.mem_get_info()[0] if device.type == "cuda" else available_memory_bytes(),
            budget_bytes=self._memory_budget_bytes,
            mirror_available_bytes=available_memory_bytes() if self._is_kv_mirrored else None,
        )
        performance = calibrate(config, dtype, device)
        ignored = frozenset({"lm_head.weight"}) if config.tie_word_embeddings else frozenset[str]()
        tensors = load_tensors(self._model_dir, expected_tensors(config), ignored, dtype)
        self._model = LlamaModel(config, tensors, max_model_len, device)
        self._pool = KvPool(
            memory.num_blocks,
            config.num_hidden_layers,
            self._cache.block_size,
            config.num_key_value_heads,
            config.head_dim,
            dtype,
            device,
            shared=self._shared_kv,
            mirrored=self._is_kv_mirrored,
        )
        self._batch = PersistentBatch(
            self._scheduler.max_num_seqs,
            max_model_len,
            self._cache.block_size,
            vocab_size=config.vocab_size,
            eos_token_ids=config.eos_token_ids,
        )
        capacity = Capacity(
            num_blocks=memory.num_blocks,
            block_size=self._cache.block_size,
            block_size_bytes=memory.block_size_bytes,
            max_model_len=max_model_len,
            vocab_size=config.vocab_size,
            eos_token_ids=config.eos_token_ids,
            dtype=str(dtype).removeprefix("torch."),
            device=self._device_name,
            backend="torch",
            performance=performance,
            geometry=Geometry(
                model=checkpoint_fingerprint(self._model_dir),
                dtype=str(dtype).removeprefix("torch."),
                num_layers=config.num_hidden_layers,
                num_kv_heads=config.num_key_value_heads,
                head_dim=config.head_dim,
                block_size=self._cache.block_size,
                num_groups=1,
                block_size_bytes=memory.block_size_bytes,
            ),
            is_kv_mirrored=self._is_kv_mirrored,
        )
        logger.info(
            "loaded %s (%s) in %.1f s: %s on %s, %d threads, %d blocks of %d tokens (%.2f GiB)",
            self._model_dir.name,
            config.architecture,
            time.monotonic() - started,
            capacity.dtype,
            capacity.device,
            torch.get_num_threads(),
            capacity.num_blocks,
            capacity.block_size,
            memory.pool_size_bytes / (1 << 30),
        )
        return capacity

    def execute(self, plan: StepPlan) -> StepResult:
        if self._model is None or self._pool is None or self._batch is None:
            raise RuntimeError("the runner holds no model: call load() first")
        with torch.inference_mode():
            self._apply_delta(plan, self._batch, self._pool)
            rows = self._batch.rows(plan)
            if not len(rows.slots):
                return StepResult(np.zeros((0, 1), np.int32))
            hidden = self._forward(rows, self._model, self._pool, self._batch)
            sampled = hidden[torch.from_numpy(rows.sampled_tokens).to(hidden.device)]
            result = self._sample(self._model.logits(sampled), plan, rows, self._batch)
            if self._batch.prompt_logprobs:
                result.prompt_logprobs.update(prompt_logprobs(hidden, rows, self._batch, self._model))
            self._batch.advance(plan, result.tokens)
        return result

    def kv_memory(self) -> KvMemory:
        memory = self.pool.memory
        if memory is None:
            raise RuntimeError("the KV pool is this process's own: construct the runner with shared_kv")
        return memory

    def close(self) -> None:
        if self._pool is not None and self._pool.memory is not None:
            self._pool.memory.close()
        self._model = self._pool = self._batch = None

    def _apply_delta(self, plan: StepPlan, batch: PersistentBatch, pool: KvPool) -> None:
        _check_no_encoder(plan)
        batch.free(plan.freed_slots)
        for source, destination in plan.block_copies:
            pool.copy_block(source, destination)
        fresh = [batch.install(sequence) for sequence in plan.new_sequences]
        for extension in plan.extensions:
            batch.extend(extension)
        batch.append_blocks(plan.appended_slots, plan.appended_blocks)
        blocks = np.concatenate((*fresh, plan.appended_blocks.reshape(-1))).astype(np.int64)
        if len(blocks):
            pool.zero_blocks(torch.from_numpy(blocks).to(pool.blocks.device))
        if plan.connector_metadata is not None and self.kv_hooks is not None:
            self.kv_hooks.start_load_kv(plan.connector_metadata)

    def _forward(self, rows: StepRows, model: LlamaModel, pool: KvPool, batch: PersistentBatch) -> torch.Tensor:
        device, dtype = pool.blocks.device, pool.blocks.dtype
        return model.forward(
            torch.from_numpy(rows.token_ids).to(device),
            torch.from_numpy(rows.positions).to(device),
            plan_attention(rows, batch, pool, dtype),
            pool,
            self.kv_hooks,
        )

    def _sample(self, logits: torch.Tensor, plan: StepPlan, rows: StepRows, batch: PersistentBatch) -> StepResult:
        """`logits`: of the sampled positions."""
        if not len(rows.sampled_rows):
            return StepResult(np.full((len(rows.slots), 1), -1, np.int32))
        slots = rows.slots[rows.sampled_rows]
        lengths = rows.positions[rows.sampled_tokens] + 1
        sampled = sample(
            logits,
            SamplingRows(
                temperature=batch.temperature[slots],
                top_k=batch.top_k[slots],
                top_p=batch.top_p[slots],
                min_p=batch.min_p[slots],
                seeds=batch.seeds[slots],
                positions=lengths,
                num_logprobs=batch.num_logprobs[slots],
            ),
            self._wished(logits, plan, slots, lengths, batch),
        )
        result = StepResult(batch.verify(rows, sampled.tokens))
        firsts = np.searchsorted(rows.sampled_rows, np.arange(len(rows.slots)))
        for row in np.flatnonzero(plan.samples & (result.tokens[:, 0] < 0)).tolist():
            result.failed[row] = sampled.failed[int(firsts[row])]
        if sampled.logprobs:
            counts = (result.tokens >= 0).sum(axis=1)
            for row in np.flatnonzero((counts > 0) & (batch.num_logprobs[rows.slots] >= 0)).tolist():
                result.logprobs[row] = [sampled.logprobs[int(firsts[row]) + n] for n in range(counts[row])]
        return result

    def _wished(
        self, logits: torch.Tensor, plan: StepPlan, slots: Int64Array, lengths: Int64Array, batch: PersistentBatch
    ) -> torch.Tensor | None:
        """A copy of `logits` as requests want them changed and restricted; None if none does.

        `slots`, `lengths`: of each sampled position, and how many tokens come before it.
        """
        unfinished = np.flatnonzero(batch.may_not_end(slots, lengths)).tolist()
        forbidden = {place: batch.ending_token_ids[slots[place]] for place in unfinished}
        rules = batch.logit_rules
        ruled = [place for place, slot in enumerate(slots.tolist()) if slot in rules] if rules else []
        if plan.masks is None and not forbidden and not ruled:
            return None
        wished = logits.clone()
        for place in ruled:
            slot = int(slots[place])
            rules[slot].apply(wished[place], batch.token_ids[slot, : lengths[place]])
        restrict(wished, plan.masked, plan.masks, forbidden)
        return wished

    def _check_max_model_len(self, config: ModelConfig) -> int:
        if self._max_model_len is None:
            return config.max_position_embeddings
        if not 1 <= self._max_model_len <= config.max_position_embeddings:
            raise ValueError(
                f"max_model_len is {self._max_model_len}, and the model has max_position_embeddings "
                f"{config.max_position_embeddings}: set max_model_len to 1..{config.max_position_embeddings}"
            )
        return self._max_model_len


def _check_no_encoder(plan: StepPlan) -> None:
    slots = [run.slot for run in plan.encoder_runs]
    slots += [new.slot for new in plan.new_sequences if new.encoder_inputs or len(new.cross_block_ids)]
    if slots:
        raise ValueError(
            f"the plan has encoder_inputs for slots {slots}, and this model has no encoder: send requests without "
            "encoder_inputs"
        )


def _pick_dtype(name: DtypeName, device: DeviceName) -> torch.dtype:
    """The dtype of weights and KV; "auto" is bfloat16 where the processor computes in it."""
    if name != "auto":
        return torch.float32 if name == "float32" else torch.bfloat16
    if device == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    flags = _processor_flags()
    return torch.bfloat16 if flags & {"avx512_bf16", "amx_bf16"} else torch.float32


def _processor_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), ()))
