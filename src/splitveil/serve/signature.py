"""Signatures of exports: a manifest is the one that the owner of a key signed.

Ed25519, by the library cryptography, which is loaded only to sign or to verify. The manifest holds
the hashes of all files, so its signature covers the whole export.
"""

import json
import os
from pathlib import Path
from typing import Any

from splitveil.errors import ExportError
from splitveil.io import opened, parse_json, read_bytes

FILE = "manifest.sig"
FORMAT = "splitveil-signature-1"
MAX_KEY = 1 << 14  # bytes of a PEM file
MAX_SIGNATURE = 1 << 12
HOW = (
    "make a pair: openssl genpkey -algorithm ed25519 -out key.pem; "
    "openssl pkey -in key.pem -pubout -out key.pub"
)


def signed_content(identity: str, manifest: bytes) -> bytes:
    """What is signed: the format, the identity and every byte of the manifest."""
    return f"{FORMAT}\n{identity}\n".encode() + manifest


def read_signing_key(path: Path) -> Any:  # noqa: ANN401 - cryptography is not loaded yet
    """The private key in a PEM file that only its owner can read."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        with opened(path, MAX_KEY) as file:
            if os.name == "posix" and os.fstat(file.fileno()).st_mode & 0o077:
                raise ExportError(
                    f"others can read the private key {path}; make it yours: chmod 600 {path}"
                )
            key = load_pem_private_key(file.read(), password=None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as err:
        raise ExportError(f"cannot read the private key {path}: {err}; {HOW}") from err
    if not isinstance(key, Ed25519PrivateKey):
        raise ExportError(f"{path} is not an Ed25519 key; {HOW}")
    return key


def read_public_key(path: Path) -> Any:  # noqa: ANN401
    """The public key in a PEM file."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(read_bytes(path, MAX_KEY))
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as err:
        raise ExportError(f"cannot read the public key {path}: {err}; {HOW}") from err
    if not isinstance(key, Ed25519PublicKey):
        raise ExportError(f"{path} is not an Ed25519 key; {HOW}")
    return key


def signature_json(key: Any, identity: str, manifest: bytes) -> str:  # noqa: ANN401
    """The content of `manifest.sig`."""
    told = {
        "format": FORMAT,
        "key": key.public_key().public_bytes_raw().hex(),
        "signature": key.sign(signed_content(identity, manifest)).hex(),
    }
    return json.dumps(told, indent=2) + "\n"


def check_signature(folder: Path, public_key: Path, identity: str, manifest: bytes) -> None:
    """Refuse an export whose manifest the owner of a key did not sign.

    Args:
        folder: The export.
        public_key: PEM file of an Ed25519 public key.
        identity: The manifest's identity, computed.
        manifest: The bytes of `manifest.json` that are used.

    Raises:
        ExportError: If the signature is missing, broken, of another key, or of another manifest.
    """
    from cryptography.exceptions import InvalidSignature

    key, path = read_public_key(public_key), folder / FILE
    own = key.public_bytes_raw().hex()
    try:
        told = parse_json(read_bytes(path, MAX_SIGNATURE))
        if set(told) != {"format", "key", "signature"} or told["format"] != FORMAT:
            raise ValueError(f"expected a {FORMAT}")
        signer, signature = str(told["key"]), bytes.fromhex(told["signature"])
    except FileNotFoundError as err:
        raise ExportError(
            f"{folder} is not signed: it has no {FILE}, and --verify asks for a signature by "
            f"{public_key}; get the signed export, or sign it: splitveil export RUN --sign KEY"
        ) from err
    except (OSError, ValueError, TypeError) as err:
        raise ExportError(f"{path} is broken: {err}; get the export again") from err
    if signer != own:
        raise ExportError(
            f"{folder} is signed by the key {signer[:64]!r}, but {public_key} is the key {own!r}; "
            "give the public key of whoever exported it, if you trust them"
        )
    try:
        key.verify(signature, signed_content(identity, manifest))
    except InvalidSignature as err:
        raise ExportError(
            f"{folder} is not what was signed: its manifest was changed; get the export again from "
            "where it was made"
        ) from err
