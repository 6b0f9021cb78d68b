"""The page of accuracies against epsilon of private training."""

from benchmarks.private_training import METHODS, list_values, make_page, name_run


def test_the_page_has_means_over_the_seeds_that_were_measured():
    runs = {}
    for seed, accuracy in ((0, 0.80), (1, 0.90)):
        key = name_run("mnist", "local", 8.0, seed)
        runs[key] = {"accuracy": {"head": accuracy / 2, "head_own": accuracy}}
    found = {"runs": runs}
    local = next(method for method in METHODS if method.name == "Local")
    assert list_values(found, "mnist", local, 8.0, "_own") == [80.0, 90.0]
    assert list_values(found, "mnist", local, 2.0, "_own") == []
    page = make_page(found)
    assert "| Local | 85.0 ± 5.0 (2) | – |" in page
    assert "| Local | 42.5 ± 2.5 (2) | – |" in page
