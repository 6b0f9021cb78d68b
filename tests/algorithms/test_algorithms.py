"""Loss, upload and aggregate of each algorithm by hand, and properties of all algorithms."""

import importlib
import inspect
import math
import re

import numpy as np
import pytest
import torch
from helpers.tiny import TRAINED, build, experiment, send, step

from fedproto.core import rng
from fedproto.core.local_training import train
from fedproto.core.tensors import flatten_state, flatten_upload, stack_uploads, sum_uploads
from fedproto.core.types import Group, Task
from fedproto.errors import ConfigError

TASK = Task(classes=2, dim=2, clients=4, seed=0)
X = torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]], dtype=torch.float64)
Y = torch.tensor([0, 1, 0])
PARAMS = {
    "body.w": torch.tensor([[1.0, 0.5], [0.0, 1.0]], dtype=torch.float64),
    "head.v": torch.tensor([[1.0, 0.0], [0.0, -1.0]], dtype=torch.float64),
}
OTHER = {name: value + 1 for name, value in PARAMS.items()}
#: By hand: the features X W are (1, 0.5), (0, 2), (1, 1.5), so the class means are (1, 1) and
#: (0, 2); the logits are
LOGITS = [[1.0, -0.5], [0.0, -2.0], [1.0, -1.5]]
CROSS_ENTROPY = (
    math.log(1 + math.exp(-1.5)) + math.log(1 + math.exp(2.0)) + math.log(1 + math.exp(-2.5))
) / 3


def start(name, **options):
    algorithm = build(name, **options)
    return algorithm, algorithm.init(PARAMS, TASK)


def client_step(algorithm, params, received, x=X, y=Y, mask=None):
    """A step of a client that keeps what it keeps before its first round, after three others."""
    now = step(params, received, x, y, mask, state=algorithm.client_init(PARAMS, TASK))
    return now._replace(lr=torch.tensor(0.5, dtype=x.dtype), steps=torch.tensor(3))


def uploads_of(algorithm, server, *clients):
    """The stacked uploads of clients given as (params, number of samples)."""
    received = send(algorithm, server, torch.ones(2))
    uploads = []
    for params, count in clients:
        uploads.append(
            algorithm.upload(client_step(algorithm, params, received, X[:count], Y[:count]))
        )
    return stack_uploads(uploads)


def prototypes(rows, known=(1.0, 1.0)):
    return {
        "prototypes": torch.tensor(rows, dtype=torch.float64),
        "known": torch.tensor(known, dtype=torch.float64),
    }


@pytest.mark.parametrize(
    "name", ["local", "fedavg", "fedper", "fedrep", "fesem", "lg-fedavg", "fedavgm", "fedadam"]
)
def test_plain_methods_minimise_the_cross_entropy(name):
    terms = build(name).loss(step(PARAMS, {}, X, Y))
    assert terms.keys() == {"supervised"}
    assert terms["supervised"].item() == pytest.approx(CROSS_ENTROPY)


def test_fedprox_adds_half_mu_times_the_squared_distance():
    """Every one of the 8 weights is 1 away from the global one: 0.3/2 * 8."""
    terms = build("fedprox", mu=0.3).loss(step(PARAMS, OTHER, X, Y))
    assert terms["supervised"].item() == pytest.approx(CROSS_ENTROPY)
    assert terms["regulariser"].item() == pytest.approx(0.3 / 2 * 8)


def test_fedprox_has_mu_0_1_unless_told_otherwise():
    received = {name: value.clone() for name, value in OTHER.items()}
    terms = [
        algorithm.loss(step(PARAMS, received, X, Y))["regulariser"].item()
        for algorithm in (build("fedprox"), build("fedprox", mu=0.1))
    ]
    assert terms == [pytest.approx(0.05 * 8), pytest.approx(0.05 * 8)]


def test_fedprox_holds_no_running_statistics():
    """Statistics have no gradient, so a large distance between them adds nothing to the term."""
    own = PARAMS | {"body.bn.running_mean": torch.zeros(2), "body.bn.running_var": torch.ones(2)}
    received = OTHER | {
        "body.bn.running_mean": torch.full((2,), 1e6),
        "body.bn.running_var": torch.full((2,), 1e6),
    }
    terms = build("fedprox", mu=0.3).loss(step(own, received, X, Y))
    assert terms["regulariser"].item() == pytest.approx(0.3 / 2 * 8)


