"""Members join and leave, and leaving is exact: no bit of a leaver remains."""

import json
import shutil
import warnings
from dataclasses import replace
from functools import cache, reduce

import numpy as np
import pytest
import torch
from helpers.uploads import prototype_upload
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import fedproto
from fedproto.config.options import Part
from fedproto.core import files
from fedproto.core.class_names import describe_similar_names
from fedproto.core.tensors import flatten_upload, map_upload
from fedproto.core.uploads import LatestUploads
from fedproto.errors import DataError, FedProtoError, RunFolderError
from fedproto.membership.contribution import Contribution
from fedproto.membership.membership import Membership
from fedproto.runs.folder import RunFolder
from fedproto.runs.prototype_files import (
    PROTOTYPES_FORMAT,
    UPLOAD_FORMAT,
    Prototypes,
    read_prototypes,
)

WEIGHTINGS = ("samples", "uniform", "eq6")
DIGITS = {
    "dataset": "digits",
    "clients": 5,
    "rounds": 4,
    "shots": 5,
    "lr": 0.05,
    "engine": "reference",
}
TINY = {"model": "mlp(hidden=16,width=8)"}


@pytest.fixture(scope="module")
def run_of(tmp_path_factory):
    """A run with that weighting, in which some were absent in some rounds; each is run once."""

    @cache
    def make(weighting):
        folder = tmp_path_factory.mktemp("runs") / weighting
        fedproto.run(**DIGITS, **TINY, weighting=weighting, participation=0.6, out=folder)
        return folder

    return make


@pytest.fixture
def run(run_of, tmp_path):
    """A copy that may be changed."""
    return shutil.copytree(run_of("samples"), tmp_path / "run")


def read_membership(path):
    return Membership.of(RunFolder.open(path))


def membership_of(classes, algorithm, uploads, base=None):
    """A membership of these uploads, by name."""
    latest = LatestUploads(len(uploads))
    for number, upload in enumerate(uploads.values()):
        latest.store_one(number, upload, round=1)
    members = {name: number for number, name in enumerate(uploads)}
    return Membership(classes, algorithm, members, latest, base)


def bits(prototypes):
    """Class name -> the bytes of its prototype, of those that have one."""
    rows = zip(prototypes.classes, prototypes.values, prototypes.known.tolist(), strict=True)
    return {name: value.numpy().tobytes() for name, value, known in rows if known}


def contribution(
    member="new", classes=("0", "zebra"), dim=8, weights=(3.0, 4.0), seed=0, eq6=False
):
    """An upload as a newcomer's own code might make it."""
    weight = torch.tensor(weights)
    means = torch.randn(len(classes), dim, generator=torch.Generator().manual_seed(seed))
    holders = {"holders": torch.ones(len(classes))} if eq6 else {}
    return Contribution(
        member,
        tuple(classes),
        prototype_upload(means * weight[:, None], weight, holders),
    )


def by_hand(checkpoint, members, weighting):
    """Eq. 6 over some members' latest uploads in the checkpoint: added in order, then divided."""

    def added(name):
        return reduce(torch.add, [checkpoint[name][member] for member in members])

    weight = added("uploads.prototypes/weight")
    means = added("uploads.prototypes/sums/prototypes") / weight[:, None]
    if weighting == "eq6":
        means = means / added("uploads.prototypes/counts/holders")[:, None]
    return {str(label): means[label].numpy().tobytes() for label in range(10) if weight[label] > 0}


def checkpoint_of(run):
    return load_file(next((run / "checkpoint").iterdir()))


# --- the membership of a run


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_the_membership_of_a_run_gives_its_prototypes_bit_for_bit(weighting, run_of):
    run = run_of(weighting)
    stored, made = load_file(run / "prototypes.safetensors"), read_membership(run).prototypes()
    assert torch.equal(made.values, stored["prototypes"]) and torch.equal(
        made.known, stored["known"]
    )
    assert made.values.dtype == stored["prototypes"].dtype
    assert list(made.classes) == json.loads((run / "result.json").read_text())["classes"]


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_a_vectorised_run_gives_its_prototypes_bit_for_bit(weighting, tmp_path):
    fedproto.run(
        **DIGITS | {"engine": "vectorised", "rounds": 2},
        **TINY,
        weighting=weighting,
        out=tmp_path / "run",
    )
    stored, made = (
        load_file(tmp_path / "run" / "prototypes.safetensors"),
        read_membership(tmp_path / "run").prototypes(),
    )
    assert torch.equal(made.values, stored["prototypes"]) and torch.equal(
        made.known, stored["known"]
    )


