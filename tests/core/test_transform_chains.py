"""How transforms are put together, at the client and at the server, and what they refuse."""

from dataclasses import replace

import pytest
import torch
from helpers.transformed import closing_step, empty_algorithm, round_trip, send, transformed

from fedproto.core.combination import Combiner, with_combiner
from fedproto.core.tensors import map_group, sum_uploads
from fedproto.core.transform_chains import with_transforms
from fedproto.core.transforms import Encoded, Transform
from fedproto.core.types import Group, GroupLayout, Recipient, Task
from fedproto.errors import ConfigError
from fedproto.transforms.clip import clip
from fedproto.transforms.quantise import quantise
from fedproto.transforms.top_k import top_k

ROWS = GroupLayout({"a": (4,)}, "class", rows=2, counts=("holders",))
TASK = Task(classes=2, dim=4, clients=3, seed=5)


def group_of(values: list[list[float]], weight: list[float]) -> Group:
    """A group with the counts that ROWS declares."""
    weights = torch.tensor(weight)
    holders = {"holders": (weights > 0).float()}
    return Group({"a": torch.tensor(values) * weights[:, None]}, weights, holders)


def times(factor: float) -> Transform:
    """A transform that multiplies, and divides by the same number on arrival."""

    def encode(values, context):
        return Encoded({name: value * factor for name, value in values.items()}, {})

    def decode(values, side, shapes):
        return {name: value / factor for name, value in values.items()}

    return Transform(f"times {factor}", encode, decode)


def plus(number: float) -> Transform:
    """A transform that adds, and subtracts the same number on arrival."""

    def encode(values, context):
        return Encoded({name: value + number for name, value in values.items()}, {})

    def decode(values, side, shapes):
        return {name: value - number for name, value in values.items()}

    return Transform(f"plus {number}", encode, decode)


# --- the client parts


def test_transforms_are_encoded_in_order_and_decoded_in_reverse():
    group = group_of([[1.0, 2, 3, 4], [5, 6, 7, 8]], [2.0, 1])
    wire = send([times(2), plus(1)], ROWS, group)
    assert wire.sums["a"].tolist() == [[3, 5, 7, 9], [11, 13, 15, 17]]
    arrived = round_trip([times(2), plus(1)], ROWS, group)
    assert torch.equal(arrived.sums["a"], group.sums["a"])
    assert send([plus(1), times(2)], ROWS, group).sums["a"][0].tolist() == [4, 6, 8, 10]


def test_the_order_of_clip_and_top_k_matters():
    group = group_of([[3.0, 4, 0, 0], [0, 0, 0, 0]], [1.0, 0])
    clipped_first = round_trip([clip(norm=1.0), top_k(fraction=0.25)], ROWS, group)
    torch.testing.assert_close(clipped_first.sums["a"][0], torch.tensor([0, 0.8, 0, 0]))
    chosen_first = round_trip([top_k(fraction=0.25), clip(norm=1.0)], ROWS, group)
    torch.testing.assert_close(chosen_first.sums["a"][0], torch.tensor([0, 1.0, 0, 0]))


def test_a_chain_sends_the_sides_of_all_its_transforms():
    group = group_of([[1.0, -8, 2, 4], [0, 0, 0, 0]], [1.0, 0])
    wire = send([top_k(fraction=0.5), quantise(bits=4)], ROWS, group)
    assert set(wire.sums) == {"a", "a/index", "a/scale"}
    assert wire.sums["a"].shape == (2, 1)  # two codes in one byte
    arrived = round_trip([top_k(fraction=0.5), quantise(bits=4)], ROWS, group)
    assert arrived.sums["a"][0, 1] == -8
    assert arrived.sums["a"][0, [0, 2]].tolist() == [0, 0]
    assert torch.equal(arrived.counts["holders"], group.counts["holders"])


def test_a_relative_group_is_compared_with_the_tree_of_its_name():
    layout = GroupLayout({"w": (2,)}, relative=True)
    group = Group({"w": torch.tensor([2.0, 10.0])}, torch.tensor(2.0))
    wire = send([times(1)], layout, group, {"own": {"w": torch.tensor([1.0, 1.0])}, "control": {}})
    assert wire.sums["w"].tolist() == [0, 4]


