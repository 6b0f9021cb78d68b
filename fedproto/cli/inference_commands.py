"""`fedproto predict` and `fedproto export`, which use a trained client."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fedproto.cli.flags import PluginDir, TrustPlugins
from fedproto.cli.output import print_json_lines, print_table, say
from fedproto.errors import ConfigError, DataError

if TYPE_CHECKING:
    from fedproto.inference.input_files import Input
    from fedproto.inference.judgement import Judgement
    from fedproto.inference.open_set import Rejection
    from fedproto.inference.trained_client import TrainedClient

#: Clients that one sentence names.
MAX_NAMED_CLIENTS = 50
#: The fraction of known inputs that may be rejected where the user names none.
DEFAULT_REJECT = 0.05

Way = Literal["prototype", "head"]
Among = Literal["all", "own"]
Run = Annotated[
    Path, typer.Argument(help="a run folder, an exported one, or a deployed member's TOML file")
]


# --- predict


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
        str | None,
        typer.Option(metavar="NAME", help="client whose model classifies: name or number [0]"),
    ] = None,
    by: Annotated[
        Literal["prototype", "head", "both"],
        typer.Option(help="the nearest prototype, the client's head, or both"),
    ] = "both",
    among: Annotated[
        Among, typer.Option(help="the federation's classes, or the client's own")
    ] = "all",
    top: Annotated[int, typer.Option(help="number of classes to show", min=1)] = 1,
    reject: Annotated[
        float | None,
        typer.Option(
            help='answer "none of these", rejecting this fraction of known inputs', min=0, max=1
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="one line of JSON per input")] = False,
    trust_plugins: TrustPlugins = False,
    plugin_dir: PluginDir = None,
) -> None:
    """Classify inputs; without any, show how well each client recognises unseen classes."""
    if not inputs:
        _refuse_without_inputs(run)
        wanted = DEFAULT_REJECT if reject is None else reject
        _show_rejections(run, client, wanted, json)
        return
    trained = _read_trained(run, client)
    ways: list[Way]
    if by != "both":
        ways = [by]
    elif trained.prototypes is None:
        ways = ["head"]
    else:
        ways = ["prototype", "head"]
    read = _read_inputs(inputs, trained)
    answers: list[dict[str, Any]] = [{"input": each.name} for each in read]
    for way in ways:
        found = _classify(trained, way, among, reject, top, read)
        for answer, of_this_way in zip(answers, found, strict=True):
            answer[way] = of_this_way
    if json:
        print_json_lines(answers)
    else:
        _print_answers(answers, ways)


def _read_trained(run: Path, client: str | None) -> TrainedClient:
    """Read a trained client from a run folder, an exported folder or a member's TOML file.

    The latter two hold one client; another one that is asked for is refused.
    """
    from fedproto.inference.export.manifest import MANIFEST
    from fedproto.inference.export.read import read_exported
    from fedproto.inference.trained_client import load_client

    if run.suffix == ".toml" and run.is_file():
        from fedproto.deploy.member import load_trained_member
        from fedproto.deploy.settings import read_member as read_settings

        return _refuse_other_client(load_trained_member(read_settings(run)), client, run)
    if (run / MANIFEST).exists():
        return _refuse_other_client(read_exported(run), client, run)
    return load_client(run, 0 if client is None else client)


def _refuse_other_client(trained: TrainedClient, client: str | None, run: Path) -> TrainedClient:
    """Return the only client of a folder or file, unless another one is asked for."""
    from fedproto.core.class_names import normalise_name
    from fedproto.inference.judgement import name_client

    held = (trained.about.get("name"), trained.about.get("client"))
    names = {str(each) for each in held if each is not None}
    if client is not None and names and normalise_name(client) not in names:
        raise ConfigError(f"{run} holds {name_client(trained)} and no other: leave --client out")
    return trained


def _read_inputs(paths: list[Path], trained: TrainedClient) -> list[Input]:
    """Read all inputs, and say what was done to them."""
    from fedproto.inference.input_files import read_inputs

    read: list[Input] = []
    for path in paths:
        read.extend(read_inputs(path, trained.preprocessing))
    for each in read:
        for notice in each.notices:
            say(notice, stderr=True)
    return read


def _classify(
    trained: TrainedClient,
    way: Way,
    among: Among,
    reject: float | None,
    top: int,
    inputs: list[Input],
) -> list[dict[str, Any]]:
    """Return the answer of one way to classify for each input."""
    import numpy as np

    from fedproto.inference.judgement import judge_inputs

    x = trained.preprocessing.normalise(np.stack([each.x for each in inputs]))
    class_names, found = judge_inputs(trained, x, way, among, reject)
    is_finite = np.isfinite(found.distances).all(1)
    if not is_finite.all():
        first = inputs[int(np.argmin(is_finite))]
        raise DataError(f"{first.name} is out of range: the model's output for it is not finite")
    answers = []
    for row, label in enumerate(found.labels):
        candidates = _list_candidates(found, row, way, class_names, trained.own, top)
        answers.append({"label": str(label), "candidates": candidates})
    return answers


def _list_candidates(
    found: Judgement, row: int, way: Way, class_names: Sequence[str], own: Any, top: int
) -> list[dict[str, Any]]:
    """Return the `top` most probable classes of one input."""
    import numpy as np

    probabilities = found.probabilities[row]
    best_first = np.argsort(-probabilities, kind="stable")  # the first of equals, as `predict`
    candidates = []
    for column in best_first[:top]:
        name = class_names[column]
        candidate: dict[str, Any] = {"class": name, "own": name in own}
        if way == "prototype":
            candidate["distance"] = float(found.distances[row, column])
        candidate["probability"] = float(probabilities[column])
        candidates.append(candidate)
    return candidates


def _print_answers(answers: list[dict[str, Any]], ways: list[Way]) -> None:
    rows = []
    has_unseen = False
    for answer in answers:
        cells = [answer["input"]]
        for way in ways:
            cells.append(_describe_answer(answer[way]))
            candidates = answer[way]["candidates"]
            has_unseen = has_unseen or not all(candidate["own"] for candidate in candidates)
        rows.append(cells)
    print_table(["input", *(f"by {way}" for way in ways)], rows)
    if has_unseen:
        say("* the client has never seen this class itself")


def _describe_answer(answer: dict[str, Any]) -> str:
    """Write an answer as `7 at 0.41`, or as `none of these (7 at 9.13)`."""
    described = []
    for candidate in answer["candidates"]:
        name = candidate["class"]
        if not candidate["own"]:
            name += "*"
        if "distance" in candidate:
            described.append(f"{name} at {candidate['distance']:.3g}")
        else:
            described.append(f"{name} {candidate['probability']:.1%}")
    listed = ", ".join(described)
    if answer["label"] == answer["candidates"][0]["class"]:
        return listed
    return f"{answer['label']} ({listed})"


# --- predict without inputs


def _refuse_without_inputs(run: Path) -> None:
    """Refuse a member's file or an exported folder, whose test rows of others are not there."""
    from fedproto.inference.export.manifest import MANIFEST

    is_member = run.suffix == ".toml" and run.is_file()
    if is_member or (run / MANIFEST).exists():
        raise DataError(
            f"there is nothing to classify: name an image or another input after {run} "
            "(without inputs, predict measures the clients of a run, which needs a run folder)"
        )


