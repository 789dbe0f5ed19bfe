"""Plain text to learn the language from: docstrings, the project's documents, the answers."""

from __future__ import annotations

import ast
import importlib.util
import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.demo_model.questions import Fact

REPOSITORY = Path(__file__).resolve().parents[2]
MAX_DOCUMENT_CHARS = 60_000  # of one file

# Standard modules with much to say; their source is read, never imported.
_MODULES = """
    argparse ast asyncio.base_events asyncio.events asyncio.queues asyncio.streams
    asyncio.tasks base64 bdb bisect calendar cmd code codecs collections concurrent.futures
    configparser contextlib copy csv datetime dataclasses difflib dis email.message enum
    fileinput filecmp fractions ftplib functools getopt gettext glob gzip hashlib heapq hmac
    html.parser http.client http.cookiejar http.server imaplib importlib.abc inspect io
    ipaddress json json.decoder json.encoder linecache locale logging logging.handlers lzma
    mailbox mimetypes multiprocessing.pool numbers operator optparse os pathlib pdb pickle
    pkgutil platform plistlib poplib posixpath pprint profile queue random re reprlib sched
    secrets selectors shelve shlex shutil signal site smtplib socket socketserver sqlite3 ssl
    stat statistics string struct subprocess sysconfig tarfile tempfile textwrap threading
    timeit tokenize trace traceback types typing unittest.case unittest.mock urllib.parse
    urllib.request uuid venv warnings wave weakref webbrowser xml.dom.minidom
    xml.etree.ElementTree zipfile
"""

_PARAGRAPH = re.compile(r"\n\s*\n")


def docstrings() -> Iterator[str]:
    """Docstrings of Python's standard library, of some length, each once."""
    seen: set[str] = set()
    for module in _MODULES.split():
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            continue
        tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if not isinstance(
                node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
            ):
                continue
            text = (ast.get_docstring(node) or "").strip()
            if len(text) >= 60 and text.isascii() and text not in seen:
                seen.add(text)
                yield text[:4000]


def documents(root: Path = REPOSITORY) -> Iterator[str]:
    """Yields the repository's own documents, where this runs in a checkout: README and docs."""
    for path in sorted([*root.glob("*.md"), *root.glob("docs/**/*.md")]):
        yield path.read_text(encoding="utf-8")[:MAX_DOCUMENT_CHARS]


def paragraphs(facts: Sequence[Fact], width: int = 4) -> Iterator[str]:
    """Yields neighbouring answers as running text: what a plain completion can go on with."""
    answers = [fact.answer for fact in facts]
    for start in range(0, len(answers), width):
        yield " ".join(answers[start : start + width])


def unfamiliar_words(facts: Sequence[Fact], texts: Sequence[str]) -> list[str]:
    """Returns words of the texts that no question or answer has: the model must not know them."""
    known = {
        word
        for fact in facts
        for text in (*fact.trained, *fact.held, fact.answer)
        for word in re.findall(r"[a-z]+", text.lower())
    }
    words = {word for text in texts for word in re.findall(r"\b[a-z]{4,12}\b", text)}
    return sorted(words - known)


def chunks(text: str, max_chars: int) -> Iterator[str]:
    """Yields whole paragraphs gathered up to about `max_chars`."""
    gathered = ""
    for paragraph in _PARAGRAPH.split(textwrap.dedent(text)):
        if gathered and len(gathered) + len(paragraph) > max_chars:
            yield gathered
            gathered = ""
        gathered = f"{gathered}\n\n{paragraph}" if gathered else paragraph
    if gathered:
        yield gathered
