"""The command `serried`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cluster.config import ClusterConfig, ConfigError, load_config

app = typer.Typer(
    help="Serve language models on Ray by data-parallel ranks.", no_args_is_help=True, pretty_exceptions_enable=False
)
config_app = typer.Typer(help="Check and describe configuration files.", no_args_is_help=True)
app.add_typer(config_app, name="config")

ConfigFile = Annotated[Path | None, typer.Option("--config", "-c", help="YAML file; the flags here override it.")]


def _load(path: Path | None, overrides: dict[str, object]) -> ClusterConfig:
    try:
        return load_config(path, overrides)
    except ConfigError as error:
        Console(stderr=True, highlight=False).print(str(error), style="red", soft_wrap=True, markup=False)
        raise typer.Exit(2) from None


@app.command()
def serve(
    model: Annotated[
        str | None,
        typer.Argument(help="Model directory or GGUF file. Without: the embedded SmolLM2-135M-Instruct."),
    ] = None,
    config: ConfigFile = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="HTTP port.")] = None,
    model_name: Annotated[str | None, typer.Option(help="Name of the model in the API.")] = None,
    num_ranks: Annotated[int | None, typer.Option(help="Ranks of the only pool.")] = None,
    num_routers: Annotated[int | None, typer.Option(help="Replicas of the router.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda, for the only pool.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32 or bfloat16.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Tokens of a prompt and its answer together.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Sequences that run at the same time on one rank.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Token budget of one step.")] = None,
    max_num_queued_reqs: Annotated[int | None, typer.Option(help="Requests in the whole cluster.")] = None,
    max_num_queued_tokens: Annotated[int | None, typer.Option(help="Waiting prompt tokens in the cluster.")] = None,
    ha_proxy: Annotated[str | None, typer.Option(help="auto, on or off.")] = None,
) -> None:
    """Serve a model over the OpenAI API until Ctrl-C."""
    flags: dict[str, object | None] = {
        "model.path": model,
        "model.name": model_name,
        "model.dtype": dtype,
        "model.max_model_len": max_model_len,
        "pools.*.num_ranks": num_ranks,
        "pools.*.device": device,
        "scheduler.max_num_seqs": max_num_seqs,
        "scheduler.max_num_batched_tokens": max_num_batched_tokens,
        "scheduler.max_num_queued_reqs": max_num_queued_reqs,
        "scheduler.max_num_queued_tokens": max_num_queued_tokens,
        "router.host": host,
        "router.port": port,
        "router.num_routers": num_routers,
        "router.ha_proxy": ha_proxy,
    }
    settings = _load(config, {path: value for path, value in flags.items() if value is not None})
    from cluster.launcher import serve as run

    raise typer.Exit(run(settings, Console(highlight=False)))


@config_app.command()
def check(file: Annotated[Path, typer.Argument(help="YAML file.")]) -> None:
    """Check a configuration file; print it with every default filled in."""
    settings = _load(file, {})
    typer.echo(json.dumps(settings.model_dump(mode="json"), indent=2))


@config_app.command()
def schema() -> None:
    """Print the JSON Schema of the configuration file."""
    typer.echo(json.dumps(ClusterConfig.model_json_schema(), indent=2))


def main() -> None:
    """Entry point."""
    app()
