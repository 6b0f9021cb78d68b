"""Algorithms with a combiner: what their servers see, and what is refused."""

import re
from dataclasses import replace

import pytest
import torch

from fedproto.combiners.krum import krum
from fedproto.combiners.median import median
from fedproto.combiners.sum import sum as plain_sum
from fedproto.core.combination import Combiner, with_combiner
from fedproto.core.tensors import sum_group
from fedproto.core.types import Algorithm, Group, Task, per_client

TASK = Task(classes=2, dim=3, clients=4, seed=0)


def average(server, uploads):
    """Divide the sum of the uploads by that of their weights."""
    group = uploads["model"]
    return {"w": group.sums["w"].sum(0) / group.weight.sum(0), "uploads": len(group.weight)}


ALGORITHM = Algorithm(
    name="averaging",
    init=lambda params, task: dict(params),
    adopt=lambda own, received: own | received,
    loss=lambda step: {},
    upload=lambda step: {},
    aggregate=average,
    predict=lambda step: {},
    send=lambda server, recipient: server,
    declare=lambda params, task: per_client(params),
)


def uploads_of(*values: float) -> dict[str, Group]:
    sums = torch.tensor(values)[:, None]
    return {"model": Group({"w": sums}, torch.ones(len(values)))}


def test_the_sum_leaves_an_algorithm_as_it_is() -> None:
    assert with_combiner(ALGORITHM, plain_sum()) is ALGORITHM
    stubborn = replace(ALGORITHM, combinable=False)
    assert with_combiner(stubborn, plain_sum()) is stubborn


def test_the_server_sees_one_combined_upload() -> None:
    combined = with_combiner(ALGORITHM, median())
    assert combined.aggregate({}, uploads_of(1.0, 2.0, 90.0)) == {"w": torch.tensor([2.0])} | {
        "uploads": 1
    }
    assert not combined.additive
    assert combined.name == "averaging"


def test_what_is_remembered_is_combined_too() -> None:
    remembering = replace(ALGORITHM, additive=False, remembers=True)
    assert with_combiner(remembering, median()).remembers


def test_each_group_is_combined_by_itself() -> None:
    def keep_groups(server, uploads):
        return {name: group.sums for name, group in uploads.items()}

    combined = with_combiner(replace(ALGORITHM, aggregate=keep_groups), median())
    per_class = Group({"p": torch.tensor([[[1.0], [0.0]], [[5.0], [8.0]]])}, torch.eye(2) + 1)
    server = combined.aggregate({}, uploads_of(1.0, 5.0) | {"prototypes": per_class})
    assert server["model"]["w"].tolist() == [[6.0]]
    # Class 0: (1/2 + 5/1) / 2 with weight 3; class 1: (0/1 + 8/2) / 2 with weight 3.
    assert server["prototypes"]["p"].tolist() == [[[8.25], [6.0]]]


def test_no_uploads_stay_none() -> None:
    combined = with_combiner(replace(ALGORITHM, aggregate=lambda server, uploads: uploads), krum())
    assert combined.aggregate({}, {}) == {}


def test_an_algorithm_that_needs_the_uploads_themselves_is_refused() -> None:
    sentence = (
        "algorithm averaging does more with the uploads than to divide their sum, so it cannot be "
        "used with the combiner median, only with sum"
    )
    with pytest.raises(Exception, match=re.escape(sentence)):
        with_combiner(replace(ALGORITHM, combinable=False), median())


def test_too_few_clients_are_refused_before_the_first_round() -> None:
    sentence = "combiner krum needs at least 5 clients, but there are only 4"
    with pytest.raises(Exception, match=re.escape(sentence)):
        with_combiner(ALGORITHM, krum()).init({}, TASK)
    with pytest.raises(Exception, match="at least 9 clients"):
        with_combiner(ALGORITHM, krum(attackers=3)).init({}, TASK)
    assert with_combiner(ALGORITHM, krum()).init({}, TASK._replace(clients=5)) == {}


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        (None, "combiner mine must return a fedproto.Group, not NoneType"),
        (Group({"v": torch.ones(1, 1)}, torch.ones(1)), "the tensors it was given: sums.v"),
        (
            Group({"w": torch.ones(2, 1)}, torch.ones(1)),
            "combiner mine returned sums.w as (2, 1), where (1, 1) is wanted",
        ),
        (
            Group({"w": torch.ones(1, 1)}, torch.ones(2)),
            "combiner mine returned weight as (2,), where (1,) is wanted",
        ),
    ],
)
def test_what_a_combiner_returns_is_checked(returned, sentence) -> None:
    combined = with_combiner(ALGORITHM, Combiner("mine", lambda group: returned))
    with pytest.raises(TypeError, match=re.escape(sentence)):
        combined.aggregate({}, uploads_of(1.0, 2.0))


def test_sums_add_sums_weights_and_counts() -> None:
    group = Group({"w": torch.eye(2)}, torch.tensor([1.0, 2.0]), {"n": torch.tensor([3.0, 4.0])})
    added = sum_group(group)
    assert added.sums["w"].tolist() == [[1.0, 1.0]]
    assert added.weight.tolist() == [3.0]
    assert added.counts["n"].tolist() == [7.0]
