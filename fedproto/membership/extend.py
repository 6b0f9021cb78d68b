"""A trained federation goes on with its newcomers: everybody with the model it has, beside the prototypes of all."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from fedproto.config.options import Part
from fedproto.config.settings import Config
from fedproto.core.federation import rearrange_head
from fedproto.core.tensors import flatten_groups
from fedproto.core.types import Tree
from fedproto.data import Source
from fedproto.membership.contribution import Contribution
from fedproto.membership.membership import Membership
from fedproto.partitions.file import stamp
from fedproto.runs.assemble import deal
from fedproto.runs.experiment import Experiment, reopen
from fedproto.runs.folder import RunFolder
from fedproto.runs.from_settings import in_runs
from fedproto.runs.prototype_files import START, Prototypes, write_prototypes


class _Person(NamedTuple):
    """A member on its way from one federation to the next."""

    dataset: Part
    model: Part
    portion: dict[str, Any]  # its entry in partition.json
    state: Tree
    classes: tuple[str, ...]  # of its head


def extend(
    run: Path, newcomers: Sequence[Path], out: Path, rounds: int
) -> tuple[Experiment, RunFolder]:
    """A federation and its newcomers about to train `rounds` more rounds together, and their run folder.

    The server starts from the prototypes of all who are members, the newcomers folded in. A head that lacks classes
    somebody brought gets rows for them, as drawn.
    """
    RunFolder.refuse_used(out)
    folder, loaded = RunFolder.open(run), dict[str, Source]()
    bank = Membership.of(folder)
    gone = {change["member"] for change in bank.changes if change["did"] == "left"}
    config, people = _people(folder, gone, loaded)
    for path in newcomers:
        contribution = Contribution.load(path)
        bank = bank if contribution.member in bank.members else bank.with_member(contribution)
        people += _people(RunFolder.open(path), set(), loaded)[1]
    experiment = _prepared(config, people, bank.prototypes(), rounds, out, loaded)
    states = _states(people, experiment)
    engine_states = {str(number): state for number, state in enumerate(states)}
    experiment.engine.restore(experiment.place, flatten_groups(engine_states))
    return experiment, experiment.new_folder(out, given=states)


def _people(
    folder: RunFolder, gone: set[str], loaded: dict[str, Source]
) -> tuple[Config, list[_Person]]:
    """The members of a run that have not left, as it left them, and its configuration."""
    experiment, _ = reopen(folder, loaded)
    with closing(experiment.engine):
        states = experiment.client_states()
    config, federation = experiment.config, experiment.federation
    datasets, models = (
        deal(config.dataset, config.clients, "dataset"),
        deal(config.model, config.clients, "model"),
    )
    rows = zip(datasets, models, federation.partition["clients"], states, strict=True)
    people = [
        _Person(*row, federation.classes)
        for number, row in enumerate(rows)
        if str(number) not in gone
    ]
    return config, people


def _prepared(
    config: Config,
    people: list[_Person],
    shared: Prototypes,
    rounds: int,
    out: Path,
    loaded: dict[str, Source],
) -> Experiment:
    """The federation of these people, by the settings of the one they come from."""
    content: dict[str, Any] = {"version": 1, "clients": [person.portion for person in people]}
    with tempfile.TemporaryDirectory() as folder:
        partition, start = Path(folder) / "partition.json", Path(folder) / START
        partition.write_text(json.dumps(content | {"sha256": stamp(content)}))
        write_prototypes(
            start, {"prototypes": shared.values, "known": shared.known}, shared.classes
        )
        settings: dict[str, Any] = {
            "clients": len(people),
            "dataset": tuple(in_runs([person.dataset for person in people])),
            "model": tuple(in_runs([person.model for person in people])),
            "rounds": rounds,
            "dim": None,
            "checkpoint_every": config.checkpoint_every or rounds,
        }
        there: dict[str, Any] = {"partition": Part(f"file:{partition}"), "prototypes": str(start)}
        experiment = Experiment.prepare(replace(config, **settings, **there), loaded=loaded)
    own = out.absolute()
    experiment.config = replace(
        experiment.config,
        partition=Part(f"file:{own / 'partition.json'}"),
        prototypes=str(own / START),
    )
    return experiment


def _states(people: list[_Person], experiment: Experiment) -> list[Tree]:
    """Everybody's state over the classes of all."""
    states: list[Tree] = []
    for member, person in zip(experiment.federation.members, people, strict=True):
        own = {name: value.to(member.initial[name]) for name, value in person.state.items()}
        states.append(
            rearrange_head(own, member.initial, person.classes, experiment.federation.classes)
        )
    return states
