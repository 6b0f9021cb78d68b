"""A trained client as a classifier: against scikit-learn, and against the run's own result."""

import json
import math
import pickle
import re
import shutil
from functools import cache

import numpy as np
import pytest
import torch
from helpers.inference_runs import DIGITS, MIXED
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import cross_val_score
from sklearn.neighbors import NearestCentroid
from sklearn.utils.estimator_checks import parametrize_with_checks

import fedproto
from fedproto import Classifier
from fedproto.config import plugins
from fedproto.config.options import Part
from fedproto.data import DataFolders
from fedproto.data.shared.preprocessing import Preprocessing
from fedproto.errors import ConfigError, DataError, FedProtoError, RunFolderError
from fedproto.inference.calibration import can_reject, compute_threshold, count_rows_needed
from fedproto.inference.open_set import measure_rejections
from fedproto.inference.trained_client import load_client
from fedproto.membership.membership import Membership
from fedproto.runs.folder import RunFolder

RUNS = {
    "fedproto": DIGITS,
    "a stack": DIGITS | {"engine": "vectorised"},
    "in 64 bits": DIGITS | {"precision": "float64"},
    "mixed": DIGITS | MIXED,
    "fedavg": DIGITS | {"algorithm": "fedavg"},
    "fedrep": DIGITS | {"algorithm": "fedrep"},
    "fesem": DIGITS | {"algorithm": "fesem", "clusters": 2},
    # A head that the server makes: of prototypes, or by training on them.
    "fednh": DIGITS | {"algorithm": "fednh"},
    "fedgh": DIGITS | {"algorithm": "fedgh"},
    "fedtgp": DIGITS | {"algorithm": "fedtgp", "server_epochs": 5},
}
WAYS = [(by, among) for by in ("prototype", "head", "both") for among in ("all", "own")]


@pytest.fixture(scope="module")
def run_of(tmp_path_factory):
    """A run folder by its name above; each is run once."""

    @cache
    def make(name):
        folder = tmp_path_factory.mktemp("runs") / name.replace(" ", "-")
        fedproto.run(**RUNS[name], out=folder)
        return folder

    return make


@pytest.fixture(scope="module")
def run(run_of):
    return run_of("fedproto")


@pytest.fixture(scope="module")
def trained():
    """A run's client; opening a run folder takes longer than classifying a thousand images."""
    return cache(load_client)


@cache
def source(name):
    return plugins.build("dataset", Part(name), DataFolders())


def result_of(run):
    return json.loads((run / "result.json").read_text())


def own_tests(run, client):
    """The client's own test images as files would hold them, and their names."""
    portion = json.loads((run / "partition.json").read_text())["clients"][client]
    test = source(portion["dataset"])
    rows = np.array(portion["test"])
    return test.test.x[rows], np.array(test.classes)[test.test.y[rows]]


def images(classes, count=10**6, split="test"):
    """Digits of some classes, and their names."""
    part, names = getattr(source("digits"), split), np.array(source("digits").classes)
    rows = np.concatenate([np.flatnonzero(names[part.y] == name)[:count] for name in classes])
    return part.x[rows], names[part.y[rows]]


# --- without a member: the nearest class mean


@parametrize_with_checks([Classifier()])
def test_scikit_learn_estimator_checks_pass(estimator, check):
    check(estimator)


CORNERS = np.array(
    [[0.0, 0.0], [2.0, 0.0], [10.0, 0.0], [10.0, 4.0]]
)  # means of two: (1, 0) and (10, 2)


def test_nearest_class_mean_by_hand():
    fitted = Classifier().fit(CORNERS, ["a", "a", "b", "b"])
    assert fitted.prototypes_.tolist() == [[1, 0], [10, 2]]
    assert fitted.classes_.tolist() == ["a", "b"]
    assert fitted.predict([[1, 3], [6, 1], [10, 100]]).tolist() == ["a", "b", "b"]
    far = math.sqrt(81 + 1)
    assert np.allclose(fitted.distances([[1, 3]]), [[3, far]], rtol=1e-12)
    assert np.allclose(fitted.novelty([[1, 3]]), [3], rtol=1e-12)
    assert np.allclose(
        fitted.predict_proba([[1, 3]])[0, 0], 1 / (1 + math.exp(3 - far)), rtol=1e-12
    )
    # Without itself, each mean is the other sample: 2 apart for the first class, 4 for the second.
    assert sorted(fitted.calibration_.tolist()) == [2, 2, 4, 4]
    limits = {0: math.inf, 0.2: 4, 0.4: 4, 0.5: 4, 0.6: 2, 0.8: 2}
    assert {reject: fitted.set_params(reject=reject).threshold_ for reject in limits} == limits
    assert fitted.set_params(reject=0.6).predict([[1, 1.9], [1, 2.1], [10, 2]]).tolist() == [
        "a",
        "none of these",
        "b",
    ]


