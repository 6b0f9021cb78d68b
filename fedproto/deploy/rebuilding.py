"""A server that lost its disk and has no backup starts again from what its members bring back.

It is the same federation, and it goes on after the last round that a member has trained, so that
its members need not give anything up. Uploads are checked as the server checks any reply.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from fedproto.core.tensors import flatten_state
from fedproto.deploy.contributions import Contribution, read_contribution
from fedproto.deploy.history import REBUILT, make_event
from fedproto.deploy.member_record import MemberRecord
from fedproto.deploy.server_files import APP_FILE, read_app_config
from fedproto.deploy.server_state import ServerState
from fedproto.deploy.settings import ServerSettings, TrainingTerms, split_run_config
from fedproto.errors import ConfigError, Refused, RunFolderError


def rebuild_server(folder: Path, files: Sequence[Path]) -> ServerState:
    """Write a new server's state, made of members' files, and return it.

    folder  the one that `deploy init` made, whose settings are those of the lost server
    """
    config = read_app_config(folder)
    if not config:
        raise ConfigError(f"{folder} holds no {APP_FILE}: name the folder that `deploy init` made")
    settings, terms = split_run_config(config, str(folder / APP_FILE))
    return rebuild_state(settings, terms, [read_contribution(path) for path in files])


def rebuild_state(
    settings: ServerSettings, terms: TrainingTerms, contributions: Sequence[Contribution]
) -> ServerState:
    """Write a new server's state, made of contributions, and return it.

    Raises RunFolderError if there is a state, or if contributions do not belong together, and
    Refused, with the member's name, if one of them fails a check.
    """
    state = ServerState(settings, terms)
    with state.hold_folder():
        if state.path.exists():
            raise RunFolderError(f"{state.path} exists: nothing is rebuilt over a state")
        _refuse_strangers(state, contributions)
        _refuse_relative_transforms(state)
        _refuse_forgotten_budgets(state)
        state.id = contributions[0].federation
        for each in sorted(contributions, key=lambda each: each.number):
            state.members[each.member] = MemberRecord(each.number)
        _replay_uploads(state, contributions)
        _take_received(state, contributions)
        names = ", ".join(state.members)
        state.history.append(make_event(REBUILT, state.round, f"from what {names} brought back"))
        state.save()
    return state


def _refuse_strangers(state: ServerState, contributions: Sequence[Contribution]) -> None:
    """Raise RunFolderError unless contributions are of different members of one federation."""
    if not contributions:
        raise RunFolderError("nobody brings anything back: name at least one file of a member")
    names = [each.member for each in contributions]
    numbers = [each.number for each in contributions]
    if len(set(names)) < len(names) or len(set(numbers)) < len(numbers):
        raise RunFolderError(f"two files are of the same member: {', '.join(sorted(names))}")
    if len({each.federation for each in contributions}) > 1:
        raise RunFolderError(
            f"the files of {', '.join(sorted(names))} are of different federations"
        )
    for name in names:
        if not state.admits(name):
            raise RunFolderError(f"the settings do not list {name!r} among their `members`")


def _refuse_relative_transforms(state: ServerState) -> None:
    """Raise ConfigError if uploads are changes of what the lost server had sent."""
    is_relative = any(layout.relative for layout in state.layouts.values())
    if state.terms.transform and is_relative:
        raise ConfigError(
            f"uploads with {state.terms.transform} are changes of weights that only the lost "
            "server had: restore a backup"
        )


def _refuse_forgotten_budgets(state: ServerState) -> None:
    """Raise ConfigError if only the lost server knew what its noise had cost the members."""
    if state.privacy is not None:
        raise ConfigError(
            "with privacy=client only the lost server knew what rounds had cost the members, so "
            "their budgets would go back: begin a new federation"
        )


def _replay_uploads(state: ServerState, contributions: Sequence[Contribution]) -> None:
    """Close again the rounds of the members' last uploads, in their order."""
    rounds = sorted({each.round for each in contributions})
    for round in rounds:
        state.round = round - 1
        for each in contributions:
            if each.round == round and each.reply is not None:
                _accept(state, each.member, each)
        for name, reason in state.refuse_outliers().items():
            raise Refused(f"what {name} brings is refused: {reason}")
        if state.replies:
            state.close_round()
            _refuse_lost_state(state)
    state.round = rounds[-1]


def _accept(state: ServerState, name: str, contribution: Contribution) -> None:
    assert contribution.reply is not None
    try:
        expected = state.expect_replies(frozenset([name]))
        layout = dict(expected.layout)
        for group in state.algorithm.once:  # members are asked again for what they send once
            layout.pop(group, None)
        expected = replace(expected, layout=layout)
        state.accept_reply(name, contribution.reply, expected)
    except Refused as error:
        raise Refused(f"what {name} brings is refused: {error}") from error


def _refuse_lost_state(state: ServerState) -> None:
    """Raise ConfigError if the server's state is more than what its last uploads make of it.

    It is no more if the same uploads change nothing when they are aggregated once again.
    """
    uploads = state.recall_uploads()
    if uploads is None:
        return
    again = flatten_state(state.algorithm.aggregate(state.server, uploads))
    for name, value in flatten_state(state.server).items():
        if not torch.equal(again[name], value):
            raise ConfigError(
                f"the server of {state.algorithm.name} keeps {name}, which no member has: restore "
                "a backup, or begin a new federation"
            )


def _take_received(state: ServerState, contributions: Sequence[Contribution]) -> None:
    """Give classes without an upload the prototypes that members received last."""
    if not {"prototypes", "known"} <= state.server.keys():
        return
    prototypes = state.server["prototypes"].clone()
    known = state.server["known"].clone()
    is_free = known == 0
    for each in sorted(contributions, key=lambda each: each.round):
        received = each.prototypes
        if not received:
            continue
        shape = (len(each.classes), prototypes.shape[1])
        values = received["prototypes"]
        if tuple(values.shape) != shape or not torch.isfinite(values).all():
            raise Refused(f"what {each.member} brings is refused: its prototypes do not fit")
        for row, name in enumerate(each.classes):
            place = state.classes.index(name) if name in state.classes else -1
            if place >= 0 and is_free[place] and received["known"][row]:
                prototypes[place] = values[row]
                known[place] = 1
    state.server = state.server | {"prototypes": prototypes, "known": known}
