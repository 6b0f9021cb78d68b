"""From a configuration to a finished run: `fedproto.run`, and what the command line calls."""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from fedproto.config import plugins
from fedproto.config.options import Part
from fedproto.config.settings import Config, configure, read_run_toml
from fedproto.core.class_names import describe_similar_names
from fedproto.core.engine import Engine
from fedproto.core.federation import Federation, Member
from fedproto.core.files import hash_tensors
from fedproto.core.interrupts import finish_round_on_interrupt
from fedproto.core.local_training import Training
from fedproto.core.metrics import summarise
from fedproto.core.rounds import FederationRun, RoundResult, run_rounds
from fedproto.core.sampling import Schedule
from fedproto.core.server import Progress
from fedproto.core.tensors import find_mismatch, flatten_groups, split_groups
from fedproto.core.types import Algorithm, Tree
from fedproto.data import Source
from fedproto.engines.selection import build_engine, resolve
from fedproto.errors import DivergedError, LostProcessError, RunFolderError
from fedproto.partitions.file import read as read_partition
from fedproto.runs.client_models import write_client_models
from fedproto.runs.devices import _machine, settings
from fedproto.runs.folder import DIVERGED, RunFolder
from fedproto.runs.from_settings import FROM_PYTHON, _federation, _start
from fedproto.runs.prototype_files import PROTOTYPES, START, write_prototypes
from fedproto.runs.result import Result

