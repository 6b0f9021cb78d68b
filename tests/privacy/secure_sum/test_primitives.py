"""Every primitive of secure sums, through our own functions, against published test vectors."""

import numpy as np
import pytest

from fedproto.errors import ConfigError, Refused
from fedproto.privacy.secure_sum.primitives import (
    agree,
    derive_key,
    expand_mask,
    public_key,
    seal,
    unseal,
)
from fedproto.privacy.secure_sum.shamir import (
    PRIME,
    SHARE_BYTES,
    draw_below,
    evaluate_polynomial,
    interpolate,
    recover_secret,
    share_secret,
)
from tests.helpers.secure_sums import SeededDraw

# RFC 7748, section 6.1
ALICE = bytes.fromhex("77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a")
ALICE_PUBLIC = bytes.fromhex("8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a")
BOB = bytes.fromhex("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb")
BOB_PUBLIC = bytes.fromhex("de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f")
SHARED = bytes.fromhex("4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742")
#: Points of order 1, 2, 4 and 8 (and their other encodings), whose product with any key is 0.
LOW_ORDER = [
    bytes(32),
    b"\1" + bytes(31),
    bytes.fromhex("e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"),
    bytes.fromhex("5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157"),
    bytes.fromhex("ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f"),
    bytes.fromhex("edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f"),
    bytes.fromhex("eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f"),
]


def test_keys_are_agreed_as_in_rfc_7748():
    assert public_key(ALICE) == ALICE_PUBLIC
    assert public_key(BOB) == BOB_PUBLIC
    assert agree(ALICE, BOB_PUBLIC) == SHARED
    assert agree(BOB, ALICE_PUBLIC) == SHARED


@pytest.mark.parametrize("point", LOW_ORDER, ids=lambda point: point.hex()[:8])
def test_a_public_key_of_low_order_is_refused(point):
    with pytest.raises(Refused, match="not a usable X25519 key"):
        agree(ALICE, point)


def test_keys_are_derived_as_in_rfc_5869():
    """Appendix A.1, of whose 42 bytes a key is the first 32."""
    secret = bytes([0x0B] * 22)
    salt = bytes(range(13))
    purpose = bytes(range(0xF0, 0xFA))
    expected = "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf"
    assert derive_key(secret, salt, purpose).hex() == expected


def test_masks_are_the_key_stream_of_rfc_8439():
    """Appendix A.1, test vectors 1 and 2: blocks 0 and 1 of the key and nonce of zeros."""
    stream = bytes.fromhex(
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
        "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
        "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f"
    )
    mask = expand_mask(bytes(32), 32, np.dtype("<u4"))
    assert mask.tobytes() == stream
    assert mask[0] == 0xADE0B876
    assert expand_mask(bytes(32), 16, np.dtype("<u8")).tobytes() == stream


def test_texts_are_sealed_as_in_rfc_8439():
    """Section 2.8.2."""
    key = bytes(range(0x80, 0xA0))
    nonce = bytes.fromhex("070000004041424344454647")
    context = bytes.fromhex("50515253c0c1c2c3c4c5c6c7")
    text = (
        b"Ladies and Gentlemen of the class of '99: If I could offer you only one tip for the "
        b"future, sunscreen would be it."
    )
    sealed = seal(key, text, context, nonce)
    assert sealed.hex() == (
        "d31a8d34648e60db7b86afbc53ef7ec2a4aded51296e08fea9e2b5a736ee62d6"
        "3dbea45e8ca9671282fafb69da92728b1a71de0a9e060b2905d6a5b67ecd3b36"
        "92ddbd7f2d778b8c9803aee328091b58fab324e4fad675945585808b4831d7bc"
        "3ff4def08e4b7a9de576d26586cec64b61161ae10b594f09e26a7e902ecbd0600691"
    )
    assert unseal(key, sealed, context, nonce) == text


def test_a_sealed_text_is_refused_if_a_bit_of_it_or_of_its_context_was_changed():
    key = bytes(range(32))
    sealed = seal(key, b"a share", b"from 1 to 2")
    assert unseal(key, sealed, b"from 1 to 2") == b"a share"
    for place in range(len(sealed)):
        changed = bytearray(sealed)
        changed[place] ^= 1
        with pytest.raises(Refused, match="changed on its way"):
            unseal(key, bytes(changed), b"from 1 to 2")
    with pytest.raises(Refused, match="changed on its way"):
        unseal(key, sealed, b"from 2 to 1")


