"""Draw docs/pictures/clean-page.png: the page of ``neuvar clean`` for digits with wrong labels.

Run it as ``python tools/draw_clean_page.py``. It needs Chromium, which it looks for by name.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from neuvar.data import mnist_excerpt
from neuvar.labels import pair

PICTURE = Path(__file__).parent.parent / "docs" / "pictures" / "clean-page.png"
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        photos, out = Path(folder) / "photos", Path(folder) / "cleaned"
        write_photos(photos)
        command = [sys.executable, "-m", "neuvar", "clean", str(photos), "--out", str(out)]
        subprocess.run(command, check=True)  # noqa: S603
        take_picture(out / "index.html")


def write_photos(folder: Path) -> None:
    """3,000 digits in one folder per class, 10 % of them in the wrong one."""
    train = mnist_excerpt().train
    labels = pair(train.labels[:3000], 0.1, classes=10, seed=0).noisy
    for index, (image, label) in enumerate(zip(train.images, labels.tolist(), strict=False)):
        path = folder / DIGITS[label] / f"{index:04}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.numpy().reshape(28, 28)).save(path)


def take_picture(page: Path) -> None:
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))))
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser)
        view = chromium.new_page(viewport={"width": 1100, "height": 650}, device_scale_factor=1.5)
        view.goto(page.as_uri())
        view.locator("#examples").evaluate("part => part.scrollIntoView({behavior: 'instant'})")
        view.wait_for_timeout(500)
        view.screenshot(path=PICTURE)
        chromium.close()


if __name__ == "__main__":
    main()
