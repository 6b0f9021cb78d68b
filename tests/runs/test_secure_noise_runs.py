"""Noise and secure sums together in simulated runs, with lost uploads."""

import pytest
from helpers.tiny import experiment, finished

PRIVATE = {"privacy": "release", "epsilon": 4.0, "delta": 1e-5, "clip": 1.0}
SMALL_MAP = "random-conv(filters=3, kernel=3, pool=2)"


@pytest.mark.parametrize("noise_at", ["client", "server"])
def test_a_closed_form_takes_noise_a_secure_sum_and_lost_uploads(noise_at) -> None:
    """The server sees one sum; what each client sends is fixed-point numbers of all classes."""
    settings = PRIVATE | {"noise_at": noise_at, "feature_map": SMALL_MAP, "rounds": 1}
    settings |= {"clients": 5, "lost_uploads": 0.2}
    combiner = "secure-sum(simulate=protocol)"
    run, result = finished("closed-form", combiner=combiner, **settings)
    assert run.progress.once_uploads.last_round.sum() == 4
    weights = run.progress.once_uploads.uploads["class_features"].weight
    assert (weights != 0).any(1).sum() == 1
    assert result.data["privacy"]["epsilon"] <= 4.0 + 1e-6
    assert run.progress.server["teacher"]["counts"].isfinite().all()


def test_the_claim_is_that_of_the_same_run_without_a_secure_sum() -> None:
    settings = PRIVATE | {"feature_map": SMALL_MAP, "rounds": 1}
    plain = experiment("closed-form", **settings)
    secure = experiment("closed-form", combiner="secure-sum", **settings)
    assert secure.algorithm.privacy.protection == plain.algorithm.privacy.protection
