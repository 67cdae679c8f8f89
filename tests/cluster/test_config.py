import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, ValidationError
from typer.testing import CliRunner

from cluster.cli import app
from cluster.config import ClusterConfig, ConfigError, ModelConfig, PoolConfig, RayConfig, RouterConfig, load_config
from cluster.flags import FLAGS
from kv_transfer.config import KVTransferConfig
from rank_scheduler.config import CacheConfig, SchedulerConfig, SpeculativeConfig
from rank_scheduler.messages import Explanation
from rank_scheduler.sequence import RequestEvent, WaitReason
from tests.rank_scheduler.test_config import CHANGED


def refusal(text: str, tmp_path: Path) -> str:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_config(file)
    return str(refused.value)


@pytest.mark.parametrize(
    ("section", "wrong", "expected"),
    [
        ("tenants", {"a": {"wait": 2}}, "router.tenants.a.wait: unknown key (value 2); did you mean 'weight'?"),
        ("tenants", {"a": {"weight": 0}}, "router.tenants.a.weight: 0 is refused; set it to more than 0"),
        ("api_keys", {"a": {"sha": "0"}}, "router.api_keys.a.sha"),
    ],
)
def test_what_is_wrong_in_a_section_with_a_name_of_its_own(
    section: str, wrong: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    file = tmp_path / "serried.yaml"
    file.write_text(json.dumps({"router": {section: wrong}}))
    with pytest.raises(ConfigError, match=re.escape(expected)):
        load_config(file)


def test_defaults_serve_the_embedded_model_with_two_ranks() -> None:
    config = load_config(None)
    assert config.model.path is None
    assert config.num_ranks == 2
    assert (config.router.host, config.router.port) == ("127.0.0.1", 8000)


def test_an_empty_file_means_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("# nothing yet\n")
    assert load_config(file) == ClusterConfig()


def test_flags_override_the_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("pools:\n  small: {num_ranks: 3}\nrouter: {port: 9000, host: 0.0.0.0}\n")
    config = load_config(file, {"pools.*.num_ranks": 4, "router.port": 8123, "scheduler.max_num_queued_reqs": 7})
    assert {name: pool.num_ranks for name, pool in config.pools.items()} == {"small": 4}
    assert (config.router.host, config.router.port) == ("0.0.0.0", 8123)
    assert config.scheduler.max_num_queued_reqs == 7


def test_a_flag_for_the_only_pool_needs_one(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("pools:\n  a: {}\n  b: {}\n")
    with pytest.raises(ConfigError, match="2 of them"):
        load_config(file, {"pools.*.num_ranks": 4})


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("router: {prot: 8000}", ["router.prot", "8000", "did you mean 'port'"]),
        ("ruoter: {port: 8000}", ["ruoter", "did you mean 'router'"]),
        ("pools: {mixed: {num_rank: 2}}", ["pools.mixed.num_rank", "did you mean 'num_ranks'"]),
        ("cache: {zzz: 1}", ["cache.zzz", "block_size, num_blocks"]),
        ("router: {port: 70000}", ["router.port", "70000", "65535 or less"]),
        ("pools: {mixed: {num_ranks: 0}}", ["pools.mixed.num_ranks", "0", "1 or more"]),
        ("pools: {mixed: {num_ranks: two}}", ["pools.mixed.num_ranks", "'two'", "whole number"]),
        ("pools: {mixed: {device: tpu}}", ["pools.mixed.device", "'tpu'", "'cpu' or 'cuda'"]),
        ("pools: {'a/b': {}}", ["pools", "'a/b'", "rename"]),
        ("pools: {mixed: {drain_limit_s: 5}}", ["pools.mixed", "drain_limit_s is 5", "drain_deadline_s 30", "raise"]),
        ("pools: {}", ["pools", "name at least one"]),
        ("router: 8000", ["router", "8000", "section"]),
        ("scheduler: {max_num_seqs: 600}", ["scheduler", "600", "512", "raise max_num_batched_tokens"]),
        ("model: {dtype: float16}", ["model.dtype", "'float16'", "choose"]),
        ("router: {port: 1, port: 2}", ["'port'", "a second time"]),
        ("scheduler: {policy: priority, policy: fcfs}", ["'policy'", "a second time"]),
        ("scheduler: {max_num_seq: 1}", ["scheduler.max_num_seq", "did you mean 'max_num_seqs'"]),
        ("scheduler: {max_num_seqs: yes}", ["scheduler.max_num_seqs", "True", "no switch"]),
        ("scheduler: {policy: sjf}", ["scheduler.policy", "'sjf'", "choose 'fcfs' or 'priority'"]),
        ("scheduler: {watermark: 1.0}", ["scheduler.watermark", "1.0", "less than 1"]),
        ("scheduler: {scheduler_cls: Mine}", ["scheduler.scheduler_cls", "'Mine'", "package.module.ClassName"]),
        ("scheduler:", ["scheduler", "section"]),
        (
            "scheduler: {speculative: {num_speculative_token: 3}}",
            [
                "scheduler.speculative.num_speculative_tokens: is missing",
                "scheduler.speculative.num_speculative_token:",
                "did you mean 'num_speculative_tokens'",
            ],
        ),
        ("scheduler: {speculative: ngram}", ["scheduler.speculative", "'ngram'", "section"]),
        (
            "scheduler: {speculative: {num_speculative_tokens: 1, prompt_lookup_min: 6}}",
            ["scheduler.speculative", "prompt_lookup_min (6)", "prompt_lookup_max (5)"],
        ),
        (
            "{model: {max_model_len: 1024}, scheduler: {enable_chunked_prefill: false}}",
            ["max_num_batched_tokens (512)", "max_model_len (1024)", "enable_chunked_prefill"],
        ),
        ("ray: {address: 'ray://head:10001'}", ["ray.address", "client protocol", "on a node of the cluster"]),
        ("ray: {address: head}", ["ray.address", "'head'", "not HOST:PORT", "auto"]),
        ("ray: {address: 'head:port'}", ["ray.address", "'head:port'", "not HOST:PORT"]),
        ("[1, 2]", ["not a mapping"]),
        ("a: [", ["not valid YAML"]),
    ],
)
def test_refusals_name_path_value_and_remedy(text: str, parts: list[str], tmp_path: Path) -> None:
    message = refusal(text, tmp_path)
    assert "serve.yaml" in message
    for part in parts:
        assert part in message


