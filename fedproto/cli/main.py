"""The command line. Heavy imports stay inside the commands: `fedproto --help` does not load torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fedproto.cli.deploy_commands import deploy_app
from fedproto.cli.output import (
    PluginDir,
    TrustPlugins,
    escape,
    execute,
    print_table,
    say,
    show,
    warn_of_divergence,
    wide_console,
)
from fedproto.cli.trained_commands import export, extend, join, members, predict
from fedproto.config import plugin_trust
from fedproto.core.interrupts import handle_sigterm
from fedproto.errors import ConfigError, DataError, FedProtoError, unknown

if TYPE_CHECKING:
    from fedproto.cli.console import SweepTeller
    from fedproto.config.settings import Config
    from fedproto.data import Source
    from fedproto.runs.sweep import Cell

app = typer.Typer(
    help="Federated learning by class prototypes, for members that share nothing but the names of their classes.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # [20] is a default, not markup
)

#: plural, as typed -> kind, as in `--algorithm`
LISTS = {
    "algorithms": "algorithm",
    "datasets": "dataset",
    "models": "model",
    "partitions": "partition",
}


def _flag(name: str, metavar: str, text: str) -> Any:
    """Flags are text: one place, fedproto/config/options.py, says what a value may be."""
    return typer.Option(f"--{name}", metavar=metavar, help=text, show_default=False)


@app.command(
    epilog="Keys that only --set and TOML know: dim, start, epochs, momentum, last_batch, precision, threads, workers, "
    "stack, states, compile, and the options that `fedproto list` shows."
)
def run(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="CONFIG.toml", help="Settings as a TOML file; flags override them."),
    ] = None,
    profile: Annotated[str | None, _flag("profile", "NAME", "paper or released [paper]")] = None,
    dataset: Annotated[
        str | None,
        _flag("dataset", "NAME", "mnist5k, digits, mnist, cifar10, npz:PATH, ... [mnist5k]"),
    ] = None,
    algorithm: Annotated[
        str | None,
        _flag(
            "algorithm", "NAME", "fedproto, local, ...; several with commas are compared [fedproto]"
        ),
    ] = None,
    model: Annotated[
        str | None,
        _flag("model", "NAME", "cnn, 'cnn(channels=18)*7,mlp*13', cnn-mh, ... [the data set's]"),
    ] = None,
    partition: Annotated[
        str | None, _flag("partition", "NAME", "nway, dirichlet, natural, iid, file:PATH [nway]")
    ] = None,
    clients: Annotated[str | None, _flag("clients", "N", "number of clients [20]")] = None,
    ways: Annotated[
        str | None, _flag("ways", "N", "classes a client, on average [3, or all of fewer]")
    ] = None,
    shots: Annotated[
        str | None, _flag("shots", "N", "training images a class, on average [the data set's]")
    ] = None,
    stdev: Annotated[str | None, _flag("stdev", "X", "noise on ways [2]")] = None,
    shots_stdev: Annotated[str | None, _flag("shots-stdev", "X", "noise on shots [stdev]")] = None,
    test_shots: Annotated[str | None, _flag("test-shots", "N", "test images a class [all]")] = None,
    rounds: Annotated[str | None, _flag("rounds", "N", "communication rounds [100]")] = None,
    batch: Annotated[str | None, _flag("batch", "N", "images a training step [8]")] = None,
    lr: Annotated[str | None, _flag("lr", "X", "learning rate [0.01]")] = None,
    participation: Annotated[
        str | None, _flag("participation", "X", "share of the clients sampled each round [1]")
    ] = None,
    lost_uploads: Annotated[
        str | None, _flag("lost-uploads", "X", "share of the uploads lost [0]")
    ] = None,
    stragglers: Annotated[
        str | None, _flag("stragglers", "X", "share of clients that do half their steps [0]")
    ] = None,
    seed: Annotated[
        str | None, _flag("seed", "N", "of partition, weights, shuffles, samples [0]")
    ] = None,
    engine: Annotated[
        str | None, _flag("engine", "NAME", "reference, vectorised, processes or auto [auto]")
    ] = None,
    device: Annotated[str | None, _flag("device", "NAME", "cpu, cuda or auto [auto]")] = None,
    eval_every: Annotated[
        str | None, _flag("eval-every", "N", "evaluate every N rounds, and in the last [10]")
    ] = None,
    checkpoint_every: Annotated[str | None, _flag("checkpoint-every", "N", "0 = none [10]")] = None,
    data_dir: Annotated[
        str | None, _flag("data-dir", "DIR", "where data files lie [$FEDPROTO_DATA]")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="the run folder [runs/TIME-DATASET-ALGORITHM]", show_default=False),
    ] = None,
    assign: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="any other key: lam=0.1, model.dropout=0"),
    ] = None,
    trust_plugins: TrustPlugins = False,
    plugin_dir: PluginDir = None,
) -> None:
    """Run a federation, or compare methods over one."""
    given = dict(locals())
    for key in ("config", "out", "assign", "trust_plugins", "plugin_dir"):
        del given[key]
    flags = {key: value for key, value in given.items() if value is not None}
    for key in ("ways", "shots", "stdev", "shots_stdev", "test_shots"):
        if key in flags:
            flags[f"partition.{key}"] = flags.pop(key)
    from fedproto.config import plugins
    from fedproto.config.settings import configure, read_assignment, read_toml
    from fedproto.engines.distributed.torchrun import follows
    from fedproto.runs.experiment import Experiment, follow, hold_all
    from fedproto.runs.folder import RunFolder

    assigned = dict(map(read_assignment, assign or []))
    plugins.trust_chosen(flags)
    plugins.trust_chosen(assigned)
    stored = _still_meant(read_toml(config), flags) if config else {}
    plugins.refuse_plugins(
        {key: value for key, value in stored.items() if key not in assigned}, str(config)
    )
    configs = configure(stored | flags, assigned)
    names = [each.algorithm.name for each in configs]
    target = out or _default_folder(configs[0].dataset[0].name, "-".join(names))
    if not follows():
        RunFolder.refuse_used(target)
    loaded: dict[str, Source] = {}
    experiments = [Experiment.prepare(each, loaded=loaded) for each in configs]
    if follows():
        follow(experiments)
        return
    for notice in dict.fromkeys(
        notice for experiment in experiments for notice in experiment.notices
    ):
        Console().print(notice, style="yellow", highlight=False, markup=False, soft_wrap=True)
    folders = [
        target / _unique(names, position) if len(names) > 1 else target
        for position in range(len(names))
    ]
    # All folders first: whatever happens from here on, `fedproto resume` can finish all of it.
    runs = [
        (experiment, experiment.new_folder(folder))
        for experiment, folder in zip(experiments, folders, strict=True)
    ]
    with hold_all([folder for _, folder in runs]):
        results = [execute(*each, of=target) for each in runs]
    show(results, _labels(configs))
    say(f"written to {target}")


@app.command()
def sweep(
    config: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG.toml", help="Settings as for run, and a table [sweep] of lists."
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="where the run folders go [runs/NAME]", show_default=False)
    ] = None,
    trust_plugins: TrustPlugins = False,
    plugin_dir: PluginDir = None,
) -> None:
    """Run all combinations of some settings, many federations at once; run again, it goes on where it stopped.

    The file alone says what is run: dataset = "mnist5k", then [sweep], seed = [0, 1, 2], ways = [3, 4]. Federations
    that differ in seed, partition, clients, lr, momentum, participation, lost_uploads or stragglers run together.
    """
    from fedproto.cli.console import sweep_bar, sweep_table
    from fedproto.engines.distributed.torchrun import refuse_torchrun
    from fedproto.runs.sweep import read_sweep, run_sweep

    refuse_torchrun("sweep")
    cells = read_sweep(config)
    target = out or Path("runs") / config.stem
    try:
        with sweep_bar(Console(), cells, target) as teller:
            results = run_sweep(cells, target, teller.batch, teller.broken)
    except KeyboardInterrupt:
        say(
            f"stopped; `fedproto sweep {config}{f' --out {out}' if out else ''}` goes on",
            stderr=True,
        )
        raise typer.Exit(130) from None
    wide_console().print(sweep_table(cells, results), highlight=False)
    named = zip(cells, results, strict=True)
    warn_of_divergence(
        [result | {"algorithm": cell.name} for cell, result in named if result is not None]
    )
    say(f"written to {target}")
    if None in results:
        raise typer.Exit(2)


@app.command()
def reproduce(
    target: Annotated[
        str,
        typer.Argument(
            help="table-mnist, table-femnist, table-cifar10, fig-tsne, fig-shots, fig-lambda, ..., verdicts or all"
        ),
    ],
    quick: Annotated[
        bool, typer.Option("--quick", help="a small version: minutes on a CPU, no data needed")
    ] = False,
    seeds: Annotated[
        int | None, typer.Option(help="how many [the target's]", min=1, show_default=False)
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="of every run [the target's]", min=1, show_default=False)
    ] = None,
    methods: Annotated[
        str | None, typer.Option(help="only these, with commas [all]", show_default=False)
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or auto [auto]", show_default=False)
    ] = None,
    data_dir: Annotated[
        str | None, typer.Option(help="where data files lie [$FEDPROTO_DATA]")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="[runs/reproduce, or runs/quick]", show_default=False)
    ] = None,
    finished: Annotated[
        bool, typer.Option("--finished", help="run nothing: show what is finished")
    ] = False,
    archive: Annotated[
        Path | None,
        typer.Option(
            help="finished cells are taken from this file, and put there", show_default=False
        ),
    ] = None,
) -> None:
    """Make the paper's tables and figures, and studies it lacks; run again, it goes on where it stopped."""
    from fedproto.cli.console import sweep_bar
    from fedproto.engines.distributed.torchrun import refuse_torchrun
    from fedproto.reproduce.make import make
    from fedproto.reproduce.plan import Request

    refuse_torchrun("reproduce")
    given = {"device": device, "data_dir": data_dir}
    computed = tuple((key, value) for key, value in given.items() if value is not None)
    request = Request(quick, seeds, rounds, tuple(methods.split(",")) if methods else (), computed)
    target_folder = out or Path("runs") / ("quick" if quick else "reproduce")
    flags = {"--seeds": seeds, "--rounds": rounds, "--methods": methods}
    said = "".join(f" {flag} {value}" for flag, value in flags.items() if value is not None)
    command = f"fedproto reproduce {target}{' --quick' if quick else ''}{said}"
    broken: list[str] = []

    def bar(cells: Sequence[Cell], folder: Path) -> AbstractContextManager[SweepTeller]:
        return sweep_bar(Console(), cells, folder, broken)

    try:
        for path in make(target, request, target_folder, archive, None if finished else bar):
            say(f"written to {path}")
    except KeyboardInterrupt:
        say(f"stopped; `{command}{f' --out {out}' if out else ''}` goes on", stderr=True)
        raise typer.Exit(130) from None
    if broken:
        raise typer.Exit(2)