def _show_rejections(run: Path, client: str | None, reject: float, json: bool) -> None:
    """Print how many known and unseen test rows the clients of a run reject."""
    from fedproto.inference.open_set import measure_rejections

    found = measure_rejections(run, reject, None if client is None else [client])
    if not found:
        raise DataError(
            f"{run} has no test rows of classes that its clients never saw, "
            "so there is nothing to show"
        )
    _name_clients_that_cannot_reject(found, reject)
    if json:
        print_json_lines([vars(each) for each in found])
        return
    headers = (
        "classified by",
        "clients",
        "accuracy",
        "known rejected",
        "unseen rejected",
        "AUROC, unseen",
    )
    by_way: dict[str, list[Rejection]] = {}
    for each in found:
        by_way.setdefault(each.way, []).append(each)
    rows = []
    for way, of_way in by_way.items():
        row = [
            way,
            str(len(of_way)),
            _mean_of(of_way, "accuracy", ".1%"),
            _mean_of(of_way, "known_rejected", ".1%"),
            _mean_of(of_way, "unseen_rejected", ".1%"),
            _mean_of(of_way, "auroc", ".3f"),
        ]
        rows.append(row)
    print_table(headers, rows)
    say(
        f"means over clients; rejecting {reject:.0%} of known rows was asked for, "
        "by test rows not counted here"
    )


def _mean_of(found: list[Rejection], column: str, form: str) -> str:
    """Return the mean over the clients that have a value, or a dash where none has."""
    all_values = [getattr(each, column) for each in found]
    values = [value for value in all_values if value is not None]
    if not values:
        return "–"
    return format(sum(values) / len(values), form)


def _name_clients_that_cannot_reject(found: list[Rejection], reject: float) -> None:
    """Name the clients that have too few rows for calibration, in one sentence."""
    from fedproto.inference.calibration import count_rows_needed

    clients = {each.name for each in found}
    images = {each.name: each.calibrated_on for each in found if each.known_rejected is None}
    if not images:
        return
    described = [f"{client} ({count})" for client, count in images.items()]
    listed = ", ".join(described[:MAX_NAMED_CLIENTS])
    if len(described) > MAX_NAMED_CLIENTS:
        listed += f" and {len(described) - MAX_NAMED_CLIENTS} others"
    say(
        f"{len(images)} of {len(clients)} clients cannot reject {reject:g} of known rows, "
        f"which needs {count_rows_needed(reject)} held-out rows, and are left out of the "
        f"fractions rejected; each with the rows it has: {listed}",
        stderr=True,
    )


# --- export


def export(
    run: Run,
    to: Annotated[Path, typer.Option(help="a new or empty folder")],
    client: Annotated[
        str | None, typer.Option(metavar="NAME", help="name or number of the client [0]")
    ] = None,
    onnx: Annotated[
        bool, typer.Option(help="write model.onnx, too (needs pip install '.[onnx]')")
    ] = True,
    trust_plugins: TrustPlugins = False,
    plugin_dir: PluginDir = None,
) -> None:
    """Write a client as a folder that needs neither the run nor its data.

    The folder holds weights, prototypes, preprocessing and an ONNX model.
    """
    from fedproto.data.shared.feature_encoding import ENCODING
    from fedproto.inference.export.manifest import MANIFEST
    from fedproto.inference.export.write import explain_missing_thresholds, export_client

    trained = _read_trained(run, client)
    export_client(trained, to, onnx)
    obstacle = explain_missing_thresholds(trained)
    if obstacle is not None:
        say(f"{obstacle}: {to / MANIFEST} states no threshold", stderr=True)
    encoding = trained.preprocessing.encoding
    if encoding is not None:
        say(f"{to / ENCODING} {encoding.disclosure}: read it before you hand it on", stderr=True)
    say(f"written to {to}")
