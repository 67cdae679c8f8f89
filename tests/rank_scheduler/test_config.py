import logging
import pickle
from typing import Any

import pytest
from pydantic import ValidationError

from rank_scheduler.config import CacheConfig, SchedulerConfig, SpeculativeConfig
from rank_scheduler.interface import SchedulerInterface, SchedulerSetup
from rank_scheduler.scheduler import Scheduler

DEFAULTS: dict[str, object] = {
    "runner_type": "generate",
    "max_num_batched_tokens": 2048,
    "max_num_scheduled_tokens": None,
    "max_num_seqs": 128,
    "max_num_active_seqs": None,
    "max_num_inflight_kv_loads": None,
    "max_async_kv_loads_per_step": None,
    "long_prefill_token_threshold": 0,
    "long_prefill_token_threshold_adaptive": False,
    "short_prefill_tokens": 0,
    "max_num_queued_reqs": None,
    "max_num_queued_tokens": None,
    "queued_tokens_accounting": "exact",
    "enable_chunked_prefill": True,
    "is_multimodal_model": False,
    "max_num_encoder_input_tokens": None,
    "encoder_cache_size": None,
    "policy": "fcfs",
    "disable_chunked_mm_input": False,
    "scheduler_cls": None,
    "disable_hybrid_kv_cache_manager": None,
    "scheduler_reserve_full_isl": True,
    "watermark": 0.0,
    "prefill_schedule_interval": 1,
    "cache_aware_admission_window": 0,
    "cache_aware_admission_threshold": 0.5,
    "async_scheduling": None,
    "stream_interval": 1,
    "max_head_bypasses": 8,
    "preemption_policy": "least_lost",
    "max_kv_load_retries": 1,
    "speculative": None,
}

# Another value of each field, and whether graphs compiled for one are of no use for the other. A new field must be
# decided here: True only if it changes a shape or a part of the compiled graph.
CHANGED: dict[str, tuple[Any, bool]] = {
    "runner_type": ("pooling", True),
    "max_num_batched_tokens": (1024, True),
    "max_num_scheduled_tokens": (1000, False),
    "max_num_seqs": (100, True),
    "max_num_active_seqs": (60, False),
    "max_num_inflight_kv_loads": (4, False),
    "max_async_kv_loads_per_step": (2, False),
    "long_prefill_token_threshold": (256, False),
    "long_prefill_token_threshold_adaptive": (True, False),
    "short_prefill_tokens": (128, False),
    "max_num_queued_reqs": (7, False),
    "max_num_queued_tokens": (7000, False),
    "queued_tokens_accounting": ("conservative", False),
    "enable_chunked_prefill": (False, False),
    "is_multimodal_model": (True, True),
    "max_num_encoder_input_tokens": (300, True),
    "encoder_cache_size": (400, False),
    "policy": ("priority", False),
    "disable_chunked_mm_input": (True, False),
    "scheduler_cls": ("rank_scheduler.scheduler.Scheduler", False),
    "disable_hybrid_kv_cache_manager": (True, True),
    "scheduler_reserve_full_isl": (False, False),
    "watermark": (0.25, False),
    "prefill_schedule_interval": (4, False),
    "cache_aware_admission_window": (16, False),
    "cache_aware_admission_threshold": (0.75, False),
    "async_scheduling": (True, False),
    "stream_interval": (3, False),
    "max_head_bypasses": (2, False),
    "preemption_policy": ("last", False),
    "max_kv_load_retries": (3, False),
    "speculative": ({"num_speculative_tokens": 3}, True),
}


def test_every_field_has_the_default_that_is_written_down() -> None:
    assert SchedulerConfig().model_dump() == DEFAULTS


def test_speculation_defaults() -> None:
    config = SpeculativeConfig(num_speculative_tokens=4)
    assert config.model_dump() == {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_max": 5,
        "prompt_lookup_min": 2,
    }