def test_members_are_named_by_number_and_hold_their_training_classes(run_of):
    membership, stated = (
        read_membership(run_of("samples")),
        json.loads((run_of("samples") / "result.json").read_text()),
    )
    spoke = [client for client in stated["clients"] if client["last_upload"]]
    assert {name: membership.held_by(name) for name in membership.members} == {
        str(c["id"]): c["classes"] for c in spoke
    }


def test_a_client_that_never_uploaded_is_not_a_member(tmp_path):
    fedproto.run(**DIGITS | {"rounds": 1}, **TINY, participation=0.4, out=tmp_path / "run")
    stated = json.loads((tmp_path / "run" / "result.json").read_text())["clients"]
    spoke = [str(client["id"]) for client in stated if client["last_upload"]]
    assert len(spoke) == 2
    assert list(read_membership(tmp_path / "run").members) == spoke


# --- leaving


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("leaving", range(5))
def test_what_a_leaver_uploaded_was_never_summed(leaving, weighting, run_of):
    run = run_of(weighting)
    checkpoint, membership = checkpoint_of(run), read_membership(run)
    assert len(membership.members) == 5
    left = membership.without(str(leaving)).prototypes()
    others = [member for member in range(5) if member != leaving]
    assert bits(left) == by_hand(checkpoint, others, weighting)
    assert bits(left) != bits(membership.prototypes())


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_several_leave_one_after_the_other_in_any_order(weighting, run_of):
    membership = read_membership(run_of(weighting))
    one, other = membership.without("0").without("3"), membership.without("3").without("0")
    assert (
        bits(one.prototypes())
        == bits(other.prototypes())
        == by_hand(checkpoint_of(run_of(weighting)), [1, 2, 4], weighting)
    )


@pytest.mark.parametrize("written", [False, True])
def test_given_prototypes_of_a_leavers_classes_are_removed(written, run, tmp_path):
    """Given prototypes may be made of the leaver's data: those of its classes are removed.

    x holds a and b, y holds b and c. Without x, a has none, b and c are y's, d is the given one.
    """
    base = Prototypes(tuple("abcd"), torch.tensor([[10.0], [20.0], [30.0], [40.0]]), torch.ones(4))
    x = prototype_upload(torch.tensor([[1.0], [2.0], [0.0], [0.0]]), torch.tensor([1.0, 1, 0, 0]))
    y = prototype_upload(torch.tensor([[0.0], [6.0], [8.0], [0.0]]), torch.tensor([0.0, 2, 2, 0]))
    membership = membership_of(tuple("abcd"), Part("fedproto"), {"x": x, "y": y}, base)
    assert (
        membership.prototypes().known.tolist() == [1, 1, 1, 1]
        and membership.prototypes().values[3].item() == 40
    )
    left = membership.without("x")
    if written:
        left.save(RunFolder.open(run))
        left = read_membership(run)
    made = left.prototypes()
    assert made.known.tolist() == [0, 1, 1, 1]
    assert made.values[1:].flatten().tolist() == [3, 4, 40]
    assert made.values[0].item() == 0
    assert left.changes[-1] == {"did": "left", "member": "x", "classes": ["a"]}


def test_a_class_without_holders_has_no_prototype(run_of):
    membership = read_membership(run_of("samples"))
    single = [
        c
        for c in membership.classes
        if sum(c in membership.held_by(m) for m in membership.members) == 1
    ]
    assert single, "the federation of these tests has a class that one member alone holds"
    (holder,) = [member for member in membership.members if single[0] in membership.held_by(member)]
    lost = [name for name in single if name in membership.held_by(holder)]
    left = membership.without(holder)
    made = left.prototypes()
    assert left.classes == membership.classes  # classes keep their places
    for name in lost:
        assert made.known[made.classes.index(name)] == 0
        assert not made.values[made.classes.index(name)].any()
    assert set(bits(made)) == set(bits(membership.prototypes())) - set(lost)
    assert left.changes[-1] == {"member": holder, "did": "left", "classes": lost}


