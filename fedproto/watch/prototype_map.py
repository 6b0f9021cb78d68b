"""Prototypes as places on a map: two principal components of the global ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from fedproto.errors import RunFolderError
from fedproto.runs.folder import CHECKPOINTS, RunFolder
from fedproto.runs.prototype_files import PROTOTYPES
from fedproto.watch.numbers import to_number
from fedproto.watch.plain_files import require_plain, stamp_of

MAX_LOCAL_POINTS = 3000
MAX_STEPS = 200  # of a trail; the oldest go first
MAX_VALUES = 50_000_000  # of a tensor that is read

#: Names of tensors: in a finished run's file, in a checkpoint and in a deployed server's file.
FINAL = ("prototypes", "known", "local", "held")
STORED = (
    "server.prototypes",
    "server.known",
    "uploads.prototypes/sums/prototypes",
    "uploads.prototypes/weight",
)
#: In a deployed server's file: rows of the classes that each member sent, one after the other.
ROWS = (
    "uploads.values.prototypes/sums/prototypes",
    "uploads.values.prototypes/weight",
    "uploads.rows",
    "uploads.counts",
)


@dataclass(frozen=True)
class Prototypes:
    """Global prototypes (C, d), and the clients' latest (clients, C, d) if they are kept."""

    values: np.ndarray
    known: np.ndarray  # (C,) whether a class has a global prototype
    local: np.ndarray
    held: np.ndarray  # (clients, C) whether a client has a local prototype


def read_tensors_named(path: Path, names: tuple[str, ...], where: str) -> dict[str, np.ndarray]:
    """Return those of the named tensors that a file has; the others are not read."""
    require_plain(path, where)
    found = {}
    try:
        with safe_open(path, "pt") as file:
            present = set(file.keys())
            for name in names:
                if name in present:
                    shape = file.get_slice(name).get_shape()
                    if int(np.prod(shape, dtype=np.float64)) > MAX_VALUES:
                        raise RunFolderError(f"{where} has a tensor of more than {MAX_VALUES:,}")
                    found[name] = file.get_tensor(name).double().numpy()
    except (OSError, SafetensorError, ValueError, KeyError, RuntimeError, TypeError) as error:
        raise RunFolderError(f"{where} is not a valid safetensors file") from error
    return found


def read_prototypes(path: Path, names: tuple[str, ...], where: str) -> Prototypes | None:
    """Return the prototypes of a file; None if it has none, an error if they do not fit."""
    tensors = read_tensors_named(path, (*names, *ROWS), where)
    if tensors.keys() >= set(ROWS) and names is STORED:
        tensors |= _spread_rows(tensors, where)
    prototypes, known, local, held = names
    if prototypes not in tensors or known not in tensors:
        return None
    values = tensors[prototypes]
    is_known = tensors[known] > 0
    if values.ndim != 2 or is_known.shape != values.shape[:1]:
        raise RunFolderError(f"{where} has prototypes that do not fit their classes")
    no_clients = np.zeros((0, *values.shape))
    local_values = tensors.get(local, no_clients)
    weights = tensors.get(held, np.zeros((0, len(values))))
    fits = local_values.ndim == 3 and local_values.shape[1:] == values.shape
    if not fits or weights.shape != local_values.shape[:2]:
        local_values, weights = no_clients, np.zeros((0, len(values)))
    is_held = weights > 0
    if names is STORED:  # uploads are sums of weight × value
        local_values = local_values / np.where(is_held, weights, 1)[..., None]
    is_held &= np.isfinite(local_values).all(-1)
    is_known &= np.isfinite(values).all(-1)
    return Prototypes(values, is_known, local_values, is_held)


def _spread_rows(tensors: dict[str, np.ndarray], where: str) -> dict[str, np.ndarray]:
    """Return the uploads of a server's members over all classes, as a checkpoint has them."""
    sums, weight, places, counts = (tensors[name] for name in ROWS)
    classes = len(tensors.get(STORED[1], ()))
    members = np.repeat(np.arange(len(counts)), counts.astype(int))
    fits = sums.ndim == 2 and len(sums) == len(weight) == len(places) == len(members)
    if not fits or len(counts) * classes * sums.shape[1] > MAX_VALUES:
        return {}
    if len(places) and not 0 <= places.min() <= places.max() < classes:
        raise RunFolderError(f"{where} has uploads that do not fit their classes")
    local = np.zeros((len(counts), classes, sums.shape[1]))
    held = np.zeros((len(counts), classes))
    local[members, places.astype(int)] = sums
    held[members, places.astype(int)] = weight
    return {STORED[2]: local, STORED[3]: held}