@pytest.mark.parametrize("seed", range(10))
def test_scikit_learns_nearest_centroid_agrees(seed):
    generator = np.random.default_rng(seed)
    classes, width = int(generator.integers(2, 8)), int(generator.integers(1, 6))
    x, y = generator.normal(size=(60, width)), generator.integers(0, classes, 60)
    ours, theirs, strange = (
        Classifier().fit(x, y),
        NearestCentroid().fit(x, y),
        generator.normal(size=(200, width)) * 3,
    )
    assert (ours.classes_ == theirs.classes_).all()
    assert np.allclose(ours.prototypes_, theirs.centroids_, atol=1e-12)
    assert (ours.predict(strange) == theirs.predict(strange)).all()


@given(st.integers(0, 2**32 - 1), st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_each_sample_is_calibrated_by_the_mean_of_the_others_of_its_class(seed, sizes):
    """The distance to the mean of the others is n/(n − 1) times that to the mean of all."""
    y = np.repeat(np.arange(len(sizes)), sizes)
    x = np.random.default_rng(seed).normal(size=(len(y), 3))
    expected = []
    for place, (sample, label) in enumerate(zip(x, y, strict=True)):
        others = [x[(y == each) & (np.arange(len(y)) != place)] for each in range(len(sizes))]
        if len(others[label]):  # of a class of one there is nothing to compare with
            expected.append(
                min(np.linalg.norm(sample - rows.mean(0)) for rows in others if len(rows))
            )
    assert np.allclose(Classifier().fit(x, y).calibration_, expected, atol=1e-12)


# --- the threshold


@pytest.mark.parametrize(
    ("held_out", "reject", "expected"),
    [
        (range(1, 20), 0.05, 19),  # the ⌈20 · 0.95⌉ = 19th of 19
        (range(1, 19), 0.05, math.inf),  # one fewer is too few for a twentieth
        (range(1, 100), 0.05, 95),
        (range(1, 101), 0.05, 96),
        (range(1, 11), 0.1, 10),
        (range(1, 11), 0.09, math.inf),
        (range(1, 11), 0.5, 6),
        ([3, 1, 2], 0.25, 3),
        ([3, 1, 2], 0.5, 2),
        ([3, 1, 2], 0.75, 1),
        ([7], 0.5, 7),
        ([7], 0.49, math.inf),
        (range(1, 11), 0, math.inf),
        ([], 0.5, math.inf),
    ],
)
def test_conformal_quantiles_by_hand(held_out, reject, expected):
    shuffled = np.random.default_rng(0).permutation(np.array(list(held_out), float))
    assert compute_threshold(shuffled, reject) == expected


CALIBRATIONS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40).map(np.array)
SHARES = st.floats(0, 1) | st.sampled_from([0, 0.05, 0.1, 0.2, 0.25, 0.5, 0.9, 1])


@given(CALIBRATIONS, SHARES)
def test_at_most_the_fraction_of_the_calibration_lies_above(calibration, reject):
    assert (calibration > compute_threshold(calibration, reject)).mean() <= reject + 1e-9


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=30).map(np.array), SHARES)
def test_future_inputs_are_rejected_no_more_often_than_asked(everything, reject):
    """The exact guarantee: each of n + 1 values is equally likely to be the future one."""
    places = range(len(everything))
    above = [
        everything[place] > compute_threshold(np.delete(everything, place), reject)
        for place in places
    ]
    assert np.mean(above) <= reject + 1e-9


@given(CALIBRATIONS, SHARES, SHARES)
def test_a_larger_fraction_rejects_no_less(calibration, one, other):
    assert compute_threshold(calibration, max(one, other)) <= compute_threshold(
        calibration, min(one, other)
    )


