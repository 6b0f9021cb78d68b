from functools import cache
from pathlib import Path

import numpy as np

from fedproto.data import DIGITS, DataFolders, Source, Split, hold_out

IMAGES = Path(__file__).parent / "files" / "mnist5k.npz"


def mnist5k(places: DataFolders) -> Source:
    """5,000 real MNIST images that come with fedproto, 400 to train and 100 to test per class."""
    train, test = _splits()
    return Source("mnist5k", DIGITS, train, test, mean=(0.1307,), std=(0.3081,), shots=20)


@cache
def _splits() -> tuple[Split, Split]:
    with np.load(IMAGES, allow_pickle=False) as arrays:
        everything = Split(arrays["x"], arrays["y"].astype(np.int64))
    train, test = hold_out(everything.y)
    return everything.rows(train), everything.rows(test)
