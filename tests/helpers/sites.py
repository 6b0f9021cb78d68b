"""A table of patients from several sites, whose names are those of the clients."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

SITES = ("Ulm", "Köln", "Gdańsk")


def write_sites(path: Path, sites: Sequence[str] = SITES, rows: int = 24, seed: int = 0) -> Path:
    """Write a CSV with as many rows of each site, of two classes that are easy to tell apart."""
    rng = np.random.default_rng(seed)
    lines = ["height,width,label,client"]
    for site in sites:
        for row in range(rows):
            height, width = rng.normal(row % 2 * 4, 1, 2).round(3)
            label = ("benign", "malignant")[row % 2]
            lines.append(f'{height},{width},{label},"{site}"')
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