OnRound = Callable[[RoundResult], None]


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, after the round was finished and, unless `checkpoint_every` is 0, a checkpoint written.

    Its cause is a LostProcessError where processes of the run ended before that could be done.
    """


@dataclass
class Experiment:
    """A federation about to run, alone or in one engine with others that differ in what `sweep.STACKED` names."""

    config: Config
    algorithm: Algorithm
    federation: Federation
    engine: Engine
    place: int  # of the federation among the engine's
    progress: Progress
    notices: list[str] = field(default_factory=list)  # what a person should know before it runs

    @classmethod
    def prepare(
        cls,
        config: Config,
        data: Any = None,
        modules: Any = None,
        loaded: dict[str, Source] | None = None,
    ) -> Experiment:
        """Load the data, share it out, build the models: everything that can be refused is refused here.

        `loaded` holds the sources read so far, for experiments that are prepared together.
        """
        algorithm = plugins.build("algorithm", config.algorithm)
        federation, config = _federation(
            config, algorithm, data, modules, {} if loaded is None else loaded
        )
        return cls._together([config], algorithm, [federation])[0]

    @classmethod
    def prepare_together(
        cls, configs: Sequence[Config], loaded: dict[str, Source] | None = None
    ) -> list[Experiment]:
        """Experiments of one method that one engine trains at once; `sweep.py` says what they may differ in."""
        algorithm = plugins.build("algorithm", configs[0].algorithm)
        loaded = {} if loaded is None else loaded
        pairs = [_federation(config, algorithm, None, None, loaded) for config in configs]
        return cls._together(
            [config for _, config in pairs], algorithm, [federation for federation, _ in pairs]
        )

    @classmethod
    def _together(
        cls, configs: Sequence[Config], algorithm: Algorithm, federations: Sequence[Federation]
    ) -> list[Experiment]:
        pairs = zip(configs, federations, strict=True)
        progresses = [_start(config, federation, algorithm) for config, federation in pairs]
        trainings = [
            Training(c.batch, c.lr, c.momentum, c.epochs, c.last_batch, c.seed) for c in configs
        ]
        resolved, plan, notices = resolve(configs[0], federations, algorithm, trainings)
        engine = build_engine(resolved, plan, federations, algorithm, trainings)
        settled = {
            name: getattr(resolved, name)
            for name in ("engine", "device", "compile", "workers", "stack")
        }
        notices += [
            sentence
            for federation in federations
            for sentence in describe_similar_names(_meeting_names(federation))
        ]
        return [
            cls(replace(config, **settled), algorithm, federation, engine, place, progress, notices)
            for place, (config, federation, progress) in enumerate(
                zip(configs, federations, progresses, strict=True)
            )
        ]

    def new_folder(self, out: str | Path, given: Sequence[Tree] | None = None) -> RunFolder:
        """Make the run folder, which appears with all that the run begins with, or not at all.

        `given` are the clients' states where the engine was handed others than those that were drawn. They are in
        no other file, so the folder gets a checkpoint of round 0.
        """
        path, members = Path(out), self.federation.members
        config = self.config.toml(self.federation.from_data)
        with RunFolder.fill(path, config, self.federation.partition) as folder:
            folder.write_encodings([member.preprocessing.encoding for member in members])
            folder.write_start(_hash_states(given or self._drawn_states()), self._input_shapes())
            if (
                self.config.prototypes is not None
            ):  # a copy: the file named may change while this run goes on
                write_prototypes(folder.path / START, self.progress.server, self.federation.classes)
            if given is not None:
                self.write_checkpoint(folder)
        return RunFolder(path)

    def _drawn_states(self) -> list[Tree]:
        return [member.initial for member in self.federation.members]

    def _input_shapes(self) -> list[list[int]]:
        return [list(member.train.x.shape[1:]) for member in self.federation.members]

    def execute(self, folder: RunFolder | None = None, on_round: OnRound | None = None) -> Result:
        """Run from where it stands to the last round."""
        return execute([self], [folder], on_round)[0]

    def federation_run(self) -> FederationRun:
        c = self.config
        schedule = Schedule(
            c.rounds, c.participation, c.lost_uploads, c.stragglers, c.eval_every, c.seed
        )
        return FederationRun(self.federation, schedule, self.progress)

    def _write_round(self, folder: RunFolder, result: RoundResult) -> None:
        folder.add_metrics(result.line())
        if (
            result.round == self.config.rounds
            or result.round % max(1, self.config.checkpoint_every) == 0
        ):
            self.write_checkpoint(folder)

    def write_checkpoint(self, folder: RunFolder) -> None:
        if self.config.checkpoint_every == 0:
            return
        clients = flatten_groups({"client": self.engine.export(self.place)})
        folder.save_checkpoint(self.progress.round, self.progress.export() | clients)

    def restore(self, folder: RunFolder) -> None:
        """Continue from the folder's newest checkpoint, or from the start where there is none.

        Refused where the run began with other rows, inputs of another shape or, without a checkpoint, other weights.
        """
        self._refuse_other_data(folder)
        stored = folder.load_checkpoint()
        started = folder.read_start()
        if started["inputs"] != self._input_shapes():
            raise RunFolderError(
                f"{folder.path} began with inputs of other shapes than its data set holds now: put the data back, or "
                "start a new run"
            )
        if stored is None:
            self._refuse_other_weights(folder, started["weights"])
            return
        round, tree = stored
        clients = split_groups(tree).get("client", {})
        odd = find_mismatch(self._initial_states(), clients)
        try:
            if odd is not None:
                raise ValueError(odd)
            self.progress.restore(tree, round)
        except ValueError as error:
            raise RunFolderError(
                f"the checkpoint in {folder.path} does not fit the run, or is damaged: {error}"
            ) from error
        self.engine.restore(self.place, clients)

    def _initial_states(self) -> Tree:
        """All clients' states before the first round, as an engine exports them."""
        states: Tree = {}
        for member in self.federation.members:
            states |= {f"{member.id}.{name}": value for name, value in member.initial.items()}
        return states

    def _refuse_other_data(self, folder: RunFolder) -> None:
        """Compare the rows that were shared out, and the labels they came from, with those the run began with."""
        path = folder.path / "partition.json"
        begun, now = read_partition(path), self.federation.partition
        if begun["sha256"] == now["sha256"]:
            return
        pairs = zip(begun["clients"], now["clients"], strict=False)
        is_labels = any(before["labels"] != after["labels"] for before, after in pairs)
        what = "labels" if is_labels else "rows"
        raise RunFolderError(
            f"{path} is of other {what} than the data set gives now: put the data back as it was when the run began, "
            "or start a new run"
        )

    def _refuse_other_weights(self, folder: RunFolder, began_with: str) -> None:
        if _hash_states(self._drawn_states()) != began_with:
            raise RunFolderError(
                f"{folder.path} has no checkpoint, and the weights it began with are gone or have changed (a file of "
                "weights, the models that `fedproto extend` was given, or torch itself): start a new run"
            )

    def _finish(
        self, folder: RunFolder | None, lines: list[dict[str, Any]], clients: Tree
    ) -> Result:
        has_prototypes = {"prototypes", "known"} <= self.progress.server.keys()
        server = self.progress.server
        prototypes = (
            {name: server[name].cpu() for name in ("prototypes", "known")} if has_prototypes else {}
        )
        path = folder.path if folder else None
        result = Result(
            self._contents(lines, clients), lines, prototypes, self.client_states(), path
        )
        if folder:
            if prototypes:
                local = self.progress.latest_uploads.local_prototypes()
                write_prototypes(
                    folder.path / PROTOTYPES, prototypes | local, self.federation.classes
                )
            accuracies = [client["accuracy"] for client in result.data["clients"]]
            write_client_models(folder, self, result.states, accuracies)
            folder.write_json("result.json", result.data)
        return result

    def client_states(self) -> list[Tree]:
        """Each client's own parameters and buffers, by name."""
        states = split_groups(self.engine.export(self.place))
        return [states.get(str(member.id), {}) for member in self.federation.members]

    def as_evaluated(self, member: Member, own: Tree) -> Tree:
        """A client's model as it is evaluated, on the device: its own state, or that with what its server sends."""
        received = self.algorithm.send(self.progress.server, self.federation.own_classes[member.id])
        return self.algorithm.adopt(
            {name: value.to(self.federation.device) for name, value in own.items()}, received
        )

    def _contents(self, lines: list[dict[str, Any]], clients: Tree) -> dict[str, Any]:
        traffic, seconds = self.progress.ledger.total(), sum(line["seconds"] for line in lines)
        return {
            "algorithm": self.algorithm.name,
            "dataset": ",".join(part.name for part in self.config.dataset),
            "seed": self.config.seed,
            "rounds": self.config.rounds,
            "classes": list(self.federation.classes),
            "partition": self.federation.partition["sha256"],
            "clients": [
                self._client(
                    number, {name: float(value[number]) for name, value in clients.items()}, images
                )
                for number, images in enumerate(self._images())
            ],
            "accuracy": summarise(clients),
            "diverged": self._diverged(),
            "communication": {
                "values_per_round": traffic["values_up"] / self.config.rounds,
                "bytes_up": traffic["bytes_up"],
                "bytes_down": traffic["bytes_down"],
            },
            "seconds": {"total": seconds, "per_round": seconds / self.config.rounds},
            "machine": _machine(self.federation.device),
        }

    def _diverged(self) -> list[dict[str, int]] | None:
        """The clients whose loss exploded and the first round in which it did; None where all is well."""
        found = sorted(self.progress.diverged.items())
        return [{"client": client, "round": round} for client, round in found] or None

    def _images(self) -> list[list[int]]:
        """For each member how many training images it has of each of its classes; one wait for the device."""
        members, classes = self.federation.members, len(self.federation.classes)
        cells = torch.cat([m.train.y[m.train.rows] + m.id * classes for m in members])
        counts = (
            torch.bincount(cells, minlength=len(members) * classes)
            .view(len(members), classes)
            .tolist()
        )
        return [
            [row[label] for label in member.classes]
            for member, row in zip(members, counts, strict=True)
        ]

    def _client(self, number: int, accuracy: dict[str, float], images: list[int]) -> dict[str, Any]:
        member = self.federation.members[number]
        last_upload = (
            {"last_upload": int(self.progress.latest_uploads.last_round[number])}
            if self.algorithm.remembers
            else {}
        )
        return {
            "id": number,
            "dataset": member.dataset,
            "model": member.model,
            "classes": [self.federation.classes[label] for label in member.classes],
            "images": images,  # training images of each of these classes
            "train": len(member.train),
            "test": len(member.test),
            "accuracy": accuracy,
            "communication": self.progress.ledger.of(number),
            **last_upload,
        }


