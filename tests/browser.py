"""Chromium without a window, as Debian packages it: for the tests of the report page and for its picture."""

from __future__ import annotations

import base64
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.wait import WebDriverWait

NAMES = ("chromium", "chromium-browser", "google-chrome")


def binaries() -> tuple[str, str] | None:
    """The browser and its driver, where both are installed."""
    browser = next((path for name in NAMES if (path := shutil.which(name))), None)
    driver = shutil.which("chromedriver")
    return (browser, driver) if browser and driver else None


@contextmanager
def started() -> Iterator[Browser]:
    """A browser that ends with the block."""
    found = binaries()
    assert found, "Install chromium and chromium-driver."
    options = webdriver.ChromeOptions()
    options.binary_location = found[0]
    for argument in ("--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(found[1]))
    try:
        yield Browser(driver)
    finally:
        driver.quit()


class Browser:
    """One page at a time, and what it does."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False, part: str = "") -> None:
        """Show a file from disk and wait until all of it is drawn."""
        self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": [scheme]})
        self.driver.get("about:blank")
        self.driver.get_log("browser")
        self.driver.get_log("performance")
        self.driver.get(path.resolve().as_uri() + part)
        self.until("document.body.dataset.drawn === 'yes'")

    def resize(self, width: int, height: int, scale: float = 1) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def ask(self, expression: str) -> Any:
        """The value of some JavaScript."""
        return self.driver.execute_script(f"return {expression}")

    def until(self, expression: str) -> None:
        """Wait for some JavaScript to be true."""
        wait: WebDriverWait[Any] = WebDriverWait(self.driver, 30, poll_frequency=0.02)
        wait.until(lambda _: self.ask(expression), f"never became true: {expression}")

    def text(self, selector: str) -> str:
        return str(self.ask(f"document.querySelector({json.dumps(selector)}).textContent"))

    def click(self, selector: str) -> None:
        self.driver.find_element("css selector", selector).click()

    def press(self, key: str, selector: str = "body") -> None:
        self.driver.find_element("css selector", selector).send_keys(key)

    def complaints(self) -> list[str]:
        """What the page wrote to the console."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """Everything that the page asked for."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        sent = [message for message in messages if message["method"] == "Network.requestWillBeSent"]
        return [message["params"]["request"]["url"] for message in sent]

    def picture(self, path: Path, *, height: int | None = None, scale: float = 1) -> None:
        """The page as PNG, whole or as far as `height`."""
        width = self.ask("innerWidth")
        self.resize(width, height or self.ask("document.documentElement.scrollHeight"), scale)
        self.until("new Promise((done) => setTimeout(done, 400, true))")
        shot = self.driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})
        path.write_bytes(base64.b64decode(shot["data"]))
