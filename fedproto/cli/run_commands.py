"""`fedproto run` and `fedproto resume`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedproto.cli.flags import PluginDir, TrustPlugins
from fedproto.cli.output import execute, print_json_lines, say, show_results
from fedproto.cli.volume import AsJson, Quiet, Verbose
from fedproto.config.profiles import PROFILES

if TYPE_CHECKING:
    from fedproto.config.settings import Config
    from fedproto.data import Source

RUN_EPILOG = (
    "Keys that only --set and TOML know: dim, start, freeze, epochs, momentum, weight_decay, "
    "clip_norm, warmup, last_batch, report_last, step_noise, gradient_clip, noise_at, "
    "count_threshold, noise_shape, client_sampling, precision, threads, "
    "workers, stack, states, compile, and the "
    "options that `fedproto list` shows."
)
PROFILE_HELP = f"reading of FedProto: {', '.join(PROFILES)} [paper]"
#: Bytes that the name of a data set or algorithm may take in the name of a folder.
MAX_NAME_BYTES = 100


def _flag(name: str, metavar: str, text: str) -> Any:
    """Declare a flag that takes text: fedproto/config alone says which values are accepted."""
    return typer.Option(f"--{name}", metavar=metavar, help=text, show_default=False)


def run(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="CONFIG.toml", help="settings as a TOML file; flags override them"),
    ] = None,
    profile: Annotated[str | None, _flag("profile", "NAME", PROFILE_HELP)] = None,
    dataset: Annotated[
        str | None,
        _flag(
            "dataset",
            "NAME",
            "your own: csv:PATH, folder:PATH, text:PATH, hf:PATH, npz:PATH; "
            "or mnist5k, digits, mnist, cifar10, ... [mnist5k]",
        ),
    ] = None,
    algorithm: Annotated[
        str | None,
        _flag("algorithm", "NAME", "fedproto, local, ...; 'A,B' compares several [fedproto]"),
    ] = None,
    model: Annotated[
        str | None,
        _flag("model", "NAME", "cnn, 'cnn(channels=18)*7,mlp*13', cnn-mh, ... [the data set's]"),
    ] = None,
    partition: Annotated[
        str | None,
        _flag(
            "partition",
            "NAME",
            "nway, dirichlet, natural, iid, file:PATH [nway; your own data: natural, or iid]",
        ),
    ] = None,
    clients: Annotated[
        str | None,
        _flag(
            "clients", "N", "number of clients [20; your own data: as many as it names or suits]"
        ),
    ] = None,
    ways: Annotated[
        str | None, _flag("ways", "N", "classes per client (mean) [3, or all if there are fewer]")
    ] = None,
    shots: Annotated[
        str | None, _flag("shots", "N", "training rows per class (mean) [the data set's]")
    ] = None,
    stdev: Annotated[str | None, _flag("stdev", "X", "noise on ways [2]")] = None,
    shots_stdev: Annotated[str | None, _flag("shots-stdev", "X", "noise on shots [stdev]")] = None,
    test_shots: Annotated[str | None, _flag("test-shots", "N", "test rows per class [all]")] = None,
    rounds: Annotated[str | None, _flag("rounds", "N", "communication rounds [100]")] = None,
    batch: Annotated[str | None, _flag("batch", "N", "rows per training step [8]")] = None,
    local_steps: Annotated[
        str | None,
        _flag("local-steps", "N", "batches per client and round [those of one epoch]"),
    ] = None,
    lr: Annotated[str | None, _flag("lr", "X", "learning rate [0.01]")] = None,
    optimiser: Annotated[str | None, _flag("optimiser", "NAME", "sgd, adam or adamw [sgd]")] = None,
    schedule: Annotated[
        str | None,
        _flag("schedule", "NAME", "learning rate: constant, cosine, linear, step [constant]"),
    ] = None,
    class_weights: Annotated[
        str | None,
        _flag("class-weights", "NAME", "none, or balanced: rare classes count more [none]"),
    ] = None,
    sampling: Annotated[
        str | None,
        _flag("sampling", "NAME", "shuffle, or balanced: rare classes come more often [shuffle]"),
    ] = None,
    participation: Annotated[
        str | None, _flag("participation", "X", "fraction of clients sampled per round [1]")
    ] = None,
    lost_uploads: Annotated[
        str | None, _flag("lost-uploads", "X", "fraction of uploads that are lost [0]")
    ] = None,
    stragglers: Annotated[
        str | None, _flag("stragglers", "X", "fraction of clients that do half their steps [0]")
    ] = None,
    buffer: Annotated[
        str | None, _flag("buffer", "N", "asynchronous rounds that wait for N uploads [0: all]")
    ] = None,
    concurrency: Annotated[
        str | None,
        _flag("concurrency", "N", "clients that train at a time [participation x clients]"),
    ] = None,
    staleness: Annotated[
        str | None, _flag("staleness", "X", "exponent by which late uploads count less [0.5]")
    ] = None,
    speed_spread: Annotated[
        str | None, _flag("speed-spread", "X", "how much the clients' speeds differ [0]")
    ] = None,
    privacy: Annotated[
        str | None, _flag("privacy", "NAME", "none, release, training or client [none]")
    ] = None,
    epsilon: Annotated[
        str | None, _flag("epsilon", "X", "privacy budget; the noise follows from it [none]")
    ] = None,
    delta: Annotated[
        str | None, _flag("delta", "X", "chance that the claim fails [0.00001]")
    ] = None,
    noise_multiplier: Annotated[
        str | None, _flag("noise-multiplier", "X", "noise / sensitivity [what epsilon needs]")
    ] = None,
    clip: Annotated[
        str | None, _flag("clip", "X", "norm that private values are clipped to, or none [1]")
    ] = None,
    seed: Annotated[
        str | None, _flag("seed", "N", "seed of partition, weights, shuffles and samples [0]")
    ] = None,
    engine: Annotated[
        str | None, _flag("engine", "NAME", "reference, vectorised, processes or auto [auto]")
    ] = None,
    device: Annotated[str | None, _flag("device", "NAME", "cpu, cuda or auto [auto]")] = None,
    eval_every: Annotated[
        str | None, _flag("eval-every", "N", "evaluate every N rounds, and after the last [10]")
    ] = None,
    validation: Annotated[
        str | None,
        _flag("validation", "X", "fraction of training rows to choose the best round by [none]"),
    ] = None,
    select_by: Annotated[
        str | None, _flag("select-by", "NAME", "what the best round is chosen by [accuracy]")
    ] = None,
    patience: Annotated[
        str | None, _flag("patience", "N", "stop after N evaluations without improvement [never]")
    ] = None,
    metric: Annotated[
        str | None,
        _flag("metric", "NAME", "further metrics: average-precision, matthews, mine:function, ..."),
    ] = None,
    transform: Annotated[
        str | None,
        _flag("transform", "NAME", "of uploads, in order: 'clip(norm=1),quantise(bits=8)' [none]"),
    ] = None,
    combiner: Annotated[
        str | None,
        _flag("combiner", "NAME", "sum, median, trimmed-mean, krum or geometric-median [sum]"),
    ] = None,
    teacher: Annotated[
        str | None,
        _flag("teacher", "NAME", "solved from sums beside the algorithm: lda, ridge, ncm [none]"),
    ] = None,
    feature_map: Annotated[
        str | None,
        _flag("feature-map", "NAME", "of a closed form: random-conv, flat, ... [auto]"),
    ] = None,
    baselines: Annotated[
        bool, typer.Option("--baselines", help="also train locally, and on the pooled rows")
    ] = False,
    checkpoint_every: Annotated[
        str | None,
        _flag("checkpoint-every", "N", "write a checkpoint every N rounds, 0: none [10]"),
    ] = None,
    data_dir: Annotated[
        str | None, _flag("data-dir", "DIR", "folder with data files [$FEDPROTO_DATA]")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="the run folder [runs/TIME-DATASET-ALGORITHM]", show_default=False),
    ] = None,
    assign: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="any other key: lam=0.1, model.dropout=0"),
    ] = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    as_json: AsJson = False,
    trust_plugins: TrustPlugins = False,
    plugin_dir: PluginDir = None,
) -> None:
    """Run a federation, or compare algorithms over one."""
    flags = {
        "profile": profile,
        "dataset": dataset,
        "algorithm": algorithm,
        "model": model,
        "partition": partition,
        "clients": clients,
        "partition.ways": ways,
        "partition.shots": shots,
        "partition.stdev": stdev,
        "partition.shots_stdev": shots_stdev,
        "partition.test_shots": test_shots,
        "rounds": rounds,
        "batch": batch,
        "local_steps": local_steps,
        "lr": lr,
        "optimiser": optimiser,
        "schedule": schedule,
        "class_weights": class_weights,
        "sampling": sampling,
        "participation": participation,
        "lost_uploads": lost_uploads,
        "stragglers": stragglers,
        "buffer": buffer,
        "concurrency": concurrency,
        "staleness": staleness,
        "speed_spread": speed_spread,
        "privacy": privacy,
        "epsilon": epsilon,
        "delta": delta,
        "noise_multiplier": noise_multiplier,
        "clip": clip,
        "seed": seed,
        "engine": engine,
        "device": device,
        "eval_every": eval_every,
        "validation": validation,
        "select_by": select_by,
        "patience": patience,
        "metric": metric,
        "combiner": combiner,
        "transform": transform,
        "teacher": teacher,
        "feature_map": feature_map,
        "baselines": "true" if baselines else None,
        "checkpoint_every": checkpoint_every,
        "data_dir": data_dir,
    }
    given = {key: value for key, value in flags.items() if value is not None}
    _run_configs(_read_configs(config, given, assign or []), out, as_json)


def _read_configs(
    path: Path | None, flags: dict[str, str], assignments: Sequence[str]
) -> list[Config]:
    """Return one configuration per algorithm; `--set` wins over flags, and flags over the file."""
    from fedproto.config.config_file import read_toml
    from fedproto.config.settings import configure

    stored = {} if path is None else read_toml(path)
    settings, assigned = join_settings(stored, path, flags, assignments)
    return configure(settings, assigned)


def join_settings(
    stored: dict[str, Any], path: Path | None, flags: dict[str, str], assignments: Sequence[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the settings of a file with those of flags, and the ones that `--set` assigns.

    Plug-ins that the user names are trusted; a file that names others is refused. `stored` was
    read from `path`, if there is one.
    """
    from fedproto.config import plugins
    from fedproto.config.settings import read_assignment

    assigned = dict(read_assignment(text) for text in assignments)
    plugins.trust_chosen(flags)
    plugins.trust_chosen(assigned)
    kept = _drop_replaced(stored, flags)
    if path is not None:
        effective = {key: value for key, value in kept.items() if key not in assigned}
        plugins.refuse_plugins(effective, path)
    return kept | flags, assigned


