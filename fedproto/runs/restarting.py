"""A run folder's experiment from its very beginning, to look at its rounds once more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fedproto.config.config_file import read_run_toml
from fedproto.config.options import Part
from fedproto.config.settings import Config, configure
from fedproto.runs import start_checks
from fedproto.runs.experiment import Experiment
from fedproto.runs.folder import RunFolder
from fedproto.runs.prototype_files import START


def restart(folder: RunFolder, change: Callable[[Config], Config] | None = None) -> Experiment:
    """Return the experiment of a run folder before its first round, on the CPU.

    Its rows and initial weights are those of the run, so it trains the same models to the bit. It
    evaluates and writes nothing on its way.

    change  makes other settings of those of the run
    """
    path = folder.path
    settings = read_run_toml(path / "config.toml")
    start_checks.refuse_other_origins(path, settings, None, None)
    settings = {key: value for key, value in settings.items() if not key.startswith("partition.")}
    settings["partition"] = str(Part(f"file:{path / 'partition.json'}"))
    if (path / START).exists():
        settings["prototypes"] = str(path / START)
    config = configure(settings)[0]
    config = replace(
        config, device="cpu", eval_every=config.rounds, checkpoint_every=0, baselines=False
    )
    if change is not None:
        config = change(config)
    experiment = Experiment.prepare(config)
    start_checks.refuse_other_partition(folder, experiment.federation.partition)
    started = folder.read_start()
    start_checks.refuse_other_shapes(folder, started["inputs"], experiment.federation)
    drawn = [member.initial for member in experiment.federation.members]
    start_checks.refuse_other_weights(folder, started["weights"], drawn)
    return experiment
