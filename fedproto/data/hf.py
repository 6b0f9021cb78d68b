from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedproto.config.options import PositiveFloat, PositiveInt
from fedproto.data import DataFolders, Source, Split, from_arrays
from fedproto.data.npz import MOST_CLASSES
from fedproto.data.shared.lazy_images import Lazy, Named, agreed, decode, full_shape
from fedproto.errors import ConfigError, DataError, MissingExtra, need

LABELS = (
    "label",
    "labels",
    "fine_label",
    "character",
    "class",
    "target",
)  # columns taken for it, first come first
CLIENTS = ("client", "client_id", "writer", "writer_id", "user", "user_id")
TESTS = ("test", "validation", "valid")
SAFE_MAJOR_VERSION = 4  # of `datasets`
CHUNK = 1000  # rows of which the images are looked at in one go


def hf(
    places: DataFolders,
    name: str,
    *,
    subset: str | None = None,
    image: str | None = None,
    label: str | None = None,
    client: str | None = None,
    size: PositiveInt | None = None,
    grey: bool | None = None,
    mean: tuple[float, ...] = (0.0,),
    std: tuple[PositiveFloat, ...] = (1.0,),
    augment: bool = False,
) -> Source:
    """Images from the Hugging Face hub, or a folder of its parquet files; they stay on disk until used.

    Columns `image`, `label` and `client` (for `natural`) are found by their kind or name, or named. The test set is
    `test`, else `validation`, else a seeded fifth of each class. `size`, `grey`, `mean`, `std`: as in `folder`.
    """
    where = f"hf:{name}"
    tables = _tables(name, subset)
    columns = _Columns(where, tables[0], image, label, client)
    pictures = [columns.pictures(table) for table in tables]
    shape, mode = agreed((each for table in pictures for each in _files(table, where)), size, grey)
    labels, names = columns.labels(tables)
    writers = [columns.writers(table) for table in tables]
    inputs = [_images(table, shape, mode, size is not None, where) for table in pictures]
    splits = [Split(x, y, writer) for x, y, writer in zip(inputs, labels, writers, strict=True)]
    return from_arrays(where, names, splits, mean=mean, std=std, augment=augment)


def _tables(name: str, subset: str | None) -> list[Any]:
    """The training table and, where there is one, the test table, both memory-mapped."""
    datasets = need("datasets", "'fedproto[hub]'", "dataset hf")
    is_folder = Path(name).is_dir()
    if not is_folder:
        _refuse_other_than_hub(name)
    if int(datasets.__version__.partition(".")[0]) < SAFE_MAJOR_VERSION:
        raise MissingExtra(
            "dataset hf needs datasets>=4, since older versions run code that a data set brings"
        )
    try:
        found = datasets.load_dataset(name, subset)
    except Exception as error:  # the network, the hub's answer, a damaged file
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"
        if is_folder:
            raise DataError(
                f"dataset hf cannot read the folder {name}, which needs train-*.parquet ({why})"
            ) from error
        raise DataError(
            f"dataset hf finds no folder {name!r}, and it cannot be read from the hub ({why}): where there is no "
            "network, put the data set's parquet files in a folder, and name it with hf:FOLDER"
        ) from error
    if "train" not in found:
        raise DataError(f"hf:{name} has no part 'train': it has {', '.join(found)}")
    tests = [found[part] for part in TESTS if part in found]
    return [found["train"], *tests[:1]]


def _refuse_other_than_hub(name: str) -> None:
    """Refuse what is not OWNER/NAME: `load_dataset("pandas")` would unpickle files of the current folder."""
    owner, slash, own_name = name.partition("/")
    if not (owner and slash and own_name) or Path(name).suffix == ".py":
        raise DataError(
            f"dataset hf finds no folder {name!r}; a data set of the hub is written hf:OWNER/NAME"
        )


