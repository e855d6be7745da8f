"""The page in a browser. `python -m tests.serving.test_page` makes the pictures in docs/page."""

import base64
import json
import shutil
import time
import urllib.request
import zlib
from contextlib import contextmanager

import pytest

from benchmarks.server_process import ROOT, ServerProcess

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

KEY = "key-of-the-page's-tests"
FLAGS = ("--max-num-seqs", "8", "--max-num-batched-tokens", "16", "--access-log", "none")
DESKTOP = {"viewport": {"width": 1440, "height": 900}}
PHONE = {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 2, "is_mobile": True, "has_touch": True}

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


@contextmanager
def browsing():
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server():
    with ServerProcess(*FLAGS, "--num-gpu-blocks-override", "280", "--api-key", KEY) as process:
        yield process


@pytest.fixture(scope="module")
def browser():
    with browsing() as browser:
        yield browser


class Visit:
    """A tab on the page. `problems`: what its console says, and what goes wrong in it."""

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

    def until(self, expression, seconds=20):
        """Waits for an expression to be true. (The page's policy forbids wait_for_function, which needs eval.)"""
        deadline = time.monotonic() + seconds
        while not (value := self.see(expression)):
            assert time.monotonic() < deadline, f"never true: {expression}"
            self.page.wait_for_timeout(20)
        return value

    def live(self):
        """Waits for the feed, and for the end of what others have left running."""
        self.until("window.jpaged?.pool.frame > 0 && window.jpaged.pool.facts.running === 0")
        return self

    def done(self):
        """Waits until nothing that was asked runs any more."""
        self.until("!document.getElementById('send').hidden", 60)

    def say(self, text):
        self.page.fill("#prompt", text)
        self.page.press("#prompt", "Enter")

    def text(self, selector):
        return self.page.locator(selector).all_inner_texts()

    def answer_at_length(self):
        """From now on answers are as long as they may be, so that there is time to look."""

        def longer(route):
            body = json.loads(route.request.post_data) | {"ignore_eos": True, "max_tokens": 900}
            route.continue_(post_data=json.dumps(body))

        self.page.route("**/v1/chat/completions", longer)


def pool_now(server):
    """The pool's bytes as the feed gives them to another viewer."""
    request = urllib.request.Request(f"{server.url}/live", headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request, timeout=20) as response:
        frame = json.loads(response.readline().removeprefix(b"data: "))
    return frame, list(zlib.decompress(base64.b64decode(frame["map"])))


# What is drawn: [block, the pool's word for it, the colour it has, the colour it should have], for every block, in one
# turn of the page's event loop, so that no frame comes between.
DRAWN = """() => {
  const { pool, map } = window.jpaged;
  const probe = document.body.appendChild(document.createElement("span"));
  const colour = (name) => {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color.match(/\\d+/g).map(Number).join();
  };
  const colours = { empty: colour("empty"), cached: colour("cached") };
  for (let i = 0; i < 8; i++) colours[i] = colour(`owner-${i}`);
  probe.remove();
  // A copy, for reading the canvas itself would make the browser draw it another way.
  const copy = new OffscreenCanvas(map.cells.width, map.cells.height).getContext("2d", { willReadFrequently: true });
  copy.drawImage(map.cells, 0, 0);
  const { data, width } = copy.getImageData(0, 0, map.cells.width, map.cells.height);
  const edge = (i) => {
    const x = (i % map.columns) * map.size, y = Math.floor(i / map.columns) * map.size + (map.size >> 1);
    return data.subarray(4 * (y * width + x)).subarray(0, 3).join();
  };
  return Array.from({ length: pool.numBlocks }, (_, i) => {
    const kind = pool.kind(i), name = kind === "owned" || kind === "shared" ? (pool.owners[i] - 1) % 8 : kind;
    return [i, kind, edge(i), colours[name]];
  });
}"""