def test_fedprox_pulls_towards_the_global_model():
    """The proximal term has a gradient, mu (w - w_g), which released code lacks."""
    params = {name: value.clone().requires_grad_() for name, value in PARAMS.items()}
    build("fedprox", mu=0.3).loss(step(params, OTHER, X, Y))["regulariser"].backward()
    assert torch.allclose(params["body.w"].grad, torch.full((2, 2), -0.3, dtype=torch.float64))


#: d(f(x), C_y) of the three samples to prototypes (0, 0) and (0, 1), on paper
BY_HAND = {
    "mse": [1.25 / 2, 1 / 2, 3.25 / 2],
    "sql2": [1.25, 1.0, 3.25],
    "l2": [1.25**0.5, 1.0, 3.25**0.5],
    "l1": [1.5, 1.0, 2.5],
    "emd": [1.5 / 2, 1 / 2, 2.5 / 2],
}


@pytest.mark.parametrize("distance", BY_HAND)
def test_fedproto_regularises_each_sample(distance):
    received = prototypes([[0.0, 0.0], [0.0, 1.0]])
    terms = build("fedproto", lam=2.0, distance=distance).loss(step(PARAMS, received, X, Y))
    assert terms["supervised"].item() == pytest.approx(CROSS_ENTROPY)
    assert terms["regulariser"].item() == pytest.approx(2 * sum(BY_HAND[distance]) / 3)


def test_fedproto_regularises_each_class_of_the_batch():
    """Eq. 8: the batch means are at squared distances 2 and 1 from (0, 0) and (0, 1)."""
    received = prototypes([[0.0, 0.0], [0.0, 1.0]])
    terms = build("fedproto", distance="sql2", regularise="class").loss(
        step(PARAMS, received, X, Y)
    )
    assert terms["regulariser"].item() == pytest.approx(2.0 + 1.0)


def test_a_class_without_samples_in_the_batch_is_not_regularised():
    """Only class 0 is in the batch; its mean (1, 0.5) is at squared distance 1.25 from (0, 0)."""
    received = prototypes([[0.0, 0.0], [9.0, 9.0]])
    algorithm = build("fedproto", distance="sql2", regularise="class")
    terms = algorithm.loss(step(PARAMS, received, X[:1], Y[:1]))
    assert terms["regulariser"].item() == pytest.approx(1.25)


@pytest.mark.parametrize("regularise", ["sample", "class"])
def test_a_class_without_global_prototype_is_not_regularised(regularise):
    received = prototypes([[9.0, 9.0], [0.0, 1.0]], known=(0.0, 1.0))
    terms = build("fedproto", distance="sql2", regularise=regularise).loss(
        step(PARAMS, received, X, Y)
    )
    assert terms["regulariser"].item() == pytest.approx({"sample": 1 / 3, "class": 1.0}[regularise])


def test_fedavg_averages_by_samples():
    """Three samples say w, one says w + 1: w + 1/4."""
    algorithm, server = start("fedavg")
    new = algorithm.aggregate(server, uploads_of(algorithm, server, (PARAMS, 3), (OTHER, 1)))
    for name, value in PARAMS.items():
        assert torch.allclose(new[name], value + 0.25)


@pytest.mark.parametrize("name", ["fedper", "fedrep"])
def test_personal_layers_stay_at_home(name):
    algorithm, server = start(name)
    uploads = uploads_of(algorithm, server, (PARAMS, 3), (OTHER, 1))
    assert uploads["model"].sums.keys() == server.keys() == {"body.w"}
    new = algorithm.aggregate(server, uploads)
    adopted = algorithm.adopt(OTHER, new)
    assert torch.allclose(adopted["body.w"], PARAMS["body.w"] + 0.25)
    assert torch.equal(adopted["head.v"], OTHER["head.v"])