# --- Shamir's shares


def test_shares_are_those_of_rfc_9591():
    """Appendix E.4: the shares of a FROST(P-256, SHA-256) key, of which 2 of 3 are needed."""
    order = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
    secret = 0x8BA9BBA2E0FD8C4767154D35A0B7562244A4AAF6F36C8FB8735FA48B301BD8DE
    slope = 0x80F25E6C0709353E46BFBE882A11BDBB1F8097E46340EB8673B7E14556E6C3A4
    shares = {
        1: 0x0C9C1A0FE806C184ADD50BBDCAC913DDA73E482DAF95DCB9F35DBB0D8A9F7731,
        2: 0x8D8E787BEF0FF6C2F494CA45F4DAD198C6BEE01212D6C84067159C52E1863AD5,
        3: 0x0E80D6E8F6192C003B5488CE1EEC8F5429587D48CF001541E713B2D53C09D928,
    }
    for place, share in shares.items():
        assert evaluate_polynomial([secret, slope], place, order) == share
    for pair in ((1, 2), (1, 3), (2, 3), (3, 1)):
        assert interpolate({place: shares[place] for place in pair}, order) == secret


def test_shares_are_those_of_a_worked_example():
    """Wikipedia's: 1234 + 166 x + 94 x² modulo 1613."""
    values = [evaluate_polynomial([1234, 166, 94], place, 1613) for place in range(1, 7)]
    assert values == [1494, 329, 965, 176, 1188, 775]
    assert interpolate({2: 329, 4: 176, 5: 1188}, 1613) == 1234


def test_the_prime_is_a_prime():
    """By Fermat, for several bases; it is the prime of Poly1305."""
    assert all(pow(base, PRIME - 1, PRIME) == 1 for base in (2, 3, 5, 7, 11))
    assert PRIME > 2**128


@pytest.mark.parametrize("secret", [bytes(16), b"\xff" * 16, bytes(range(16))])
@pytest.mark.parametrize("places", [[1, 2, 3, 4, 5], [2, 3, 7, 11, 65536]])
def test_any_threshold_of_the_shares_gives_the_secret(secret, places):
    shares = share_secret(secret, 3, places, SeededDraw(1))
    assert all(len(share) == SHARE_BYTES for share in shares.values())
    for left_out in range(3):
        chosen = places[left_out : left_out + 3]
        assert recover_secret({place: shares[place] for place in chosen}) == secret


def test_fewer_shares_say_nothing_about_the_secret():
    """With two of three shares, every secret is possible: one third share leads to each."""
    shares = share_secret(bytes(16), 3, [1, 2, 3], SeededDraw(1))
    values = {place: int.from_bytes(share, "big") for place, share in shares.items()}
    for secret in (0, 1, 2**127 + 5):
        with_secret = {0: secret, 1: values[1], 2: values[2]}
        third = 0
        for place, value in with_secret.items():
            factor = value
            for other in with_secret:
                if other != place:
                    factor = factor * (3 - other) * pow(place - other, -1, PRIME) % PRIME
            third = (third + factor) % PRIME
        guessed = {1: shares[1], 2: shares[2], 3: third.to_bytes(SHARE_BYTES, "big")}
        assert recover_secret(guessed) == secret.to_bytes(16, "big")


@pytest.mark.parametrize(("threshold", "places"), [(0, [1]), (3, [1, 2]), (1, [0]), (2, [1, 1])])
def test_a_threshold_that_does_not_fit_the_shares_is_refused(threshold, places):
    with pytest.raises(ConfigError, match="does not fit"):
        share_secret(bytes(16), threshold, places, SeededDraw(1))


def test_a_share_that_cannot_be_one_is_refused():
    with pytest.raises(Refused, match="too large"):
        recover_secret({1: b"\xff" * SHARE_BYTES})


def test_numbers_below_a_limit_are_uniform():
    """Numbers that are too large are drawn again, not wrapped around."""
    draws = iter([b"\xff", b"\xe0", b"\x40"])
    assert draw_below(5, lambda count: next(draws)) == 2  # 7 and 7 are dropped
    draw = SeededDraw(3)
    counts = np.bincount([draw_below(5, draw) for _ in range(5000)], minlength=5)
    chi_square = float(((counts - 1000) ** 2 / 1000).sum())
    assert chi_square < 18.5  # the 99.9th percentile with 4 degrees of freedom
