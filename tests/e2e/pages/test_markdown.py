"""Markdown of answers: what it shows, and that hostile output never runs, loads or leads astray."""

from __future__ import annotations

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.support.browser import Tab
from tests.support.playground import expect_whole, say, text_of

pytestmark = pytest.mark.browser

MARKDOWN = """\
### Gates

A **bold** word, *leaning*, ~~gone~~, `a < b` and [a link](https://example.org/x?a=1&amp;b=2).

```python title
def f(x):
    return "<b>" if x < 3 else None
```

| gate | m |
|:-----|--:|
| one | 2 |

1. first
   - inner
- [x] done

> said &lt;i&gt; &copy; &#x41;
"""

# Each text tries to run `hacked()`, to load something or to make an element that it must not.
HOSTILE = [
    "<script>hacked()</script>",
    '<img src=x onerror="hacked()">',
    "<svg/onload=hacked()>",
    '<a href="javascript:hacked()">a</a>',
    "<iframe srcdoc='<script>hacked()</script>'></iframe>",
    "<style>*{display:none}</style>",
    "<form action=//evil.example><button>",
    "<details open ontoggle=hacked()>",
    "<math><mtext></form><form><mglyph><style></math><img src onerror=hacked()>",
    "<!--><img src=x onerror=hacked()>-->",
    "<noscript><p title='</noscript><img src=x onerror=hacked()>'>",
    "<base href=//evil.example/>",
    "<meta http-equiv=refresh content='0;url=//evil.example'>",
    "<link rel=stylesheet href=//evil.example/x.css>",
    "[a](javascript:hacked())",
    "[a](JaVaScRiPt:hacked())",
    "[a](java\tscript:hacked())",
    "[a](&#106;avascript:hacked())",
    "[a](javascript&colon;hacked())",
    "[a](data:text/html,<script>hacked()</script>)",
    "[a](vbscript:hacked())",
    "[a](blob:https://x/y)",
    "[a](file:///etc/passwd)",
    "[a](//evil.example)",
    "[a](/v1/jobs)",
    "[a](\x01javascript:hacked())",
    "<javascript:hacked()>",
    "![x](https://evil.example/x.png)",
    '![x](https://evil.example/x.png "y")',
    "![x](data:image/svg+xml,<svg onload=hacked()>)",
    "[![x](https://evil.example/x.png)](javascript:hacked())",
    "[a][1]\n\n[1]: javascript:hacked()",
    '[a](https://example.org "\\"onmouseover=hacked() x=\\"")',
    '```"><script>hacked()</script>\nx\n```',
    "``` <img/src=x/onerror=hacked()>\nx\n```",
    "`<img src=x onerror=hacked()>`",
    "| <img src=x onerror=hacked()> |\n|---|\n| <script>hacked()</script> |",
    "# <img src=x onerror=hacked()>",
    "> - <img src=x onerror=hacked()>",
    "https://example.org/<script>hacked()</script>",
    'https://example.org/"onclick=hacked()',
    "hacked@example.org<img src=x onerror=hacked()>",
    "&lt;script&gt;hacked()&lt;/script&gt;",
    "&#60;img src=x onerror=hacked()&#62;",
    "\\<img src=x onerror=hacked()>",
    "constructor __proto__ {{constructor.constructor('hacked()')()}}",
    "> " * 3000 + "deep",
    "- " * 3000 + "deep",
    "[" * 20_000,
    "_a" * 20_000,
    "**a " * 20_000,
    "`" * 20_000,
]
BLOCKS = "p ul ol li blockquote pre div h4 h5 h6 hr table thead tbody tr th td"
ALLOWED = {*BLOCKS.split(), "strong", "em", "del", "code", "span", "button", "a", "br"}

SHOW = """async (texts) => {
  const { Markdown } = await import("/static/markdown.js");
  window.ran = 0;
  window.hacked = () => { window.ran += 1; };
  const found = [];
  for (const text of texts) {
    const view = new Markdown();
    document.querySelector("main").append(view.node);
    // As it streams: in pieces, too, and whole.
    for (const share of [0.3, 0.6, 0.9, 1]) {
      view.show(text.slice(0, Math.ceil(text.length * share)));
    }
    const isIcon = (node) => node.closest("button > .icon") !== null; // ours
    const all = [...view.node.querySelectorAll("*")].filter((node) => !isIcon(node));
    for (const node of all) if (node.matches("a")) node.dispatchEvent(new Event("mouseover"));
    found.push({
      tags: [...new Set(all.map((node) => node.localName))],
      attributes: [...new Set(all.flatMap((node) => node.getAttributeNames()))],
      links: all.filter((node) => node.matches("a")).map((node) => [node.protocol, node.rel]),
      length: view.node.textContent.length,
    });
    view.node.remove();
  }
  await new Promise((resolve) => setTimeout(resolve, 100));
  return { ran: window.ran, found };
}"""