def test_lg_fedavg_averages_the_head_and_leaves_the_body_at_home():
    """Three samples say w, one says w + 1: w + 1/4."""
    algorithm, server = start("lg-fedavg")
    uploads = uploads_of(algorithm, server, (PARAMS, 3), (OTHER, 1))
    assert uploads["model"].sums.keys() == server.keys() == {"head.v"}
    adopted = algorithm.adopt(OTHER, algorithm.aggregate(server, uploads))
    assert torch.equal(adopted["body.w"], OTHER["body.w"])
    assert torch.allclose(adopted["head.v"], PARAMS["head.v"] + 0.25)


def test_fedrep_trains_the_head_then_the_body():
    head, body = build("fedrep", head_epochs=3, body_epochs=2).phases
    assert [head.trains(name) for name in PARAMS] == [False, True]
    assert [body.trains(name) for name in PARAMS] == [True, False]
    assert (head.epochs, body.epochs) == (3, 2)


def test_local_says_nothing():
    algorithm, server = start("local")
    assert server == {}
    assert algorithm.upload(step(PARAMS, {}, X, Y)) == {}


#: Global prototypes of two clients with 2 + 1 and 1 + 0 samples; the class means are (1, 1),
#: (0, 2) and (10, 5).
AGGREGATES = {
    "samples": [[(2 * 1 + 10) / 3, (2 * 1 + 5) / 3], [0.0, 2.0]],
    "uniform": [[5.5, 3.0], [0.0, 2.0]],
    "eq6": [[(2 * 1 + 10) / 6, (2 * 1 + 5) / 6], [0.0, 2.0]],
}


@pytest.mark.parametrize("weighting", AGGREGATES)
def test_fedproto_averages_class_means(weighting):
    algorithm, server = start("fedproto", weighting=weighting)
    tenfold = {name: 10 * value for name, value in PARAMS.items()}
    uploads = uploads_of(algorithm, server, (PARAMS, 3), (tenfold, 1))
    new = algorithm.aggregate(server, uploads)
    assert new["prototypes"].tolist() == [pytest.approx(row) for row in AGGREGATES[weighting]]
    assert new["known"].tolist() == [1, 1]


@pytest.mark.parametrize("weighting", AGGREGATES)
def test_a_class_nobody_speaks_of_keeps_its_prototype(weighting):
    algorithm, _ = start("fedproto", weighting=weighting)
    server = prototypes([[7.0, 7.0], [8.0, 8.0]], known=(1.0, 1.0))
    new = algorithm.aggregate(server, uploads_of(algorithm, server, (PARAMS, 1)))
    assert new["prototypes"].tolist() == [[1.0, 0.5], [8.0, 8.0]]


@pytest.mark.parametrize("name", ["fedproto", "fedproto-mh"])
def test_a_client_is_sent_the_known_prototypes_of_its_own_classes_only(name):
    """Of four classes, three have a prototype and the client holds two, one of which has none."""
    server = {
        "prototypes": torch.arange(8.0).reshape(4, 2),
        "known": torch.tensor([1.0, 1.0, 0.0, 1.0]),
    }
    received = send(build(name), server, torch.tensor([0.0, 1.0, 1.0, 0.0]))
    assert received["known"].tolist() == [0, 1, 0, 0]
    assert received["prototypes"][1].tolist() == [2, 3]
    everything = send(build(name), server, torch.ones(4))
    assert everything["known"].tolist() == [1, 1, 0, 1]


def test_fedproto_predicts_by_the_nearest_known_prototype():
    received = prototypes([[1.0, 1.0], [0.0, 2.0]], known=(1.0, 1.0))
    scores = build("fedproto").predict(step(PARAMS, received, X, Y))
    assert scores["prototype"].argmax(1).tolist() == [0, 1, 0]
    assert scores["head"].tolist() == LOGITS
    only_first = build("fedproto").predict(
        step(PARAMS, received | {"known": torch.tensor([1.0, 0.0])}, X, Y)
    )
    assert only_first["prototype"].argmax(1).tolist() == [0, 0, 0]


def centres(*shifts):
    return {
        name: torch.stack([value + shift for shift in shifts]) for name, value in PARAMS.items()
    }