def _drop_replaced(stored: dict[str, Any], flags: dict[str, str]) -> dict[str, Any]:
    """Return a file's settings without those of a plug-in or profile that a flag replaces."""
    from fedproto.config.settings import GOVERNED

    replaced = {key for key, value in flags.items() if value != stored.get(key)}
    if "local_steps" in replaced:
        replaced.add("epochs")
    kept = {}
    for key, value in stored.items():
        is_governed = "profile" in replaced and key in GOVERNED
        if key.partition(".")[0] not in replaced and not is_governed:
            kept[key] = value
    return kept


def _run_configs(configs: Sequence[Config], out: Path | None, as_json: bool) -> None:
    """Run configurations that differ in their algorithm one after the other; print the results."""
    from fedproto.engines.distributed.torchrun import follows
    from fedproto.runs.execution import follow, hold_all
    from fedproto.runs.experiment import Experiment
    from fedproto.runs.folder import RunFolder
    from fedproto.runs.row_counts import describe_rows

    names = [config.algorithm.name for config in configs]
    target = out or _default_folder(configs[0].dataset[0].name, "-".join(names))
    if not follows():
        RunFolder.refuse_used(target)
    sources: dict[str, Source] = {}
    experiments = [Experiment.prepare(config, loaded=sources) for config in configs]
    if follows():
        follow(experiments)
        return
    notices: dict[str, None] = {}
    for experiment in experiments:
        notices |= dict.fromkeys(experiment.notices)
    for notice in notices:
        say(notice, style="yellow")
    for line in dict.fromkeys(describe_rows(experiment.federation) for experiment in experiments):
        say(line)
    # All folders first: whatever happens from here on, `fedproto resume` can finish all of them.
    paths = [target / name for name in _number_repeated(names)] if len(names) > 1 else [target]
    folders = []
    for experiment, path in zip(experiments, paths, strict=True):
        folders.append(experiment.new_folder(path))
    results = []
    with hold_all(folders):
        for experiment, folder in zip(experiments, folders, strict=True):
            results.append(execute(experiment, folder, resumable=target))
    show_results(results, _labels(configs))
    if as_json:
        print_json_lines(results)
    say(f"written to {target}")


