"""The Python of the README and of the other pages runs as it stands, and their commands exist."""

import asyncio
import re
import subprocess
from pathlib import Path

import pytest

from jpaged.cli.main import COMMANDS, load, parser
from jpaged.serving.protocol import ChatRequest, CompletionRequest
from jpaged.serving.tool_parsers.format import FORMATS
from jpaged.start import setup
from tests.serving.client import Client
from tests.support.few_shapes import few_shapes, limiting
from tools import routes_table

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
KERNELS, SHARING, SERVER = ((ROOT / "docs" / page).read_text() for page in ("kernels.md", "sharing.md", "server.md"))
BLOCKS = [
    block
    for page in (README, KERNELS, SHARING, SERVER)
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL)
]
NAMES = ["offline", "module", "kernels", "sharing"]


@pytest.mark.parametrize("block", [b for b in BLOCKS if "OpenAI" not in b], ids=NAMES)
def test_python(block, capsys, monkeypatch):
    # Few shapes to compile, and for the demo model those of the fixture `demo`.
    few = limiting(setup.resolve, max_num_seqs=16, max_num_batched_tokens=32, max_model_len=512)
    monkeypatch.setattr(setup, "resolve", few)
    with few_shapes():
        exec(block, {})
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("block", [b for b in BLOCKS if "OpenAI" in b], ids=["stream", "tools"])
async def test_python_of_a_client(block, demo, capsys):
    async with Client(demo.engine, demo.tokenizer, model_name="demo", tool_format=FORMATS["hermes"]) as client:
        await asyncio.to_thread(exec, block.replace("http://localhost:8000", client.url), {})
        await client.idle()
    assert capsys.readouterr().out.strip()


def test_the_servers_page_tells_of_every_endpoint_and_of_no_other_field():
    page = SERVER
    assert page == routes_table.updated(page), "write the table: python -m tools.routes_table"
    fields = page[page.index("Fields beyond") : page.index("Not served")]
    known = {*CompletionRequest.model_fields, *ChatRequest.model_fields}
    assert set(re.findall(r"`([a-z_]+)`", fields)) - {"n"} <= known


def test_flags_and_pictures_exist():
    known = {flag for command in COMMANDS for flag in parser(command, load(command), command).flags}
    prose = re.sub(r"^.*python benchmarks/.*$", "", README, flags=re.MULTILINE)
    assert set(re.findall(r"(--[a-z-]+)", prose)) - {"--to", "--help"} <= known
    assert all((ROOT / path).is_file() for path in re.findall(r"\((docs/\S+\.(?:svg|png))\)", README))


def test_make_shows_the_progress_of_an_installation():
    """It takes minutes."""
    command = ["make", "--dry-run", "--always-make", "serve", "test"]
    commands = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    installs = [line for line in commands.splitlines() if "pip install" in line]
    assert len(installs) == 2 and not any("--quiet" in line for line in installs)
