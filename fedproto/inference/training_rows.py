"""The training rows of a client, as its model embeds them, for whoever has the client's data.

They are private: no export holds them, and neither does a copy of a classifier in a file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from fedproto.config import plugins
from fedproto.config.config_file import read_run_toml
from fedproto.config.settings import configure
from fedproto.core.federation import Federation, Member
from fedproto.data import Source
from fedproto.errors import DataError, FedProtoError
from fedproto.inference.model_building import load_into_copy
from fedproto.partitions.file import read_partition
from fedproto.runs.assemble import deal, hash_labels
from fedproto.runs.folder import CONFIG, PARTITION
from fedproto.runs.from_settings import FROM_PYTHON
from fedproto.runs.held_out import compute_outputs
from fedproto.runs.own_data import load_source

if TYPE_CHECKING:
    from fedproto.inference.trained_client import TrainedClient

#: What an exported client says about its training rows.
EXPORTED = "an exported client has no training rows: they stay where it was trained"


@dataclass(frozen=True, eq=False)
class TrainingRows:
    """The training rows of a client, in the space in which inputs are compared."""

    features: Tensor  # (n, d)
    labels: Sequence[Any]  # (n,) names of classes
    numbers: np.ndarray  # (n,) of the rows in the training set of its data, as in partition.json
    place: Callable[[int], str] | None = None  # the file, or file and line, of such a number


class TrainingSource:
    """Where the training rows of a client come from, if anybody asks for them."""

    def __init__(self, read: Callable[[TrainedClient | None], TrainingRows]) -> None:
        self._read = read
        self._found: TrainingRows | None = None

    def load(self, trained: TrainedClient | None) -> TrainingRows:
        """Return the rows as a client embeds them, or samples that a classifier was fitted on.

        They are read and embedded once. DataError says why there are none.
        """
        if self._found is None:
            self._found = self._read(trained)
        return self._found

    def __deepcopy__(self, memo: dict[int, Any]) -> TrainingSource:
        return self  # what scikit-learn clones need not read the data again

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave the rows out of pickles, which people hand on."""
        return no_training_rows, ("a classifier from a pickle has no training rows",)


def no_training_rows(sentence: str) -> TrainingSource:
    """Return the source of a client whose training rows are not here; `sentence` says why."""
    return TrainingSource(partial(_refuse, sentence))


def _refuse(sentence: str, trained: TrainedClient | None) -> TrainingRows:
    raise DataError(sentence)


def keep_rows(rows: TrainingRows) -> TrainingSource:
    """Return the source of rows that are embedded already."""
    return TrainingSource(lambda trained: rows)


# --- of a client in memory


def training_rows_of(federation: Federation, member: Member) -> TrainingSource:
    """Return the source of the training rows of a client that is at hand with its data."""
    return TrainingSource(partial(_take_rows, federation, member))


def _take_rows(
    federation: Federation, member: Member, trained: TrainedClient | None
) -> TrainingRows:
    assert trained is not None, "the rows are those of a trained client"
    rows = member.train.rows
    if trained.compares_fixed:
        assert member.train.fixed is not None, "the teacher has features of all rows"
        features = member.train.fixed[rows].float().cpu()
    else:
        module = trained.module
        if member.frozen is not None:  # its examples are features
            state = module.state_dict()
            module = load_into_copy(member.module, {name: state[name] for name in member.initial})
        features = compute_outputs(module, member.train.x[rows]).features
    names = [federation.classes[label] for label in member.train.y[rows].tolist()]
    numbers = federation.partition["clients"][member.id]["train"]
    return TrainingRows(features, names, np.array(numbers), member.place)


# --- of a run folder


def training_rows_in(folder: Path, client: int) -> TrainingSource:
    """Return the source of the training rows of a client of a run folder.

    The folder names the data, which may have gone or changed since; nothing in it is executed, and
    a plug-in that reads data must be trusted.
    """
    return TrainingSource(partial(_read_rows, folder, client))


def _read_rows(folder: Path, client: int, trained: TrainedClient | None) -> TrainingRows:
    assert trained is not None, "the rows are those of a trained client"
    try:
        stored = read_partition(folder / PARTITION)["clients"][client]
        source = _load_source(folder, client)
        _refuse_other_data(source, stored, trained)
        numbers = np.array(stored["train"], np.int64)
        features = trained.embed(source.tensor(source.train, numbers))
    except (FedProtoError, IndexError) as error:
        raise DataError(f"the training rows of {folder} cannot be read: {error}") from error
    names = [source.classes[label] for label in source.train.y[numbers].tolist()]
    return TrainingRows(features, names, numbers, source.train.place)


def _load_source(folder: Path, client: int) -> Source:
    """Return the data of one client, as the folder's settings name it."""
    settings = read_run_toml(folder / CONFIG)
    wanted = {}
    for key, value in settings.items():
        is_of_data = key == "dataset" or key.startswith("dataset.")
        if is_of_data or key in ("clients", "data_dir"):
            wanted[key] = value
    if wanted.get("dataset") == FROM_PYTHON.name:
        raise DataError("the run was started from Python with arrays, which no file holds")
    plugins.refuse_plugins(wanted, folder / CONFIG)
    config = configure(wanted)[0]
    assert config.clients is not None, "a run folder states it"
    part = deal(config.dataset, config.clients, "dataset")[client]
    return load_source(part, config.data_dir, {})


def _refuse_other_data(source: Source, stored: dict[str, Any], trained: TrainedClient) -> None:
    """Refuse data that is not what the client was trained on, as far as one can tell.

    Labels, preprocessing and encoding are compared, which depends on the training rows; single
    inputs are not.
    """
    fingerprint = stored["labels"].partition("-")[0]  # a number follows where sources are equal
    if hash_labels(source) != fingerprint:
        raise DataError(f"{source.name} has other labels than in training")
    if source.preprocessing != trained.preprocessing:
        raise DataError(f"{source.name} has other inputs than in training")
    if max(stored["train"], default=-1) >= len(source.train.y):
        raise DataError(f"{source.name} has fewer rows than in training")
