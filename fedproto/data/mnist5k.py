from functools import cache
from pathlib import Path

import numpy as np

from fedproto.data import DIGITS, DataFolders, Source, Split, split_off_test

IMAGES = Path(__file__).parent / "files" / "mnist5k.npz"


def mnist5k(data_folders: DataFolders) -> Source:
    """5,000 real MNIST images that come with fedproto, 400 to train and 100 to test per class."""
    train, test = _read_splits()
    return Source("mnist5k", DIGITS, train, test, mean=(0.1307,), std=(0.3081,), shots=20)


@cache
def _read_splits() -> tuple[Split, Split]:
    """Return the training and the test set, read only once per process."""
    with np.load(IMAGES, allow_pickle=False) as arrays:
        everything = Split(arrays["x"], arrays["y"].astype(np.int64))
    return split_off_test(everything)