@app.command()
def bench(
    clients: Annotated[str, typer.Option(help="numbers of clients, with commas")] = "20,100,1000",
    model: Annotated[str, typer.Option(help="cnn, resnet18, mlp, with commas")] = "cnn",
    device: Annotated[str, typer.Option(help="cpu, cuda or auto")] = "auto",
    precision: Annotated[str, typer.Option(help="float32, tf32, bf16, with commas")] = "float32",
    rounds: Annotated[int, typer.Option(help="rounds of which the median is taken", min=1)] = 5,
    seeds: Annotated[
        int,
        typer.Option(help="also 100 rounds of 20 clients for so many seeds in one stack", min=0),
    ] = 0,
    huge: Annotated[
        int, typer.Option(help="also a federation of so many clients, 1% a round", min=0)
    ] = 0,
    data_dir: Annotated[
        Path | None, typer.Option(help="where data files lie [$FEDPROTO_DATA]")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="write the numbers to this file, too")] = None,
) -> None:
    """Measure a round of every engine beside a plain loop over clients, on MNIST where it is found, else on noise.

    On a CPU also the plain loop and the engine as two processes. The default takes ten minutes on two cores; it needs a
    checkout of the project, for benchmarks/plain_loop.py.
    """
    from fedproto.cli.console import bench_table
    from fedproto.runs.bench import bench as measure

    if json is not None and (json.is_dir() or not json.parent.is_dir()):
        raise ConfigError(f"--json {json} is no file that can be written")
    found = measure(clients, model, device, precision, rounds, seeds, huge, data_dir, say)
    wide_console().print(bench_table(found), highlight=False)
    if json is not None:
        from json import dumps

        json.write_text(dumps(found, indent=1) + "\n")


