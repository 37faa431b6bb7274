"""Markdown on the chat page: formulas, colours, code, and that what a model writes stays text."""

from __future__ import annotations

from playwright.sync_api import Page, expect

from tests.support.chat_page import answers, app, ask_to_the_end, chromium, engine, page, words
from tests.support.fake_client import FakeClient, Script

__all__ = ["app", "chromium", "engine", "page"]  # fixtures

ATTACKS = (
    "<script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 1'>",
    "<svg onload='window.hacked = 1'></svg>",
    "[click](javascript:window.hacked=1)",
    "[click](JaVaScRiPt&#58;window.hacked=1)",
    "[click](data:text/html,<script>parent.hacked=1</script>)",
    "![x](https://example.org/track.png)",
    '[x](https://example.org/" onmouseover="window.hacked=1)',
    "<javascript:window.hacked=1>",
    "```<img src=x onerror=window.hacked=1>\n</code></pre><script>window.hacked=1</script>\n```",
    "| <img src=x onerror=window.hacked=1> |\n|---|\n| <iframe src=//example.org></iframe> |",
    "<a href='https://example.org' style='position:fixed;inset:0'>x</a>",
    "```html\n<img src=x onerror=window.hacked=1>\n```",
    r"$\href{javascript:window.hacked=1}{x}$ $\htmlStyle{position:fixed}{x}$ $\includegraphics{https://example.org/x.png}$",
    r"$$\fcolorbox{red}{blue}{<img src=x onerror=window.hacked=1>}$$",
    "$\\text{</math><img src=x onerror=window.hacked=1>}$",
    "[x]: javascript:window.hacked=1\n\n[x]",
)
# How a person's own message with fenced code reads: the label, the button, the code.
FENCED = {
    ATTACKS[9]: "<imgCopy</code></pre><script>window.hacked=1</script>",
    ATTACKS[12]: "htmlCopy<img src=x onerror=window.hacked=1>",
}


def test_what_a_model_writes_stays_text(page: Page, engine: FakeClient) -> None:
    forbidden = "script, img, iframe, object, embed, style, form, [onerror], [onload], [onmouseover], [style]"
    for attack in ATTACKS:
        page.click("#new-chat")
        engine.script = Script(words(attack))
        ask_to_the_end(page, attack)
        assert page.evaluate("window.hacked") is None
        assert page.locator(f"#messages :is({forbidden})").count() == 0
        for link in page.locator("#messages a").all():
            assert link.evaluate("node => node.href").startswith("https://example.org/")
            assert "noopener" in (link.get_attribute("rel") or "")
        typed = page.locator(".message.user .body")
        assert typed.text_content() == FENCED.get(attack, attack)
        title = page.locator("#conversations .current .open").text_content()
        assert title == page.evaluate("document.title").removesuffix(" · Octavo")
    page.reload()
    expect(page.locator("#conversations li")).to_have_count(len(ATTACKS))
    assert page.evaluate("window.hacked") is None


def test_hostile_markdown_takes_no_time(page: Page) -> None:
    seconds = page.evaluate(
        r"""async () => {
          const { MarkdownView } = await import("/web/markdown.js");
          const pieces = ["*", "_", "**a ", "`", "``` ", "[", "[a](", "![", "> ", "- ", "| ", "|-", "http://", "~~",
                          "\\", "<", "1. ", "\n", "# ", "***", "*a", "  - x\n", "http://....", "-", "- - x",
                          "$", "$x$ ", "$$\n", "$$\n\n", "\\[", "\\[\n", "\\(", "&", "&amp;", "```js\n", "$\\frac",
                          "{"];
          const times = {};
          for (const piece of pieces) {
            const start = performance.now();
            new MarkdownView(document.createElement("div")).update(piece.repeat(20000 / piece.length));
            times[piece] = performance.now() - start;
          }
          return times;
        }"""
    )
    slow = {piece: round(time) for piece, time in seconds.items() if time > 1500}
    assert not slow


