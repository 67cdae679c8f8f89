"""The reference, vLLM's V1 scheduler, in a rig. Can be imported only where `vllm` can: see `reference_process`.

Set up as its own unit tests do: a one-layer cache description, no model. `log_stats` is on, as in its server.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.config import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from benchmarks.scheduler_rig import EOS, VOCAB_SIZE, RigOptions

VERSION: str = vllm.__version__

_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 1,
    "num_hidden_layers": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 65_536,
    "vocab_size": VOCAB_SIZE,
    "bos_token_id": 1,
    "eos_token_id": EOS,
}


class ReferenceRig:
    name = "reference"

    def __init__(self, options: RigOptions) -> None:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(_MODEL))
            model = ModelConfig(
                model=folder, dtype="bfloat16", max_model_len=options.max_model_len, skip_tokenizer_init=True
            )
        cache = CacheConfig(block_size=options.block_size, enable_prefix_caching=True)
        config = VllmConfig(
            scheduler_config=SchedulerConfig(
                max_num_seqs=options.max_num_seqs,
                max_num_batched_tokens=options.max_num_batched_tokens,
                max_model_len=options.max_model_len,
                is_encoder_decoder=False,
                async_scheduling=options.async_scheduling,
                **options.config,
            ),
            model_config=model,
            cache_config=cache,
            parallel_config=ParallelConfig(),
        )
        spec = FullAttentionSpec(block_size=options.block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
        cache.num_gpu_blocks = options.num_blocks
        register_all_kvcache_specs(config)
        self.scheduler = (AsyncScheduler if options.async_scheduling else Scheduler)(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=options.num_blocks,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
            ),
            block_size=options.block_size,
            log_stats=True,
            structured_output_manager=StructuredOutputManager(config),
        )
        self.scheduler.use_v2_model_runner = True
        sha256 = get_hash_fn_by_name("sha256")
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(options.block_size, sha256)

    def message(
        self, request: int, prompt: list[int], max_tokens: int, priority: int = 0, ignore_eos: bool = True
    ) -> dict[str, Any]:
        return {
            "request_id": str(request),
            "prompt_token_ids": prompt,
            "sampling_params": _sampling(max_tokens, ignore_eos),
            "priority": priority,
        }

    def add(self, message: dict[str, Any]) -> None:
        # The request and its hashes are the engine's work.
        self.scheduler.add_request(Request(**message, pooling_params=None, block_hasher=self._hasher))

    def abort(self, request: int) -> None:
        self.scheduler.finish_requests(str(request), RequestStatus.FINISHED_ABORTED)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput | None:
        step = self.scheduler.schedule(throttle_prefills)
        return step if step.num_scheduled_tokens else None

    def result(self, step: SchedulerOutput, token: int) -> ModelRunnerOutput:
        requests = self.scheduler.requests
        return make_output(
            {name: [] if requests[name].is_prefill_chunk else [token] for name in step.num_scheduled_tokens}
        )

    def update(self, step: SchedulerOutput, result: ModelRunnerOutput) -> Any:
        return self.scheduler.update_from_output(step, result)

    def num_running(self) -> int:
        return len(self.scheduler.running)


def make_output(tokens: dict[str, list[int]]) -> ModelRunnerOutput:
    names = list(tokens)
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: index for index, name in enumerate(names)},
        sampled_token_ids=list(tokens.values()),
    )


_samplings: dict[tuple[int, bool], SamplingParams] = {}


def _sampling(max_tokens: int, ignore_eos: bool) -> SamplingParams:
    sampling = _samplings.get((max_tokens, ignore_eos))
    if sampling is None:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=ignore_eos)
        sampling.update_from_generation_config({}, EOS)
        _samplings[max_tokens, ignore_eos] = sampling
    return sampling