def test_all_findings_are_reported_at_once(tmp_path: Path) -> None:
    assert len(refusal("router: {port: 0, hots: a}\nmodel: {max_model_len: 0}", tmp_path).splitlines()) == 3


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        load_config(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize(("written", "meant"), [("on", "on"), ("off", "off"), ("auto", "auto"), ("'on'", "on")])
def test_bare_on_and_off_are_not_booleans(written: str, meant: str, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(f"router: {{ha_proxy: {written}}}")
    assert load_config(file).router.ha_proxy == meant


def test_config_is_frozen() -> None:
    config = load_config(None)
    with pytest.raises(ValidationError):
        config.router.port = 1  # type: ignore[misc]


def test_cores_and_memory_are_shared_among_ranks() -> None:
    config = load_config(None, {"pools.*.num_ranks": 3})
    assert [config.threads_of("mixed", cores) for cores in (1, 2, 6, 8)] == [1, 1, 2, 2]
    assert config.memory_budget_of("mixed", 9000) == 3000
    assert load_config(None, {"pools.*.threads_per_rank": 5}).threads_of("mixed", 2) == 5
    assert load_config(None, {"pools.*.device": "cuda"}).memory_budget_of("mixed", 9000) is None


# Smaller steps on the CPU


@pytest.mark.parametrize(
    ("text", "tokens", "seqs"),
    [
        ("", 512, 64),
        ("pools: {a: {device: cpu}, b: {}}", 512, 64),
        ("pools: {a: {device: cuda}}", 2048, 128),
        ("pools: {a: {device: cuda}, b: {device: cpu}}", 2048, 128),
        ("scheduler: {max_num_seqs: 100}", 512, 100),
        ("scheduler: {max_num_batched_tokens: 2048}", 2048, 64),
        ("scheduler: {policy: priority}", 512, 64),
        ("{pools: {a: {device: cuda}}, scheduler: {max_num_seqs: 7}}", 2048, 7),
    ],
)
def test_cpus_get_smaller_steps_unless_told_otherwise(text: str, tokens: int, seqs: int, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    scheduler = load_config(file).scheduler
    assert (scheduler.max_num_batched_tokens, scheduler.max_num_seqs) == (tokens, seqs)
    # `config check` shows what is in effect, and reading that again changes nothing.
    shown = json.loads(CliRunner().invoke(app, ["config", "check", str(file)]).stdout)
    assert shown["scheduler"]["max_num_batched_tokens"] == tokens
    assert ClusterConfig.model_validate(shown) == load_config(file)


def test_the_device_flag_decides_too() -> None:
    assert load_config(None, {"pools.*.device": "cuda"}).scheduler == SchedulerConfig()
    assert ClusterConfig(pools={"a": PoolConfig(device="cuda")}).scheduler == SchedulerConfig()
    assert ClusterConfig(pools={"a": PoolConfig()}).scheduler.max_num_batched_tokens == 512
    assert ClusterConfig(scheduler=SchedulerConfig()).scheduler == SchedulerConfig()


def test_a_window_without_prefix_caching_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    load_config(None, {"scheduler.cache_aware_admission_window": 4})
    assert not caplog.records
    load_config(None, {"scheduler.cache_aware_admission_window": 4, "cache.enable_prefix_caching": False})
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "cache_aware_admission_window (4)" in caplog.text


# Every key, from the file and from the command line

SPECULATIVE = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 1}
OTHER_SECTIONS: dict[str, dict[str, Any]] = {
    "model": {"name": "m", "dtype": "bfloat16", "max_model_len": 333},
    "cache": {"block_size": 8, "num_blocks": 99, "memory_gib": 0.5, "enable_prefix_caching": False},
    "pools.*": {
        "num_ranks": 3,
        "threads_per_rank": 2,
        "device": "cuda",
        "drain_deadline_s": 7.0,
        "drain_limit_s": 70.0,
    },
    "router": {
        "host": "::1",
        "port": 8123,
        "num_routers": 2,
        "ha_proxy": "off",
        "max_body_bytes": 2048,
        "rank_silence_timeout_s": 3.5,
        "remote_prefill_min_tokens": 7,
        "pd_fallback": False,
        "max_failovers": 5,
        "placement": "least_loaded",
        "tenants": {"a": {"weight": 2.0}},
        "default_deadline_s": 30.0,
        "http_server": "own",
        "tls_cert_file": "/tmp/cert.pem",
        "tls_key_file": "/tmp/key.pem",
        "access_log": "/tmp/access.log",
        "idempotency_ttl_s": 60.0,
        "api_keys": {"a": {"sha256": "0" * 64, "tenant": "t"}},
    },
    "kv_transfer": {
        "kv_connector": "OffloadConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"size_gib": 2},
        "kv_connector_module_path": "some.module",
        "kv_load_failure_policy": "fail",
        "kv_buffer_device": "cpu",
        "kv_ip": "10.0.0.1",
        "kv_port": 14579,
        "engine_id": "e",
    },
    "ray": {"address": "10.0.0.1:6379"},
}
EXAMPLES_DIR = Path(__file__).parents[2] / "examples"
EXAMPLES = sorted(path.name for path in EXAMPLES_DIR.glob("*.yaml"))
KEYS: dict[str, Any] = {
    **{f"scheduler.{field}": value for field, (value, _) in CHANGED.items() if field != "speculative"},
    **{f"scheduler.speculative.{field}": value for field, value in SPECULATIVE.items()},
    **{f"{section}.{key}": value for section, keys in OTHER_SECTIONS.items() for key, value in keys.items()},
}


NEEDED: dict[str, dict[str, Any]] = {
    "scheduler": {"long_prefill_token_threshold": 100},
    "speculative": {"num_speculative_tokens": 1},
    "kv_transfer": {"kv_connector": "PullConnector"},
    "router": {"http_server": "own", "tls_cert_file": "/cert", "tls_key_file": "/key"},
}
"""What a section must have for any other of its keys."""


def at(config: ClusterConfig, path: str) -> object:
    """The value of a key, of the only pool where the path says `*`; sections by name as plain values."""
    found: Any = config
    for part in path.split("."):
        found = found["mixed"] if part == "*" else getattr(found, part)
    if isinstance(found, dict):
        return {key: each.model_dump() if isinstance(each, BaseModel) else each for key, each in found.items()}
    return found


def default_of(path: str) -> object:
    if path.startswith("scheduler.speculative."):
        return SpeculativeConfig.model_fields[path.rpartition(".")[2]].default
    return at(ClusterConfig(), path)


@pytest.mark.parametrize(
    ("section", "declared", "elsewhere"),
    [
        ("scheduler", SchedulerConfig, {"speculative"}),
        ("scheduler.speculative", SpeculativeConfig, set()),
        ("model", ModelConfig, {"path"}),
        ("cache", CacheConfig, set()),
        ("pools.*", PoolConfig, {"role"}),
        ("router", RouterConfig, set()),
        ("kv_transfer", KVTransferConfig, set()),
        ("ray", RayConfig, set()),
    ],
)
def test_every_key_has_a_flag(section: str, declared: type[Any], elsewhere: set[str]) -> None:
    keys = {f"{section}.{key}" for key in declared.model_fields if key not in elsewhere}
    flagged = {flag.path for flag in FLAGS if flag.path.rpartition(".")[0] == section}
    tested = {path for path in KEYS if path.rpartition(".")[0] == section}
    assert keys == flagged == tested


@pytest.mark.parametrize("path", KEYS)
def test_every_key_is_reached_from_the_file(path: str, tmp_path: Path) -> None:
    *parents, key = path.replace("*", "mixed").split(".")
    values: dict[str, Any] = {}
    section = values
    for parent in parents:
        section = section.setdefault(parent, {})
    section.update(NEEDED.get(parents[-1], {}))
    section[key] = KEYS[path]
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump(values))
    assert at(load_config(file), path) == KEYS[path]
    # What is tried here differs from the default, so that reading it is seen.
    assert path == "scheduler.speculative.method" or KEYS[path] != default_of(path)


def serve_with(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> ClusterConfig:
    """What `serried serve` would serve."""
    served: list[ClusterConfig] = []

    def run(config: ClusterConfig, console: object) -> int:
        served.append(config)
        return 0

    monkeypatch.setattr("cluster.launcher.serve", run)
    called = CliRunner().invoke(app, ["serve", *arguments])
    assert called.exit_code == 0, called.output
    [config] = served
    return config


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
def test_every_key_is_reached_by_its_flag(flag: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    value = KEYS[flag.path]
    name = flag.name.replace("_", "-")
    text = json.dumps(value) if isinstance(value, dict) else str(value)
    arguments = [f"--{name}" if value else f"--no-{name}"] if isinstance(value, bool) else [f"--{name}", text]
    overrides = {flag.path: value}
    if flag.path.startswith("scheduler.speculative.") and flag.name != "speculative_num_tokens":
        arguments += ["--speculative-num-tokens", "1"]
        overrides["scheduler.speculative.num_speculative_tokens"] = 1
    if flag.path.startswith("kv_transfer.") and flag.name != "kv_connector":
        arguments += ["--kv-connector", "PullConnector"]
        overrides["kv_transfer.kv_connector"] = "PullConnector"
    if flag.path == "scheduler.short_prefill_tokens":
        arguments += ["--long-prefill-token-threshold", "100"]
        overrides["scheduler.long_prefill_token_threshold"] = 100
    if flag.path.startswith("router.tls_"):
        for name, needed in NEEDED["router"].items():
            if f"router.{name}" != flag.path:
                arguments += [f"--{name.replace('_', '-')}", needed]
                overrides[f"router.{name}"] = needed
    config = serve_with(arguments, monkeypatch)
    assert at(config, flag.path) == value
    assert config == load_config(None, overrides)  # The flag changes nothing else.


@pytest.mark.parametrize(
    ("pools", "kv_transfer", "named"),
    [
        ({"a": {"role": "prefill"}}, {"kv_connector": "PullConnector"}, "add one with the role 'decode'"),
        ({"a": {"role": "decode"}}, {"kv_connector": "PullConnector"}, "add one with the role 'prefill'"),
        ({"a": {"role": "prefill"}, "b": {}}, {}, "kv_transfer.kv_connector is not set"),
        ({"a": {"role": "both"}}, {}, "'mixed', 'prefill' or 'decode'"),
        ({}, {"kv_role": "kv_both"}, "kv_role is"),
        ({}, {"kv_connector": "PullConnector", "kv_ip": "0.0.0.0"}, "kv_ip is '0.0.0.0'"),
    ],
)
def test_roles_and_connectors_that_do_not_fit_are_refused(
    pools: dict[str, Any], kv_transfer: dict[str, Any], named: str, tmp_path: Path
) -> None:
    values = {"kv_transfer": kv_transfer} | ({"pools": pools} if pools else {})
    assert named in refusal(yaml.safe_dump(values), tmp_path)


@pytest.mark.parametrize("switch", [flag for flag in FLAGS if isinstance(KEYS[flag.path], bool)], ids=lambda f: f.name)
def test_a_switch_goes_both_ways(switch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    name = switch.name.replace("_", "-")
    for argument, value in ((f"--{name}", True), (f"--no-{name}", False)):
        assert at(serve_with([argument], monkeypatch), switch.path) is value


def test_flags_and_arguments_together(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("scheduler: {policy: priority, speculative: {num_speculative_tokens: 2, prompt_lookup_max: 7}}")
    config = serve_with(["/models/m", "-c", str(file), "--speculative-num-tokens", "4"], monkeypatch)
    assert config.model.path == Path("/models/m")
    assert config.scheduler.policy == "priority"
    assert config.scheduler.speculative == SpeculativeConfig(num_speculative_tokens=4, prompt_lookup_max=7)


def test_a_flag_for_a_section_that_the_file_leaves_empty(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("scheduler: {speculative: null}")
    assert load_config(file).scheduler.speculative is None
    config = load_config(file, {"scheduler.speculative.num_speculative_tokens": 4})
    assert config.scheduler.speculative == SpeculativeConfig(num_speculative_tokens=4)


def test_help_shows_every_flag_whole_in_a_narrow_terminal() -> None:
    printed = CliRunner().invoke(app, ["serve", "--help"], terminal_width=80)
    assert printed.exit_code == 0
    for flag in FLAGS:
        assert f"--{flag.name.replace('_', '-')} " in printed.output
        assert f"\n{flag.panel}:\n" in printed.output


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_example_is_a_valid_configuration(name: str) -> None:
    checked = CliRunner().invoke(app, ["config", "check", str(EXAMPLES_DIR / name)])
    assert checked.exit_code == 0, checked.output
    shown = json.loads(checked.stdout)
    assert shown["scheduler"]["max_num_seqs"] > 0


@pytest.mark.parametrize(
    ("arguments", "variable", "address"),
    [
        ([], None, None),
        ([], "", None),
        ([], "auto", "auto"),
        (["--ray-address", "10.0.0.1:6379"], "auto", "10.0.0.1:6379"),
        (["--ray-address", "local"], "10.0.0.1:6379", "local"),
        (["-c", "FILE"], "10.0.0.1:6379", "auto"),
        (["-c", "FILE", "--ray-address", "local"], None, "local"),
    ],
)
def test_the_flag_goes_before_the_file_and_the_file_before_the_variable(
    arguments: list[str], variable: str | None, address: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("ray: {address: auto}")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if variable is not None:
        monkeypatch.setenv("RAY_ADDRESS", variable)
    config = serve_with([str(file) if argument == "FILE" else argument for argument in arguments], monkeypatch)
    assert config.ray.address == address
    assert config.ray.is_own == (address in (None, "local"))


def test_a_wrong_variable_is_refused_like_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    called = CliRunner().invoke(app, ["serve"])
    assert called.exit_code == 2
    assert "client protocol" in called.output


def test_config_check_explains_and_fails(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("router: {prot: 1}")
    checked = CliRunner().invoke(app, ["config", "check", str(file)])
    assert checked.exit_code == 2
    assert "router.prot" in checked.output
    assert "did you mean 'port'" in checked.output


def test_a_bad_flag_is_explained_by_its_key() -> None:
    served = CliRunner().invoke(app, ["serve", "--num-ranks", "0"])
    assert served.exit_code == 2
    assert "pools.mixed.num_ranks" in served.output


def test_the_schema_describes_every_section() -> None:
    printed = CliRunner().invoke(app, ["config", "schema"])
    assert printed.exit_code == 0
    sections = {"model", "cache", "scheduler", "pools", "router", "kv_transfer", "ray"}
    assert set(json.loads(printed.stdout)["properties"]) == sections


def test_every_key_is_described() -> None:
    printed = CliRunner().invoke(app, ["config", "schema"])
    definitions = json.loads(printed.stdout)["$defs"]
    for section in ("SchedulerConfig", "SpeculativeConfig", "CacheConfig", "PoolConfig", "RouterConfig", "ModelConfig"):
        for key, described in definitions[section]["properties"].items():
            assert described.get("description"), f"{section}.{key}"


SCHEDULER_DOC = (Path(__file__).parents[2] / "docs" / "scheduler.md").read_text(encoding="utf-8")
DOC_ROWS = [line.strip("|").split("|") for line in SCHEDULER_DOC.splitlines() if line.startswith("| `")]


def test_every_scheduler_key_is_documented() -> None:
    documented = [row[0].strip().strip("`") for row in DOC_ROWS]
    speculative = {f"speculative.{field}" for field in SpeculativeConfig.model_fields}
    assert sorted(documented) == sorted({*SchedulerConfig.model_fields, *speculative} - {"speculative"})


def test_the_documentation_names_only_what_there_is() -> None:
    metrics = (Path(__file__).parents[2] / "router" / "metrics.py").read_text(encoding="utf-8")
    known = {*SchedulerConfig.model_fields, *Explanation.__struct_fields__, *WaitReason, *RequestEvent}
    for *_, evidence in DOC_ROWS:
        for name in re.findall(r"`([a-z_]+)", evidence):
            assert name in known or f'"{name}"' in metrics or f'"serried_{name}' in metrics, name
    api = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
    for reason in WaitReason:
        assert f"| `{reason}` |" in api


@pytest.mark.parametrize(
    ("router", "words"),
    [
        ("{tls_cert_file: c, tls_key_file: k}", "router: tls_cert_file is set, and http_server is 'serve'"),
        ("{http_server: own, tls_cert_file: c}", "router: tls_cert_file is set, and tls_key_file is not; give both"),
        ("{http_server: own, tls_key_file: k}", "router: tls_key_file is set, and tls_cert_file is not; give both"),
        ("{http_server: own, ha_proxy: on}", "router: ha_proxy is 'on', and http_server is 'own', which needs none"),
    ],
)
def test_servers_that_cannot_be(router: str, words: str, tmp_path: Path) -> None:
    assert words in refusal(f"router: {router}", tmp_path)
