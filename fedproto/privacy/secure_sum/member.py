"""What a member does in each stage of a secure sum.

Each stage is a value that holds the secrets which later stages need, and no others. Its one method
returns the next stage and the bytes that are sent. What the server sends is checked first; Refused
ends the member's part in this sum.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import numpy as np

from fedproto.errors import Refused
from fedproto.privacy.secure_sum import messages
from fedproto.privacy.secure_sum.messages import PublicKeys, SharesOf
from fedproto.privacy.secure_sum.primitives import (
    SEED_BYTES,
    Draw,
    agree,
    commit,
    derive_key,
    expand_mask,
    public_key,
    seal,
    unseal,
)
from fedproto.privacy.secure_sum.shamir import share_secret
from fedproto.privacy.secure_sum.terms import SumTerms, is_majority

_MASKING_KEY = b"fedproto secure sum: masking key"
_OWN_MASK = b"fedproto secure sum: own mask"
_PAIR_MASK = b"fedproto secure sum: mask of a pair"
_SEALING = b"fedproto secure sum: encryption of shares"


@dataclass(frozen=True)
class KeyStage:
    """A member that has made its keys."""

    terms: SumTerms
    number: int
    sharing_private: bytes = field(repr=False)
    masking_seed: bytes = field(repr=False)

    def share(self, key_list: bytes, draw: Draw = os.urandom) -> tuple[ShareStage, bytes]:
        """Return what is sent to the neighbours: shares of both secrets, encrypted for each.

        key_list  the public keys of the neighbours and of this member, as the server sends them
        """
        keys = self._read_keys(key_list)
        own_seed = draw(SEED_BYTES)
        places = [place_of(number) for number in keys]
        threshold = self.terms.threshold
        masking_shares = share_secret(self.masking_seed, threshold, places, draw)
        own_shares = share_secret(own_seed, threshold, places, draw)
        sealed = {}
        for number, other in keys.items():
            place = place_of(number)
            if number != self.number:
                key = _sealing_key(self.terms, self.sharing_private, other, self.number, number)
                text = masking_shares[place] + own_shares[place]
                sealed[number] = seal(key, text, _route(self.number, number))
        own_place = place_of(self.number)
        kept = SharesOf(masking_shares[own_place], own_shares[own_place])
        stage = ShareStage(
            self.terms,
            self.number,
            self.sharing_private,
            self.masking_seed,
            own_seed,
            kept,
            {number: other for number, other in keys.items() if number != self.number},
        )
        commitment = commit(own_seed, self.terms.session)
        return stage, commitment + messages.pack_entries(sealed)

    def _read_keys(self, key_list: bytes) -> dict[int, PublicKeys]:
        """Return the keys of all that this member shares secrets with, itself among them."""
        entries = messages.unpack_entries(key_list, messages.KEYS_BYTES)
        keys = {number: messages.unpack_keys(entry) for number, entry in entries.items()}
        own = PublicKeys(
            public_key(self.sharing_private), masking_public(self.masking_seed, self.terms)
        )
        if keys.get(self.number) != own:
            raise Refused("the server sent other keys of this member than it had made")
        refuse_repeated_keys(keys)
        if not is_majority(self.terms.threshold, len(keys)):
            raise Refused(
                f"the server sent the keys of {len(keys)} members, of which a threshold of "
                f"{self.terms.threshold} is not a majority"
            )
        return keys


def start_member(terms: SumTerms, number: int, draw: Draw = os.urandom) -> tuple[KeyStage, bytes]:
    """Return a member with fresh keys, and the public ones, which are sent."""
    stage = KeyStage(terms, number, draw(32), draw(SEED_BYTES))
    keys = PublicKeys(public_key(stage.sharing_private), masking_public(stage.masking_seed, terms))
    return stage, messages.pack_keys(keys)


@dataclass(frozen=True)
class ShareStage:
    """A member that has given its neighbours shares of its secrets."""

    terms: SumTerms
    number: int
    sharing_private: bytes = field(repr=False)
    masking_seed: bytes = field(repr=False)
    own_seed: bytes = field(repr=False)
    kept: SharesOf = field(repr=False)  # of its own secrets
    keys: dict[int, PublicKeys]  # of its neighbours

    def mask(self, values: np.ndarray, delivered: bytes) -> tuple[MaskedStage, bytes]:
        """Return the masked values, which are sent.

        values     (length,) floating-point numbers
        delivered  the shares that this member was given, as the server passes them on
        """
        if values.shape != (self.terms.length,):
            raise Refused(f"{values.shape} values are not the {self.terms.length} that are added")
        total = self.terms.fixed_point.encode(values)
        shares = self._read_shares(delivered)
        total += own_mask(self.terms, self.own_seed)
        private = masking_private(self.masking_seed, self.terms)
        for number in shares:
            if number != self.number:
                mask = pair_mask(self.terms, private, self.keys[number].masking)
                total = add_signed(total, mask, self.number < number)
        return MaskedStage(self.terms, self.number, shares), total.tobytes()

    def _read_shares(self, delivered: bytes) -> dict[int, SharesOf]:
        """Return the shares of all that have given some, this member's own among them."""
        entries = messages.unpack_entries(delivered, messages.SEALED_BYTES)
        shares = {self.number: self.kept}
        for number, sealed in entries.items():
            if number not in self.keys:
                raise Refused("the server passed on shares of a member that is not a neighbour")
            other = self.keys[number]
            key = _sealing_key(self.terms, self.sharing_private, other, number, self.number)
            shares[number] = messages.unpack_shares(
                unseal(key, sealed, _route(number, self.number))
            )
        if len(shares) < self.terms.threshold:
            raise Refused(
                f"only {len(shares)} members have given shares, but {self.terms.threshold} are "
                "needed to unmask a sum"
            )
        return shares


