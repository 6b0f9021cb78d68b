import numpy as np

from fedproto.config.options import PositiveInt, words
from fedproto.core.class_names import normalise_name
from fedproto.errors import unknown
from fedproto.partitions import ClientRows, PartitionRequest, enough, grouped, portions


def classes(
    pool: PartitionRequest,
    *,
    names: str = "",
    shots: PositiveInt | None = None,
    test_shots: PositiveInt | None = None,
) -> list[ClientRows]:
    """Images of the named classes, `names="cat,dog"`, or of all: dealt in equal parts, or `shots` of each a client."""
    wanted = [normalise_name(name) for name in words(names)] or list(pool.names)
    for name in wanted:
        if name not in pool.names:
            raise unknown("class", name, pool.names)
    rows_of, hands = (
        grouped(pool.train, len(pool.names)),
        [[np.zeros(0, int)] for _ in range(pool.clients)],
    )
    for label in sorted({pool.names.index(name) for name in wanted}):
        rows = pool.generator.permutation(rows_of[label])
        if names or shots:
            enough(pool, label, len(rows), (shots or 1) * pool.clients, "training")
        each = shots * pool.clients if shots else len(rows)
        for hand, part in zip(hands, np.array_split(rows[:each], pool.clients), strict=True):
            hand.append(part)
    return portions(pool, [np.concatenate(hand) for hand in hands], test_shots)