def _labels(configs: Sequence[Config]) -> list[str]:
    """Return what tables call the runs: the algorithm, with its options if it is run twice."""
    from fedproto.config import plugins

    names = [config.algorithm.name for config in configs]
    labels = []
    for config, name in zip(configs, names, strict=True):
        if names.count(name) > 1:
            labels.append(plugins.short("algorithm", config.algorithm))
        else:
            labels.append(name)
    return labels


def _default_folder(dataset: str, algorithms: str) -> Path:
    time = f"{datetime.now():%Y%m%d-%H%M%S}"
    source = _name_for_folder(Path(dataset).name)
    return Path("runs") / f"{time}-{source}-{_name_for_folder(algorithms)}"


def _name_for_folder(text: str) -> str:
    """Return text that every system takes as a part of a folder's name."""
    safe = ""
    for character in text:
        safe += character if character.isalnum() or character in "-_" else "-"
    return safe.encode()[:MAX_NAME_BYTES].decode(errors="ignore")


def _number_repeated(algorithms: Sequence[str]) -> list[str]:
    """Return folder names: the algorithms, numbered where one is run twice."""
    names = []
    for position, algorithm in enumerate(algorithms):
        name = algorithm.replace(":", "-")
        if algorithms.count(algorithm) > 1:
            name += f"-{position + 1}"
        names.append(name)
    return names


