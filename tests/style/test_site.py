"""The site builds without a warning, and says what the protos and the client's names say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import cachesvc_client
import pytest

from tests.style.tree import ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "docs", str(out)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return out


def test_every_call_and_message_is_in_the_reference(site: Path) -> None:
    page = (site / "reference" / "rpc.html").read_text()
    names = ("AdminService", "CacheService", "EngineService", "LeaseService", "EventService", "StepOperation")
    missing = [name for name in names if f'href="#{name.lower()}"' not in page]
    assert not missing
    assert "Seals computed blocks under their keys" in page  # a call's comment


def test_every_public_name_of_the_client_is_in_the_reference(site: Path) -> None:
    page = (site / "reference" / "python.html").read_text()
    constants = {"KEY_BYTES", "NO_PAGE"}
    missing = [
        name
        for name in cachesvc_client.__all__
        if name not in constants
        and f'id="cachesvc_client.{name}"' not in page
        and f'id="cachesvc_client.core.errors.{name}"' not in page
    ]
    assert not missing


def test_every_document_of_the_folder_is_reachable(site: Path) -> None:
    index = (site / "index.html").read_text()
    documents = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"}
    assert not [name for name in sorted(documents) if f'href="{name}.html"' not in index]
