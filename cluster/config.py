"""One frozen configuration for the whole cluster: YAML file, then command-line overrides, then checked at once.

Every refusal says where (the path of keys), what was given and what to do; unknown keys are refused with the nearest
known name. Nothing is written back: what is discovered at run time lives elsewhere.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from kv_transfer.config import KVTransferConfig
from rank_scheduler.config import CacheConfig, SchedulerConfig
from router.control_messages import PoolRole
from router.placement_policies import load_policy

logger = logging.getLogger(__name__)

CPU_SCHEDULER_DEFAULTS = {"max_num_batched_tokens": 512, "max_num_seqs": 64}
"""Instead of SchedulerConfig's own, where every pool is on the CPU: 2,048 tokens are many seconds on a small one."""


class ConfigError(ValueError):
    """The configuration was refused; the message lists every finding, one a line."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelConfig(_Section):
    """What is served."""

    path: Path | None = Field(
        default=None, description="Hugging Face style model directory. None: the embedded SmolLM2-135M-Instruct."
    )
    name: str | None = Field(
        default=None, min_length=1, description="Name in the API. None: the name of the model directory."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="Weights and KV. auto: bfloat16 where the device computes in it, else float32."
    )
    max_model_len: int | None = Field(
        default=None, ge=1, description="Prompt and output tokens of one sequence. None: what the model allows."
    )


class PoolConfig(_Section):
    """Ranks that are alike; each pool is one Serve deployment."""

    num_ranks: int = Field(default=2, ge=1, description="Model replicas, one rank actor each.")
    threads_per_rank: int | None = Field(
        default=None, ge=1, description="CPU threads of one rank. None: the node's cores divided by its ranks."
    )
    device: Literal["cpu", "cuda"] = Field(default="cpu", description="Where a rank computes; cuda takes one GPU each.")
    role: PoolRole = Field(
        default=PoolRole.MIXED,
        description="mixed, or prefill (computes prompts up to the first token) and decode (goes on from there).",
    )
    drain_deadline_s: float = Field(
        default=30.0,
        ge=0,
        description="A rank that leaves may go on for so long with what it has; then others take what still runs.",
    )
    drain_limit_s: float = Field(
        default=300.0,
        gt=0,
        description="So long after it began to leave, a rank ends with whatever nobody else could take.",
    )

    @model_validator(mode="after")
    def _check_drain(self) -> Self:
        if self.drain_limit_s < self.drain_deadline_s:
            raise ValueError(
                f"drain_limit_s is {self.drain_limit_s:g} and drain_deadline_s {self.drain_deadline_s:g}: a rank would "
                "end before others take what it has; raise drain_limit_s, or lower drain_deadline_s"
            )
        return self


class TenantConfig(_Section):
    """One who shares the queue with others: whom an API key says, or a request's `user`."""

    weight: float = Field(default=1.0, gt=0, description="Its share of the queue, against others' weights.")


class ApiKeyConfig(_Section):
    """A key that clients send as `Authorization: Bearer KEY`."""

    sha256: str = Field(pattern="^[0-9a-f]{64}$", description="SHA-256 of the key, in hexadecimal (sha256sum).")
    tenant: str = Field(default="", description="Whose requests these are.")


