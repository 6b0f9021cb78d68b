"""What `fedproto tune` searches where nothing is said: the one table to add an algorithm to.

Every algorithm is searched over the learning rate; the table adds the options that a method's
authors tune, around the values that they report.
"""

from __future__ import annotations

from fedproto.config.options import Part
from fedproto.runs.tune.space import Space, read_search

LEARNING_RATE = "lr=0.003..0.1:log"

#: Further settings by algorithm; one that is not listed has none.
OPTIONS = {
    "closed-form": "shrinkage=0.01..0.5:log",
    "ditto": "lam=0.01..10:log",
    "fedadam": "server_lr=0.001..0.1:log",
    "fedavgm": "server_momentum=0.3|0.5|0.7|0.9",
    "fedblend": "m=0.03|0.1|0.3|0.5|0.8,tau=0.1|0.3|1",
    "feddistill": "gamma=0.01..10:log",
    "feddyn": "mu=0.001..1:log",
    "fedgh": "server_lr=0.001..0.1:log",
    "fednh": "rho=0.5|0.9|0.99,scale=3..30:log",
    "fedorgp": "lam=0.1..10:log,gamma=0.1..10:log",
    "fedproto": "lam=0.1..10:log",
    "fedproto-mh": "lam=0.1..10:log",
    "fedprox": "mu=0.001..1:log",
    "fedrep": "head_epochs=1|2|5",
    "fedsa": "lam=0.1..10:log,contrast=0.1..10:log",
    "fedtgp": "lam=0.1..10:log",
    "fesem": "clusters=2|3|5",
    "moon": "mu=0.1..10:log",
    "protonorm": "lam=0.1..10:log,scale=3..30:log",
}


def default_space(algorithm: Part) -> Space:
    """Return the learning rate and what the table has for an algorithm."""
    text = LEARNING_RATE
    if algorithm.name in OPTIONS:
        text += f",{OPTIONS[algorithm.name]}"
    return read_search(text)