@dataclass(frozen=True)
class MaskedStage:
    """A member that has sent its masked values; it holds shares of the others' secrets only."""

    terms: SumTerms
    number: int
    shares: dict[int, SharesOf] = field(repr=False)

    def unmask(self, arrived: bytes) -> bytes:
        """Return one share of each member that gave some. It must be called once only.

        Of members whose masked values arrived it is a share of the own mask, of the others a share
        of the masking key. A member never gives away both.

        arrived  those whose masked values arrived, as the server says
        """
        numbers = messages.unpack_numbers(arrived)
        if not numbers <= self.shares.keys():
            raise Refused("the server names a member that gave no shares")
        if self.number not in numbers or len(numbers) < self.terms.threshold:
            raise Refused(
                f"the server wants the sum of {len(numbers)} members, but at least "
                f"{self.terms.threshold} are needed, and this member among them"
            )
        given = {}
        for number, shares in self.shares.items():
            given[number] = shares.own if number in numbers else shares.masking
        return messages.pack_entries(given)


# --- what members and the server derive from secrets


def place_of(number: int) -> int:
    """Return the place of a member's shares: 0 is that of the secret."""
    return number + 1


def refuse_repeated_keys(keys: dict[int, PublicKeys]) -> None:
    """Raise Refused if a public key appears twice: its holder would count as two members."""
    seen: set[bytes] = set()
    for pair in keys.values():
        if seen & set(pair):
            raise Refused("two members have the same public key")
        seen |= set(pair)


def masking_private(seed: bytes, terms: SumTerms) -> bytes:
    """Return the private key that masks with other members are derived from."""
    return derive_key(seed, terms.session, _MASKING_KEY)


def masking_public(seed: bytes, terms: SumTerms) -> bytes:
    """Return the public key that belongs to `masking_private`."""
    return public_key(masking_private(seed, terms))


def own_mask(terms: SumTerms, seed: bytes) -> np.ndarray:
    """Return a member's own mask."""
    key = derive_key(seed, terms.session, _OWN_MASK)
    return expand_mask(key, terms.length, terms.fixed_point.dtype)


def pair_mask(terms: SumTerms, private: bytes, public: bytes) -> np.ndarray:
    """Return the mask of two members, of which one private and one public key are known."""
    key = derive_key(agree(private, public), terms.session, _PAIR_MASK)
    return expand_mask(key, terms.length, terms.fixed_point.dtype)


def add_signed(total: np.ndarray, mask: np.ndarray, positive: bool) -> np.ndarray:
    """Return total ± mask, modulo the size of the numbers.

    Of two members, the one with the smaller number adds their mask, and the other subtracts it.
    """
    return total + mask if positive else total - mask


def _route(sender: int, recipient: int) -> bytes:
    return messages.pack_entries({sender: b""}) + messages.pack_entries({recipient: b""})


def _sealing_key(
    terms: SumTerms, private: bytes, other: PublicKeys, sender: int, recipient: int
) -> bytes:
    """Return the key of the one message from `sender` to `recipient` in this sum."""
    purpose = _SEALING + _route(sender, recipient)
    return derive_key(agree(private, other.sharing), terms.session, purpose)