class RouterConfig(_Section):
    """The HTTP side."""

    host: str = Field(default="127.0.0.1", min_length=1, description="Address to listen on; 0.0.0.0: all interfaces.")
    port: int = Field(default=8000, ge=1, le=65535, description="HTTP port.")
    num_routers: int = Field(default=1, ge=1, description="Replicas of the router.")
    ha_proxy: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="HAProxy in front of the routers; auto: if it does not work, Serve's own, slower proxy instead.",
    )
    http_server: Literal["serve", "own"] = Field(
        default="serve",
        description="serve: Ray Serve's proxies, or HAProxy, in front of the routers; own: each router listens itself, "
        "those of a node on one port.",
    )
    tls_cert_file: str | None = Field(
        default=None, description="PEM file, on each router's node, with the certificate and those that it needs."
    )
    tls_key_file: str | None = Field(default=None, description="PEM file with the certificate's private key.")
    max_body_bytes: int = Field(default=4 << 20, ge=1024, description="Largest request body; larger ones get 413.")
    rank_silence_timeout_s: float = Field(
        default=10.0, ge=2.0, description="A rank that says nothing for this long is lost (it speaks once a second)."
    )

    remote_prefill_min_tokens: int = Field(
        default=128,
        ge=1,
        description="With prefill ranks: prompts of which a decode rank lacks less are computed there: it is quicker.",
    )
    pd_fallback: bool = Field(
        default=True, description="Where all prefill or all decode ranks are gone, the others take their part."
    )
    max_failovers: int = Field(
        default=2,
        ge=0,
        description="So often a request that loses its rank goes on at another, with the same text; then it fails.",
    )

    placement: str = Field(
        default="prefix",
        min_length=1,
        description="prefix, least_loaded, round_robin, or module:Class of a policy of one's own.",
    )
    tenants: dict[str, TenantConfig] = Field(
        default={}, description="Tenants whose weight is not 1; others need not be named."
    )
    default_deadline_s: float | None = Field(
        default=None, gt=0, description="For requests without x-request-deadline-ms. None: they may take any time."
    )
    access_log: str | None = Field(
        default=None, description="File for a line of JSON per request, on each router's node. None: no such lines."
    )
    idempotency_ttl_s: float = Field(
        default=600.0, gt=0, description="So long the answer to a request with an Idempotency-Key is given again."
    )
    api_keys: dict[str, ApiKeyConfig] = Field(
        default={}, description="Keys, by a name for the log, of which clients must send one. Empty: none is asked for."
    )

    @field_validator("placement")
    @classmethod
    def _check_placement(cls, placement: str) -> str:
        load_policy(placement)
        return placement

    @field_validator("access_log", "tls_cert_file", "tls_key_file")
    @classmethod
    def _make_absolute(cls, path: str | None) -> str | None:
        """Routers have working directories of their own."""
        return None if path is None else str(Path(path).expanduser().absolute())

    @model_validator(mode="after")
    def _check_server(self) -> Self:
        tls = {"tls_cert_file": self.tls_cert_file, "tls_key_file": self.tls_key_file}
        given = [name for name, path in tls.items() if path is not None]
        if given and self.http_server == "serve":
            raise ValueError(
                f"{given[0]} is set, and http_server is 'serve', whose proxies have no TLS here; set http_server to "
                "own, or end TLS at a load balancer in front and leave it out"
            )
        if len(given) == 1:
            [lacking] = tls.keys() - set(given)
            raise ValueError(f"{given[0]} is set, and {lacking} is not; give both, or neither")
        if self.http_server == "own" and self.ha_proxy == "on":
            raise ValueError("ha_proxy is 'on', and http_server is 'own', which needs none; leave one of them out")
        return self

    @field_validator("ha_proxy", mode="before")
    @classmethod
    def _accept_yaml_switch(cls, value: object) -> object:
        # In YAML a bare `on` or `off` is a boolean.
        return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


class RayConfig(_Section):
    """The Ray cluster that everything runs on."""

    address: str | None = Field(
        default=None,
        description="auto or HOST:PORT: a running Ray cluster, of which this machine is a node. local: a Ray of our "
        "own, on this machine. None: what the variable RAY_ADDRESS says, else local.",
    )

    @field_validator("address")
    @classmethod
    def _check_address(cls, address: str | None) -> str | None:
        if address is None or address in ("local", "auto"):
            return address
        if "://" in address:
            raise ValueError(
                f"{address!r} is Ray's client protocol or another URL, through which serried cannot run; run it on a "
                "node of the cluster, with auto or HOST:PORT of its GCS (ray start prints it)"
            )
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f"{address!r} is not HOST:PORT; give the address that ray start printed, auto, or local")
        return address

    @property
    def is_own(self) -> bool:
        """Ray is started, and stopped, with serried."""
        return self.address in (None, "local")