# Refusals by one field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("runner_type", "train"),
        ("max_num_batched_tokens", 0),
        ("max_num_scheduled_tokens", 0),
        ("max_num_seqs", 0),
        ("max_num_active_seqs", 0),
        ("max_num_inflight_kv_loads", 0),
        ("max_async_kv_loads_per_step", 0),
        ("long_prefill_token_threshold", -1),
        ("long_prefill_token_threshold_adaptive", "perhaps"),
        ("short_prefill_tokens", -1),
        ("max_num_queued_reqs", -1),
        ("max_num_queued_tokens", -1),
        ("enable_chunked_prefill", None),
        ("is_multimodal_model", None),
        ("max_num_encoder_input_tokens", 0),
        ("encoder_cache_size", 0),
        ("policy", "sjf"),
        ("disable_chunked_mm_input", None),
        ("scheduler_cls", "NoPath"),
        ("scheduler_cls", "not a.path"),
        ("scheduler_cls", "package..Name"),
        ("scheduler_cls", 3),
        ("disable_hybrid_kv_cache_manager", "auto"),
        ("scheduler_reserve_full_isl", None),
        ("watermark", -0.1),
        ("watermark", 1.0),
        ("watermark", float("nan")),
        ("prefill_schedule_interval", 0),
        ("cache_aware_admission_window", -1),
        ("cache_aware_admission_threshold", -0.1),
        ("cache_aware_admission_threshold", 1.1),
        ("async_scheduling", "auto"),
        ("stream_interval", 0),
        ("max_head_bypasses", -1),
        ("preemption_policy", "first"),
        ("max_kv_load_retries", -1),
        ("speculative", "ngram"),
        ("max_num_sequences", 4),
        ("max_num_seqs", True),
        ("watermark", False),
    ],
)
def test_a_wrong_value_is_refused_by_its_name(field: str, value: object) -> None:
    with pytest.raises(ValidationError) as refused:
        SchedulerConfig(**{field: value})
    [finding] = refused.value.errors()
    assert finding["loc"] == (field,)
    assert finding["input"] is value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("watermark", 0.0),
        ("watermark", 0.999),
        ("max_num_queued_reqs", 0),
        ("max_num_queued_tokens", 0),
        ("cache_aware_admission_threshold", 0),
        ("cache_aware_admission_threshold", 1),
        ("max_head_bypasses", 0),
        ("max_kv_load_retries", 0),
        ("max_num_active_seqs", 128),
        ("max_num_batched_tokens", 128),
    ],
)
def test_the_limits_themselves_are_allowed(field: str, value: float) -> None:
    assert getattr(SchedulerConfig(**{field: value}), field) == value


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"num_speculative_tokens": 0}, ["num_speculative_tokens", "greater than or equal to 1"]),
        ({}, ["num_speculative_tokens", "required"]),
        ({"num_speculative_tokens": 1, "method": "eagle"}, ["method", "'ngram'"]),
        ({"num_speculative_tokens": 1, "prompt_lookup_max": 0}, ["prompt_lookup_max"]),
        ({"num_speculative_tokens": 1, "prompt_lookup_min": 0}, ["prompt_lookup_min"]),
        (
            {"num_speculative_tokens": 1, "prompt_lookup_min": 4, "prompt_lookup_max": 3},
            ["prompt_lookup_min (4)", "prompt_lookup_max (3)", "nothing would be looked up", "lower prompt_lookup_min"],
        ),
        ({"num_speculative_tokens": 1, "model": "x"}, ["model", "not permitted"]),
    ],
)
def test_speculation_refuses(fields: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ValidationError) as refused:
        SchedulerConfig.model_validate({"speculative": fields})
    for part in ["speculative", *parts]:
        assert part in str(refused.value)


