"""The commands for a trained federation: classify, join, come and go, export."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from fedproto.cli.output import PluginDir, TrustPlugins, execute, print_table, say, show
from fedproto.errors import DataError

if TYPE_CHECKING:
    from fedproto.inference.input_files import Input
    from fedproto.inference.open_set import Rejection
    from fedproto.inference.trained_client import Trained
    from fedproto.membership.join import Epoch

MOST_NAMED = 50  # clients in one sentence
Ways = Literal["prototype", "head", "both"]
Run = Annotated[
    Path, typer.Argument(help="a run folder, an exported one, or a deployed member's TOML file")
]


def predict(
    run: Run,
    inputs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[INPUT]...",
            help="images, tables, texts, .npy or .npz arrays, or folders of them",
        ),
    ] = None,
    client: Annotated[
        int | None, typer.Option(help="whose model classifies [0]", show_default=False)
    ] = None,
    by: Annotated[
        Ways, typer.Option(help="the nearest prototype, the client's head, or both")
    ] = "both",
    among: Annotated[
        Literal["all", "own"], typer.Option(help="the federation's classes, or the client's own")
    ] = "all",
    top: Annotated[int, typer.Option(help="show so many classes", min=1)] = 1,
    reject: Annotated[
        float | None,
        typer.Option(
            help='"none of these" at the cost of this share of known inputs', min=0, max=1
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="a line of JSON an input")] = False,
    trust_plugins: TrustPlugins = False,
    plugin_dir: PluginDir = None,
) -> None:
    """Classify inputs by name; without any, show how well each client tells what it never saw."""
    if not inputs:
        _show_rejections(run, client, 0.05 if reject is None else reject, json)
        return
    from fedproto.inference.input_files import read_inputs

    member = _member(run, 0 if client is None else client)
    both = ("head",) if member.prototypes is None else ("prototype", "head")
    ways = both if by == "both" else (by,)
    found = [each for path in inputs for each in read_inputs(path, member.preparation)]
    for notice in (notice for each in found for notice in each.notices):
        say(notice, stderr=True)
    columns = {way: _answers(member, way, among, reject, top, found) for way in ways}
    answers = [
        {"input": each.name, **{way: columns[way][row] for way in ways}}
        for row, each in enumerate(found)
    ]
    _print_json(answers) if json else _print_answers(answers, list(ways))


def _member(run: Path, client: int) -> Trained:
    from fedproto.inference.export import MANIFEST, read_member
    from fedproto.inference.trained_client import member_of

    if run.suffix == ".toml" and run.is_file():
        from fedproto.deploy.member import load_trained_member
        from fedproto.deploy.settings import read_member as read_settings

        return load_trained_member(read_settings(run))
    return read_member(run) if (run / MANIFEST).exists() else member_of(run, client)


def _answers(
    member: Trained, way: str, among: Any, reject: float | None, top: int, inputs: list[Input]
) -> list[dict[str, Any]]:
    """What one way to classify says of each input."""
    import numpy as np

    from fedproto.inference.classifier import Classifier

    classifier = Classifier.from_member(member, by=way, among=among, reject=reject)  # type: ignore[arg-type]
    found = classifier.judge(member.preparation.normalised(np.stack([each.x for each in inputs])))
    beyond = np.flatnonzero(~np.isfinite(found.distances).all(1))
    if len(beyond):
        raise DataError(
            f"{inputs[beyond[0]].name} is beyond all measure: what the model makes of it is not finite"
        )
    names, own = classifier.classes_, set(member.own)
    answers = []
    for label, shares, apart in zip(found.labels, found.shares, found.distances, strict=True):
        candidates = []
        for place in np.argsort(-shares, kind="stable")[
            :top
        ]:  # of equals the first, as in `predict`
            distance = {"distance": float(apart[place])} if way == "prototype" else {}
            name = str(names[place])
            candidates.append(
                {"class": name, "own": name in own, **distance, "probability": float(shares[place])}
            )
        answers.append({"label": str(label), "candidates": candidates})
    return answers


def _print_json(answers: list[dict[str, Any]]) -> None:
    from json import dumps

    for answer in answers:
        typer.echo(dumps(answer))


def _print_answers(answers: list[dict[str, Any]], ways: list[str]) -> None:
    headers = ["input", *(f"by {way}" for way in ways)]
    print_table(
        headers, [[answer["input"], *(_told(answer[way]) for way in ways)] for answer in answers]
    )
    if any(not c["own"] for answer in answers for way in ways for c in answer[way]["candidates"]):
        say("* the client has never seen this class itself")


def _told(found: dict[str, Any]) -> str:
    """`7 at 0.41`, or `none of these (7 at 9.13)`."""
    parts = []
    for each in found["candidates"]:
        near = f"at {each['distance']:.3g}" if "distance" in each else f"{each['probability']:.1%}"
        parts.append(f"{each['class']}{'' if each['own'] else '*'} {near}")
    told = ", ".join(parts)
    return (
        told if found["label"] == found["candidates"][0]["class"] else f"{found['label']} ({told})"
    )


def _show_rejections(run: Path, client: int | None, reject: float, json: bool) -> None:
    from fedproto.inference.open_set import rejections

    found = rejections(run, reject, None if client is None else [client])
    if not found:
        raise DataError(
            f"{run} has no test images of classes that its clients never saw, so there is nothing to show"
        )
    _say_who_cannot_reject(found, reject)
    if json:
        _print_json([vars(each) for each in found])
        return
    headers = (
        "classified by",
        "clients",
        "accuracy",
        "known rejected",
        "unseen rejected",
        "AUROC, unseen",
    )
    rows = []
    for way in dict.fromkeys(each.way for each in found):
        some = [each for each in found if each.way == way]
        columns = ("accuracy", "known_rejected", "unseen_rejected")
        shares = [_mean_of(some, column, ".1%") for column in columns]
        rows.append([way, str(len(some)), *shares, _mean_of(some, "auroc", ".3f")])
    print_table(headers, rows)
    say(
        f"means over clients; rejecting {reject:.0%} of known images was asked for, by test images not counted here"
    )


def _mean_of(found: list[Rejection], column: str, form: str) -> str:
    """The mean over the clients that have a value; a dash where none has."""
    values = [getattr(each, column) for each in found if getattr(each, column) is not None]
    return format(sum(values) / len(values), form) if values else "–"


def _say_who_cannot_reject(found: list[Rejection], reject: float) -> None:
    """One sentence that names the clients whose calibration is too small."""
    from fedproto.inference.trained_client import rows_needed

    rows = {each.client: each.calibrated_on for each in found if each.known_rejected is None}
    if not rows:
        return
    named = ", ".join(f"{client} ({count})" for client, count in islice(rows.items(), MOST_NAMED))
    others = f" and {len(rows) - MOST_NAMED} others" if len(rows) > MOST_NAMED else ""
    say(
        f"{len(rows)} of {len({each.client for each in found})} clients cannot reject {reject:g} of known images, "
        f"which needs {rows_needed(reject)} held-out images, and are left out of the shares rejected; "
        f"each with the images it has: {named}{others}",
        stderr=True,
    )


def join(
    prototypes: Annotated[
        Path, typer.Option(help="the federation's: a run folder, or a file of one")
    ],
    data: Annotated[
        str, typer.Option(metavar="NAME", help="the newcomer's: mnist5k, folder:PATH, ...")
    ],
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="any architecture [the data set's]")
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(help="a file for the model's body [drawn]")
    ] = None,
    classes: Annotated[
        str, typer.Option(help="those it has, with commas [all]", show_default=False)
    ] = "",
    shots: Annotated[
        int | None, typer.Option(help="images of each [all]", min=1, show_default=False)
    ] = None,
    epochs: Annotated[int, typer.Option(min=1)] = 10,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto")] = "auto",
    data_dir: Annotated[
        str | None, typer.Option(help="where data files lie [$FEDPROTO_DATA]")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="of the member [the folder's]", show_default=False)
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
    """Train a newcomer beside a federation's prototypes, which stay as they are, and alone for comparison."""
    from fedproto.cli.console import progress_bar
    from fedproto.config.settings import read_assignment
    from fedproto.membership.join import notices, prepare, proceed
    from fedproto.runs.experiment import Interrupted
    from fedproto.runs.folder import RunFolder

    target = out or Path("runs") / "newcomer"
    RunFolder.refuse_used(target)
    options = {"seed": seed, "device": device, "data_dir": data_dir} | dict(
        map(read_assignment, assign or [])
    )
    prepared = prepare(
        prototypes,
        data,
        model=model,
        weights=weights,
        classes=classes,
        shots=shots,
        epochs=epochs,
        options=options,
    )
    for notice in notices(prepared[0]):
        say(notice, stderr=True)
    try:
        joined = proceed(
            prepared,
            target,
            name or target.name,
            lambda who: progress_bar(Console(), who, 0, epochs),
        )
    except Interrupted:
        again = (
            f"continue with: fedproto resume {target}" if target.exists() else "nothing was written"
        )
        say(f"stopped; {again}", stderr=True)
        raise typer.Exit(130) from None
    _print_epochs(joined.epochs)
    say(f"written to {target}; fold it in with: fedproto members {prototypes} --add {target}")


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
    for each in epochs:
        head, alone = each.joined["head"], each.alone["head"]
        near, own = each.joined["prototype"], each.joined["prototype_own"]
        rows.append(
            [
                str(each.epoch),
                f"{head:.1%}",
                f"{alone:.1%}",
                f"{head - alone:+.1%}",
                f"{near:.1%}",
                f"{own:.1%}",
            ]
        )
    print_table(headers, rows)


