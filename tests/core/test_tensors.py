"""The server's arithmetic, by hand: sums of trees of tensors."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedproto.core import tensors
from fedproto.core.types import Group, Upload

KEYS = st.text("abc._", min_size=1, max_size=4)
GROUPS = st.dictionaries(
    KEYS.filter(lambda key: "." not in key), st.dictionaries(KEYS, st.integers(), min_size=1)
)


def tensor(*values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def uploads(*weights: float) -> Upload:
    """One speaker per weight; speaker i says (i, 10 i) in two rows, each with its weight."""
    weight = torch.tensor([[each, each] for each in weights], dtype=torch.float64)
    values = torch.tensor([[[i, 10.0 * i]] * 2 for i in range(len(weights))], dtype=torch.float64)
    return {"g": Group({"a": values * weight[..., None]}, weight)}


def test_groups_are_flattened_by_dots():
    assert tensors.flatten_groups({"sums": {"a": 1, "b.c": 2}, "weights": {"a": 3}}) == {
        "sums.a": 1,
        "sums.b.c": 2,
        "weights.a": 3,
    }
    assert tensors.flatten_groups({}) == {} and tensors.flatten_groups({"sums": {}}) == {}


def test_groups_are_told_apart_by_the_first_dot():
    assert tensors.split_groups({"sums.a": 1, "sums.b.c": 2, "weights.a": 3, "round": 4}) == {
        "sums": {"a": 1, "b.c": 2},
        "weights": {"a": 3},
        "round": {"": 4},
    }


@given(GROUPS)
def test_parting_inverts_flattening(groups):
    assert tensors.split_groups(tensors.flatten_groups(groups)) == groups


def test_rows_stay_where_they_are_on_a_cpu():
    rows = torch.tensor([2, 0])
    assert tensors.move_index(rows, torch.device("cpu")).tolist() == [2, 0]


def test_rows_go_to_another_device():
    """`meta` is a device that every machine has; nothing is pinned for it."""
    assert tensors.move_index(torch.tensor([2, 0]), torch.device("meta")).device.type == "meta"


def test_one_speaker_of_three():
    one = tensors.take_one(uploads(1, 2, 3), 2)["g"]
    assert one.sums["a"].tolist() == [[6, 60], [6, 60]] and one.weight.tolist() == [3, 3]


def test_some_speakers_in_the_order_asked_for():
    some = tensors.select_rows(uploads(1, 2, 3), torch.tensor([2, 0]))["g"]
    assert some.weight.tolist() == [[3, 3], [1, 1]]
    assert some.sums["a"][:, 0].tolist() == [[6, 60], [0, 0]]


@pytest.mark.parametrize("rows", [2, 3, 5])
def test_rows_of_zeros_are_added_at_the_end(rows):
    wide = tensors.pad_rows(tensor([1, 2], [3, 4]), rows)
    assert wide.tolist() == [[1, 2], [3, 4]] + [[0, 0]] * (rows - 2)
    assert tensors.pad_rows(tensor(1, 2), rows).tolist() == [1, 2] + [0] * (rows - 2)


def test_rows_are_spread_over_their_places():
    upload = Group({"a": tensor([1, 2], [3, 4])}, tensor(5, 6), {"holders": tensor(1, 2)})
    wide = tensors.scatter_rows(upload, torch.tensor([3, 1]), 4)
    assert wide.sums["a"].tolist() == [[0, 0], [3, 4], [0, 0], [1, 2]]
    assert wide.weight.tolist() == [0, 6, 0, 5]
    assert wide.counts["holders"].tolist() == [0, 2, 0, 1]
    assert upload.sums["a"].tolist() == [[1, 2], [3, 4]]


def test_a_weight_gets_trailing_axes():
    assert tensors.align_axes(tensor(1, 2), torch.zeros(2, 3, 4)).shape == (2, 1, 1)
    assert tensors.align_axes(tensor(1, 2), torch.zeros(2)).shape == (2,)
    assert tensors.align_axes(torch.tensor(1.0), torch.zeros(3, 4)).shape == (1, 1)


def test_what_is_said_is_multiplied_by_its_weight():
    said = tensors.make_group({"a": tensor([1, 2], [3, 4]), "b": tensor(5, 6)}, tensor(10, 100))
    assert said.sums["a"].tolist() == [[10, 20], [300, 400]] and said.sums["b"].tolist() == [
        50,
        600,
    ]
    assert said.weight.tolist() == [10, 100] and said.counts == {}


def test_single_uploads_are_stacked():
    single = [tensors.take_one(uploads(1, 2, 3), place) for place in range(3)]
    found = tensors.stack_uploads(single)
    assert torch.equal(found["g"].sums["a"], uploads(1, 2, 3)["g"].sums["a"])
    assert torch.equal(found["g"].weight, uploads(1, 2, 3)["g"].weight)


def test_rows_are_appended_and_empty_trees_passed_over():
    first, second = {"a": tensor(1), "b": tensor(2)}, {"a": tensor(3, 4), "b": tensor(5, 6)}
    found = tensors.concatenate_rows([first, {}, second])
    assert found["a"].tolist() == [1, 3, 4] and found["b"].tolist() == [2, 5, 6]
    assert tensors.concatenate_rows([second])["a"].tolist() == [3, 4]
    assert tensors.concatenate_rows([]) == {} and tensors.concatenate_rows([{}, {}]) == {}


def test_uploads_are_joined_speaker_after_speaker():
    found = tensors.join_uploads([uploads(1, 2), uploads(3)])["g"]
    assert found.weight.tolist() == [[1, 1], [2, 2], [3, 3]]
    assert found.sums["a"][:, 0, 1].tolist() == [0, 20, 0]


def test_a_sum_keeps_the_axis_over_speakers():
    found = tensors.sum_uploads(uploads(1, 2, 3))["g"]
    assert found.sums["a"].tolist() == [[[8, 80], [8, 80]]]  # 1·0 + 2·1 + 3·2
    assert found.weight.tolist() == [[6, 6]]


def test_the_mean_is_weighted_row_by_row_and_old_where_nobody_spoke():
    """Row 0: (1·2 + 3·6) / 4; row 1: one speaker, whose weight is below 1; row 2: nobody."""
    sums = {"a": tensor([[2], [0], [0]], [[18], [1.5], [0]])}
    weight = tensor([1, 0, 0], [3, 0.5, 0])
    old = {"a": tensor([7], [7], [7]), "unheard": tensor(9)}
    found = tensors.weighted_mean(old, Group(sums, weight))
    assert found.keys() == {"a"}
    assert found["a"].tolist() == [[5], [3], [7]]


def test_the_mean_of_one_weight_for_each_speaker():
    """As FedAvg has it: the weight has no axis but that over the speakers."""
    found = tensors.weighted_mean(
        {"w": tensor(0, 0)}, Group({"w": tensor([2, 4], [9, 3])}, tensor(1, 3))
    )
    assert found["w"].tolist() == [11 / 4, 7 / 4]


def test_the_mean_of_nothing_is_nothing():
    assert tensors.weighted_mean({"a": tensor(1)}, Group({}, tensor(1))) == {}


def test_squared_distance_is_over_the_tensors_of_the_first():
    a, b = (
        {"x": tensor(1, 2), "y": tensor([3])},
        {"x": tensor(2, 4), "y": tensor([0]), "z": tensor(1e9)},
    )
    assert tensors.squared_distance(a, b).item() == 1 + 4 + 9
    with pytest.raises(KeyError):
        tensors.squared_distance(b, a)


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        ({}, "there is no a"),
        ({"a": tensor(1), "b": tensor(1)}, "it has no 'b'"),
        ({"a": tensor(1), "b" * 79: tensor(1)}, f"it has no '{'b' * 76}..."),
        ({"a": tensor(1, 2)}, "a is (2,) of torch.float64, where (1,) of torch.float64 is wanted"),
    ],
    ids=["missing", "unknown", "long", "shape"],
)
def test_the_first_difference_between_two_trees_is_one_sentence(found, sentence):
    assert tensors.find_mismatch({"a": tensor(1)}, found) == sentence
