"""Whether a request comes from the service's own page."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from starlette.requests import Request as HttpRequest


def is_own_page(http: HttpRequest) -> bool:
    """True where the page's origin is the address that was asked, and that is a number or localhost.

    Other names prove nothing: whoever owns one can let it point to this machine after the page has loaded.
    """
    asked = http.headers.get("host", "")
    try:
        origin, own = urlsplit(http.headers.get("origin", "")), urlsplit(f"//{asked}")
    except ValueError:
        return False
    return bool(asked) and origin.netloc == asked and _is_number_or_localhost(own.hostname or "")


def _is_number_or_localhost(name: str) -> bool:
    if name == "localhost":
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
