"""A scheduler's configuration: frozen, unknown keys refused, every refusal names field, value, reason and remedy.

Names, types, defaults and checks follow the field's reference engine. What a check needs of the model is known only
where the model is: `SchedulerConfig.check`, or `SchedulerConfig.default_factory`, which builds and checks.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, cast, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

if TYPE_CHECKING:
    from rank_scheduler.interface import SchedulerInterface, SchedulerSetup

logger = logging.getLogger(__name__)


def _check_scheduler_cls(value: object) -> object:
    if value is None or isinstance(value, type):
        return value
    if not isinstance(value, str) or not all(part.isidentifier() for part in value.split(".")) or "." not in value:
        raise ValueError(
            f"scheduler_cls {value!r} is neither a class nor a dotted path; write it as package.module.ClassName"
        )
    return value


def _dotted_path(scheduler_cls: object) -> object:
    return (
        f"{scheduler_cls.__module__}.{scheduler_cls.__qualname__}" if isinstance(scheduler_cls, type) else scheduler_cls
    )


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_switches_as_numbers(cls, value: object, info: ValidationInfo) -> object:
        """In YAML a bare `on` or `yes` is a boolean, and Python takes that for the number 1."""
        field = cls.model_fields[str(info.field_name)]
        if isinstance(value, bool) and bool not in (field.annotation, *get_args(field.annotation)):
            raise ValueError(f"{info.field_name} ({value}) is no switch; give a value of the kind that it takes")
        return value


class SpeculativeConfig(_Section):
    """Draft tokens from the request's own text, verified in the same step; outputs stay the same."""

    method: Literal["ngram"] = Field(default="ngram", description="Where drafts come from: the request's own tokens.")
    num_speculative_tokens: int = Field(ge=1, description="Draft tokens per sequence and step, at most.")
    prompt_lookup_max: int = Field(default=5, ge=1, description="Longest run of last tokens that is looked up.")
    prompt_lookup_min: int = Field(default=2, ge=1, description="Shortest run of last tokens that is looked up.")

    @model_validator(mode="after")
    def _check_lookup(self) -> Self:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min ({self.prompt_lookup_min}) is more than prompt_lookup_max "
                f"({self.prompt_lookup_max}): nothing would be looked up; lower prompt_lookup_min or raise "
                "prompt_lookup_max"
            )
        return self