# --- joining


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_joining_and_leaving_again_gives_the_same_bits(weighting, run_of):
    membership = read_membership(run_of(weighting))
    new = contribution(weights=(1.0, 1.0), eq6=weighting == "eq6")
    joined = membership.with_member(new)
    assert bits(joined.without("new").prototypes()) == bits(membership.prototypes())
    assert "zebra" in bits(joined.prototypes())


def test_the_effect_of_a_newcomer_by_hand(run_of):
    """A shared class moves by the newcomer's weight, a new one is its own, others stay."""
    membership = read_membership(run_of("samples"))
    before, held = membership.prototypes(), membership.held_by("0")[0]
    upload = contribution(classes=("zebra", held), weights=(2.0, 6.0))
    after = membership.with_member(upload).prototypes()
    assert after.classes == (*membership.classes, "zebra")
    rows = upload.upload["prototypes"].sums["prototypes"].double()
    assert torch.allclose(after.values[-1].double(), rows[0] / 2, atol=1e-6)
    place = membership.classes.index(held)
    counts = sum(
        membership.upload_of(name)["prototypes"].weight[place] for name in membership.members
    ).double()
    expected = (before.values[place].double() * counts + rows[1]) / (counts + 6)
    assert torch.allclose(after.values[place].double(), expected, atol=1e-5)
    untouched = set(bits(before)) - {held}
    assert {name: bits(after)[name] for name in untouched} == {
        name: bits(before)[name] for name in untouched
    }


def test_the_order_of_a_newcomers_classes_does_not_matter(run_of):
    membership, names = read_membership(run_of("samples")), ("7", "zebra", "2", "apple")
    new = contribution(classes=names, weights=(1.0, 2.0, 3.0, 4.0))
    order = [3, 1, 0, 2]
    turned = Contribution(
        "new",
        tuple(names[place] for place in order),
        map_upload(new.upload, lambda value: value[order]),
    )
    assert bits(membership.with_member(new).prototypes()) == bits(
        membership.with_member(turned).prototypes()
    )


def test_changes_are_recorded_in_order(run_of):
    membership = (
        read_membership(run_of("samples")).with_member(contribution()).without("new").without("1")
    )
    assert [(change["member"], change["did"]) for change in membership.changes] == [
        ("new", "joined"),
        ("new", "left"),
        ("1", "left"),
    ]
    assert (
        "zebra" in membership.changes[0]["classes"] and "zebra" in membership.changes[1]["classes"]
    )


def test_a_listed_class_without_holders_counts_as_new(run_of):
    """`classes` of a change: those that nobody had before."""
    membership = read_membership(run_of("samples")).without("4")
    assert membership.changes[-1]["classes"] == ["0"]
    joined = membership.with_member(contribution(classes=("0", "zebra")))
    assert set(joined.changes[-1]["classes"]) == {"0", "zebra"}
    again = joined.without("new").with_member(
        contribution("again", classes=("zebra",), weights=(1.0,))
    )
    assert again.changes[-1]["classes"] == ["zebra"]


def test_a_newcomer_in_64_bits_does_not_change_the_others(run):
    """Their sums stay what they are, also after the membership was written and read."""
    membership, folder = read_membership(run), RunFolder.open(run)
    new = contribution()
    wide = replace(new, upload=map_upload(new.upload, torch.Tensor.double))
    membership.with_member(wide).save(folder)
    left = read_membership(run).without("new").prototypes()
    assert left.values.dtype == torch.float32
    assert bits(left) == bits(membership.prototypes())


# --- written and read


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_a_membership_is_read_as_it_was_written(weighting, run_of, tmp_path):
    run = shutil.copytree(run_of(weighting), tmp_path / "run")
    joined = (
        read_membership(run)
        .with_member(contribution(weights=(1.0, 1.0), eq6=weighting == "eq6"))
        .without("2")
    )
    joined.save(RunFolder.open(run))
    again = read_membership(run)
    assert (again.classes, list(again.members), again.changes) == (
        joined.classes,
        list(joined.members),
        joined.changes,
    )
    assert bits(again.prototypes()) == bits(joined.prototypes()) == bits(read_prototypes(run))
    assert bits(again.without("new").prototypes()) == by_hand(
        checkpoint_of(run), [0, 1, 3, 4], weighting
    )
    for name in joined.members:
        mine, theirs = (flatten_upload(each.upload_of(name)) for each in (joined, again))
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(value, theirs[key]) for key, value in mine.items())