FORMULAS = r"""Prices of $5 and $10 stay. Euler: $e^{i\pi} + 1 = 0$, and \(x^2\).

\[
\sum_{k=1}^n k = \frac{n(n+1)}{2}
\]

$$\boxed{a_1}$$

Unknown: $\nonsense{x}$

```python
price = "$5$"
```
"""


def test_formulas(page: Page, engine: FakeClient) -> None:
    engine.script = Script(words(FORMULAS))
    ask_to_the_end(page)
    formulas = answers(page).locator("math")
    assert formulas.count() == 4
    assert [formula.get_attribute("display") for formula in formulas.all()] == [None, None, "block", "block"]
    assert formulas.nth(0).evaluate("node => node.namespaceURI") == "http://www.w3.org/1998/Math/MathML"
    assert formulas.nth(2).locator("mfrac").count() == 1
    expect(answers(page).locator("p").first).to_contain_text("Prices of $5 and $10 stay.")
    expect(answers(page).locator("p code")).to_have_text(r"$\nonsense{x}$")
    expect(answers(page).locator("pre code")).to_have_text('price = "$5$"')


def test_code_has_colours(page: Page, engine: FakeClient) -> None:
    engine.script = Script(words("```python\ndef f():  # why\n    return 'x'\n```\n\n```nonsense\nreturn\n```"))
    ask_to_the_end(page)
    code = answers(page).locator("pre code")
    assert code.first.inner_text() == "def f():  # why\n    return 'x'"
    colours = [
        code.locator(f".hljs-{part}").first.evaluate("node => getComputedStyle(node).color")
        for part in ("keyword", "string", "comment")
    ]
    assert len(set(colours)) == 3
    assert code.last.locator("span").count() == 0


def test_fenced_code_in_ones_own_message(page: Page) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    ask_to_the_end(page, "What is *this*?\n\n```js\nlet a = 1;\n```\nThanks")
    typed = page.locator(".message.user .body")
    assert typed.locator(".typed").all_text_contents() == ["What is *this*?\n", "Thanks"]
    assert typed.locator("pre code").inner_text() == "let a = 1;"
    typed.locator("[data-action=copy-code]").click()
    page.wait_for_function("navigator.clipboard.readText().then((text) => text === 'let a = 1;')")


def test_markdown_of_models(page: Page, engine: FakeClient) -> None:
    text = "- [x] done\n- [ ] open\n\nSee [docs][d], https://example.org/a. ![pic](https://example.org/p.png)\n\n"
    text += "| l | c |\n|---|:-:|\n| a<br>b | ~~c~~ |\n\n[d]: https://example.org/docs"
    engine.script = Script(words(text))
    ask_to_the_end(page)
    tasks = answers(page).locator("li.task > input")
    assert [box.is_checked() for box in tasks.all()] == [True, False]
    links = answers(page).locator("a")
    targets = [link.get_attribute("href") for link in links.all()]
    assert targets == [f"https://example.org/{name}" for name in ("docs", "a", "p.png")]
    assert links.all_inner_texts() == ["docs", "https://example.org/a", "pic"]
    assert answers(page).locator("td").all_inner_texts() == ["a\nb", "c"]
    assert answers(page).locator("td.align-center").count() == 1
    assert answers(page).locator("img").count() == 0


def test_a_growing_answer_touches_only_its_last_block(page: Page) -> None:
    """So streams stay smooth: what was shown stays the same node, and a long answer takes little of a frame."""
    milliseconds, same = page.evaluate(
        """async () => {
          const { MarkdownView } = await import("/web/markdown.js");
          const root = document.createElement("div");
          const view = new MarkdownView(root);
          const text = "Some **words** and $x^2$.\\n\\n```python\\nprint(1)\\n```\\n\\n- a\\n- b\\n\\n".repeat(60);
          view.update(text);
          const nodes = [...root.children];
          const start = performance.now();
          let growing = `${text}~~~js\\n`;
          for (let i = 0; i < 40; i++) view.update((growing += "let a = 1;\\n"));
          return [(performance.now() - start) / 40, nodes.every((node, i) => root.children[i] === node)];
        }"""
    )
    assert same
    assert milliseconds < 100  # on a machine with other work
