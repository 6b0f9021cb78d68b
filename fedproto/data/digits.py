import functools
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from fedproto.data import DIGITS, DataFolders, Source, Split, split_off_test

#: In the folder of scikit-learn.
DIGITS_FILE = Path("datasets", "data", "digits.csv.gz")


def digits(data_folders: DataFolders) -> Source:
    """1,797 UCI digits of 8x8 pixels, 17 grey levels, that come with scikit-learn."""
    table = _read_table()
    images = table[:, :-1].reshape(-1, 8, 8)
    labels = table[:, -1].astype(np.int64)
    train, test = split_off_test(Split(images, labels))
    return Source(
        "digits",
        DIGITS,
        train,
        test,
        mean=(0.3053,),
        std=(0.3760,),
        scale=16.0,
        model="mlp",
        mixed_model="mlp-mh",
        shots=8,
    )


@functools.cache
def _read_table() -> np.ndarray:
    """Return the pixels and the label of each digit: (1797, 65).

    The file is read without scikit-learn itself, whose import takes as long as torch's.
    """
    package = find_spec("sklearn")
    assert package is not None, "scikit-learn is one of fedproto's dependencies"
    assert package.origin is not None
    return np.loadtxt(Path(package.origin).parent / DIGITS_FILE, dtype=np.uint8, delimiter=",")
