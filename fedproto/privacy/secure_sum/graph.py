"""Who shares secrets and masks with whom: all with all, or each with a few on a random ring."""

from __future__ import annotations

from fedproto.privacy.secure_sum.primitives import Draw
from fedproto.privacy.secure_sum.shamir import draw_below


def choose_neighbours(members: list[int], neighbours: int, draw: Draw) -> dict[int, frozenset[int]]:
    """Return the neighbours of each member.

    With `neighbours` above 0 and below the number of the others, members are seated at random on a
    ring, and each has those next to it, half of them on either side (Bell et al. 2020).
    """
    count = len(members)
    half = neighbours // 2
    if not half or 2 * half >= count - 1:
        everybody = frozenset(members)
        return {member: everybody - {member} for member in members}
    seats = shuffle(members, draw)
    graph = {}
    for seat, member in enumerate(seats):
        places = [*range(seat - half, seat), *range(seat + 1, seat + half + 1)]
        graph[member] = frozenset(seats[place % count] for place in places)
    return dict(sorted(graph.items()))


def shuffle(members: list[int], draw: Draw) -> list[int]:
    """Return the members in a random order (Fisher and Yates)."""
    order = list(members)
    for last in range(len(order) - 1, 0, -1):
        chosen = draw_below(last + 1, draw)
        order[last], order[chosen] = order[chosen], order[last]
    return order
