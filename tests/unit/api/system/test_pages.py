"""The pages' files: how they are served, and what they may not contain."""

from __future__ import annotations

import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from api.system.pages import (
    MAX_FILE_BYTES,
    MEDIA_TYPES,
    RELOAD_PLACE,
    STATIC,
    pages_router,
    read_pages,
)

FILES = sorted(path.name for path in STATIC.iterdir())
PAGES = [name for name in FILES if name.endswith(".html")]
# Of others: the digest of the published file, a line that was appended, the licence's file.
LIBRARIES = {
    "marked.esm.js": (
        "5371fea86fd0656b4fc7bea7c94c663109d82789b69433eeee78d42895aa44de",
        b"",
        "marked.license.txt",
    ),
    "highlight.min.js": (
        "1ed8fc5256b738b8875b74e4d3f0754f60d6411fb034d618dfbc4e6e6c9999d7",
        b"",
        "highlight.license.txt",
    ),
    "temml.min.js": (
        "1ab19148afe0dbc836b7a74f344071b3f3a70a7a8259ae4049e76894fcdf8d95",
        b"\nexport default temml;\n",
        "temml.license.txt",
    ),
}
SCRIPTS = [name for name in FILES if name.endswith(".js") and name not in LIBRARIES]
STYLES = [name for name in FILES if name.endswith(".css")]
MAX_SCRIPT_LINES = 220
SVG_NAMESPACE = "http://www.w3.org/2000/svg"  # a name, not an address


def client() -> httpx.AsyncClient:
    app = FastAPI(docs_url=None, redoc_url=None)
    app.include_router(pages_router())
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/dashboard",
        "/docs",
        "/redoc",
        "/static/playground.js",
        "/static/style.css",
        "/static/penstock.svg",
    ],
)
async def test_a_file_is_served_with_headers_that_keep_strangers_out(path: str) -> None:
    async with client() as http:
        answer = await http.get(path)
        head = await http.head(path)
    assert answer.status_code == head.status_code == 200
    assert head.content == b""
    assert answer.headers["cache-control"] == "no-cache"
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self' 'sha256-")
    assert "unsafe" not in policy
    assert "*" not in policy


async def test_every_file_of_the_folder_is_served_under_its_media_type() -> None:
    async with client() as http:
        for name in FILES:
            answer = await http.get(f"/static/{name}")
            assert answer.status_code == 200, name
            assert answer.headers["content-type"] == MEDIA_TYPES["." + name.rpartition(".")[2]]
            plain = re.sub(rb"<script>.*?</script>", RELOAD_PLACE, answer.content, flags=re.DOTALL)
            assert plain == (STATIC / name).read_bytes()


async def test_a_known_etag_is_answered_304_without_a_body() -> None:
    async with client() as http:
        etag = (await http.get("/")).headers["etag"]
        for requested in (etag, f"W/{etag}", f'"other", {etag}', "*"):
            answer = await http.get("/", headers={"if-none-match": requested})
            assert answer.status_code == 304
            assert answer.content == b""
            assert answer.headers["etag"] == etag
        assert (await http.get("/", headers={"if-none-match": '"other"'})).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/static/",
        "/static/nothing.js",
        "/static/..%2Fmain.py",
        "/static/%2e%2e/main.py",
        "/static/a/b",
    ],
)
async def test_whatever_is_not_a_file_of_the_folder_is_404(path: str) -> None:
    async with client() as http:
        assert (await http.get(path)).status_code == 404


async def test_other_methods_are_405() -> None:
    async with client() as http:
        assert (await http.post("/")).status_code == 405


def test_a_page_that_grew_beyond_its_bound_is_refused(tmp_path: Path) -> None:
    (tmp_path / "big.js").write_bytes(b" " * (MAX_FILE_BYTES + 1))
    with pytest.raises(RuntimeError, match="small"):
        read_pages(tmp_path)


