"""Image data sets of the Hugging Face hub, read by the optional package `datasets`."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from fedproto.config.options import PositiveFloat, PositiveInt
from fedproto.data import DataFolders, Source, Split, from_arrays
from fedproto.data.npz import MAX_UNNAMED_CLASSES
from fedproto.data.shared.images import (
    ImageFile,
    ImageFormat,
    agree_on_format,
    describe_broken,
    examine,
    read_images,
)
from fedproto.data.shared.lazy_array import LazyArray
from fedproto.errors import ConfigError, DataError, MissingExtra, need

#: Usual names of columns; the first that exists is taken.
LABEL_COLUMNS = ("label", "labels", "fine_label", "character", "class", "target")
CLIENT_COLUMNS = ("client", "client_id", "writer", "writer_id", "user", "user_id")
LABEL_TYPES = ("int", "uint", "string", "large_string")  # how the names of label types begin
TEST_PARTS = ("test", "validation", "valid")
SAFE_MAJOR_VERSION = 4  # of `datasets`
ROWS_PER_CHUNK = 1000  # of which image headers are checked at a time


def hf(
    data_folders: DataFolders,
    name: str,
    *,
    subset: str | None = None,
    image: str | None = None,
    label: str | None = None,
    client: str | None = None,
    group: str | None = None,
    size: PositiveInt | None = None,
    grey: bool | None = None,
    mean: tuple[float, ...] = (0.0,),
    std: tuple[PositiveFloat, ...] = (1.0,),
    augment: bool = False,
) -> Source:
    """Images from the Hugging Face hub, or from a folder of its parquet files.

    Images stay on disk until used. The columns `image`, `label` and `client` (for `natural`) are
    found by their type or name, or named by these options. `group` names the column of what must
    stay together, such as the images of one patient. The test set is `test`, else `validation`,
    else a seeded fifth of each class; beside `test`, `validation` chooses the best round. `size`,
    `grey`, `mean` and `std` are as in `folder`.
    """
    return from_tables(
        f"hf:{name}",
        _load_tables(name, subset),
        image=image,
        label=label,
        client=client,
        group=group,
        size=size,
        grey=grey,
        mean=mean,
        std=std,
        augment=augment,
    )


def from_tables(
    where: str,
    tables: list[Any],
    *,
    image: str | None = None,
    label: str | None = None,
    client: str | None = None,
    group: str | None = None,
    size: int | None = None,
    grey: bool | None = None,
    mean: tuple[float, ...] = (0.0,),
    std: tuple[float, ...] = (1.0,),
    augment: bool = False,
) -> Source:
    """Return the images of tables for training and perhaps for testing and validation."""
    columns = _Columns(where, tables[0], image, label, client, group)
    image_tables = [columns.select_images(table) for table in tables]
    found = examine(_list_files(image_tables, where))
    if found.errors:
        raise DataError(describe_broken(found.errors, len(found.names)))
    format = agree_on_format(found, size, grey)
    labels, names = columns.read_labels(tables)
    splits = []
    for table, image_table, y in zip(tables, image_tables, labels, strict=True):
        x = _to_lazy_array(image_table, format, where)
        splits.append(Split(x, y, columns.read_writers(table), columns.read_groups(table)))
    validation = splits[2] if len(splits) > 2 else None
    source = from_arrays(
        where,
        names,
        splits[:2],
        validation=validation,
        mean=mean,
        std=std,
        augment=augment,
    )
    return replace(source, scale=format.white)


# --- tables


def _load_tables(name: str, subset: str | None) -> list[Any]:
    """Return the tables that `find_parts` names, all memory-mapped."""
    datasets = _import_datasets()
    is_folder = Path(name).is_dir()
    if not is_folder:
        _refuse_other_than_hub(name)
    major_version = int(datasets.__version__.partition(".")[0])
    if major_version < SAFE_MAJOR_VERSION:
        raise MissingExtra(
            f"dataset hf needs datasets>={SAFE_MAJOR_VERSION}, since older versions run code that "
            "a data set brings"
        )
    try:
        parts = datasets.load_dataset(name, subset)
    except Exception as error:  # the network, the hub's answer, a damaged file
        raise _loading_error(name, is_folder, error) from error
    return find_parts(parts, f"hf:{name}")


def find_parts(parts: Mapping[str, Any], where: str) -> list[Any]:
    """Return the training table and those for testing and validation, if there are any.

    There is no table for validation without one for testing.
    """
    if "train" not in parts:
        raise DataError(f"{where} has no part 'train': it has {', '.join(parts)}")
    other_tables = [parts[part] for part in TEST_PARTS if part in parts]
    has_test = "test" in parts
    return [parts["train"], *other_tables[: 2 if has_test else 1]]


def has_images(table: Any) -> bool:
    """Return whether a column of a table is of images."""
    return any(type(feature).__name__ == "Image" for feature in table.features.values())


def _import_datasets() -> ModuleType:
    """Import the optional package, or raise MissingExtra."""
    return need("datasets", "'.[hub]'", "dataset hf")


def _loading_error(name: str, is_folder: bool, error: Exception) -> DataError:
    """Return what to do about a data set that `datasets` could not load."""
    message = " ".join(str(error).split())
    reason = f"{type(error).__name__}: {message}"
    if is_folder:
        return DataError(
            f"dataset hf cannot read the folder {name}, which needs train-*.parquet ({reason})"
        )
    return DataError(
        f"dataset hf finds no folder {name!r}, and it cannot be read from the hub ({reason}): "
        "without a network, put the data set's parquet files in a folder, and name it with "
        "hf:FOLDER"
    )


def _refuse_other_than_hub(name: str) -> None:
    """Raise DataError unless the name is OWNER/NAME.

    `load_dataset("pandas")`, for example, would unpickle files of the current folder.
    """
    owner, _, own_name = name.partition("/")
    if not owner or not own_name or Path(name).suffix == ".py":
        raise DataError(
            f"dataset hf finds no folder {name!r}; a data set of the hub is written hf:OWNER/NAME"
        )


# --- columns


class _Columns:
    """The columns that hold the images, the labels and, if known, the clients."""

    def __init__(
        self,
        where: str,
        table: Any,
        image: str | None,
        label: str | None,
        client: str | None,
        group: str | None = None,
    ) -> None:
        self.where = where
        self.features = table.features
        self.group = group
        for name in (image, label, client, group):
            if name is not None and name not in self.features:
                raise ConfigError(f"{where} has no column {name!r}: it has {self._describe()}")
        self.image = image or self._find_image()
        self.client = client or self._find_client()
        self.label = label or self._find_label()

    def _describe(self) -> str:
        """Return all columns with their types, for errors."""
        return ", ".join(f"{name} ({self._type_name(name)})" for name in self.features)

    def _type_name(self, name: str) -> str:
        """Return the type of a column as `datasets` calls it."""
        feature = self.features[name]
        return str(getattr(feature, "dtype", None) or type(feature).__name__)

    def _holds_images(self, name: str) -> bool:
        """Return whether a column is of images, decoded or as bytes of files."""
        feature = self.features[name]
        if type(feature).__name__ == "Image":
            return True
        return isinstance(feature, dict) and set(feature) == {"bytes", "path"}

    def _find_image(self) -> str:
        """Return the only column of images."""
        candidates = [name for name in self.features if self._holds_images(name)]
        if not candidates:
            raise DataError(
                f"{self.where} has no column of images, and numbers go in an npz file: "
                f"it has {self._describe()}"
            )
        return self._only(candidates, "image")

    def _find_client(self) -> str | None:
        """Return the first column with a usual name for clients, if there is one."""
        for name in CLIENT_COLUMNS:
            if name in self.features:
                return name
        return None

    def _find_label(self) -> str:
        """Return the column of class labels, or else of whole numbers or text.

        If there are several, it is the first with a usual name.
        """
        candidates = []
        class_labels = []
        for name, feature in self.features.items():
            if name in (self.image, self.client, self.group):
                continue
            if type(feature).__name__ == "ClassLabel":
                class_labels.append(name)
            if self._type_name(name).startswith(LABEL_TYPES):
                candidates.append(name)
        candidates = class_labels or candidates
        for name in LABEL_COLUMNS:
            if name in candidates:
                return name
        return self._only(candidates, "label")

    def _only(self, candidates: list[str], option: str) -> str:
        """Return the only candidate, or raise ConfigError, which asks for an option."""
        if len(candidates) != 1:
            raise ConfigError(
                f"{self.where} needs {option}=COLUMN, to say which it is: it has {self._describe()}"
            )
        return candidates[0]

    def select_images(self, table: Any) -> Any:
        """Return the column of images alone, as the bytes of their files."""
        if not self._holds_images(self.image):
            found = self._type_name(self.image)
            raise DataError(f"{self.where}: column {self.image!r} holds {found}, not images")
        undecoded = _import_datasets().Image(decode=False)
        return table.select_columns([self.image]).cast_column(self.image, undecoded)

    def read_labels(self, tables: list[Any]) -> tuple[list[np.ndarray], tuple[str, ...]]:
        """Return the labels of each table, and the names of the classes."""
        labels = [_read_column(table, self.label, self.where) for table in tables]
        if labels[0].dtype.kind in "OU":
            return _number_texts([column.astype(str) for column in labels])
        for column in labels:
            if column.dtype.kind not in "iu":
                raise DataError(
                    f"{self.where}: labels must be whole numbers or text, not {labels[0].dtype}"
                )
        names = getattr(self.features[self.label], "names", None)
        if not names:
            names = self._names_by_number(labels[0])
        return [column.astype(np.int64) for column in labels], tuple(names)

    def _names_by_number(self, labels: np.ndarray) -> list[str]:
        """Return names for classes that have none: their numbers."""
        highest = int(labels.max(initial=0))
        if highest >= MAX_UNNAMED_CLASSES:
            raise DataError(
                f"{self.where} has a label {highest}, out of range: labels count from 0"
            )
        return [str(label) for label in range(highest + 1)]

    def read_writers(self, table: Any) -> np.ndarray | None:
        """Return the client of each row, if the table says so."""
        if self.client is None or self.client not in table.features:
            return None
        return _read_column(table, self.client, self.where)

    def read_groups(self, table: Any) -> np.ndarray | None:
        """Return the group of each row, if a column is named; all tables must have it."""
        if self.group is None:
            return None
        if self.group not in table.features:
            raise DataError(f"{self.where} has a part without the column {self.group!r}")
        return _read_column(table, self.group, self.where)


def _read_column(table: Any, name: str, where: str) -> np.ndarray:
    """Return a column as an array; raises DataError if a row is empty."""
    column = table.select_columns([name]).with_format("arrow")[:].column(name)
    if column.null_count:
        raise DataError(f"{where}: column {name!r} is empty in {column.null_count} rows")
    values = column.to_numpy()
    return values.astype(str) if values.dtype == object else values


def _number_texts(columns: list[np.ndarray]) -> tuple[list[np.ndarray], tuple[str, ...]]:
    """Return the number of each label of text, and the names of the classes, sorted."""
    names: set[str] = set()
    for column in columns:
        names.update(np.unique(column).tolist())
    ordered = sorted(names)
    return [np.searchsorted(ordered, column) for column in columns], tuple(ordered)


# --- images


def _list_files(image_tables: list[Any], where: str) -> Iterator[ImageFile]:
    """Yield the image files of all tables, a chunk of rows at a time."""
    for table in image_tables:
        for start in range(0, len(table), ROWS_PER_CHUNK):
            end = min(start + ROWS_PER_CHUNK, len(table))
            yield from _read_files(table, range(start, end), where)


def _read_files(image_table: Any, rows: range | list[int], where: str) -> list[ImageFile]:
    """Return the image files in these rows."""
    (column,) = image_table[rows].values()
    files = []
    for row, stored in zip(rows, column, strict=True):
        if stored is None or not (stored["bytes"] or stored["path"]):
            raise DataError(f"{where} has no image in row {row}")
        file = io.BytesIO(stored["bytes"]) if stored["bytes"] else stored["path"]
        files.append(ImageFile(file, f"{where}, row {row},"))
    return files


def _to_lazy_array(image_table: Any, format: ImageFormat, where: str) -> LazyArray:
    """Return the images of a table as an array that reads rows when asked for."""

    def read(rows: np.ndarray) -> np.ndarray:
        return read_images(_read_files(image_table, rows.tolist(), where), format)

    return LazyArray(format.shape(len(image_table)), read, format.dtype)
