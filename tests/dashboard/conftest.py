"""A real Chromium that looks at a real gateway."""

import os
import re
import shutil
import subprocess

import postgres
import pytest
from house import house  # noqa: F401
from playwright.async_api import async_playwright

from harnessed.config import Gateway
from harnessed.gateway.keys import ADMIN

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or "chromium"


@pytest.fixture(scope="session")
def chromium(tmp_path_factory):
    """The address of one browser for all tests: to start it costs seconds."""
    # As root, where tests often run, Chromium's own sandbox cannot start.
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
    if shutil.which(CHROMIUM) is None:
        pytest.skip("no Chromium is installed (Debian: apt-get install chromium)")
    folder = tmp_path_factory.mktemp("chromium")
    with subprocess.Popen(
        [CHROMIUM, *options, f"--user-data-dir={folder}"], stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            found = (re.search(r"listening on (ws://\S+)", line) for line in process.stderr)
            yield next(each[1] for each in found if each)
        finally:
            process.terminate()


@pytest.fixture
async def stranger(chromium):
    """A page that has not logged in; whatever goes wrong in it fails the test."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.connect_over_cdp(chromium)
        context = await browser.new_context(viewport={"width": 1440, "height": 900})
        page = await context.new_page()
        page.set_default_timeout(20_000)
        wrong = []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("dialog", lambda dialog: wrong.append(f"dialog: {dialog.message}"))
        yield page
        await context.close()
        assert not wrong


@pytest.fixture
async def page(house, stranger):  # noqa: F811
    """A page that has logged in."""
    await stranger.goto(f"{house.url}/ui/#key={house.keys.sign(ADMIN)}")
    await stranger.wait_for_selector("h1:text('Runs')")
    return stranger


@pytest.fixture(scope="session")
def postgresql():
    with postgres.running() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
async def either(request, house):  # noqa: F811
    """A gateway on each kind of database."""
    if request.param == "postgresql":
        house.settings = Gateway(database=request.getfixturevalue("postgresql"))
        await house.restart()
    yield house
