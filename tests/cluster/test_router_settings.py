"""What routers are told."""

from __future__ import annotations

from pathlib import Path

from cluster.config import ClusterConfig
from cluster.router_settings import router_settings


def test_routers_are_told_what_of_the_schedulers_configuration_is_theirs() -> None:
    config = ClusterConfig.model_validate(
        {
            "scheduler": {"stream_interval": 7, "policy": "priority"},
            "router": {"max_body_bytes": 4096, "rank_silence_timeout_s": 3},
        }
    )
    settings = router_settings(config, model_dir=Path("/somewhere"), model_name="small", max_model_len=256)
    assert (settings.stream_interval, settings.policy) == (7, "priority")
    assert (settings.max_body_bytes, settings.rank_silence_timeout_s) == (4096, 3)
    assert (settings.model_name, settings.max_model_len) == ("small", 256)


def test_routers_are_told_the_keys_and_who_has_them() -> None:
    config = ClusterConfig.model_validate(
        {"router": {"api_keys": {"a": {"sha256": "0" * 64, "tenant": "blue"}, "b": {"sha256": "1" * 64}}}}
    )
    settings = router_settings(config, model_dir=Path("/somewhere"), model_name="small", max_model_len=256)
    assert [(key.name, key.sha256[0], key.account) for key in settings.api_keys] == [
        ("a", "0", "tenant:blue"),
        ("b", "1", "key:b"),
    ]