# --- a run's own clients


@pytest.mark.parametrize("name", RUNS)
def test_accuracies_equal_those_of_the_run(name, run_of, trained):
    run = run_of(name)
    for client, stated in enumerate(result_of(run)["clients"]):
        x, y = own_tests(run, client)
        for key, accuracy in stated["accuracy"].items():
            by, _, own = key.partition("_")
            classifier = Classifier.from_trained(trained(run, client), by=by, among=own or "all")
            assert classifier.score(x, y) == accuracy, (client, key)


def test_the_accuracies_of_the_clients_differ(run):
    """Otherwise the test above would show little."""
    for key in ("head", "prototype"):
        pairs = [
            (c["accuracy"][key], c["accuracy"][f"{key}_own"]) for c in result_of(run)["clients"]
        ]
        assert any(everything < own for everything, own in pairs)
    assert len({c["accuracy"]["prototype"] for c in result_of(run)["clients"]}) > 2


def test_distances_equal_those_computed_with_numpy(run, trained):
    state = load_file(next((run / "checkpoint").iterdir()))
    shared = load_file(run / "prototypes.safetensors")
    x, _ = own_tests(run, 1)
    h = (x.reshape(len(x), 64) / 16 - 0.3053) / 0.3760
    for layer in ("fc1", "fc2"):
        weight, bias = (
            state[f"client.1.body.{layer}.{part}"].double().numpy() for part in ("weight", "bias")
        )
        h = np.maximum(h @ weight.T + bias, 0)
    known = shared["known"].numpy() > 0
    apart = np.linalg.norm(h[:, None] - shared["prototypes"].double().numpy()[known][None], axis=2)
    classifier = Classifier.from_trained(trained(run, 1))
    assert np.allclose(classifier.distances(x), apart, atol=1e-4)
    shares = np.exp(-apart) / np.exp(-apart).sum(1, keepdims=True)
    assert np.allclose(classifier.predict_proba(x), shares, atol=1e-4)
    assert (classifier.classes_ == np.array(source("digits").classes)[known]).all()


@pytest.mark.parametrize(("by", "among"), WAYS)
def test_classes_probabilities_and_labels_agree(by, among, run, trained):
    classifier = Classifier.from_trained(trained(run, 0), by=by, among=among)
    stated = result_of(run)
    held = {name for client in stated["clients"] for name in client["classes"]}
    wanted = {
        "all": set(stated["classes"]) if by == "head" else held,
        "own": stated["clients"][0]["classes"],
    }
    assert set(classifier.classes_) == set(wanted[among]) and len(classifier.classes_) == len(
        wanted[among]
    )
    x, _ = images("0123456789", 20)
    shares = classifier.predict_proba(x)
    assert shares.shape == (200, len(classifier.classes_)) and np.allclose(shares.sum(1), 1)
    assert (classifier.classes_[shares.argmax(1)] == classifier.predict(x)).all()
    if by != "prototype":
        assert np.allclose(classifier.novelty(x), 1 - shares.max(1), atol=1e-6)
        with pytest.raises(ConfigError, match=f"by='{by}' there are no distances"):
            classifier.distances(x)
    else:
        assert (classifier.novelty(x) == classifier.distances(x).min(1)).all()


def test_one_image_is_classified_as_in_a_batch(run, trained):
    classifier = Classifier.from_trained(trained(run, 0))
    x, _ = images("0123456789", 150)  # more than are looked at in one go
    assert len(x) > 300
    alone = np.concatenate(
        [classifier.distances(x[place : place + 1]) for place in range(0, len(x), 50)]
    )
    assert np.allclose(classifier.distances(x)[::50], alone, atol=1e-5)


@pytest.mark.parametrize("name", ["fedavg", "fedrep", "fesem"])
def test_a_method_without_prototypes_classifies_by_head_only(name, run_of, trained):
    member = trained(run_of(name), 0)
    assert Classifier.from_trained(member).by == "head"
    with pytest.raises(ConfigError, match=f"{name} has no prototypes: classify by head"):
        Classifier.from_trained(member, by="prototype")
    x, y = images("0123", 5)
    fitted = Classifier(member).fit(x, y)  # prototypes can be made of anything that embeds
    assert fitted.predict(x).shape == (20,) and fitted.classes_.tolist() == list("0123")


