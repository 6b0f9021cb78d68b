"""Which kind of data set a path looks like, for those who name a file without its kind."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

#: The kind of data set that reads files with this suffix.
KIND_OF_SUFFIX = {
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".xlsx": "excel",
    ".xlsm": "excel",
    ".jsonl": "text",
    ".txt": "text",
    ".npz": "npz",
    ".npy": "npy",
    ".arrow": "hf",
}
#: Files of a folder that are looked at.
MAX_FILES_SEEN = 1000


def suggest_dataset(text: str) -> str | None:
    """Return the data set that a path alone may mean, such as `csv:breast.csv`.

    None if the text looks like no path.
    """
    path = Path(text).expanduser()
    try:
        is_folder = path.is_dir()
    except OSError:  # a name longer than the file system takes
        return None
    kind = _guess_kind_of_folder(path) if is_folder else _kind_of_file(path)
    if kind is None:
        return None
    if kind == "npy" and not is_folder:  # these arrays are named by their folder
        return f"npy:{Path(text).parent}"
    return f"{kind}:{text}"


def _kind_of_file(path: Path) -> str | None:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes[-1:] == [".gz"]:
        suffixes.pop()
    return KIND_OF_SUFFIX.get(suffixes[-1]) if suffixes else None


def _guess_kind_of_folder(folder: Path) -> str:
    """Return the kind of the first file that has one; a folder of anything else holds images."""
    if _is_divided_by_pfllib(folder):
        return "pfllib"
    for path in islice(_list_files(folder), MAX_FILES_SEEN):
        kind = _kind_of_file(path)
        if kind is not None:
            return "hf" if kind == "parquet" else kind  # the hub has folders of these
    return "folder"


def _is_divided_by_pfllib(folder: Path) -> bool:
    """Return whether a folder holds train/0.npz and test/0.npz, or another client's files."""
    numbers = [path.name for path in (folder / "train").glob("*.npz") if path.stem.isdigit()]
    return any((folder / "test" / name).is_file() for name in numbers)


def _list_files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())