def members(
    run: Annotated[Path, typer.Argument(help="a finished run of fedproto")],
    add: Annotated[
        list[Path] | None, typer.Option(help="fold in a newcomer: its folder, or its upload")
    ] = None,
    remove: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="take a member's share out")
    ] = None,
    trust_plugins: TrustPlugins = False,
    plugin_dir: PluginDir = None,
) -> None:
    """Show who makes up a federation's prototypes; let members join and leave."""
    from fedproto.membership.contribution import Contribution
    from fedproto.membership.membership import Membership
    from fedproto.runs.folder import RunFolder

    folder = RunFolder.open(run)
    with folder.hold() if add or remove else nullcontext():
        bank = Membership.of(folder)
        for name in remove or []:
            bank = bank.without(name)
        for path in add or []:
            bank = bank.with_member(Contribution.load(path))
        for notice in bank.notices():
            say(notice, stderr=True)
        if add or remove:
            bank.save(folder)
    print_table(
        ("member", "classes"), [(name, ", ".join(bank.held_by(name))) for name in bank.members]
    )
    for change in bank.changes:
        what = {"joined": "brought", "left": "took along"}[change["did"]]
        classes = f", and {what} {', '.join(change['classes'])}" if change["classes"] else ""
        say(f"{change['member']} {change['did']}{classes}")