def test_fesem_takes_the_nearest_centre():
    algorithm = build("fesem", clusters=3)
    adopted = algorithm.adopt(
        {name: value + 4.0 for name, value in PARAMS.items()}, centres(0.0, 5.0, -1.0)
    )
    assert torch.equal(adopted["body.w"], PARAMS["body.w"] + 5.0)


def test_fesem_averages_each_cluster_by_samples_and_reports_the_empty_one():
    """w and w + 1 belong to the centre at 0, w + 9 to that at 10; nobody to that at 100."""
    algorithm, server = start("fesem", clusters=3)
    server = server | centres(0.0, 10.0, 100.0) | {"seeded": torch.tensor(1)}
    ninth = {name: value + 9 for name, value in PARAMS.items()}
    new = algorithm.aggregate(
        server, uploads_of(algorithm, server, (PARAMS, 3), (OTHER, 1), (ninth, 2))
    )
    assert torch.allclose(
        new["head.v"], torch.stack([PARAMS["head.v"] + s for s in (0.25, 9.0, 100.0)])
    )
    assert new["sizes"].tolist() == [4, 2, 0]
    assert algorithm.notes(new) == ["fesem: nobody spoke for cluster 2, which keeps its centre"]


def test_fesem_seeds_its_centres_from_the_first_uploads():
    """Two tight groups far apart: each gets one seed, and the centres are the groups' means."""
    algorithm, server = start("fesem", clusters=2)
    clients = [
        ({name: value + shift for name, value in PARAMS.items()}, 1)
        for shift in (0.0, 0.2, 50.0, 50.2)
    ]
    new = algorithm.aggregate(server, uploads_of(algorithm, server, *clients))
    shifts = (new["body.w"] - PARAMS["body.w"])[:, 0, 0]
    assert sorted(shifts.tolist()) == pytest.approx([0.1, 50.1])
    assert new["seeded"] == 1


def test_fesem_seeds_its_centres_by_weights_and_not_by_running_statistics():
    """Two groups by weights, crossed by two groups of running variances, a million apart."""
    algorithm = build("fesem", clusters=2)
    statistics = {"bn.running_var": torch.zeros(2, dtype=torch.float64)}
    server = algorithm.init(PARAMS | statistics, TASK)
    received = send(algorithm, server, torch.ones(2))
    uploads = []
    for shift, variance in ((0.0, 0.0), (0.2, 1e6), (50.0, 0.0), (50.2, 1e6)):
        params = {name: value + shift for name, value in PARAMS.items()}
        params |= {"bn.running_var": torch.full((2,), variance, dtype=torch.float64)}
        uploads.append(algorithm.upload(step(params, received, X, Y)))
    new = algorithm.aggregate(server, stack_uploads(uploads))
    shifts = (new["body.w"] - PARAMS["body.w"])[:, 0, 0]
    assert sorted(shifts.tolist()) == pytest.approx([0.1, 50.1])
    assert new["bn.running_var"].tolist() == [
        [5e5, 5e5],
        [5e5, 5e5],
    ]  # they travel with their layer all the same


def test_fesem_seeds_its_centres_by_models_whatever_their_amounts_of_data():
    """Two groups by weights, crossed by two amounts of data; each column sums to nearly 0."""
    algorithm, server = start("fesem", clusters=2)
    direction = torch.tensor([[1.0, 1.0], [-1.0, -1.0]], dtype=torch.float64)
    clients = []
    for shift, samples in ((0.0, 3), (0.2, 1), (50.0, 3), (50.2, 1)):
        params = {name: value + shift * direction for name, value in PARAMS.items()}
        clients.append((params, samples))
    new = algorithm.aggregate(server, uploads_of(algorithm, server, *clients))
    shifts = (new["body.w"] - PARAMS["body.w"])[:, 0, 0]
    assert sorted(shifts.tolist()) == pytest.approx([0.05, 50.05])
    assert new["sizes"].tolist() == [4, 4]