def resume(
    run: Annotated[Path, typer.Argument(help="a run folder, or a folder of compared runs")],
    quiet: Quiet = False,
    verbose: Verbose = False,
    as_json: AsJson = False,
    trust_plugins: TrustPlugins = False,
    plugin_dir: PluginDir = None,
) -> None:
    """Continue a run that was stopped or killed."""
    from fedproto.runs.folder import RunFolder

    folders = RunFolder.inside(run) or [RunFolder.open(run)]
    stored = [folder.result() for folder in folders]
    finished = [result for result in stored if result]
    if len(finished) == len(folders):  # nothing to prepare: the data may be gone
        for folder in folders:
            folder.drop_leftovers()
        rounds = max(result["rounds"] for result in finished)
        say(f"{run} has finished all its {rounds} rounds: its result is in result.json")
        if as_json:
            print_json_lines(finished)
        return
    from fedproto.engines.distributed.torchrun import follows
    from fedproto.runs.execution import follow, hold_all
    from fedproto.runs.experiment import reopen
    from fedproto.runs.row_counts import describe_rows

    if follows():
        unfinished = []
        for folder, result in zip(folders, stored, strict=True):
            if not result:
                experiment, _ = reopen(folder)
                unfinished.append(experiment)
        follow(unfinished)
        return
    results = []
    with hold_all(folders):  # before checkpoints are read, so that nobody writes newer ones
        for folder in folders:
            result = folder.result()
            if not result:
                experiment, reopened = reopen(folder)
                say(describe_rows(experiment.federation))
                result = execute(experiment, reopened, resumable=run)
            results.append(result)
    if len(folders) > 1:
        labels = [folder.path.name for folder in folders]
    else:
        labels = [results[0]["algorithm"]]
    show_results(results, labels)
    if as_json:
        print_json_lines(results)