class Tags(HTMLParser):
    """All start tags of a page with their attributes, and the texts inside script and style."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inline: list[str] = []
        self._open: list[str] = []
        self.feed((STATIC / page).read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] in ("script", "style") and data.strip():
            self.inline.append(data)

    @property
    def ids(self) -> list[str]:
        return [attrs["id"] or "" for _, attrs in self.tags if "id" in attrs]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_no_inline_script_or_style(page: str) -> None:
    """Except for the one that replaces a comment in all of them."""
    tags = Tags(page)
    assert tags.inline == []
    assert (STATIC / page).read_bytes().count(RELOAD_PLACE) == 1
    for tag, attrs in tags.tags:
        assert tag != "style"
        assert "style" not in attrs
        assert not [name for name in attrs if name.startswith("on")]
        assert tag != "script" or attrs.get("src")


@pytest.mark.parametrize("page", PAGES)
def test_a_page_refers_only_to_files_that_are_there(page: str) -> None:
    for _, attrs in Tags(page).tags:
        for target in (attrs.get("src"), attrs.get("href")):
            if target is None or target in ("./", "dashboard", "docs", "openapi.json"):
                continue
            if target.startswith("#tab="):
                name = target.removeprefix("#tab=").partition("&")[0]
                assert f"{name}-tab" in Tags(page).ids
            elif target.startswith("#"):
                assert target[1:] in Tags(page).ids
            else:
                assert target.startswith("static/")
                assert target.removeprefix("static/") in FILES


@pytest.mark.parametrize("page", PAGES)
def test_every_control_of_a_page_has_a_name_for_screen_readers(page: str) -> None:
    source = (STATIC / page).read_text("utf-8")
    labelled = set(re.findall(r'<label[^>]*\sfor="([^"]+)"', source))
    for label in re.findall(r"<label\b.*?</label>", source, re.DOTALL):
        controls = r'<(?:input|select|textarea)[^>]*\s(?:id|name)="([^"]+)"'
        labelled |= set(re.findall(controls, label))
    tags = Tags(page)
    for tag, attrs in tags.tags:
        if tag in ("input", "select", "textarea"):
            assert {attrs.get("id"), attrs.get("name")} & labelled
        if tag == "img":
            assert "alt" in attrs
        for name in ("aria-labelledby", "aria-describedby"):
            assert attrs.get(name) is None or attrs[name] in tags.ids
    assert len(tags.ids) == len(set(tags.ids))
    assert dict(tags.tags)["html"].get("lang") == "en"


@pytest.mark.parametrize("page", PAGES)
def test_every_element_that_a_page_s_script_looks_up_is_on_the_page(page: str) -> None:
    tags = Tags(page)
    sources = [attrs["src"] or "" for tag, attrs in tags.tags if tag == "script"]
    assert len(sources) == 1
    script = (STATIC / sources[0].removeprefix("static/")).read_text("utf-8")
    requested = re.findall(r'byId\("([^"]+)"\)', script)
    assert requested
    assert set(requested) <= set(tags.ids)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_never_makes_markup_from_text_and_imports_only_its_neighbours(name: str) -> None:
    source = (STATIC / name).read_text("utf-8").replace(f'"{SVG_NAMESPACE}"', "")
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "://"):
        assert word not in source
    for target in re.findall(r'(?:from |import\()"([^"]+)"', source):
        assert target.startswith("./")
        assert target.removeprefix("./") in [*SCRIPTS, *LIBRARIES]
    assert len(source.splitlines()) <= MAX_SCRIPT_LINES


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_library_is_the_published_file_and_its_licence_is_beside_it(name: str) -> None:
    """The digests are those of files in marked-18.2.1.tgz, cdn-assets-11.12.0.tgz and
    temml-0.13.5.tgz of npm; each licence's first line names file and version."""
    digest, appended, licence_name = LIBRARIES[name]
    content = (STATIC / name).read_bytes()
    assert content.endswith(appended)
    assert hashlib.sha256(content.removesuffix(appended)).hexdigest() == digest
    licence = (STATIC / licence_name).read_text("utf-8")
    assert "copyright notice" in licence
    (version,) = re.findall(r" (\d+\.\d+\.\d+)[ ,]", licence.partition("\n")[0])
    assert version.encode() in content


@pytest.mark.parametrize("name", STYLES)
def test_a_style_sheet_fetches_nothing(name: str) -> None:
    source = (STATIC / name).read_text("utf-8")
    assert "url(" not in source.replace("url(#", "")  # a part of the page itself
    assert "@import" not in source
