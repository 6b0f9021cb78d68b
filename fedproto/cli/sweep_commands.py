"""`fedproto sweep` and `fedproto reproduce`, which run many federations."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fedproto.cli.flags import PluginDir, TrustPlugins
from fedproto.cli.output import print_json_lines, say, warn_of_divergence, wide_console
from fedproto.cli.volume import AsJson, Quiet, is_quiet

if TYPE_CHECKING:
    from fedproto.cli.progress import SearchProgress, SweepProgress
    from fedproto.runs.sweep import Cell

Jobs = Annotated[
    int, typer.Option(help="processes that share the runs, on one GPU or several cores", min=1)
]


def sweep(
    config: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG.toml", help="settings as for run, and a table [sweep] of lists"
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="folder for the runs [runs/NAME]", show_default=False)
    ] = None,
    jobs: Jobs = 1,
    quiet: Quiet = False,
    as_json: AsJson = False,
    trust_plugins: TrustPlugins = False,
    plugin_dir: PluginDir = None,
) -> None:
    """Run all combinations of some settings; run again, it continues where it stopped.

    All settings come from the file: dataset = "mnist5k", then [sweep], seed = [0, 1, 2],
    ways = [3, 4]. Federations that differ only in seed, partition, clients, lr, momentum,
    participation, lost_uploads, stragglers, concurrency, staleness or speed_spread are trained
    together.
    """
    from fedproto.cli.progress import sweep_bar
    from fedproto.cli.tables import sweep_tables
    from fedproto.engines.distributed.torchrun import refuse_torchrun
    from fedproto.runs.sweep import read_sweep, run_sweep

    refuse_torchrun("sweep")
    cells = read_sweep(config)
    target = out or Path("runs") / config.stem
    try:
        with sweep_bar(Console(quiet=is_quiet()), cells, target) as progress:
            results = run_sweep(cells, target, progress.batch, progress.broken, jobs)
    except KeyboardInterrupt:
        _say_stopped(f"fedproto sweep {config}", out)
        raise typer.Exit(130) from None
    console = wide_console()
    console.quiet = is_quiet()
    for table in sweep_tables(cells, results, console.width):
        console.print(table, highlight=False)
    finished = []
    for cell, result in zip(cells, results, strict=True):
        if result is not None:
            finished.append(result | {"algorithm": cell.name})
    warn_of_divergence(finished)
    if as_json:
        print_json_lines(finished)
    say(f"written to {target}")
    if len(finished) < len(cells):
        raise typer.Exit(2)


def reproduce(
    target: Annotated[
        str,
        typer.Argument(
            help="table-mnist, table-femnist, table-cifar10, fig-tsne, fig-shots, fig-lambda, "
            "..., verdicts, all (the paper's), or table-methods"
        ),
    ],
    quick: Annotated[
        bool, typer.Option("--quick", help="a small version: minutes on a CPU, no data needed")
    ] = False,
    seeds: Annotated[
        int | None, typer.Option(help="number of seeds [the target's]", min=1, show_default=False)
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="rounds per run [the target's]", min=1, show_default=False)
    ] = None,
    methods: Annotated[
        str | None, typer.Option(help="only these, separated by commas [all]", show_default=False)
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or auto [auto]", show_default=False)
    ] = None,
    data_dir: Annotated[
        str | None, typer.Option(help="folder with data files [$FEDPROTO_DATA]")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="output folder [runs/reproduce, or runs/quick]", show_default=False),
    ] = None,
    finished: Annotated[
        bool, typer.Option("--finished", help="run nothing, show what is finished")
    ] = False,
    archive: Annotated[
        Path | None,
        typer.Option(help="file that keeps finished cells between runs", show_default=False),
    ] = None,
    tune: Annotated[
        bool, typer.Option("--tune", help="table-methods: choose the methods' settings first")
    ] = False,
    only: Annotated[
        str | None,
        typer.Option(
            metavar="AXIS=VALUE",
            help="table-methods: a part, such as 'dataset=mnist|cifar10,k=20,architecture=equal'",
            show_default=False,
        ),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(help="table-methods: full, or cpu, a smaller form [full]", show_default=False),
    ] = None,
    jobs: Jobs = 1,
    minutes: Annotated[
        float | None,
        typer.Option(help="table-methods: begin nothing after so long", show_default=False),
    ] = None,
) -> None:
    """Make the paper's tables and figures, and further studies; run again, it continues."""
    from fedproto.cli.progress import search_bar, sweep_bar
    from fedproto.engines.distributed.torchrun import refuse_torchrun
    from fedproto.reproduce.make import make
    from fedproto.reproduce.methods.benchmark import TARGET, choose_size, read_only
    from fedproto.reproduce.methods.training import make_methods, tune_all
    from fedproto.reproduce.plan import Request

    refuse_torchrun("reproduce")
    computed = []
    if device is not None:
        computed.append(("device", device))
    if data_dir is not None:
        computed.append(("data_dir", data_dir))
    chosen_methods = tuple(methods.split(",")) if methods else ()
    request = Request(quick, seeds, rounds, chosen_methods, tuple(computed))
    target_folder = out or Path("runs") / ("quick" if quick else "reproduce")
    broken: list[str] = []

    def bar(cells: Sequence[Cell], folder: Path) -> AbstractContextManager[SweepProgress]:
        return sweep_bar(Console(), cells, folder, broken)

    def search() -> AbstractContextManager[SearchProgress]:
        return search_bar(Console())

    flags = {"--size": size, "--tune": tune, "--only": only, "--minutes": minutes}
    try:
        if target == TARGET and tune:
            chosen_size = choose_size(size, quick)
            for sentence in tune_all(
                request, read_only(only), target_folder, minutes, search, chosen_size, jobs
            ):
                say(sentence)
            return
        if target == TARGET:
            paths = make_methods(
                request,
                read_only(only),
                target_folder,
                archive,
                minutes,
                None if finished else bar,
                say,
                choose_size(size, quick),
                jobs,
            )
        else:
            _refuse_flags_of_methods(target, flags)
            reporter = None if finished else bar
            paths = make(target, request, target_folder, archive, reporter, jobs)
        for path in paths:
            say(f"written to {path}")
    except KeyboardInterrupt:
        narrowing = {"--seeds": seeds, "--rounds": rounds, "--methods": methods} | flags
        _say_stopped(_describe_reproduce(target, quick, narrowing), out)
        raise typer.Exit(130) from None
    if broken:
        raise typer.Exit(2)


def _describe_reproduce(target: str, quick: bool, narrowing: dict[str, Any]) -> str:
    """Return the command that was typed, with those flags that change what is made."""
    command = f"fedproto reproduce {target}"
    if quick:
        command += " --quick"
    for flag, value in narrowing.items():
        if value is True:
            command += f" {flag}"
        elif value not in (None, False):
            command += f" {flag} {shlex.quote(str(value))}"
    return command


def _refuse_flags_of_methods(target: str, flags: dict[str, Any]) -> None:
    """Refuse flags that only the table of methods has."""
    from fedproto.errors import ConfigError

    for flag, value in flags.items():
        if value not in (None, False):
            raise ConfigError(f"{flag} is for table-methods, not for {target}")


def _say_stopped(command: str, out: Path | None) -> None:
    """Say which command continues what Ctrl-C stopped."""
    if out is not None:
        command += f" --out {out}"
    say(f"stopped; `{command}` goes on", stderr=True)