def test_fesem_seeds_its_centres_by_the_seed_of_the_run():
    """Twelve models at equal distances, of which k-means++ may choose any."""
    algorithm = build("fesem", clusters=3)
    found = {}
    for seed in (0, 1, 2, 3, 0, 1, 2, 3):
        server = algorithm.init(PARAMS, TASK._replace(seed=seed))
        clients = []
        for shift in range(12):
            params = {name: value + shift for name, value in PARAMS.items()}
            clients.append((params, 1))
        new = algorithm.aggregate(server, uploads_of(algorithm, server, *clients))
        centres_found = new["body.w"][:, 0, 0].tolist()
        assert found.setdefault(seed, centres_found) == centres_found
    assert len({tuple(each) for each in found.values()}) > 1


@pytest.mark.filterwarnings("ignore")  # k-means++ says that the points are equal
def test_fesem_puts_equal_models_into_one_cluster():
    algorithm, server = start("fesem", clusters=2)
    uploads = uploads_of(algorithm, server, (OTHER, 1), (OTHER, 2), (OTHER, 3))
    new = algorithm.aggregate(server, uploads)
    assert new["sizes"].tolist() == [6, 0]
    assert torch.allclose(new["body.w"][0], OTHER["body.w"])
    assert torch.equal(new["body.w"][1], PARAMS["body.w"])  # it keeps its centre


def test_fesem_seeds_its_centres_as_soon_as_there_is_an_upload_for_each():
    algorithm, server = start("fesem", clusters=2)
    new = algorithm.aggregate(server, uploads_of(algorithm, server, (PARAMS, 1), (OTHER, 1)))
    assert new["seeded"] == 1
    assert sorted(new["sizes"].tolist()) == [1, 1]


def test_fesem_needs_a_client_for_each_cluster():
    assert start("fesem", clusters=4)[1]["sizes"].tolist() == [0, 0, 0, 0]
    sentence = "^algorithm fesem's clusters is 5, but there are only 4 clients$"
    with pytest.raises(ConfigError, match=sentence):
        start("fesem", clusters=5)


def test_the_state_of_fesems_server_before_round_1():
    """Its seed is drawn from that of the run, for this purpose alone."""
    _, server = start("fesem")
    assert server["sizes"].dtype == torch.float64
    assert server["seed"] == int(rng.key(TASK.seed, "fesem")) % 2**31
    assert server["seed"] != int(rng.key(TASK.seed, "partition")) % 2**31


def test_fesem_waits_with_seeding_until_enough_clients_speak():
    algorithm, server = start("fesem", clusters=3)
    new = algorithm.aggregate(server, uploads_of(algorithm, server, (PARAMS, 3), (OTHER, 1)))
    assert torch.allclose(new["body.w"], (PARAMS["body.w"] + 0.25).expand(3, 2, 2))
    assert not new["seeded"]
    sentence = "fesem: fewer than 3 uploads, so the clusters are not seeded yet"
    assert algorithm.notes(new) == [sentence]


# --- properties of every algorithm, new ones too


def test_options_that_are_not_given_have_the_values_of_the_documentation():
    defaults = {}
    names = ("fedprox", "fesem", "fedper", "fedrep", "fedproto", "lg_fedavg", "feddistill")
    names += ("moon", "feddyn", "fednh", "fedgh", "fedtgp", "fedorgp", "protonorm", "fedre")
    names += ("fedsa",)
    for name in (*names, "fedavgm", "fedadam", "scaffold", "ditto"):
        module = importlib.import_module(f"fedproto.algorithms.{name}")
        parameters = inspect.signature(getattr(module, name)).parameters.values()
        defaults[name] = {parameter.name: parameter.default for parameter in parameters}
    assert defaults == {
        "fedprox": {"mu": 0.1},
        "fesem": {"clusters": 3},
        "fedper": {"personal": "head"},
        "fedrep": {"personal": "head", "head_epochs": 1, "body_epochs": 1},
        "fedproto": {
            "lam": 1.0,
            "distance": "mse",
            "weighting": "samples",
            "regularise": "sample",
            "collect": "after",
            "absent": "remember",
            "fixed": False,
            "contrast": 0.0,
            "tau": 0.3,
            "tau_unit": "relative",
        },
        "moon": {"mu": 1.0, "temperature": 0.5},
        "feddyn": {"mu": 0.1},
        "fednh": {"rho": 0.9, "scale": 10.0},
        "fedgh": {"server_epochs": 1, "server_lr": 0.01, "server_batch": 10},
        "fedtgp": {
            "lam": 1.0,
            "threshold": 100.0,
            "server_epochs": 100,
            "server_lr": 0.01,
            "server_batch": 10,
        },
        "fedorgp": {
            "lam": 1.0,
            "gamma": 1.0,
            "server_epochs": 1,
            "server_lr": 0.01,
            "server_batch": 10,
        },
        "protonorm": {
            "lam": 1.0,
            "scale": 10.0,
            "server_steps": 500,
            "server_lr": 0.1,
            "server_momentum": 0.9,
        },
        "fedsa": {"lam": 1.0, "contrast": 1.0, "calibration": 1.0, "rho": 0.9999},
        "fedre": {"server_epochs": 1, "server_lr": 0.01, "server_batch": 10},
        "scaffold": {"server_lr": 1.0},
        "ditto": {"lam": 1.0},
        "lg_fedavg": {"personal": "body"},
        "feddistill": {"gamma": 1.0, "distil": "mse"},
        "fedavgm": {"server_lr": 1.0, "server_momentum": 0.9},
        "fedadam": {"server_lr": 0.01, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3},
    }


