import numpy as np
from sklearn.datasets import load_digits

from fedproto.data import DIGITS, DataFolders, Source, Split, split_off_test


def digits(data_folders: DataFolders) -> Source:
    """1,797 UCI digits of 8x8 pixels, 17 grey levels, that come with scikit-learn."""
    bunch = load_digits()
    everything = Split(bunch.images.astype(np.uint8), bunch.target.astype(np.int64))
    train, test = split_off_test(everything)
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