def test_draws_depend_on_key_group_place_and_tensor():
    values = torch.linspace(-1, 1, 400).reshape(1, 400)
    layout = GroupLayout({"a": (400,), "b": (400,)}, "class", rows=1)
    group = Group({"a": values, "b": values}, torch.ones(1))
    step = closing_step(key=torch.tensor(1))
    wire = send([quantise()], layout, group, step=step)
    again = send([quantise()], layout, group, step=step)
    other = send([quantise()], layout, group, step=closing_step(key=torch.tensor(2)))
    later = send([clip(norm=1e6), quantise()], layout, group, step=step)
    assert torch.equal(wire.sums["a"], again.sums["a"])
    for codes in (wire.sums["b"], other.sums["a"], later.sums["a"]):
        assert not torch.equal(wire.sums["a"], codes)


def test_an_algorithm_that_sends_nothing_stays_as_it_is():
    algorithm = empty_algorithm()
    assert with_transforms(algorithm, [quantise()], {}) is algorithm
    assert with_transforms(algorithm, [], {"own": ROWS}) is algorithm


@pytest.mark.parametrize("after", [clip(), top_k(), quantise()], ids=["clip", "top-k", "quantise"])
def test_nothing_follows_codes(after):
    sentence = f"transform {after.name} cannot follow quantise, .*: write quantise last"
    with pytest.raises(ConfigError, match=sentence):
        transformed([quantise(bits=4), after], ROWS)


def test_a_transform_with_a_side_is_used_once():
    with pytest.raises(ConfigError, match=r"transform top-k appears twice.*'a/index': use it once"):
        transformed([top_k(), top_k()], ROWS)


def test_a_transform_that_renames_values_is_refused():
    transform = Transform("mine", lambda values, context: Encoded({"b": values["a"]}, {}))
    with pytest.raises(ConfigError, match=r"must keep the names.*\['a', 'b'\]"):
        transformed([transform], ROWS)


def test_a_side_without_the_name_of_its_values_is_refused():
    transform = Transform("mine", lambda values, context: Encoded(values, {"scale": values["a"]}))
    with pytest.raises(ConfigError, match="'NAME/word': 'scale'"):
        transformed([transform], ROWS)


# --- uploads from anybody


HOSTILE = {
    "a missing scale": ("a/scale", None, "there is no a/scale in it"),
    "a scale that is not finite": ("a/scale", torch.tensor([torch.inf, 0]), "a/scale must be fin"),
    "a negative scale": ("a/scale", torch.tensor([-1.0, 0]), "a/scale must be finite"),
    "a scale of another shape": ("a/scale", torch.ones(2, 1), r"a/scale has the shape \(2, 1\)"),
    "an integer scale": ("a/scale", torch.ones(2, dtype=torch.int8), "a/scale is of torch.int8"),
    "a code that is never sent": ("a", torch.tensor([[-128, 0], [0, 0]]).to(torch.int8), "codes b"),
    "codes of another type": ("a", torch.ones(2, 2), "a is of torch.float32, where torch.int8"),
    "an index too large": ("a/index", torch.tensor([[0, 4], [0, 1]]).int(), "outside of 0 to 3"),
    "a negative index": ("a/index", torch.tensor([[-1, 1], [0, 1]]).int(), "outside of 0 to 3"),
    "an index that repeats": ("a/index", torch.tensor([[1, 1], [0, 1]]).int(), "a/index must rise"),
    "a name of its own": ("b", torch.ones(2), "'b' in it is unexpected"),
}


@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE)
def test_an_upload_that_cannot_be_decoded_is_refused(hostile):
    name, value, sentence = hostile
    chain = [top_k(fraction=0.5), quantise(bits=8)]
    group = group_of([[1.0, -8, 2, 4], [0, 0, 0, 0]], [1.0, 0])
    algorithm = transformed(chain, ROWS)
    wire = send(chain, ROWS, group)
    algorithm.check({"own": wire})
    sums = {key: tensor for key, tensor in wire.sums.items() if key != name}
    if value is not None:
        sums[name] = value
    with pytest.raises(ValueError, match=f"the group own cannot be decoded: .*{sentence}"):
        algorithm.check({"own": wire._replace(sums=sums)})