@pytest.fixture
def markdown(playground: Page) -> Locator:
    answer = say(playground, MARKDOWN)
    expect_whole(answer)
    return text_of(answer)


def test_markdown_is_shown_as_elements(markdown: Locator) -> None:
    expect(markdown.locator("h5, h6")).to_have_text("Gates")
    expect(markdown.locator("strong")).to_have_text("bold")
    expect(markdown.locator("em")).to_have_text("leaning")
    expect(markdown.locator("p > code")).to_have_text("a < b")
    expect(markdown.locator("pre code")).to_have_text(
        'def f(x):\n    return "<b>" if x < 3 else None'
    )
    expect(markdown.locator(".code-head span")).to_have_text("python")
    expect(markdown.locator("td.align-right")).to_have_text("2")
    expect(markdown.locator("ol ul li")).to_have_text("inner")
    expect(markdown.locator("li.task")).to_have_text("☑ done")
    expect(markdown.locator("blockquote")).to_have_text("said <i> © A")
    link = markdown.locator("a")
    expect(link).to_have_attribute("href", "https://example.org/x?a=1&b=2")
    expect(link).to_have_attribute("rel", "noopener noreferrer")


def test_code_is_copied_as_it_stands(markdown: Locator, tab: Tab) -> None:
    tab.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    markdown.get_by_role("button", name="Copy code").click()
    expect(markdown.get_by_role("button", name="Copy code")).to_have_text("Copied")
    copied = tab.page.evaluate("navigator.clipboard.readText()")
    assert copied == 'def f(x):\n    return "<b>" if x < 3 else None'


def test_a_hostile_answer_of_a_model_stays_text(playground: Page, tab: Tab) -> None:
    image = "<img src=x onerror=\"document.title='hacked'\">"
    attack = f"{image} [a](javascript:hacked()) ![p](https://evil.example/p.png)"
    answer = say(playground, attack)
    expect_whole(answer)
    text = text_of(answer)
    expect(text).to_contain_text(image)
    expect(text).to_contain_text("[a](javascript:hacked())")
    expect(text.locator("img, script, iframe")).to_have_count(0)
    expect(text.locator("a")).to_have_text("Picture: p")
    assert playground.title() == "Penstock playground"
    assert not [address for address in tab.addresses if "evil" in address]


def test_hostile_markdown_runs_no_script_and_makes_no_element(playground: Page) -> None:
    shown = playground.evaluate(SHOW, HOSTILE)
    assert shown["ran"] == 0
    for text, found in zip(HOSTILE, shown["found"], strict=True):
        assert set(found["tags"]) <= ALLOWED, text[:60]
        assert not [name for name in found["attributes"] if name.startswith("on")], text[:60]
        assert not {"src", "srcdoc", "style", "action"} & set(found["attributes"]), text[:60]
        for protocol, rel in found["links"]:
            assert protocol in ("http:", "https:", "mailto:"), text[:60]
            assert rel == "noopener noreferrer"
        assert found["length"] > 0, text[:60]


def test_a_block_that_does_not_change_keeps_its_nodes(playground: Page) -> None:
    same = playground.evaluate(
        """async () => {
          const { Markdown } = await import("/static/markdown.js");
          new Markdown().show("first\\n\\nsec"); // the first use compiles, and may count as costly
          const view = new Markdown();
          view.show("first\\n\\nsec");
          const [first, second] = view.node.children;
          view.show("first\\n\\nsecond\\n\\nthird");
          const now = [...view.node.children];
          return [now.length, now[0] === first, now[1] === second];
        }"""
    )
    assert same == [3, True, False]


@pytest.mark.parametrize("piece", ["> ", "[", "- ", "*a ", "|a", "`"])
def test_a_costly_text_is_read_once_more_at_most(playground: Page, piece: str) -> None:
    """Twice as long texts are shown after it in the time of plain ones."""
    costly_ms, next_ms, plain_ms = playground.evaluate(
        """async (piece) => {
          const { Markdown } = await import("/static/markdown.js");
          const timed = (view, text) => {
            const begun = performance.now();
            view.show(text);
            return performance.now() - begun;
          };
          const view = new Markdown();
          let text = piece;
          let costly = 0;
          while (text.length < 100_000 && costly <= 100) {
            text += text;
            costly = timed(view, text);
          }
          const next = timed(view, text + piece);
          return [costly, next, timed(new Markdown(), "x".repeat(text.length))];
        }""",
        piece,
    )
    assert costly_ms <= 100 or next_ms <= max(costly_ms / 2, plain_ms)
