"""A member's stage as plain fields, so that a file can hold it between two messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedproto.errors import MessageError
from fedproto.privacy.secure_sum.fixed_point import MAX_FRACTION_BITS, SIZES, FixedPoint
from fedproto.privacy.secure_sum.member import KeyStage, MaskedStage, ShareStage
from fedproto.privacy.secure_sum.messages import PublicKeys, SharesOf
from fedproto.privacy.secure_sum.terms import MAX_MEMBERS, SumTerms, check_threshold

Stage = KeyStage | ShareStage | MaskedStage
Fields = dict[str, Any]
#: Values of one vector at most.
_MAX_LENGTH = 2**31 - 1
#: The accepted values of each whole number of the terms.
_BOUNDS = {
    "members": (1, MAX_MEMBERS),
    "threshold": (2, MAX_MEMBERS),
    "length": (1, _MAX_LENGTH),
    "bits": (min(SIZES), max(SIZES)),
    "fraction_bits": (-1000, MAX_FRACTION_BITS),
}


def pack_terms(terms: SumTerms) -> Fields:
    """Return the terms as fields, which also travel."""
    return {
        "session": terms.session.hex(),
        "threshold": terms.threshold,
        "length": terms.length,
        "bits": terms.fixed_point.bits,
        "fraction_bits": terms.fixed_point.fraction_bits,
        "largest": terms.fixed_point.largest,
        "members": terms.fixed_point.members,
    }


def unpack_terms(fields: Mapping[str, Any]) -> SumTerms:
    """Return the terms that anybody may have sent; MessageError if a member must not accept them.

    They must not allow an overflow, nor a threshold without a majority.
    """
    for name, (least, most) in _BOUNDS.items():
        value = fields.get(name)
        if type(value) is not int or not least <= value <= most:
            raise MessageError(
                f"the terms of a secure sum need a whole number from {least} to {most} as {name!r}"
            )
    largest: Any = fields.get("largest")
    if type(largest) not in (int, float) or not 0 < float(largest) < float("inf"):
        raise MessageError("the terms of a secure sum need a number above 0 as 'largest'")
    fixed_point = FixedPoint(
        fields["bits"], fields["fraction_bits"], float(largest), fields["members"]
    )
    if fixed_point.bits not in SIZES or not fixed_point.cannot_overflow:
        raise MessageError("the terms of a secure sum allow an overflow")
    check_threshold(fields["members"], fields["threshold"])
    session = _unpack_bytes(fields.get("session"))
    return SumTerms(session, fields["threshold"], fields["length"], fixed_point)


def pack_stage(stage: Stage) -> Fields:
    """Return all that a stage holds; it is secret."""
    fields: Fields = {"terms": pack_terms(stage.terms), "number": stage.number}
    if isinstance(stage, MaskedStage):
        fields["shares"] = _pack_pairs(stage.shares)
        return fields
    fields["sharing_private"] = stage.sharing_private.hex()
    fields["masking_seed"] = stage.masking_seed.hex()
    if isinstance(stage, ShareStage):
        fields["own_seed"] = stage.own_seed.hex()
        fields["kept"] = [share.hex() for share in stage.kept]
        fields["keys"] = _pack_pairs(stage.keys)
    return fields


def unpack_stage(fields: Mapping[str, Any]) -> Stage:
    """Return the stage that `pack_stage` was given; KeyError, TypeError or ValueError if it fails.

    Which one it is, shows in its fields.
    """
    terms = unpack_terms(fields["terms"])
    number = fields["number"]
    if "shares" in fields:
        shares = {}
        for member, pair in _unpack_pairs(fields["shares"]).items():
            shares[member] = SharesOf(*pair)
        return MaskedStage(terms, number, shares)
    sharing_private = _unpack_bytes(fields["sharing_private"])
    masking_seed = _unpack_bytes(fields["masking_seed"])
    if "own_seed" not in fields:
        return KeyStage(terms, number, sharing_private, masking_seed)
    kept = SharesOf(*[_unpack_bytes(share) for share in fields["kept"]])
    keys = {}
    for member, pair in _unpack_pairs(fields["keys"]).items():
        keys[member] = PublicKeys(*pair)
    own_seed = _unpack_bytes(fields["own_seed"])
    return ShareStage(terms, number, sharing_private, masking_seed, own_seed, kept, keys)


def _pack_pairs(pairs: Mapping[int, tuple[bytes, bytes]]) -> Fields:
    return {str(member): [part.hex() for part in pair] for member, pair in pairs.items()}


def _unpack_pairs(pairs: Mapping[str, list[str]]) -> dict[int, list[bytes]]:
    unpacked = {}
    for member, pair in pairs.items():
        unpacked[int(member)] = [_unpack_bytes(part) for part in pair]
    return unpacked


def _unpack_bytes(text: object) -> bytes:
    if not isinstance(text, str):
        raise MessageError("the terms of a secure sum need a text of hexadecimal digits")
    try:
        return bytes.fromhex(text)
    except ValueError as error:
        raise MessageError("the terms of a secure sum need hexadecimal digits") from error
