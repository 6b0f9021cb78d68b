"""What one round does to all clients' objectives, and the constants along its paths."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from fedproto.core.federation import Federation
from fedproto.core.tensors import join_uploads, select_rows
from fedproto.core.types import Algorithm, State, Tree, Upload
from fedproto.theory.estimators import (
    dot,
    draw_directions,
    embedding_quotients,
    iterate_power,
    jacobian_norms,
    largest_quotient,
    norm,
    subtract,
)
from fedproto.theory.objectives import LocalObjectives, Outputs, add_terms, stack_states
from fedproto.theory.replays import ReplayPlan, Replays, replay_round


class MeasureOptions(NamedTuple):
    """How much is measured in a round."""

    replays: int = 8
    hessian_rows: int = 32  # of each client, in the Hessian's power iteration
    jacobian_rows: int = 4  # of each client, whose embedding's Jacobian is looked at
    iterations: int = 8  # of a power iteration


@dataclass
class MeasuredRound:
    """What is measured of one round, as tables with a row per client.

    The losses are the proof's, at tE+1/2, (t+1)E and (t+1)E+1/2.
    """

    round: int
    has_prototypes: bool  # whether there were any before the round
    seconds: dict[str, float] = field(default_factory=dict)
    #: (m,) unless said otherwise: see `_measure_*`.
    tables: Tree = field(default_factory=dict)


class Clients(NamedTuple):
    """A federation whose rounds are measured."""

    federation: Federation
    algorithm: Algorithm
    groups: Sequence[LocalObjectives]
    steps: Tensor  # (m,) E of each client


def measure_round(
    clients: Clients,
    states: Sequence[Tree],
    server: State,
    plan: ReplayPlan,
    options: MeasureOptions,
) -> MeasuredRound:
    """Measure the round that follows a state of all clients and of the server."""
    measured = MeasuredRound(plan.round, has_prototypes=bool(server["known"].any()))
    parts = [_GroupRound.start(clients, group, states, server) for group in clients.groups]
    with _timed(measured, "replays"):
        for part in parts:
            part.replay(plan)
    with _timed(measured, "losses"):
        for number in range(plan.replays):
            uploads = join_uploads([part.finish_replay(number) for part in parts])
            new_server = clients.algorithm.aggregate(server, _sort(uploads, clients.groups))
            for part in parts:
                part.aggregate(number, _send(clients, new_server, part.group.clients))
    with _timed(measured, "smoothness"):
        for part in parts:
            part.measure_smoothness(options)
    with _timed(measured, "jacobians"):
        for part in parts:
            part.measure_jacobians(options)
    numbers = torch.cat([part.group.clients for part in parts])
    order = numbers.argsort()
    for name in parts[0].tables:
        pieces = [part.tables[name] for part in parts]
        longest = max(piece.shape[-1] for piece in pieces)
        if pieces[0].dim() == 3:  # steps: those of the other architectures may be fewer
            pieces = [
                torch.nn.functional.pad(piece, (0, longest - piece.shape[-1])) for piece in pieces
            ]
        measured.tables[name] = torch.cat(pieces)[order].double()
    return measured


@dataclass
class _GroupRound:
    """A round of the clients of one architecture."""

    group: LocalObjectives
    who: Tensor  # all of them
    params: Tree
    received: State
    steps: Tensor
    outputs: Outputs  # before the round
    tables: Tree
    replays: Replays | None = None
    last_outputs: Outputs | None = None

    @classmethod
    def start(
        cls, clients: Clients, group: LocalObjectives, states: Sequence[Tree], server: State
    ) -> _GroupRound:
        """Return the round before its first step, with the loss at tE+1/2."""
        numbers = group.clients.tolist()
        params = stack_states([states[number] for number in numbers])
        received = _send(clients, server, group.clients)
        who = torch.arange(len(group))
        outputs = group.outputs(params, who)
        loss = add_terms(group.terms_of_outputs(params, outputs, received))
        steps = clients.steps[group.clients]
        tables = {"loss_start": loss, "rows": group.counts.to(loss.dtype)}
        return cls(group, who, params, received, steps, outputs, tables)

    def replay(self, plan: ReplayPlan) -> None:
        """Train all replays; keep the gradients' moments at each step: (m, R, E)."""
        replays = replay_round(self.group, self.params, self.received, self.steps, plan)
        self.replays = replays
        self.tables |= {
            "squares": replays.squares,
            "variances": replays.variances,
            "norms": replays.norms,
        }
        shape = (len(self.group), plan.replays)
        like = self.tables["loss_start"]
        for name in ("loss_end", "loss_after", "movement", "own_distance", "moved"):
            self.tables[name] = like.new_zeros(shape)
        self.tables["lipschitz_largest"] = torch.zeros_like(like)
        self.tables["lipschitz_mean"] = torch.zeros_like(like)

    def finish_replay(self, number: int) -> Upload:
        """Measure the loss at (t+1)E and the embeddings' movement; return the uploads."""
        assert self.replays is not None
        params = self.replays.ends[number]
        outputs = self.group.outputs(params, self.who)
        terms = self.group.terms_of_outputs(params, outputs, self.received)
        self.tables["loss_end"][:, number] = add_terms(terms)
        self._note_quotients(params, outputs)
        self.tables["moved"][:, number] = norm(self._move(params, self.group.trained))
        self.last_outputs = outputs
        uploads = self.group.upload(params, outputs, self.received)
        self.tables["own_distance"][:, number] = self._distance_of_own(uploads)
        return uploads

    def aggregate(self, number: int, received: State) -> None:
        """Measure the loss at (t+1)E+1/2, and how far the client's prototypes moved."""
        assert self.replays is not None and self.last_outputs is not None
        params = self.replays.ends[number]
        terms = self.group.terms_of_outputs(params, self.last_outputs, received)
        self.tables["loss_after"][:, number] = add_terms(terms)
        moved = (received["prototypes"] - self.received["prototypes"]).norm(dim=-1)
        known = self.received["known"] * received["known"]
        self.tables["movement"][:, number] = (moved * known).amax(1)

    def _distance_of_own(self, uploads: Upload) -> Tensor:
        """Return the largest ‖C_i^(j) − C̄^(j)‖ over a client's classes: (m,)."""
        group = uploads["prototypes"]
        own = group.sums["prototypes"] / group.weight.clamp(min=1)[..., None]
        gaps = (own - self.received["prototypes"]).norm(dim=-1)
        held = (group.weight > 0) & (self.received["known"] > 0)
        return (gaps * held).amax(1)

    def _move(self, params: Tree, names: Sequence[str]) -> Tree:
        """Return by how much parameters differ from those before the round."""
        return subtract({name: params[name] for name in names}, self.params)

    def _note_quotients(self, params: Tree, outputs: Outputs) -> None:
        """Keep the largest quotients of embeddings' and parameters' movements."""
        distance = norm(self._move(params, self.group.embedding))
        mask = self.group.samples.mask
        quotients = embedding_quotients(
            self.outputs.features, outputs.features, mask, distance.to(mask.dtype)
        )
        for name, values in (
            ("lipschitz_largest", quotients.largest),
            ("lipschitz_mean", quotients.mean),
        ):
            self.tables[name] = torch.maximum(self.tables[name], values)

    def measure_smoothness(self, options: MeasureOptions) -> None:
        """Measure L1 at the start and the end of the first replay, and ‖∇L_{tE+1/2}‖²."""
        assert self.replays is not None
        points = []
        gradients = []
        for params in (self.params, self.replays.middle, self.replays.ends[0]):
            points.append({name: params[name] for name in self.group.trained})
            gradients.append(self.group.full_gradient(params, self.received, self.who))
        self.tables["square_start"] = dot(gradients[0], gradients[0])
        self.tables["smoothness_quotient"] = largest_quotient(points, gradients)
        places = self.group.spread_places(options.hessian_rows)
        samples = self.group.take(self.who, places)
        values = []
        changes = []
        for params in (self.params, self.replays.ends[0]):
            multiply = self.group.linearise_gradient(params, self.received, samples)
            start = draw_directions(points[0], seed=0)
            found = iterate_power(multiply, start, options.iterations)
            values.append(found.values)
            changes.append(found.change)
        self.tables["smoothness_power"] = torch.stack(values).amax(0)
        self.tables["smoothness_change"] = torch.stack(changes).amax(0)

    def measure_jacobians(self, options: MeasureOptions) -> None:
        """Measure L2 as the largest norm of the embedding's Jacobian, at start and end."""
        assert self.replays is not None
        rows = options.jacobian_rows
        who = self.who.repeat_interleave(rows)
        places = self.group.spread_places(rows).reshape(-1, 1)
        x = self.group.take(who, places).x[:, 0]
        found = []
        for params in (self.params, self.replays.ends[0]):
            stacked = {name: value[who] for name, value in params.items()}
            push, pull, dim = self.group.linearise_embedding(stacked, x)
            start = draw_directions({"u": x.new_zeros(len(x), dim)}, seed=0)["u"]
            norms = jacobian_norms(push, pull, start, options.iterations)
            found.append(norms.reshape(len(self.group), rows).amax(1))
        self.tables["lipschitz_jacobian"] = torch.stack(found).amax(0).detach()


class _timed:
    """Adds the seconds that a part of the work takes."""

    def __init__(self, measured: MeasuredRound, name: str) -> None:
        self.seconds = measured.seconds
        self.name = name

    def __enter__(self) -> None:
        self.started = time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        self.seconds[self.name] = time.perf_counter() - self.started


def _send(clients: Clients, server: State, numbers: Tensor) -> State:
    """Return what some clients receive, with a leading axis over them."""
    received = []
    for number in numbers.tolist():
        recipient = clients.federation.recipient(number)
        received.append(clients.algorithm.send(server, recipient))
    return stack_states(received)


def _sort(uploads: Upload, groups: Sequence[LocalObjectives]) -> Upload:
    """Return the uploads of all architectures in the order of the clients' numbers."""
    numbers = torch.cat([group.clients for group in groups])
    return select_rows(uploads, numbers.argsort())
