"""Tests with real routers, whose packages ``make routers-test`` installs beside the product's environment."""

from __future__ import annotations

import os

from tests.routers.rig import PACKAGES_VARIABLE

if PACKAGES_VARIABLE not in os.environ:
    collect_ignore_glob = ["test_*.py"]
