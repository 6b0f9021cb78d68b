"""Algorithms whose uploads are clipped and noisy: differential privacy around any of them.

    protect(algorithm, protection, layouts)  the algorithm with what clients send made private

A record's embedding is clipped wherever the algorithm sees it; class sums, counts and Gram matrices
are then sums of bounded terms, which noise is added to. Where a whole client is protected, its
values are clipped and its weights normalised. The noise is added by each client to what it sends,
or by the server to the sum of what it got, before anything else is made of it. All of that wraps
the algorithm's value, so that engines and the round loop know nothing of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fedproto.core.closed_form import CLASS_SUMS, GRAM, TEACHER
from fedproto.core.tensors import align_axes, divide_by_weight, find_received_values
from fedproto.core.types import (
    Algorithm,
    Group,
    GroupLayout,
    Phase,
    SentOnce,
    State,
    Step,
    Tree,
    Upload,
)
from fedproto.privacy.bounds import bound_clients, bound_records, fit_grids
from fedproto.privacy.clipping import clip_rows
from fedproto.privacy.noisy_uploads import (
    Grids,
    Protection,
    add_to_upload,
    as_dtype,
    leave_out_rare,
    tell_noise,
)
from fedproto.privacy.server_noise import with_server_noise
from fedproto.privacy.shaped_noise import refuse_unshapeable, with_shaped_noise


def protect(
    algorithm: Algorithm, protection: Protection, layouts: Mapping[str, GroupLayout]
) -> Algorithm:
    """Return the algorithm with its uploads clipped and, as the protection says, made noisy.

    layouts  what the algorithm declares
    """
    if protection.shape == "variance":
        refuse_unshapeable(protection, layouts)
    if protection.clip is None:
        return algorithm
    bounded = clip_records(algorithm, protection.clip)
    if protection.unit == "client":
        bounded = _bound_contribution(bounded, protection.clip, layouts)
    if protection.noise == 0:
        return bounded
    if protection.shape == "variance":
        shaped = with_shaped_noise(algorithm, protection, layouts)
        return replace(bounded, upload=shaped.upload)
    grids = fit_upload(algorithm, protection, layouts)
    if protection.at == "client":
        return _with_client_noise(bounded, protection, grids)
    return with_server_noise(bounded, protection, grids, layouts)


def fit_upload(
    algorithm: Algorithm, protection: Protection, layouts: Mapping[str, GroupLayout]
) -> Grids:
    """Return the noise of all groups: those of a round are one release, those sent once another."""
    assert protection.clip is not None
    bound = bound_records if protection.unit == "record" else bound_clients
    parts = bound(layouts, protection.clip)
    of_round = [part for part in parts if part.group not in algorithm.once]
    sent_once = [part for part in parts if part.group in algorithm.once]
    grids = fit_grids(of_round, layouts, protection.noise, protection.rounding)
    return grids | fit_grids(sent_once, layouts, protection.noise, protection.rounding)


# --- clipping


def clip_records(algorithm: Algorithm, clip: float) -> Algorithm:
    """Return the algorithm that sees embeddings and fixed features no longer than `clip`.

    Sums over records are computed in float64, so that rounding errors of other records stay far
    below what noise hides.
    """

    def see_exactly(step: Step) -> Step:
        return _clip_step(step, clip, torch.float64)

    def see(step: Step) -> Step:
        return _clip_step(step, clip)

    upload_once = algorithm.upload_once
    validate = algorithm.client_validate

    def see_in_phase(phase: Phase) -> Phase:
        loss = phase.loss
        return phase if loss is None else replace(phase, loss=lambda step: loss(see(step)))

    return replace(
        algorithm,
        loss=lambda step: algorithm.loss(see(step)),
        phases=tuple(see_in_phase(phase) for phase in algorithm.phases),
        upload=lambda step: algorithm.upload(see_exactly(step)),
        upload_once=None if upload_once is None else lambda step: upload_once(see_exactly(step)),
        client_validate=None if validate is None else lambda step: validate(see(step)),
        predict=lambda step: algorithm.predict(see(step)),
    )


def _clip_step(step: Step, clip: float, dtype: torch.dtype | None = None) -> Step:
    """Return a step whose embeddings and fixed features are clipped, row by row."""
    features = step.features
    if features.dim() > 1:
        features = clip_rows(features.to(dtype or features.dtype), clip)
    fixed = dict(step.batch.fixed)
    if TEACHER in fixed:
        fixed[TEACHER] = clip_rows(fixed[TEACHER].to(dtype or fixed[TEACHER].dtype), clip)
    return step._replace(features=features, batch=step.batch._replace(fixed=fixed))


def _bound_contribution(
    algorithm: Algorithm, clip: float, layouts: Mapping[str, GroupLayout]
) -> Algorithm:
    """Return the algorithm whose clients send bounded values with weights of norm 1.

    Of a relative group the change from what the client received is sent.
    """

    def bound(upload: Upload, step: Step) -> Upload:
        bounded = {}
        for name, group in upload.items():
            if name == GRAM:
                norm = upload[CLASS_SUMS].weight.double().norm().clamp(min=1)
                sums = {"gram": group.sums["gram"].double() / norm}
                bounded[name] = Group(sums, torch.ones_like(group.weight))
                continue
            values = divide_by_weight(group)
            if layouts[name].relative:
                old = find_received_values(step.received, name, layouts[name])
                values = {tensor: values[tensor] - old[tensor] for tensor in values}
            bounded[name] = _normalise(values, group.weight, clip)
        return bounded

    upload_once = algorithm.upload_once
    return replace(
        algorithm,
        declare=lambda params, task: _declare_changes(algorithm.declare(params, task)),
        upload=lambda step: bound(algorithm.upload(step), step),
        upload_once=None if upload_once is None else lambda step: bound(upload_once(step), step),
    )


def bound_reply(upload: Upload, clip: float) -> Upload:
    """Return one client's upload with the bounds that the client should have kept itself.

    Of an upload within its bounds nothing changes but roundings. It must have no Gram matrix.
    """
    bounded = {}
    for name, group in upload.items():
        bounded[name] = _normalise(divide_by_weight(group), group.weight, clip)
    return bounded


def _declare_changes(layouts: Mapping[str, GroupLayout]) -> dict[str, GroupLayout]:
    """Return the layouts of groups whose values are changes already."""
    return {name: replace(layout, relative=False) for name, layout in layouts.items()}


def _normalise(values: Tree, weight: Tensor, clip: float) -> Group:
    """Return a group whose weights have norm 1 and whose rows are no longer than `clip`."""
    exact_weight = weight.double()
    rows = weight.dim()
    flat = [value.double().flatten(rows) for value in values.values()]
    clipped = clip_rows(torch.cat(flat, -1), clip)
    exact_weight = exact_weight / exact_weight.square().sum().clamp(min=1e-12).sqrt()
    sums = {}
    start = 0
    for (name, value), part in zip(values.items(), flat, strict=True):
        piece = clipped[..., start : start + part.shape[-1]].reshape(value.shape)
        sums[name] = align_axes(exact_weight, piece) * piece
        start += part.shape[-1]
    return Group(sums, exact_weight)


# --- noise


def _with_client_noise(algorithm: Algorithm, protection: Protection, grids: Grids) -> Algorithm:
    """Return the algorithm whose clients add noise to what they send."""

    def make_noisy(upload: Upload, step: Step) -> Upload:
        noisy = add_to_upload(upload, grids, step.key, protection.seeded)
        kept = leave_out_rare(noisy, grids, protection)
        return as_dtype(kept, step.lr.dtype)

    upload_once = algorithm.upload_once
    noisy_once = None
    if upload_once is not None:

        def noisy_once(step: Step) -> Upload:
            return make_noisy(upload_once(step), step)

    aggregate_once = algorithm.aggregate_once
    steadied_once = None
    if aggregate_once is not None:

        def steadied_once(server: State, sent_once: SentOnce) -> State:
            clients = len(sent_once.clients)
            if clients:
                groups = tell_noise(sent_once.groups, grids, clients)
                sent_once = sent_once._replace(groups=groups)
            return aggregate_once(server, sent_once)

    return replace(
        algorithm,
        upload=lambda step: make_noisy(algorithm.upload(step), step),
        upload_once=noisy_once,
        aggregate_once=steadied_once,
    )
