"""The files of the page: headers, caching, paths and contents."""

import re

import pytest
from yarl import URL

from jpaged.serving.live import static
from tests.serving.live import Server, make


async def test_page_files_have_types_etags_and_a_content_security_policy():
    types = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    assert {"/", "/page/page.css", "/page/page.js"} <= static.PAGE_FILES.keys()
    async with Server(make()) as server:
        for path, name in static.PAGE_FILES.items():
            async with server.session.get(path) as response:
                assert response.status == 200
                assert response.content_type == types[name.rpartition(".")[2]] and response.charset == "utf-8"
                assert response.headers["X-Content-Type-Options"] == "nosniff"
                assert response.headers["Cache-Control"] == "no-cache"
                assert response.headers["Content-Security-Policy"].startswith("default-src 'self';")
                text, etag = await response.text(), response.headers["ETag"]
            own = path != "/page/marked.js"  # A library that recognizes addresses in texts and loads nothing.
            assert not (own and re.search(r"https?://(?!www\.w3\.org/2000/svg)|[\"'(]//", text)), "needs another server"
            async with server.session.get(path, headers={"If-None-Match": etag}) as response:
                assert response.status == 304 and await response.read() == b""
            async with server.session.get(path, headers={"If-None-Match": '"another"'}) as response:
                assert response.status == 200


@pytest.mark.parametrize("path", [
    "/page/", "/page/none.js", "/page/../feed.py", "/page/%2e%2e/feed.py", "/page/..%2ffeed.py", "/page//etc/passwd",
    "/page/index.html/..", "/pages",
])  # fmt: skip
async def test_other_paths_are_not_files(path):
    async with Server(make()) as server:
        url = URL(str(server.server.make_url("/")).rstrip("/") + path, encoded=True)
        async with server.session.get(url) as response:
            assert response.status == 404


def test_page_needs_no_inline_code_and_lists_every_import():
    html = static.PAGE.joinpath("index.html").read_text()
    assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:", html)
    assert html.count("<script") == 1 and 'src="page/page.js"></script>' in html
    for name in static.PAGE_FILES.values():
        if name.endswith(".js"):
            source = static.PAGE.joinpath(name).read_text()
            assert "innerHTML" not in source and "eval(" not in source
            for line in source.splitlines():
                if line.startswith("import") or line.startswith("} from"):
                    assert f"/page/{line.split('./')[1].rstrip(chr(34) + ';')}" in static.PAGE_FILES