def test_clipped_values_that_are_not_finite_are_refused():
    group = group_of([[1.0, 2, 3, 4], [0, 0, 0, 0]], [1.0, 0])
    wire = send([clip()], ROWS, group)
    wire.sums["a"][0, 1] = torch.nan
    with pytest.raises(ValueError, match="a has values that are not finite"):
        transformed([clip()], ROWS).check({"own": wire})


def test_a_weight_of_another_shape_is_refused():
    wire = send([clip()], ROWS, group_of([[1.0, 2, 3, 4], [0, 0, 0, 0]], [1.0, 0]))
    with pytest.raises(ValueError, match="its weight has 0 axes, where 1 is wanted"):
        transformed([clip()], ROWS).check({"own": wire._replace(weight=torch.tensor(1.0))})


def test_a_group_that_is_not_declared_is_refused():
    with pytest.raises(ValueError, match="the group 'other' is unexpected"):
        transformed([clip()], ROWS).check({"other": Group({}, torch.tensor(1.0))})


def test_rows_that_did_not_travel_are_not_checked():
    """After a message arrived, they have zeros, also as places."""
    chain = [top_k(fraction=0.5)]
    wire = send(chain, ROWS, group_of([[1.0, 2, 3, 4], [0, 0, 0, 0]], [1.0, 0]))
    wire.sums["a/index"][1] = 0
    algorithm = transformed(chain, ROWS)
    algorithm.check({"own": wire})
    assert not algorithm.decode({"own": wire}, {})["own"].sums["a"][1].any()


@pytest.mark.parametrize("bits", [4, 8])
def test_an_upload_without_rows_is_decoded(bits):
    chain = [clip(), top_k(fraction=0.5), quantise(bits=bits)]
    algorithm = transformed(chain, ROWS)
    group = Group({"a": torch.zeros(0, 4)}, torch.zeros(0), {"holders": torch.zeros(0)})
    wire = algorithm.encode({"own": group}, closing_step())
    algorithm.check(wire)
    assert algorithm.decode(wire, {})["own"].sums["a"].shape == (0, 4)


@pytest.mark.parametrize("per", ["client", "class"])
def test_tensors_without_axes_and_without_values_travel(per):
    layout = GroupLayout({"single": (), "empty": (0, 3)}, per, rows=2 if per == "class" else 0)
    rows = (2,) if per == "class" else ()
    sums = {"single": torch.full(rows, 6.0), "empty": torch.zeros(*rows, 0, 3)}
    group = Group(sums, torch.full(rows, 2.0))
    for chain in ([clip(norm=9.0)], [quantise()], [quantise(bits=4)], [top_k(), quantise()]):
        arrived = round_trip(chain, layout, group)
        assert torch.equal(arrived.sums["single"], group.sums["single"])
        assert arrived.sums["empty"].shape == (*rows, 0, 3)


# --- the server parts


def doubling(needs: str = "sum") -> Transform:
    """A server part that doubles all sums, and counts how often it did and how many spoke."""

    def server(state, uploads, context):
        group = uploads["own"]
        sums = {name: value * 2 for name, value in group.sums.items()}
        state = {"rounds": state["rounds"] + 1, "speakers": torch.tensor(len(group.weight))}
        return state, {"own": group._replace(sums=sums)}

    return Transform(
        name="doubling",
        server=server,
        init=lambda task: {"rounds": torch.tensor(0), "speakers": torch.tensor(0)},
        metrics=lambda state: {"doubled": float(state["rounds"])},
        needs=needs,
    )


def adding(**fields):
    """An algorithm whose server adds all sums up; it fails if it sees a foreign state."""

    def aggregate(server, uploads):
        assert set(server) == {"total"}
        return {"total": server["total"] + uploads["own"].sums["a"].sum(0)}

    return empty_algorithm(
        init=lambda params, task: {"total": torch.zeros(2, 4)},
        aggregate=aggregate,
        notes=lambda server: sorted(server),
        metrics=lambda server: {"total": float(server["total"].sum())},
        **fields,
    )


def two_uploads() -> dict[str, Group]:
    """The uploads of two clients, with a leading axis over them."""
    single = group_of([[1.0, 2, 3, 4], [5, 6, 7, 8]], [1.0, 1])
    sums = {"a": torch.stack([single.sums["a"]] * 2)}
    weight = torch.stack([single.weight] * 2)
    return {"own": Group(sums, weight, {"holders": weight})}


