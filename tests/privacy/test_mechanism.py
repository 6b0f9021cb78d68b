"""Uploads with clipping and noise: bounds, shares of the budget, and an attack on the promise."""

import math

import pytest
import torch
from helpers.canaries import lower_bound
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import vmap

from fedproto.config import plugins
from fedproto.config.options import Part
from fedproto.core.closed_form import CLASS_SUMS, GRAM, TEACHER
from fedproto.core.tensors import flatten_upload
from fedproto.core.types import Batch, GroupLayout, Step, Task
from fedproto.errors import ConfigError
from fedproto.privacy.accounting import Release, compute_epsilon
from fedproto.privacy.bounds import bound_clients, bound_records, fit_grids
from fedproto.privacy.mechanism import fit_upload, protect
from fedproto.privacy.noisy_uploads import Protection

CLASSES = 3
WIDTH = 4
TASK = Task(CLASSES, WIDTH, clients=2, seed=0, fixed=WIDTH)
PARAMS = {"head.weight": torch.zeros(CLASSES, WIDTH)}


def build(name, protection, **options):
    algorithm = plugins.build("algorithm", Part(name, options))
    return protect(algorithm, protection, algorithm.declare(PARAMS, TASK))


def record_step(algorithm, rows, labels, key=0):
    """The closing step of a client whose embeddings and fixed features are these rows."""
    batch = Batch(torch.empty(0), labels, torch.ones(len(labels)), {TEACHER: rows})
    received = {
        "known": torch.zeros(CLASSES),
        TEACHER: {"known": torch.zeros(CLASSES)},
    }
    logits = torch.zeros(len(labels), CLASSES)
    return Step(PARAMS, rows, logits, batch, received, key=torch.as_tensor(key))


def send(algorithm, rows, labels, key=0):
    step = record_step(algorithm, rows, labels, key)
    upload = algorithm.upload(step)
    if algorithm.upload_once is not None:
        upload = upload | algorithm.upload_once(step)
    return upload


ROWS = st.lists(
    st.tuples(
        st.lists(st.floats(width=32), min_size=WIDTH, max_size=WIDTH),
        st.integers(0, CLASSES - 1),
    ),
    min_size=1,
    max_size=8,
)


@pytest.mark.parametrize("name", ["fedproto", "closed-form"])
@given(rows=ROWS, clip=st.sampled_from([0.5, 1.0, 7.0]))
@settings(max_examples=60, deadline=None)
def test_one_record_moves_an_upload_by_no_more_than_its_bounds(name, rows, clip):
    algorithm = build(name, Protection("record", 0.0, clip))
    features = torch.tensor([row for row, _ in rows], dtype=torch.float32)
    labels = torch.tensor([label for _, label in rows])
    with_record = send(algorithm, features, labels)
    without = send(algorithm, features[:-1], labels[:-1])
    layouts = plugins.build("algorithm", Part(name, {})).declare(PARAMS, TASK)
    for part in bound_records(layouts, clip):
        moved = 0.0
        for tensor in part.tensors:
            now = with_record[part.group].sums[tensor]
            moved += float((now - without[part.group].sums[tensor]).square().sum())
        if not part.tensors:
            moved = float(
                (with_record[part.group].weight - without[part.group].weight).square().sum()
            )
        assert math.sqrt(moved) <= part.bound * (1 + 1e-12)


@pytest.mark.parametrize("name, options", [("fedavg", {}), ("fedproto", {}), ("closed-form", {})])
@given(rows=ROWS)
@settings(max_examples=40, deadline=None)
def test_one_client_sends_no_more_than_its_bounds(name, options, rows):
    algorithm = build(name, Protection("client", 0.0, 0.8, at="server"), **options)
    features = torch.tensor([row for row, _ in rows], dtype=torch.float32)
    labels = torch.tensor([label for _, label in rows])
    step = record_step(algorithm, features, labels)
    if name == "fedavg":
        changed = {"head.weight": features[:CLASSES].new_full((CLASSES, WIDTH), 3.0) * 1e6}
        changed["head.weight"][0] = features[0]
        step = step._replace(params=changed, received=dict(PARAMS))
    upload = algorithm.upload(step)
    if algorithm.upload_once is not None:
        upload |= algorithm.upload_once(step)
    layouts = plugins.build("algorithm", Part(name, options)).declare(PARAMS, TASK)
    for part in bound_clients(layouts, 0.8):
        group = upload[part.group]
        tensors = [group.sums[name] for name in part.tensors] or [group.weight]
        length = torch.cat([value.flatten() for value in tensors]).norm()
        assert float(length) <= part.bound * (1 + 1e-9)


@pytest.mark.parametrize("name", ["fedproto", "closed-form", "fedre"])
def test_shares_of_a_release_add_up_to_its_noise(name):
    layouts = plugins.build("algorithm", Part(name, {})).declare(PARAMS, TASK)
    parts = bound_records(layouts, 2.0)
    grids = fit_grids(parts, layouts, noise=3.0)
    lost = 0.0
    for part in parts:
        lost += (part.bound / grids[part.group][part.tensors].deviation) ** 2
    assert lost <= 1 / 3.0**2  # the rounding to a grid is paid for
    assert lost == pytest.approx(1 / 3.0**2, rel=1e-4)


def test_the_rounding_of_a_secure_sum_is_paid_for():
    layouts = {"model": GroupLayout({"w": (10_000,)})}
    parts = bound_clients(layouts, 1.0)
    plain = fit_grids(parts, layouts, noise=2.0)["model"]
    rounded = fit_grids(parts, layouts, noise=2.0, rounding=1e-3)["model"]
    # A vector no longer than 1 whose 10,000 values move by 1e-3 each is no longer than 1.1.
    (one,), (other,) = plain.values(), rounded.values()
    assert other.deviation / one.deviation == pytest.approx(1.1, rel=1e-3)


