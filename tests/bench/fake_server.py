"""A server that speaks the OpenAI API, has words for tokens, and fails as it is told to."""

import asyncio
import json
import threading
from contextlib import contextmanager

from aiohttp import web

from tests.support.patience import PATIENCE_S


class FakeServer:
    """Answers with as many words as a request has `max_tokens`.

    Args:
        failures: {number of a streamed request, from 0 on: how it fails}: "refuse", "break", "error", "endless" (no
            [DONE]), "garbage", "number", "hang".
        answer: the chunks' texts for a request, instead.
        cut: bytes that are written at a time.
        pause: seconds before each chunk.
        together: how many requests have to be there before the first of them is answered.
        tokenizes: whether there is /tokenize.
        counts: whether there is usage.
    """

    def __init__(self, failures=None, *, answer=None, cut=10**6, pause=0.0, tokenizes=True, counts=True,
                 max_model_len=None, api_key=None, together=1):  # fmt: skip
        self.failures, self.cut, self.pause = failures or {}, cut, pause
        self.answer = answer or (lambda body: ["word "] * body["max_tokens"])
        self.tokenizes, self.counts, self.max_model_len, self.api_key = tokenizes, counts, max_model_len, api_key
        self.bodies, self.whole, self.tokenized = [], [], []  # of requests for streams, for whole answers, /tokenize
        self.together, self.running, self.most_running = together, 0, 0

    @contextmanager
    def serving(self):
        """Within it, the server runs in a thread of its own; gives its url."""
        loop, ready, urls = asyncio.new_event_loop(), threading.Event(), []

        async def main():
            runner = web.AppRunner(self.app(), shutdown_timeout=0.0, handler_cancellation=True)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            urls.append("http://{}:{}".format(*runner.addresses[0]))
            self.stopped = asyncio.Event()
            ready.set()
            await self.stopped.wait()
            await runner.cleanup()

        thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
        thread.start()
        assert ready.wait(PATIENCE_S)
        try:
            yield urls[0]
        finally:
            loop.call_soon_threadsafe(self.stopped.set)
            thread.join()
            loop.close()

    def app(self):
        app = web.Application(middlewares=[self._authorize])
        app.add_routes([web.get("/v1/models", self._models), web.post("/v1/completions", self._generate),
                        web.post("/v1/chat/completions", self._generate)])  # fmt: skip
        if self.tokenizes:
            app.add_routes([web.post("/tokenize", self._tokenize)])
        return app

    @web.middleware
    async def _authorize(self, request, handler):
        if self.api_key and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return web.json_response({"error": {"message": "a valid API key is needed"}}, status=401)
        return await handler(request)

    async def _models(self, request):
        model = {"id": "fake", "object": "model"}
        return web.json_response(
            {"data": [model | ({"max_model_len": self.max_model_len} if self.max_model_len else {})]}
        )

    async def _tokenize(self, request):
        body = await request.json()
        self.tokenized.append(body)
        tokens = [sum(map(ord, word)) for word in body["prompt"].split()]
        tokens = [1, *tokens] if body.get("add_special_tokens", True) else tokens
        return web.json_response({"count": len(tokens), "tokens": tokens, "max_model_len": self.max_model_len or 99})

    async def _generate(self, request):
        body = await request.json()
        chat = "messages" in body
        usage = {"prompt_tokens": count(body), "completion_tokens": body.get("max_tokens", 0)}
        if not body.get("stream"):
            self.whole.append(body)
            return web.json_response({"choices": [], "usage": usage})
        failure = self.failures.get(len(self.bodies))
        self.bodies.append(body)
        if failure == "refuse":
            return web.json_response({"error": {"message": "too busy", "code": 503}}, status=503)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            while len(self.bodies) < self.together:
                await asyncio.sleep(0.005)
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            if chat:
                await self._send(response, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
            for number, text in enumerate(self.answer(body)):
                if number == 2 and failure == "break":
                    request.transport.close()
                    return response
                if number == 2 and failure == "hang":
                    await asyncio.sleep(60)
                if number == 2 and failure == "error":
                    await self._send(response, {"error": {"message": "the engine has failed"}})
                    return response
                if number == 2 and failure in ("garbage", "number"):
                    await self._write(response, b"data: {no json\n\n" if failure == "garbage" else b"data: 5\n\n")
                await asyncio.sleep(self.pause)
                choice = {"delta": {"content": text}} if chat else {"text": text}
                await self._send(response, {"choices": [{"index": number % body.get("n", 1), **choice}]})
            if self.counts and body.get("stream_options", {}).get("include_usage"):
                await self._send(response, {"choices": [], "usage": usage})
            if failure != "endless":
                await self._write(response, b"data: [DONE]\n\n")
            return response
        finally:
            self.running -= 1

    async def _send(self, response, event):
        await self._write(response, b"data: " + json.dumps(event).encode() + b"\n\n")

    async def _write(self, response, data):
        for start in range(0, len(data), self.cut):
            await response.write(data[start : start + self.cut])
            await asyncio.sleep(0)


def count(body):
    """Tokens of a prompt: its words and one more; of a conversation, two more for each message."""
    if "messages" in body:
        return sum(len(message["content"].split()) + 2 for message in body["messages"]) + 1
    prompt = body["prompt"]
    return len(prompt.split()) + 1 if isinstance(prompt, str) else len(prompt)