@pytest.mark.parametrize("client", [4, -1, 99])
def test_an_unknown_client_is_refused(client, run):
    with pytest.raises(ConfigError, match=f"no client {client} in .*: there are clients 0 to 3"):
        Classifier.of(run, client)
    with pytest.raises(ConfigError, match=f"no client {client} in .*: there are clients 0 to 3"):
        measure_rejections(run, 0.05, [client])


def test_a_run_without_checkpoints_keeps_no_models(tmp_path):
    fedproto.run(**DIGITS | {"rounds": 1}, checkpoint_every=0, out=tmp_path / "run")
    with pytest.raises(
        RunFolderError, match="keeps no models, because it was run with checkpoint_every=0"
    ):
        Classifier.of(tmp_path / "run")
    with pytest.raises(
        RunFolderError, match="keeps no models, because it was run with checkpoint_every=0"
    ):
        measure_rejections(tmp_path / "run", 0.05)


@pytest.mark.parametrize("options", [{"by": "colour"}, {"among": "some"}])
def test_unknown_ways_to_classify_are_refused(options, run, trained):
    with pytest.raises(ConfigError, match=r"by is prototype, .* and among is all or own, not"):
        Classifier.from_trained(trained(run, 0), **options)


def test_own_classes_of_which_no_prototype_is_left(run, tmp_path):
    """Client 3's classes go with all who have one of them; its head still knows them."""
    folder = RunFolder.open(shutil.copytree(run, tmp_path / "run"))
    own = set(result_of(run)["clients"][3]["classes"])
    bank = Membership.of(folder)
    for name in [name for name in bank.members if own & set(bank.held_by(name))]:
        bank = bank.without(name)
    bank.save(folder)
    x, _ = images("0123456789", 2)
    assert not own & set(Classifier.of(folder.path, 3).predict(x))
    assert set(Classifier.of(folder.path, 3, by="head", among="own").predict(x)) <= own
    with pytest.raises(FedProtoError):
        Classifier.of(folder.path, 3, among="own").predict(x)


# --- inputs


def test_rows_may_have_any_usual_shape(run, trained):
    classifier = Classifier.from_trained(trained(run, 0))
    x, _ = images("0123456789", 3)
    expected = classifier.distances(x)
    forms = [x[:, None], x[..., None], x.reshape(len(x), -1), x.tolist(), torch.from_numpy(x)]
    forms += [x.astype(kind) for kind in ("int64", "float32", "float64", "float16")]
    for form in forms:
        assert (classifier.distances(form) == expected).all()


def test_channels_may_come_last():
    preprocessing = Preprocessing((3, 4, 5), (0.1, 0.2, 0.3), (1.0, 2.0, 4.0), 255.0)
    x = np.random.default_rng(0).integers(0, 256, (6, 3, 4, 5), np.uint8)
    expected = (x / 255 - np.reshape([0.1, 0.2, 0.3], (3, 1, 1))) / np.reshape([1, 2, 4], (3, 1, 1))
    assert np.allclose(preprocessing(x), expected, atol=1e-6)
    assert np.allclose(preprocessing(np.moveaxis(x, 1, -1)), expected, atol=1e-6)
    assert np.allclose(preprocessing(x.reshape(6, 60)), expected, atol=1e-6)


