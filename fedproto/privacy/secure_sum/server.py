"""What the server does in each stage of a secure sum, given the bytes that members send.

    for stage in STAGES:
        server.receive(number, message)  for each message of the stage that arrives
        replies = server.close()         by member; who is not in it, is out
    server.total                         the sum, over the members of `server.arrived`

What a member sends is checked: `receive` raises Refused, and the sum goes on without the sender.
`close` raises TrainingError if too few members are left. Then this sum is over: a new one needs new
keys, so that nobody ever gives shares for both outcomes of one.
"""

from __future__ import annotations

import os

import numpy as np

from fedproto.errors import Refused, TrainingError
from fedproto.privacy.secure_sum import messages
from fedproto.privacy.secure_sum.graph import choose_neighbours
from fedproto.privacy.secure_sum.member import (
    add_signed,
    masking_private,
    masking_public,
    own_mask,
    pair_mask,
    place_of,
    refuse_repeated_keys,
)
from fedproto.privacy.secure_sum.messages import COMMITMENT_BYTES, SEALED_BYTES, PublicKeys
from fedproto.privacy.secure_sum.primitives import Draw, agree, commit
from fedproto.privacy.secure_sum.shamir import SHARE_BYTES, recover_secret
from fedproto.privacy.secure_sum.terms import SumTerms

STAGES = ("keys", "shares", "masked", "unmasking")
_OVER = "over"