def _still_meant(stored: dict[str, Any], flags: dict[str, Any]) -> dict[str, Any]:
    """The file's settings, without the options of a plug-in, or of a profile, in whose place a flag puts another."""
    from fedproto.config.settings import GOVERNED

    replaced = {key for key in flags if "." not in key and flags[key] != stored.get(key)}
    governed = GOVERNED if "profile" in replaced else set()
    return {
        key: value
        for key, value in stored.items()
        if key.partition(".")[0] not in replaced and key not in governed
    }


def _labels(configs: Sequence[Config]) -> list[str]:
    """What tables call the runs: the method, with its options where one is run twice."""
    from fedproto.config import plugins

    names = [each.algorithm.name for each in configs]
    return [
        plugins.short("algorithm", each.algorithm)
        if names.count(each.algorithm.name) > 1
        else each.algorithm.name
        for each in configs
    ]


def _default_folder(dataset: str, algorithms: str) -> Path:
    return (
        Path("runs")
        / f"{datetime.now():%Y%m%d-%H%M%S}-{_for_folder(Path(dataset).name)}-{_for_folder(algorithms)}"
    )


def _for_folder(text: str) -> str:
    """What any system takes as part of a folder's name: harmless characters, and together fewer than 255 bytes."""
    safe = "".join(c if c.isalnum() or c in "-_" else "-" for c in text)
    return safe.encode()[:100].decode(errors="ignore")


