"""How much of a client's images its prototypes give away: targets, attacks and measures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedproto.audit import decoder, white_box
from fedproto.audit.attacked_run import AttackedRun, OtherData, PlayedRound, embedder
from fedproto.audit.image_quality import nearest, psnr, ssim
from fedproto.core.tensors import divide_by_weight, sum_group
from fedproto.errors import DoesNotApply

#: Prototypes that are attacked per run, those of the fewest images first.
MAX_TARGETS = 12
#: Images of a class from which the attacked one must be told.
MAX_CANDIDATES = 99
#: Images of other people that a decoder is trained on.
MAX_DECODER_IMAGES = 500
GROUP = "prototypes"


@dataclass(frozen=True)
class Target:
    """A prototype that is attacked."""

    client: int
    label: int
    prototype: Tensor  # (d,) as the server decodes it
    images: Tensor  # (n, channels, h, w) the client's, in pixels
    others: Tensor  # (m, channels, h, w) of the class and of nobody in the federation, in pixels


@dataclass(frozen=True)
class Score:
    """How near an image is to what the attacker wants.

    own      to the nearest of the client's images
    mean     to the mean of the client's images
    rank     how many of `candidates` images of the class, the client's n and others, are nearer
             to it than the client's nearest: 0 if the client's is the nearest
    """

    psnr_own: float
    ssim_own: float
    psnr_mean: float
    ssim_mean: float
    rank: int
    candidates: int

    @property
    def identifies(self) -> bool:
        """Whether the nearest image of all candidates is one of the client's."""
        return self.rank == 0


@dataclass(frozen=True)
class Reconstruction:
    """What one attacker makes of all targets."""

    name: str
    images: Tensor  # (targets, channels, h, w) in pixels
    scores: list[Score]


def find_targets(run: AttackedRun, played: PlayedRound, most: int = MAX_TARGETS) -> list[Target]:
    """Return the prototypes of a round, those of the fewest images first; at most so many.

    DoesNotApply if clients send no prototypes, or their inputs are not images.
    """
    run.require_images()
    group = played.uploads.get(GROUP)
    if group is None or GROUP not in group.sums:
        raise DoesNotApply(f"clients of {run.algorithm.name} send no prototypes")
    if group.sums[GROUP].shape[-1] != run.federation.task.dim:
        raise DoesNotApply("what clients send per class is not an embedding")
    prototypes = divide_by_weight(group)[GROUP]
    if run.hides_uploads:  # the server has the prototype of all holders together
        together = divide_by_weight(sum_group(group))[GROUP]
        prototypes = together.expand_as(prototypes)
    counts = run.counts()
    pairs = [(int(counts[i, j]), i, j) for i, j in counts.nonzero().tolist()]
    targets = []
    others: dict[int, OtherData] = {}
    for _, client, label in sorted(pairs)[:most]:
        source = id(run.sources[client])
        if source not in others:
            others[source] = run.other_data(client)
        own = run.images(client)[run.labels(client) == label]
        foreign = others[source].of_class(label)
        targets.append(
            Target(
                client,
                label,
                prototypes[client, label].to(own),  # noise is added in double precision
                run.to_pixels(client, own),
                run.to_pixels(client, foreign),
            )
        )
    return targets


def score_image(image: Tensor, target: Target) -> Score:
    """Return how near an image (channels, h, w) is to the images of the target's client."""
    place, own_distances = nearest(image, target.images)
    candidates = target.others[:MAX_CANDIDATES]
    _, distances = nearest(image, candidates) if len(candidates) else (0, torch.zeros(0))
    closest = target.images[place][None]
    mean = target.images.mean(0, keepdim=True)
    shown = image[None]
    return Score(
        float(psnr(shown, closest)),
        float(ssim(shown, closest)),
        float(psnr(shown, mean)),
        float(ssim(shown, mean)),
        int((distances < own_distances.min()).sum()),
        len(candidates) + len(target.images),
    )


# --- attackers


def guess_class_means(run: AttackedRun, targets: Sequence[Target]) -> Reconstruction:
    """Return what somebody does who knows only the class's name: the mean of others' images."""
    images = torch.stack([target.others.mean(0) for target in targets])
    return _score("class name only", images, targets)


