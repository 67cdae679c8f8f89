import json
from pathlib import Path

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from cluster.cli import app
from cluster.config import ClusterConfig, ConfigError, load_config


def refusal(text: str, tmp_path: Path) -> str:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_config(file)
    return str(refused.value)


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
        ("pools: {}", ["pools", "name at least one"]),
        ("router: 8000", ["router", "8000", "section"]),
        ("scheduler: {max_num_seqs: 600}", ["scheduler", "600", "512", "raise max_num_batched_tokens"]),
        ("model: {dtype: float16}", ["model.dtype", "'float16'", "choose"]),
        ("router: {port: 1, port: 2}", ["'port'", "a second time"]),
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


def test_the_example_is_a_valid_configuration() -> None:
    example = Path(__file__).parents[2] / "examples" / "serve.yaml"
    checked = CliRunner().invoke(app, ["config", "check", str(example)])
    assert checked.exit_code == 0
    assert json.loads(checked.stdout)["scheduler"]["max_num_queued_reqs"] == 256


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
    assert set(json.loads(printed.stdout)["properties"]) == {"model", "cache", "scheduler", "pools", "router"}
