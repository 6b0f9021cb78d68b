"""`fedproto tune`: settings chosen by accuracy on validation rows."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fedproto.cli.flags import PluginDir, TrustPlugins
from fedproto.cli.output import print_table, say
from fedproto.cli.run_commands import join_settings

if TYPE_CHECKING:
    from fedproto.cli.progress import SearchProgress

#: Candidates that the table shows, beside the default.
SHOWN_CANDIDATES = 5
THEORY = "theory"
#: What settings may be chosen by.
WAYS = ("validation", THEORY)
#: The table of a configuration file that says what is searched.
SEARCH_TABLE = "search"


def _flag(name: str, metavar: str, text: str) -> Any:
    """Declare a flag that takes text: fedproto/config alone says which values are accepted."""
    return typer.Option(f"--{name}", metavar=metavar, help=text, show_default=False)


def tune(
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="CONFIG.toml",
            help="settings as for run, and a table [search]; flags override them",
        ),
    ] = None,
    algorithm: Annotated[str | None, _flag("algorithm", "NAME", "one algorithm [fedproto]")] = None,
    dataset: Annotated[str | None, _flag("dataset", "NAME", "as for run [mnist5k]")] = None,
    model: Annotated[str | None, _flag("model", "NAME", "as for run [the data set's]")] = None,
    partition: Annotated[str | None, _flag("partition", "NAME", "as for run [nway]")] = None,
    search: Annotated[
        str | None,
        _flag(
            "search",
            "TEXT",
            "what is searched: 'lam=0.1..10:log,tau=0.1|0.3|1' [the algorithm's default space]",
        ),
    ] = None,
    budget: Annotated[
        int, typer.Option(help="settings that are tried, the default among them")
    ] = 16,
    rounds: Annotated[int, typer.Option(help="rounds of the last candidates")] = 20,
    seeds: Annotated[int, typer.Option(help="federations per candidate")] = 2,
    strategy: Annotated[
        str, typer.Option(help="halving, or random: everybody is trained to the end")
    ] = "halving",
    halve_after: Annotated[
        int | None,
        typer.Option(
            help="first round after which the worse half stops [a quarter]", show_default=False
        ),
    ] = None,
    by: Annotated[
        str,
        typer.Option(help="validation, or theory: also what the convergence proof proposes"),
    ] = "validation",
    validation: Annotated[
        str | None, _flag("validation", "X", "fraction of training rows to judge by [0.2]")
    ] = None,
    select_by: Annotated[
        str | None, _flag("select-by", "NAME", "what candidates are ranked by [accuracy]")
    ] = None,
    seed: Annotated[str | None, _flag("seed", "N", "first seed, also of the draws [0]")] = None,
    device: Annotated[str | None, _flag("device", "NAME", "cpu, cuda or auto [auto]")] = None,
    data_dir: Annotated[
        str | None, _flag("data-dir", "DIR", "folder with data files [$FEDPROTO_DATA]")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="folder of the search [runs/tune-ALGORITHM]", show_default=False),
    ] = None,
    assign: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="any other key: clients=10, ways=5"),
    ] = None,
    trust_plugins: TrustPlugins = False,
    plugin_dir: PluginDir = None,
) -> None:
    """Choose hyper-parameters by accuracy on validation rows; run again, it continues.

    Test rows are never looked at. The folder gets tune.json, with every setting that was tried,
    and best.toml, which `fedproto run` takes.
    """
    from fedproto.cli.progress import search_bar
    from fedproto.config.config_file import drop_values_from_data, flatten_tables, read_tables
    from fedproto.engines.distributed.torchrun import refuse_torchrun
    from fedproto.errors import unknown
    from fedproto.runs.tune.search import Search, SearchOptions

    refuse_torchrun("tune")
    if by not in WAYS:
        raise unknown("way to tune", by, WAYS)
    flags = {
        "algorithm": algorithm,
        "dataset": dataset,
        "model": model,
        "partition": partition,
        "validation": validation,
        "select_by": select_by,
        "seed": seed,
        "device": device,
        "data_dir": data_dir,
    }
    given = {key: value for key, value in flags.items() if value is not None}
    stored: dict[str, Any] = {}
    stored_search = None
    if config is not None:
        tables = drop_values_from_data(read_tables(config))
        table = tables.pop(SEARCH_TABLE, None)
        stored_search = None if table is None else _flatten_search(table, config)
        stored = flatten_tables(tables, str(config))
    settings, assigned = join_settings(stored, config, given, assign or [])
    options = SearchOptions(
        search=search or stored_search,
        budget=budget,
        rounds=rounds,
        seeds=seeds,
        strategy=strategy,
        halve_after=halve_after,
    )
    prepared = Search.prepare(settings, assigned, options)
    if by == THEORY:
        from fedproto.theory.tuning import judge_proposals, refuse_search

        refuse_search(prepared)
    default_name = "tune-" + prepared.config.algorithm.name.replace(":", "-")
    target = out or Path("runs") / (config.stem if config is not None else default_name)

    def bar() -> AbstractContextManager[SearchProgress]:
        return search_bar(Console())

    try:
        content = prepared.run(target, bar)
        proposals = []
        if by == THEORY:
            proposals = judge_proposals(prepared, settings, assigned, target, bar)
    except KeyboardInterrupt:
        say("stopped; the same command goes on", stderr=True)
        raise typer.Exit(130) from None
    _show(content)
    if proposals:
        _show_proposals(proposals)
    say(f"written to {target}: fedproto run {target / 'best.toml'}")


def _flatten_search(table: Any, path: Path) -> dict[str, Any]:
    """Return the table [search] with one key per setting, such as `model.dropout`."""
    from fedproto.errors import ConfigError

    if not isinstance(table, dict):
        raise ConfigError(f"search in {path} must be a table, [search], not {table!r}")
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            for name, option in value.items():
                flat[f"{key}.{name}"] = option
        else:
            flat[key] = value
    return flat


def _show(content: dict[str, Any]) -> None:
    """Print the best candidates and the default, with their accuracies on validation rows."""
    candidates = content["candidates"]
    judged = [each for each in candidates if "broken" not in each]
    judged.sort(key=lambda each: (-each["rounds"], -each["validation"], each["number"]))
    shown = judged[:SHOWN_CANDIDATES]
    default = candidates[content["default"]]
    if default not in shown:
        shown.append(default)
    names = list(content["search"])
    rows = []
    for each in shown:
        label = "default" if each is default else str(each["number"])
        values = [_format(each["settings"][name]) for name in names]
        score = each["validation"]
        percent = "broke down" if score is None else f"{100 * score:.2f}"
        rows.append([label, *values, str(each["rounds"]), percent])
    say(
        f"{content['algorithm']}: accuracy on validation rows, mean over clients and "
        f"{len(content['seeds'])} seeds, %; {content['tried']} settings tried"
    )
    print_table(["candidate", *names, "rounds", "validation"], rows)


def _show_proposals(proposals: Sequence[dict[str, Any]]) -> None:
    """Print what the theory proposes, and what that reaches on validation rows."""
    say("\nproposed by the convergence proof, trained as the last candidates were")
    rows = []
    for each in proposals:
        score = each["validation"]
        percent = "broke down" if score is None else f"{100 * score:.2f}"
        rows.append([each["name"], _format(each["lr"]), _format(each["lam"]), percent])
    print_table(["proposal", "lr", "lam", "validation"], rows)
    for each in proposals:
        say(f"{each['name']}: {each['words']}")


def _format(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
