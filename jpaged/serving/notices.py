"""Warnings about the parts of requests that the server ignores."""

import logging
from collections.abc import Iterable

from jpaged.core.params import shown

logger = logging.getLogger(__name__)

MAX_NOTICES = 256  # clients choose the names


class Notices:
    """Log of ignored parts, each of which is told once."""

    def __init__(self) -> None:
        self._told: set[tuple[str, str]] = set()

    def tell(self, path: str, names: Iterable[str]) -> None:
        """Log the names that requests for a path have for the first time, up to MAX_NOTICES of all paths."""
        for name in names:
            notice = path, shown(name)
            if notice not in self._told and len(self._told) < MAX_NOTICES:
                self._told.add(notice)
                logger.warning("%s: %s is ignored", *notice)
