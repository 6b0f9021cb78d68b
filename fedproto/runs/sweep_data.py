"""The data sets of a sweep: read once, and the same for all its federations."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedproto.config.options import Part
from fedproto.config.settings import Config
from fedproto.data import Source
from fedproto.errors import RunFolderError


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
        self.add_label_hashes(_label_hashes(config, partition), out)

    def add_label_hashes(self, label_hashes: dict[str, str], out: Path) -> None:
        """Remember labels; refuse them if federations were begun with others."""
        for name, label_hash in label_hashes.items():
            if self.label_hashes.setdefault(name, label_hash) != label_hash:
                raise RunFolderError(
                    f"the labels of {name} are not those that federations in {out} were begun "
                    "with: put the data back, or name another folder with --out"
                )


def _label_hashes(config: Config, partition: dict[str, Any]) -> dict[str, str]:
    """Return the hash of each data set's labels in a partition.

    A number behind a hash, which tells equal sources of one federation apart, is left out.
    """
    fingerprints = dict.fromkeys(client["labels"] for client in partition["clients"])
    hashes = {}
    # Both are in the order of the clients; a data set may have no client.
    for name, fingerprint in zip(_dataset_names(config), fingerprints, strict=False):
        label_hash, _, _ = fingerprint.partition("-")
        hashes[name] = label_hash
    return hashes


def _dataset_names(config: Config) -> list[str]:
    """Return the name of each data set once."""
    parts = [Part(part.name, part.options) for part in config.dataset]
    return list(dict.fromkeys(str(part) for part in parts))
