"""The data sets of a sweep: read once, and the same for all its federations."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedproto.config.settings import Config
from fedproto.data import Source
from fedproto.errors import RunFolderError
from fedproto.runs.assemble import deal


@dataclass
class SweepData:
    """What the federations of one sweep share."""

    loaded: dict[str, Source] = field(default_factory=dict)  # the data sets read so far, by name
    label_hashes: dict[str, str] = field(default_factory=dict)  # by the name of the data set

    def note_labels(self, config: Config, partition: dict[str, Any]) -> None:
        """Remember the labels that a federation was begun with."""
        for name, label_hash in _label_hashes(config, partition).items():
            self.label_hashes.setdefault(name, label_hash)

    def has_labels(self, config: Config) -> bool:
        """Return whether the labels of all data sets of a federation are known."""
        return set(_dataset_names(config)) <= self.label_hashes.keys()

    def refuse_other_labels(self, config: Config, partition: dict[str, Any], out: Path) -> None:
        """Refuse a federation whose data has changed since others of the sweep were begun."""
        for name, label_hash in _label_hashes(config, partition).items():
            if self.label_hashes.setdefault(name, label_hash) != label_hash:
                raise RunFolderError(
                    f"the labels of {name} are not those that federations in {out} were begun "
                    "with: put the data back, or name another folder with --out"
                )


def _label_hashes(config: Config, partition: dict[str, Any]) -> dict[str, str]:
    """Return the hash of each data set's labels in a partition.

    A number behind a hash, which tells equal sources of one federation apart, is left out.
    """
    hashes = {}
    names = _dataset_names(config)
    for name, client in zip(names, partition["clients"], strict=False):
        label_hash, _, _ = client["labels"].partition("-")
        hashes[name] = label_hash
    return hashes


def _dataset_names(config: Config) -> list[str]:
    """Return the name of each client's data set."""
    parts = deal(config.dataset, config.clients, "dataset")
    return [str(part) for part in parts]