def _unique(names: Sequence[str], position: int) -> str:
    """The algorithm's name, numbered where one is run twice with other options."""
    name = names[position].replace(":", "-")
    return name if names.count(names[position]) == 1 else f"{name}-{position + 1}"


@app.command()
def resume(
    run: Annotated[Path, typer.Argument(help="A run folder, or a folder of compared runs.")],
    trust_plugins: TrustPlugins = False,
    plugin_dir: PluginDir = None,
) -> None:
    """Continue a run that was stopped or killed."""
    from fedproto.runs.folder import RunFolder

    folders = RunFolder.inside(run) or [RunFolder.open(run)]
    results = [folder.result() for folder in folders]
    if all(results):  # nothing to prepare, so the data need not be there any more
        rounds = max(result["rounds"] for result in results if result)
        say(f"{run} has finished all its {rounds} rounds: its result is in result.json")
        return
    from fedproto.engines.distributed.torchrun import follows
    from fedproto.runs.experiment import follow, hold_all, reopen

    if follows():
        follow(
            [
                reopen(folder)[0]
                for folder, result in zip(folders, results, strict=True)
                if not result
            ]
        )
        return
    with hold_all(folders):  # before the checkpoints are read: nobody writes newer ones meanwhile
        done = [folder.result() or execute(*reopen(folder), of=run) for folder in folders]
    labels = (
        [folder.path.name for folder in folders] if len(folders) > 1 else [done[0]["algorithm"]]
    )
    show(done, labels)


@app.command()
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...", help="Finished run folders, or folders of them, to compare."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="FILE.html, or a folder [report.html in the run, or here for several]",
            show_default=False,
        ),
    ] = None,
    trust_plugins: TrustPlugins = False,
    plugin_dir: PluginDir = None,
) -> None:
    """Turn finished runs into one page with tables and figures, which opens anywhere."""
    from fedproto.report import write

    say(f"written to {write(runs, out, notice=say)}")


@app.command("list")
def list_(
    kind: Annotated[
        str | None, typer.Argument(help="algorithms, datasets, models or partitions; all.")
    ] = None,
) -> None:
    """Show what can be named, with its options."""
    if kind is not None and kind not in LISTS:
        raise unknown("list", kind, LISTS)
    from rich.table import Table

    for plural in [kind] if kind else LISTS:
        table = Table(title=plural, title_justify="left", show_edge=False, pad_edge=False)
        for header in ("name", "what it is", "options and their defaults"):
            table.add_column(header, overflow="fold")
        for row in _plugins(LISTS[plural]):
            table.add_row(*row)
        Console().print(table, "", highlight=False)


