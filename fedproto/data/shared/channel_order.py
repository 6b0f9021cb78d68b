"""Which axis of an array of images is that of the channels."""

from __future__ import annotations

from typing import Literal, get_args

from fedproto.errors import ConfigError, DataError

#: The order of the axes behind the rows: `first` is (channels, height, width), `last` is (height,
#: width, channels).
Order = Literal["first", "last"]
#: What an option accepts.
OrderOption = Literal["auto", "first", "last"]

ORDERS: tuple[Order, ...] = get_args(Order)
USUAL_CHANNELS = (1, 3, 4)  # grey, colour, colour with transparency


def find_order(where: str, shape: tuple[int, ...], given: OrderOption) -> Order:
    """Return where the channels of images of this shape (without the rows) are.

    `auto` finds the axis, the first or the last, of 1, 3 or 4 entries. If both could be it, the one
    that leaves square images is taken. Arrays with other numbers of axes, those in which neither
    could be it, and those that hold no value are `first`. Raises DataError if the shape does not
    tell, and ConfigError if an order is given for inputs that have no axis of channels; `where`
    begins the sentence.
    """
    if given != "auto":
        if len(shape) != 3:
            raise ConfigError(
                f"{where} has inputs of shape {shape}: channel_order={given} is for images with an "
                "axis of channels, (rows, channels, height, width) or (rows, height, width, "
                "channels)"
            )
        return given
    if len(shape) != 3 or 0 in shape:
        return "first"
    first, middle, last = shape
    if last not in USUAL_CHANNELS:
        return "first"
    if first not in USUAL_CHANNELS:
        return "last"
    is_square_if_first = middle == last
    is_square_if_last = first == middle
    if is_square_if_first == is_square_if_last:
        raise DataError(
            f"{where} has inputs of shape {shape}, which does not tell where the channels are: "
            "set channel_order=first for (channels, height, width), or channel_order=last for "
            "(height, width, channels)"
        )
    return "first" if is_square_if_first else "last"
