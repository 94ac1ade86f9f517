"""A headless Chromium behind chromedriver, by the WebDriver protocol (https://www.w3.org/TR/webdriver2)."""

import base64
import contextlib
import json
import os
import pathlib
import re
import subprocess
import threading
import time
import urllib.request

import pytest
import uvicorn

WIDE = "$$" + " + ".join(f"x_{{{i}}}^2" for i in range(60)) + "$$"
"""A formula that is wider than any page."""
ENTER, ESCAPE, CONTROL = "\ue007", "\ue00c", "\ue009"
UP, DOWN, LEFT = "\ue013", "\ue015", "\ue012"


class Browser:
    """A session of its own, with the browser's log and every request."""

    def __init__(self, driver, chromium):
        self.process = subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, text=True)
        for line in self.process.stdout:
            if match := re.search(r"successfully on port (\d+)", line):
                break
        self.url = f"http://127.0.0.1:{match[1]}"
        options = {"binary": chromium, "args": ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                                                "--disable-dev-shm-usage", "--force-color-profile=srgb"]}  # fmt: skip
        wanted = {"alwaysMatch": {"goog:chromeOptions": options, "timeouts": {"script": 300_000, "pageLoad": 300_000},
                                  "goog:loggingPrefs": {"browser": "WARNING", "performance": "ALL"}}}  # fmt: skip
        session = self.call("POST", "/session", {"capabilities": wanted})["sessionId"]
        self.url += f"/session/{session}"

    def call(self, method, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.load(answer)["value"]

    def open(self, url):
        """Waits until the new document is complete: chromedriver may answer before its scripts ran."""
        self.run("window.left = true")
        self.call("POST", "/url", {"url": url})
        self.wait("return !window.left && document.readyState === 'complete'")

    def run(self, script, *args):
        return self.call("POST", "/execute/sync", {"script": script, "args": list(args)})

    def press(self, *keys):
        self._keys((kind, key) for key in keys for kind in ("keyDown", "keyUp"))

    def chord(self, *keys):
        """All the keys at once."""
        self._keys([("keyDown", key) for key in keys] + [("keyUp", key) for key in reversed(keys)])

    def _keys(self, changes):
        actions = [{"type": kind, "value": key} for kind, key in changes]
        self.call("POST", "/actions", {"actions": [{"type": "key", "id": "keys", "actions": actions}]})

    def logs(self, kind):
        return self.call("POST", "/se/log", {"type": kind})

    def wait(self, script, seconds=300):
        """Until the script's value is true."""
        end = time.monotonic() + seconds
        while not self.run(script):
            assert time.monotonic() < end, script
            time.sleep(0.1)

    def cdp(self, command, **parameters):
        """A command of Chromium's DevTools protocol."""
        return self.call("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def size(self, width, height, scale=1):
        """The viewport in CSS pixels. A scale of 2 at half the width is a zoom of 200 %."""
        self.cdp(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False
        )
        self.wait(f"return innerWidth === {width} && innerHeight === {height}")

    def schemes(self):
        """A page's two colour schemes, one after the other."""
        for scheme in ("light", "dark"):
            self.cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            yield scheme
        self.cdp("Emulation.setEmulatedMedia", features=[])

    def screenshot(self, path):
        with open(path, "wb") as file:
            file.write(base64.b64decode(self.call("GET", "/screenshot")))

    def overflow(self):
        """By how many pixels the page is wider than its window."""
        return self.run("return document.documentElement.scrollWidth - document.documentElement.clientWidth")

    def axe(self):
        """What axe-core, of the file AXE_CORE, finds: (rule, elements, how the first fails). Skips without the file."""
        if not (file := os.environ.get("AXE_CORE")):
            pytest.skip("needs axe-core: npm install axe-core, AXE_CORE=node_modules/axe-core/axe.min.js")
        self.run(pathlib.Path(file).read_text(encoding="utf-8"))
        result = self.call("POST", "/execute/async", {"script": "axe.run().then(arguments[0])", "args": []})
        faults = [(violation["id"], violation["nodes"]) for violation in result["violations"]]
        return [(id, [node["target"] for node in nodes], nodes[0].get("failureSummary")) for id, nodes in faults]

    def close(self):
        self.call("DELETE", "")
        self.process.terminate()
        self.process.wait(120)
        self.process.stdout.close()


@contextlib.contextmanager
def served(app, **options):
    """The port on which the application is served, by a thread that ends with the block."""
    server = uvicorn.Server(uvicorn.Config(app, **{"port": 0, "log_level": "error", **options}))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield server, server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(300)
        assert not thread.is_alive()


def requests_of(browser):
    """The URLs that the browser has asked for since the last call."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.logs("performance")]
    return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