def test_groups_of_a_round_and_those_sent_once_are_two_releases():
    algorithm = plugins.build("algorithm", Part("fedproto", {}))
    from fedproto.core.closed_form import with_teacher

    taught = with_teacher(algorithm, plugins.build("teacher", Part("lda", {})))
    layouts = taught.declare(PARAMS, TASK)
    protection = Protection("record", 2.0, 1.0)
    grids = fit_upload(taught, protection, layouts)
    alone = fit_upload(algorithm, protection, algorithm.declare(PARAMS, TASK))
    assert grids["prototypes"] == alone["prototypes"]
    assert set(grids) == {"prototypes", CLASS_SUMS, GRAM}


def test_a_class_below_the_threshold_has_no_weight():
    protection = Protection("record", 1e-3, 1.0, threshold=2.0, seeded=True)
    algorithm = build("fedproto", protection)
    rows = torch.ones(9, WIDTH)
    labels = torch.tensor([0] * 8 + [1])
    group = send(algorithm, rows, labels)["prototypes"]
    assert group.weight[0] == pytest.approx(8, abs=0.1)
    assert group.weight[1] == pytest.approx(1, abs=0.1) or group.weight[1] == 0
    assert group.weight[2] == 0 and not group.sums["prototypes"][2].any()
    loud = build("fedproto", Protection("record", 1e3, 1.0, threshold=50.0, seeded=True))
    assert not send(loud, rows, labels)["prototypes"].weight.any()


def test_without_clipping_and_noise_the_algorithm_is_the_same_value():
    algorithm = plugins.build("algorithm", Part("fedproto", {}))
    layouts = algorithm.declare(PARAMS, TASK)
    assert protect(algorithm, Protection("record", 0.0, None), layouts) is algorithm


def test_groups_that_are_not_sums_over_records_are_refused():
    with pytest.raises(ConfigError, match="model of an upload is not a sum over records"):
        bound_records({"model": GroupLayout({"w": (2,)})}, 1.0)
    counted = {"prototypes": GroupLayout({"w": (2,)}, "class", 3, ("holders",))}
    with pytest.raises(ConfigError, match="further counts"):
        bound_clients(counted, 1.0)


# --- an attack


@pytest.mark.parametrize(
    "name, noise", [("fedproto", 4.0), ("fedproto", 1.0), ("closed-form", 1.5)]
)
def test_an_attack_with_a_canary_proves_some_epsilon_but_never_more_than_promised(
    name, noise, repeatable_entropy
):
    """The canary is a row that is clipped, and the attacker knows all other rows."""
    delta = 1e-5
    trials = 6000
    protection = Protection("record", noise, 1.0, threshold=0.0)
    algorithm = plugins.build("algorithm", Part(name, {}))
    layouts = algorithm.declare(PARAMS, TASK)
    grids = fit_upload(algorithm, protection, layouts)
    protected = protect(algorithm, protection, layouts)
    canary = torch.tensor([[5.0, 0.0, 0.0, 0.0]])
    others = torch.tensor([[0.0, 0.3, 0.4, 0.0]]).repeat(4, 1)
    rows = torch.cat([others, canary])
    labels = torch.tensor([0, 0, 0, 0, 0])

    def scores(rows, labels):
        uploads = vmap(lambda key: send(protected, rows, labels, key))(torch.arange(trials))
        score = torch.zeros(trials, dtype=torch.float64)
        clean = Protection("record", 0.0, 1.0)
        quiet = protect(algorithm, clean, layouts)
        flat_with = flatten_upload(send(quiet, torch.cat([others, canary]), torch.zeros(5).long()))
        flat_without = flatten_upload(send(quiet, others, torch.zeros(4).long()))
        for group, parts in grids.items():
            for tensors, grid in parts.items():
                names = [f"{group}/sums/{tensor}" for tensor in tensors] or [f"{group}/weight"]
                for each in names:  # the log-likelihood ratio of two Gaussians
                    change = flat_with[each].double() - flat_without[each].double()
                    values = flatten_upload(uploads)[each].double()
                    score += (values * change).flatten(1).sum(1) / grid.deviation**2
        return score

    promised = compute_epsilon([Release(noise)], delta)
    proved = lower_bound(scores(rows, labels), scores(rows[:-1], labels[:-1]), delta)
    assert promised / 10 < proved <= promised


# --- noisy matrices


def test_a_noisy_matrix_can_be_solved_and_a_clean_one_is_left_alone():
    from fedproto.core.closed_form import Sums, steady

    matrix = torch.diag(torch.tensor([4.0, -3.0], dtype=torch.float64))
    added = torch.tensor(-1.0, dtype=torch.float64)
    assert steady(matrix, added, 0.0)[0] is matrix
    steadied, more = steady(matrix, added, 2.0)
    torch.testing.assert_close(steadied, torch.diag(torch.tensor([4.0, 0.0]).double()))
    assert more == 1.0
    noise = -5 * torch.eye(2, dtype=torch.float64)  # the whole matrix drowned in noise
    sums = Sums(torch.eye(2).double(), torch.full((2,), 3.0).double(), noise, noise=4.0)
    for name in ("lda", "ridge"):
        solution = plugins.build("teacher", Part(name, {})).solve(sums)
        assert solution.vectors.isfinite().all()