class SumServer:
    """The server of one secure sum.

    neighbours  with how many others each member shares secrets and masks; 0: with all
    """

    def __init__(
        self, terms: SumTerms, members: int, neighbours: int = 0, draw: Draw = os.urandom
    ) -> None:
        self.terms = terms
        self.members = members  # numbered from 0
        self.stage = STAGES[0]
        self.total: np.ndarray | None = None  # (length,) float64, once the sum is unmasked
        self._neighbours = neighbours
        self._draw = draw
        self._graph: dict[int, frozenset[int]] = {}  # each with its neighbours, without itself
        self._keys: dict[int, PublicKeys] = {}
        self._commitments: dict[int, bytes] = {}
        self._sealed: dict[int, dict[int, bytes]] = {}  # by sender and recipient
        self._arrived: set[int] = set()
        self._masked = np.zeros(terms.length, terms.fixed_point.dtype)
        self._given: dict[int, dict[int, bytes]] = {}  # shares, by who gave them and whose they are

    @property
    def arrived(self) -> list[int]:
        """The members whose masked values arrived: those in the sum."""
        return sorted(self._arrived)

    def receive(self, number: int, message: bytes) -> None:
        """Take a member's message of this stage; Refused if it cannot be used."""
        if self.stage == "keys":
            self._receive_keys(number, message)
        elif self.stage == "shares":
            self._receive_shares(number, message)
        elif self.stage == "masked":
            self._receive_masked(number, message)
        elif self.stage == "unmasking":
            self._receive_unmasking(number, message)
        else:
            raise Refused("this secure sum is over")

    def close(self) -> dict[int, bytes]:
        """End the stage; return what each member that is still in the sum is sent next.

        Raises TrainingError if too few members have reached the end of the stage.
        """
        stage = self.stage
        self.stage = _OVER  # unless the next one is reached
        if stage == "keys":
            replies = self._close_keys()
        elif stage == "shares":
            replies = self._close_shares()
        elif stage == "masked":
            replies = self._close_masked()
        elif stage == "unmasking":
            self._unmask()
            return {}
        else:
            raise Refused("this secure sum is over")
        self.stage = STAGES[STAGES.index(stage) + 1]
        return replies

    # --- keys

    def _receive_keys(self, number: int, message: bytes) -> None:
        if not 0 <= number < self.members:
            raise Refused(f"there is no member {number} in this secure sum")
        keys = messages.unpack_keys(message)
        self._refuse_second(number in self._keys)
        for public in keys:
            agree(b"\1" * 32, public)  # refuses points of low order, whatever the private key
        refuse_repeated_keys(self._keys | {number: keys})
        self._keys[number] = keys

    def _close_keys(self) -> dict[int, bytes]:
        self._refuse_few(len(self._keys), "sent keys")
        self._graph = choose_neighbours(sorted(self._keys), self._neighbours, self._draw)
        replies = {}
        for number, neighbours in self._graph.items():
            listed = {each: messages.pack_keys(self._keys[each]) for each in neighbours | {number}}
            replies[number] = messages.pack_entries(listed)
        return replies

    # --- shares

    def _receive_shares(self, number: int, message: bytes) -> None:
        if number not in self._graph:
            raise Refused("shares came from a member that sent no keys")
        self._refuse_second(number in self._sealed)
        sealed = messages.unpack_entries(message[COMMITMENT_BYTES:], SEALED_BYTES)
        if sealed.keys() != self._graph[number]:
            raise Refused("its shares are not for its neighbours, one for each")
        self._commitments[number] = message[:COMMITMENT_BYTES]
        self._sealed[number] = sealed

    def _close_shares(self) -> dict[int, bytes]:
        self._refuse_few(len(self._sealed), "sent shares")
        replies = {}
        for number in self._sealed:
            senders = self._graph[number] & self._sealed.keys()
            delivered = {sender: self._sealed[sender][number] for sender in senders}
            replies[number] = messages.pack_entries(delivered)
        return replies

    # --- masked values

    def _receive_masked(self, number: int, message: bytes) -> None:
        if number not in self._sealed:
            raise Refused("masked values came from a member that sent no shares")
        self._refuse_second(number in self._arrived)
        dtype = self.terms.fixed_point.dtype
        self._masked += messages.unpack_masked(message, self.terms.length, dtype)
        self._arrived.add(number)

    def _close_masked(self) -> dict[int, bytes]:
        self._refuse_few(len(self._arrived), "sent masked values")
        replies = {}
        for number in self._arrived:
            own_group = self._graph[number] | {number}
            replies[number] = messages.pack_numbers(own_group & self._arrived)
        return replies

    # --- unmasking

    def _receive_unmasking(self, number: int, message: bytes) -> None:
        if number not in self._arrived:
            raise Refused("shares to unmask came from a member that is not in the sum")
        self._refuse_second(number in self._given)
        given = messages.unpack_entries(message, SHARE_BYTES)
        if given.keys() != self._shared_with(number):
            raise Refused("its shares to unmask are not those it was given")
        self._given[number] = given

    def _unmask(self) -> None:
        """Take the masks off the sum: those of members in it, and those with members that left."""
        self._refuse_few(len(self._given), "helped to unmask")
        total = self._masked
        for number in self.arrived:
            seed = self._recover(number)
            if commit(seed, self.terms.session) != self._commitments[number]:
                raise self._spoiled(number)
            total = total - own_mask(self.terms, seed)
        for number in sorted(self._sealed.keys() - self._arrived):
            total = self._take_off_pairs(total, number)
        self.total = self.terms.fixed_point.decode(total)
        self._given = {}
        self._sealed = {}

    def _take_off_pairs(self, total: np.ndarray, gone: int) -> np.ndarray:
        """Return the sum without the masks that members in it share with one that is gone."""
        partners = sorted(self._graph[gone] & self._arrived)
        if not partners:
            return total
        seed = self._recover(gone)
        if masking_public(seed, self.terms) != self._keys[gone].masking:
            raise self._spoiled(gone)
        private = masking_private(seed, self.terms)
        for partner in partners:
            mask = pair_mask(self.terms, private, self._keys[partner].masking)
            total = add_signed(total, mask, partner > gone)
        return total

    def _recover(self, number: int) -> bytes:
        """Return the secret of a member that its neighbours gave shares of."""
        shares: dict[int, bytes] = {}
        for holder in sorted(self._shared_with(number) & self._given.keys()):
            if len(shares) < self.terms.threshold:
                shares[place_of(holder)] = self._given[holder][number]
        self._refuse_few(len(shares), "gave a share of a member's secret")
        try:
            return recover_secret(shares)
        except Refused as error:
            raise self._spoiled(number) from error

    def _shared_with(self, number: int) -> frozenset[int]:
        """Return the members that hold shares of a member's secrets, itself among them.

        They are also those whose secrets the member holds shares of.
        """
        return (self._graph[number] | {number}) & self._sealed.keys()

    # --- refusals

    def _refuse_second(self, is_second: bool) -> None:
        if is_second:
            raise Refused(f"it has sent its {self.stage} of this secure sum before")

    def _refuse_few(self, count: int, what: str) -> None:
        if count < self.terms.threshold:
            raise TrainingError(
                f"only {count} of {self.members} members {what}, but a secure sum needs "
                f"{self.terms.threshold}: it is given up, and nothing is revealed"
            )

    def _spoiled(self, number: int) -> TrainingError:
        return TrainingError(
            f"the shares of member {number}'s secret do not give that secret, so somebody sent a "
            "wrong one: this secure sum is given up"
        )
