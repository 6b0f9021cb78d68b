"""Sources made of what Python programs hold: arrays, DataFrames, torch and Hugging Face Datasets.

Nothing of pandas or `datasets` is imported here: an object of theirs is known by its class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from fedproto.data import Source
from fedproto.data.shared.client_arrays import collect_dataset, from_pair
from fedproto.data.shared.feature_encoding import Notation
from fedproto.data.shared.stored_tables import EXTRA
from fedproto.data.shared.table_source import TableOptions, from_table
from fedproto.data.shared.tables import Table, find_column
from fedproto.errors import ConfigError, DataError, need, unknown


class Frame(Protocol):
    """A pandas DataFrame, for type checkers: pandas need not be installed."""

    columns: Any
    index: Any


class HubDataset(Protocol):
    """A Hugging Face Dataset, for type checkers; a DatasetDict is a mapping."""

    @property
    def features(self) -> Any: ...


#: Pairs of arrays, DataFrames and Datasets, alone or per client.
PythonData: TypeAlias = Sequence[Any] | Mapping[str, Any] | TorchDataset[Any] | Frame | HubDataset
ACCEPTED = (
    "text; one (x, y) or (x, y, x_test, y_test), or a list or dict with one per client; a "
    "DataFrame, or a dict with one per client; a torch Dataset; or a Hugging Face Dataset"
)
TABLE_OPTIONS = ("label", "client", "group", "ignore", "keep", "missing")
HUB_OPTIONS = (*TABLE_OPTIONS, "image", "text")
HUB_IMAGE_OPTIONS = ("label", "client", "group", "image")
HUB_TEXT_OPTIONS = ("label", "client", "group", "text")
#: The column that says of which of several named DataFrames a row is.
CLIENT_COLUMN = "client"


def is_frame(data: Any) -> bool:
    """Return whether this is a pandas DataFrame."""
    return _class_name(data) in ("pandas.DataFrame", "pandas.core.frame.DataFrame")


def _is_hub_dataset(data: Any) -> bool:
    names = ("datasets.arrow_dataset.Dataset", "datasets.dataset_dict.DatasetDict")
    return any(_class_name(data) == name for name in names)


def _class_name(data: Any) -> str:
    kind = type(data)
    return f"{kind.__module__}.{kind.__qualname__}"


def is_per_client(data: Any) -> bool:
    """Return whether data from Python says what each client has; otherwise it is to be divided.

    Raises DataError if it is nothing that can be used.
    """
    if is_frame(data) or _is_hub_dataset(data) or isinstance(data, TorchDataset):
        return False
    if isinstance(data, Mapping) and len(data):
        frames = [is_frame(part) for part in data.values()]
        if any(frames) and not all(frames):
            raise DataError("dataset must have a DataFrame for every client, or for none")
        return not all(frames)
    if not isinstance(data, Sequence) or not len(data):
        raise DataError(f"dataset must be {ACCEPTED}, not {_describe(data)}")
    return not (_is_pair(data) or _is_split(data))


def _describe(data: Any) -> str:
    kind = type(data).__name__
    return f"an empty {kind}" if isinstance(data, (Sequence, Mapping)) else f"of type {kind}"


def _is_pair(data: Sequence) -> bool:
    """Return whether this is one (x, y) or (x, y, x_test, y_test), not a list of clients.

    The second entry tells: it is a list of labels, where a client is a tuple of arrays.
    """
    if len(data) not in (2, 4):
        return False
    second = data[1]
    if isinstance(second, (np.ndarray, Tensor)):
        return second.ndim == 1
    if isinstance(second, (list, tuple)):
        first = second[0] if len(second) else None
        return isinstance(first, (int, str, np.generic)) or _is_single_value(first)
    return _class_name(second) in ("pandas.Series", "pandas.core.series.Series")


def _is_single_value(value: Any) -> bool:
    return isinstance(value, (np.ndarray, Tensor)) and value.ndim == 0


def _is_split(data: Sequence) -> bool:
    """Return whether this is a tuple of two DataFrames or Datasets: training and test rows."""
    if not isinstance(data, tuple) or len(data) != 2:
        return False
    are_frames = all(is_frame(part) for part in data)
    return are_frames or all(isinstance(part, TorchDataset) for part in data)


def to_source(data: Any, options: Mapping[str, Any]) -> Source:
    """Return data that is to be divided as one source.

    `options` are those of the data set `python` that were given. Raises ConfigError if one has no
    meaning for this kind of data.
    """
    if _is_hub_dataset(data):
        _refuse_others(options, HUB_OPTIONS, "a Hugging Face Dataset")
        return _from_hub(data, options)
    if isinstance(data, Mapping):
        return _from_named_frames(data, options)
    if is_frame(data):
        return _from_frames([data], options)
    if isinstance(data, TorchDataset):
        return from_pair(collect_dataset(data, "the Dataset"), "data", options)
    if is_frame(data[0]) and is_frame(data[1]):
        return _from_frames(list(data), options)
    if is_frame(data[0]):
        return _from_frames_and_labels(data, options)
    if isinstance(data[0], TorchDataset):
        train = collect_dataset(data[0], "the Dataset")
        test = collect_dataset(data[1], "the test Dataset")
        return from_pair((*train, *test), "data", options)
    return from_pair(data, "data", options)


def _refuse_others(options: Mapping[str, Any], accepted: Sequence[str], kind: str) -> None:
    for name in options:
        if name not in accepted:
            raise ConfigError(f"{name!r} has no meaning for {kind}: it takes {', '.join(accepted)}")


# --- DataFrames


def _from_frames(frames: list[Any], options: Mapping[str, Any]) -> Source:
    """Return one DataFrame, or the training and the test rows in two, as a source."""
    _refuse_others(options, TABLE_OPTIONS, "a DataFrame")
    notation = Notation(options.get("missing", ()))
    names = ["the DataFrame", "the test DataFrame"][: len(frames)]
    table = Table.from_frames(frames, names, options.get("ignore", ()), notation=notation)
    given = {name: options[name] for name in ("label", "client", "group") if name in options}
    table_options = TableOptions(keep=options.get("keep", ()), notation=notation, **given)
    return from_table("data", table, table_options)


def _from_named_frames(frames: Mapping[str, Any], options: Mapping[str, Any]) -> Source:
    """Return the DataFrames of named clients as one, with a column of clients."""
    if "client" in options:
        raise ConfigError("'client' has no meaning for a dict of DataFrames, which names them")
    pandas = need("pandas", EXTRA, "a dict of DataFrames")
    parts = []
    for name, frame in frames.items():
        if find_column([str(column) for column in frame.columns], (CLIENT_COLUMN,)):
            raise DataError(
                f"the DataFrame of client {name!r} has a column {CLIENT_COLUMN!r}: leave it out, "
                "since the dict names the clients"
            )
        parts.append(frame.assign(**{CLIENT_COLUMN: str(name)}))
    return _from_frames([pandas.concat(parts)], options)


def _from_frames_and_labels(data: Sequence, options: Mapping[str, Any]) -> Source:
    """Return a pair of a DataFrame and its labels as one DataFrame."""
    if "label" in options:
        raise ConfigError("'label' has no meaning for (x, y), where y is the labels")
    frames = []
    for x, y in zip(data[::2], data[1::2], strict=True):
        labels = np.asarray(y)
        if not is_frame(x) or labels.ndim != 1 or len(x) != len(labels):
            raise DataError(
                f"data must be a DataFrame of inputs and one label per row: there are {len(x)} "
                f"rows and labels of shape {labels.shape}"
            )
        name = _free_name("label", x)
        frames.append(x.assign(**{name: labels}))
    return _from_frames(frames, {**options, "label": _free_name("label", data[0])})


def _free_name(name: str, frame: Any) -> str:
    """Return a name that no column has."""
    while name in frame.columns:
        name += "_"
    return name


# --- Hugging Face


def _from_hub(data: Any, options: Mapping[str, Any]) -> Source:
    """Return a Dataset or DatasetDict of images, texts or a table as a source."""
    from fedproto.data.hf import find_parts, from_tables, has_images
    from fedproto.data.text import from_rows

    tables = find_parts(data, "the DatasetDict") if isinstance(data, Mapping) else [data]
    names = list(tables[0].features)
    for option in ("image", "text"):
        if option in options and options[option] not in names:
            raise unknown("column of the Dataset", options[option], names)
    if "image" in options or has_images(tables[0]):
        _refuse_others(options, HUB_IMAGE_OPTIONS, "a Hugging Face Dataset of images")
        return from_tables("data", tables, **options)
    if "text" in options or find_column(names, ("text",)):
        _refuse_others(options, HUB_TEXT_OPTIONS, "a Hugging Face Dataset of texts")
        return from_rows("data", [_list_texts(table) for table in tables], **options)
    frames = []
    for table in tables:
        frame = table.to_pandas()
        for name, feature in table.features.items():
            if getattr(feature, "names", None):
                frame[name] = [feature.names[number] for number in frame[name]]
        frames.append(frame)
    return _from_frames(frames, options)


def _list_texts(table: Any) -> list[dict[str, str]]:
    """Return the rows of a table as texts by column; numbers of classes become their names."""
    rows = []
    for row in table:
        texts = {}
        for name, value in row.items():
            names = getattr(table.features[name], "names", None)
            texts[name] = str(names[value]) if names else str(value)
        rows.append(texts)
    return rows
