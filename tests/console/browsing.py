"""A page of the console in a real Chromium."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

from playwright.sync_api import Browser, Page, sync_playwright

from tests.console.scenes import TOKEN
from tests.support.kafka import unavailable

CHROMIUM = "/usr/bin/chromium"
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]
PATIENCE_MS = 30_000
SIZE = {"width": 1360, "height": 860}
SCREENSHOTS = Path(os.environ.get("CONSOLE_SCREENSHOTS", "build/console-screenshots"))


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Yield Debian's Chromium, because Playwright downloads no browser here."""
    if not Path(CHROMIUM).exists():
        unavailable("it needs Debian's", "Chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


class Tab:
    """One page, and the errors of its scripts and of its browser console."""

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.url = url
        self.problems: list[str] = []
        page.set_default_timeout(PATIENCE_MS)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("console", lambda told: self._told(told.type, told.text))

    def _told(self, kind: str, text: str) -> None:
        # In some scenarios the server is down or refuses requests.
        if kind == "error" and not re.search("Failed to load resource|net::ERR", text):
            self.problems.append(text)

    def enter(self, token: str = TOKEN) -> Tab:
        """Open the URL that the console prints when it starts."""
        self.page.goto(f"{self.url}#token={token}")
        return self

    def go(self, view: str, **params: object) -> Tab:
        """Open a view by its address."""
        self.page.goto(f"{self.url}#/{view}{'?' if params else ''}{urlencode(params)}")
        return self

    def reads(self, text: str | re.Pattern[str], within: str = "main") -> None:
        """Wait until the text is shown."""
        self.page.locator(within).filter(has_text=text).first.wait_for()

    def count(self, name: str) -> int:
        """Return the number that the page shows under an id."""
        return int(self.page.locator(f"#{name}").inner_text().replace(",", "").replace("–", "-1"))

    def keep(self, name: str) -> None:
        """Save a screenshot beside the test run's other artefacts."""
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=SCREENSHOTS / f"{name}.png")


@contextlib.contextmanager
def tab(browser: Browser, url: str, **how: str) -> Iterator[Tab]:
    """Yield a page in its own browser profile. Any script error fails the test."""
    context = browser.new_context(viewport=SIZE, **how)  # type: ignore[arg-type]
    shown = Tab(context.new_page(), url)
    try:
        yield shown
    finally:
        context.close()
    assert not shown.problems
