"""Messages: what is packed is unpacked unchanged."""

from typing import Any

import numpy as np
import torch
from helpers.deployment import (
    SUMS,
    WEIGHT,
    make_reply,
    trees_equal,
)

from fedproto.core.types import Task, per_class
from fedproto.deploy.messages import (
    pack_download,
    pack_upload,
    place_rows,
    unpack_download,
    unpack_upload,
)


def test_unpacking_a_download_inverts_packing_it(after_two_rounds: Any) -> None:
    _, state = after_two_rounds
    like = {name: torch.zeros_like(value) for name, value in state.server.items()}
    assert trees_equal(
        unpack_download(pack_download(state.server, state.classes), state.classes, like),
        state.server,
    )
    nobody = {name: torch.zeros_like(value) for name, value in state.server.items()}
    assert pack_download(nobody, state.classes).arrays == {}, "what holds nothing is not sent"
    assert trees_equal(
        unpack_download(pack_download(nobody, state.classes), state.classes, like), nobody
    )


def test_unpacking_an_upload_inverts_packing_it() -> None:
    sent = make_reply("a", spoken=("z", "x"))
    layouts = per_class(Task(3, 4, 1, 0), prototypes=(4,))
    placed = place_rows(unpack_upload(sent), ["z", "x"], ("x", "y", "z"), layouts)
    weight = sent.arrays[WEIGHT]
    assert placed["prototypes"].weight.tolist() == [weight[1], 0, weight[0]]
    back = pack_upload(placed, ("x", "y", "z"), layouts)
    assert back.header["spoken"] == ["x", "z"]
    assert np.array_equal(back.arrays[SUMS], sent.arrays[SUMS][::-1])
