from typing import Any

import numpy as np

from fedproto.config.options import PositiveInt
from fedproto.core.client_names import client_name
from fedproto.errors import ConfigError
from fedproto.partitions import ClientRows, PartitionRequest, add_test_rows, group_positions


def natural(
    request: PartitionRequest, *, test_shots: PositiveInt | None = None
) -> list[ClientRows]:
    """One client per writer (or value of `client`); `clients` writers are drawn at random.

    Clients are called as their writers, and numbered in the sorted order of the drawn writers;
    texts are sorted by character code. Writers without a training row are left out. A client is
    tested on rows of its classes: on the writer's own if every drawn writer has some, otherwise
    on everybody's.
    """
    if request.train_writer is None:
        raise ConfigError(
            "partition natural needs a data set that says who wrote each row: chars74k, "
            "femnist, pfllib, folder with levels=client/class, or npz, csv, text, images or hf "
            "with a column `client`"
        )
    writers, train_writer = np.unique(request.train_writer, return_inverse=True)
    if request.clients > len(writers):
        raise ConfigError(
            f"clients is {request.clients}, but the training rows name only {len(writers)} "
            "different writers (values of the column of clients): pass "
            f"--clients {len(writers)} or fewer"
        )
    shuffled = request.generator.permutation(len(writers))
    drawn = np.sort(shuffled[: request.clients])
    rows_by_writer = group_positions(train_writer, len(writers))
    train_rows = [rows_by_writer[writer] for writer in drawn]
    own_test_rows = None
    if request.test_writer is not None:
        tests_by_writer = _find_own_tests(request, request.test_writer, writers, train_writer)
        tests = [tests_by_writer[writer] for writer in drawn]
        if all(len(rows) > 0 for rows in tests):
            own_test_rows = tests
    clients = add_test_rows(request, train_rows, test_shots, own_test_rows)
    names = [name_writer(writers[writer]) for writer in drawn]
    return [rows._replace(name=name) for rows, name in zip(clients, names, strict=True)]


def name_writer(writer: Any) -> str:
    """Return what the client of a writer is called: the value in the data, as text."""
    if isinstance(writer, np.floating) and float(writer).is_integer():
        writer = int(writer)
    if isinstance(writer, bytes):
        writer = writer.decode("utf-8", "replace")
    return client_name(str(writer), "the data has a client")


def _find_own_tests(
    request: PartitionRequest,
    test_writer: np.ndarray,
    writers: np.ndarray,
    train_writer: np.ndarray,
) -> list[np.ndarray]:
    """Return each writer's test rows of classes of which it has training rows.

    `train_writer` holds positions in `writers`, `test_writer` the writers themselves.
    """
    classes = len(request.names)
    # A pair of writer and class is one number: writer * classes + class.
    trained_pairs = np.unique(train_writer * classes + request.train)
    known_rows = np.flatnonzero(np.isin(test_writer, writers))
    writer_of_row = np.searchsorted(writers, test_writer[known_rows])
    pairs = writer_of_row * classes + request.test[known_rows]
    is_trained = np.isin(pairs, trained_pairs)
    rows = known_rows[is_trained]
    positions_by_writer = group_positions(writer_of_row[is_trained], len(writers))
    return [rows[positions] for positions in positions_by_writer]
