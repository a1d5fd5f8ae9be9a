"""The key of a request: in its header, or in the cookie that a browser got when its user logged in.

`operations.py` and `pages.py` call this. A cookie opens reading alone: a page of another port of this host counts as
the same site and could post with it.
"""

import hashlib

from starlette.requests import Request
from starlette.responses import Response

from harnessed.gateway.keys import ADMIN, Keyring, bearer_key

_WEEK_S = 7 * 24 * 3600


def sent_key(request: Request, keyring: Keyring) -> str:
    """The key that came with a request, unchecked; empty if none did."""
    # A header of another scheme is meant for what stands before the gateway.
    if key := bearer_key(request.headers.get("authorization", "")):
        return key
    return request.cookies.get(_name(keyring), "") if request.method == "GET" else ""


def give(response: Response, keyring: Keyring, *, secure: bool) -> None:
    """Log in: the browser keeps the admin key where no script can read it."""
    response.set_cookie(_name(keyring), keyring.sign(ADMIN), _WEEK_S, secure=secure, httponly=True, samesite="strict")


def take(response: Response, keyring: Keyring) -> None:
    """Log out."""
    response.delete_cookie(_name(keyring), httponly=True, samesite="strict")


def _name(keyring: Keyring) -> str:
    """Each secret has a cookie of its own: ports share cookies, and every run on a machine may have a gateway."""
    return f"harnessed-{hashlib.sha256(keyring.sign(ADMIN).encode()).hexdigest()[:8]}"
