"""A newcomer joins a trained federation: it learns beside the federation's prototypes, which stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedproto.config import plugins
from fedproto.config.options import Part
from fedproto.config.settings import configure
from fedproto.core.class_names import describe_similar_names
from fedproto.core.rounds import RoundResult
from fedproto.data import Source
from fedproto.errors import ConfigError
from fedproto.membership.contribution import Contribution
from fedproto.runs.experiment import Experiment, OnRound, hold_all
from fedproto.runs.folder import RunFolder
from fedproto.runs.prototype_files import UPLOAD, read_prototypes
from fedproto.runs.result import Result

Accuracies = dict[str, float]

#: Settings that are a newcomer's by being one.
SETTLED = {
    "absent",
    "algorithm",
    "clients",
    "dataset",
    "lost_uploads",
    "eval_every",
    "fixed",
    "initial",
    "model",
}
SETTLED |= {"participation", "profile", "prototypes", "rounds", "stragglers"}


@dataclass(frozen=True)
class Epoch:
    """Test accuracies after an epoch; epoch 0 is before any training."""

    epoch: int
    joined: Accuracies
    alone: Accuracies


@dataclass(frozen=True)
class Joined:
    """What a newcomer found: `result` is its run's; `upload` is what a server can fold in."""

    result: Result
    epochs: list[Epoch]
    upload: Contribution


def prepare(
    prototypes: str | Path,
    dataset: str,
    *,
    model: str | None,
    weights: str | Path | None,
    classes: str,
    shots: int | None,
    epochs: int,
    options: Mapping[str, Any],
) -> tuple[Experiment, Experiment]:
    """The newcomer about to join, and the same one about to train alone, from the same start."""
    for key in options:
        if key.removeprefix("algorithm.") in SETTLED or key.partition(".")[0] == "partition":
            raise ConfigError(
                f"{key!r} has no meaning for one who joins: a newcomer is one client of fedproto's"
            )
    weighting = read_prototypes(Path(prototypes)).weighting
    settings = {
        "dataset": dataset,
        "model": model,
        "partition": str(
            Part("classes", {"names": classes, "shots": shots} if classes or shots else {})
        ),
        "clients": 1,
        "rounds": epochs,
        "eval_every": 1,
        "start": "own",  # a newcomer does not know what weights the others began with, which would align it by itself
        "prototypes": str(prototypes),
        "initial": None if weights is None else str(weights),
        "algorithm": "fedproto",
        "algorithm.fixed": True,
        "algorithm.weighting": weighting,
    }
    settings |= options
    plugins.trust_chosen(settings)
    loaded: dict[str, Source] = {}
    joined, alone = (configure(settings | extra)[0] for extra in ({}, {"algorithm.lam": 0}))
    return Experiment.prepare(joined, loaded=loaded), Experiment.prepare(alone, loaded=loaded)


def join(
    prototypes: str | Path,
    dataset: str,
    *,
    model: str | None = None,
    weights: str | Path | None = None,
    classes: str = "",
    shots: int | None = None,
    epochs: int = 10,
    out: str | Path | None = None,
    name: str = "newcomer",
    **options: Any,
) -> Joined:
    """Let a newcomer join a trained federation, and train it alone from the same start beside that.

    `prototypes` is a run folder, or a file that one holds; `dataset` the newcomer's own data, of which it has the
    `classes` (`"cat,dog"`; all) and `shots` images of each (all); `weights` a file for the body of its model.
    `options` are those of `fedproto.run`. With `out`, the newcomer becomes a run folder with its upload in it.
    """
    prepared = prepare(
        prototypes,
        dataset,
        model=model,
        weights=weights,
        classes=classes,
        shots=shots,
        epochs=epochs,
        options=options,
    )
    return proceed(prepared, None if out is None else Path(out), name)


def proceed(
    experiments: tuple[Experiment, Experiment],
    out: Path | None,
    name: str,
    watched: Callable[[str], AbstractContextManager[OnRound]] = lambda who: nullcontext(_nobody),
) -> Joined:
    """Train, first alone and then beside the prototypes.

    FedProto with the global prototypes held fixed, Eq. 7; alone is the same with λ = 0. Epoch 0 is the nearest global
    prototype with the body as it comes: of use where that was trained before.
    """
    joining, alone = experiments
    if out is not None:
        RunFolder.refuse_used(out)
    with watched("alone") as on_round:
        _, without = _train(alone, None, on_round)
    folder = None if out is None else joining.new_folder(out)
    with hold_all([folder]):
        with watched("joined") as on_round:
            result, beside = _train(joining, folder, on_round)
        epochs = [
            Epoch(number, *both) for number, both in enumerate(zip(beside, without, strict=True))
        ]
        upload = _contribution(joining, name)
        if folder is not None:
            upload.save(folder.path / UPLOAD)
            folder.write_json(
                "join.json", {"member": name, "epochs": [vars(epoch) for epoch in epochs]}
            )
    return Joined(result, epochs, upload)


def new_classes(experiment: Experiment) -> list[str]:
    """Those of the newcomer's classes of which the federation has no prototype."""
    known, member = experiment.progress.server["known"], experiment.federation.members[0]
    return [experiment.federation.classes[label] for label in member.classes if not known[label]]


def notices(experiment: Experiment) -> list[str]:
    """What a newcomer should know before it trains: classes nobody had may be misspelt."""
    new, member = new_classes(experiment), experiment.federation.members[0]
    it = "it" if len(new) == 1 else "them"
    said = (
        [f"nobody in the federation has {', '.join(map(repr, new))}: the newcomer brings {it}"]
        if new
        else []
    )
    if len(new) == len(member.classes):
        said.append(
            "none of the newcomer's classes is known to the federation, so there is nothing to join"
        )
    return describe_similar_names(experiment.federation.classes) + said


def _train(
    experiment: Experiment, folder: RunFolder | None, on_round: OnRound
) -> tuple[Result, list[Accuracies]]:
    """To the last epoch; the accuracies before the first and after each."""
    found = [experiment.engine.evaluate([experiment.progress.server])[0]]

    def note(result: RoundResult) -> None:
        assert result.clients is not None, "every epoch is evaluated"
        found.append(result.clients)
        on_round(result)

    result = experiment.execute(folder, note)
    return result, [
        {name: float(values[0]) for name, values in clients.items()} for clients in found
    ]


def _nobody(result: RoundResult) -> None:
    """Nobody watches."""


def _contribution(experiment: Experiment, name: str) -> Contribution:
    """The newcomer's last upload, by class name."""
    upload = experiment.progress.latest_uploads.get(0)
    return Contribution.of(name, experiment.federation.classes, upload)
