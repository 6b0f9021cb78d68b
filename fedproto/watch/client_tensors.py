"""Single tensors that a run folder keeps of a client beside its model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedproto.core.files import parse_json, unseal
from fedproto.runs.client_models import INDEX
from fedproto.runs.folder import CLIENT_MODELS, VERSION
from fedproto.watch.numbers import to_count
from fedproto.watch.plain_files import read_plain, stamp_of
from fedproto.watch.prototype_map import read_tensors_named


def read_client_tensors(
    folder: Path, name: str, client: int, group: str, names: Sequence[str]
) -> dict[str, np.ndarray] | None:
    """Return those of the named tensors of a group that are there; None if no models are kept.

    `name` is what errors call the folder.
    """
    if stamp_of(folder / INDEX) is None or (folder / CLIENT_MODELS).is_symlink():
        return None
    where = f"{name}/{INDEX}"
    index = unseal(parse_json(read_plain(folder / INDEX, where), where), VERSION, where)
    entries = index.get("clients")
    round = to_count(index.get("round"))
    if not isinstance(entries, list) or client >= len(entries) or round is None:
        return None
    shard = to_count(entries[client].get("shard")) if isinstance(entries[client], dict) else None
    if shard is None:
        return None
    file = f"round-{round:08d}-{shard:05d}.safetensors"
    keys = {key: f"{client}.{group}.{key}" for key in names}
    path = folder / CLIENT_MODELS / file
    tensors = read_tensors_named(path, tuple(keys.values()), f"{name}/{CLIENT_MODELS}/{file}")
    return {key: tensors[stored] for key, stored in keys.items() if stored in tensors}
