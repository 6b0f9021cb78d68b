"""A finished run as an attack sees it: its clients at the end, their uploads, and other data."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from fedproto.config.settings import Config
from fedproto.core.engine import Cohort
from fedproto.core.federation import Federation, Member
from fedproto.core.local_training import with_copied_buffers
from fedproto.core.tensors import join_uploads, select_rows, split_client, split_groups
from fedproto.core.types import Algorithm, Tree, Upload
from fedproto.data import Source
from fedproto.deploy.server_state import STATE_FILE
from fedproto.errors import DoesNotApply, RunFolderError
from fedproto.runs.assemble import deal
from fedproto.runs.devices import torch_settings
from fedproto.runs.experiment import Experiment, reopen
from fedproto.runs.folder import RunFolder

#: Channels of images that can be shown.
IMAGE_CHANNELS = (1, 3)


@dataclass(frozen=True)
class OtherData:
    """Training rows of a data set that no client of the run has."""

    x: Tensor  # (n, ...) as the model sees them
    y: Tensor  # (n,) numbered as in the federation

    def of_class(self, label: int) -> Tensor:
        """Return the inputs of one class."""
        return self.x[self.y == label]


@dataclass(frozen=True)
class PlayedRound:
    """What the clients do in one more round."""

    uploads: Upload  # with a leading axis over all clients, as the server decodes them
    states: list[Tree]  # each client's parameters and buffers after it


@dataclass(frozen=True, eq=False)
class AttackedRun:
    """A finished run with its data."""

    name: str
    path: Path
    experiment: Experiment  # after the last round
    sources: list[Source]  # of each client

    @property
    def config(self) -> Config:
        return self.experiment.config

    @property
    def algorithm(self) -> Algorithm:
        return self.experiment.algorithm

    @property
    def federation(self) -> Federation:
        return self.experiment.federation

    @property
    def members(self) -> list[Member]:
        return list(self.federation.members)

    @property
    def hides_uploads(self) -> bool:
        """Whether the server sees only the sum of all uploads."""
        return self.algorithm.summation is not None

    def client_state(self, client: int) -> Tree:
        """Return a client's model as it is evaluated at the end of the run."""
        member = self.members[client]
        return self.experiment.as_evaluated(member, self.experiment.client_states()[client])

    def images(self, client: int) -> Tensor:
        """Return a client's training inputs, as its whole model takes them."""
        member = self.members[client]
        if member.frozen is None:
            return member.train.x[member.train.rows]
        source = self.sources[client]
        rows = np.sort(np.array(self.federation.partition["clients"][client]["train"], np.int64))
        return source.tensor(source.train, rows).to(member.train.x)

    def model_inputs(self, client: int, images: Tensor) -> Tensor:
        """Return images as the part of a client's model takes them that is trained."""
        member = self.members[client]
        if member.frozen is None:
            return images
        if any(not name.startswith("head") for name in member.initial):
            raise DoesNotApply("the clients train a projection after a frozen body")
        with torch.no_grad():
            return embedder(member, member.initial)(images)

    def labels(self, client: int) -> Tensor:
        """Return the classes of a client's training inputs."""
        examples = self.members[client].train
        return examples.y[examples.rows]

    def counts(self) -> Tensor:
        """Return the true number of training inputs of each client and class, (clients, C)."""
        classes = len(self.federation.classes)
        counts = [torch.bincount(self.labels(m.id), minlength=classes) for m in self.members]
        return torch.stack(counts)

    def other_data(self, client: int = 0) -> OtherData:
        """Return what nobody in the federation trained on, of the client's own data set."""
        source = self.sources[client]
        stored = self.federation.partition["clients"]
        used = [np.zeros(0, np.int64)]
        for number, entry in enumerate(stored):
            if self.sources[number] is source:
                used.append(np.array(entry["train"], np.int64))
                if source.validation is None:
                    used.append(np.array(entry.get("validation", []), np.int64))
        is_free = np.ones(len(source.train.y), bool)
        is_free[np.concatenate(used)] = False
        rows = np.flatnonzero(is_free)
        like = self.members[client].train.x
        x = source.tensor(source.train, rows).to(like)
        names = list(self.federation.classes)
        places = torch.tensor([names.index(name) for name in source.classes])
        y = places[torch.from_numpy(source.train.y[rows])].to(like.device)
        return OtherData(x, y)

    def require_images(self) -> None:
        """Raise DoesNotApply unless the clients' inputs are images that can be reconstructed."""
        for member in self.members:
            shape = member.input_shape
            if len(shape) != 3 or shape[0] not in IMAGE_CHANNELS:
                raise DoesNotApply(
                    f"the clients' inputs have the shape {shape}, not that of images"
                )

    def pixel_range(self, client: int) -> tuple[Tensor, Tensor]:
        """Return the values of black and white pixels as the model sees them, (channels, 1, 1)."""
        preprocessing = self.members[client].preprocessing
        like = self.members[client].train.x
        mean = torch.tensor(preprocessing.mean).to(like)[:, None, None]
        std = torch.tensor(preprocessing.std).to(like)[:, None, None]
        return -mean / std, (1 - mean) / std

    def to_pixels(self, client: int, x: Tensor) -> Tensor:
        """Return inputs of the model as images with values from 0 to 1."""
        black, white = self.pixel_range(client)
        return ((x - black) / (white - black)).clamp(0, 1)

    def computing(self) -> AbstractContextManager[None]:
        """Use the run's settings of torch inside a `with` block."""
        return torch_settings(self.config.threads, self.config.precision)

    def play_round(self) -> PlayedRound:
        """Let all clients train one more round; return every single upload.

        Everything that protects uploads on their way is part of it, with fresh noise.
        """
        experiment = self.experiment
        (copy,) = share_engine([self.config], self.algorithm, [self.federation])
        copy.engine.restore(0, experiment.engine.export(experiment.place))
        nobody = torch.zeros(0, dtype=torch.int64)
        everybody = Cohort(torch.arange(len(self.members)), nobody, nobody)
        speakers = []
        uploads = []
        with self.computing():
            server = experiment.progress.server
            for chunk in copy.engine.train(self.config.rounds + 1, [server], [everybody]):
                if chunk.uploads:
                    speakers.append(chunk.speakers)
                    uploads.append(chunk.uploads)
        joined: Upload = {}
        if uploads:
            joined = select_rows(join_uploads(uploads), torch.cat(speakers).argsort())
        whole_states = split_groups(copy.engine.export(0))
        states = [split_client(whole_states[str(member.id)])[0] for member in self.members]
        return PlayedRound(joined, states)


