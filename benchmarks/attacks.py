"""Wrong uploads: an algorithm of which some clients send something else than they learned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedproto.core import rng
from fedproto.core.combination import Combiner, with_combiner
from fedproto.core.tensors import align_axes, flatten_state
from fedproto.core.types import Algorithm, Group, Recipient, State, Step, Task, Tree, Upload

#: How much larger a scaled upload is than an honest one.
SCALE = 10
#: A server that would move its values beyond this root mean square keeps the old ones: they are
#: worthless by then, and with larger ones nothing would be finite any more.
LARGEST_RMS = 100.0


def flip(values: Tree, weight: Tensor, step: Step) -> Tree:
    """Return all values with the other sign."""
    return {name: -value for name, value in values.items()}


def scale(values: Tree, weight: Tensor, step: Step) -> Tree:
    """Return all values ten times as large."""
    return {name: SCALE * value for name, value in values.items()}


def shuffle(values: Tree, weight: Tensor, step: Step) -> Tree:
    """Return the values of other rows: of the client's next class, or of a layer's next unit."""
    if not weight.dim():
        return {name: value.roll(1, 0) if value.dim() else value for name, value in values.items()}
    is_held = weight > 0
    held_first = (~is_held).long().argsort(stable=True)
    places = torch.arange(len(weight), device=weight.device)
    following = (places + 1) % is_held.sum().clamp(min=1)
    following = torch.where(places < is_held.sum(), following, places)
    source = torch.zeros_like(places).scatter(0, held_first, held_first.gather(0, following))
    return {name: value.index_select(0, source) for name, value in values.items()}


def randomise(values: Tree, weight: Tensor, step: Step) -> Tree:
    """Return noise with the root mean square of each tensor, or of each class's row of it."""
    noise = {}
    start = 0
    for name, value in values.items():
        rows = value.reshape(*weight.shape, -1)
        size = rows.square().mean(-1).sqrt()
        draws = rng.uniform(step.key, value.numel(), start).to(value.dtype).reshape(value.shape)
        start += value.numel()
        noise[name] = (draws - 0.5) * 12**0.5 * align_axes(size, value)  # of variance size²
    return noise


def collude(values: Tree, weight: Tensor, step: Step) -> Tree:
    """Return what the server sent, with the other sign: the same values from all attackers."""
    return {name: -step.received[name] for name in values}


Attack = Callable[[Tree, Tensor, Step], Tree]
ATTACKS: dict[str, Attack] = {
    "flipped": flip,
    "scaled": scale,
    "shuffled": shuffle,
    "random": randomise,
    "colluding": collude,
}
MEANINGS = {
    "flipped": "every value has the other sign",
    "scaled": f"every value is {SCALE} times as large",
    "shuffled": "the prototype of the client's next class; with FedAvg, the weights of a layer's "
    "next unit",
    "random": "noise of the same root mean square, drawn anew by every attacker",
    "colluding": "what the server sent, with the other sign: the same from all attackers",
}


def with_attacks(algorithm: Algorithm, combiners: Sequence[Combiner]) -> Algorithm:
    """Return an algorithm whose server's state says who attacks, how, and how uploads are combined.

    `attack` is the place of the attack in ATTACKS, and `attackers` has 1 for each client that
    attacks; `combiner` is a place in `combiners`. At first nobody attacks, and uploads are combined
    by the first combiner. `learned` is the state of the algorithm itself.
    """
    combined = [with_combiner(algorithm, combiner) for combiner in combiners]

    def init(params: Tree, task: Task) -> State:
        like = next(iter(params.values()))
        return {
            "learned": algorithm.init(params, task),
            "attack": like.new_zeros((), dtype=torch.long),
            "attackers": like.new_zeros(task.clients),
            "combiner": torch.tensor(0),
        }

    def send(server: State, recipient: Recipient) -> State:
        numbers = torch.arange(len(server["attackers"]), device=server["attackers"].device)
        attacks = (server["attackers"] * (numbers == recipient.number)).sum()
        learned = algorithm.send(server["learned"], recipient)
        return {"learned": learned, "order": {"attack": server["attack"], "attacks": attacks}}

    def adopt(own: Tree, received: State) -> Tree:
        return algorithm.adopt(own, received["learned"])

    def upload(step: Step) -> Upload:
        order = step.received["order"]
        step = _inside(step)
        uploads = algorithm.upload(step)
        return {name: _attack(group, step, order) for name, group in uploads.items()}

    def aggregate(server: State, uploads: Upload) -> State:
        before = server["learned"]
        after = combined[int(server["combiner"])].aggregate(before, uploads)
        return server | {"learned": _refuse_huge(before, after)}

    return replace(
        algorithm,
        init=init,
        send=send,
        adopt=adopt,
        loss=lambda step: algorithm.loss(_inside(step)),
        predict=lambda step: algorithm.predict(_inside(step)),
        upload=upload,
        aggregate=aggregate,
        additive=False,
        notes=lambda server: [],
    )


def _inside(step: Step) -> Step:
    """Return the step as the algorithm itself sees it."""
    return step._replace(received=step.received["learned"])


def _attack(group: Group, step: Step, order: Tree) -> Group:
    """Return what the client sends: what it learned or, if it attacks, what its order says."""
    weight = group.weight
    divisor = torch.where(weight > 0, weight, 1)
    values = {}
    for name, sums in group.sums.items():
        values[name] = sums / align_axes(divisor, sums)
    sent = dict(group.sums)
    for place, attack in enumerate(ATTACKS.values()):
        is_ordered = (order["attacks"] > 0) & (order["attack"] == place)
        wrong = attack(values, weight, step)
        for name, value in wrong.items():
            sent[name] = torch.where(is_ordered, align_axes(weight, value) * value, sent[name])
    return group._replace(sums=sent)


def _refuse_huge(before: State, after: State) -> State:
    """Return the state before the round if the one after it has become too large."""
    squares = [value.double().square().mean() for value in flatten_state(after).values()]
    is_huge = ~(torch.stack(squares) <= LARGEST_RMS**2).all()
    return {name: torch.where(is_huge, before[name], value) for name, value in after.items()}
