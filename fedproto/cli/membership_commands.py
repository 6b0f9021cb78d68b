"""`fedproto join`, `fedproto members` and `fedproto extend`: clients that come and go."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from fedproto.cli.flags import PluginDir, TrustPlugins
from fedproto.cli.output import execute, print_table, say, show_results

#: Steps of training below which a newcomer is told to train longer.
FEW_STEPS = 200

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from fedproto.membership.join import Epoch
    from fedproto.runs.execution import OnRound


def join(
    prototypes: Annotated[
        Path, typer.Option(help="the federation's prototypes: a run folder, or a file of one")
    ],
    data: Annotated[
        str, typer.Option(metavar="NAME", help="the newcomer's data: mnist5k, folder:PATH, ...")
    ],
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="any architecture [the data set's]")
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(help="a file with weights of the model's body [random]")
    ] = None,
    classes: Annotated[
        str,
        typer.Option(help="the newcomer's classes, separated by commas [all]", show_default=False),
    ] = "",
    shots: Annotated[
        int | None, typer.Option(help="rows per class [all]", min=1, show_default=False)
    ] = None,
    epochs: Annotated[int, typer.Option(help="epochs of training", min=1)] = 10,
    seed: Annotated[int, typer.Option(help="seed of weights, shuffles and samples", min=0)] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto")] = "auto",
    data_dir: Annotated[
        str | None, typer.Option(help="folder with data files [$FEDPROTO_DATA]")
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(help="the newcomer's name [its data's or folder's]", show_default=False),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="the newcomer's run folder [runs/newcomer]")
    ] = None,
    assign: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="as for run: lam=0.1")
    ] = None,
    trust_plugins: TrustPlugins = False,
    plugin_dir: PluginDir = None,
) -> None:
    """Train a newcomer with a federation's fixed prototypes, and alone for comparison."""
    from fedproto.cli.progress import progress_bar
    from fedproto.config.settings import read_assignment
    from fedproto.membership.join import notices, prepare, proceed
    from fedproto.runs.execution import Interrupted
    from fedproto.runs.folder import RunFolder

    target = out or Path("runs") / "newcomer"
    RunFolder.refuse_used(target)
    options = {"seed": seed, "device": device, "data_dir": data_dir}
    for text in assign or []:
        key, value = read_assignment(text)
        options[key] = value
    prepared = prepare(
        prototypes,
        data,
        model=model,
        weights=weights,
        classes=classes,
        shots=shots,
        epochs=epochs,
        name=name,
        folder_name=target.name,
        options=options,
    )
    for notice in notices(prepared[0]):
        say(notice, stderr=True)

    def bar(run_name: str) -> AbstractContextManager[OnRound]:
        return progress_bar(Console(), run_name, 0, epochs, unit="epoch")

    try:
        joined = proceed(prepared, target, bar)
    except Interrupted:
        if target.exists():
            say(f"stopped; continue with: fedproto resume {target}", stderr=True)
        else:
            say("stopped; nothing was written", stderr=True)
        raise typer.Exit(130) from None
    _print_epochs(joined.epochs)
    newcomer = prepared[0].federation.members[0]
    say(f"{joined.gain.describe()}; other weights at the start would differ, too: try --seed")
    steps = epochs * math.ceil(len(newcomer.train) / prepared[0].config.batch)
    if steps < FEW_STEPS:
        say(
            f"{len(newcomer.train)} training rows in {epochs} epochs are about {steps} steps of "
            "training: with so few, try more epochs or a larger lr, "
            "as in --epochs 50 --set lr=0.05"
        )
    say(f"written to {target}; {_say_how_to_add(prototypes, target)}")


def _say_how_to_add(prototypes: Path, target: Path) -> str:
    """Return what to do with the upload; only from a run folder is the federation's run known."""
    from fedproto.runs.prototype_files import UPLOAD

    if (prototypes / "config.toml").exists():
        return f"fold it in with: fedproto members {prototypes} --add {target}"
    return (
        f"send {target / UPLOAD} to the federation's server, which folds it in with: "
        f"fedproto members RUN --add {UPLOAD}"
    )


def _print_epochs(epochs: list[Epoch]) -> None:
    headers = (
        "epoch",
        "head, joined",
        "head, alone",
        "difference",
        "prototype, joined",
        "prototype, own classes",
    )
    rows = []
    for epoch in epochs:
        head_joined = epoch.joined["head"]
        head_alone = epoch.alone["head"]
        row = [
            str(epoch.epoch),
            f"{head_joined:.1%}",
            f"{head_alone:.1%}",
            f"{head_joined - head_alone:+.1%}",
            f"{epoch.joined['prototype']:.1%}",
            f"{epoch.joined['prototype_own']:.1%}",
        ]
        rows.append(row)
    print_table(headers, rows)


def members(
    run: Annotated[Path, typer.Argument(help="a finished run of fedproto")],
    add: Annotated[
        list[Path] | None, typer.Option(help="fold in a newcomer: its folder, or its upload")
    ] = None,
    remove: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="remove the member with this name in the table"),
    ] = None,
    write: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="write the global prototypes, and nothing else, to a new file for a newcomer",
        ),
    ] = None,
    trust_plugins: TrustPlugins = False,
    plugin_dir: PluginDir = None,
) -> None:
    """Show who contributed to a federation's prototypes; let members join and leave."""
    from fedproto.membership.api import (
        change_members,
        list_notices,
        refuse_target,
        write_global_prototypes,
    )

    if write is not None:
        refuse_target(write, run)
    membership = change_members(run, add or [], remove or [])
    for notice in list_notices(run, membership):
        say(notice, stderr=True)
    rows = [(name, ", ".join(membership.held_by(name))) for name in membership.members]
    print_table(("member", "classes"), rows)
    if membership.changes:
        say("History:")
    for change in membership.changes:
        sentence = f"{change['member']} {change['did']}"
        if change["classes"]:
            verb = "brought" if change["did"] == "joined" else "took along"
            sentence += f", and {verb} {', '.join(change['classes'])}"
        say(sentence)
    if write is not None:
        write_global_prototypes(run, write)
        say(
            f"the global prototypes are in {write}; "
            f"a newcomer runs: fedproto join --prototypes {write}"
        )


def extend(
    run: Annotated[Path, typer.Argument(help="a finished run of fedproto")],
    newcomers: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[NEWCOMER]...", help="run folders of `fedproto join`"),
    ] = None,
    rounds: Annotated[int, typer.Option(help="number of further rounds", min=1)] = 10,
    out: Annotated[
        Path | None, typer.Option(help="the run folder [RUN-extended]", show_default=False)
    ] = None,
    trust_plugins: TrustPlugins = False,
    plugin_dir: PluginDir = None,
) -> None:
    """Continue to train a federation with its newcomers, and without members that left."""
    from fedproto.membership.extend import extend as prepare

    target = out or run.with_name(f"{run.name}-extended")
    experiment, folder = prepare(run, newcomers or [], target, rounds)
    for notice in experiment.notices:
        say(notice, stderr=True)
    result = execute(experiment, folder, resumable=target)
    show_results([result], [experiment.algorithm.name])
    say(f"written to {target}")
