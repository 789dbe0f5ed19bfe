"""The pages for people: the playground at /, the dashboard, and the files they are made of.

All files are read when the router is made and served from memory: a request never touches the disk
and no path in a URL is ever joined to a directory.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter, HTTPException, Request, Response

STATIC = Path(__file__).resolve().parents[1] / "static"
MAX_FILES = 96
RELOAD = (STATIC / "reload.js").read_bytes()  # part of each page; it replaces this:
RELOAD_PLACE = b"<!-- reload.js -->"
MAX_FILE_BYTES = 256 * 1024

MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}

# Nothing but this origin's own files and the one script in the pages runs or is loaded, text never
# becomes markup (trusted types), and no other site may frame the page.
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        f"script-src 'self' 'sha256-{base64.b64encode(hashlib.sha256(RELOAD).digest()).decode()}'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)

# File names carry no version, so a browser revalidates each time and gets a 304 by the ETag.
HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file as it is served; `etag` is the hash of its content, quoted."""

    content: bytes
    media_type: str
    etag: str

    def respond(self, request: Request) -> Response:
        """Returns 200 with the content, or 304 when the browser has it already."""
        headers = {**HEADERS, "etag": self.etag}
        etags = request.headers.get("if-none-match", "")
        if etags == "*" or self.etag in (
            tag.strip().removeprefix("W/") for tag in etags.split(",")
        ):
            return Response(status_code=304, headers=headers)
        return Response(self.content, media_type=self.media_type, headers=headers)


def read_pages(directory: Path = STATIC) -> dict[str, PageFile]:
    """Returns the directory's files by name. Raises RuntimeError for a large file or too many."""
    pages: dict[str, PageFile] = {}
    for path in sorted(directory.iterdir()):
        media_type = MEDIA_TYPES.get(path.suffix)
        if media_type is None:  # an editor's backup, for example
            continue
        content = path.read_bytes().replace(RELOAD_PLACE, b"<script>" + RELOAD + b"</script>")
        if len(content) > MAX_FILE_BYTES or len(pages) == MAX_FILES:
            raise RuntimeError(f"{path}: the pages must stay small")
        digest = hashlib.sha256(content).hexdigest()[:32]
        pages[path.name] = PageFile(content, media_type, f'"{digest}"')
    return pages


def pages_router() -> APIRouter:
    """Returns GET and HEAD of /, /dashboard, /docs (also as /redoc) and /static/{file_name}."""
    pages = read_pages()
    router = APIRouter(include_in_schema=False)
    methods = ["GET", "HEAD"]

    @router.api_route("/", methods=methods)
    async def playground(request: Request) -> Response:
        return pages["index.html"].respond(request)

    @router.api_route("/dashboard", methods=methods)
    async def dashboard(request: Request) -> Response:
        return pages["dashboard.html"].respond(request)

    @router.api_route("/docs", methods=methods)
    @router.api_route("/redoc", methods=methods)
    async def docs(request: Request) -> Response:
        return pages["docs.html"].respond(request)

    @router.api_route("/static/{file_name}", methods=methods)
    async def static_file(file_name: str, request: Request) -> Response:
        page = pages.get(file_name)
        if page is None:
            raise HTTPException(404, "No such file.")
        return page.respond(request)

    return router
