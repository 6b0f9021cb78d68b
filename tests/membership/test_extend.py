"""Federations that continue with newcomers: models are kept, prototypes are those of all."""

import shutil
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.command_line import fedproto as command
from sklearn.datasets import load_digits

import fedproto
from fedproto.errors import FedProtoError
from fedproto.inference.trained_client import load_client
from fedproto.membership.contribution import Contribution
from fedproto.membership.extend import extend
from fedproto.membership.membership import Membership
from fedproto.runs.experiment import reopen
from fedproto.runs.folder import RunFolder
from fedproto.runs.prototype_files import read_prototypes

DIGITS = ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("extend") / "federation"
    fedproto.run(dataset="digits", clients=4, shots=15, rounds=4, out=out, model="mlp")
    return out


@pytest.fixture(scope="module")
def crosses(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A source with a class that nobody has: threes, and threes upside down, called crosses."""
    images, labels = load_digits(return_X_y=True)
    threes = images[labels == 3].reshape(-1, 8, 8).astype(np.float32) / 16
    path = tmp_path_factory.mktemp("crosses") / "crosses.npz"
    x = np.concatenate([threes, threes[:, ::-1] * (np.arange(8) % 2)])
    np.savez(path, x=x, y=np.repeat([0, 1], len(threes)), classes=np.array(["3", "cross"]))
    return f"npz:{path}"


def newcomer(run: Path, data: str, out: Path, epochs: int = 3, **options) -> Path:
    fedproto.join(
        run, data, model="mlp(hidden=30)", epochs=epochs, out=out, name=out.name, **options
    )
    return out


def test_every_member_starts_with_its_own_model(run: Path, crosses: str, tmp_path: Path) -> None:
    new = newcomer(run, crosses, tmp_path / "new")
    experiment, _ = extend(run, [new], tmp_path / "together", rounds=2)
    assert experiment.federation.classes == (*DIGITS, "cross")
    with closing(experiment.engine):
        states = experiment.client_states()
    for client, (folder, place) in enumerate([(run, 0), (run, 1), (run, 2), (run, 3), (new, 0)]):
        before = load_client(folder, place)
        x = torch.rand(7, *before.preprocessing.shape)
        module = experiment.federation.members[client].module.eval()
        with torch.no_grad():
            features, logits = torch.func.functional_call(module, states[client], (x,))
        old = before.forward(x)
        assert torch.equal(features, old[0])
        places = [experiment.federation.classes.index(name) for name in before.classes]
        assert torch.allclose(logits[:, places], old[1], atol=1e-6)


def test_the_server_starts_from_the_prototypes_of_all(
    run: Path, crosses: str, tmp_path: Path
) -> None:
    new = newcomer(run, crosses, tmp_path / "new")
    experiment, folder = extend(run, [new], tmp_path / "together", rounds=2)
    folded = Membership.of(RunFolder.open(run)).with_member(Contribution.load(new)).prototypes()
    assert torch.equal(experiment.progress.server["prototypes"], folded.values)
    assert torch.equal(experiment.progress.server["known"], folded.known)
    result = experiment.execute(folder)
    assert result.data["rounds"] == 2 and len(result.clients) == 5
    assert read_prototypes(tmp_path / "together").known[-1] == 1
    assert load_client(tmp_path / "together", 4).own == ("3", "cross")


def test_an_extension_killed_before_its_first_checkpoint_keeps_all_models(
    run: Path, crosses: str, tmp_path: Path
) -> None:
    new = newcomer(run, crosses, tmp_path / "new")
    whole, killed = (extend(run, [new], tmp_path / name, rounds=3) for name in ("whole", "killed"))
    expected = whole[0].execute(whole[1])
    killed[0].engine.close()
    again, folder = reopen(RunFolder.open(tmp_path / "killed"))
    found = again.execute(folder)
    for one, other in zip(expected.states, found.states, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert torch.equal(expected.prototypes["prototypes"], found.prototypes["prototypes"])


def test_former_members_are_left_out(run: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    shutil.copytree(run, own)
    folder = RunFolder.open(own)
    Membership.of(folder).without("2").save(folder)
    experiment, _ = extend(own, [], tmp_path / "rest", rounds=1)
    experiment.engine.close()
    kept = reopen(RunFolder.open(run))[0].federation.partition["clients"]
    called_as_before = kept[3] | {"name": "3"}
    assert experiment.federation.partition["clients"] == [kept[0], kept[1], called_as_before]


def test_a_new_class_attracts_its_next_holder(run: Path, crosses: str, tmp_path: Path) -> None:
    """Once the class is added, a second holder's embeddings move closer to its prototype."""
    own = tmp_path / "own"
    shutil.copytree(run, own)
    first = newcomer(own, crosses, tmp_path / "first", epochs=5)
    alone = newcomer(own, crosses, tmp_path / "before", epochs=5, seed=1, lam=10, classes="cross")
    folder = RunFolder.open(own)
    Membership.of(folder).with_member(Contribution.load(first)).save(folder)
    pulled = newcomer(own, crosses, tmp_path / "after", epochs=5, seed=1, lam=10, classes="cross")
    goal = read_prototypes(own).over(("cross",)).values[0]

    def apart(path: Path) -> float:
        group = Contribution.load(path).upload["prototypes"]
        return float((group.sums["prototypes"][0] / group.weight[0] - goal).norm())

    assert apart(pulled) < 0.7 * apart(alone)


def test_the_command_and_what_it_refuses(run: Path, crosses: str, tmp_path: Path) -> None:
    new = newcomer(run, crosses, tmp_path / "new")
    done = command("extend", run, new, "--rounds", "1", "--out", tmp_path / "together")
    assert done.code == 0 and f"written to {tmp_path / 'together'}" in done.out
    for words in ((run, new, "--out", run), (tmp_path / "nowhere",), (run, tmp_path / "nowhere")):
        refused = command(
            "extend", *words, *(() if "--out" in words else ("--out", tmp_path / "other"))
        )
        assert refused.code == 2 and refused.err.startswith("error:")
        assert not (tmp_path / "other").exists()
    with pytest.raises(FedProtoError, match="several clients"):
        extend(run, [run], tmp_path / "twice", rounds=1)
    assert not (tmp_path / "twice").exists()