def assert_drawn(visit):
    drawn = visit.see(DRAWN)
    wrong = [cell for cell in drawn if cell[2] != cell[3]]
    assert not wrong, f"block, kind, colour, and the one it should have: {wrong[:5]}"
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
        visit.see("""() => {
          window.lengths = new Set();
          const look = () => window.lengths.add(document.querySelector(".answer .text")?.textContent.length ?? 0);
          new MutationObserver(look).observe(document.getElementById("messages"), { subtree: true, childList: true });
        }""")
        visit.say("Who are you?")
        visit.done()
        (answer,) = visit.text(".answer .text")
        assert "jpaged" in answer
        assert visit.see("window.lengths.size") > 3, "it came at once"
        (number,) = visit.text(".answer .tag")
        visit.until(f"document.querySelector('#events li')?.textContent.startsWith('end {number} ended after')")
        visit.say("Tell me a story about a fox.")
        visit.done()
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
        visit.until("window.jpaged.pool.facts.running === 0")
        frame, planes = pool_now(server)
        mine = visit.see("({ owners: [...window.jpaged.pool.owners], states: [...window.jpaged.pool.states] })")
        n = frame["num_blocks"]
        assert n == 280 and frame["running"] == 0 and any(planes), "nothing to compare"
        assert mine["owners"] == [planes[i] + 256 * planes[n + i] for i in range(n)]
        assert mine["states"] == planes[2 * n :]
        assert "cached" in assert_drawn(visit) <= {"cached", "empty"}
        told = " ".join(visit.text("#events .label"))
        assert "fork" in told and "copy-on-write" in told
        visit.page.emulate_media(color_scheme="dark")
        visit.page.wait_for_timeout(100)
        assert_drawn(visit)


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
          return [box.left + (i % map.columns + 0.4) * side, box.top + (Math.floor(i / map.columns) + 0.4) * side];
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
        visit.until("window.jpaged.pool.facts.running === 1")
        visit.until("document.querySelector('.answer .text')?.textContent.length > 20")
        visit.page.click("#stop")
        visit.done()
        visit.until("window.jpaged.pool.facts.running === 0", 3)
        assert visit.text(".answer .note") == ["stopped"]
        assert "was stopped after" in visit.text("#events li")[0]


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
     'data: {"error":{"message":"the engine has failed"}}\n\ndata: [DONE]\n\n', "Once\nthe engine has failed"),
    ('data: {"id":"x","choices":[{"index":0,"delta":{"content":"Once"}}]}\n\n',
     "Once\nthe connection ended before the answer did"),
])  # fmt: skip
def test_a_stream_that_breaks_says_so(browser, server, body, shown):
    with Visit(browser, server.url) as visit:
        visit.live()
        visit.page.route(
            "**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body)
        )
        visit.page.route("**/live/requests/*", lambda route: route.fulfill(json={"number": 5}))
        visit.say("Hello")
        visit.done()
        assert visit.text(".answer .text") == [shown]
        assert visit.text(".answer .note") == ["failed"]


def test_a_refusal_is_shown_in_the_servers_words(browser, server):
    with Visit(browser, server.url) as visit:
        visit.live()
        visit.page.fill("#max-tokens", "100000")
        visit.say("Hello")
        visit.done()
        assert "max_tokens" in visit.text(".answer .text")[0] and "100000" in visit.text(".answer .text")[0]
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


def test_a_phone(browser, server):
    with Visit(browser, server.url, **PHONE) as visit:
        visit.live().page.tap("#four")
        visit.done()
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


IN_FULL_SWING = """() => {
  const all = (selector) => [...document.querySelectorAll(`.message:last-child ${selector}`)];
  return window.jpaged.pool.facts.running > 6 && all(".text").every((text) => text.textContent.length > 40)
    && all(".note").every((turn) => /[345] of 5/.test(turn.textContent));
}"""


def main():
    """Pictures of the page while eight chats run."""
    folder = ROOT / "docs" / "page"
    folder.mkdir(parents=True, exist_ok=True)
    flags = ("--max-num-seqs", "32", "--max-num-batched-tokens", "128", "--num-gpu-blocks-override", "440")
    with ServerProcess(*flags, "--access-log", "none", clean=False) as server, browsing() as browser:
        for theme in ("light", "dark"):
            for name, options in ("desktop", DESKTOP), ("phone", PHONE):
                with Visit(browser, server.url, key=None, color_scheme=theme, **options) as visit:
                    visit.live().page.click("#four")
                    visit.done()
                    visit.see("scrollTo(0, 300)" if name == "phone" else "0")
                    ready = False
                    while not ready:  # before the picture was taken, and after it
                        if visit.see("!document.getElementById('send').hidden"):
                            visit.see("document.getElementById('eight').click()")
                        if visit.see(IN_FULL_SWING):
                            visit.page.screenshot(path=folder / f"{theme}-{name}.png")
                            ready = visit.see(IN_FULL_SWING)
                        visit.page.wait_for_timeout(30)


if __name__ == "__main__":
    main()
