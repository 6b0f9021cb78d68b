"""`fedproto theory`: the paper's convergence statements, measured along a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fedproto.cli.flags import PluginDir, TrustPlugins
from fedproto.cli.output import print_table, say


def theory(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="a run folder of FedProto")],
    setting: Annotated[
        str, typer.Option(help="run: as the run is; proof: plain SGD and the norm; or both")
    ] = "both",
    rounds: Annotated[int, typer.Option(help="the last round to measure")] = 5,
    first: Annotated[int, typer.Option(help="the first round to measure")] = 1,
    every: Annotated[int, typer.Option(help="measure every N-th round")] = 1,
    replays: Annotated[int, typer.Option(help="replays of each round")] = 8,
    hessian_rows: Annotated[
        int, typer.Option(help="rows per client for the largest curvature")
    ] = 32,
    out: Annotated[
        Path | None,
        typer.Option(help="folder for theory.json and theory.png [the run]", show_default=False),
    ] = None,
    trust_plugins: TrustPlugins = False,
    plugin_dir: PluginDir = None,
) -> None:
    """Measure Lemma 1, Lemma 2, Theorems 1 and 2 and Corollary 1 along a run.

    The run is trained again from its start, and each round is replayed with batches drawn with
    replacement before it is trained. The folder gets theory.json and theory.png.
    """
    from fedproto.errors import need, unknown
    from fedproto.theory.along_run import SETTINGS, TheoryOptions, measure_folder
    from fedproto.theory.files import write_theory
    from fedproto.theory.measured_round import MeasureOptions
    from fedproto.theory.words import CAVEAT, HEADERS, SETTING_TITLES, explain, list_rows

    if setting not in (*SETTINGS, "both"):
        raise unknown("setting", setting, (*SETTINGS, "both"))
    need("matplotlib", "'.[plots]'", "the figure of the theory")
    options = TheoryOptions(
        rounds=rounds,
        first=first,
        every=every,
        settings=SETTINGS if setting == "both" else (setting,),
        measure=MeasureOptions(replays=replays, hessian_rows=hessian_rows),
    )
    content = measure_folder(run, options, _announce)
    from fedproto.plots.theory import save_theory

    titled = {SETTING_TITLES[name]: each for name, each in content["settings"].items()}
    target = out or run
    write_theory(target, content, save_theory(titled))
    for title, each in titled.items():
        say(f"\n{title}: η = {each['eta']:g}, λ = {each['lam']:g}", style="bold")
        print_table(HEADERS, list_rows(each["summary"]))
        for sentence in [*explain(each), *each["departures"]]:
            say(f"- {sentence}")
    say(f"\n{CAVEAT}")
    say(f"written to {target}: theory.json, theory.png")


def _announce(setting: str, record: dict[str, Any]) -> None:
    """Say that a round was measured, and how long it took."""
    seconds = sum(record["seconds"].values())
    say(f"{setting}, round {record['round']}: {seconds:.1f} s", stderr=True)
