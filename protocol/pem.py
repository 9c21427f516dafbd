"""Keys and certificates in PEM, and the detection of other formats: for brokers and clients.

Source: ``DefaultSslEngineFactory.PemParser``, RFC 7468.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

_BLOCK: Final = re.compile(r"-----BEGIN ([A-Z0-9 ]+)-----.*?-----END \1-----", re.DOTALL)
_JKS_MAGIC: Final = bytes.fromhex("feedfeed")
_JCEKS_MAGIC: Final = bytes.fromhex("cececece")
_DER_LENGTHS: Final = range(0x80, 0x85)

_FROM_PKCS12: Final = "openssl pkcs12 -in {file} %s -out {file}.pem"
_CONVERSIONS: Final = {
    "keystore": {
        "PKCS12": _FROM_PKCS12 % "-nodes",
        "JKS": "keytool -importkeystore -srckeystore {file} -destkeystore {file}.p12"
        " -deststoretype PKCS12 && openssl pkcs12 -in {file}.p12 -nodes -out {file}.pem",
    },
    "truststore": {
        "PKCS12": _FROM_PKCS12 % "-nokeys",
        "JKS": "keytool -list -rfc -keystore {file} > {file}.pem",
    },
}


def conversion(store: str, form: str, file: str) -> str:
    """Return a hint for an error message: the command that converts a store to PEM."""
    line = _CONVERSIONS[store].get(form)
    return f"; this converts it: {line.format(file=file)}" if line else ""


def store_type(content: bytes) -> str | None:
    """Return ``JKS`` or ``PKCS12`` if the content begins like one, else None."""
    if content[:4] in {_JKS_MAGIC, _JCEKS_MAGIC}:
        return "JKS"
    is_der = len(content) > 1 and content[0] == 0x30 and content[1] in _DER_LENGTHS
    return "PKCS12" if is_der else None


def certificates(text: str) -> list[str]:
    """Return the certificates of a PEM text, without the text between and before them."""
    return [block for label, block in _blocks(text) if label.endswith("CERTIFICATE")]


def private_keys(text: str) -> list[str]:
    """Return the private keys of a PEM text, encrypted or not."""
    return [block for label, block in _blocks(text) if label.endswith("PRIVATE KEY")]


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    for block in _BLOCK.finditer(text):
        yield block[1], f"{block[0]}\n"