# Refusals by several fields


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        (
            {"max_num_batched_tokens": 4, "max_num_seqs": 8},
            ["max_num_batched_tokens (4)", "max_num_seqs (8)", "every running sequence", "raise max_num_batched"],
        ),
        (
            {"max_num_active_seqs": 9, "max_num_seqs": 8},
            ["max_num_active_seqs (9)", "max_num_seqs (8)", "no slots", "lower max_num_active_seqs"],
        ),
        (
            {"speculative": {"num_speculative_tokens": 16}, "max_num_batched_tokens": 16, "max_num_seqs": 4},
            ["speculative.num_speculative_tokens (16)", "step (16)", "would not fit", "raise max_num_batched_tokens"],
        ),
        (
            {"speculative": {"num_speculative_tokens": 16}, "max_num_scheduled_tokens": 12},
            ["speculative.num_speculative_tokens (16)", "step (12)", "max_num_scheduled_tokens"],
        ),
        (
            {"short_prefill_tokens": 99},
            ["short_prefill_tokens (99)", "long_prefill_token_threshold 0", "set the threshold"],
        ),
        (
            {"async_scheduling": True, "runner_type": "pooling"},
            ["async_scheduling (True)", "'pooling'", "bring no tokens", "set runner_type to 'generate'"],
        ),
        (
            {"async_scheduling": True, "speculative": {"num_speculative_tokens": 1}},
            ["async_scheduling (True)", "'ngram'", "drafts need the tokens", "leave speculative out"],
        ),
    ],
)
def test_fields_that_do_not_fit_together_are_refused(fields: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ValidationError) as refused:
        SchedulerConfig(**fields)
    for part in parts:
        assert part in str(refused.value)


@pytest.mark.parametrize(
    ("fields", "model", "parts"),
    [
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 1023},
            {},
            ["max_num_batched_tokens (1023)", "max_model_len (1024)", "never fit", "enable_chunked_prefill on"],
        ),
        (
            {"enable_chunked_prefill": False, "max_num_scheduled_tokens": 1000},
            {},
            ["max_num_scheduled_tokens (1000)", "max_model_len (1024)", "raise max_num_scheduled_tokens"],
        ),
        (
            {"long_prefill_token_threshold": 1025},
            {},
            ["long_prefill_token_threshold (1025)", "max_model_len (1024)", "no prompt reaches it", "lower it"],
        ),
        (
            {},
            {"is_encoder_decoder": True},
            ["enable_chunked_prefill (True)", "encoder-decoder", "set enable_chunked_prefill to false"],
        ),
        (
            {"disable_chunked_mm_input": True, "max_num_batched_tokens": 576},
            {"max_mm_item_tokens": 577},
            ["max_num_batched_tokens (576)", "577 tokens", "never fit", "switch disable_chunked_mm_input off"],
        ),
        (
            {"disable_chunked_mm_input": True, "max_num_scheduled_tokens": 576},
            {"max_mm_item_tokens": 577},
            ["max_num_scheduled_tokens (576)", "577 tokens", "raise max_num_scheduled_tokens"],
        ),
        (
            {"disable_chunked_mm_input": True, "long_prefill_token_threshold": 576},
            {"max_mm_item_tokens": 577},
            ["long_prefill_token_threshold (576)", "577 tokens", "raise the threshold"],
        ),
        (
            {"is_multimodal_model": True, "max_num_encoder_input_tokens": 576},
            {"max_mm_item_tokens": 577},
            ["max_num_encoder_input_tokens (576)", "never be encoded", "to 577 or more"],
        ),
        (
            {"is_multimodal_model": True, "encoder_cache_size": 576},
            {"max_mm_item_tokens": 577},
            ["encoder_cache_size (576)", "never be encoded", "to 577 or more"],
        ),
    ],
)
def test_what_does_not_fit_the_model_is_refused(
    fields: dict[str, Any], model: dict[str, Any], parts: list[str]
) -> None:
    config = SchedulerConfig(**fields)
    with pytest.raises(ValueError) as refused:  # noqa: PT011  (the parts are the match)
        config.check(1024, **model)
    for part in parts:
        assert part in str(refused.value)


