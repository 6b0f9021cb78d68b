"""Continue a trained federation together with its newcomers.

Every member keeps the model it has; the server starts from the prototypes of all members.
"""

from __future__ import annotations

import json
import shlex
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from fedproto.config.options import Part
from fedproto.config.settings import Config
from fedproto.core.best_round import ACCURACY
from fedproto.core.federation import rearrange_head
from fedproto.core.local_training import start_client
from fedproto.core.tensors import flatten_groups
from fedproto.core.types import Tree
from fedproto.data import Source
from fedproto.errors import DataError
from fedproto.membership.contribution import Contribution
from fedproto.membership.membership import Membership
from fedproto.partitions.file import hash_partition
from fedproto.runs.assemble import deal
from fedproto.runs.experiment import Experiment, reopen
from fedproto.runs.folder import RunFolder
from fedproto.runs.from_settings import merge_equal_neighbours
from fedproto.runs.prototype_files import START, Prototypes, write_prototypes


class _TrainedMember(NamedTuple):
    """A member as a finished run left it."""

    name: str
    dataset: Part
    model: Part
    rows: dict[str, Any]  # its entry in partition.json
    state: Tree
    classes: tuple[str, ...]  # of its head


def extend(
    run: Path, newcomers: Sequence[Path], out: Path, rounds: int
) -> tuple[Experiment, RunFolder]:
    """Return a federation and its newcomers, ready to train `rounds` more rounds, and their folder.

    The server starts from the prototypes of all members, the newcomers included. A head that lacks
    classes which others brought gets rows for them, with initial weights. Everybody keeps its name,
    which for a client without one is the number it had. Members that were added to the run before
    take part, too; `newcomers` says where those are whose folder is not known.
    """
    RunFolder.refuse_used(out)
    loaded: dict[str, Source] = {}
    folder = RunFolder.open(run)
    membership = _with_newcomers(Membership.of(folder), newcomers)
    folders = _find_folders(membership, newcomers, run)
    config, members = _read_members(folder, membership.left(), loaded)
    for name, path in folders.items():
        _, joined = _read_members(RunFolder.open(path), set(), loaded)
        members += [member._replace(name=name) for member in joined]
    experiment = _prepare(config, members, membership.prototypes(), rounds, out, loaded)
    states = _align_states(members, experiment)
    states_by_client = {str(number): state for number, state in enumerate(states)}
    experiment.engine.restore(experiment.place, flatten_groups(states_by_client))
    return experiment, experiment.new_folder(out, given=states)


def _with_newcomers(membership: Membership, newcomers: Sequence[Path]) -> Membership:
    """Return the membership with those newcomers that were not added before."""
    for path in newcomers:
        contribution = Contribution.load(path)
        name = contribution.member
        if name not in membership.added():
            membership = membership.with_member(contribution)
        elif not membership.holds(contribution):
            raise DataError(
                f"{path} is not the newcomer that was added as {name!r}: give it another name, "
                f"or remove {name!r} first"
            )
    return membership


def _find_folders(membership: Membership, newcomers: Sequence[Path], run: Path) -> dict[str, Path]:
    """Return the run folder of every member that joined after training, in order of joining.

    Raises DataError for one whose folder is neither named nor where it was when it was added.
    """
    named = {Contribution.load(path).member: path for path in newcomers}
    folders = {}
    for name, recorded in membership.added().items():
        path = named.get(name, recorded)
        if path is None or not (path / "config.toml").exists():
            raise DataError(
                f"{name!r} was added to {run}, but its run folder is not at hand: name the folder "
                f"after {run}, or let {name!r} leave with "
                f"`fedproto members {run} --remove {shlex.quote(name)}`"
            )
        folders[name] = path
    return folders


def _read_members(
    folder: RunFolder, left: set[str], loaded: dict[str, Source]
) -> tuple[Config, list[_TrainedMember]]:
    """Return a run's configuration and its members, except those that have left."""
    experiment, _ = reopen(folder, loaded)
    with closing(experiment.engine):
        states = experiment.client_states()
    config = experiment.config
    federation = experiment.federation
    datasets = deal(config.dataset, len(states), "dataset")
    models = deal(config.model, len(states), "model")
    rows = federation.partition["clients"]
    members = []
    for number, state in enumerate(states):
        name = federation.members[number].name
        if name in left:
            continue
        member = _TrainedMember(
            name, datasets[number], models[number], rows[number], state, federation.classes
        )
        members.append(member)
    return config, members


def _prepare(
    config: Config,
    members: list[_TrainedMember],
    prototypes: Prototypes,
    rounds: int,
    out: Path,
    loaded: dict[str, Source],
) -> Experiment:
    """Return the federation of these members, with the settings of the one they come from."""
    clients = [_describe_rows(member, number) for number, member in enumerate(members)]
    content: dict[str, Any] = {"version": 1, "clients": clients}
    content["sha256"] = hash_partition(content)
    start = {"prototypes": prototypes.values, "known": prototypes.known}
    datasets = [member.dataset for member in members]
    models = [member.model for member in members]
    has_validation = ["validation" in member.rows for member in members]
    if config.validation is None and len(set(has_validation)) > 1:
        # Newcomers bring no validation set, and the settings name no fraction to take from them.
        config = replace(config, validation=0.0, patience=None, select_by=ACCURACY)
    config = replace(
        config,
        clients=len(members),
        dataset=tuple(merge_equal_neighbours(datasets)),
        model=tuple(merge_equal_neighbours(models)),
        rounds=rounds,
        dim=None,
        checkpoint_every=config.checkpoint_every or rounds,
    )
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "partition.json").write_text(json.dumps(content))
        write_prototypes(folder / START, start, prototypes.classes)
        experiment = Experiment.prepare(_with_files(config, folder), loaded=loaded)
    # The run folder will hold the same files.
    experiment.config = _with_files(experiment.config, out.absolute())
    return experiment


def _describe_rows(member: _TrainedMember, number: int) -> dict[str, Any]:
    """Return a member's entry in the new partition.json, where it has this number.

    It says what the member is called, unless its number says the same.
    """
    rows = {key: value for key, value in member.rows.items() if key != "name"}
    is_named = "name" in member.rows or member.name != str(number)
    return rows | {"name": member.name} if is_named else rows


def _with_files(config: Config, folder: Path) -> Config:
    """Return a configuration that reads partition and first prototypes from a folder."""
    partition = Part(f"file:{folder / 'partition.json'}")
    return replace(config, partition=partition, prototypes=str(folder / START))


def _align_states(members: list[_TrainedMember], experiment: Experiment) -> list[Tree]:
    """Return the members' states with heads over the classes of the new federation."""
    classes = experiment.federation.classes
    states: list[Tree] = []
    for client, member in zip(experiment.federation.members, members, strict=True):
        own = {name: value.to(client.initial[name]) for name, value in member.state.items()}
        params = rearrange_head(own, client.initial, member.classes, classes)
        # What a client keeps beside its model, such as a teacher's solution, starts anew.
        states.append(start_client(experiment.algorithm, params, experiment.federation.task))
    return states