@pytest.mark.parametrize("name", ["fedper", "fedrep", "lg-fedavg"])
def test_a_personal_layer_that_the_model_lacks_is_refused(name):
    sentence = "personal layer 'tail' is not in the model, whose layers are ['body', 'head']"
    with pytest.raises(ConfigError, match=f"^{re.escape(sentence)}$"):
        start(name, personal="head,tail")
    deep = {"body.conv.w": PARAMS["body.w"]}
    with pytest.raises(ConfigError, match=r"whose layers are \['body\.conv'\]$"):
        build(name, personal="tail").init(deep, TASK)


@pytest.mark.parametrize("name", TRAINED)
def test_an_algorithm_has_the_name_by_which_it_is_chosen(name):
    assert build(name).name == name


def first_step(name, extra=0, **options):
    """A step of the tiny model with what the server would have sent after one round."""
    algorithm, server = start(name, **options)
    if server:
        server = algorithm.aggregate(server, uploads_of(algorithm, server, *[(OTHER, 3)] * 3))
    received = send(algorithm, server, torch.ones(2))
    x = torch.cat([X, torch.full((extra, 2), 7.0, dtype=X.dtype)])
    y = torch.cat([Y, torch.ones(extra, dtype=torch.int64)])
    return algorithm, received, x, y


@pytest.mark.parametrize("name", TRAINED)
def test_the_gradient_of_the_loss_is_its_finite_difference(name):
    algorithm, received, x, y = first_step(name)

    def loss(w, v):
        params = {"body.w": w, "head.v": v}
        return sum(algorithm.loss(client_step(algorithm, params, received, x, y)).values())

    leaves = tuple((value + 0.1).requires_grad_() for value in PARAMS.values())
    assert torch.autograd.gradcheck(loss, leaves)


@pytest.mark.parametrize("regularise", ["sample", "class"])
@pytest.mark.parametrize("distance", [*BY_HAND, "cosine"])
def test_the_gradient_of_every_fedproto_loss_is_its_finite_difference(distance, regularise):
    algorithm, received, x, y = first_step("fedproto", distance=distance, regularise=regularise)

    def loss(w):
        return sum(algorithm.loss(step(PARAMS | {"body.w": w}, received, x, y)).values())

    assert torch.autograd.gradcheck(loss, ((PARAMS["body.w"] + 0.1).requires_grad_(),))


@pytest.mark.parametrize(
    ("name", "options"),
    [(name, {}) for name in TRAINED] + [("fedproto", {"regularise": "class"})],
)
def test_padding_changes_no_loss_no_upload(name, options):
    algorithm, received, x, y = first_step(name, extra=2, **options)
    mask = torch.tensor([1.0, 1, 1, 0, 0], dtype=x.dtype)
    plain = client_step(algorithm, PARAMS, received)
    padded = client_step(algorithm, PARAMS, received, x, y, mask)
    for key, value in algorithm.loss(plain).items():
        assert torch.allclose(algorithm.loss(padded)[key], value)
    ours = flatten_upload(algorithm.upload(padded))
    theirs = flatten_upload(algorithm.upload(plain))
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(ours[key].double(), theirs[key].double()) for key in ours)


