"""A page in a browser that must neither complain nor ask for anything but files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.helpers.clocks import HANG


@contextmanager
def quiet_page(chromium: Any, address: str, width: int = 1280, **options: Any) -> Iterator[Any]:
    """A page of its own context; at the end nothing may have been said, and nothing asked of a network."""
    context = chromium.new_context(viewport={"width": width, "height": 900}, **options)
    opened, said = context.new_page(), list[str]()
    opened.on("console", lambda message: said.append(message.text))
    opened.on("pageerror", lambda error: said.append(str(error)))
    opened.on("request", lambda request: said.append(request.url[:200]))
    opened.set_default_timeout(HANG * 1000)
    opened.goto(address)
    yield opened
    context.close()
    assert [line for line in said if not line.startswith(("file:", "data:", "blob:"))] == []
