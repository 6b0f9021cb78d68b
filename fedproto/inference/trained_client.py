"""A member of a federation after training: what it sees in an input, and how near that is to each class."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedproto.core import prototypes, rng
from fedproto.core.federation import Examples, Member
from fedproto.core.local_training import EVALUATION_BATCH
from fedproto.core.tensors import find_mismatch
from fedproto.core.types import Tree
from fedproto.data.shared.preprocessing import Preprocessing
from fedproto.errors import ConfigError, RunFolderError
from fedproto.runs.devices import torch_settings
from fedproto.runs.experiment import Experiment, reopen
from fedproto.runs.folder import RunFolder
from fedproto.runs.prototype_files import Prototypes, read_prototypes

CALIBRATED_ON = 1000  # held-out images at most
ROUNDING = 1e-9  # of a product of a count and a share
#: The ways to classify: by what, and among which classes.
WAYS = ("prototype all", "prototype own", "head all", "head own")


@dataclass(frozen=True, eq=False)
class Trained:
    """A member of a federation after training."""

    module: nn.Module  # in eval mode: prepared inputs -> (features, logits)
    preprocessing: Preprocessing
    classes: tuple[str, ...]  # of the head's outputs
    own: tuple[str, ...]  # those it has trained on
    prototypes: Prototypes | None  # the federation's; None where its method has none
    calibration: dict[str, np.ndarray] = field(
        default_factory=dict
    )  # how far held-out images lie: see `novelty`
    about: dict[str, Any] = field(
        default_factory=dict
    )  # for people: data set, model, method, round, accuracy

    def names(self, by: str, among: str) -> tuple[str, ...]:
        """The classes that are chosen among: all of the federation's, or the member's own."""
        if by == "head":
            return self.classes if among == "all" else self.own
        if self.prototypes is None:
            raise ConfigError(
                f"{self.about.get('algorithm', 'this method')} has no prototypes: classify by head"
            )
        known = zip(self.prototypes.classes, self.prototypes.known.tolist(), strict=True)
        return tuple(
            name for name, is_known in known if is_known and (among == "all" or name in self.own)
        )

    def see(self, x: np.ndarray) -> tuple[Tensor, Tensor]:
        """Features and logits of inputs as the data set stores them."""
        return self.see_prepared(self.preprocessing(x))

    @torch.no_grad()
    def see_prepared(self, x: Tensor) -> tuple[Tensor, Tensor]:
        like = next(self.module.parameters(), torch.zeros(()))
        pairs = [self.module(part.to(like)) for part in x.split(EVALUATION_BATCH)]
        features, logits = (torch.cat(parts).float().cpu() for parts in zip(*pairs, strict=True))
        return features, logits


def novelty(by: str, scores: Tensor) -> Tensor:
    """How little each sample looks like any class: its distance to the nearest prototype, or 1 − max softmax."""
    if by == "prototype":
        return -scores.amax(1)
    return 1 - scores.softmax(1).amax(1)


def scores_of(by: str, among: str, member: Trained, seen: tuple[Tensor, Tensor]) -> Tensor:
    """(n, classes that are chosen among): minus the distance (Eq. 4), or the logit; larger is likelier."""
    names, (features, logits) = member.names(by, among), seen
    if by == "head":
        return logits[:, [member.classes.index(name) for name in names]]
    assert member.prototypes is not None, "its `names` refuses that"
    return -prototypes.distances(features, member.prototypes.over(names).values.float(), "l2")


def threshold(calibration: np.ndarray, reject: float) -> float:
    """The novelty above which at most a share `reject` of known images lies, in expectation over images to come.

    The ⌈(n + 1)(1 − reject)⌉-th smallest of n held-out ones (split conformal prediction); of fewer than
    `rows_needed(reject)` it is infinite, so ask `can_reject` before relying on it.
    """
    place = math.ceil((len(calibration) + 1) * (1 - reject) - ROUNDING)
    if not 0 < place <= len(calibration):
        return math.inf if place else -math.inf
    return float(np.sort(calibration)[place - 1])


def rows_needed(reject: float) -> int:
    """The fewest held-out rows that give a finite threshold: ⌈1 / reject⌉ − 1."""
    reject = max(reject, 1e-15)  # 1 / 5e-324 is infinite
    return math.ceil((1 - ROUNDING) / reject) - 1


def can_reject(calibration: np.ndarray, reject: float) -> bool:
    """Whether a threshold made of this calibration can reject anything; a share of 0 asks for nothing."""
    return reject == 0 or (len(calibration) > 0 and len(calibration) >= rows_needed(reject))


def why_not_rejecting(who: str, rows: int, reject: float) -> str:
    """A sentence about a calibration that is too small for the share that was asked for."""
    if not rows:
        return (
            f"{who} has no held-out rows to calibrate on, and rejecting {reject:g} of known inputs "
            f"needs {rows_needed(reject)}"
        )
    smallest = math.ceil(10_000 / (rows + 1)) / 10_000  # rounded up, so that it is accepted
    return (
        f"{who} has {rows} held-out row{'s' * (rows > 1)} to calibrate on, and rejecting {reject:g} of known inputs "
        f"needs {rows_needed(reject)}: the smallest share that {rows} can give is {smallest:g}"
    )


def member_of(run: Path, client: int) -> Trained:
    """A client of a run folder, as it is evaluated: with its own state, or with what its server sends."""
    experiment, makers = members_of(run, [client])
    with torch_settings(
        experiment.config.threads, experiment.config.precision
    ):  # distances to the bit of those in training
        return makers[client]()


def members_of(
    run: Path, clients: Sequence[int] = ()
) -> tuple[Experiment, list[Callable[[], Trained]]]:
    """A run's experiment, and what makes each of its members; refused where one of `clients` is not there."""
    folder = RunFolder.open(run)
    if not folder.checkpoint_round():
        raise RunFolderError(
            f"{run} has no checkpoint, so its models are gone: `fedproto run` keeps them, with checkpoint_every above 0"
        )
    experiment, _ = reopen(folder)
    with closing(experiment.engine):
        makers = _makers(experiment, folder)
    for client in clients:
        if not 0 <= client < len(makers):
            raise ConfigError(
                f"there is no client {client} in {run}: there are clients 0 to {len(makers) - 1}"
            )
    return experiment, makers


