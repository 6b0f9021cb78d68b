"""A newcomer joins a trained federation.

It trains with the federation's prototypes, which do not change. To show what joining is worth, the
same newcomer is trained alone, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fedproto.config import plugins
from fedproto.config.options import Part
from fedproto.config.settings import configure
from fedproto.core.class_names import describe_similar_names
from fedproto.core.client_names import chosen_name
from fedproto.core.local_training import score
from fedproto.core.metrics import mark_correct
from fedproto.core.rounds import RoundResult
from fedproto.core.types import Tree
from fedproto.data import Source
from fedproto.errors import ConfigError
from fedproto.membership.contribution import Contribution
from fedproto.membership.gain import Gain, measure_gain
from fedproto.partitions.natural import name_writer
from fedproto.runs.announcements import announce_rounds
from fedproto.runs.execution import OnRound, hold_all
from fedproto.runs.experiment import Experiment
from fedproto.runs.folder import JOIN, RunFolder
from fedproto.runs.prototype_files import UPLOAD, read_prototypes
from fedproto.runs.result import Result
from fedproto.runs.teacher_files import TEACHER_FILE

Accuracies = dict[str, float]

#: What a newcomer is called that has neither a name nor a folder.
DEFAULT_NAME = "newcomer"

#: Settings that are fixed for a newcomer, which is a single client of fedproto.
FIXED_SETTINGS = {
    "absent",
    "algorithm",
    "buffer",
    "clients",
    "combiner",
    "concurrency",
    "dataset",
    "eval_every",
    "fixed",
    "initial",
    "lost_uploads",
    "model",
    "participation",
    "patience",
    "profile",
    "prototypes",
    "rounds",
    "select_by",
    "speed_spread",
    "staleness",
    "stragglers",
    "validation",
}


@dataclass(frozen=True)
class Epoch:
    """Test accuracies after an epoch; epoch 0 is before training."""

    epoch: int
    joined: Accuracies
    alone: Accuracies


@dataclass(frozen=True)
class Joined:
    """The outcome of joining: the newcomer's run, its accuracies, and what a server can add."""

    result: Result
    epochs: list[Epoch]
    gain: Gain  # against training alone, after the last epoch
    upload: Contribution

    def __repr__(self) -> str:
        last = self.epochs[-1]
        head = f"head {last.joined['head']:.1%}, alone {last.alone['head']:.1%}"
        return f"<{self.upload.member} joined, {last.epoch} epochs: {head}>"


def prepare(
    prototypes: str | Path,
    dataset: str,
    *,
    model: str | None,
    weights: str | Path | None,
    classes: str,
    shots: int | None,
    epochs: int,
    name: str | None,
    folder_name: str | None,
    options: Mapping[str, Any],
) -> tuple[Experiment, Experiment]:
    """Return the newcomer ready to join, and the same one ready to train alone.

    Both start from the same weights. The parameters are those of `join`; a newcomer without a
    `name` is called as its data says or, failing that, by the `folder_name`.
    """
    if name is not None:
        name = chosen_name(name, "the newcomer is called")
    for key in options:
        is_fixed = key.removeprefix("algorithm.") in FIXED_SETTINGS
        if is_fixed or key.partition(".")[0] == "partition":
            raise ConfigError(
                f"{key!r} cannot be set for a newcomer, which is a single client of fedproto"
            )
    partition_options = {}
    if classes or shots:
        partition_options = {"names": classes, "shots": shots}
    settings = {
        "dataset": dataset,
        "model": model,
        "partition": str(Part("classes", partition_options)),
        "clients": 1,
        "rounds": epochs,
        "eval_every": 1,
        "validation": 0,  # every epoch is shown as it tests
        # A newcomer does not know the weights that the others started from. With these, its
        # embeddings would agree with theirs from the beginning.
        "start": "own",
        "prototypes": str(prototypes),
        "initial": None if weights is None else str(weights),
        "algorithm": "fedproto",
        "algorithm.fixed": True,
        "algorithm.weighting": read_prototypes(Path(prototypes)).weighting,
    }
    settings |= options
    plugins.trust_chosen(settings)
    loaded: dict[str, Source] = {}
    joining = configure(settings)[0]
    alone = configure(settings | {"algorithm.lam": 0})[0]
    prepared_alone = Experiment.prepare(alone, loaded=loaded)
    if name is None:
        (source,) = loaded.values()
        name = _name_of_only_client(source) or chosen_name(
            folder_name or DEFAULT_NAME, "the newcomer is called by its folder"
        )
    return Experiment.prepare(joining, loaded=loaded, names=[name]), prepared_alone