def extend(
    run: Annotated[Path, typer.Argument(help="a finished run of fedproto")],
    newcomers: Annotated[
        list[Path] | None, typer.Argument(metavar="[NEWCOMER]...", help="folders of join")
    ] = None,
    rounds: Annotated[int, typer.Option(help="more rounds", min=1)] = 10,
    out: Annotated[
        Path | None, typer.Option(help="the run folder [RUN-extended]", show_default=False)
    ] = None,
    trust_plugins: TrustPlugins = False,
    plugin_dir: PluginDir = None,
) -> None:
    """Go on training a federation together with its newcomers, and without those who left."""
    from fedproto.membership.extend import extend as prepare

    target = out or run.with_name(f"{run.name}-extended")
    experiment, folder = prepare(run, newcomers or [], target, rounds)
    for notice in experiment.notices:
        say(notice, stderr=True)
    show([execute(experiment, folder, target)], [experiment.algorithm.name])
    say(f"written to {target}")


def export(
    run: Run,
    to: Annotated[Path, typer.Option(help="a new or empty folder")],
    client: Annotated[int, typer.Option(help="which one", min=0)] = 0,
    onnx: Annotated[bool, typer.Option(help="write model.onnx, too (needs fedproto[onnx])")] = True,
    trust_plugins: TrustPlugins = False,
    plugin_dir: PluginDir = None,
) -> None:
    """Write a client as a folder that needs neither the run nor its data: weights, prototypes, preprocessing, ONNX."""
    from fedproto.data.shared.feature_encoding import ENCODING
    from fedproto.inference.export import MANIFEST, why_not_rejecting_of, write_member

    member = _member(run, client)
    write_member(member, to, onnx)
    obstacle = why_not_rejecting_of(member)
    if obstacle is not None:
        say(f"{obstacle}: {to / MANIFEST} states no threshold", stderr=True)
    if member.preparation.encoding is not None:
        say(
            f"{to / ENCODING} {member.preparation.encoding.tells}: read it before you hand it on",
            stderr=True,
        )
    say(f"written to {to}")