def execute(
    experiments: Sequence[Experiment],
    folders: Sequence[RunFolder | None],
    on_round: OnRound | None = None,
) -> list[Result]:
    """Run experiments that share an engine from where they stand to the last round; all stand at the same."""
    interrupted = threading.Event()
    try:
        with _attended(experiments[0].config, interrupted):
            (results,) = deque(proceed(experiments, folders, interrupted, on_round), maxlen=1)
    except LostProcessError as error:
        if not interrupted.is_set():
            raise
        raise Interrupted from error  # they were told to end, too: neither an error nor a lack of memory
    if interrupted.is_set():  # too late to stop this run, but whoever called may have more to do
        raise Interrupted
    return results


def proceed(
    experiments: Sequence[Experiment],
    folders: Sequence[RunFolder | None],
    interrupted: threading.Event,
    on_round: OnRound | None = None,
) -> Generator[list[Any]]:
    """The same round by round: each experiment's `RoundResult`, and at the end its `Result`.

    Whoever is interrupted, or stops asking, leaves a checkpoint of the last round.
    """
    first = experiments[0]
    pairs = list(zip(experiments, folders, strict=True))
    clients: list[Tree | None] = [None] * len(experiments)
    federation_runs = [each.federation_run() for each in experiments]
    with closing(first.engine), hold_all(folders), _divergence_written(pairs):
        lines = [
            folder.keep_metrics(each.progress.round) if folder else [] for each, folder in pairs
        ]
        for each, kept in zip(experiments, lines, strict=True):
            each.progress.look_back(kept)
        for results in run_rounds(first.algorithm, first.engine, federation_runs):
            clients = [result.clients for result in results]
            for (each, folder), result, kept in zip(pairs, results, lines, strict=True):
                kept.append(result.line())
                if folder:
                    each._write_round(folder, result)
                if on_round:
                    on_round(result)
            with _checkpoint_if_left(pairs):
                yield results
                if interrupted.is_set():
                    raise Interrupted
        # A run killed between its last checkpoint and its result has no round left to evaluate in.
        found = (
            clients
            if clients[0]
            else first.engine.evaluate([each.progress.server for each in experiments])
        )
        finished = [
            each._finish(folder, kept, accuracies)  # type: ignore[arg-type]
            for (each, folder), kept, accuracies in zip(pairs, lines, found, strict=True)
        ]
    yield finished