def _name_of_only_client(source: Source) -> str | None:
    """Return the name of a data set's client if it has one only, else None."""
    writers = source.train.writer
    if writers is None or len(np.unique(writers)) != 1:
        return None
    return name_writer(writers[0])


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
    name: str | None = None,
    progress: bool = False,
    **options: Any,
) -> Joined:
    """Let a newcomer join a trained federation; also train it alone, for comparison.

    prototypes  a run folder, or a file of prototypes
    dataset     the newcomer's own data
    model       its architecture; None: the one that the data set names
    weights     a file of weights for the body of its model
    classes     those it has, such as `"cat,dog"`; empty: all
    shots       training samples per class; None: all
    out         a folder for the newcomer's run and upload; None: nothing is written
    name        of the newcomer among the federation's members; None: that of the client in its
                data, if there is just one, else that of the folder `out`
    progress    print a line to stderr for each epoch
    options     as for `fedproto.run`
    """
    prepared = prepare(
        prototypes,
        dataset,
        model=model,
        weights=weights,
        classes=classes,
        shots=shots,
        epochs=epochs,
        name=name,
        folder_name=None if out is None else Path(out).name,
        options=options,
    )

    def watch(run_name: str) -> AbstractContextManager[OnRound]:
        return nullcontext(announce_rounds(run_name, progress=progress, unit="epoch"))

    return proceed(prepared, None if out is None else Path(out), watch)


def _ignore_round(result: RoundResult) -> None:
    """Do nothing after a round."""


def _watch_nothing(label: str) -> AbstractContextManager[OnRound]:
    return nullcontext(_ignore_round)


def proceed(
    experiments: tuple[Experiment, Experiment],
    out: Path | None,
    watch: Callable[[str], AbstractContextManager[OnRound]] = _watch_nothing,
) -> Joined:
    """Train the two experiments of `prepare`: first the one alone, then the one that joins.

    Joining is FedProto with fixed global prototypes (Eq. 7); alone is the same with λ = 0. Epoch 0
    classifies by the nearest global prototype with the body as it is, which is useful if the body
    was trained before. `watch("alone")` and `watch("joined")` give what is called after each round.
    """
    joining, alone = experiments
    name = joining.federation.members[0].name
    if out is not None:
        RunFolder.refuse_used(out)
    with watch("alone") as on_round:
        result_alone, accuracies_alone = _train(alone, None, on_round)
    folder = None if out is None else joining.new_folder(out)
    with hold_all([folder]):
        with watch("joined") as on_round:
            result, accuracies_joined = _train(joining, folder, on_round)
        pairs = zip(accuracies_joined, accuracies_alone, strict=True)
        epochs = [Epoch(number, *pair) for number, pair in enumerate(pairs)]
        gain = measure_gain(_mark_rows(joining, result), _mark_rows(alone, result_alone))
        upload = Contribution.of(
            name, joining.federation.classes, joining.progress.latest_uploads.get(0)
        )
        if folder is not None:
            upload.save(folder.path / UPLOAD)
            lines = [vars(epoch) for epoch in epochs]
            content = {"member": name, "epochs": lines, "gain": gain._asdict()}
            folder.write_json(JOIN, content)
    return Joined(result, epochs, gain, upload)


def _mark_rows(experiment: Experiment, result: Result) -> Tensor:
    """Return which of the newcomer's test rows its head predicts correctly after training: (n,)."""
    newcomer = experiment.federation.members[0]
    device = experiment.federation.device
    state = {name: value.to(device) for name, value in result.states[0].items()}
    own_classes = experiment.federation.own_classes[0]
    recipient = experiment.federation.recipient(0, all_classes=True)
    received = experiment.algorithm.send(experiment.progress.server, recipient)
    scores, y = score(newcomer, experiment.algorithm, state, received)
    return mark_correct({"head": scores["head"]}, y, own_classes > 0)["head"].cpu()


def new_classes(experiment: Experiment) -> list[str]:
    """Return the newcomer's classes for which the federation has no prototype."""
    known = experiment.progress.server["known"]
    newcomer = experiment.federation.members[0]
    return [experiment.federation.classes[label] for label in newcomer.classes if not known[label]]


def notices(experiment: Experiment) -> list[str]:
    """Return what a newcomer should know before it trains: new classes may be misspelt."""
    sentences = describe_similar_names(experiment.federation.classes)
    if (Path(str(experiment.config.prototypes)) / TEACHER_FILE).exists():
        sentences.append(
            "the federation has a teacher, which a newcomer does not use: it joins by prototypes "
            "alone"
        )
    new = new_classes(experiment)
    if len(new) == len(experiment.federation.members[0].classes):
        sentences.append(
            "the federation knows none of the newcomer's classes, so there is nothing to join: "
            "it trains alone, and brings them if it is added"
        )
    elif new:
        listed = ", ".join(repr(name) for name in new)
        pronoun = "it" if len(new) == 1 else "them"
        sentences.append(f"nobody in the federation has {listed}: the newcomer brings {pronoun}")
    return sentences


def _train(
    experiment: Experiment, folder: RunFolder | None, on_round: OnRound
) -> tuple[Result, list[Accuracies]]:
    """Train to the last epoch; return the accuracies before the first one and after each."""
    evaluations = [experiment.engine.evaluate([experiment.progress.server])[0]]

    def note(result: RoundResult) -> None:
        assert result.clients is not None, "every epoch is evaluated"
        evaluations.append(result.clients)
        on_round(result)

    result = experiment.execute(folder, note)
    return result, [_take_newcomer(accuracies) for accuracies in evaluations]


def _take_newcomer(accuracies: Tree) -> Accuracies:
    """Return the accuracies of the only client."""
    return {name: float(values[0]) for name, values in accuracies.items()}
