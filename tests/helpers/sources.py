"""Data sources as a run would ask for them, for all tests of them."""

import json

import numpy as np
import pytest

from fedproto.config import plugins
from fedproto.config.options import Part
from fedproto.data import DataFolders
from fedproto.errors import FedProtoError


def build(name, folder=None, **options):
    """A source that looks for its files in `folder`, if one is named."""
    return plugins.build(
        "dataset", Part(str(name), options), DataFolders(None if folder is None else str(folder))
    )


def refusal(name, folder=None, **options):
    """The one sentence with which a source refuses."""
    with pytest.raises(FedProtoError) as caught:
        build(name, folder, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def animals(path, said):
    """A table and texts that can be learned, 25 rows of each of three classes, of four clients.

    `said(generator, sound, number)` is a text: the sound tells the class.
    """
    generator, names, sounds = (
        np.random.default_rng(0),
        ("cat", "dog", "owl"),
        ("purrs", "barks", "hoots"),
    )
    rows, texts = ["size,home,client,label"], []
    for number in range(75):
        kind = number % 3
        home = ("flat", "house", "tree")[generator.choice([kind, 1])]
        rows.append(f"{generator.normal(kind):.3f},{home},{number % 4},{names[kind]}")
        words = said(generator, sounds[kind], number)
        texts.append(json.dumps({"text": words, "label": names[kind], "client": number % 4}))
    (path / "animals.csv").write_text("\n".join(rows) + "\n")
    (path / "animals.jsonl").write_text("\n".join(texts) + "\n")
    return path


def images(count, *shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), np.uint8)