def test_a_run_preprocesses_inputs_like_its_classifier():
    for name in ("digits", "mnist5k"):
        each = source(name)
        rows = np.arange(0, len(each.test.y), 7)
        shape = tuple(each.tensor(each.test, rows).shape[1:])
        preprocessing = Preprocessing(shape, each.mean, each.std, each.scale)
        assert torch.equal(preprocessing(each.test.x[rows]), each.tensor(each.test, rows))


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.zeros((2, 7, 8)), r"inputs of shape \(7, 8\) were given, but \(1, 8, 8\) is needed"),
        (np.zeros((2, 3, 8, 8)), r"inputs of shape \(3, 8, 8\) were given"),
        (np.zeros((2, 8, 8, 3)), r"inputs of shape \(8, 8, 3\) were given"),
        (np.zeros((2, 63)), r"inputs of shape \(63,\) were given"),
        (np.zeros(63), "one row per sample"),
        (np.zeros(64), r"a single input of shape \(64,\) .* pass x\[None\] instead of x"),
        (np.zeros((8, 8)), r"a single input of shape \(8, 8\) was given"),
        (np.zeros((1, 8, 8, 1))[0], r"a single input of shape \(8, 8, 1\) was given"),
        (np.array([["a"] * 64]), "inputs must be numbers"),
        (np.array([[None] * 64]), "inputs must be numbers"),
        (np.full((1, 8, 8), np.nan), "not a finite number"),
        (np.full((1, 8, 8), np.inf), "not a finite number"),
        (np.full((1, 8, 8), 1e300), "not a finite number"),  # in float32, which models are given
        (
            np.full((1, 8, 8), 0.5),
            "are at most 1 in size, but values from 0 to 16 are needed: multiply by 16",
        ),
        (np.full((1, 8, 8), 1.0), "at most 1 in size"),
    ],
)
def test_inputs_that_no_client_takes_are_refused(x, message, run, trained):
    classifier = Classifier.from_trained(trained(run, 0))
    for refuse in (
        classifier.predict,
        classifier.predict_proba,
        lambda x: classifier.fit(x, ["a"] * len(x)),
    ):
        with pytest.raises(DataError, match=message):
            refuse(x)


# --- fit with a member's embedding


def test_fit_on_new_classes(run, trained):
    """Three digits that the client has never seen, from ten images each, and no gradient."""
    member = trained(run, 0)
    unseen = [name for name in "0123456789" if name not in member.own][:3]
    x, y = images(unseen, 10, "train")
    before = Classifier.from_trained(member).distances(x)
    fitted = Classifier(member).fit(x, np.char.add("new ", y))
    assert fitted.classes_.tolist() == [f"new {name}" for name in unseen]
    features = member.forward_raw(x)[0]
    for name, prototype in zip(unseen, fitted.prototypes_, strict=True):
        assert np.allclose(prototype, features[torch.from_numpy(y == name)].mean(0), atol=1e-5)
    x_test, y_test = images(unseen)
    assert fitted.score(x_test, np.char.add("new ", y_test)) > 0.6  # chance is a third
    assert (Classifier.from_trained(member).distances(x) == before).all()  # the member is as it was
    rejecting = clone(fitted).set_params(reject=0.2).fit(x, y)
    assert np.isin(rejecting.predict(x_test), [*unseen, "none of these"]).all()
    assert len(rejecting.calibration_) == 30


def test_fit_works_in_cross_validation(run, trained):
    x, y = images("0123456789", 20)
    assert cross_val_score(Classifier(trained(run, 0)), x, y, cv=3).mean() > 0.3


def test_fit_refuses_a_head_and_a_wrong_number_of_labels(run, trained):
    x, y = images("01", 5)
    with pytest.raises(ConfigError, match="it is for by='prototype'"):
        Classifier(trained(run, 0), by="head").fit(x, y)
    for labels in (y[:-1], [*y, "1"]):
        with pytest.raises((ValueError, FedProtoError), match=r"10|inconsistent"):
            Classifier(trained(run, 0)).fit(x, labels)


# --- as an object of scikit-learn's


@pytest.mark.parametrize("name", ["fedproto", "mixed", "fedavg"])
def test_it_can_be_pickled(name, run_of, trained):
    classifier = Classifier.from_trained(
        trained(run_of(name), len(result_of(run_of(name))["clients"]) - 1), reject=0.2
    )
    again = pickle.loads(pickle.dumps(classifier))
    x, _ = own_tests(run_of(name), len(result_of(run_of(name))["clients"]) - 1)
    assert (again.predict(x) == classifier.predict(x)).all()
    assert (again.predict_proba(x) == classifier.predict_proba(x)).all()
    assert again.threshold_ == classifier.threshold_


def test_a_clone_has_the_options_and_is_not_fitted(run, trained):
    classifier = Classifier.from_trained(trained(run, 0), by="head", among="own", reject=0.1)
    assert classifier.get_params() == {
        "trained": trained(run, 0),
        "by": "head",
        "among": "own",
        "reject": 0.1,
    }
    copied = clone(classifier)
    assert copied.get_params() | {"trained": None} == classifier.get_params() | {"trained": None}
    with pytest.raises(NotFittedError):
        copied.predict(np.zeros((1, 8, 8)))
    with pytest.raises(NotFittedError):
        Classifier().predict([[0.0]])
    assert "Classifier(" in repr(classifier)


