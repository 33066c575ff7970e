"""The page at `/`: one file without anything from elsewhere, and headers that hold the browser to that."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import Response


def page_router() -> APIRouter:
    html = files("pipelines.service").joinpath("page.html").read_bytes()
    headers = {
        "content-security-policy": _policy(html),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "cache-control": "no-cache",
    }
    router = APIRouter()

    # Claude Code asks for it too, and looks at the status only.
    @router.api_route("/", methods=["GET", "HEAD"], response_model=None)
    async def page() -> Response:
        return Response(html, headers=headers, media_type="text/html")

    return router


def _policy(html: bytes) -> str:
    """Nothing but the file's own style and script, known by their digests, and calls of this service."""
    rules = ["default-src 'none'", "connect-src 'self'", "img-src data:", "base-uri 'none'"]
    rules += ["form-action 'none'", "frame-ancestors 'none'"]
    for element, rule in ((b"style", "style-src"), (b"script", "script-src")):
        found = re.search(rb"<%b>(.*?)</%b>" % (element, element), html, re.DOTALL)
        assert found is not None, element
        digest = base64.b64encode(hashlib.sha256(found[1]).digest()).decode()
        rules.append(f"{rule} 'sha256-{digest}'")
    return "; ".join(rules)