class PrototypeMap:
    """The map of one run. Its trail has a step per checkpoint that was seen while it was made."""

    def __init__(self) -> None:
        self._stamp: object = None
        self._steps: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # by round: values, known
        self._latest: Prototypes | None = None

    def refresh_run(self, folder: Path, name: str, rounds: int, is_finished: bool) -> None:
        """Read the prototypes of a finished run, or those in its newest checkpoint."""
        if is_finished and stamp_of(folder / PROTOTYPES) is not None:
            self._read(folder / PROTOTYPES, FINAL, f"{name}/{PROTOTYPES}", rounds)
            return
        run = RunFolder(folder)
        if not (folder / CHECKPOINTS).is_dir() or (folder / CHECKPOINTS).is_symlink():
            return
        round = run.checkpoint_round()
        if round:
            path = folder / CHECKPOINTS / f"round-{round:08d}.safetensors"
            self._read(path, STORED, f"{name}/{CHECKPOINTS}/{path.name}", round)

    def refresh_server(self, path: Path, name: str, round: int) -> None:
        """Read the prototypes of a deployed server's file."""
        self._read(path, STORED, name, round)

    def _read(self, path: Path, names: tuple[str, ...], where: str, round: int) -> None:
        stamp = stamp_of(path)
        if stamp is None or (str(path), stamp) == self._stamp:
            return
        self._stamp = (str(path), stamp)
        found = read_prototypes(path, names, where)
        if found is None:
            return
        if self._latest is not None and found.values.shape != self._latest.values.shape:
            self._steps = {}  # classes came or went
        self._latest = found
        self._steps[round] = (found.values, found.known)
        for old in sorted(self._steps)[:-MAX_STEPS]:
            del self._steps[old]

    def name_classes(self, names: Sequence[str], own_classes: Sequence[Sequence[str]]) -> list[str]:
        """Return the name of each row of the prototypes.

        names        the classes in order; empty while a run goes on, since it says so at its end
        own_classes  per client: its classes, in the same order. A client that has uploaded as many
                     prototypes as it has classes tells which row is which class
        """
        if self._latest is None:
            return list(names)
        rows = len(self._latest.known)
        if len(names) == rows:
            return list(names)
        found = [f"class number {row}" for row in range(rows)]
        for held, classes in zip(self._latest.held, own_classes, strict=False):
            own_rows = np.flatnonzero(held)
            if len(own_rows) == len(classes):
                for row, name in zip(own_rows, classes, strict=True):
                    found[row] = name
        return found

    def describe(self, names: Sequence[str]) -> dict[str, Any] | None:
        """Return the places of all prototypes with the names of their classes; None without any.

        The axes are the principal components of the latest global prototypes, so that the steps
        of a trail share them.
        """
        latest = self._latest
        if latest is None or latest.known.sum() < 2:
            return None
        centre, axes, share = _find_axes(latest.values[latest.known])
        steps = []
        for round in sorted(self._steps):
            values, known = self._steps[round]
            places = (values - centre) @ axes
            steps.append({"round": round, "points": _list_points(places, known)})
        local = _list_local(latest, centre, axes)
        shares = [to_number(float(each)) for each in share]
        return {"names": list(names), "steps": steps, "local": local, "share": shares}

    def compare_client(self, client: int, names: Sequence[str]) -> list[dict[str, Any]]:
        """Return, per class of a client, how far its prototype is from the global one.

        `relative` is that distance over the mean distance between global prototypes.
        """
        latest = self._latest
        if latest is None or client >= len(latest.held):
            return []
        typical = _mean_distance(latest.values[latest.known])
        rows = []
        for label in np.flatnonzero(latest.held[client] & latest.known):
            local = latest.local[client, label]
            distances = np.linalg.norm(latest.values - local, axis=1)
            distances[~latest.known] = np.inf
            own = float(distances[label])
            row = {
                "class": names[int(label)],
                "distance": to_number(own),
                "relative": to_number(own / typical) if typical else None,
                "nearest": names[int(np.argmin(distances))],
            }
            rows.append(row)
        return rows

    def values(self) -> Prototypes | None:
        """Return the latest prototypes."""
        return self._latest


def _find_axes(points: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the centre (d,), two principal axes (d, 2) and their shares of the variance."""
    centre = points.mean(0)
    _, sizes, axes = np.linalg.svd(points - centre, full_matrices=False)
    axes = axes[:2]
    largest = np.abs(axes).argmax(1)
    signs = np.sign(axes[np.arange(len(axes)), largest])  # the sign of an axis is arbitrary
    axes = axes * np.where(signs == 0, 1, signs)[:, None]
    variance = sizes**2
    total = variance.sum()
    share = variance[:2] / total if total > 0 else np.zeros(len(variance[:2]))
    if len(axes) < 2:
        axes = np.vstack([axes, np.zeros_like(axes)])
        share = np.append(share, 0.0)
    return centre, axes.T, share


def _list_points(places: np.ndarray, known: np.ndarray) -> list[list[Any]]:
    """Return [class, x, y] of each known class."""
    points = []
    for label in np.flatnonzero(known):
        x, y = places[label]
        points.append([int(label), to_number(float(x)), to_number(float(y))])
    return points


def _list_local(latest: Prototypes, centre: np.ndarray, axes: np.ndarray) -> list[list[Any]]:
    """Return [client, class, x, y] of the clients' prototypes, at most MAX_LOCAL_POINTS of them."""
    holders = np.argwhere(latest.held)[:MAX_LOCAL_POINTS]
    points = []
    for client, label in holders:
        x, y = (latest.local[client, label] - centre) @ axes
        points.append([int(client), int(label), to_number(float(x)), to_number(float(y))])
    return points


def _mean_distance(points: np.ndarray) -> float:
    """Return the mean Euclidean distance between different points; 0 if there is only one."""
    if len(points) < 2:
        return 0.0
    squares = (points**2).sum(1)
    products = points @ points.T
    distances = np.sqrt(np.clip(squares[:, None] + squares - 2 * products, 0, None))
    return float(distances.sum() / (len(points) * (len(points) - 1)))
