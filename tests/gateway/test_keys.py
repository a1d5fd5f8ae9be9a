import stat

import pytest

from harnessed.config import ConfigError
from harnessed.gateway.keys import ADMIN, Key, Keyring, Scope


def test_a_key_says_what_it_was_signed_for():
    keyring = Keyring(b"secret")
    for key in (ADMIN, Key(Scope.ATTEMPT, "run.group-1.0", 12), Key(Scope.EVALUATOR, "a.b_c.1")):
        assert keyring.read(keyring.sign(key)) == key


def test_what_was_not_signed_is_no_key():
    keyring = Keyring(b"secret")
    signed = keyring.sign(Key(Scope.ATTEMPT, "g.0", 1))
    head, _, signature = signed.rpartition(".")
    forged = [
        "",
        "x",
        "...",
        "sk-hd.admin..",
        "é.é",
        head,
        f"{head}.{signature[:-1]}",
        f"{head.replace('attempt', 'admin')}.{signature}",
        Keyring(b"another").sign(ADMIN),
    ]
    assert [keyring.read(text) for text in forged] == [None] * len(forged)


def test_the_secret_is_private_and_outlives_restarts(tmp_path):
    path = tmp_path / "secret"
    key = Keyring.from_file(path).sign(ADMIN)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert Keyring.from_file(path).read(key) == ADMIN


def test_a_secret_that_is_not_whole_signs_nothing(tmp_path):
    path = tmp_path / "secret"
    path.write_bytes(b"")
    with pytest.raises(ConfigError, match="not whole"):
        Keyring.from_file(path)
