"""Key agreement, key derivation, encryption and masks, by the package `cryptography`.

X25519 (RFC 7748), HKDF with SHA-256 (RFC 5869), ChaCha20 and ChaCha20-Poly1305 (RFC 8439).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedproto.errors import Refused

#: count -> so many random bytes. It is `os.urandom`, but for tests.
Draw = Callable[[int], bytes]

KEY_BYTES = 32  # of a public key, a private key, and a key of a cipher
SEED_BYTES = 16  # of the secrets that are shared
TAG_BYTES = 16  # by which an encrypted message is longer
#: Every key is used for one text only, so one nonce serves all.
_NONCE = bytes(12)


def derive_key(secret: bytes, salt: bytes, purpose: bytes) -> bytes:
    """Return a key of 32 bytes that is derived from a secret by HKDF."""
    return HKDF(SHA256(), KEY_BYTES, salt, purpose).derive(secret)


def public_key(private: bytes) -> bytes:
    """Return the public key of an X25519 private key."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agree(private: bytes, public: bytes) -> bytes:
    """Return the secret that two members share: own private key, the other's public key.

    Raises Refused for a public key of low order, with which anybody would know the secret.
    """
    try:
        other = X25519PublicKey.from_public_bytes(public)
        return X25519PrivateKey.from_private_bytes(private).exchange(other)
    except ValueError as error:
        raise Refused("a public key is not a usable X25519 key") from error


def seal(key: bytes, text: bytes, context: bytes, nonce: bytes = _NONCE) -> bytes:
    """Return an encrypted and authenticated text. A key must be used for one text only."""
    return ChaCha20Poly1305(key).encrypt(nonce, text, context)


def unseal(key: bytes, sealed: bytes, context: bytes, nonce: bytes = _NONCE) -> bytes:
    """Return the text; Refused if it was not encrypted with this key in this context."""
    try:
        return ChaCha20Poly1305(key).decrypt(nonce, sealed, context)
    except InvalidTag as error:
        raise Refused("an encrypted share was changed on its way, or is of another sum") from error


def expand_mask(key: bytes, length: int, dtype: np.dtype) -> np.ndarray:
    """Return the mask of a key: `length` whole numbers, uniform over all that the type has.

    It is the key stream of ChaCha20. A key must be used for one mask only.
    """
    stream = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()
    mask = stream.update(bytes(length * dtype.itemsize))
    return np.frombuffer(mask, dtype=dtype.newbyteorder("<"))


def commit(seed: bytes, context: bytes) -> bytes:
    """Return a hash by which a recovered seed can be recognised; a seed is too long to guess."""
    return hashlib.sha256(context + seed).digest()