class SchedulerConfig(_Section):
    """One rank's scheduler, and the limits of the cluster's queue."""

    runner_type: Literal["generate", "pooling", "draft"] = Field(
        default="generate", description="What the model runner does; pooling: no token is sampled."
    )
    max_num_batched_tokens: int = Field(
        default=2048, ge=1, description="Token positions computed in one step, prompt chunks and decode together."
    )
    max_num_scheduled_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Tokens handed out in one step, at most max_num_batched_tokens. None: max_num_batched_tokens.",
    )
    max_num_seqs: int = Field(default=128, ge=1, description="Sequences that run at the same time on one rank.")
    max_num_active_seqs: int | None = Field(
        default=None,
        ge=1,
        description="Running sequences, idle sessions included, from which on none is admitted. None: max_num_seqs.",
    )
    max_num_inflight_kv_loads: int | None = Field(
        default=None,
        ge=1,
        description="KV loads in progress, and done but not yet running; set, loads start while the batch is full. "
        "None: no limit, but a load needs a free slot to start.",
    )
    max_async_kv_loads_per_step: int | None = Field(
        default=None, ge=1, description="KV loads started in one step. None: no limit."
    )
    long_prefill_token_threshold: int = Field(
        default=0,
        ge=0,
        description="Tokens of one request in one step while there are others, running or waiting. 0: no limit. "
        "Nothing without enable_chunked_prefill.",
    )
    long_prefill_token_threshold_adaptive: bool = Field(
        default=False,
        description="Raise the threshold to max_num_batched_tokens divided by the requests, while those are few.",
    )
    short_prefill_tokens: int = Field(
        default=0,
        ge=0,
        description="A prompt that lacks at most so many tokens is not cut by long_prefill_token_threshold, and longer "
        "ones get no part of a step in which it begins, in three steps of four at most. 0: off.",
    )
    max_num_queued_reqs: int | None = Field(
        default=None,
        ge=0,
        description="Requests in the whole cluster, waiting and running; one more is refused with 503. None: no limit.",
    )
    max_num_queued_tokens: int | None = Field(
        default=None,
        ge=0,
        description="Prompt tokens of requests in the whole cluster that have no first token yet. None: no limit.",
    )
    queued_tokens_accounting: Literal["exact", "conservative"] = Field(
        default="exact",
        description="`exact`: tokens of a prompt that are computed, or were found in a prefix cache, count no more. "
        "`conservative`: all count until the first token.",
    )
    enable_chunked_prefill: bool = Field(
        default=True, description="Compute a prompt in several steps where it does not fit into one."
    )
    is_multimodal_model: bool = Field(default=False, description="The model has an encoder for parts of the prompt.")
    max_num_encoder_input_tokens: int | None = Field(
        default=None, ge=1, description="Embeddings encoded in one step. None: max_num_batched_tokens."
    )
    encoder_cache_size: int | None = Field(
        default=None, ge=1, description="Embeddings that the encoder cache holds. None: max_num_batched_tokens."
    )
    policy: Literal["fcfs", "priority"] = Field(
        default="fcfs", description="Order of waiting requests: by arrival, or by priority (lower first), then arrival."
    )
    disable_chunked_mm_input: bool = Field(
        default=False, description="A multimodal item's positions are computed within one step."
    )
    scheduler_cls: Annotated[
        type[object] | str | None,
        BeforeValidator(_check_scheduler_cls),
        PlainSerializer(_dotted_path, return_type=str | None, when_used="json-unless-none"),
        WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "null"}]}),
    ] = Field(default=None, description="Scheduler class, or its dotted path. None: the built-in one.")
    disable_hybrid_kv_cache_manager: bool | None = Field(
        default=None,
        description="Layer groups with a sliding window keep all their blocks, as if they had none. None: off.",
    )
    scheduler_reserve_full_isl: bool = Field(
        default=True, description="Admit a request only if all its known tokens fit into the free blocks."
    )
    watermark: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Share of the blocks that stays free when a request is admitted beside running ones.",
    )
    prefill_schedule_interval: int = Field(
        default=1, ge=1, description="While some decode, prompts are computed in every n-th step only."
    )
    cache_aware_admission_window: int = Field(
        default=0,
        ge=0,
        description="Among so many first waiting requests, those with a cached prefix go first; 0: off.",
    )
    cache_aware_admission_threshold: float = Field(
        default=0.5, ge=0, le=1, description="Share of KV blocks in use from which on the window counts; 0: always."
    )
    async_scheduling: bool | None = Field(
        default=None, description="Plan step n + 1 while step n is computed. None: where it helps (CUDA)."
    )
    stream_interval: int = Field(
        default=1, ge=1, description="Tokens per streamed chunk; the first and the last are never held back."
    )

    max_head_bypasses: int = Field(
        default=8,
        ge=0,
        description="How often later requests that fit may pass the first waiting one that does not; 0: never.",
    )
    preemption_policy: Literal["least_lost", "last"] = Field(
        default="least_lost",
        description="Who gives up its blocks: the one that loses least computed work, or the last admitted.",
    )
    max_kv_load_retries: int = Field(
        default=1,
        ge=0,
        description="How often a KV load that left nothing to keep is tried again, where kv_transfer has failed loads "
        "recomputed; after one that left something, the rest is computed.",
    )
    speculative: SpeculativeConfig | None = Field(default=None, description="Speculative decoding. None: off.")

    @classmethod
    def default_factory(
        cls, max_model_len: int, is_encoder_decoder: bool = False, max_mm_item_tokens: int = 0, **fields: Any
    ) -> Self:
        """Build a configuration for one model and check it. Raises ValueError.

        An encoder-decoder model computes its prompt in one step and has an encoder, whatever `fields` say. Encoder
        budget and cache that `fields` leave out hold the largest multimodal item.
        """
        if is_encoder_decoder:
            fields |= {"enable_chunked_prefill": False, "disable_chunked_mm_input": True, "is_multimodal_model": True}
        config = cls(**fields)
        if max_mm_item_tokens > config.max_num_batched_tokens:
            sizes = {
                name: max_mm_item_tokens
                for name in ("max_num_encoder_input_tokens", "encoder_cache_size")
                if fields.get(name) is None
            }
            config = cls(**(fields | sizes))
        config.check(max_model_len, is_encoder_decoder, max_mm_item_tokens)
        return config

    @property
    def num_scheduled_tokens_limit(self) -> int:
        """Tokens that one step may hand out."""
        return min(self.max_num_scheduled_tokens or self.max_num_batched_tokens, self.max_num_batched_tokens)

    @property
    def active_seqs_limit(self) -> int:
        """Running sequences from which on none is admitted."""
        return self.max_num_active_seqs or self.max_num_seqs

    @property
    def encoder_budget(self) -> int:
        """Embeddings that one step may encode; 0 without an encoder."""
        return (self.max_num_encoder_input_tokens or self.max_num_batched_tokens) if self.is_multimodal_model else 0

    @property
    def encoder_cache_capacity(self) -> int:
        """Embeddings that the encoder cache holds; 0 without an encoder."""
        return (self.encoder_cache_size or self.max_num_batched_tokens) if self.is_multimodal_model else 0

    @property
    def num_speculative_tokens(self) -> int:
        """Draft tokens per sequence and step; 0 without speculation."""
        return self.speculative.num_speculative_tokens if self.speculative is not None else 0

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is less than max_num_seqs "
                f"({self.max_num_seqs}): a step could not give one token to every running sequence; "
                "raise max_num_batched_tokens or lower max_num_seqs"
            )
        if self.active_seqs_limit > self.max_num_seqs:
            raise ValueError(
                f"max_num_active_seqs ({self.max_num_active_seqs}) is more than max_num_seqs ({self.max_num_seqs}): "
                "a rank has no slots for them; lower max_num_active_seqs or raise max_num_seqs"
            )
        if self.short_prefill_tokens and not (self.long_prefill_token_threshold and self.enable_chunked_prefill):
            raise ValueError(
                f"short_prefill_tokens ({self.short_prefill_tokens}) does nothing with long_prefill_token_threshold "
                f"{self.long_prefill_token_threshold} and enable_chunked_prefill {self.enable_chunked_prefill}: set "
                "the threshold (64 for example), and leave chunked prefill on"
            )
        if self.num_scheduled_tokens_limit <= self.num_speculative_tokens:
            raise ValueError(
                f"speculative.num_speculative_tokens ({self.num_speculative_tokens}) is not less than the tokens of a "
                f"step ({self.num_scheduled_tokens_limit}): one sequence with its drafts would not fit; lower it, or "
                "raise max_num_batched_tokens (and max_num_scheduled_tokens)"
            )
        if self.async_scheduling and (obstacle := self._async_obstacle()):
            raise ValueError(f"async_scheduling (True) does not work with {obstacle}, or leave async_scheduling out")
        return self

    def check(self, max_model_len: int, is_encoder_decoder: bool = False, max_mm_item_tokens: int = 0) -> None:
        """Check against the model; `max_mm_item_tokens` is the largest multimodal item. Raises ValueError."""
        if is_encoder_decoder and self.enable_chunked_prefill:
            raise ValueError(
                "enable_chunked_prefill (True) does not work with an encoder-decoder model, whose decoder prompt is "
                "computed in one step; set enable_chunked_prefill to false"
            )
        if not self.enable_chunked_prefill and self.num_scheduled_tokens_limit < max_model_len:
            field = (
                "max_num_batched_tokens" if self.max_num_batched_tokens < max_model_len else "max_num_scheduled_tokens"
            )
            raise ValueError(
                f"{field} ({self.num_scheduled_tokens_limit}) is less than max_model_len ({max_model_len}) while "
                "enable_chunked_prefill is off: a long prompt would never fit into a step; raise "
                f"{field}, lower max_model_len, or switch enable_chunked_prefill on"
            )
        if self.long_prefill_token_threshold > max_model_len:
            raise ValueError(
                f"long_prefill_token_threshold ({self.long_prefill_token_threshold}) is more than max_model_len "
                f"({max_model_len}): no prompt reaches it; lower it, or set it to 0 for no threshold"
            )
        self._check_mm_item(max_mm_item_tokens, is_encoder_decoder)
        self._warn(max_model_len)

    def _check_mm_item(self, item: int, is_encoder_decoder: bool) -> None:
        if self.disable_chunked_mm_input and self.num_scheduled_tokens_limit < item:
            field = "max_num_batched_tokens" if self.max_num_batched_tokens < item else "max_num_scheduled_tokens"
            raise ValueError(
                f"{field} ({self.num_scheduled_tokens_limit}) is less than the model's largest multimodal item "
                f"({item} tokens) while disable_chunked_mm_input is on: it would never fit into a step; raise {field}"
                + ("" if is_encoder_decoder else ", or switch disable_chunked_mm_input off")
            )
        if self.disable_chunked_mm_input and not is_encoder_decoder and 0 < self.long_prefill_token_threshold < item:
            raise ValueError(
                f"long_prefill_token_threshold ({self.long_prefill_token_threshold}) is less than the model's largest "
                f"multimodal item ({item} tokens) while disable_chunked_mm_input is on: beside other requests it would "
                "never fit into a step; raise the threshold, or switch disable_chunked_mm_input off"
            )
        if not self.is_multimodal_model:
            return
        for field, size in (
            ("max_num_encoder_input_tokens", self.encoder_budget),
            ("encoder_cache_size", self.encoder_cache_capacity),
        ):
            if size < item:
                raise ValueError(
                    f"{field} ({size}) is less than the model's largest multimodal item ({item} tokens): it could "
                    f"never be encoded; set {field} to {item} or more"
                )

    def _warn(self, max_model_len: int) -> None:
        if self.max_num_batched_tokens > self.max_num_seqs * max_model_len:
            logger.warning(
                "max_num_batched_tokens (%d) is more than max_num_seqs (%d) sequences of max_model_len (%d) tokens "
                "could use; lower it to save memory",
                self.max_num_batched_tokens,
                self.max_num_seqs,
                max_model_len,
            )
        if self.speculative is not None and self.num_scheduled_tokens_limit < 8192:
            logger.warning(
                "a step has %d tokens, and drafts take some of them: prompts may wait longer; with speculative "
                "decoding, raise max_num_batched_tokens and max_num_scheduled_tokens to 8192 where the device allows",
                self.num_scheduled_tokens_limit,
            )
        if self.cache_aware_admission_window and self.policy != "fcfs":
            logger.warning(
                "cache_aware_admission_window (%d) has no effect with policy %r; set policy to 'fcfs'",
                self.cache_aware_admission_window,
                self.policy,
            )

    def get_scheduler_cls(self) -> type[SchedulerInterface]:
        """The class that `make_scheduler` constructs. Raises ValueError if there is none, or it is no scheduler."""
        from rank_scheduler.interface import SchedulerInterface

        if self.scheduler_cls is None:
            from rank_scheduler.scheduler import Scheduler

            return cast("type[SchedulerInterface]", Scheduler)
        found: object = self.scheduler_cls
        if isinstance(found, str):
            module_name, _, name = found.rpartition(".")
            try:
                module = importlib.import_module(module_name)
            except ImportError as error:
                raise ValueError(
                    f"scheduler_cls {found!r}: the module {module_name!r} cannot be imported ({error}); "
                    "correct the path, or put the module where every rank can import it"
                ) from error
            if not hasattr(module, name):
                raise ValueError(f"scheduler_cls {found!r}: the module {module_name!r} has no {name!r}; correct it")
            found = getattr(module, name)
        if not isinstance(found, type):
            raise ValueError(f"scheduler_cls {self.scheduler_cls!r} is no class; name a class")
        missing = [
            name
            for name, contract in vars(SchedulerInterface).items()
            if not name.startswith("_") and getattr(found, name, contract) is contract
        ]
        if missing:
            raise ValueError(
                f"scheduler_cls {_dotted_path(found)!r} lacks {', '.join(missing)} of "
                "rank_scheduler.interface.SchedulerInterface; implement them, or inherit from "
                "rank_scheduler.scheduler.Scheduler"
            )
        return cast("type[SchedulerInterface]", found)

    def make_scheduler(self, setup: SchedulerSetup) -> SchedulerInterface:
        """A scheduler for one rank. Raises ValueError if `scheduler_cls` is none, or it and `setup` do not fit."""
        from rank_scheduler.interface import SchedulerInterface

        scheduler = self.get_scheduler_cls()(self, setup)
        missing = [name for name in SchedulerInterface.__annotations__ if not hasattr(scheduler, name)]
        if missing:
            raise ValueError(
                f"scheduler_cls {_dotted_path(type(scheduler))!r} does not set {', '.join(missing)} of "
                "rank_scheduler.interface.SchedulerInterface; set it in __init__"
            )
        return scheduler

    def resolve_async_scheduling(self, supported: bool, device: str) -> bool:
        """Whether step n + 1 is planned while step n is computed, on a rank whose runner supports it or not.

        Raises ValueError if it was asked for and does not work here.
        """
        if self.async_scheduling is None:
            return supported and device == "cuda" and self.runner_type == "generate" and self._async_obstacle() is None
        if self.async_scheduling and not supported:
            raise ValueError(
                f"async_scheduling (True) is not supported by this rank's model runner on {device}, which takes one "
                "step at a time; leave async_scheduling out or set it to false"
            )
        return self.async_scheduling

    def _async_obstacle(self) -> str | None:
        if self.runner_type == "pooling":
            return "runner_type 'pooling', whose steps bring no tokens; set runner_type to 'generate'"
        if self.speculative is not None:
            return (
                f"speculative.method {self.speculative.method!r}, whose drafts need the tokens of the step before; "
                "leave speculative out"
            )
        return None

    def compile_factors(self) -> dict[str, int | str | bool | None]:
        """What shapes a compiled graph: sizes of its inputs, and which parts it has. Nothing that only decides."""
        return {
            "runner_type": self.runner_type,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_num_seqs": self.max_num_seqs,
            "num_speculative_tokens": self.num_speculative_tokens,
            "is_multimodal_model": self.is_multimodal_model,
            "encoder_budget": self.encoder_budget,
            "disable_hybrid_kv_cache_manager": self.disable_hybrid_kv_cache_manager,
        }

    def compile_hash(self) -> str:
        """Key of a cache of compiled graphs: SHA-256 of `compile_factors`, in hexadecimal."""
        return hashlib.sha256(json.dumps(self.compile_factors(), sort_keys=True).encode()).hexdigest()


class CacheConfig(_Section):
    """One rank's KV cache."""

    block_size: int = Field(default=16, ge=1, le=256, description="Token positions per KV block.")
    num_blocks: int | None = Field(
        default=None, ge=2, description="Blocks in the pool, the null block included. None: from memory_gib."
    )
    memory_gib: float | None = Field(
        default=None, gt=0, description="Memory of the pool per rank. None: a share of what is free."
    )
    enable_prefix_caching: bool = Field(default=True, description="Reuse KV of equal prompt prefixes.")
