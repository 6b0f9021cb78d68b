"""Noise that a trusted server adds to the sum of all uploads, before anything else sees it.

Groups that clients send once are added up as they come: the sum of those that are new gets noise
and is added to the noisy sums so far. So every client is in one release only, whoever comes later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fedproto.core import rng
from fedproto.core.tensors import (
    align_axes,
    find_received_values,
    flatten_state,
    flatten_upload,
    select_rows,
    sum_uploads,
    unflatten_state,
    unflatten_upload,
)
from fedproto.core.types import (
    Algorithm,
    GroupLayout,
    Recipient,
    SentOnce,
    State,
    Task,
    Tree,
    Upload,
)
from fedproto.errors import ConfigError
from fedproto.privacy.noisy_uploads import (
    Grids,
    Protection,
    add_to_upload,
    as_dtype,
    leave_out_rare,
    tell_noise,
)

#: Where the server's state holds what the noise needs; the algorithm never sees it.
_KEPT = "privacy"


def with_server_noise(
    algorithm: Algorithm,
    protection: Protection,
    grids: Grids,
    layouts: Mapping[str, GroupLayout],
) -> Algorithm:
    """Return the algorithm whose server adds noise to the sum of the clients' bounded uploads.

    layouts  what the algorithm declared before its uploads were bounded
    """
    if not algorithm.additive:
        raise ConfigError(
            f"noise at the server needs the sum of all uploads, but {algorithm.name} works on "
            "single uploads: choose another algorithm or option (such as absent=drop), or noise "
            "at the clients"
        )

    def init(params: Tree, task: Task) -> State:
        like = next(value for value in params.values() if value.is_floating_point())
        kept: State = {
            "key": rng.key(task.seed, "noise at the server"),
            "count": torch.tensor(0),
            "like": like.new_zeros(()),
        }
        if protection.sampling is not None:
            expected = protection.sampling * task.numbers
            kept["expected"] = torch.tensor(expected, dtype=torch.float64)
        if algorithm.once:
            kept["seen"] = torch.zeros(task.numbers, dtype=torch.bool)
            kept["releases"] = torch.tensor(0)
            kept["once"] = unflatten_state(_start_sums(algorithm, layouts, like))
        return algorithm.init(params, task) | {_KEPT: kept}

    def aggregate(server: State, uploads: Upload) -> State:
        inner = _hide(server)
        kept = dict(server[_KEPT])
        total = _move(sum_uploads(uploads), kept["like"].device)
        noisy = add_to_upload(total, grids, _next_key(kept), protection.seeded)
        noisy = leave_out_rare(noisy, grids, protection)
        if "expected" in kept:
            noisy = _fix_weights(noisy, grids, kept["expected"])
        if protection.unit == "client":
            noisy = _add_old_values(algorithm, inner, noisy, layouts)
        noisy = as_dtype(noisy, kept["like"].dtype)
        return algorithm.aggregate(inner, noisy) | {_KEPT: kept}

    def aggregate_once(server: State, sent_once: SentOnce) -> State:
        assert algorithm.aggregate_once is not None
        inner = _hide(server)
        kept = dict(server[_KEPT])
        rows = (~kept["seen"][sent_once.clients]).nonzero().flatten()
        if len(rows):
            new = sum_uploads(select_rows(sent_once.groups, rows))
            noisy = add_to_upload(new, grids, _next_key(kept), protection.seeded)
            total = flatten_state(kept["once"])
            added = {name: total[name] + value for name, value in flatten_upload(noisy).items()}
            kept["once"] = unflatten_state(added)
            kept["releases"] = kept["releases"] + 1
            kept["seen"] = kept["seen"].index_fill(0, sent_once.clients, True)
        total_upload = unflatten_upload(flatten_state(kept["once"]))
        releases = int(kept["releases"])
        shown = leave_out_rare(total_upload, grids, protection, releases)
        shown = tell_noise(shown, grids, releases)
        as_one = SentOnce(shown, torch.zeros(1, dtype=torch.int64), sent_once.round)
        return algorithm.aggregate_once(inner, as_one) | {_KEPT: kept}

    return replace(
        algorithm,
        init=init,
        send=lambda server, recipient: algorithm.send(_hide(server), recipient),
        aggregate=aggregate,
        aggregate_once=None if algorithm.aggregate_once is None else aggregate_once,
        notes=lambda server: algorithm.notes(_hide(server)),
        metrics=lambda server: algorithm.metrics(_hide(server)),
        combinable=False,
        repeatable=False,
        # That a round had no release would tell that nobody was in it.
        silence=None if protection.sampling is None else lambda: _make_zeros(layouts),
    )


def _hide(server: State) -> State:
    """Return the server's state as the algorithm knows it."""
    return {name: value for name, value in server.items() if name != _KEPT}


def _next_key(kept: State) -> Tensor:
    """Return the key of the next seeded noise, and count it."""
    kept["count"] = kept["count"] + 1
    return rng.bits(kept["key"] + kept["count"], 1)[0]


def _start_sums(algorithm: Algorithm, layouts: Mapping[str, GroupLayout], like: Tensor) -> Tree:
    """Return zeros for the noisy sums of the groups that are sent once, as a flat upload."""
    zeros = {}
    for name in algorithm.once:
        for tensor, shape in layouts[name].tensor_shapes(name).items():
            zeros[tensor] = like.new_zeros(1, *shape, dtype=torch.float64)
    return zeros


def _make_zeros(layouts: Mapping[str, GroupLayout]) -> Upload:
    """Return the sum of no uploads, with a leading axis of 1."""
    zeros = {}
    for name, layout in layouts.items():
        for tensor, shape in layout.tensor_shapes(name).items():
            zeros[tensor] = torch.zeros(1, *shape, dtype=torch.float64)
    return unflatten_upload(zeros)


def _move(upload: Upload, device: torch.device) -> Upload:
    """Return an upload on a device; that of a round in which nobody spoke is on the CPU."""
    flat = flatten_upload(upload)
    return unflatten_upload({name: value.to(device) for name, value in flat.items()})


def _fix_weights(upload: Upload, grids: Grids, expected: Tensor) -> Upload:
    """Return an upload with the expected number of clients where their number has no noise.

    Such a weight is 1 for each client, so that the sum would tell how many were sampled.
    """
    fixed = dict(upload)
    for name, group in upload.items():
        if () not in grids[name]:
            weight = torch.zeros_like(group.weight) + expected.to(group.weight.device)
            fixed[name] = group._replace(weight=weight)
    return fixed


def _add_old_values(
    algorithm: Algorithm, inner: State, noisy: Upload, layouts: Mapping[str, GroupLayout]
) -> Upload:
    """Return sums of values where changes from what the server sent were added up."""
    classes = max(layout.rows for layout in layouts.values()) or 1
    complete = dict(noisy)
    for name, group in noisy.items():
        if not layouts[name].relative:
            continue
        received = algorithm.send(inner, Recipient(torch.tensor(0), torch.ones(classes)))
        old = find_received_values(received, name, layouts[name])
        sums = {}
        for tensor, value in group.sums.items():
            sums[tensor] = value + align_axes(group.weight, value) * old[tensor]
        complete[name] = group._replace(sums=sums)
    return complete
