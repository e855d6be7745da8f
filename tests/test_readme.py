"""The README's Python runs as it stands, and its commands exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("block", [b for b in BLOCKS if "OpenAI" not in b], ids=["offline", "module"])
def test_python(block, capsys):
    exec(block, {})
    assert capsys.readouterr().out.strip()


def test_flags_and_targets_exist():
    flags = {flag for flag in re.findall(r"(--[a-z-]+)", README) if flag not in ("--to", "--help")}
    server = (ROOT / "server.py").read_text()
    assert flags and all(f'"{flag}"' in server for flag in flags), flags
    targets = set(re.findall(r"^make (\w+)", README, re.MULTILINE))
    assert targets == {"serve", "test"} and all(f"\n{t}:" in (ROOT / "Makefile").read_text() for t in targets)
    assert (ROOT / re.search(r"\((docs/\S+\.svg)\)", README).group(1)).is_file()
