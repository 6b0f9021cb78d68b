"""From a configuration to an experiment that is ready to run, and back from a run folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedproto.config import plugins
from fedproto.config.choices import PYTHON, has_own_data
from fedproto.config.config_file import read_run_toml
from fedproto.config.options import Part
from fedproto.config.settings import Config, configure
from fedproto.core.best_round import BestRound, refuse_idle_settings
from fedproto.core.class_names import describe_similar_names
from fedproto.core.closed_form import TEACHER
from fedproto.core.engine import Engine
from fedproto.core.federation import Federation, Member
from fedproto.core.local_training import start_client
from fedproto.core.measurement import MeasuredClient
from fedproto.core.metrics import ACCURACIES
from fedproto.core.prototypes import Tau
from fedproto.core.rounds import FederationRun, RoundResult
from fedproto.core.server import Progress
from fedproto.core.tensors import find_mismatch, flatten_groups, split_client, split_groups
from fedproto.core.types import Algorithm, State, Tree
from fedproto.data import Source
from fedproto.engines.selection import build_engine, resolve
from fedproto.errors import RunFolderError
from fedproto.privacy.budget import Budget
from fedproto.privacy.claim import Claim, make_claim
from fedproto.privacy.records import PRIVACY, describe_spending, restore_spending
from fedproto.runs import start_checks
from fedproto.runs.baselines import refuse_baselines
from fedproto.runs.best_state import BestState
from fedproto.runs.client_models import write_client_models
from fedproto.runs.composition import Method
from fedproto.runs.data_notices import describe_lonely_classes
from fedproto.runs.execution import OnRound, execute
from fedproto.runs.folder import RESULT, RunFolder
from fedproto.runs.from_settings import FROM_PYTHON, build_federation, start_progress
from fedproto.runs.own_draws import describe_own_draws
from fedproto.runs.prototype_files import PROTOTYPES, START, take_prototypes, write_prototypes
from fedproto.runs.result import Result, TrainedFederation
from fedproto.runs.result_contents import describe_run
from fedproto.runs.scheduling import (
    build_schedule,
    count_local_steps,
    refuse_asynchrony,
    refuse_lost_sums,
)
from fedproto.runs.teacher_files import teacher_of, weight_of
from fedproto.runs.training_settings import training_of

#: Settings that `auto` leaves open until the federation is known.
RESOLVED_SETTINGS = ("engine", "device", "compile", "workers", "stack")


@dataclass
class Experiment:
    """A federation about to run, alone or in one engine with others.

    Federations that share an engine differ only in `sweep.STACKED_SETTINGS`.
    """

    config: Config
    algorithm: Algorithm
    federation: Federation
    engine: Engine
    place: int  # of the federation among the engine's
    progress: Progress
    notices: list[str] = field(default_factory=list)  # what the user should know before it runs
    best_state: BestState | None = None  # None: the federation has no validation rows
    keeps_best: bool = True  # whether the state after the best round will be needed
    budget: Budget | None = None  # what the clients have spent; None: nothing is private

    @property
    def best_round(self) -> int:
        """The round whose models are the run's result; without validation, the last completed."""
        return self.progress.round if self.best_state is None else self.best_state.best.round

    @classmethod
    def prepare(
        cls,
        config: Config,
        data: Any = None,
        modules: Any = None,
        loaded: dict[str, Source] | None = None,
        names: Sequence[str] | None = None,
    ) -> Experiment:
        """Load the data, divide it and build the models; refuse here whatever can be refused.

        Args:
            config: the settings.
            data: what a Python program holds, instead of the data set of the settings.
            modules: a module, or one per client, instead of the model of the settings.
            loaded: the sources read so far, by name; experiments prepared one after the other
                share it.
            names: what the clients are called, where the data does not say it.
        """
        method = Method.build(config)
        loaded = {} if loaded is None else loaded
        federation, config = build_federation(
            config, method.algorithm, data, modules, loaded, names
        )
        algorithm = method.compose([federation], [config])
        return cls.share_engine([config], algorithm, [federation])[0]

    @classmethod
    def prepare_together(
        cls, configs: Sequence[Config], loaded: dict[str, Source] | None = None
    ) -> list[Experiment]:
        """Prepare experiments of one algorithm that one engine trains at once.

        They may differ in `sweep.STACKED_SETTINGS`.
        """
        method = Method.build(configs[0])
        loaded = {} if loaded is None else loaded
        federations = []
        complete_configs = []
        for config in configs:
            federation, complete = build_federation(config, method.algorithm, None, None, loaded)
            federations.append(federation)
            complete_configs.append(complete)
        algorithm = method.compose(federations, complete_configs)
        return cls.share_engine(complete_configs, algorithm, federations)

    @classmethod
    def share_engine(
        cls, configs: Sequence[Config], algorithm: Algorithm, federations: Sequence[Federation]
    ) -> list[Experiment]:
        refuse_baselines(configs[0])
        progresses = []
        for config, federation in zip(configs, federations, strict=True):
            progress = start_progress(config, federation, algorithm)
            progresses.append(progress)
            clients = len(federation.members)
            refuse_asynchrony(config, clients, algorithm, progress.layouts)
            refuse_lost_sums(config, clients, algorithm)
        if configs[0].buffer:  # uploads arrive one by one
            algorithm = replace(algorithm, additive=False)
        trainings = [training_of(config, algorithm.privacy) for config in configs]
        resolved, plan, notices = resolve(configs[0], federations, algorithm, trainings)
        engine = build_engine(resolved, plan, federations, algorithm, trainings)
        settled = {name: getattr(resolved, name) for name in RESOLVED_SETTINGS}
        for config, federation, progress in zip(configs, federations, progresses, strict=True):
            found = list(federation.notices)
            found += describe_own_draws(configs[0], federation)
            if "prototypes" in progress.server and has_own_data(config.dataset):
                found += describe_lonely_classes(federation)
            notices += [notice for notice in found if notice not in notices]
            notices += describe_similar_names(_names_to_compare(federation))
        experiments = []
        for place, config in enumerate(configs):
            experiment = cls(
                config=replace(config, **settled),
                algorithm=algorithm,
                federation=federations[place],
                engine=engine,
                place=place,
                progress=progresses[place],
                notices=notices,
                best_state=_choose_best_by(
                    config, federations[place], progresses[place], algorithm.uses_fixed
                ),
                budget=open_budget(algorithm, place, len(federations[place].members)),
            )
            experiments.append(experiment)
        return experiments

    def __repr__(self) -> str:
        rounds = f"round {self.progress.round} of {self.config.rounds}"
        return f"<{self.algorithm.name} over a {str(self.federation)[1:-1]}, {rounds}>"

    def federation_run(self) -> FederationRun:
        """Return what the round loop needs of this experiment."""
        schedule = build_schedule(self.config, len(self.federation.members))
        best = None if self.best_state is None else self.best_state.best
        steps = None
        if schedule.buffer:
            training = training_of(self.config)
            steps = count_local_steps(self.federation, self.algorithm, training)
        return FederationRun(self.federation, schedule, self.progress, best, steps, self.budget)

    def execute(self, folder: RunFolder | None = None, on_round: OnRound | None = None) -> Result:
        """Run from the current round to the last one."""
        return execute([self], [folder], on_round)[0]

    # --- the run folder

    def new_folder(self, out: str | Path, given: Sequence[Tree] | None = None) -> RunFolder:
        """Create the run folder, which appears with everything the run begins with, or not at all.

        `given` are the clients' states where the engine was handed others than the drawn ones. They
        are in no other file, so the folder gets a checkpoint of round 0.
        """
        path = Path(out)
        config = self.config.toml(self.federation.from_data)
        encodings = [member.preprocessing.encoding for member in self.federation.members]
        weights_hash = start_checks.hash_states(given or self._drawn_states())
        with RunFolder.fill(path, config, self.federation.partition) as folder:
            self.write_claim(folder)
            folder.write_encodings(encodings)
            shapes = start_checks.list_input_shapes(self.federation)
            frozen_hash = start_checks.hash_frozen(self.federation)
            folder.write_start(weights_hash, shapes, self._hash_arrays(), frozen_hash)
            if self.config.prototypes is not None:
                # A copy: the file that the settings name may change during the run.
                server = self.progress.server
                trees = [key for key, value in server.items() if isinstance(value, dict)]
                tensors = {key: value for key, value in server.items() if key not in trees}
                write_prototypes(folder.path / START, tensors, self.federation.classes)
            if given is not None:
                self.write_checkpoint(folder)
        return RunFolder(path)

    def claim(self) -> Claim | None:
        """Return what is claimed of the rounds so far; None if the run is not private."""
        if self.budget is None:
            return None
        return make_claim(self.algorithm.privacy, self.budget, self.config, self.federation)

    def write_claim(self, folder: RunFolder) -> None:
        """Write what is claimed, and what every client has spent, if the run is private."""
        claim = self.claim()
        if claim is not None and self.budget is not None:
            names = [member.name for member in self.federation.members]
            folder.write_json(PRIVACY, describe_spending(claim, self.budget, names))

    def write_round(self, folder: RunFolder, result: RoundResult) -> None:
        """Write a round's line of metrics.jsonl and, when one is due, a checkpoint."""
        folder.add_metrics(result.line())
        self.keep_best(folder)
        is_over = self.best_state is not None and self.best_state.best.is_over
        is_last = result.round == self.config.rounds or is_over
        is_due = result.round % max(1, self.config.checkpoint_every) == 0
        # A round that is done again is paid for again.
        if is_last or is_due or self.budget is not None:
            self.write_checkpoint(folder)

    def keep_best(self, folder: RunFolder | None) -> None:
        """Keep the present state if the last completed round is the best so far."""
        if not self.keeps_best:
            return
        if self.best_state is not None and self.best_state.best.round == self.progress.round:
            self.best_state.keep(self._export(), self._folder_of_states(folder))

    def restore_best(self, folder: RunFolder | None) -> None:
        """Go back to the state after the best round, once all rounds are done.

        Traffic and the number of rounds remain those of the whole run. The checkpoint is replaced:
        it is from now on that of the models that the run results in.
        """
        if self.best_state is None or self.best_state.best.round == self.progress.round:
            return
        tree = self.best_state.load(self._folder_of_states(folder))
        traffic = self.progress.ledger.counts
        self._restore_tree(tree, self.progress.round, "the state after the best round")
        self.progress.ledger.counts = traffic
        if folder is not None:
            self.write_checkpoint(folder)

    def _folder_of_states(self, folder: RunFolder | None) -> RunFolder | None:
        """Return where states are kept: None, which is in memory, if checkpoints are turned off."""
        return None if self.config.checkpoint_every == 0 else folder

    def write_checkpoint(self, folder: RunFolder) -> None:
        """Write the state of the server and of all clients, unless checkpoints are turned off."""
        if self.config.checkpoint_every == 0:
            return
        folder.save_checkpoint(self.progress.round, self._export())
        if self.best_state is not None:
            self.best_state.note_checkpoint(folder)

    def _export(self) -> Tree:
        """Return the state of the server and of all clients as one flat tree."""
        clients = flatten_groups({"client": self.engine.export(self.place)})
        return self.progress.export() | clients

    def restore(self, folder: RunFolder) -> None:
        """Continue from the folder's newest checkpoint, or from the start where there is none.

        Raises RunFolderError where the run began with other rows, with inputs of another shape or,
        without a checkpoint, with other weights.
        """
        start_checks.refuse_other_partition(folder, self.federation.partition)
        if self.budget is not None:
            restore_spending(self.budget, folder.read_json(PRIVACY), folder.path)
        stored = folder.load_checkpoint()
        started = folder.read_start()
        start_checks.refuse_other_arrays(folder, started.get("arrays"), self._hash_arrays())
        frozen_hash = start_checks.hash_frozen(self.federation)
        start_checks.refuse_other_bodies(folder, started.get("frozen"), frozen_hash)
        start_checks.refuse_other_shapes(folder, started["inputs"], self.federation)
        if stored is None:
            drawn = self._drawn_states()
            start_checks.refuse_other_weights(folder, started["weights"], drawn)
            return
        round, tree = stored
        self._restore_tree(tree, round, f"the checkpoint in {folder.path}")

    def _restore_tree(self, tree: Tree, round: int, where: str) -> None:
        """Continue from what `_export` returned after a round; `where` begins an error."""
        clients = split_groups(tree).get("client", {})
        try:
            mismatch = find_mismatch(self._initial_states(), clients)
            if mismatch is not None:
                raise ValueError(mismatch)
            self.progress.restore(tree, round)
        except ValueError as error:
            raise RunFolderError(f"{where} does not fit the run, or is damaged: {error}") from error
        self.engine.restore(self.place, clients)

    def finish(
        self,
        folder: RunFolder | None,
        lines: list[dict[str, Any]],
        accuracies: Tree,
        measured: dict[int, MeasuredClient],
        baselines: dict[str, dict[str, Any]],
        last_round: dict[str, Any] | None = None,
    ) -> Result:
        """Return the result of the finished run, and write it to its folder.

        `lines` are those of metrics.jsonl; `accuracies` holds one value per client, and `measured`
        all metrics of each. `baselines` are those that were trained, and `last_round` is what was
        measured of it beside the best round, if anything was.
        """
        data = describe_run(self, lines, accuracies, measured)
        if last_round is not None:
            data["last_round"] = last_round
        data["baselines"] |= baselines
        prototypes = take_prototypes(self.progress.server)
        states = []
        for member, state in zip(self.federation.members, self.client_states(), strict=True):
            states.append(member.whole_state(state))
        result = Result(
            data=data,
            metrics=lines,
            prototypes=prototypes,
            states=states,
            folder=folder.path if folder else None,
            trained=self.trained_federation(),
        )
        if folder is None:
            return result
        if prototypes:
            local = self.progress.latest_uploads.local_prototypes()
            names = [member.name for member in self.federation.members] if local else []
            path = folder.path / PROTOTYPES
            write_prototypes(path, prototypes | local, self.federation.classes, names)
        client_accuracies = [client["accuracy"] for client in result.data["clients"]]
        write_client_models(folder, self, result.states, client_accuracies)
        folder.write_json(RESULT, result.data)
        folder.drop_best()
        folder.drop_last()
        return result

    # --- the clients' states

    def client_states(self) -> list[Tree]:
        """Return each client's own parameters and buffers by name."""
        whole_states = split_groups(self.engine.export(self.place))
        states = []
        for member in self.federation.members:
            params, _ = split_client(whole_states.get(str(member.id), {}))
            states.append(params)
        return states

    def as_evaluated(self, member: Member, own: Tree) -> Tree:
        """Return a client's model as it is evaluated, on the device."""
        return self.trained_federation().as_evaluated(member, own)

    def trained_federation(self) -> TrainedFederation:
        """Return the federation as it is now, without the engine."""
        return TrainedFederation(
            federation=self.federation,
            algorithm=self.algorithm,
            server=self.progress.server,
            has_own_modules=self.config.model == (FROM_PYTHON,),
            kept=[] if self.algorithm.client_adopt is None else self._kept_states(),
            tau=Tau.of(self.config.algorithm.options),
            teacher=teacher_of(self),
            teacher_weights=self.teacher_weights(),
        )

    def teacher_weights(self) -> list[float]:
        """Return the weight that each client gives the teacher; empty if there is none."""
        if TEACHER not in self.progress.server:
            return []
        return [weight_of(kept) for kept in self._kept_states()]

    def _kept_states(self) -> list[State]:
        """Return what each client keeps beside its model."""
        whole_states = split_groups(self.engine.export(self.place))
        members = self.federation.members
        return [split_client(whole_states[str(member.id)])[1] for member in members]

    def _drawn_states(self) -> list[Tree]:
        return [member.initial for member in self.federation.members]

    def _hash_arrays(self) -> str | None:
        """Return a hash of the inputs of all clients that were passed from Python, or None."""
        if self.config.dataset[0].name != PYTHON:
            return None
        return start_checks.hash_inputs(self.federation)

    def _initial_states(self) -> Tree:
        """Return all clients' states before the first round, as an engine exports them."""
        states: Tree = {}
        for member in self.federation.members:
            whole = start_client(self.algorithm, member.initial, self.federation.task)
            for name, value in whole.items():
                states[f"{member.id}.{name}"] = value
        return states


