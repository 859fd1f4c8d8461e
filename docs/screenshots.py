"""Makes the pictures of docs/guides/dashboard.md: `python docs/screenshots.py`, with Chromium."""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY))

from tests.kit.http import api_client  # noqa: E402
from tests.kit.servers import available_kinds, start_server  # noqa: E402
from tests.kit.shop import fill_gates, fill_shop, make_shop  # noqa: E402

IMAGES = REPOSITORY / "docs" / "images"

#: Name, path, scheme, width, height.
SHOTS = (
    ("dashboard-overview", "/", "light", 1280, 1010),
    ("dashboard-backlog", "/backlog?queue=billing", "dark", 1280, 720),
    ("dashboard-trends", "/trends?within=week", "light", 1280, 1080),
    ("dashboard-failures", "/failures", "light", 1280, 900),
    ("dashboard-policies", "/policies", "light", 1280, 620),
    ("dashboard-task", "/task?id={id}", "light", 1280, 720),
    ("dashboard-dead", "/dead", "light", 1280, 560),
    ("dashboard-tenants", "/tenants", "light", 1280, 900),
    ("dashboard-phone", "/", "dark", 390, 844),
)


def shoot(browser: Browser, url: str, name: str, scheme: str, width: int, height: int) -> int:
    """Write a picture; returns its size in bytes."""
    size = {"width": width, "height": height}
    context = browser.new_context(viewport=size, color_scheme=scheme, device_scale_factor=1.25)
    page = context.new_page()
    page.goto(url)
    page.wait_for_timeout(500)
    taken = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    context.close()
    path = IMAGES / f"{name}.png"
    taken.save(path, optimize=True)
    return path.stat().st_size


def main() -> None:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with (
        tempfile.TemporaryDirectory() as directory,
        start_server(available_kinds()[0], Path(directory), port=0, append_only=True) as server,
        make_shop(server.url) as app,
        server.client() as client,
    ):
        id = fill_shop(app, client)
        fill_gates(app)
        with api_client(app) as api, sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            root = str(api.base_url).rstrip("/")
            for name, path, scheme, width, height in SHOTS:
                count = shoot(browser, root + path.format(id=id), name, scheme, width, height)
                print(f"{name}.png: {count:,} bytes")
            browser.close()


if __name__ == "__main__":
    main()
