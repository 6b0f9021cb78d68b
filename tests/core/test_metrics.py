"""Which predictions count as correct, over all classes and over a client's own."""

import torch

from fedproto.core.metrics import divide_counts, mark_correct, summarise

NONE = -torch.inf


def test_own_accuracy_chooses_among_own_classes_only() -> None:
    scores = torch.tensor([[3.0, 2.0, 1.0], [1.0, 2.0, 3.0], [3.0, 1.0, 2.0]])
    own_classes = torch.tensor([False, True, True])
    correct = mark_correct({"head": scores}, torch.tensor([1, 2, 0]), own_classes)
    assert correct["head"].tolist() == [False, True, True]
    assert correct["head_own"].tolist() == [True, True, False]


def test_a_sample_without_any_score_is_predicted_incorrectly() -> None:
    """The largest of equal scores is the first class's, which must not count as a prediction."""
    scores = torch.tensor([[NONE, NONE], [NONE, 1.0]])
    correct = mark_correct({"prototype": scores}, torch.tensor([0, 1]), torch.tensor([True, False]))
    assert correct["prototype"].tolist() == [False, True]
    assert correct["prototype_own"].tolist() == [False, False]


def test_many_clients_at_once_are_marked_like_each_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(4, 7, 5, generator=generator)
    y = torch.randint(5, (4, 7), generator=generator)
    own_classes = torch.rand(4, 5, generator=generator) < 0.5
    together = mark_correct({"head": scores}, y, own_classes)
    for client in range(4):
        alone = mark_correct({"head": scores[client]}, y[client], own_classes[client])
        assert list(alone) == list(together) == ["head", "head_own"]
        for name, values in alone.items():
            assert torch.equal(values, together[name][client])


def test_a_summary_has_mean_and_population_deviation() -> None:
    values = torch.tensor([0.0, 1.0], dtype=torch.float64)
    assert summarise({"head": values}) == {"head": {"mean": 0.5, "std": 0.5}}


def test_counts_are_divided_by_the_samples_of_each_client() -> None:
    accuracies = divide_counts({"head": torch.tensor([1, 3])}, torch.tensor([2, 4]))
    assert accuracies["head"].tolist() == [0.5, 0.75]
    assert accuracies["head"].dtype == torch.float64
