"""Shadow federations: the attacked run again and again, each with other records by fair coins.

All are trained at once, as federations of one engine. Every candidate record is put into its
client's training data by a coin of its own, in every federation. Half of the candidates of a client
are its own records, half are others of its classes that nobody has. Weights start as in the run,
and shuffles differ, so the attacker is one who knows the start but not the shuffles.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.func import functional_call

from fedproto.audit.attacked_run import AttackedRun, share_engine
from fedproto.core import rng
from fedproto.core.engine import Cohort, Engine
from fedproto.core.federation import Examples, Federation, Member
from fedproto.core.local_training import with_copied_buffers
from fedproto.core.rounds import FederationRun, run_rounds
from fedproto.core.server import RoundUploads
from fedproto.core.tensors import divide_by_weight
from fedproto.core.types import Algorithm, Tree, Upload
from fedproto.errors import DoesNotApply
from fedproto.runs.experiment import Experiment

#: A client with fewer candidates would too often be left without any record.
MIN_CANDIDATES = 10
#: Federations that are trained at a time.
STACKED_FEDERATIONS = 32
GROUP = "prototypes"


@dataclass(frozen=True)
class Records:
    """All candidates; each tensor has a row per record."""

    client: Tensor
    label: Tensor
    row: Tensor  # in the client's pool of inputs
    members: list[Member]  # with pools that hold the candidates, too

    def __len__(self) -> int:
        return len(self.client)


@dataclass(frozen=True)
class Observations:
    """What can be seen of each federation, with a leading axis over federations.

    included     (f, records) bool, what the coins said
    prototypes   (f, clients, C, d) as the server decodes them, NaN where a client sent none
    shared       (f, C, d) the server's prototypes, NaN where there is none
    embeddings   (f, records, d) by the model of the record's client
    confidence   (f, records) log(p / (1 − p)) of the record's class by the model that its client
                 is evaluated with
    uploaded     (f, records) the same by the weights that its client sent

    What cannot be seen is None.
    """

    records: Records
    included: Tensor
    prototypes: Tensor | None
    shared: Tensor | None
    embeddings: Tensor
    confidence: Tensor
    uploaded: Tensor | None


def choose_records(run: AttackedRun) -> Records:
    """Return the candidates: each client's own records, and as many others of its classes.

    DoesNotApply if no client has enough of both, or if the run is a closed form.
    """
    if run.algorithm.uses_fixed:
        raise DoesNotApply(
            "shadow federations do not solve closed forms from fixed features; "
            "its claim of privacy, if it has one, is not tested"
        )
    pools: dict[int, _Pool] = {}
    clients = []
    labels = []
    rows = []
    members = []
    for member in run.members:
        source = id(run.sources[member.id])
        if source not in pools:
            pools[source] = _Pool.of(run, member)
        pool = pools[source]
        extra = pool.take(run.counts()[member.id].tolist())
        candidates = torch.cat([member.train.rows.cpu(), extra])
        train = Examples(pool.x, pool.y, member.train.rows)
        members.append(replace(member, train=train))
        has_enough = len(extra) == len(member.train) and len(candidates) >= MIN_CANDIDATES
        if has_enough:
            clients.append(torch.full_like(candidates, member.id))
            labels.append(pool.y.cpu()[candidates])
            rows.append(candidates)
    if not clients:
        raise DoesNotApply(
            f"no client has {MIN_CANDIDATES // 2} records or more, and as many others of its "
            "classes that nobody has"
        )
    return Records(torch.cat(clients), torch.cat(labels), torch.cat(rows), members)


class _Pool:
    """The inputs of a data set's clients, followed by those that nobody has."""

    def __init__(self, x: Tensor, y: Tensor, first_free: int) -> None:
        self.x = x
        self.y = y
        self.is_free = torch.arange(len(y)) >= first_free

    @classmethod
    def of(cls, run: AttackedRun, member: Member) -> _Pool:
        """Return the pool of a member's data set."""
        others = run.other_data(member.id)
        own = member.train
        x = torch.cat([own.x, run.model_inputs(member.id, others.x)])
        return cls(x, torch.cat([own.y, others.y]), len(own.x))

    def take(self, counts: list[int]) -> Tensor:
        """Return rows that nobody has, at most so many of each class; they are free no more."""
        taken = []
        for label, count in enumerate(counts):
            rows = ((self.y.cpu() == label) & self.is_free).nonzero().flatten()[:count]
            self.is_free[rows] = False
            taken.append(rows)
        return torch.cat(taken)


def train_shadows(
    run: AttackedRun, records: Records, federations: int, rounds: int
) -> Observations:
    """Return what can be seen of so many federations after so many rounds."""
    included = _flip_coins(run.config.seed, records, federations)
    seen = []
    with run.computing():
        for numbers in torch.arange(federations).split(STACKED_FEDERATIONS):
            seen += _train_stack(run, records, included, numbers.tolist(), rounds)
    stacked = {}
    for name in seen[0]:
        stacked[name] = torch.stack([each[name] for each in seen]).double()
    return Observations(
        records,
        included,
        stacked.get("prototypes"),
        stacked.get("shared"),
        stacked["embeddings"],
        stacked["confidence"],
        stacked.get("uploaded"),
    )


def _flip_coins(seed: int, records: Records, federations: int) -> Tensor:
    """Return which record is in which federation; a client without any is drawn again.

    That happens once in 2^candidates times, at most once in a thousand.
    """
    included = torch.zeros(federations, len(records), dtype=torch.bool)
    for federation in range(federations):
        for client in records.client.unique().tolist():
            places = (records.client == client).nonzero().flatten()
            attempt = 0
            while not included[federation, places].any():
                key = rng.key(seed, "audit: coins", federation, client, attempt)
                included[federation, places] = rng.uniform(key, len(places)) < 0.5
                attempt += 1
    return included