@contextmanager
def hold_all(folders: Sequence[RunFolder | None]) -> Iterator[None]:
    """Be the only writer of some run folders."""
    with ExitStack() as stack:
        for folder in folders:
            if folder is not None:
                stack.enter_context(folder.hold())
        yield


@contextmanager
def _checkpoint_if_left(pairs: Sequence[tuple[Experiment, RunFolder | None]]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        for each, folder in pairs:
            if folder:
                each.write_checkpoint(folder)
        raise


@contextmanager
def _divergence_written(pairs: Sequence[tuple[Experiment, RunFolder | None]]) -> Iterator[None]:
    """Leave `diverged.json` in the folder of a run that ends because its numbers are no longer finite.

    Of several runs together it does not say which one it was; a sweep tries them alone.
    """
    for _, folder in pairs:
        if folder:
            (folder.path / DIVERGED).unlink(missing_ok=True)
    try:
        yield
    except DivergedError as error:
        experiment, folder = pairs[0]
        if len(pairs) == 1 and folder:
            found = {
                "seed": experiment.config.seed,
                "rounds": experiment.config.rounds,
                "error": str(error),
            }
            folder.write_json(
                DIVERGED, found | {"diverged": [{"client": error.client, "round": error.round}]}
            )
        raise


def reopen(
    folder: RunFolder, loaded: dict[str, Source] | None = None
) -> tuple[Experiment, RunFolder]:
    """The experiment of a run folder, standing where its checkpoint left it, and the folder."""
    path = folder.path
    settings = read_run_toml(path / "config.toml")
    if FROM_PYTHON.name in (settings.get("dataset"), settings.get("model")):
        raise RunFolderError(
            f"{path} was started from Python with arrays or modules of its own, so it cannot be resumed here"
        )
    settings["partition"] = str(Part(f"file:{path / 'partition.json'}"))
    if (path / START).exists():
        settings["prototypes"] = str(path / START)
    if (
        folder.has_checkpoint()
    ):  # everybody's weights are in it, so the file they began with may be gone
        settings.pop("initial", None)
    plugins.refuse_plugins(settings, path / "config.toml")
    config = configure({k: v for k, v in settings.items() if not k.startswith("partition.")})[0]
    experiment = Experiment.prepare(config, loaded=loaded)
    experiment.restore(folder)
    return experiment, folder


def _hash_states(states: Sequence[Tree]) -> str:
    """Return one hash of all clients' states; clients of one architecture may share theirs."""
    different = {id(state): state for state in states}
    hashes = {key: hash_tensors(state) for key, state in different.items()}
    listed = "\n".join(hashes[id(state)] for state in states)
    return hashlib.sha256(listed.encode()).hexdigest()


def _meeting_names(federation: Federation) -> tuple[str, ...]:
    """The names of a federation of several sources, or of a person's own files.

    A data set that comes with the package knows what it calls its classes, such as `a` and `A`.
    """
    datasets = {member.dataset for member in federation.members}
    is_own = any(":" in dataset for dataset in datasets)
    return federation.classes if len(datasets) > 1 or is_own else ()


def follow(experiments: Sequence[Experiment]) -> None:
    """What a process that torchrun started beside the first one does: train its share of the clients when asked."""
    for each in experiments:
        with settings(each.config.threads, each.config.precision):
            each.engine.serve()  # type: ignore[attr-defined]


@contextmanager
def _attended(config: Config, interrupted: threading.Event) -> Iterator[None]:
    """With the run's settings; Ctrl-C lets the round be finished."""
    with settings(config.threads, config.precision), finish_round_on_interrupt(interrupted):
        yield
