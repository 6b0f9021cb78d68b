"""`fedproto predict` and `fedproto export`, which use a trained client."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fedproto.cli.flags import PluginDir, TrustPlugins
from fedproto.cli.output import print_json_lines, print_table, say
from fedproto.errors import ConfigError, DataError
from fedproto.inference.ways import Among, By

if TYPE_CHECKING:
    from fedproto.inference.labelled_inputs import LabelledInput
    from fedproto.inference.open_set import Rejection
    from fedproto.inference.predictions import Predictor
    from fedproto.inference.trained_client import TrainedClient

#: Clients that one sentence names.
MAX_NAMED_CLIENTS = 50
#: Metrics beside the accuracy that a scored prediction shows, and their titles.
SCORES = {
    "balanced_accuracy": "balanced accuracy",
    "macro_f1": "macro-F1",
    "auroc": "AUROC",
    "ece": "calibration error",
}
#: A shown distance below this is that of equal inputs, up to rounding.
ZERO_DISTANCE = 1e-5
#: The fraction of known inputs that may be rejected where the user names none.
DEFAULT_REJECT = 0.05

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
        typer.Option(
            metavar="NAME",
            help="client whose model classifies: name or number [the most experienced]",
        ),
    ] = None,
    by: Annotated[
        By,
        typer.Option(
            help="the nearest prototype, the client's head, the run's teacher, or sums of them; "
            "both: all of these"
        ),
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
    why: Annotated[
        bool,
        typer.Option(
            "--why", help="show the nearest prototypes and the client's nearest training rows"
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="write the answers to this .csv or .parquet file", show_default=False),
    ] = None,
    id_column: Annotated[
        str | None,
        typer.Option("--id", metavar="COLUMN", help="column with the ids of rows [their places]"),
    ] = None,
    label_column: Annotated[
        str | None,
        typer.Option("--label", metavar="COLUMN", help="column with the true classes [found]"),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="one line of JSON per input")] = False,
    trust_plugins: TrustPlugins = False,
    plugin_dir: PluginDir = None,
) -> None:
    """Classify inputs; without any, show how well each client recognises unseen classes.

    Inputs whose true class is stated are scored. A file that cannot be read is skipped, and the
    exit code is 1.
    """
    from fedproto.inference.predictions import Predictor, check_answer_path, write_answers
    from fedproto.inference.reasons import DEFAULT_COUNT, Explainer

    if not inputs:
        _refuse_without_inputs(run)
        if why:
            raise ConfigError("--why gives the reasons of answers: name an input to classify")
        wanted = DEFAULT_REJECT if reject is None else reject
        _show_rejections(run, client, wanted, json)
        return
    if out is not None:
        check_answer_path(out)
    trained = _read_trained(run, client)
    ways: list[By] = trained.list_ways() if by == "both" else [by]
    explainer = Explainer.of(trained, among, max(top, DEFAULT_COUNT)) if why else None
    predictor = Predictor(trained, ways, among, reject, top, explainer)
    skipped = _classify_files(predictor, inputs, label_column, id_column)
    if out is not None:
        write_answers(out, predictor.answers, ways)
        say(f"{len(predictor.answers):,} answers were written to {out}", stderr=json)
    if json:
        print_json_lines(predictor.answers)
    elif out is None:
        _print_answers(predictor.answers, ways)
        if why:
            _print_reasons(predictor.answers, trained)
        _explain_marks(predictor.answers, ways)
    if explainer is not None and explainer.missing is not None:
        say(f"no training rows are shown: {explainer.missing}", stderr=True)
    if client is None and not json:
        _name_classifier(trained)
    _print_scores(predictor, stderr=json)
    if skipped:
        files = "1 file" if skipped == 1 else f"{skipped:,} files"
        were = "was" if skipped == 1 else "were"
        say(f"{files} could not be read and {were} skipped", stderr=True)
        raise typer.Exit(1)


def _classify_files(
    predictor: Predictor, paths: list[Path], label_column: str | None, id_column: str | None
) -> int:
    """Classify all files, say what was done to them, and return how many cannot be read.

    Refused if none can.
    """
    from fedproto.cli.progress import file_bar
    from fedproto.inference.labelled_inputs import find_input_files, read_labelled_file
    from fedproto.inference.predictions import INPUTS_PER_CHUNK

    files = find_input_files(paths, predictor.classes)
    pending: list[LabelledInput] = []
    label_columns: set[str] = set()
    errors: list[DataError] = []
    with file_bar(Console(stderr=True), len(files)) as advance:
        for file in files:
            try:
                read = read_labelled_file(
                    file,
                    predictor.trained.preprocessing,
                    predictor.classes,
                    label_column=label_column,
                    id_column=id_column,
                )
            except DataError as error:
                if len(files) == 1:
                    raise
                errors.append(error)
                say(f"skipped: {error}", stderr=True)
                advance()
                continue
            for each in read.inputs:
                for notice in each.input.notices:
                    say(notice, stderr=True)
            pending += read.inputs
            if read.label_column is not None:
                label_columns.add(read.label_column)
            if len(pending) >= INPUTS_PER_CHUNK:
                predictor.add(pending)
                pending = []
            advance()
    predictor.add(pending)
    if not predictor.answers:
        raise DataError(f"none of the {len(files):,} files can be read: {errors[0]}")
    for column in sorted(label_columns):
        say(f"the true classes are those in column {column!r}", stderr=True)
    return len(errors)


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
    return load_client(run, client)


def _refuse_other_client(trained: TrainedClient, client: str | None, run: Path) -> TrainedClient:
    """Return the only client of a folder or file, unless another one is asked for."""
    from fedproto.core.class_names import normalise_name
    from fedproto.inference.judgement import name_client

    held = (trained.about.get("name"), trained.about.get("client"))
    names = {str(each) for each in held if each is not None}
    if client is not None and names and normalise_name(client) not in names:
        raise ConfigError(f"{run} holds {name_client(trained)} and no other: leave --client out")
    return trained


def _print_answers(answers: list[dict[str, Any]], ways: list[By]) -> None:
    rows = []
    for answer in answers:
        cells = [answer.get("id", answer["input"])]
        cells += [_describe_answer(answer[way]) for way in ways]
        rows.append(cells)
    print_table(["input", *(f"by {way}" for way in ways)], rows)


def _explain_marks(answers: list[dict[str, Any]], ways: list[By]) -> None:
    """Say what a star means, if a class that is shown has one."""
    shown: list[dict[str, Any]] = []
    for answer in answers:
        for way in ways:
            shown += answer[way]["candidates"]
        shown += answer.get("why", {}).get("prototypes", [])
    if not all(each["own"] for each in shown):
        say("* the client has never seen this class itself")


def _print_reasons(answers: list[dict[str, Any]], trained: TrainedClient) -> None:
    """Print what is near each input, a line per rank; columns that nobody fills are left out."""
    titles = {"prototypes": "prototype", "means": "mean of own rows", "rows": "training row"}
    kinds = [kind for kind in titles if kind in answers[0]["why"]]
    has_places = any("place" in row for row in answers[0]["why"].get("rows", []))
    rows = []
    for answer in answers:
        near = answer["why"]
        ranks = max((len(listed) for listed in near.values()), default=0)
        for rank in range(ranks):
            cells = [answer.get("id", answer["input"]) if rank == 0 else ""]
            cells += [_describe_near(near[kind][rank : rank + 1]) for kind in kinds]
            if has_places:
                places = [row.get("place", "") for row in near["rows"][rank : rank + 1]]
                cells.append(" ".join(places))
            rows.append(cells)
    if not rows:
        say("there are no prototypes to compare with: the probabilities are all that is known")
        return
    headers = ["near", *(titles[kind] for kind in kinds)]
    print_table([*headers, "which is"] if has_places else headers, rows)
    space = "the teacher's features" if trained.compares_fixed else "embeddings"
    say(f"L2 distances between {space}, the nearest first; training rows by number and class")


def _describe_near(listed: list[dict[str, Any]]) -> str:
    """Write a near class as `7* at 0.41`, and a near row as `row 12, 7 at 0.41`."""
    for each in listed:
        name = each["class"] if each.get("own", True) else f"{each['class']}*"
        row = f"row {each['row']}, " if "row" in each else ""
        distance = each["distance"]
        shown = "0" if distance < ZERO_DISTANCE else f"{distance:.3g}"
        return f"{row}{name} at {shown}"
    return ""


def _name_classifier(trained: TrainedClient) -> None:
    """Say which client of a run answers where the user named none."""
    from fedproto.inference.judgement import name_client

    if "run" in trained.about:
        say(
            f"{name_client(trained)} answers: nobody knows more classes "
            f"({len(trained.own)} of {len(trained.classes)}); --client names another"
        )


def _print_scores(predictor: Predictor, *, stderr: bool) -> None:
    """Print how good the answers are, if true classes are stated, and what probabilities mean."""
    measured_ways = predictor.measure()
    for way, measured in measured_ways.items():
        values = measured.values
        described = [f"accuracy {values['accuracy']:.1%}"]
        for name, title in SCORES.items():
            if math.isfinite(values[name]):
                described.append(f"{title} {values[name]:.3f}")
        say(f"by {way}, {measured.rows:,} inputs: {', '.join(described)}", stderr=stderr)
    if predictor.unknown_labels:
        say(
            f"{predictor.unknown_labels:,} inputs state a class that is not one of the "
            "federation's, and are not scored",
            stderr=True,
        )
    if measured_ways and not predictor.is_calibrated:
        say("probabilities are not calibrated: train with --validation 0.2", stderr=stderr)


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
        str | None,
        typer.Option(metavar="NAME", help="name or number of the client [the most experienced]"),
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
    from fedproto.inference.judgement import name_client

    trained = _read_trained(run, client)
    for notice in export_client(trained, to, onnx):
        say(notice, stderr=True)
    obstacle = explain_missing_thresholds(trained)
    if obstacle is not None:
        say(f"{obstacle}: {to / MANIFEST} states no threshold", stderr=True)
    encoding = trained.preprocessing.encoding
    if encoding is not None:
        say(f"{to / ENCODING} {encoding.disclosure}: read it before you hand it on", stderr=True)
    say(f"{name_client(trained)} written to {to}")