@pytest.mark.parametrize("name", TRAINED)
def test_an_additive_server_needs_only_the_sum(name):
    algorithm, server = start(name, **({"absent": "drop"} if name.startswith("fedproto") else {}))
    if not algorithm.additive or not server:
        # Some learn from single uploads, and the last has no server.
        assert name in ("fesem", "fedgh", "fedre", "fedtgp", "fedorgp", "local")
        return
    uploads = uploads_of(algorithm, server, (PARAMS, 3), (OTHER, 1), (PARAMS, 2))
    one_by_one, at_once = (
        algorithm.aggregate(server, uploads),
        algorithm.aggregate(server, sum_uploads(uploads)),
    )
    one_by_one, at_once = flatten_state(one_by_one), flatten_state(at_once)
    assert all(torch.allclose(one_by_one[key], at_once[key]) for key in one_by_one)


@pytest.mark.parametrize("name", TRAINED)
def test_what_is_uploaded_is_what_is_shared(name):
    run = experiment(name)
    member = run.federation.members[0]
    received = run.algorithm.send(run.progress.server, run.federation.recipient(0))
    upload = train(
        member, run.algorithm, run.engine.states[0][0], received, run.engine.trainings[0], 1
    ).upload
    weights = {key for group in upload.values() for key in group.sums if key in member.initial}
    if name in ("fedgh", "fedre"):  # the server makes the head out of what it is told
        assert set(received) == {key for key in member.initial if run.algorithm.shared(key)}
        assert not weights
        return
    assert weights == {key for key in member.initial if run.algorithm.shared(key)}


@pytest.mark.parametrize(
    ("name", "options"),
    [(name, {}) for name in TRAINED]
    + [
        ("fedproto", {"distance": distance, "regularise": "class"})
        for distance in [*BY_HAND, "cosine"]
    ],
)
def test_a_stack_of_clients_computes_what_each_computes_alone(name, options):
    """All client-side functions work under vmap, with gradients: stacks of clients need that."""
    algorithm, received, x, y = first_step(name, **options)
    clients = [PARAMS, OTHER, {key: value - 0.5 for key, value in PARAMS.items()}]
    stacked = {key: torch.stack([params[key] for params in clients]) for key in PARAMS}

    def outputs(params):
        now = client_step(algorithm, algorithm.adopt(params, received), received, x, y)

        def loss(params):
            return sum(algorithm.loss(client_step(algorithm, params, received, x, y)).values())

        gradient = torch.func.grad(loss)(params)
        results = algorithm.loss(now), algorithm.upload(now), algorithm.predict(now)
        return *results, algorithm.client_update(now), gradient

    together = torch.vmap(outputs)(stacked)
    alone = [outputs(params) for params in clients]
    flat, spec = torch.utils._pytree.tree_flatten(together)
    for position, tensors in enumerate(
        zip(*(torch.utils._pytree.tree_flatten(one)[0] for one in alone), strict=True)
    ):
        assert torch.allclose(flat[position].double(), torch.stack(tensors).double()), spec


def test_the_mean_over_clients_is_numpys():
    """Eq. 6 without its extra division, over 5 clients and 4 classes, against a loop in numpy."""
    rng = np.random.default_rng(0)
    counts, means = rng.integers(0, 4, (5, 4)), rng.normal(size=(5, 4, 3))
    counts[:, 3] = 0
    sums = torch.from_numpy(counts[:, :, None] * means)
    algorithm = build("fedproto", absent="drop")
    server = {
        "prototypes": torch.full((4, 3), 9.0, dtype=torch.float64),
        "known": torch.zeros(4, dtype=torch.float64),
    }
    new = algorithm.aggregate(
        server, {"prototypes": Group({"prototypes": sums}, torch.from_numpy(counts).double())}
    )
    for label in range(3):
        expected = np.average(means[:, label], axis=0, weights=counts[:, label])
        np.testing.assert_allclose(new["prototypes"][label], expected)
    assert new["prototypes"][3].tolist() == [9, 9, 9]
    assert new["known"].tolist() == [1, 1, 1, 0]
