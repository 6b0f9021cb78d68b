"""What the benchmark of epsilons compares: methods, their settings, and the names of their runs."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

DATASETS = ("mnist", "fashion-mnist")
EPSILONS = (math.inf, 8.0, 4.0, 2.0, 1.0, 0.5)
#: Of methods that are slow to measure.
FEW_EPSILONS = (math.inf, 8.0, 1.0)
DELTA = 1e-5
SEEDS = (0, 1, 2, 3, 4)

RECORD = {"clients": 20, "ways": 3, "shots": 100, "stdev": 0, "test_shots": 40, "rounds": 1}
CLIENT = RECORD | {"clients": 100, "shots": 20, "test_shots": 10}
SOLVED = {"algorithm": "closed-form", "feature_map": "flat"}
MEANS = {"algorithm": "fedproto", "freeze": "body", "absent": "drop", "batch": 100}
MIXED = {
    "algorithm": "fedre",
    "freeze": "body",
    "rounds": 5,
    "batch": 100,
    "server_epochs": 50,
    "server_lr": 0.1,
}
#: Of methods that train: one epoch per round, without momentum.
TRAINED = {"model": "mlp(hidden=16)", "momentum": 0.0, "epochs": 1}
#: The expected number of records in a step, by setting.
BATCH = {"training": 30, "client": 10}
#: Perceptrons that are trained privately at a time: gradients of more of their records do not fit
#: into a processor's cache.
STACK = 2
PROTO = TRAINED | {"algorithm": "fedproto", "absent": "drop"}
CONTRAST = PROTO | {"contrast": 1.0}
AVERAGED = TRAINED | {"algorithm": "fedavg"}
LOCAL = TRAINED | {"algorithm": "local"}
#: What is tried for methods that train, on rows that are used for nothing else.
GRID = {"rounds": (2, 8), "lr": (0.1, 0.3, 1.0)}


class Method(NamedTuple):
    """A line of the figure."""

    name: str
    privacy: str  # release, training or client
    place: str  # where the noise is added: client or server
    settings: dict[str, Any]
    way: str  # which accuracy is shown
    is_fixed: bool  # whether it sees fixed features instead of images
    epsilons: tuple[float, ...] = EPSILONS
    is_tuned: bool = False  # whether it trains, so that GRID is tried

    @property
    def unit(self) -> str:
        """What is protected: record or client."""
        return "client" if self.privacy == "client" else "record"


def _list_trained(privacy: str, place: str, epsilons: tuple[float, ...]) -> list[Method]:
    """Return the lines of the methods that train, for one setting."""
    batch: dict[str, Any] = {"batch": BATCH[privacy]}
    image_batch = batch | ({"stack": STACK} if privacy == "training" else {})
    lines = [
        ("FedProto", PROTO | image_batch, "prototype", False, epsilons),
        ("contrast", CONTRAST | image_batch, "prototype", False, epsilons),
        ("FedAvg", AVERAGED | image_batch, "head", False, epsilons),
        ("FedAvg, linear", AVERAGED | batch, "head", True, epsilons),
        ("Local", LOCAL | batch, "head", False, (math.inf,)),
    ]
    methods = []
    for name, settings, way, is_fixed, its_epsilons in lines:
        methods.append(
            Method(name, privacy, place, settings, way, is_fixed, its_epsilons, is_tuned=True)
        )
    return methods


METHODS = (
    Method("closed form", "release", "server", SOLVED, "teacher", True),
    Method("closed form", "release", "client", SOLVED, "teacher", True),
    Method("class means", "release", "server", SOLVED | {"solve": "ncm"}, "teacher", True),
    Method("FedProto", "release", "server", MEANS, "prototype", True),
    Method("FedProto", "release", "client", MEANS, "prototype", True),
    *_list_trained("training", "client", FEW_EPSILONS),
    Method("closed form", "client", "server", SOLVED, "teacher", True),
    Method("class means", "client", "server", SOLVED | {"solve": "ncm"}, "teacher", True),
    *_list_trained("client", "server", FEW_EPSILONS),
    Method("FedRE", "release", "client", MIXED, "head", True),
)


def label(method: Method) -> str:
    """Return what a method is called, with the setting and where the noise is added."""
    if method.name == "Local":
        return f"Local, sends nothing (as for {method.privacy})"
    return f"{method.name}, {method.privacy}, noise at the {method.place}"


def name_cell(method: Method, epsilon: float) -> str:
    return f"{label(method)} | epsilon {epsilon:g}"


def name_choice(method: Method, epsilon: float) -> str:
    """Return the name of what was chosen for a method: contrast takes over what FedProto has."""
    if method.name == "contrast":
        method = method._replace(name="FedProto")
    return name_cell(method, epsilon)


def name_run(dataset: str, method: Method, epsilon: float, seed: int) -> str:
    return f"{dataset} | {name_cell(method, epsilon)} | seed {seed}"
