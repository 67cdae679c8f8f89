"""The command `serried`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cluster.config import ClusterConfig, ConfigError, load_config
from cluster.flags import FlagsCommand, with_flags

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


@app.command(cls=FlagsCommand)
@with_flags
def serve(
    *,
    model: Annotated[
        str | None,
        typer.Argument(help="Model directory or GGUF file. Without: the embedded SmolLM2-135M-Instruct."),
    ] = None,
    config: ConfigFile = None,
    flags: dict[str, object],
) -> None:
    """Serve a model over the OpenAI API until Ctrl-C."""
    overrides = flags if model is None else {"model.path": model, **flags}
    settings = _load(config, overrides)
    if settings.ray.address is None and (address := os.environ.get("RAY_ADDRESS")):
        settings = _load(config, {**overrides, "ray.address": address})
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