def _makers(experiment: Experiment, folder: RunFolder) -> list[Callable[[], Trained]]:
    """One a member: a thousand members at once might fill the memory."""
    states, names = experiment.client_states(), experiment.federation.classes
    shared = read_prototypes(folder.path) if "prototypes" in experiment.progress.server else None
    result, encodings = folder.result() or {}, folder.encodings()
    if result and len(result["clients"]) != len(states):
        raise RunFolderError(
            f"{folder.path / 'result.json'} speaks of other clients than partition.json"
        )

    def make(member: Member) -> Trained:
        if member.id in encodings:  # the files may have changed since
            member = replace(
                member, preprocessing=replace(member.preprocessing, encoding=encodings[member.id])
            )
        about = {
            "run": folder.path.name,
            "client": member.id,
            "algorithm": experiment.algorithm.name,
            "dataset": member.dataset,
            "model": member.model,
            "round": experiment.progress.round,
            "accuracy": result["clients"][member.id]["accuracy"] if result else {},
        }
        return made(
            member, experiment.as_evaluated(member, states[member.id]), names, shared, about
        )

    return [partial(make, member) for member in experiment.federation.members]


def made(
    member: Member,
    state: Tree,
    classes: tuple[str, ...],
    shared: Prototypes | None,
    about: dict[str, Any],
) -> Trained:
    """A member with its state, calibrated on images that were held out."""
    odd = find_mismatch(member.initial, state)
    if odd is not None:
        raise RunFolderError(f"the state of client {member.id} is not one of its model: {odd}")
    own = tuple(classes[label] for label in member.classes)
    plain = Trained(
        _with_state(member.module, state), member.preprocessing, classes, own, shared, {}, about
    )
    return replace(plain, calibration=_calibration(plain, halves(member)[0]))


def _with_state(module: nn.Module, state: Tree) -> nn.Module:
    """A copy of a module, which others share, with a client's parameters and buffers in it."""
    own = copy.deepcopy(module).cpu().eval()
    found = own.load_state_dict(
        state, strict=False
    )  # of a layer that is there twice, the first name only is there
    assert not found.unexpected_keys, "the state is of another module"
    return own


def halves(member: Member) -> tuple[Examples, Examples]:
    """The member's test images in two halves: one to calibrate on, one to see what the calibration is worth."""
    rows = member.test.rows.cpu()
    order = torch.from_numpy(rng.generator(0, "calibration").permutation(len(rows)))
    half = len(rows) // 2
    x, y = member.test.x, member.test.y
    return Examples(x, y, rows[order[:half]]), Examples(x, y, rows[order[half:]])


def _calibration(member: Trained, examples: Examples) -> dict[str, np.ndarray]:
    """The novelty of held-out images of the member's own classes, for each way to classify."""
    if not len(examples):
        return {}
    seen = member.see_prepared(examples.x[examples.rows[:CALIBRATED_ON]])
    return {
        f"{by} {among}": novelty(by, scores_of(by, among, member, seen)).numpy()
        for by, among in map(str.split, WAYS)
        if by == "head" or (member.prototypes is not None and member.names(by, among))
    }
