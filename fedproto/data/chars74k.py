import string

import numpy as np

from fedproto.data import DataFolders, Source, Split, check
from fedproto.data.npz import read_npz, whole

TEST_TYPEFACES = 50
MODEL = "cnn(kernel=3)"  # the paper's network for FEMNIST; 28x28 images leave 320 values, as 5x5 kernels do
MIXED_MODEL = ",".join(f"cnn(channels={channels}, kernel=3)" for channels in (18, 20, 22))


def chars74k(places: DataFolders) -> Source:
    """Chars74K "Fnt": 0-9, A-Z and a-z in 254 typefaces, 28x28; stands in for FEMNIST, and is not FEMNIST.

    Four consecutive fonts are styles of one typeface, which counts as the writer; the last 50 typefaces are the test
    set.
    """
    path = places.find("chars74k-fnt/chars74k_fnt_28.npz", "chars74k_fnt_28.npz")
    arrays = read_npz(path, ("x", "y", "font_index"))
    typeface = (whole(str(path), "font_index", arrays["font_index"]) - 1) // 4
    everything = Split(arrays["x"], whole(str(path), "y", arrays["y"]), typeface)
    classes = tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)
    check(str(path), everything, len(classes))
    is_test = np.isin(typeface, np.unique(typeface)[-TEST_TYPEFACES:])
    train, test = (everything.rows(np.flatnonzero(rows)) for rows in (~is_test, is_test))
    return Source(
        "chars74k", classes, train, test, (0.1307,), (0.3081,), model=MODEL, mixed_model=MIXED_MODEL
    )
