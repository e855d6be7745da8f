"""The page in a browser. `python -m tests.serving.test_page` makes the pictures in docs/page."""

import base64
import json
import re
import shutil
import time
import urllib.request
import zlib
from contextlib import contextmanager

import pytest

from benchmarks.shared.server_process import ROOT, SMALL, ServerProcess
from tests.support.few_shapes import PROGRAM
from tests.support.patience import PATIENCE_S, until

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

KEY = "key-of-the-page's-tests"
FLAGS = (*SMALL, "--access-log", "none")
DESKTOP = {"viewport": {"width": 1440, "height": 900}}
PHONE = {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 2, "is_mobile": True, "has_touch": True}

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="Chromium is not installed: apt-get install chromium, or brew install chromium"
)


@contextmanager
def browsing():
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server():
    with ServerProcess(*FLAGS, "--api-key", KEY, program=(*PROGRAM, "serve")) as process:
        yield process


@pytest.fixture(scope="module")
def browser():
    with browsing() as browser:
        yield browser


class Visit:
    """A tab on the page. `problems`: messages of its console, and its errors."""

    def __init__(self, browser, url, key=KEY, **options):
        self.context = browser.new_context(**DESKTOP | options)
        self.page = self.context.new_page()
        self.problems = []
        self.page.on("console", lambda message: self.problems.append(message.text))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.url = url
        if key:
            self.context.add_init_script(
                f"sessionStorage.getItem('jpaged-key') ?? sessionStorage.setItem('jpaged-key', {json.dumps(key)})"
            )

    def __enter__(self):
        self.page.goto(self.url)
        return self

    def __exit__(self, kind, *_):
        self.context.close()
        assert kind or self.problems == []

    def see(self, expression, argument=None):
        return self.page.evaluate(expression, argument)

    def until(self, expression):
        """Waits for an expression to be true. (The page's policy forbids wait_for_function, which needs eval.)"""
        deadline = time.monotonic() + PATIENCE_S
        while not (value := self.see(expression)):
            assert time.monotonic() < deadline, f"never true: {expression}"
            self.page.wait_for_timeout(20)
        return value

    def live(self):
        """Wait for the feed, and for the end of other tests' requests."""
        self.until("window.jpaged?.pool.frame > 0 && window.jpaged.pool.facts.running === 0")
        return self

    def done(self):
        """Waits until nothing that was asked runs any more."""
        self.until("!document.getElementById('send').hidden")

    def say(self, text):
        self.page.fill("#prompt", text)
        self.page.press("#prompt", "Enter")

    def text(self, selector):
        return self.page.locator(selector).all_inner_texts()

    def answer_with(self, body):
        """From now on the answer to a message is this stream of events."""
        self.page.route("**/v1/chat/completions", lambda r: r.fulfill(content_type="text/event-stream", body=body))
        self.page.route("**/live/requests/*", lambda r: r.fulfill(json={"number": 5}))

    def show_pool(self, num_blocks, used, cached):
        """Reload with a feed that shows this pool: `used` and `cached` are blocks."""
        frame = pool_frame(num_blocks, used, cached)
        self.page.route("**/live", lambda r: r.fulfill(content_type="text/event-stream", body=frame))
        self.page.reload()
        self.until(f"window.jpaged?.pool.numBlocks === {num_blocks} && document.getElementById('pool-size').innerText")

    def answer_at_length(self):
        """From now on answers are as long as they may be, so that there is time to look."""

        def longer(route):
            body = json.loads(route.request.post_data) | {"ignore_eos": True, "max_tokens": 400}
            route.continue_(post_data=json.dumps(body))

        self.page.route("**/v1/chat/completions", longer)