@pytest.mark.parametrize(
    ("fields", "model"),
    [
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 1024}, {}),
        ({"long_prefill_token_threshold": 1024}, {}),
        ({"max_num_batched_tokens": 128}, {}),
        ({"disable_chunked_mm_input": True, "long_prefill_token_threshold": 577}, {"max_mm_item_tokens": 577}),
        (
            {"is_multimodal_model": True, "max_num_encoder_input_tokens": 577, "encoder_cache_size": 577},
            {"max_mm_item_tokens": 577},
        ),
        ({"enable_chunked_prefill": False}, {"is_encoder_decoder": True}),
    ],
)
def test_what_just_fits_the_model_is_not(fields: dict[str, Any], model: dict[str, Any]) -> None:
    SchedulerConfig(**fields).check(1024, **model)


# Building for a model


def test_the_factory_builds_and_checks() -> None:
    assert SchedulerConfig.default_factory(4096, max_num_seqs=3) == SchedulerConfig(max_num_seqs=3)
    with pytest.raises(ValueError, match="max_model_len"):
        SchedulerConfig.default_factory(4096, enable_chunked_prefill=False)


def test_an_encoder_decoder_computes_its_prompt_in_one_step() -> None:
    config = SchedulerConfig.default_factory(1024, is_encoder_decoder=True, enable_chunked_prefill=True)
    assert not config.enable_chunked_prefill
    assert config.disable_chunked_mm_input
    assert (config.encoder_budget, config.encoder_cache_capacity) == (2048, 2048)


def test_encoder_limits_left_out_hold_the_largest_item() -> None:
    config = SchedulerConfig.default_factory(8192, max_mm_item_tokens=3000, is_multimodal_model=True)
    assert (config.encoder_budget, config.encoder_cache_capacity) == (3000, 3000)
    with pytest.raises(ValueError, match=r"encoder_cache_size \(2500\)"):
        SchedulerConfig.default_factory(
            8192, max_mm_item_tokens=3000, is_multimodal_model=True, encoder_cache_size=2500
        )


# Effective values


def test_limits_left_out_follow_others() -> None:
    config = SchedulerConfig(max_num_batched_tokens=600, max_num_seqs=40, is_multimodal_model=True)
    assert config.num_scheduled_tokens_limit == 600
    assert config.active_seqs_limit == 40
    assert (config.encoder_budget, config.encoder_cache_capacity) == (600, 600)
    assert config.num_speculative_tokens == 0


def test_limits_given_are_taken() -> None:
    config = SchedulerConfig(
        max_num_scheduled_tokens=500,
        max_num_active_seqs=30,
        is_multimodal_model=True,
        max_num_encoder_input_tokens=70,
        encoder_cache_size=90,
        speculative=SpeculativeConfig(num_speculative_tokens=3),
    )
    assert config.num_scheduled_tokens_limit == 500
    assert config.active_seqs_limit == 30
    assert (config.encoder_budget, config.encoder_cache_capacity) == (70, 90)
    assert config.num_speculative_tokens == 3


def test_a_step_never_hands_out_more_than_it_can_compute() -> None:
    assert SchedulerConfig(max_num_scheduled_tokens=9999).num_scheduled_tokens_limit == 2048


def test_without_an_encoder_nothing_is_encoded() -> None:
    config = SchedulerConfig(max_num_encoder_input_tokens=70, encoder_cache_size=90)
    assert (config.encoder_budget, config.encoder_cache_capacity) == (0, 0)


