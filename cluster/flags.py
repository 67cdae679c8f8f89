"""The flags of `serried serve`: one for every key of the configuration, made from its declaration."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from typer.core import TyperCommand

from cluster.config import CPU_SCHEDULER_DEFAULTS, ModelConfig, PoolConfig, RayConfig, RouterConfig
from kv_transfer.config import KVTransferConfig
from rank_scheduler.config import CacheConfig, SchedulerConfig, SpeculativeConfig

_SECTIONS: tuple[tuple[str, type[BaseModel], str], ...] = (
    ("model", ModelConfig, "Model"),
    ("pools.*", PoolConfig, "Ranks, of the only pool"),
    ("router", RouterConfig, "HTTP"),
    ("cache", CacheConfig, "KV cache"),
    ("scheduler", SchedulerConfig, "Scheduler: steps"),
    ("scheduler.speculative", SpeculativeConfig, "Speculative decoding"),
    ("kv_transfer", KVTransferConfig, "KV transfer"),
    ("ray", RayConfig, "Ray"),
)
_SCHEDULER_PANELS: dict[str, tuple[str, ...]] = {
    "Scheduler: order and admission": (
        "policy",
        "preemption_policy",
        "max_head_bypasses",
        "scheduler_reserve_full_isl",
        "watermark",
        "cache_aware_admission_window",
        "cache_aware_admission_threshold",
    ),
    "Cluster's queue": ("max_num_queued_reqs", "max_num_queued_tokens", "queued_tokens_accounting"),
    "KV loads": (
        "max_num_inflight_kv_loads",
        "max_async_kv_loads_per_step",
        "max_kv_load_retries",
    ),
    "Multimodal input": (
        "is_multimodal_model",
        "max_num_encoder_input_tokens",
        "encoder_cache_size",
        "disable_chunked_mm_input",
    ),
}
_PANEL_OF = {field: panel for panel, fields in _SCHEDULER_PANELS.items() for field in fields}


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag and the key that it overrides."""

    name: str
    """As a Python name; `--` and dashes on the command line."""
    path: str
    """Of the key, for `cluster.config.load_config`."""
    panel: str
    field: FieldInfo

    def parameter(self) -> inspect.Parameter:
        """The command's parameter; None means that the flag was not given."""
        declared = _value_type(self.field.annotation)
        name = self.name.replace("_", "-")
        option = typer.Option(
            f"--{name}/--no-{name}" if declared is bool else f"--{name}",
            help=self._help(),
            rich_help_panel=self.panel,
            show_default=False,
            parser=_JsonObject.parse if declared is _JsonObject else None,
            metavar="JSON" if declared is _JsonObject else None,
        )
        annotation = Annotated[declared | None, option]  # type: ignore[valid-type]
        return inspect.Parameter(self.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)

    def _help(self) -> str:
        text = (self.field.description or "").replace("None:", "Left out:")
        if self.field.is_required() or self.field.default is None:
            return text
        value = self.field.default
        default = {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
        section, _, key = self.path.rpartition(".")
        if section == "scheduler" and key in CPU_SCHEDULER_DEFAULTS:
            default += f", or {CPU_SCHEDULER_DEFAULTS[key]} where every pool is on the CPU"
        return f"{text} Default: {default}."


def _value_type(annotation: object) -> Any:
    """What the command line parses; what a choice is made of stays as it is."""
    members = get_args(annotation) if get_origin(annotation) is not Literal else ()
    for member in members if get_origin(annotation) is not dict else ():
        if _is_simple(member):
            return member
    if _is_simple(annotation):
        return annotation
    if get_origin(annotation) is dict:
        return _JsonObject
    raise TypeError(f"no flag can be made for {annotation!r}; give it a type that a command line can express")


class _JsonObject(dict[str, Any]):
    """A section whose keys are not known beforehand, as JSON text."""

    @classmethod
    def parse(cls, text: str | _JsonObject) -> _JsonObject:
        if isinstance(text, _JsonObject):
            return text
        try:
            value = json.loads(text)
        except ValueError as error:
            raise typer.BadParameter(f"{text!r} is not JSON ({error}); give an object, such as {{}}") from None
        if not isinstance(value, dict):
            raise typer.BadParameter(f"{text!r} is no JSON object; give one, such as {{}}")
        return cls(value)


def _is_simple(kind: object) -> bool:
    is_choice = isinstance(kind, type) and issubclass(kind, StrEnum)
    return is_choice or kind in (bool, int, float, str, Path) or get_origin(kind) is Literal


def _flag_name(section: str, key: str) -> str:
    if section == "scheduler.speculative":
        return "speculative_" + key.replace("speculative_", "")
    # These keys say nothing without their section.
    return f"{section}_{key}" if (section, key) in {("model", "name"), ("ray", "address")} else key


def _flags() -> Iterator[Flag]:
    for section, declared, panel in _SECTIONS:
        for key, field in declared.model_fields.items():
            if (section, key) in {("model", "path"), ("scheduler", "speculative"), ("pools.*", "role")}:
                continue  # The command's argument; a section of its own; no role but mixed makes sense for all ranks.
            at = _PANEL_OF.get(key, panel) if section == "scheduler" else panel
            yield Flag(_flag_name(section, key), f"{section}.{key}", at, field)


FLAGS = tuple(_flags())


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Add every flag to `command`, which is called with those given as `flags`: the key's path to its value."""
    own = [
        parameter for name, parameter in inspect.signature(command, eval_str=True).parameters.items() if name != "flags"
    ]

    @functools.wraps(command)
    def run(**arguments: Any) -> None:
        given: Mapping[str, object] = {
            flag.path: value for flag in FLAGS if (value := arguments.pop(flag.name)) is not None
        }
        command(**arguments, flags=given)

    run.__signature__ = inspect.Signature([*own, *(flag.parameter() for flag in FLAGS)])  # type: ignore[attr-defined]
    return run


class FlagsCommand(TyperCommand):
    """Help as plain text under the panels' names: in a terminal of 80 columns, rich's tables would cut the flags."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        panels: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if (record := param.get_help_record(ctx)) is not None:
                panel = getattr(param, "rich_help_panel", None) or f"{param.param_type_name.capitalize()}s"
                panels.setdefault(panel, []).append(record)
        for panel, records in panels.items():
            with formatter.section(panel):
                formatter.write_dl(records)
