"""Members' files, and federations of them."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.deployment import (
    HELD,
    Deployment,
)
from sklearn.datasets import load_digits

from fedproto.deploy.server_state import (
    ServerState,
)


@pytest.fixture(scope="module")
def member_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Each member's images, as a file with reversed class numbers and as the simulator's arrays."""
    folder = tmp_path_factory.mktemp("data")
    x, y = load_digits(return_X_y=True)
    x = x.reshape(-1, 8, 8).astype(np.uint8) * 15
    arrays = {}
    for place, (name, held) in enumerate(HELD.items()):
        classes = sorted(map(int, held), reverse=True)
        mine = np.isin(y, classes)
        xs, ys = x[mine][place::4], y[mine][place::4]
        arrays[name] = (xs[:40], ys[:40], xs[40:60], ys[40:60])
        label = {value: number for number, value in enumerate(classes)}
        own = [[label[value] for value in part] for part in (ys[:40], ys[40:60])]
        np.savez(
            folder / f"{name}.npz",
            x=xs[:40],
            y=own[0],
            x_test=xs[40:60],
            y_test=own[1],
            classes=list(map(str, classes)),
        )
    return {"folder": folder, "arrays": arrays}


@pytest.fixture
def make_deployment(tmp_path: Path, member_files: dict[str, Any]) -> Callable[..., Deployment]:
    def made(
        algorithm: str = "fedproto", names: str = "abc", where: str = "w", **options: Any
    ) -> Deployment:
        return Deployment(tmp_path / where, member_files["folder"], algorithm, names, options)

    return made


@pytest.fixture(scope="module")
def two_rounds(tmp_path_factory: pytest.TempPathFactory, member_files: dict[str, Any]) -> Path:
    folder = tmp_path_factory.mktemp("two rounds") / "w"
    Deployment(folder, member_files["folder"], options={"rounds": 2}).serve()
    return folder


@pytest.fixture
def after_two_rounds(two_rounds: Path, make_deployment: Any) -> tuple[Deployment, ServerState]:
    """After two rounds, with a state that asks for the third."""
    deployment = make_deployment(rounds=2)
    shutil.copytree(two_rounds, deployment.folder)
    return deployment, deployment.state()