def test_the_prototypes_of_training_are_not_changed(run):
    before = (run / "prototypes.safetensors").read_bytes()
    read_membership(run).without("0").save(RunFolder.open(run))
    assert (run / "prototypes.safetensors").read_bytes() == before
    assert bits(read_prototypes(run)) != bits(read_prototypes(run / "prototypes.safetensors"))


def test_an_upload_is_read_as_it_was_written(tmp_path):
    new = contribution("somebody", classes=("ä b", "c"))
    new.save(tmp_path / "upload.safetensors")
    for path in (tmp_path, tmp_path / "upload.safetensors"):
        again = Contribution.load(path)
        assert (again.member, again.classes) == ("somebody", ("ä b", "c"))
        assert list(again.upload) == ["prototypes"]
        found, written = again.upload["prototypes"], new.upload["prototypes"]
        assert torch.equal(found.sums["prototypes"], written.sums["prototypes"])
        assert torch.equal(found.weight, written.weight)
        assert found.counts == {}


def test_a_membership_agrees_with_its_runs_prototypes_or_is_refused(run_of, tmp_path):
    """A run that was given prototypes has some that no upload of its own members explains."""
    fedproto.run(
        **DIGITS | {"rounds": 1, "clients": 1},
        **TINY,
        prototypes=str(run_of("samples")),
        out=tmp_path / "run",
    )
    try:
        made = read_membership(tmp_path / "run").prototypes()
    except FedProtoError:
        return
    assert bits(made) == bits(read_prototypes(tmp_path / "run" / "prototypes.safetensors"))


# --- what is refused


def refuse(membership, new, message):
    with pytest.raises(DataError, match=message) as caught:
        membership.with_member(new)
    assert "\n" not in str(caught.value)


def changed(new, **parts):
    """Return a contribution with other `sums`, another `weight` or other `counts`."""
    return replace(new, upload={"prototypes": new.upload["prototypes"]._replace(**parts)})


def test_a_run_without_single_uploads_is_refused(tmp_path):
    fedproto.run(**DIGITS | {"rounds": 1}, **TINY, absent="drop", out=tmp_path / "drop")
    fedproto.run(**DIGITS | {"rounds": 1}, **TINY, algorithm="fedavg", out=tmp_path / "fedavg")
    fedproto.run(**DIGITS | {"rounds": 1}, **TINY, checkpoint_every=0, out=tmp_path / "forgotten")
    for name in ("drop", "fedavg"):
        with pytest.raises(
            RunFolderError, match=r"keeps no single uploads.*a run of fedproto with absent=remember"
        ):
            read_membership(tmp_path / name)
    with pytest.raises(RunFolderError, match="no checkpoint"):
        read_membership(tmp_path / "forgotten")


def test_a_taken_or_unknown_name_is_refused(run_of):
    membership = read_membership(run_of("samples"))
    refuse(
        membership,
        contribution("3"),
        "there is a member '3' already: give the newcomer another name",
    )
    with pytest.raises(DataError, match="there is no member 'nobody': there are 0, 1, 2, 3, 4"):
        membership.without("nobody")
    with pytest.raises(DataError, match="there is no member '0'"):
        membership.without("0").without("0")


def test_the_last_member_cannot_leave(run_of, tmp_path):
    run = shutil.copytree(run_of("samples"), tmp_path / "run")
    membership = read_membership(run)
    for name in "0123":
        membership = membership.without(name)
    with pytest.raises(DataError, match="the last member"):
        membership.without("4").save(RunFolder.open(run))
    assert not (run / "members.safetensors").exists()


def test_joining_an_empty_membership_gives_one_sentence(run_of):
    """It is refused, or gives a membership of one; neither is a traceback."""
    membership = read_membership(run_of("samples"))
    try:
        for name in "01234":
            membership = membership.without(name)
        alone = membership.with_member(contribution())
    except DataError:
        return
    assert set(bits(alone.prototypes())) == {"0", "zebra"}