def optimise_with_model(
    run: AttackedRun, played: PlayedRound, targets: Sequence[Target], **options: Any
) -> Reconstruction:
    """Return inputs that the client's model embeds at the prototype, from the class's mean on."""
    images: list[Tensor] = [torch.empty(0)] * len(targets)
    for client, places in _group_by_client(targets).items():
        chosen = [targets[place] for place in places]
        black, white = run.pixel_range(client)
        means = torch.stack([target.others.mean(0) for target in chosen])
        found = white_box.invert_embeddings(
            embedder(run.members[client], played.states[client]),
            torch.stack([target.prototype for target in chosen]),
            black + (white - black) * means,
            black,
            white,
            **options,
        )
        for place, image in zip(places, run.to_pixels(client, found), strict=True):
            images[place] = image
    return _score("client's model, optimised", torch.stack(images), targets)


def decode_with_model(
    run: AttackedRun, played: PlayedRound, targets: Sequence[Target], **options: Any
) -> Reconstruction:
    """Return what a decoder makes of the prototypes that is trained for the client's own model."""
    images: list[Tensor] = [torch.empty(0)] * len(targets)
    for client, places in _group_by_client(targets).items():
        trained = _train_decoder(run, played, client, 0.0, **options)
        prototypes = torch.stack([targets[place].prototype for place in places])
        labels = torch.tensor([targets[place].label for place in places])
        decoded = trained.decode(prototypes, labels.to(prototypes.device))
        for place, image in zip(places, decoded, strict=True):
            images[place] = image
    return _score("client's model, decoder", torch.stack(images), targets)


def decode_without_model(
    run: AttackedRun, played: PlayedRound, targets: Sequence[Target], **options: Any
) -> Reconstruction:
    """Return what another member's decoder makes of the prototypes.

    That member has the most classes of those with the victim's data set. How far its embeddings
    are from the victim's is estimated from the prototypes of all clients.
    """
    noise = _spread_of_clients(played)
    decoders: dict[int, decoder.Decoder] = {}
    images = []
    for target in targets:
        attacker = _choose_attacker(run, target.client)
        if attacker not in decoders:
            decoders[attacker] = _train_decoder(run, played, attacker, noise, **options)
        labels = torch.tensor([target.label], device=target.prototype.device)
        images.append(decoders[attacker].decode(target.prototype[None], labels)[0])
    return _score("other member's model, decoder", torch.stack(images), targets)


def _train_decoder(
    run: AttackedRun, played: PlayedRound, client: int, noise: Tensor | float, **options: Any
) -> decoder.Decoder:
    """Return a decoder for the embeddings of a client's model, trained on nobody's images."""
    data = run.other_data(client)
    rows = _spread(len(data.x), MAX_DECODER_IMAGES)
    embed = embedder(run.members[client], played.states[client])
    with torch.no_grad():
        embeddings = embed(data.x[rows])
    if isinstance(noise, Tensor):
        noise = noise.to(embeddings)
    pixels = run.to_pixels(client, data.x[rows])
    classes = len(run.federation.classes)
    seed = run.config.seed
    labels = data.y[rows]
    return decoder.train_decoder(embeddings, labels, pixels, classes, noise, seed=seed, **options)


def _spread_of_clients(played: PlayedRound) -> Tensor:
    """Return the standard deviation over clients of prototypes of one class, (d,)."""
    group = played.uploads[GROUP]
    prototypes = divide_by_weight(group)[GROUP]
    held = (group.weight > 0).to(prototypes)[..., None]
    holders = held.sum(0)
    means = (prototypes * held).sum(0) / holders.clamp(min=1)
    squares = ((prototypes - means).square() * held).sum((0, 1))
    degrees = (holders - 1).clamp(min=0).sum()
    return (squares / degrees.clamp(min=1)).sqrt()


def _group_by_client(targets: Sequence[Target]) -> dict[int, list[int]]:
    """Return the places of each client's targets."""
    places: dict[int, list[int]] = {}
    for place, target in enumerate(targets):
        places.setdefault(target.client, []).append(place)
    return places


def _choose_attacker(run: AttackedRun, victim: int) -> int:
    """Return the member of the victim's data set with the most classes, other than the victim."""
    members = [
        member
        for member in run.members
        if member.id != victim and run.sources[member.id] is run.sources[victim]
    ]
    if not members:
        raise DoesNotApply(f"client {victim} is the only one of its data set")
    return max(members, key=lambda member: len(member.classes)).id


def _spread(rows: int, most: int) -> Tensor:
    """Return at most so many rows, evenly spread."""
    return torch.linspace(0, rows - 1, min(rows, most)).long()


def _score(name: str, images: Tensor, targets: Sequence[Target]) -> Reconstruction:
    scores = [score_image(image, target) for image, target in zip(images, targets, strict=True)]
    return Reconstruction(name, images, scores)
