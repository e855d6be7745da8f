# /// script
# requires-python = ">=3.12"
# dependencies = ["open-webui>=0.12,<1"]
# ///
"""Open WebUI's server without accounts, driven by its API."""

import json
import os
import tempfile
import urllib.request

from scenarios import MODEL, PROMPT, TIMEOUT_S, URL, program, run

SETTINGS = {
    "WEBUI_AUTH": "False", "WEBUI_SECRET_KEY": "fox", "OFFLINE_MODE": "True", "ENABLE_OLLAMA_API": "False",
    "OPENAI_API_BASE_URL": f"{URL}/v1", "OPENAI_API_KEY": "none", "RAG_EMBEDDING_ENGINE": "openai",
}  # fmt: skip
BODY = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 20}


def call(path, body=None):
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    request = urllib.request.Request(base + path, body and json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
        return response.read().decode()


def models():
    assert MODEL in [model["id"] for model in json.loads(call("/api/models"))["data"]]


def chat():
    answer = json.loads(call("/api/chat/completions", BODY | {"stream": False}))
    assert answer["choices"][0]["message"]["content"]


def stream():
    frames = call("/api/chat/completions", BODY | {"stream": True}).split("\n\n")
    assert len(frames) > 10 and "data: [DONE]" in frames


with tempfile.TemporaryDirectory() as folder:
    os.environ.update(SETTINGS, DATA_DIR=folder, HOME=folder)
    with program("open-webui", "serve", path="/health") as base:
        token = None
        token = json.loads(call("/api/v1/auths/signin", {"email": "", "password": ""}))["token"]
        run(models, chat, stream)
