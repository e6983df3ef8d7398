"""The same conditions on every machine, and a real browser for the tests of pages.

A page fails its test if it complains or asks for anything.
"""

import os
import shutil
import signal
import tempfile
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

# torch.compile's cache does not know for which instruction set its code was made.
_INSTRUCTIONS = os.environ.get("ATEN_CPU_CAPABILITY", "all")
os.environ.setdefault(
    "TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir()) / f"neuvar-compiled-{_INSTRUCTIONS}")
)

# The same examples everywhere, without limits on time: --hypothesis-profile=explore draws new ones.
settings.register_profile(
    "explore", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("repeat", settings.get_profile("explore"), derandomize=True)
settings.load_profile("repeat")

PATIENCE = 1800
"""Seconds after which something hangs. A busy machine may take long, but not that long."""

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
NOWHERE = "Object.defineProperty(window, 'localStorage', {get() { throw new Error('no'); }})"
"""Run before a page, this takes its storage away."""

# Contrast of all words that are seen with what lies behind them, least first.
CONTRAST = """() => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const rgb = (colour, under) => {
    canvas.fillStyle = under; canvas.fillRect(0, 0, 1, 1);
    canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    return canvas.getImageData(0, 0, 1, 1).data;
  };
  const light = (data) => [0, 1, 2].reduce((sum, i) => {
    const c = data[i] / 255;
    const linear = c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    return sum + [0.2126, 0.7152, 0.0722][i] * linear;
  }, 0);
  const found = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    const unseen = element.closest("title, desc, .anchor, .label, .skip, option");
    if (!own || unseen || !element.getClientRects().length) continue;
    const style = getComputedStyle(element);
    const colour = element.closest("svg") ? style.fill : style.color;
    const grounds = [];
    for (let at = element; at; at = at.parentElement) {
      grounds.unshift(getComputedStyle(at).backgroundColor);
    }
    let ground = "white";
    for (const one of grounds) ground = `rgb(${[...rgb(one, ground)].slice(0, 3).join()})`;
    const a = light(rgb(colour, ground)), b = light(rgb(ground, ground));
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    found.push([contrast, `${element.tagName} ${element.textContent.slice(0, 40)}`]);
  }
  return found.sort(([a], [b]) => a - b);
}"""


def pytest_configure():
    """Let tests interrupt the processes that they start.

    A shell that runs the tests in the background makes them ignore SIGINT, and with them every
    process that they start.
    """
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    if ignored and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _seeded():
    """A network that is created without a seed is the same in any order of the tests."""
    torch.manual_seed(0)


class Visit:
    """A page in a browser, with all that it complained of or asked for."""

    def __init__(self, browser, path, *, before="", **options):
        options = {"viewport": {"width": 1280, "height": 900}} | options
        self.context = browser.new_context(**options)
        self.context.set_default_timeout(1000 * PATIENCE)
        self.context.add_init_script(before)
        self.page = self.context.new_page()
        self.complaints, self.requests, self.dialogs = [], [], []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("dialog", lambda dialog: (self.dialogs.append(1), dialog.dismiss()))
        self.address = path.resolve().as_uri()
        self.page.goto(self.address)

    def reload(self, remembers):
        """Reload the page until it remembers; a busy browser stores what it got a little later."""
        for _ in range(20):
            self.page.reload()
            if remembers():
                return


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not BROWSER:
        pytest.skip("no Chromium is installed")
    with playwright.sync_playwright() as running:
        opened = running.chromium.launch(executable_path=BROWSER, args=FLAGS)
        yield opened
        opened.close()


@pytest.fixture
def own():
    """How addresses begin that a page may ask itself for; none, unless a module says otherwise."""
    return ()


@pytest.fixture
def visit(browser, start, own):
    """Opens a page: that of the module's fixture start, unless another is named."""
    opened = []

    def go(path=start, **options):
        opened.append(Visit(browser, path, **options))
        return opened[-1]

    yield go
    for one in opened:
        one.context.close()
        assert one.complaints == []
        assert one.dialogs == []
        fetched = {url for url in one.requests if not url.startswith(own)}
        assert fetched == {one.address}
