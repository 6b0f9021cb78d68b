"""Characters of computer fonts, as an npz file that `fedproto data get chars74k` makes."""

import string

import numpy as np

from fedproto.data import DataFolders, Source, Split, check_split
from fedproto.data.npz import read_npz, to_whole_numbers

CLASSES = tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)
STYLES_PER_TYPEFACE = 4
TEST_TYPEFACES = 50
#: The paper's network for FEMNIST; 28x28 images leave 320 values, as 5x5 kernels do.
MODEL = "cnn(kernel=3)"
MIXED_MODEL = ",".join(f"cnn(channels={channels}, kernel=3)" for channels in (18, 20, 22))


def chars74k(data_folders: DataFolders) -> Source:
    """Chars74K "Fnt": 0-9, A-Z and a-z in 254 typefaces, 28x28; a stand-in for FEMNIST.

    Four consecutive fonts are styles of one typeface, which counts as the writer. The last 50
    typefaces are the test set.
    """
    path = data_folders.find(
        "chars74k-fnt/chars74k_fnt_28.npz", "chars74k_fnt_28.npz", dataset="chars74k"
    )
    arrays = read_npz(path, ("x", "y", "font_index"))
    font = to_whole_numbers(str(path), "font_index", arrays["font_index"])  # from 1 on
    typeface = (font - 1) // STYLES_PER_TYPEFACE
    y = to_whole_numbers(str(path), "y", arrays["y"])
    everything = Split(arrays["x"], y, typeface)
    check_split(str(path), everything, len(CLASSES))
    test_typefaces = np.unique(typeface)[-TEST_TYPEFACES:]
    is_test = np.isin(typeface, test_typefaces)
    return Source(
        "chars74k",
        CLASSES,
        train=everything.select_rows(np.flatnonzero(~is_test)),
        test=everything.select_rows(np.flatnonzero(is_test)),
        mean=(0.1307,),
        std=(0.3081,),
        model=MODEL,
        mixed_model=MIXED_MODEL,
    )
