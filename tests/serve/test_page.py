"""The page at /: its files, and a conversation in Chromium."""

import json
import os
import re
import subprocess
import time
from pathlib import Path

import httpx
import pytest
from tests.serve.conftest import serving, write_adapter

from whet.engine.session import Call
from whet.serve import ServedModel, make_app


def test_the_page_needs_no_key_and_nothing_from_elsewhere(served):
    with serving(make_app(served, api_keys=["right"])) as url:
        page = httpx.get(url)
        assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        links = re.findall(r'(?:href|src)="(?!data:)([^"]+)"', page.text)
        assert len(links) == 2
        for link in links:
            file = httpx.get(f"{url}/{link}")
            assert file.status_code == 200 and ("javascript" in file.headers["content-type"]) == link.endswith("js")
            assert "http://" not in file.text and "https://" not in file.text
        assert httpx.get(url + "/v1/models").status_code == 401
        assert httpx.get(url + "/page/../app.py").status_code == 404


@pytest.mark.needs("page")
def test_the_page_in_chromium(tiny_model, tmp_path, monkeypatch):
    step = Call.step

    def step_slowly(call):
        time.sleep(0.1)
        step(call)

    monkeypatch.setattr(Call, "step", step_slowly)
    adapters = {f"red-{'long-' * 20}name": write_adapter(tmp_path / "red", 0)}
    model = ServedModel.load(str(tiny_model), name="tiny", weights="float32", adapters=adapters)
    model.defaults["logit_bias"] = {i: -100.0 for i in range(258) if not 66 <= i < 92}  # letters, so that it is legible
    with serving(make_app(model)) as url, serving(make_app(model, api_keys=["right"])) as keyed:
        settings = {"url": url, "keyed": keyed, "screenshots": os.environ.get("WHET_SCREENSHOTS", "")}
        command = ["node", str(Path(__file__).with_name("page.mjs")), json.dumps(settings)]
        run = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert run.returncode == 0, run.stderr
