"""DataFrames with columns of every kind, and sources that must be equal to the bit."""

import numpy as np
import pandas as pd


def same_source(one, other):
    """Whether two sources hold the same, to the bit, but for their names."""
    assert one.classes == other.classes
    assert one.encoding == other.encoding
    for part in ("train", "test"):
        first, second = getattr(one, part), getattr(other, part)
        assert first.x.tobytes() == second.x.tobytes() and first.x.shape == second.x.shape
        np.testing.assert_array_equal(first.y, second.y)
        if first.writer is None:
            assert second.writer is None
        else:
            np.testing.assert_array_equal(first.writer, second.writer)
    return True


def mixed_frame(rows=24):
    generator = np.random.default_rng(3)
    frame = pd.DataFrame(
        {
            "size": generator.normal(size=rows).round(9),  # openpyxl writes 16 digits
            "count": np.arange(rows) % 5,
            "small": generator.normal(size=rows).astype(np.float32),
            "smoker": np.arange(rows) % 3 == 0,
            "home": pd.Categorical(np.array(["flat", "house"])[np.arange(rows) % 2]),
            "site": np.array(["Ulm", "Köln", "Bonn"])[np.arange(rows) % 3],
            "visits": pd.array([None, *range(1, rows)], dtype="Int64") % 4,
            "kind": np.array(["ill", "well"])[(np.arange(rows) // 2) % 2],
        }
    )
    frame.loc[5, "size"] = np.nan
    frame.loc[7, "home"] = None
    return frame


def as_texts(frame):
    """Return the columns of a frame as texts, missing values as nothing."""
    return {
        name: frame[name].map(lambda value: "" if pd.isna(value) else str(value)).to_numpy(str)
        for name in frame
    }
