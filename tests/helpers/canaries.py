"""What an attack on a canary proves about epsilon."""

import math

import torch
from scipy.stats import beta


def lower_bound(inside, outside, delta, confidence=0.95):
    """The epsilon that the scores of two neighbours prove, by Clopper and Pearson's intervals.

    The threshold is chosen on one half of the scores and judged on the other.
    """
    half = len(inside) // 2
    risk = (1 - confidence) / 2

    def proves(guess_in, guess_out, level):
        trials = len(guess_in)
        hits = int(guess_in.sum())
        false_alarms = int(guess_out.sum())
        if not hits:
            return 0.0
        least = beta.ppf(level, hits, trials - hits + 1)
        most = beta.ppf(1 - level, false_alarms + 1, trials - false_alarms)
        return math.log(max(least - delta, 1e-12) / most)

    thresholds = torch.quantile(outside[:half], torch.linspace(0.5, 0.999, 60).double())
    found = [
        proves(inside[:half] > each, outside[:half] > each, risk / len(thresholds))
        for each in thresholds
    ]
    best = thresholds[int(torch.tensor(found).argmax())]
    return proves(inside[half:] > best, outside[half:] > best, risk)