def test_uploads_that_do_not_fit_are_refused(run_of):
    membership, new = read_membership(run_of("samples")), contribution()
    means, weight = new.upload["prototypes"].sums["prototypes"], new.upload["prototypes"].weight
    refuse(
        membership,
        contribution(dim=9),
        r"prototypes/sums/prototypes of shape \(2, 9\) instead of \(2, 8\)",
    )
    refuse(membership, changed(new, sums={"prototypes": means[:1]}), r"of shape \(1, 8\)")
    refuse(membership, changed(new, sums={"prototypes": means[0]}), r"of shape \(8,\)")
    refuse(
        membership,
        changed(new, weight=weight[:, None]),
        r"weight of shape \(2, 1\) instead of \(2,\)",
    )
    refuse(
        membership,
        changed(new, sums={"means": means}),
        "holds prototypes/sums/means, prototypes/weight "
        "instead of prototypes/sums/prototypes, prototypes/weight",
    )
    refuse(
        membership,
        changed(new, sums={"prototypes": means, "more": means}),
        "holds prototypes/sums/more, prototypes/sums/prototypes, prototypes/weight instead",
    )
    refuse(
        membership,
        changed(new, sums={}),
        "holds prototypes/weight instead of prototypes/sums/prototypes, prototypes/weight",
    )
    refuse(
        membership,
        replace(new, upload={"means": new.upload["prototypes"]}),
        "holds means/sums/prototypes, means/weight instead of prototypes/sums/prototypes",
    )
    refuse(
        membership,
        replace(new, upload=new.upload | {"model": new.upload["prototypes"]}),
        "holds model/sums/prototypes, model/weight, prototypes/sums/prototypes",
    )
    refuse(membership, replace(new, upload={}), "holds nothing instead of prototypes/")
    holders = "prototypes/counts/holders, prototypes/sums/prototypes, prototypes/weight"
    refuse(membership, contribution(eq6=True), f"holds {holders} instead of")
    refuse(read_membership(run_of("eq6")), new, f"instead of {holders}")
    refuse(
        read_membership(run_of("eq6")),
        changed(new, counts={"people": weight}),
        f"holds prototypes/counts/people, .* instead of {holders}",
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_uploads_that_are_not_finite_are_refused(value, run_of):
    membership, new = read_membership(run_of("samples")), contribution()
    spoilt = new.upload["prototypes"].sums["prototypes"].clone()
    spoilt[1, 3] = value
    refuse(
        membership,
        changed(new, sums={"prototypes": spoilt}),
        "the upload of 'new' has prototypes/sums/prototypes with values that are not finite",
    )
    refuse(membership, contribution(weights=(1.0, value)), "not finite")


@pytest.mark.parametrize("value", [0.0, -1.0])
def test_weights_that_are_not_positive_are_refused(value, run_of):
    """A negative weight would take others' shares out."""
    refuse(
        read_membership(run_of("samples")),
        contribution(weights=(1.0, value)),
        "a weight that is not positive",
    )
    new = contribution(eq6=True, weights=(1.0, 1.0))
    holders = torch.tensor([1.0, value])
    refuse(
        read_membership(run_of("eq6")),
        changed(new, counts={"holders": holders}),
        "not positive",
    )


def test_uniform_members_count_once(run_of):
    """With `uniform`, a weight other than 1 is refused or counted as 1."""
    membership, held = read_membership(run_of("uniform")), ("5", "7")
    for weights in ((1.0, 1.0), (9.0, 9.0)):
        try:
            after = membership.with_member(contribution(classes=held, weights=weights)).prototypes()
        except DataError:
            assert weights == (9.0, 9.0)
            return
        for row, name in enumerate(held):
            place = membership.classes.index(name)
            holders = [
                membership.upload_of(name)["prototypes"].sums["prototypes"][place]
                for name in membership.members
                if membership.upload_of(name)["prototypes"].weight[place]
            ]
            sent = contribution(classes=held, weights=(1.0, 1.0)).upload["prototypes"]
            own = sent.sums["prototypes"][row]
            assert torch.allclose(
                after.values[place], torch.stack([*holders, own]).mean(0), atol=1e-5
            )


def test_a_class_named_twice_is_refused(tmp_path):
    tensors = flatten_upload(prototype_upload(torch.ones(2, 8), torch.ones(2)))
    files.write_tensors(
        tmp_path / "upload.safetensors", tensors, UPLOAD_FORMAT, {"classes": ["0", "0"]}
    )
    with pytest.raises(DataError, match="names no classes, or one twice"):
        Contribution.load(tmp_path)


def test_files_that_are_not_uploads_are_refused(tmp_path, run_of):
    (tmp_path / "text").write_text("hello")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    contribution().save(tmp_path / "cut")
    (tmp_path / "cut").write_bytes((tmp_path / "cut").read_bytes()[:-10])
    tensors = flatten_upload(contribution().upload)
    files.write_tensors(tmp_path / "nameless", tensors, UPLOAD_FORMAT, {})
    sums_only = {name: value for name, value in tensors.items() if "sums" in name}
    header = {"classes": ["0", "zebra"]}
    files.write_tensors(tmp_path / "weightless", sums_only, UPLOAD_FORMAT, header)
    others = tensors | {"prototypes/others/a": torch.ones(2)}
    files.write_tensors(tmp_path / "of other parts", others, UPLOAD_FORMAT, header)
    for name in (
        "text",
        "empty",
        "folder",
        "cut",
        "missing",
        "nameless",
        "weightless",
        "of other parts",
    ):
        with pytest.raises(DataError, match=name):
            Contribution.load(tmp_path / name)
    with pytest.raises(DataError, match="is not a file of upload but of 'prototypes'"):
        read_membership(run_of("samples")).with_member(
            Contribution.load(run_of("uniform") / "prototypes.safetensors")
        )


def test_a_damaged_membership_file_is_refused(run):
    read_membership(run).with_member(contribution()).save(RunFolder.open(run))
    content = (run / "members.safetensors").read_bytes()
    for damage in (
        content[:-7],
        b"",
        b"no safetensors",
        content[:40],
        content.replace(b'\\"members\\"', b'\\"membres\\"'),
    ):
        assert damage != content
        (run / "members.safetensors").write_bytes(damage)
        with pytest.raises(DataError, match=r"members\.safetensors"):
            read_membership(run)


# --- prototypes by class name


def file_of(path, values, known, names):
    header = {} if names is None else {"classes": list(names)}
    tensors = {"prototypes": torch.tensor(values), "known": torch.tensor(known)}
    files.write_tensors(path, tensors, PROTOTYPES_FORMAT, header)
    return path


def test_prototypes_over_other_classes():
    held = Prototypes(
        ("a", "b", "c"), torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([1.0, 0.0, 1.0])
    )
    other = held.over(("d", "c", "b"))
    assert other.classes == ("d", "c", "b")
    assert other.values.tolist() == [[0], [3], [2]] and other.known.tolist() == [0, 1, 0]
    assert held.over(()).values.shape == (0, 1)
    assert held.over(("d",)).known.tolist() == [0]


@pytest.mark.parametrize(
    ("values", "known", "names"),
    [
        ([[1.0], [float("nan")]], [1.0, 1.0], "ab"),
        ([[1.0], [float("inf")]], [1.0, 1.0], "ab"),
        ([[1.0], [2.0]], [1.0, 0.5], "ab"),
        ([[1.0], [2.0]], [1.0, float("nan")], "ab"),
        ([[1.0], [2.0]], [1.0, 1.0], "abc"),
        ([[1.0], [2.0]], [1.0, 1.0], "aa"),
        ([[1.0], [2.0]], [1.0, 1.0], ["a", ""]),
        ([[1.0], [2.0]], [1.0, 1.0], None),
        ([[1.0], [2.0]], [1.0], "ab"),
        ([1.0, 2.0], [1.0, 1.0], "ab"),
    ],
)
def test_files_of_prototypes_that_are_refused(values, known, names, tmp_path):
    with pytest.raises(
        DataError,
        match=r"file (names no classes|has a class|holds no prototypes|holds prototypes that)",
    ) as caught:
        read_prototypes(file_of(tmp_path / "file", values, known, names))
    assert "\n" not in str(caught.value)


def test_files_without_prototypes_are_refused(tmp_path):
    (tmp_path / "text").write_text("hello")
    save_file({"weight": torch.zeros(2)}, tmp_path / "weights")
    (tmp_path / "folder").mkdir()
    for name in ("text", "weights", "folder", "missing"):
        with pytest.raises(DataError, match=name):
            read_prototypes(tmp_path / name)


# --- classes are names


@pytest.mark.parametrize(
    ("names", "groups"),
    [
        (["cat", "dog"], []),
        (["cat", "Cat", "dog"], [("cat", "Cat")]),
        (
            ["traffic light", "trafficlight", "Traffic_Light", "traffic-light"],
            [("traffic light", "traffic-light")],
        ),
        (["cat", "cat"], []),  # the same one
        (["a", "A", "b", "B"], [("a", "A"), ("b", "B")]),
        (["straße", "STRASSE"], [("straße", "STRASSE")]),
        (["cat ", "cat"], [("cat ", "cat")]),
        (
            ["caf\u00e9", "cafe\u0301"],
            [("caf\u00e9", "cafe\u0301")],
        ),  # one letter, or a letter and an accent
        ([], []),
    ],
)
def test_similar_names_are_reported(names, groups):
    told = describe_similar_names(names)
    assert len(told) == len(groups)
    for sentence, group in zip(told, groups, strict=True):
        assert all(repr(name) in sentence for name in group)


def test_a_newcomers_similar_class_names_are_reported(run_of):
    membership = read_membership(run_of("samples"))
    assert membership.notices() == []
    joined = membership.with_member(
        contribution(classes=("Cat", "cat "))
    )  # white space around a name is none of it
    assert len(joined.notices()) == 1 and "'Cat', 'cat'" in joined.notices()[0]
    assert {"Cat", "cat"} <= set(bits(joined.prototypes()))


def two_sources(folder, order):
    """Two clients with their own images; the second numbers its classes in another order."""
    generator = np.random.default_rng(0)
    names, centres = np.array(["ant", "bee", "cow"]), generator.normal(size=(3, 6)) * 2
    paths = []
    for client, numbering in enumerate(([0, 1, 2], order)):
        y = np.arange(60) % 3
        x = (centres[y] + generator.normal(size=(60, 6))).astype(np.float32)
        place = np.argsort(numbering)  # of each class in this client's own numbering
        paths.append(folder / f"{client}.npz")
        np.savez(
            paths[-1], x=x, y=place[y], classes=names[numbering], x_test=x[:9], y_test=place[y[:9]]
        )
    return ",".join(f"npz:{path}*1" for path in paths)


@pytest.mark.parametrize("order", [[2, 1, 0], [1, 2, 0]])
def test_the_numbering_of_classes_does_not_matter(order, tmp_path):
    results = []
    for each in ([0, 1, 2], order):
        folder = tmp_path / "".join(map(str, each))
        folder.mkdir()
        options = {"clients": 2, "rounds": 3, "partition": "classes", "engine": "reference", **TINY}
        results.append(
            fedproto.run(dataset=two_sources(folder, each), **options, lr=0.05, out=folder / "run")
        )
    same, other = results
    assert torch.equal(same.prototypes["prototypes"], other.prototypes["prototypes"])
    assert same.accuracy == other.accuracy
    assert [client["classes"] for client in other.clients] == [["ant", "bee", "cow"]] * 2
    own = load_file(other.folder / "prototypes.safetensors")
    assert own["known"].tolist() == [1, 1, 1] and own["held"].tolist() == [[20, 20, 20]] * 2


def test_labels_can_be_text():
    """In any order, of any kind: 1 and "1" are one name."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(2, 40, 6)).astype(np.float32)
    y = generator.integers(0, 4, (2, 40))
    options = {"rounds": 2, "engine": "reference", **TINY}
    plain = fedproto.run(dataset=[(x[0], y[0]), (x[1], y[1])], **options)
    texts = fedproto.run(dataset=[(x[0], y[0]), (x[1], y[1].astype(str))], **options)
    assert torch.equal(plain.prototypes["prototypes"], texts.prototypes["prototypes"])
    assert plain.accuracy == texts.accuracy and texts.data["classes"] == list("0123")


def test_clients_with_similar_class_names_are_warned():
    x = np.random.default_rng(0).normal(size=(20, 6)).astype(np.float32)
    options = {"rounds": 1, "engine": "reference", **TINY}
    with pytest.warns(
        UserWarning,
        match="'cat', 'Cat' differ only in case, spaces or hyphens|'Cat', 'cat' differ only",
    ):
        result = fedproto.run(
            dataset=[(x, ["cat", "dog"] * 10), (x, ["Cat", "dog"] * 10)], **options
        )
    assert sorted(result.data["classes"]) == ["Cat", "cat", "dog"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fedproto.run(dataset=[(x, ["cat", "dog"] * 10)] * 2, **options)


# --- whatever comes


@pytest.mark.parametrize("members", [4, 5, 7, 20])
def test_a_member_without_a_class_does_not_change_its_prototype(members):
    """Not by a bit, when a member with other classes joins and leaves."""
    generator = torch.Generator().manual_seed(members)

    def upload(classes):
        sums = torch.randn(classes, 50, generator=generator)
        return prototype_upload(sums, torch.ones(classes))

    membership = membership_of(
        tuple("0123456789"),
        Part("fedproto"),
        {str(number): upload(10) for number in range(members)},
    )
    joined = membership.with_member(Contribution("new", ("zebra",), upload(1)))
    before = bits(membership.prototypes())
    assert {
        name: value for name, value in bits(joined.prototypes()).items() if name != "zebra"
    } == before
    assert bits(joined.without("new").prototypes()) == before


@st.composite
def memberships_and_newcomers(draw):
    """Draw a membership and newcomers; class names are few, so that members share classes."""
    weighting = draw(st.sampled_from(WEIGHTINGS))
    dim, seed = draw(st.integers(1, 5)), draw(st.integers(0, 2**32 - 1))
    generator = np.random.default_rng(seed)

    def upload(rows, weights):
        weight = torch.tensor(weights, dtype=torch.float32)
        weight = weight if weighting != "uniform" else (weight > 0).float()
        means = torch.from_numpy(
            generator.normal(size=(rows, dim)) * 10 ** generator.uniform(-3, 3)
        ).float()
        holders = {"holders": (weight > 0).float()} if weighting == "eq6" else {}
        return prototype_upload(means * weight[:, None], weight, holders)

    classes = tuple(draw(st.lists(st.sampled_from("abcde"), min_size=1, max_size=5, unique=True)))
    members = {
        str(number): upload(len(classes), [draw(st.integers(0, 9)) for _ in classes])
        for number in range(draw(st.integers(1, 6)))
    }
    newcomers = []
    for number in range(draw(st.integers(1, 4))):
        names = tuple(
            draw(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=4, unique=True))
        )
        newcomers.append(
            Contribution(
                f"new {number}", names, upload(len(names), [draw(st.integers(1, 9)) for _ in names])
            )
        )
    return membership_of(classes, Part("fedproto", {"weighting": weighting}), members), newcomers


@given(memberships_and_newcomers(), st.randoms(use_true_random=False))
def test_any_order_of_joining_gives_the_same_prototypes(found, random):
    membership, newcomers = found
    one = other = membership
    for new in newcomers:
        one = one.with_member(new)
    for new in random.sample(newcomers, len(newcomers)):
        other = other.with_member(new)
    first, second = one.prototypes(), other.prototypes()
    assert set(first.classes) == set(second.classes)
    second = second.over(first.classes)
    assert torch.equal(first.known, second.known)
    largest = max(float(first.values.abs().max()), 1.0)
    assert torch.allclose(first.values, second.values, rtol=1e-5, atol=1e-6 * largest)


@given(memberships_and_newcomers(), st.randoms(use_true_random=False), st.booleans())
def test_leaving_inverts_joining_bit_for_bit(tmp_path, found, random, written):
    membership, newcomers = found
    joined = membership
    for new in newcomers:
        joined = joined.with_member(new)
    if written:
        joined.save(RunFolder(tmp_path))
        joined = Membership.of(RunFolder(tmp_path))
    for new in random.sample(newcomers, len(newcomers)):
        joined = joined.without(new.member)
    assert bits(joined.prototypes()) == bits(membership.prototypes())
    assert joined.classes[: len(membership.classes)] == membership.classes
    assert list(joined.members) == list(membership.members)