class ClusterConfig(_Section):
    """Everything `serried serve` needs to know."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = Field(
        default=SchedulerConfig(),
        description="Scheduler of every rank. Where every pool is on the CPU, max_num_batched_tokens is "
        f"{CPU_SCHEDULER_DEFAULTS['max_num_batched_tokens']} and max_num_seqs is "
        f"{CPU_SCHEDULER_DEFAULTS['max_num_seqs']} unless given.",
    )
    pools: dict[str, PoolConfig] = Field(default={"mixed": PoolConfig()}, min_length=1)
    router: RouterConfig = RouterConfig()
    kv_transfer: KVTransferConfig = KVTransferConfig()
    ray: RayConfig = RayConfig()

    @model_validator(mode="before")
    @classmethod
    def _take_smaller_steps_on_the_cpu(cls, values: object) -> object:
        if not isinstance(values, dict):
            return values
        pools, scheduler = values.get("pools", {}), values.get("scheduler", {})
        # What is no section here is left for the check to report.
        if isinstance(pools, dict) and isinstance(scheduler, dict) and all(map(_is_on_cpu, pools.values())):
            return values | {"scheduler": CPU_SCHEDULER_DEFAULTS | scheduler}
        return values

    @field_validator("pools")
    @classmethod
    def _check_pool_names(cls, pools: dict[str, PoolConfig]) -> dict[str, PoolConfig]:
        for name in pools:
            if not name or not name.replace("-", "").isalnum() or not name.isascii():
                raise ValueError(f"pool name {name!r} is not made of letters, digits and '-'; rename the pool")
        return pools

    @model_validator(mode="after")
    def _check_scheduler(self) -> Self:
        """What the model itself allows is checked where it is loaded."""
        if self.model.max_model_len is not None:
            self.scheduler.check(self.model.max_model_len)
        if self.scheduler.cache_aware_admission_window and not self.cache.enable_prefix_caching:
            logger.warning(
                "scheduler.cache_aware_admission_window (%d) has no effect while cache.enable_prefix_caching is false",
                self.scheduler.cache_aware_admission_window,
            )
        return self

    @model_validator(mode="after")
    def _check_roles(self) -> Self:
        roles = {pool.role for pool in self.pools.values()}
        for role, other in ((PoolRole.PREFILL, PoolRole.DECODE), (PoolRole.DECODE, PoolRole.PREFILL)):
            if role in roles and not roles - {role}:
                raise ValueError(
                    f"pools: all of them have the role {str(role)!r}; add one with the role {str(other)!r}, or make "
                    "them mixed"
                )
        if PoolRole.PREFILL in roles and self.kv_transfer.kv_connector is None:
            raise ValueError(
                "kv_transfer.kv_connector is not set, and a pool has the role 'prefill', whose KV others need; "
                "set it to PullConnector, or make the pool mixed"
            )
        return self

    @property
    def is_disaggregated(self) -> bool:
        """Some ranks compute prompts only."""
        return any(pool.role is PoolRole.PREFILL for pool in self.pools.values())

    @property
    def num_ranks(self) -> int:
        """Ranks of all pools."""
        return sum(pool.num_ranks for pool in self.pools.values())

    def threads_of(self, pool: str, num_cores: int) -> int:
        """CPU threads for one rank of `pool` on a node with `num_cores` cores."""
        return self.pools[pool].threads_per_rank or max(1, num_cores // self.num_ranks)

    def memory_budget_of(self, pool: str, available_bytes: int) -> int | None:
        """What one rank of `pool` may take of its node's `available_bytes`, in bytes: ranks on the CPU share them.

        None for a rank that has a device of its own.
        """
        if self.pools[pool].device == "cuda":
            return None
        return available_bytes // sum(each.num_ranks for each in self.pools.values() if each.device == "cpu")


def _is_on_cpu(pool: object) -> bool:
    """Of a pool before or after its check."""
    if isinstance(pool, PoolConfig):
        return pool.device == "cpu"
    return isinstance(pool, dict) and pool.get("device", "cpu") == "cpu"


def load_config(path: Path | None, overrides: Mapping[str, object] | None = None) -> ClusterConfig:
    """Read, override and check. Raises ConfigError.

    `overrides` maps dotted paths to values, e.g. `{"router.port": 8123}`. `*` stands for the only pool.
    """
    values = _read_yaml(path) if path is not None else {}
    for dotted, value in (overrides or {}).items():
        _override(values, dotted.split("."), value)
    try:
        return ClusterConfig.model_validate(values)
    except ValidationError as error:
        source = f"{path}: " if path is not None else ""
        raise ConfigError("\n".join(source + _explain({**finding}) for finding in error.errors())) from None


class _UniqueKeyLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice, where YAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands here a second time; keep one", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}; give a YAML file to --config") from None
    try:
        values = yaml.load(text, Loader=_UniqueKeyLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: is not valid YAML: {error}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: holds {values!r}, not a mapping; begin with a section such as `router:`")
    return values


def _override(values: dict[str, Any], keys: Sequence[str], value: object) -> None:
    *parents, last = keys
    at = values
    for key in parents:
        if key == "*":
            pools = list(at) or ["mixed"]
            if len(pools) > 1:
                raise ConfigError(
                    f"pools: the file has {len(pools)} of them ({', '.join(map(str, pools))}), so a flag for the only "
                    f"pool is ambiguous; set {last} of each pool in the file"
                )
            key = pools[0]
        if not isinstance(at.get(key), dict):
            # A wrong kind of value is left for the check to report, unless it is simply missing.
            if at.get(key) is not None:
                return
            at[key] = {}
        at = at[key]
    at[last] = value


def _explain(finding: dict[str, Any]) -> str:
    location: tuple[Any, ...] = finding["loc"]
    where = ".".join(str(part) for part in location if part != "[key]") or "configuration"
    kind, context, given = finding["type"], finding.get("ctx", {}), finding["input"]
    if kind == "extra_forbidden":
        return f"{where}: unknown key (value {given!r}); {_suggest(location)}"
    if kind == "missing":
        return f"{where}: is missing; give it"
    if kind == "value_error":
        return f"{where}: {context['error']}"
    remedies: dict[str, Callable[[], str]] = {
        "greater_than_equal": lambda: f"set it to {context['ge']} or more",
        "greater_than": lambda: f"set it to more than {context['gt']}",
        "less_than": lambda: f"set it to less than {context['lt']}",
        "less_than_equal": lambda: f"set it to {context['le']} or less",
        "literal_error": lambda: f"choose {context['expected']}",
        "int_type": lambda: "give a whole number",
        "int_parsing": lambda: "give a whole number",
        "int_from_float": lambda: "give a whole number",
        "float_type": lambda: "give a number",
        "float_parsing": lambda: "give a number",
        "bool_type": lambda: "write true or false",
        "bool_parsing": lambda: "write true or false",
        "model_type": lambda: "write a section (keys and values) here",
        "dict_type": lambda: "write a section (keys and values) here",
        "too_short": lambda: "name at least one",
    }
    remedy = remedies[kind]() if kind in remedies else finding["msg"]
    return f"{where}: {given!r} is refused; {remedy}"


def _suggest(location: tuple[Any, ...]) -> str:
    """For the unknown key at the end of `location`: the nearest known key of its section, or all of them."""
    section: type[BaseModel] = ClusterConfig
    parts = list(location[:-1])
    while parts:
        annotation = section.model_fields[parts.pop(0)].annotation
        if get_origin(annotation) is dict:
            parts.pop(0)  # a name of the user's own
        # A section that may be left out is a union with None, one of several stands in a dictionary.
        [section] = [
            each
            for each in (annotation, *get_args(annotation))
            if isinstance(each, type) and issubclass(each, BaseModel)
        ]
    known = list(section.model_fields)
    near = difflib.get_close_matches(str(location[-1]), known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"the keys here are {', '.join(known)}"