def embedder(member: Member, state: Tree) -> Callable[[Tensor], Tensor]:
    """Return the function from a client's inputs to their embeddings, in eval mode.

    state  of the part of its model that is trained
    """
    module = member.whole_module
    visible = with_copied_buffers(module, member.whole_state(state))

    def embed(x: Tensor) -> Tensor:
        module.eval()
        features, _ = functional_call(module, visible, (x,))
        return features

    return embed


def share_engine(
    configs: list[Config], algorithm: Algorithm, federations: list[Federation]
) -> list[Experiment]:
    """Return experiments that one engine of this process trains, and that keep single uploads."""
    is_single = algorithm.summation is None  # what is hidden stays so
    single = replace(algorithm, additive=False) if is_single else algorithm
    here = [
        replace(config, engine=_engine_in_process(config), workers=None, stack=None)
        for config in configs
    ]
    return Experiment.share_engine(here, single, federations)


def _engine_in_process(config: Config) -> Literal["reference", "vectorised"]:
    """Return the engine that trains in this process as the run's engine does in several."""
    return "reference" if config.engine == "reference" else "vectorised"


def open_run(path: Path, name: str | None = None) -> AttackedRun:
    """Return a finished run that can be attacked; RunFolderError says why it cannot."""
    if (path / STATE_FILE).exists():
        raise RunFolderError(
            f"{path} is the folder of a deployed server, which has no client's data to compare an "
            "attack with: audit a simulated run with the same settings"
        )
    folder = RunFolder.open(path)
    if folder.result() is None:
        raise RunFolderError(
            f"{path} has not finished, so there is nothing to audit yet: "
            f"`fedproto resume {path}` finishes it"
        )
    if not folder.has_checkpoint():
        raise RunFolderError(
            f"{path} keeps no models, because it was run with checkpoint_every=0: "
            "run it again with checkpoint_every above 0"
        )
    loaded: dict[str, Source] = {}
    experiment, _ = reopen(folder, loaded)
    clients = len(experiment.federation.members)
    parts = deal(experiment.config.dataset, clients, "dataset")
    sources = [loaded[str(part)] for part in parts]
    return AttackedRun(name or path.resolve().name, path, experiment, sources)