@pytest.mark.parametrize(("by", "among"), WAYS)
def test_options_that_are_set_later_take_effect(by, among, run, trained):
    """A column must never be called by the name of another."""
    x, _ = images("0123456789", 5)
    for first in WAYS:
        changed = Classifier.from_trained(trained(run, 0), by=first[0], among=first[1]).set_params(
            by=by, among=among
        )
        expected = Classifier.from_trained(trained(run, 0), by=by, among=among)
        assert (changed.predict(x) == expected.predict(x)).all(), first
        assert (changed.classes_ == expected.classes_).all(), first


# --- none of these


@pytest.mark.parametrize(("by", "among"), WAYS)
def test_rejecting_on_a_real_run(by, among, run, trained):
    x, _ = own_tests(run, 1)
    plain = Classifier.from_trained(trained(run, 1), by=by, among=among)
    assert plain.threshold_ == math.inf
    before = np.zeros(len(x), bool)
    for reject in (0, 0.05, 0.2, 0.5, 0.9):
        classifier = Classifier.from_trained(trained(run, 1), by=by, among=among, reject=reject)
        rejected = classifier.predict(x) == "none of these"
        assert (rejected == (classifier.novelty(x) > classifier.threshold_)).all()
        assert (classifier.predict(x)[~rejected] == plain.predict(x)[~rejected]).all()
        assert (rejected >= before).all()  # who may reject more rejects what it did, and more
        assert (classifier.calibration_ > classifier.threshold_).mean() <= reject
        before = rejected
    assert 0.5 < before.mean() < 1


SMALL = DIGITS | {"test_shots": 4, "rounds": 1, "ways": 3}


def test_a_calibration_too_small_for_the_fraction_is_refused(tmp_path):
    """Seven held-out images reject nothing at 5%: a client that cannot keep the promise says so."""
    fedproto.run(**SMALL, stdev=0, out=tmp_path / "run")
    rows = len(own_tests(tmp_path / "run", 1)[0]) // 2
    assert 0 < rows < 19
    member = load_client(tmp_path / "run", 1)
    far = np.full((1, 8, 8), 10**9)
    for by, among in WAYS:
        message = (
            rf"client 1 has {rows} held-out rows .* rejecting 0\.05 of known inputs needs 19: "
            r".* can give is 0\.\d+"
        )
        with pytest.raises(DataError, match=message) as refused:
            Classifier.from_trained(member, by=by, among=among, reject=0.05)
        later = Classifier.from_trained(member, by=by, among=among).set_params(reject=0.05)
        with pytest.raises(DataError, match=message):
            later.predict(far)
        smallest = float(re.search(r"can give is (0\.\d+)", str(refused.value))[1])
        able = Classifier.from_trained(member, by=by, among=among, reject=smallest)
        assert math.isfinite(able.threshold_) and smallest - 1 / (rows + 1) < 1e-4
        if by == "prototype":
            assert able.predict(far).tolist() == ["none of these"]


def test_too_few_samples_to_fit_on_are_refused_too():
    fitted = Classifier(reject=0.1).fit(CORNERS, ["a", "a", "b", "b"])
    with pytest.raises(
        DataError, match=r"fitted on has 4 held-out rows .* needs 9: .* 4 can give is 0\.2$"
    ):
        fitted.predict([[1e9, 1e9]])
    assert fitted.set_params(reject=0.2).predict([[1e9, 1e9]]).tolist() == ["none of these"]


@given(
    st.integers(1, 60), st.floats(0, 1, exclude_min=True) | st.integers(1, 60).map(lambda n: 1 / n)
)
def test_the_threshold_is_infinite_exactly_if_nothing_can_be_rejected(rows, reject):
    calibration = np.arange(float(rows))
    assert can_reject(calibration, reject) == (compute_threshold(calibration, reject) < math.inf)
    assert can_reject(calibration, reject) == (rows >= count_rows_needed(reject))


@pytest.mark.parametrize(
    ("reject", "rows"), [(0.05, 19), (0.1, 9), (0.01, 99), (0.09, 11), (0.5, 1), (1 / 3, 2)]
)
def test_count_rows_needed_by_hand(reject, rows):
    assert count_rows_needed(reject) == rows


