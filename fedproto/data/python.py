"""Data that is passed from Python instead of a name."""

from __future__ import annotations

from fedproto.config.options import PositiveFloat
from fedproto.data import DataFolders, Source
from fedproto.data.shared.channel_order import OrderOption
from fedproto.errors import DataError


def python(
    data_folders: DataFolders,
    *,
    label: str | None = None,
    client: str | None = None,
    group: str | None = None,
    ignore: tuple[str, ...] = (),
    keep: tuple[str, ...] = (),
    missing: tuple[str, ...] = (),
    image: str | None = None,
    text: str | None = None,
    channel_order: OrderOption = "auto",
    mean: tuple[float, ...] = (0.0,),
    std: tuple[PositiveFloat, ...] = (1.0,),
    augment: bool = False,
) -> Source:
    """Data that is passed to `fedproto.run(dataset=...)`, so it has no name here.

    `label`, `client`, `group`, `ignore`, `keep` and `missing` are those of `csv`, for a DataFrame;
    `image` and `text` name columns of a Hugging Face Dataset; the others are those of `npz`, for
    arrays.
    """
    raise DataError(
        "dataset python stands for data that is passed from Python: pass it again, as in "
        "fedproto.run(dataset=(x, y)), or name a file, such as csv:PATH"
    )
