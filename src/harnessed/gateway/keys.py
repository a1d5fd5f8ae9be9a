"""Scoped, signed keys: who may do what at the gateway, checked without a look-up.

A key is `sk-hd.<scope>.<subject>.<signature>`; it looks like an OpenAI key because some clients insist on that. The
signature is HMAC-SHA256 under the gateway's secret, a file that only its owner can read and that outlives restarts.
Whether an attempt is still live is the store's knowledge, not the key's. `app.py` and `api.py` read keys; `api.py` and
the command line make them.
"""

import base64
import hashlib
import hmac
import os
import re
import secrets
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from harnessed.config import ConfigError

SECRET = "gateway.secret"
"""Name of its file."""
SECRET_BYTES = 32
_MOST_REMEMBERED = 1_000
"""Keys that need no second check: every call of an attempt comes with the same one."""
_BEARER = re.compile(r"(?:bearer\b\s*)?(\S*)", re.IGNORECASE)


class Scope(StrEnum):
    ADMIN = "admin"
    """Trainer, controller, people: every control route."""
    ATTEMPT = "attempt"
    """The agent: model calls and events of one attempt."""
    EVALUATOR = "evaluator"
    """The reward of one rollout."""
    METRICS = "metrics"
    """Whoever scrapes: `GET /metrics`."""


@dataclass(frozen=True, slots=True)
class Key:
    scope: Scope
    rollout: str = ""
    """Of attempt and evaluator keys."""
    attempt: int = 0
    """Of attempt keys; numbered from 1."""


ADMIN = Key(Scope.ADMIN)
METRICS = Key(Scope.METRICS)


def bearer_key(header: str) -> str:
    """The key in an Authorization header, with or without the name of its scheme; empty if it is of another scheme."""
    found = _BEARER.fullmatch(header.strip())
    return found[1] if found else ""


class Keyring:
    """Signs keys and reads them back."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._read_before: dict[str, Key] = {}

    @classmethod
    def from_file(cls, path: Path) -> "Keyring":
        """The keyring of a secret file, which is made (mode 0600) if it does not exist."""
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return cls._read(path)
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(SECRET_BYTES))
        return cls._read(path)

    @classmethod
    def _read(cls, path: Path) -> "Keyring":
        secret = path.read_bytes()
        if len(secret) < SECRET_BYTES:  # its writer was killed, or the disk was full: everybody could sign with it
            raise ConfigError(
                f"the secret in {path} is not whole: remove the file; keys that were given out become void"
            )
        return cls(secret)

    def sign(self, key: Key) -> str:
        subject = base64.urlsafe_b64encode(f"{key.rollout}/{key.attempt}".encode()).decode().rstrip("=")
        body = f"sk-hd.{key.scope}.{subject}"
        return f"{body}.{self._signature(body)}"

    def read(self, text: str) -> Key | None:
        """The key, or None for anything that this keyring did not sign."""
        if text not in self._read_before:
            key = self._check(text)
            if key is None:
                return None
            if len(self._read_before) >= _MOST_REMEMBERED:
                self._read_before.clear()
            self._read_before[text] = key
        return self._read_before[text]

    def _check(self, text: str) -> Key | None:
        body, _, signature = text.rpartition(".")
        if not hmac.compare_digest(signature.encode(), self._signature(body).encode()):
            return None
        _, scope, subject = body.split(".")
        rollout, _, attempt = base64.urlsafe_b64decode(subject + "=" * (-len(subject) % 4)).decode().rpartition("/")
        return Key(Scope(scope), rollout, int(attempt))

    def _signature(self, body: str) -> str:
        digest = hmac.digest(self._secret, body.encode(), hashlib.sha256)[:18]
        return base64.urlsafe_b64encode(digest).decode()
