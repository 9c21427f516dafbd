"""Webhooks with entries of the history, as the Standard Webhooks specification describes them.

The body of a request is the entry's JSON object. ``webhook-id`` is an idempotency key: cluster id,
partition and offset, which are the same in each attempt. ``webhook-signature`` is ``v1,`` and the
base64 text of HMAC-SHA256 of id, timestamp and body, joined by dots.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import click

from fencepost.cli.history_sink import DeliveryError, Exported, check_url
from fencepost.coordinator.history.entries import encode_value

TIMEOUT_S: Final = 10.0
"""The limit of one attempt, well below the session timeout of the group's member."""

PREFIX: Final = "whsec_"
"""The prefix of a key that is written in base64. A key file without this prefix contains the key
itself."""

_TEMPORARY = frozenset({408, 425, 429, 500, 502, 503, 504})


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_args: Any, **_more: Any) -> None:
        """Refuse every redirect, since the request would be repeated without its body."""


class WebhookSink:
    """Sends each entry in a POST request to ``url``."""

    max_batch = 1

    def __init__(self, url: str, cluster_id: str, secret_file: Path | None) -> None:
        check_url(url, "--webhook")
        self._url, self._cluster_id = url, cluster_id
        self._key = None if secret_file is None else _key(secret_file)
        self._opener = urllib.request.build_opener(_NoRedirect)

    def reset(self) -> None:
        """Do nothing: a webhook has no state between entries."""

    def observe(self, entry: Exported) -> None:
        """Do nothing: a webhook has no state between entries."""

    def prepare(self, batch: Sequence[Exported]) -> Callable[[], None]:
        """Return a function that sends the single entry of ``batch``."""
        (exported,) = batch
        key = exported.id(self._cluster_id)
        body = encode_value(exported.entry)
        return lambda: self._post(key, body)

    def _post(self, key: str, body: bytes) -> None:
        headers = {"Content-Type": "application/json", "User-Agent": "fencepost"}
        headers |= signed(key, int(time.time()), body, self._key)
        request = urllib.request.Request(self._url, body, headers, method="POST")  # noqa: S310 - the scheme is checked
        try:
            with self._opener.open(request, timeout=TIMEOUT_S) as response:
                response.read(1)
        except urllib.error.HTTPError as error:
            with error:
                pause = error.headers.get("Retry-After", "")
            raise DeliveryError(
                f"{self._url} responded {error.code} {error.reason} to entry {key}",
                is_final=error.code not in _TEMPORARY,
                pause_s=float(pause) if pause.isascii() and pause.isdigit() else None,
            ) from error
        except (OSError, http.client.HTTPException) as error:
            cause = getattr(error, "reason", None) or error
            raise DeliveryError(
                f"{self._url} cannot be reached: {cause or type(error).__name__}"
            ) from error


def signed(key: str, now_s: int, body: bytes, secret: bytes | None) -> dict[str, str]:
    """Return the headers of Standard Webhooks; the signature only if there is a ``secret``."""
    headers = {"webhook-id": key, "webhook-timestamp": str(now_s)}
    if secret is not None:
        content = f"{key}.{now_s}.".encode() + body
        mac = base64.b64encode(hmac.digest(secret, content, hashlib.sha256)).decode()
        headers["webhook-signature"] = f"v1,{mac}"
    return headers


def _key(path: Path) -> bytes:
    text = path.read_bytes().strip()
    try:
        key = (
            base64.b64decode(text.removeprefix(PREFIX.encode()), validate=True)
            if text.startswith(PREFIX.encode())
            else text
        )
    except binascii.Error as error:
        raise click.BadParameter(
            f"{path}: the key after {PREFIX} is not base64", param_hint="--secret-file"
        ) from error
    if not key:
        raise click.BadParameter(f"{path} is empty", param_hint="--secret-file")
    return key
