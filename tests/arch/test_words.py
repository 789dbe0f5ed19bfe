"""Texts of the product and its pages keep to the words of CONTRIBUTING.md, "Words"."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tests.support.table import table

REPOSITORY = Path(__file__).resolve().parents[2]

# Each pattern with what to write instead.
BANNED = {
    r"(?:^|[.;:!?]\s+|\n\s*\n\s*)Of (?!course)": "begin with the subject",
    r"(?:^|[.;:!?]\s+)Where (?!to\b)[^?\n]*,": "if, when",
    r"\b[Ww]hat (?:is|are|was|were|has|had|have|cannot)\b(?![^.:]*\?)": "the noun itself",
    r"\b(?:[Ff]or|[Tt]o|[Bb]y|[Oo]f|[Ff]rom|[Aa]nd|[Oo]r) who\b(?! else)": "the noun: the caller",
    r"\b(?:[Ww]hoever|[Nn]obody|[Ss]omebody)\b": "no one, someone, or the noun",
    r"\bbegun\b": "started",
    r"\b(?:told|tells?|says?|said|hears?|heard)\b": "report, state, contain, receive",
    r"\b(?:cannot|can|could|to) be had\b": "unavailable",
    r"\bfor ever\b": "always, indefinitely",
    r"\b(?:in|takes?|took|taking) (?:the )?place of\b": "instead of, replace",
    r"\b[Ss]o many\b": "that many, too many, N",
    r"\b(?:goes|go|went|gone|going) on\b": "continue, resume",
    r"\blen[dt]s?\b": "grant, allocate",
    r"\b(?:there|is|are|was|were) none\b": "no X exists",
    r"(?<!masks, )\bwords\b": "values, text, arguments",
    r"(?<!-)\bbehind\b(?! (?:[A-Z]|(?:(?:an?|the|one|each|any|same|own|reverse|TLS) )*"
    r"(?:prox|gateway|load balancer|ingress|nginx|queue|address|firewall)))": "after",
}
PATTERN = re.compile("|".join(f"(?P<p{i}>{pattern})" for i, pattern in enumerate(BANNED)), re.M)
# Paths whose texts are about words, or not ours.
EXEMPT = (
    "docs/adr/",
    "docs/rescue.svg",  # the demo model's answer
    "api/static/highlight.min.js",
    "api/static/marked.esm.js",
    "api/static/temml.min.js",
    "worker/demo/",
    "tools/demo_model/",
    "clients/typescript/node_modules/",
)
# A text that a model reads, not a person.
ALLOWED = {"api/dialects/responses/conversation.py": {"go on", "what was"}}
ROOMS = ("api", "worker", "shared", "penstock", "tools", "examples", "deploy", "clients/typescript")
PAGES = (
    "docs",
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "docker-compose.yml",
)
SUFFIXES = {".py", ".md", ".html", ".js", ".ts", ".yaml", ".yml", ".lua", ".svg"}
CODE = re.compile(r"`[^`\n]+`|\]\([^)]*\)")  # inline code, and targets of links
SCRIPT = re.compile(
    r"/\*.*?\*/|(?<!:)//[^\n]*|--[^\n]*|\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*'|`(?:[^`\\]|\\.)*`",
    re.S,
)


def texts_of_python(source: str) -> Iterator[tuple[int, str]]:
    """Yields the docstrings, the string literals with a space, and the comments, with their lines.

    Lines of comments that follow each other are one text.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value
    comments: list[tuple[int, list[str]]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line, text = token.start[0], token.string.lstrip("# ")
            if comments and comments[-1][0] + len(comments[-1][1]) == line:
                comments[-1][1].append(text)
            else:
                comments.append((line, [text]))
    yield from ((line, "\n".join(texts)) for line, texts in comments)


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the texts of a file that people read, each with its first line.

    Code in backquotes and targets of links are left out.
    """
    yield from ((line, CODE.sub("``", text)) for line, text in _texts(path))


def _texts(path: Path) -> Iterator[tuple[int, str]]:
    source = path.read_text()
    match path.suffix:
        case ".py":
            yield from texts_of_python(source)
        case ".js" | ".ts" | ".lua":
            for found in SCRIPT.finditer(source):
                if " " in found[0]:
                    yield source.count("\n", 0, found.start()) + 1, found[0].lstrip("/*- \n\"'")
        case _:
            yield 1, source


def unplain(path: Path) -> Iterator[str]:
    """Yields the place, the text and the replacement of each banned word of a file."""
    name = str(path.relative_to(REPOSITORY))
    instead = list(BANNED.values())
    for line, text in texts(path):
        for found in PATTERN.finditer(text):
            if found[0] in ALLOWED.get(name, ()):
                continue
            at = line + text.count("\n", 0, found.start())
            rule = int((found.lastgroup or "p0")[1:])
            yield f"{name}:{at} {found[0].strip()!r}: {instead[rule]}"


@table("room", [*ROOMS, *PAGES])
def test_texts_have_the_words_of_the_style_sheet(room: str) -> None:
    root = REPOSITORY / room
    paths = sorted(root.rglob("*")) if root.is_dir() else [root]
    read = [
        path
        for path in paths
        if path.suffix in SUFFIXES and not str(path.relative_to(REPOSITORY)).startswith(EXEMPT)
    ]
    assert [place for path in read for place in unplain(path)] == []


@table(
    "text",
    [
        "Of a job that failed.",
        "Returns what is left.",
        "It goes on at the next token.",
        "The words of pip.",
        "Rows behind it.",
        "No row has begun.",
    ],
)
def test_a_banned_word_is_found(text: str) -> None:
    assert PATTERN.search(text)


@table("text", ["What is Penstock?", "It runs behind a proxy.", "Returns the rest of a job."])
def test_a_plain_sentence_is_passed(text: str) -> None:
    assert not PATTERN.search(text)
