import numpy as np
from sklearn.datasets import load_digits

from fedproto.data import DIGITS, DataFolders, Source, Split, hold_out


def digits(places: DataFolders) -> Source:
    """1,797 UCI digits of 8x8 pixels, 17 grey levels, that come inside scikit-learn."""
    bunch = load_digits()
    everything = Split(bunch.images.astype(np.uint8), bunch.target.astype(np.int64))
    train, test = map(everything.rows, hold_out(everything.y))
    mean, std, levels = (0.3053,), (0.3760,), 16.0
    return Source(
        "digits", DIGITS, train, test, mean, std, levels, model="mlp", mixed_model="mlp-mh", shots=8
    )