def _plugins(kind: str) -> list[tuple[str, str, str]]:
    from fedproto.config import plugins
    from fedproto.config.options import options_of

    rows = []
    for name in plugins.names(kind):
        function = plugins.find(kind, name)
        options = ", ".join(map(str, options_of(function).values()))
        rows.append((name, (function.__doc__ or "").strip().split("\n")[0], options))
    return rows + [
        (name, f"in equal blocks: {mix}", "") for name, mix in plugins.presets(kind).items()
    ]


data_app = typer.Typer(
    help="Get data sets, see which are there, and hold their files against their checksums.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(data_app, name="data")
app.add_typer(deploy_app, name="deploy")

DataDir = Annotated[
    str | None,
    typer.Option("--data-dir", metavar="DIR", help="[$FEDPROTO_DATA, or ~/.cache/fedproto]"),
]


@data_app.command("get")
def data_get(
    name: Annotated[str, typer.Argument(help="a data set that `fedproto data list` shows")],
    mirror: Annotated[
        str | None,
        typer.Option(metavar="URL", help="a folder with the same files [their publisher's]"),
    ] = None,
    data_dir: DataDir = None,
) -> None:
    """Download a data set; run again, it goes on where it broke off."""
    from fedproto.data import DataFolders
    from fedproto.data.shared.download import get

    try:
        with _download_bar() as told:
            folder = get(name, DataFolders(data_dir), mirror, told)
    except KeyboardInterrupt:
        say(f"stopped; `fedproto data get {name}` goes on", stderr=True)
        raise typer.Exit(130) from None
    say(f"{name} is in {folder}")


@contextmanager
def _download_bar() -> Iterator[Callable[[str, int, int | None], None]]:
    """A bar a file, in bytes."""
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TaskID,
        TextColumn,
        TimeRemainingColumn,
    )

    console, tasks = Console(), dict[str, TaskID]()
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(24),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:

        def told(file: str, here: int, total: int | None) -> None:
            task = (
                tasks[file]
                if file in tasks
                else tasks.setdefault(file, bar.add_task(file, total=total))
            )
            bar.update(task, completed=here, total=total)

        yield told


@data_app.command("list")
def data_list(data_dir: DataDir = None) -> None:
    """Show the data sets that can be downloaded, and where those lie that are there."""
    from fedproto.data import DataFolders
    from fedproto.data.shared.download import overview

    rows = overview(DataFolders(data_dir))
    print_table(("name", "there", "download", "licence", "source"), rows)


@data_app.command("check")
def data_check(
    name: Annotated[str | None, typer.Argument(help="one data set [all that are there]")] = None,
    data_dir: DataDir = None,
) -> None:
    """Hold the files that are there against their published checksums; 2 if one is wrong or missing."""
    from fedproto.data import DataFolders
    from fedproto.data.shared.download import check_all

    findings = check_all(name, DataFolders(data_dir))
    print_table(
        ("data set", "file", "state"), [(each, str(f.path), f.state) for each, f in findings]
    )
    wrong = [str(finding.path) for _, finding in findings if not finding.good]
    if wrong:
        raise DataError(
            f"{len(wrong)} of {len(findings)} files are wrong or missing, first {wrong[0]}"
        )


def _version(wanted: bool) -> None:
    if wanted:
        import fedproto

        typer.echo(f"fedproto {fedproto.__version__}")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False,
) -> None:
    context.with_resource(plugin_trust.own_trust())  # what a command's flags allow ends with it


for command in (predict, join, members, extend, export):
    app.command()(command)


def main() -> None:
    """Errors meant for people become one line and exit code 2; SIGTERM is handled like Ctrl-C."""
    if (
        "TORCHELASTIC_RUN_ID" not in os.environ
    ):  # torchrun ends the others of a process that died, and at once
        handle_sigterm()
    try:
        app()
    except FedProtoError as error:
        Console(stderr=True).print(
            f"[red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True
        )
        sys.exit(2)
