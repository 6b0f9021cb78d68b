"""`fedproto bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedproto.cli.output import say, wide_console
from fedproto.errors import ConfigError


def bench(
    clients: Annotated[
        str, typer.Option(help="numbers of clients, separated by commas")
    ] = "20,100,1000",
    model: Annotated[str, typer.Option(help="cnn, resnet18, mlp, separated by commas")] = "cnn",
    device: Annotated[str, typer.Option(help="cpu, cuda or auto")] = "auto",
    precision: Annotated[
        str, typer.Option(help="float32, tf32, bf16, separated by commas")
    ] = "float32",
    rounds: Annotated[int, typer.Option(help="rounds of which the median is taken", min=1)] = 5,
    seeds: Annotated[
        int,
        typer.Option(help="also 100 rounds of 20 clients for this many seeds in one stack", min=0),
    ] = 0,
    huge: Annotated[
        int, typer.Option(help="also a federation of this many clients, 1% per round", min=0)
    ] = 0,
    data_dir: Annotated[
        Path | None, typer.Option(help="folder with data files [$FEDPROTO_DATA]")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="write the numbers to this file, too")] = None,
) -> None:
    """Measure one round of every engine beside a plain loop over clients.

    The data is MNIST if it is found, otherwise noise. On a CPU the plain loop and the engine are
    also measured as two processes. The defaults take ten minutes on two cores.
    """
    from fedproto.cli.tables import bench_table
    from fedproto.runs.bench import bench as measure

    if json is not None and (json.is_dir() or not json.parent.is_dir()):
        raise ConfigError(f"--json {json} is not a file that can be written")
    found = measure(clients, model, device, precision, rounds, seeds, huge, data_dir, say)
    wide_console().print(bench_table(found), highlight=False)
    if json is not None:
        from json import dumps

        json.write_text(dumps(found, indent=1) + "\n")