# Warnings


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"max_num_batched_tokens": 513, "max_num_seqs": 4}, "max_num_batched_tokens (513)"),
        ({"speculative": {"num_speculative_tokens": 1}}, "2048 tokens, and drafts"),
        ({"cache_aware_admission_window": 4, "policy": "priority"}, "cache_aware_admission_window (4)"),
    ],
)
def test_what_is_legal_but_hardly_meant_is_warned_of(
    fields: dict[str, Any], part: str, caplog: pytest.LogCaptureFixture
) -> None:
    SchedulerConfig(**fields).check(128)
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert part in record.getMessage()


def test_a_plain_configuration_warns_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    SchedulerConfig(max_num_batched_tokens=512, max_num_seqs=4, cache_aware_admission_window=4).check(128)
    SchedulerConfig(max_num_batched_tokens=8192, speculative=SpeculativeConfig(num_speculative_tokens=1)).check(128)
    assert not caplog.records


# The scheduler's class


class Derived(Scheduler):
    pass


class Unfinished:
    def add(self) -> None: ...


class OnlyDeclared(SchedulerInterface):
    pass


def not_a_class() -> None: ...


def test_the_built_in_scheduler_is_the_default() -> None:
    built_in: type = Scheduler
    assert SchedulerConfig().get_scheduler_cls() is built_in


def test_a_scheduler_is_found_by_its_path_or_given_as_a_class(monkeypatch: pytest.MonkeyPatch) -> None:
    # What the built-in scheduler has of the interface is tested where it is tested.
    complete = {name: None for name in vars(SchedulerInterface) if not name.startswith("_")}
    custom = type("Custom", (), complete)
    monkeypatch.setattr(f"{__name__}.Custom", custom, raising=False)
    assert SchedulerConfig(scheduler_cls=f"{__name__}.Custom").get_scheduler_cls() is custom
    assert SchedulerConfig(scheduler_cls=custom).get_scheduler_cls() is custom


@pytest.mark.parametrize(
    ("scheduler_cls", "parts"),
    [
        ("nowhere.at.all.Scheduler", ["'nowhere.at.all.Scheduler'", "'nowhere.at.all'", "cannot be imported"]),
        ("rank_scheduler.scheduler.Missing", ["'rank_scheduler.scheduler'", "has no 'Missing'", "correct it"]),
        (f"{__name__}.not_a_class", ["not_a_class", "is no class"]),
        (f"{__name__}.Unfinished", ["Unfinished", "lacks extend, abort", "schedule", "implement them"]),
        (Unfinished, [f"{__name__}.Unfinished", "lacks extend, abort"]),
        (OnlyDeclared, ["OnlyDeclared", "lacks add, extend"]),
    ],
)
def test_what_is_no_scheduler_is_refused(scheduler_cls: type | str, parts: list[str]) -> None:
    config = SchedulerConfig(scheduler_cls=scheduler_cls)
    with pytest.raises(ValueError, match="scheduler_cls") as refused:
        config.get_scheduler_cls()
    for part in parts:
        assert part in str(refused.value)


def test_a_scheduler_must_set_what_the_interface_declares() -> None:
    setup = SchedulerSetup(max_model_len=64, vocab_size=50, eos_token_ids=frozenset(), num_blocks=17, block_size=4)
    config = SchedulerConfig(scheduler_cls=Derived)
    scheduler = config.make_scheduler(setup)
    assert type(scheduler) is Derived
    assert (scheduler.config, scheduler.setup, scheduler.num_ignored_messages) == (config, setup, 0)

    def init(self: Any, config: SchedulerConfig, setup: SchedulerSetup) -> None: ...

    counts_nothing = type("CountsNothing", (Scheduler,), {"__init__": init})
    with pytest.raises(ValueError, match=r"CountsNothing' does not set num_ignored_messages of .*; set it in __init__"):
        SchedulerConfig(scheduler_cls=counts_nothing).make_scheduler(setup)


def test_a_class_is_written_down_as_its_path() -> None:
    config = SchedulerConfig(scheduler_cls=Derived)
    assert config.model_dump(mode="json")["scheduler_cls"] == f"{__name__}.Derived"
    assert config.model_dump()["scheduler_cls"] is Derived
    assert SchedulerConfig.model_json_schema()["properties"]["scheduler_cls"]["anyOf"][0] == {"type": "string"}