def open_budget(algorithm: Algorithm, place: int, clients: int) -> Budget | None:
    """Return the budget of a federation before its first round; None if nothing is private."""
    return None if algorithm.privacy is None else algorithm.privacy.open_budget(place, clients)


def _choose_best_by(
    config: Config, federation: Federation, progress: Progress, has_teacher: bool
) -> BestState | None:
    """Return what chooses the best round; None without validation rows."""
    if not federation.has_validation:
        refuse_idle_settings(config.select_by, config.patience)
        return None
    best = BestRound(config.select_by, config.patience)
    if not plugins.is_outside("algorithm", config.algorithm.name):
        has_prototypes = "prototypes" in progress.server
        names = [name for name in ACCURACIES if has_prototypes or name.startswith("head")]
        if has_teacher:  # it predicts alone, and beside each of the others
            beside = [name.removesuffix("_own") for name in names if name.endswith("_own")]
            for way in (TEACHER, *(f"{name}+{TEACHER}" for name in beside)):
                names += [way, f"{way}_own"]
        best.find_name(names)  # refuses another name before anything is trained
    return BestState(best)


def _names_to_compare(federation: Federation) -> tuple[str, ...]:
    """Return the class names of several sources, or of a user's own files; else none.

    The classes of a data set that comes with the package are right, even `a` beside `A`.
    """
    datasets = {member.dataset for member in federation.members}
    has_own_files = any(":" in dataset for dataset in datasets)
    return federation.classes if len(datasets) > 1 or has_own_files else ()