def _train_stack(
    run: AttackedRun, records: Records, included: Tensor, numbers: list[int], rounds: int
) -> list[Tree]:
    """Train some of the federations in one engine and return what can be seen of each."""
    configs = []
    federations = []
    for number in numbers:
        seed = (run.config.seed + 1 + number) % 2**62
        configs.append(replace(run.config, seed=seed, rounds=rounds, eval_every=rounds))
        federations.append(_make_federation(run.federation, records, included[number]))
    experiments = share_engine(configs, run.algorithm, federations)
    algorithm = experiments[0].algorithm
    engine = experiments[0].engine
    federation_runs = [experiment.federation_run() for experiment in experiments]
    for federation_run in federation_runs:
        federation_run.budget = None  # its noise is the run's, and nothing of it is released
    if not run.hides_uploads:
        _train_and_keep_uploads(algorithm, engine, federation_runs, rounds)
    else:
        for _ in run_rounds(algorithm, engine, federation_runs):
            pass
    return [_observe(experiment, records) for experiment in experiments]


def _train_and_keep_uploads(
    algorithm: Algorithm, engine: Engine, federation_runs: list[FederationRun], rounds: int
) -> None:
    """Train all rounds; in the last one everybody takes part, and single uploads are kept."""
    for federation_run in federation_runs:
        federation_run.schedule = replace(federation_run.schedule, rounds=rounds - 1)
    for _ in run_rounds(algorithm, engine, federation_runs):
        pass
    servers = [each.progress.server for each in federation_runs]
    closing = []
    for each in federation_runs:
        progress = each.progress
        latest = progress.latest_uploads
        closing.append(
            RoundUploads(algorithm, latest, progress.once_uploads, rounds, keeps_all=True)
        )
    nobody = torch.zeros(0, dtype=torch.int64)
    cohorts = []
    for each in federation_runs:
        everybody = torch.arange(len(each.federation.members))
        cohorts.append(Cohort(everybody, nobody, nobody))
    for chunk in engine.train(rounds, servers, cohorts):
        closing[chunk.federation].receive(chunk.speakers, chunk.uploads)
    for each, uploads in zip(federation_runs, closing, strict=True):
        each.progress.server = uploads.aggregate(each.progress.server, uploads.combine())


def _make_federation(federation: Federation, records: Records, included: Tensor) -> Federation:
    """Return the federation with the records that the coins put in."""
    members = []
    for member in records.members:
        chosen = included & (records.client == member.id)
        if (records.client == member.id).any():
            rows = records.row[chosen].to(member.train.x.device)
            pool = member.train
            member = replace(member, train=Examples(pool.x, pool.y, rows))
        # One test row is enough: nobody reads these accuracies.
        few = Examples(member.test.x, member.test.y, member.test.rows[:1], member.test.fixed)
        members.append(replace(member, test=few, validation=None))
    return replace(federation, members=members)


def _observe(experiment: Experiment, records: Records) -> Tree:
    """Return what can be seen of one federation after its last round."""
    latest = experiment.progress.latest_uploads.recall() or {}
    server = experiment.progress.server
    seen: Tree = {}
    if GROUP in latest and GROUP in latest[GROUP].sums:
        group = latest[GROUP]
        values = divide_by_weight(group)[GROUP]
        seen["prototypes"] = torch.where(group.weight[..., None] > 0, values, torch.nan)
    if isinstance(server.get(GROUP), Tensor) and "known" in server:
        is_known = server["known"][:, None] > 0
        seen["shared"] = torch.where(is_known, server[GROUP], torch.nan)
    own_states = experiment.client_states()
    columns: dict[str, list[Tensor]] = {"embeddings": [], "confidence": [], "uploaded": []}
    for client in records.client.unique().tolist():
        member = records.members[client]
        places = records.client == client
        x = member.train.x[records.row[places].to(member.train.x.device)]
        labels = records.label[places]
        state = experiment.as_evaluated(member, own_states[client])
        features, logits = _run_model(member, state, x)
        columns["embeddings"].append(features)
        columns["confidence"].append(scaled_confidence(logits, labels))
        sent = _read_weights(latest, client)
        if sent:
            own = own_states[client]
            weights = {name: value.to(own[name]) for name, value in sent.items()}
            _, logits = _run_model(member, own | weights, x)
            columns["uploaded"].append(scaled_confidence(logits, labels))
    for name, parts in columns.items():
        if parts:
            seen[name] = torch.cat(parts)
    return {name: value.cpu() for name, value in seen.items()}


def _read_weights(latest: Upload, client: int) -> Tree:
    """Return the weights that a client sent, or nothing."""
    if "model" not in latest:
        return {}
    values = divide_by_weight(latest["model"])
    return {name: value[client] for name, value in values.items()}


@torch.no_grad()
def _run_model(member: Member, state: Tree, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return features and logits in eval mode."""
    module = member.module.eval()
    return functional_call(module, with_copied_buffers(module, state), (x,))


def scaled_confidence(logits: Tensor, labels: Tensor) -> Tensor:
    """Return log(p / (1 − p)) for the probability p of each row's own class.

    Carlini et al. (2022): this is nearly Gaussian. It is computed without rounding p to 1.
    """
    own = logits.gather(1, labels[:, None].to(logits.device))[:, 0]
    rest = logits.scatter(1, labels[:, None].to(logits.device), -torch.inf)
    return own - rest.logsumexp(1)
