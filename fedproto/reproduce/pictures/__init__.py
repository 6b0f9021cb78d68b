"""The figure of a target as PNG, and the numbers it shows as CSV.

Both are made from the same rows, which come from the target's JSON. Importing this package imports
matplotlib, so modules that must work without it import it late.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure as Canvas

from fedproto.core.files import write_atomically
from fedproto.plots.style import figure_style, save_png
from fedproto.reproduce.pictures.curves import (
    draw_lambda,
    draw_shots,
    make_lambda_rows,
    make_shots_rows,
)
from fedproto.reproduce.pictures.embeddings import (
    draw_embeddings,
    make_embedding_rows,
    measure_methods,
)
from fedproto.reproduce.pictures.rows import Cells, Rows, to_csv
from fedproto.reproduce.pictures.studies import (
    draw_dots,
    draw_gram,
    draw_start,
    draw_travel,
    make_dot_rows,
    make_gram_rows,
    make_start_rows,
    make_travel_rows,
)
from fedproto.reproduce.pictures.table import draw_table, make_table_rows

TITLE_LETTERS_PER_LINE = 102


@dataclass(frozen=True)
class Picture:
    """How the rows of a target are made, and how they are drawn."""

    make_rows: Callable[[Cells, Path], Rows]  # of the cells and the folder of their runs
    draw: Callable[[Rows], Canvas]


PICTURES = {
    "fig-shots": Picture(make_shots_rows, draw_shots),
    "fig-lambda": Picture(make_lambda_rows, draw_lambda),
    "fig-tsne": Picture(make_embedding_rows, draw_embeddings),
    "study-travel": Picture(make_travel_rows, draw_travel),
    "study-before": Picture(make_start_rows, draw_start),
    "study-gram": Picture(make_gram_rows, draw_gram),
}
TABLE = Picture(make_table_rows, draw_table)
STUDY = Picture(make_dot_rows, draw_dots)


def draw(name: str, found: dict[str, Any], out: Path, runs: Path) -> Iterator[Path]:
    """Write the numbers and the figure of a target, and yield the path of each file.

    Nothing is written if all runs of the target failed.

    name   of the target, such as `table-mnist`
    found  the content of its JSON file
    out    the folder for the files
    runs   the folder of its run folders
    """
    picture = _find_picture(name)
    cells = [cell for cell in found["cells"] if cell["runs"]]
    rows = picture.make_rows(cells, runs)
    if not rows:
        return
    yield _write(out / f"{name}.csv", to_csv(rows))
    if name == "fig-tsne":
        measures = {"measures": measure_methods(cells, runs)}
        yield _write(out / f"{name}-measures.json", json.dumps(measures).encode())
    yield _write(out / f"{name}.png", _draw_png(picture, rows, found["title"]))


def _find_picture(name: str) -> Picture:
    """Return the picture of a target; targets without one of their own are tables or studies."""
    if name in PICTURES:
        return PICTURES[name]
    return TABLE if name.startswith("table-") else STUDY


def _draw_png(picture: Picture, rows: Rows, title: str) -> bytes:
    """Draw rows under a title and return the PNG file."""
    with figure_style():
        canvas = picture.draw(rows)
        lines = textwrap.fill(title, TITLE_LETTERS_PER_LINE)
        canvas.suptitle(lines, x=0.01, ha="left", fontsize=11)
        return save_png(canvas)


def _write(path: Path, content: bytes) -> Path:
    """Write a file atomically and return its path."""
    write_atomically(path, content)
    return path