def reopen(
    folder: RunFolder,
    loaded: dict[str, Source] | None = None,
    data: Any = None,
    modules: Any = None,
) -> tuple[Experiment, RunFolder]:
    """Return the experiment of a run folder at its newest checkpoint, and the folder.

    Args:
        folder: the run folder.
        loaded: the sources read so far, by name.
        data, modules: the arrays and modules that the run was started with from Python, if any.
    """
    path = folder.path
    settings = read_run_toml(path / "config.toml")
    start_checks.refuse_other_origins(path, settings, data, modules)
    settings = {key: value for key, value in settings.items() if not key.startswith("partition.")}
    if settings.get("partition") == FROM_PYTHON.name:
        del settings["partition"]
    else:
        settings["partition"] = str(Part(f"file:{path / 'partition.json'}"))
    if modules is not None:
        del settings["model"]
    if (path / START).exists():
        settings["prototypes"] = str(path / START)
    if folder.has_checkpoint() and settings.get("freeze") != "body":
        # It holds all clients' weights, so the file they began with may be gone.
        settings.pop("initial", None)
    plugins.refuse_plugins(settings, path / "config.toml")
    experiment = Experiment.prepare(configure(settings)[0], data, modules, loaded)
    experiment.restore(folder)
    return experiment, folder