class _Columns:
    """Which column holds what."""

    def __init__(
        self, where: str, table: Any, image: str | None, label: str | None, client: str | None
    ) -> None:
        self.where, self.features = where, table.features
        for name in (image, label, client):
            if name is not None and name not in self.features:
                raise ConfigError(f"{where} has no column {name!r}: it has {self._listed()}")
        self.image = image or self._only(
            [n for n in self.features if self._is_image(n)], (), "image"
        )
        self.client = client or next((name for name in CLIENTS if name in self.features), None)
        self.label = label or self._label()

    def _listed(self) -> str:
        return ", ".join(f"{name} ({self._kind(name)})" for name in self.features)

    def _kind(self, name: str) -> str:
        feature = self.features[name]
        return str(getattr(feature, "dtype", None) or type(feature).__name__)

    def _is_image(self, name: str) -> bool:
        feature = self.features[name]
        return type(feature).__name__ == "Image" or (
            isinstance(feature, dict) and set(feature) == {"bytes", "path"}
        )

    def _label(self) -> str:
        """The column of class labels, else one of a usual name, else the only one of whole numbers or text."""
        rest = [name for name in self.features if name not in (self.image, self.client)]
        named = [name for name in rest if type(self.features[name]).__name__ == "ClassLabel"]
        others = [
            name
            for name in rest
            if self._kind(name).startswith(("int", "uint", "string", "large_string"))
        ]
        return self._only(named or others, LABELS, "label")

    def _only(self, candidates: list[str], usual: tuple[str, ...], what: str) -> str:
        candidates = [name for name in usual if name in candidates][:1] or candidates
        if not candidates and what == "image":
            raise DataError(
                f"{self.where} has no column of images, and numbers go in an npz file: it has {self._listed()}"
            )
        if len(candidates) != 1:
            raise ConfigError(
                f"{self.where} needs {what}=COLUMN, to say which it is: it has {self._listed()}"
            )
        return candidates[0]

    def pictures(self, table: Any) -> Any:
        """The column of images alone, as the bytes of their files."""
        datasets = need("datasets", "'fedproto[hub]'", "dataset hf")
        if not self._is_image(self.image):
            raise DataError(
                f"{self.where}: column {self.image!r} holds {self._kind(self.image)}, not images"
            )
        return table.select_columns([self.image]).cast_column(
            self.image, datasets.Image(decode=False)
        )

    def labels(self, tables: list[Any]) -> tuple[list[np.ndarray], tuple[str, ...]]:
        """Each table's labels, and the names of the classes."""
        found = [_column(table, self.label, self.where) for table in tables]
        if found[0].dtype.kind in "OU":
            names = sorted(
                {str(name) for column in found for name in np.unique(column.astype(str))}
            )
            return [np.searchsorted(names, column.astype(str)) for column in found], tuple(names)
        if any(column.dtype.kind not in "iu" for column in found):
            raise DataError(
                f"{self.where}: labels must be whole numbers or text, not {found[0].dtype}"
            )
        stated = getattr(self.features[self.label], "names", None)
        highest = int(found[0].max(initial=0))
        if stated is None and highest >= MOST_CLASSES:
            raise DataError(
                f"{self.where} has a label {highest}, out of range: labels count from 0"
            )
        return [column.astype(np.int64) for column in found], tuple(
            stated or map(str, range(highest + 1))
        )

    def writers(self, table: Any) -> np.ndarray | None:
        if self.client is None or self.client not in table.features:
            return None
        return _column(table, self.client, self.where)


def _column(table: Any, name: str, where: str) -> np.ndarray:
    column = table.select_columns([name]).with_format("arrow")[:].column(name)
    if column.null_count:
        raise DataError(f"{where}: column {name!r} is empty in {column.null_count} rows")
    values = column.to_numpy()
    return values.astype(str) if values.dtype == object else values


def _files(pictures: Any, where: str) -> Iterator[Named]:
    for start in range(0, len(pictures), CHUNK):
        yield from _named(pictures, range(start, min(start + CHUNK, len(pictures))), where)


def _named(pictures: Any, rows: range | list[int], where: str) -> list[Named]:
    """The image files in these rows, and what to call them."""
    (found,) = pictures[rows].values()
    for row, file in zip(rows, found, strict=True):
        if file is None or not (file["bytes"] or file["path"]):
            raise DataError(f"{where} has no image in row {row}")
    return [
        (io.BytesIO(file["bytes"]) if file["bytes"] else file["path"], f"{where}, row {row},")
        for row, file in zip(rows, found, strict=True)
    ]


def _images(pictures: Any, shape: tuple[int, int], mode: str, resize: bool, where: str) -> Lazy:
    def read(rows: np.ndarray) -> np.ndarray:
        return decode(_named(pictures, rows.tolist(), where), shape, mode, resize)

    return Lazy(full_shape(len(pictures), shape, mode), read)