def test_a_server_part_changes_what_is_aggregated_and_keeps_its_state_apart():
    algorithm = with_transforms(adding(), [clip(), doubling()], {"own": ROWS})
    server = algorithm.init({}, TASK)
    assert set(server) == {"total", "transform"}
    for _ in range(3):
        server = algorithm.aggregate(server, sum_uploads(two_uploads()))
    assert server["total"][0].tolist() == [12, 24, 36, 48]
    assert algorithm.notes(server) == ["total"]
    assert algorithm.metrics(server) == {"total": float(server["total"].sum()), "doubled": 3.0}
    recipient = Recipient(torch.tensor(0), torch.ones(2))
    assert set(algorithm.send(server, recipient)) == {"total"}


def test_a_server_part_that_needs_the_sum_is_given_the_sum():
    algorithm = with_transforms(adding(additive=False), [doubling()], {"own": ROWS})
    server = algorithm.aggregate(algorithm.init({}, TASK), two_uploads())
    assert server["transform"]["states"]["0-doubling"]["speakers"] == 1
    assert server["total"][0].tolist() == [4, 8, 12, 16]


def test_a_server_part_that_needs_single_uploads_is_given_them():
    algorithm = with_transforms(adding(additive=False), [doubling("each")], {"own": ROWS})
    server = algorithm.aggregate(algorithm.init({}, TASK), two_uploads())
    assert server["transform"]["states"]["0-doubling"]["speakers"] == 2
    assert server["total"][0].tolist() == [4, 8, 12, 16]


def test_draws_at_the_server_depend_on_seed_and_round():
    keys = []

    def server(state, uploads, context):
        keys.append(int(context.key))
        return state, uploads

    algorithm = with_transforms(adding(), [Transform("draw", server=server)], {"own": ROWS})
    state = algorithm.init({}, TASK)
    second_state = algorithm.aggregate(state, sum_uploads(two_uploads()))
    algorithm.aggregate(second_state, sum_uploads(two_uploads()))
    algorithm.aggregate(state, sum_uploads(two_uploads()))
    algorithm.aggregate(algorithm.init({}, TASK._replace(seed=6)), sum_uploads(two_uploads()))
    assert keys[0] == keys[2]
    assert len(set(keys)) == 3


def test_single_uploads_are_refused_where_only_a_sum_exists():
    sentence = "transform doubling needs single uploads, but empty gives the server only their sum"
    with pytest.raises(ConfigError, match=sentence):
        with_transforms(adding(), [doubling("each")], {"own": ROWS})


def test_a_sum_is_refused_where_the_algorithm_needs_single_uploads():
    algorithm = adding(additive=False, combinable=False)
    sentence = "transform doubling needs the sum of all uploads, but empty works on single uploads"
    with pytest.raises(ConfigError, match=sentence):
        with_transforms(algorithm, [doubling()], {"own": ROWS})


def test_single_uploads_are_refused_after_a_sum():
    sentence = "doubling needs single uploads, but doubling before it makes a sum of them"
    with pytest.raises(ConfigError, match=sentence):
        with_transforms(adding(additive=False), [doubling(), doubling("each")], {"own": ROWS})


def test_a_combiner_leaves_no_single_uploads():
    combiner = Combiner("median", lambda group: group)
    algorithm = with_transforms(adding(additive=False), [doubling("each")], {"own": ROWS})
    with pytest.raises(ConfigError, match="cannot be used with the combiner median, only with sum"):
        with_combiner(algorithm, combiner)


def test_a_server_part_follows_the_combiner():
    combiner = Combiner("first", lambda group: map_group(group, lambda value: value[:1]))
    transformed = with_transforms(adding(), [doubling()], {"own": ROWS})
    algorithm = with_combiner(transformed, combiner)
    server = algorithm.aggregate(algorithm.init({}, TASK), two_uploads())
    assert server["total"][0].tolist() == [2, 4, 6, 8]


def test_a_server_part_is_refused_where_groups_are_aggregated_apart():
    """It would not see them, so that noise for all uploads would be missing from these."""
    algorithm = replace(adding(), once=("own",), aggregate_once=lambda server, sent_once: server)
    sentence = "transform doubling works on what the server gets in a round, but empty sends own"
    with pytest.raises(ConfigError, match=sentence):
        with_transforms(algorithm, [doubling()], {"own": ROWS})
