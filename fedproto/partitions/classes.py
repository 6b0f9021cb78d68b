import numpy as np

from fedproto.config.options import PositiveInt, words
from fedproto.core.class_names import normalise_name
from fedproto.errors import unknown
from fedproto.partitions import (
    ClientRows,
    PartitionRequest,
    add_test_rows,
    group_positions,
    keep_groups_whole,
    require_rows,
)


def classes(
    request: PartitionRequest,
    *,
    names: str = "",
    shots: PositiveInt | None = None,
    test_shots: PositiveInt | None = None,
) -> list[ClientRows]:
    """Images of the named classes, `names="cat,dog"`, or of all classes, dealt to all clients.

    A class is dealt in equal parts, or `shots` rows of it go to each client.
    """
    clients = request.clients
    hands: list[list[np.ndarray]] = [[np.zeros(0, int)] for _ in range(clients)]
    rows_by_label = group_positions(request.train, len(request.names))
    for label in _find_labels(request, names):
        rows = request.generator.permutation(rows_by_label[label])
        if names or shots:
            wanted = (shots or 1) * clients
            require_rows(request, label, len(rows), wanted, "training")
        if shots:
            rows = rows[: shots * clients]
        for hand, part in zip(hands, np.array_split(rows, clients), strict=True):
            hand.append(part)
    train_rows = keep_groups_whole(request, [np.concatenate(hand) for hand in hands])
    return add_test_rows(request, train_rows, test_shots)


def _find_labels(request: PartitionRequest, names: str) -> list[int]:
    """Return the labels of the named classes, or of all, sorted."""
    wanted = [normalise_name(name) for name in words(names)]
    for name in wanted:
        if name not in request.names:
            raise unknown("class", name, request.names)
    if not wanted:
        return list(range(len(request.names)))
    return sorted({request.names.index(name) for name in wanted})
