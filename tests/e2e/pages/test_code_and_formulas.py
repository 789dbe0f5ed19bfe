"""Colours of code and formulas of answers: right, loaded on demand, bounded, and inert."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.support.browser import Tab
from tests.support.playground import expect_whole, say, text_of

pytestmark = pytest.mark.browser

CODE = 'def f(x):\n    return "<script>hacked()</script>" if x < 3 else None'
FORMULAS = r"""
Inline $e^{i\pi} + 1 = 0$ and \(a_1^2\); a price of $5 and $6, R$10, $HOME/$USER.
\[
\frac{1}{2} \\
= \sqrt{x}
\]
"""
# None of them makes a link, a name, a picture or an element of HTML.
HOSTILE = [
    r"$\href{javascript:hacked()}{x}$",
    r"$\url{javascript:hacked()}$",
    r"$\includegraphics{https://evil.example/x.png}$",
    r"$\class{primary}{x}$",
    r"$\id{settings}{x}$",
    r"$\style{position:fixed}{x}$",
    r"$\data{a=b}{x}$",
    r"$\text{<img src=x onerror=hacked()>}$",
    r"$$\begin{align}x \label{message} \tag{1}\end{align}$$",
    r"$\ref{message}$",
    r"$\frac{1$",
    r"$\def\a{\a\a}\a$",
    r"$\newcommand\a[1]{#1#1#1#1#1#1#1#1}\a{\a{\a{\a{\a{\a{\a{x}}}}}}}$",
    "$$" + r"\frac{" * 300 + "$$",
    "$$" + "{" * 900 + "x" + "}" * 900 + "$$",
    "$$" + r"\rule{9999em}{9999em}" + "$$",
    "$$" + "x" * 100_000 + "$$",
    r"\[" + "x" * 100_000 + r"\]",
    "$" + "x" * 100_000 + "$",
    r"\[" * 20_000,
    r"\(" * 20_000,
    "$$a\n\n" * 20_000,
    "$x$ " * 1200 + "\n\n" + "$y$ " * 1200,
]
# Shows texts whole and waits until nothing is left to render.
SHOW = """async (texts) => {
  const { Markdown } = await import("/static/markdown.js");
  window.ran = 0;
  window.hacked = () => { window.ran += 1; };
  const views = texts.map((text) => {
    const view = new Markdown();
    document.querySelector("main").append(view.node);
    view.show(text);
    return view;
  });
  const last = new Markdown();
  document.querySelector("main").append(last.node);
  last.show("$z_{last}$");
  while (last.node.querySelector("math") === null) await new Promise((go) => setTimeout(go, 20));
  return [window.ran, views.map(({ node }) => {
    const all = [...node.querySelectorAll(".formula *")];
    return {
      math: node.querySelectorAll("math").length,
      text: node.textContent,
      html: all.filter((one) => one.namespaceURI.endsWith("xhtml")).map((one) => one.localName),
      attributes: [...new Set(all.flatMap((one) => one.getAttributeNames()))],
      widest: Math.max(0, ...all.map((one) => one.getBoundingClientRect().width)),
    };
  })];
}"""


def loaded(tab: Tab) -> list[str]:
    names = ("highlight.min.js", "temml.min.js")
    return [name for name in names if any(address.endswith(name) for address in tab.addresses)]


def shown(page: Page, texts: list[str]) -> list[dict[str, Any]]:
    ran, found = page.evaluate(SHOW, texts)
    assert ran == 0
    rows: list[dict[str, Any]] = found
    return rows


def test_code_is_coloured_by_its_language_and_stays_the_same_text(playground: Page) -> None:
    answer = say(
        playground, f"```python\n{CODE}\n```\n\n```\n{CODE}\n```\n\n```klingon\n{CODE}\n```"
    )
    expect_whole(answer)
    coloured, plain, unknown = text_of(answer).locator("pre code").all()
    expect(coloured.locator(".hljs-keyword")).to_have_text(["def", "return", "if", "else"])
    expect(coloured.locator(".hljs-title")).to_have_text("f")
    expect(coloured.locator(".hljs-string")).to_have_text('"<script>hacked()</script>"')
    for code in (coloured, plain, unknown):
        assert code.text_content() == CODE
        expect(code.locator("script")).to_have_count(0)
    for code in (plain, unknown):
        expect(code.locator("*")).to_have_count(0)


def test_formulas_are_mathml_and_prices_are_text(playground: Page) -> None:
    answer = say(playground, FORMULAS)
    expect_whole(answer)
    text = text_of(answer)
    expect(text.locator("math")).to_have_count(3)
    expect(text.locator("math").nth(1).locator("msubsup")).to_have_text("a12")
    expect(text.locator("div.formula math[display=block] mfrac")).to_have_text("12")
    expect(text.locator("div.formula msqrt")).to_have_text("x")
    expect(text.locator("p")).to_contain_text("a price of $5 and $6, R$10, $HOME/$USER.")


def test_an_answer_loads_only_the_libraries_that_it_needs(playground: Page, tab: Tab) -> None:
    expect_whole(say(playground, "A gate, `code` and $5.\n\n```\nx\n```"))
    assert loaded(tab) == []
    answer = say(playground, "```json\n[1]\n```")
    expect(text_of(answer).locator(".hljs-number")).to_have_text("1")
    assert loaded(tab) == ["highlight.min.js"]
    answer = say(playground, "$x$")
    expect(text_of(answer).locator("math")).to_have_text("x")
    assert loaded(tab) == ["highlight.min.js", "temml.min.js"]


def test_a_library_that_cannot_be_fetched_leaves_the_source(playground: Page) -> None:
    broken = {"body": "throw new Error('broken')", "content_type": "text/javascript"}
    playground.route("**/temml.min.js", lambda route: route.fulfill(**broken))
    with playground.expect_response("**/temml.min.js"):
        answer = say(playground, "$x^2$")
    expect_whole(answer)
    expect(text_of(answer)).to_have_text("$x^2$")


def test_hostile_formulas_are_inert_and_bounded(playground: Page, tab: Tab) -> None:
    found = shown(playground, HOSTILE)
    for text, one in zip(HOSTILE, found, strict=True):
        assert set(one["html"]) <= {"span", "a"}, text[:60]
        unwanted = {"href", "id", "src"} & set(one["attributes"])
        assert not unwanted, text[:60]
        assert not [name for name in one["attributes"] if name.startswith(("on", "data-"))]
        assert one["math"] <= 500, text[:60]
        assert one["widest"] < 20_000, text[:60]
    by_text = dict(zip(HOSTILE, found, strict=True))
    for text in HOSTILE:  # what is refused is its source
        if text.startswith((r"$\href", r"$\def", r"$\newcommand", r"$\frac", r"$\id", "$$xx")):
            assert by_text[text]["math"] == 0, text[:60]
            assert by_text[text]["text"].strip() == text, text[:60]
    assert by_text[HOSTILE[-1]]["math"] == 500
    assert not [address for address in tab.addresses if "evil" in address]


@pytest.mark.parametrize(
    ("language", "line", "count"),
    [("json", "[1, 2]\n", 1500), ("json", "1,", 500), ("markdown", "[a](b)\n", 10)],
)
def test_code_that_may_take_long_stays_plain(
    playground: Page, language: str, line: str, count: int
) -> None:
    """Its neighbour has colours, so that the renderer has been there."""
    numbers = playground.evaluate(
        """async ([language, code]) => {
          const { Markdown } = await import("/static/markdown.js");
          const view = new Markdown();
          document.querySelector("main").append(view.node);
          view.show("```" + language + "\\n" + code + "\\n```\\n\\n```json\\n[2]\\n```");
          const [long, short] = view.node.querySelectorAll("code");
          while (short.children.length === 0) await new Promise((go) => setTimeout(go, 20));
          return [long.children.length, short.textContent];
        }""",
        [language, line * count],
    )
    assert numbers == [0, "[2]"]


def test_a_growing_text_keeps_what_is_rendered_and_a_cut_block_is_coloured(
    playground: Page,
) -> None:
    """A block that grows is made again: what it had rendered is there at once."""
    growing, closed_early, cut = playground.evaluate(
        """async () => {
          const { Markdown } = await import("/static/markdown.js");
          const view = new Markdown();
          document.querySelector("main").append(view.node);
          const until = async (query) => {
            while (!view.node.querySelector(query)) await new Promise((go) => setTimeout(go, 20));
          };
          view.show("- one $x^2$\\n- tw");
          await until("math");
          view.show("- one $x^2$\\n- two");
          const growing = view.node.querySelectorAll("math").length;
          view.show("```python\\nif x");
          await new Promise((go) => setTimeout(go, 100));
          const early = view.node.querySelectorAll(".hljs-keyword").length;
          await until(".hljs-keyword");
          return [growing, early, view.node.querySelector(".hljs-keyword").textContent];
        }"""
    )
    assert (growing, closed_early, cut) == (1, 0, "if")


def test_the_place_where_an_answer_resumed_survives_the_colours(playground: Page) -> None:
    before = playground.evaluate(
        """async () => {
          const { Markdown } = await import("/static/markdown.js");
          const view = new Markdown();
          document.querySelector("main").append(view.node);
          const text = "```python\\nif x:\\n    y = 2\\n```\\n";
          view.show(text, [{ at: text.indexOf("y ="), label: "Resumed" }]);
          const code = view.node.querySelector("code");
          while (!code.querySelector(".hljs-number")) await new Promise((go) => setTimeout(go, 20));
          const range = document.createRange();
          range.setStart(code, 0);
          range.setEndBefore(code.querySelector(".resumed"));
          return range.toString();
        }"""
    )
    assert before == "if x:\n    "


def test_the_end_stays_in_sight_when_formulas_grow(playground: Page) -> None:
    rows = r" \\ ".join("1" for _ in range(40))
    answer = say(playground, rf"$$\begin{{matrix}}{rows}\end{{matrix}}$$")
    expect_whole(answer)
    expect(text_of(answer).locator("mtr")).to_have_count(40)
    playground.wait_for_function(
        """() => {
          const { scrollHeight, scrollTop, clientHeight } = document.querySelector("#conversation");
          return scrollHeight > clientHeight + 100 && scrollHeight - scrollTop - clientHeight < 2;
        }"""
    )
