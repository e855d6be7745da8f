"""Write the table of endpoints into docs/server.md: `python -m tools.routes_table`."""

from pathlib import Path

from jpaged.serving.endpoint import Endpoint
from jpaged.serving.endpoints import served
from jpaged.serving.service import ServerConfig

PAGE = Path(__file__).parents[1] / "docs" / "server.md"
HEAD = "| endpoint | function |\n|---|---|\n"
END = "\n`--enable-weight-updates`"


def table() -> str:
    """Return the table, in Markdown. The files of the page share one row."""
    return HEAD + "".join(f"| {_name(each)} | {each.summary} |\n" for each in served(ServerConfig()) if _is_shown(each))


def updated(page: str) -> str:
    """Return the page with the present table."""
    return page[: page.index(HEAD)] + table() + page[page.index(END) :]


def _is_shown(endpoint: Endpoint) -> bool:
    return not endpoint.path.startswith(("/page/", "/live/"))


def _name(endpoint: Endpoint) -> str:
    return ", ".join(f"`{' '.join([*endpoint.methods, path])}`" for path in endpoint.paths)


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