# Async scheduling


@pytest.mark.parametrize(
    ("fields", "supported", "device", "expected"),
    [
        ({}, True, "cuda", True),
        ({}, True, "cpu", False),
        ({}, False, "cuda", False),
        ({"runner_type": "pooling"}, True, "cuda", False),
        ({"runner_type": "draft"}, True, "cuda", False),
        ({"speculative": {"num_speculative_tokens": 1}}, True, "cuda", False),
        ({"async_scheduling": True}, True, "cpu", True),
        ({"async_scheduling": True}, True, "cuda", True),
        ({"async_scheduling": False}, True, "cuda", False),
        ({"async_scheduling": False}, False, "cpu", False),
    ],
)
def test_async_scheduling_is_resolved(fields: dict[str, Any], supported: bool, device: str, expected: bool) -> None:
    assert SchedulerConfig(**fields).resolve_async_scheduling(supported, device) is expected


def test_async_scheduling_that_the_rank_cannot_do_is_refused() -> None:
    with pytest.raises(ValueError, match=r"async_scheduling \(True\) .* on cpu.* set it to false"):
        SchedulerConfig(async_scheduling=True).resolve_async_scheduling(False, "cpu")


# Compiled graphs


def needed_with(field: str) -> dict[str, Any]:
    """The encoder's limits shape something only where there is an encoder; who is first needs a notion of long."""
    if field == "short_prefill_tokens":
        return {"long_prefill_token_threshold": 256}
    return {"is_multimodal_model": True} if "encoder" in field else {}


def test_every_field_is_decided() -> None:
    assert set(CHANGED) == set(SchedulerConfig.model_fields) == set(DEFAULTS)


@pytest.mark.parametrize("field", SchedulerConfig.model_fields)
def test_only_what_shapes_a_graph_changes_its_hash(field: str) -> None:
    value, changes = CHANGED[field]
    base = needed_with(field)
    before, after = SchedulerConfig(**base), SchedulerConfig(**(base | {field: value}))
    assert before != after
    assert (before.compile_hash() != after.compile_hash()) is changes


def test_the_hash_is_of_what_is_in_effect() -> None:
    written_out = SchedulerConfig(
        max_num_seqs=128, is_multimodal_model=True, max_num_encoder_input_tokens=2048, max_num_scheduled_tokens=2048
    )
    assert written_out.compile_hash() == SchedulerConfig(is_multimodal_model=True).compile_hash()
    longer_lookup = SpeculativeConfig(num_speculative_tokens=3, prompt_lookup_max=9)
    shorter_lookup = SpeculativeConfig(num_speculative_tokens=3)
    assert (
        SchedulerConfig(speculative=longer_lookup).compile_hash()
        == SchedulerConfig(speculative=shorter_lookup).compile_hash()
    )


# As a value


def test_a_configuration_is_frozen() -> None:
    config = SchedulerConfig()
    with pytest.raises(ValidationError):
        config.max_num_seqs = 1  # type: ignore[misc]


@pytest.mark.parametrize("field", SchedulerConfig.model_fields)
def test_a_configuration_survives_the_way_to_another_process(field: str) -> None:
    config = SchedulerConfig(**(needed_with(field) | {field: CHANGED[field][0]}))
    assert pickle.loads(pickle.dumps(config)) == config
    assert SchedulerConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("field", "value"),
    [("block_size", 0), ("block_size", 257), ("num_blocks", 1), ("memory_gib", 0), ("block_size", True), ("blocks", 3)],
)
def test_the_cache_refuses(field: str, value: object) -> None:
    with pytest.raises(ValidationError) as refused:
        CacheConfig.model_validate({field: value})
    assert refused.value.errors()[0]["loc"] == (field,)