def pool_now(server):
    """The pool's bytes as the feed gives them to another viewer."""
    request = urllib.request.Request(f"{server.url}/live", headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        frame = json.loads(response.readline().removeprefix(b"data: "))
    return frame, list(zlib.decompress(base64.b64decode(frame["map"])))


def pool_frame(num_blocks, used, cached):
    """A frame of the feed: request 3 holds the blocks `used`; the blocks `cached` are free."""
    owners, states = bytearray(2 * num_blocks), bytearray(num_blocks)
    for block in used:
        owners[block], states[block] = 3, 1
    for block in cached:
        states[block] = 128
    names = ("tokens", "timed_tokens", "token_seconds", "first_tokens", "first_token_seconds", "copies",
             "preemptions", "swapped_blocks", "prefix_queries", "prefix_hits")  # fmt: skip
    frame = {"frame": 1, "whole": True, "time": 1.0, "num_blocks": num_blocks, "block_size": 16, "caching": True,
             "max_blocks": 64, "used": len(used), "held": len(used), "branches": 1, "running": 1, "waiting": 0,
             "requests": [], "queue": [], "events": [], "totals": dict.fromkeys(names, 0),
             "map": base64.b64encode(zlib.compress(owners + states)).decode()}  # fmt: skip
    return f"data: {json.dumps(frame)}\n\n"


# CSS pixels of the map in the colour of request 3.
COLOURED = """async () => {
  const { colours } = await import("/page/colours.js");
  const [canvas] = document.querySelectorAll("#map canvas"), expected = colours().owners[2].join();
  const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d");
  copy.drawImage(canvas, 0, 0);
  const { data } = copy.getImageData(0, 0, canvas.width, canvas.height);
  let found = 0;
  for (let i = 0; i < data.length; i += 4) found += data.subarray(i, i + 3).join() === expected;
  return found / devicePixelRatio ** 2;
}"""


# The drawn blocks: [block, its kind, the colour of its edge, the expected colour]. One turn of the page's event loop
# reads the pool and the canvas, so no frame comes between.
DRAWN = """async () => {
  const { colours, mix } = await import("/page/colours.js");
  const { pool, map } = window.jpaged, { order, columns } = map.view, theme = colours();
  // A copy, because reading the canvas itself would make the browser draw it in another way.
  const copy = new OffscreenCanvas(map.cells.width, map.cells.height).getContext("2d", { willReadFrequently: true });
  copy.drawImage(map.cells, 0, 0);
  const { data, width } = copy.getImageData(0, 0, map.cells.width, map.cells.height);
  const edge = (at) => {
    const x = (at % columns) * map.size, y = Math.floor(at / columns) * map.size + (map.size >> 1);
    return data.subarray(4 * (y * width + x)).subarray(0, 3).join();
  };
  const expected = (i, kind) => {
    const owner = theme.owners[((pool.owners[i] || pool.writers[i]) - 1) % 8];
    if (kind === "cached" && owner) return mix(owner, theme.card, 0.4);
    return kind === "owned" || kind === "shared" ? owner ?? theme.ink : theme[kind];
  };
  return [...order].flatMap((i, at) => (i < 0 ? [] : [[i, pool.kind(i), edge(at), expected(i, pool.kind(i)).join()]]));
}"""


def wrong(drawn):
    return [cell for cell in drawn if cell[2] != cell[3]]


def assert_drawn(visit):
    drawn = visit.see(DRAWN)
    assert not wrong(drawn), f"block, kind, colour, expected colour: {wrong(drawn)[:5]}"
    return {kind for _, kind, _, _ in drawn}


def test_the_key_is_asked_for_and_stays_out_of_the_url(browser, server):
    with Visit(browser, server.url, key=None) as visit:
        page = visit.page
        page.fill("#key-input", "wrong")
        page.click("#key-dialog .primary")
        visit.until("document.getElementById('key-reason').textContent.includes('did not accept')")
        page.click("#key-cancel")
        visit.until("!document.getElementById('key').hidden")
        assert visit.text("#status-text") == ["a key is needed"]
        page.click("#key")
        page.fill("#key-input", KEY)
        page.press("#key-input", "Enter")
        visit.live()
        page.reload()
        visit.live()
        assert KEY not in page.url and not visit.see("Object.values(localStorage).join()")
        assert all("401" in problem for problem in visit.problems), visit.problems
        visit.problems.clear()


def test_an_answer_streams_and_the_conversation_goes_on(browser, server):
    with Visit(browser, server.url) as visit:
        visit.live()
        bodies = []
        visit.page.on("request", lambda r: bodies.append(r.post_data) if r.url.endswith("completions") else None)
        visit.say("Who are you?")
        visit.done()
        (answer,) = visit.text(".answer .text")
        assert "jpaged" in answer
        (number,) = visit.text(".answer .tag")
        visit.until(f"document.querySelector('#events li')?.textContent.startsWith('end {number} ended after')")
        visit.see("""() => {
          window.lengths = new Set();
          const text = () => document.querySelector(".message:last-child .text")?.textContent ?? "";
          const look = () => window.lengths.add(text().length);
          new MutationObserver(look).observe(document.getElementById("messages"), { subtree: true, childList: true });
        }""")
        visit.say("Tell me a story about a fox.")
        visit.done()
        assert visit.see("window.lengths.size") > 2, "it came at once"
        roles = [message["role"] for message in json.loads(bodies[1])["messages"]]
        assert roles == ["user", "assistant", "user"] and json.loads(bodies[1])["messages"][1]["content"] == answer
        visit.page.click("#new-chat")
        assert visit.text(".message") == [] and visit.see("window.jpaged.chat.history") == []


def test_the_map_is_the_pool(browser, server):
    with Visit(browser, server.url) as visit:
        visit.live().say("Who are you?")
        visit.done()
        visit.page.click("#new-chat")
        visit.answer_at_length()
        visit.page.click("#four")
        kinds = set()
        while not kinds >= {"owned", "shared", "cached"}:
            assert visit.see("document.getElementById('send').hidden"), f"only {kinds} were drawn"
            kinds |= assert_drawn(visit)
        visit.see("document.getElementById('stop').click()")
        visit.done()
        # An aborted request does not run any more, but a step in flight may still hold its blocks.
        visit.until("window.jpaged.pool.facts.running === 0 && window.jpaged.pool.facts.used === 0")
        frame, planes = pool_now(server)
        mine = visit.see("({ owners: [...window.jpaged.pool.owners], states: [...window.jpaged.pool.states] })")
        n = frame["num_blocks"]
        assert n == 512 and frame["running"] == 0 and any(planes), "nothing to compare"
        assert mine["owners"] == [planes[i] + 256 * planes[n + i] for i in range(n)]
        assert mine["states"] == planes[2 * n :]
        assert "cached" in assert_drawn(visit) <= {"cached", "empty"}
        told = " ".join(visit.text("#events .label"))
        assert "fork" in told and "copy-on-write" in told
        visit.page.emulate_media(color_scheme="dark")
        until(lambda: not wrong(visit.see(DRAWN)))


def test_blocks_and_requests_can_be_pointed_at(browser, server):
    with Visit(browser, server.url) as visit:
        visit.live().answer_at_length()
        visit.say("Tell me a story about a king.")
        visit.until("window.jpaged.pool.facts.requests[0]?.branches[0].table.length > 1")
        visit.see("void (window.jpaged.pool.apply = () => new Promise(() => {}))")  # no frame comes any more
        block = visit.see("window.jpaged.pool.facts.requests[0].branches[0].table[0]")
        number = visit.see("window.jpaged.pool.facts.requests[0].number")
        x, y = visit.see(
            """(i) => {
          const { map } = window.jpaged, box = map.cells.getBoundingClientRect(), side = map.size / map.scale;
          const at = map.view.place[i], { columns } = map.view;
          return [box.left + (at % columns + 0.4) * side, box.top + (Math.floor(at / columns) + 0.4) * side];
        }""",
            block,
        )
        visit.page.mouse.move(x, y)
        (tip,) = visit.text("#tooltip")
        assert tip.startswith(f"Block {block}") and f"#{number}: tokens 1 to 16" in tip
        assert visit.see("window.jpaged.map.highlighted") == number
        visit.page.focus("#map")
        visit.page.keyboard.press("ArrowRight")
        assert visit.text("#tooltip")[0].startswith(f"Block {block + 1}")
        visit.page.keyboard.press("Escape")
        assert not visit.page.is_visible("#tooltip")
        visit.page.focus(".request")
        assert visit.see("window.jpaged.map.highlighted") == number


def test_stop_ends_the_request_itself(browser, server):
    with Visit(browser, server.url) as visit:
        visit.live().answer_at_length()
        visit.say("Tell me a story about a dragon.")
        # The page clicks by itself: the answer might end between two calls from here.
        running = "window.jpaged.pool.facts.running === 1"
        begun = "document.querySelector('.answer .text')?.textContent.length > 20"
        visit.until(f"{running} && {begun} && (document.querySelector('#stop').click(), true)")
        visit.done()
        visit.until("window.jpaged.pool.facts.running === 0")
        assert visit.text(".answer .note") == ["stopped"]
        assert "was stopped after" in visit.text("#events li")[0]


@pytest.mark.deep
def test_eight_chats_fill_the_pool(browser, server):
    with Visit(browser, server.url) as visit:
        visit.live().page.click("#eight")
        visit.until("window.jpaged.pool.facts.running > 4")
        visit.until("document.querySelectorAll('.request').length > 4")
        visit.page.click("#stop")
        visit.done()
        assert len(visit.text(".answers .answer")) == 8


def test_text_stays_text(browser, server):
    with Visit(browser, server.url) as visit:
        visit.live()
        markup = "<img src=x onerror=alert(1)><b>bold</b>"
        visit.say(markup)
        visit.done()
        assert visit.text(".mine") == [markup]
        assert visit.page.locator("#messages img, #messages b").count() == 0


@pytest.mark.parametrize("body, shown", [
    ('data: {"id":"x","choices":[{"index":0,"delta":{"content":"Once"}}]}\n\n'
     'data: {"error":{"message":"the engine has failed"}}\n\ndata: [DONE]\n\n', "the engine has failed"),
    ('data: {"id":"x","choices":[{"index":0,"delta":{"content":"Once"}}]}\n\n',
     "the connection ended before the answer did"),
])  # fmt: skip
def test_a_stream_that_breaks_says_so(browser, server, body, shown):
    with Visit(browser, server.url) as visit:
        visit.live()
        visit.answer_with(body)
        visit.say("Hello")
        visit.done()
        assert visit.text(".answer .text") == ["Once"] and visit.text(".answer .error") == [shown]
        assert visit.text(".answer .note") == ["failed"]


def test_a_refusal_is_shown_in_the_servers_words(browser, server):
    with Visit(browser, server.url) as visit:
        visit.live()
        visit.page.fill("#max-tokens", "100000")
        visit.say("Hello")
        visit.done()
        assert "max_tokens" in visit.text(".answer .error")[0] and "100000" in visit.text(".answer .error")[0]
        assert visit.page.locator(".offer").count() == 0, "a new chat would not help"
        assert [p for p in visit.problems if "400" not in p] == []
        visit.problems.clear()


def test_a_model_without_a_chat_template_continues_the_text(browser, server):
    error = {"error": {"message": "the model has no chat template; pass one", "param": "messages"}}
    with Visit(browser, server.url) as visit:
        visit.live()
        visit.page.route("**/v1/chat/completions", lambda route: route.fulfill(status=400, json=error))
        visit.say("Once upon a time")
        visit.done()
        assert len(visit.text(".answer .text")[0]) > 20
        assert "no chat template" in visit.text("#notice")[0]
        assert [p for p in visit.problems if "400" not in p] == []
        visit.problems.clear()


def test_it_says_when_the_engine_is_dead_and_comes_back(browser, server):
    with Visit(browser, server.url) as visit:
        visit.page.route(
            "**/live", lambda route: route.fulfill(content_type="text/event-stream", body='data: {"dead":true}\n\n')
        )
        visit.page.reload()
        visit.until("document.getElementById('status').dataset.state === 'dead'")
        assert "the engine has stopped" in visit.text("#status-text")[0]
        visit.page.unroute("**/live")
        visit.live()
        assert visit.see("document.getElementById('status').dataset.state") == "live"


def test_events_are_read_however_they_are_cut(browser, server):
    """A character, a line and an end of an event may all come in two parts."""
    with Visit(browser, server.url) as visit:
        read = visit.see("""async () => {
          const { events } = await import("/page/stream.js");
          const text = 'data: {"a":"Grüße 🦊"}\\n\\n: nothing\\n\\ndata: one\\ndata: two\\r\\n\\r\\n'
            + 'data:[DONE]\\n\\ndata: lost';
          const bytes = new TextEncoder().encode(text);
          const all = [];
          for (let size = 1; size < 12; size++) {
            const parts = [];
            for (let i = 0; i < bytes.length; i += size) parts.push(bytes.slice(i, i + size));
            const stream = new ReadableStream({ pull(c) { parts.length ? c.enqueue(parts.shift()) : c.close(); } });
            const found = [];
            for await (const data of events(new Response(stream))) found.push(data);
            all.push(found);
          }
          return all;
        }""")
        assert read == [['{"a":"Grüße 🦊"}', "one\ntwo", "[DONE]"]] * 11


@pytest.mark.parametrize("num_blocks, cached, folded", [
    pytest.param(100, range(6, 20), None, marks=pytest.mark.deep),
    pytest.param(4096, range(6, 50), "empty", marks=pytest.mark.deep),
    (100_000, range(99_000), "cached and"),
])  # fmt: skip
def test_map_of_a_small_request_shows_its_blocks_large(browser, server, num_blocks, cached, folded):
    used = [0, 1, 2, 3, 4, num_blocks // 2]
    with Visit(browser, server.url) as visit:
        visit.show_pool(num_blocks, used, set(cached) - set(used))
        assert visit.see(COLOURED) > 300 * len(used), "CSS pixels; a block of 20 x 20 has 324 without its gap"
        (words,) = visit.text("#folded")
        assert (folded in words) if folded else not words
        drawn = visit.see("window.jpaged.map.view.order.filter((block) => block >= 0).length")
        hidden = sum(int(number.replace(",", "")) for number in re.findall(r"[\d,]+(?= cached| empty)", words))
        assert drawn + hidden == num_blocks
        assert visit.page.locator("#map").bounding_box()["height"] < 400


@pytest.mark.deep
def test_map_of_a_full_pool_shows_all_blocks_in_use(browser, server):
    with Visit(browser, server.url) as visit:
        used = range(0, 100_000, 2)
        visit.show_pool(100_000, used, range(0))
        assert visit.see(COLOURED) >= len(used) and visit.text("#folded") == [""]


@pytest.mark.deep
def test_view_changes_its_scale_in_few_steps(browser, server):
    """A load that grows only makes cells smaller, one that swings by a tenth changes nothing, and cells become larger
    again only some seconds after the load has gone."""
    with Visit(browser, server.url) as visit:
        grown, swinging, after = visit.see("""async () => {
          const { View } = await import("/page/view.js");
          const pool = { numBlocks: 4096, states: new Uint8Array(4096), references(i) { return this.states[i]; } };
          const view = new View(pool);
          view.resize(900, 310);
          let now = 10000;
          const step = (used) => {
            pool.states.forEach((_, i) => { pool.states[i] = i < used ? 1 : 0; });
            if (view.notice(null, (now += 100))) view.fit(now);
            return view.cell;
          };
          const grown = [], swinging = [], after = [];
          for (let used = 1; used <= 3000; used += 20) grown.push(step(used));
          for (let i = 0; i < 60; i++) swinging.push(step(i % 2 ? 3000 : 2700));
          for (let i = 0; i < 60; i++) after.push(step(10));
          return [grown, swinging, after];
        }""")
        assert grown[0] == 36 and grown == sorted(grown, reverse=True) and len(set(grown)) < 10
        assert len(set(swinging)) == 1
        assert after[10] == swinging[0] and after[-1] == 36 and len(set(after)) == 2


@pytest.mark.deep
def test_copy_within_a_row_is_drawn_as_an_arrow(browser, server):
    """Above or below the middle of the row, every column between the two blocks has a part of a line that is seen."""
    with Visit(browser, server.url) as visit:
        visit.show_pool(4096, range(12), range(0))
        columns = visit.see("""async () => {
          const { pool, map } = window.jpaged;
          map.flash([8], "text", 2);
          await new Promise((resolve) => setTimeout(resolve, 600));
          const overlay = document.getElementById("map-flashes"), { width } = overlay;
          const { data } = overlay.getContext("2d").getImageData(0, 0, width, overlay.height);
          const rows = (x) => {
            let seen = 0;
            for (let at = 4 * x + 3; at < data.length; at += 4 * width) seen += data[at] > 150;
            return seen / devicePixelRatio;
          };
          return Array.from({ length: 4 * map.size }, (_, i) => rows(3 * map.size + i)); // blocks 3 to 6
        }""")
        assert min(columns) >= 4, "CSS pixels of the line and its halo"


MARKDOWN = """# Title

Some **bold**, *soft* and `code` with 2 * 3 * 4, and a [link](https://example.org/a).
Next line

1. one
2. two
   - inner

| a | b |
|---|--:|
| 1 | 2 |

```py
print("<b>")
```
"""


def stream_of(*texts):
    chunks = [{"id": "x", "choices": [{"index": 0, "delta": {"content": text}}]} for text in texts]
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def test_answer_in_markdown_is_shown_formatted(browser, server):
    with Visit(browser, server.url) as visit:
        visit.live().answer_with(stream_of(*MARKDOWN))
        visit.say("**plain**")
        visit.done()
        assert visit.text(".mine") == ["**plain**"]
        answer = visit.page.locator(".answer .text")
        texts = {name: answer.locator(name).all_inner_texts() for name in ("strong", "em", "p code", "li", "th", "td")}
        assert texts == {
            "strong": ["bold"], "em": ["soft"], "p code": ["code"], "li": ["one", "two\ninner", "inner"],
            "th": ["a", "b"], "td": ["1", "2"],
        }  # fmt: skip
        assert "2 * 3 * 4" in answer.inner_text() and answer.locator("pre").inner_text().strip() == 'print("<b>")'
        link = answer.locator("a")
        assert link.get_attribute("href") == "https://example.org/a" and "noopener" in link.get_attribute("rel")
        visit.page.context.grant_permissions(["clipboard-read"])
        answer.locator("button").click()
        assert visit.see("navigator.clipboard.readText()").strip() == 'print("<b>")'
        assert json.dumps(MARKDOWN) == json.dumps(visit.see("window.jpaged.chat.history.at(-1).content"))


def test_markdown_is_well_formed_at_every_moment_of_a_stream(browser, server):
    with Visit(browser, server.url) as visit:
        shown, kept = visit.see(
            """async (text) => {
          const { Markdown } = await import("/page/markdown.js");
          const element = document.createElement("div"), markdown = new Markdown(element), shown = [];
          let title = null, kept = true;
          for (let end = 1; end <= text.length; end++) {
            markdown.show(text.slice(0, end), end < text.length);
            if (end > 20) kept &&= element.firstChild === (title ??= element.firstChild);
            shown.push(element.textContent);
          }
          return [shown, kept];
        }""",
            MARKDOWN,
        )
        assert not [text for text in shown if "**" in text or "`" in text or "*soft" in text or "bold*" in text]
        assert kept, "a finished block was made anew"


def test_markup_and_links_in_an_answer_do_nothing(browser, server):
    attack = (
        "<img src=x onerror=alert(1)> <script>alert(2)</script> [a](javascript:alert(3)) ![b](https://example.org/b.png)\n\n"
        "<div onclick=alert(4)>c</div>\n\n<iframe srcdoc='<script>alert(5)</script>'></iframe>\n\n"
        '[d]: javascript:alert(6)\n\n[d] <https://example.org/"onmouseover=alert(7)> [e](data:text/html,x)'
    )
    with Visit(browser, server.url) as visit:
        requested, dialogs = [], []
        visit.live().answer_with(stream_of(attack))
        visit.page.on("request", lambda request: requested.append(request.url))
        visit.page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
        visit.say("Hello")
        visit.done()
        elements = visit.see("[...document.querySelectorAll('.answer .text *')].map((e) => e.outerHTML)")
        assert {element.partition(">")[0].split()[0] for element in elements} <= {"<p", "<a", "<span"}
        assert not visit.see("""[...document.querySelectorAll(".answer .text *")].some((e) =>
          [...e.attributes].some((a) => a.name.startsWith("on") || /^(javascript|data):/.test(a.value)))""")
        (text,) = visit.text(".answer .text")
        assert "onerror=alert(1)" in text and "<script>alert(5)" in text
        assert not dialogs and not [url for url in requested if "example" in url]


@pytest.mark.parametrize("refusal", [
    None,
    pytest.param(
        {"message": "too many tokens", "param": "messages", "code": "context_length_exceeded"}, marks=pytest.mark.deep
    ),
])  # fmt: skip
def test_conversation_that_outgrows_the_context_offers_a_new_chat(browser, server, refusal):
    """`refusal`: None for the server's own."""
    with Visit(browser, server.url, **PHONE) as visit:
        visit.live()
        turn = [{"role": "user", "content": "Tell me a story. " * 40}, {"role": "assistant", "content": "No. " * 400}]
        visit.see("(turn) => { for (let i = 0; i < 8; i++) window.jpaged.chat.history.push(...turn); }", turn)
        if refusal:
            visit.page.route("**/v1/chat/completions", lambda r: r.fulfill(status=400, json={"error": refusal}))
        visit.page.fill("#prompt", "And then?")
        visit.see("scrollTo(0, 300)")
        visit.page.press("#prompt", "Enter")
        visit.done()
        for selector in ".answer .error", ".offer":
            assert visit.see(
                """(selector) => {
              const element = document.querySelector(selector), box = element.getBoundingClientRect();
              return element.contains(document.elementFromPoint(box.left + box.width / 2, box.top + box.height / 2));
            }""",
                selector,
            ), f"{selector} is out of sight"
        visit.page.unroute("**/v1/chat/completions")
        visit.page.tap(".offer")
        assert visit.see("window.jpaged.chat.history.length") == 0 and visit.text(".message") == []
        assert visit.page.input_value("#prompt") == "And then?"
        visit.page.tap("#send")
        visit.done()
        assert len(visit.text(".answer .text")[0]) > 20
        assert [p for p in visit.problems if "400" not in p] == []
        visit.problems.clear()


def test_phone_shows_demo_buttons_and_the_map_without_scrolling(browser, server):
    with Visit(browser, server.url, **PHONE) as visit:
        visit.live()
        for selector in "#four", "#eight":
            box = visit.page.locator(selector).bounding_box()
            assert box["x"] >= 0 and box["x"] + box["width"] <= 390 and box["y"] + box["height"] <= 844
        visit.page.tap("#four")
        visit.done()
        assert visit.see("scrollY") == 0 and visit.page.locator("#map").bounding_box()["y"] < 844 - 120
        assert visit.see("document.documentElement.scrollWidth <= innerWidth"), "it scrolls sideways"
        small = visit.see("""[...document.querySelectorAll("button, select, input, textarea, summary")]
          .filter((e) => e.offsetParent && !e.matches(".tag") && e.getBoundingClientRect().height < 44)
          .map((e) => e.outerHTML)""")
        assert small == []
        chat, pool = (visit.page.locator(selector).bounding_box()["y"] for selector in (".chat", ".pool"))
        assert chat < pool
        assert_drawn(visit)


def test_the_theme_can_be_chosen_and_is_kept(browser, server):
    with Visit(browser, server.url, color_scheme="light") as visit:
        background = "getComputedStyle(document.body).backgroundColor"
        light = visit.live().see(background)
        visit.page.click("#theme")
        visit.page.click("#theme")
        dark = visit.see(background)
        assert dark != light and visit.text("#theme-name") == ["dark"]
        visit.page.reload()
        assert visit.live().see(background) == dark
        assert_drawn(visit)


# The numbers of eight requests that have written a while, else nothing.
IN_FULL_SWING = """() => {
  const all = (selector) => [...document.querySelectorAll(`.message:last-child ${selector}`)];
  const swing = window.jpaged.pool.facts.running > 6 && all(".text").every((text) => text.textContent.length > 40)
    && all(".note").every((turn) => /[345] of 5/.test(turn.textContent));
  return swing ? all(".tag").map((tag) => tag.textContent).join() : "";
}"""


def main():
    """Pictures of the page while eight chats run."""
    folder = ROOT / "docs" / "page"
    folder.mkdir(parents=True, exist_ok=True)
    flags = ("--max-num-seqs", "32", "--max-num-batched-tokens", "128")
    with ServerProcess(*flags, "--access-log", "none", clean=False) as server, browsing() as browser:
        for theme in ("light", "dark"):
            for name, options in ("desktop", DESKTOP), ("phone", PHONE):
                urllib.request.urlopen(urllib.request.Request(f"{server.url}/reset_prefix_cache", method="POST"))
                with Visit(browser, server.url, key=None, color_scheme=theme, **options) as visit:
                    visit.live().page.click("#four")
                    visit.done()
                    ready = False
                    while not ready:
                        if visit.see("!document.getElementById('send').hidden"):
                            visit.see("document.getElementById('eight').click()")
                        if running := visit.see(IN_FULL_SWING):
                            visit.page.screenshot(path=folder / f"{theme}-{name}.png")
                            ready = visit.see(IN_FULL_SWING) == running
                        visit.page.wait_for_timeout(30)


if __name__ == "__main__":
    main()