def test_rejections_name_the_clients_that_cannot_reject(tmp_path):
    fedproto.run(**SMALL, stdev=0, out=tmp_path / "run")
    rows = {client: len(own_tests(tmp_path / "run", client)[0]) // 2 for client in range(4)}
    found = measure_rejections(tmp_path / "run", 0.05)
    assert {each.client for each in found} == {0, 1, 2, 3}
    for each in found:
        assert each.known_rejected is None and each.unseen_rejected is None
        assert each.calibrated_on == rows[each.client] and 0 <= each.auroc <= 1
    assert all(
        each.unseen_rejected is not None for each in measure_rejections(tmp_path / "run", 0.5)
    )


def test_a_fraction_of_1_rejects_everything(run, trained):
    x, _ = own_tests(run, 1)
    assert (Classifier.from_trained(trained(run, 1), reject=1).predict(x) == "none of these").all()
    assert compute_threshold(np.arange(10.0), 1) == -math.inf


def test_the_calibration_is_half_of_the_clients_own_test_images(run, trained):
    x, _ = own_tests(run, 2)
    for by, among in WAYS:
        classifier = Classifier.from_trained(trained(run, 2), by=by, among=among)
        assert len(classifier.calibration_) == len(x) // 2
        found = np.sort(classifier.novelty(x))
        nearest = found[np.searchsorted(found, classifier.calibration_).clip(max=len(found) - 1)]
        below = found[(np.searchsorted(found, classifier.calibration_) - 1).clip(min=0)]
        apart = np.minimum(
            np.abs(nearest - classifier.calibration_), np.abs(below - classifier.calibration_)
        )
        assert apart.max() < 1e-4


@pytest.mark.parametrize("reject", [-0.1, 1.1, math.nan])
def test_a_fraction_outside_0_to_1_is_refused(reject, run, trained):
    with pytest.raises(ConfigError, match="reject is a fraction from 0 to 1"):
        Classifier.from_trained(trained(run, 0), reject=reject).predict(np.zeros((1, 8, 8)))


def test_reject_without_held_out_rows_is_refused():
    x, y = CORNERS[[0, 2]], ["a", "b"]  # one of each: none of them has others to be compared with
    assert Classifier().fit(x, y).predict(x).tolist() == y
    with pytest.raises(DataError, match="no rows were held out"):
        Classifier(reject=0.5).fit(x, y).predict(x)


def test_rejections_equal_those_computed_by_hand(run, trained):
    """What `fedproto predict RUN` shows, from the classifiers, by counting."""
    portions = json.loads((run / "partition.json").read_text())["clients"]
    names = np.array(source("digits").classes)[source("digits").test.y]
    at_hand = np.unique(np.concatenate([portion["test"] for portion in portions]))
    found = {(each.client, each.way): each for each in measure_rejections(run, 0.2)}
    assert set(found) == {(client, f"{by} {among}") for client in range(4) for by, among in WAYS}
    for (client, way), each in found.items():
        by, among = way.split()
        classifier = Classifier.from_trained(trained(run, client), by=by, among=among, reject=0.2)
        rows = at_hand[~np.isin(names[at_hand], portions[client]["classes"])]
        unseen = source("digits").test.x[rows]
        assert each.unseen_rejected == pytest.approx(
            (classifier.predict(unseen) == "none of these").mean()
        )
        x, _ = own_tests(run, client)
        held = classifier.calibration_  # the other half is what is shown
        new, everybody = classifier.novelty(unseen), classifier.novelty(x)
        known = (len(x) - len(held)) * each.known_rejected + (held > classifier.threshold_).sum()
        assert known == pytest.approx(
            (everybody > classifier.threshold_).sum(), abs=1.01
        )  # the limit is one of them
        wins = [(new > old).mean() + (new == old).mean() / 2 for old in everybody]
        wins_of_held = [(new > old).mean() + (new == old).mean() / 2 for old in held]
        shown = (sum(wins) - sum(wins_of_held)) / (len(x) - len(held))
        assert each.auroc == pytest.approx(shown, abs=1e-3)  # ties fall as the last bits do
        assert 0 <= each.accuracy <= 1


def test_weight_sharing_methods_reject_by_head(run_of):
    assert {each.way for each in measure_rejections(run_of("fedavg"), 0.05)} == {
        "head all",
        "head own",
    }
