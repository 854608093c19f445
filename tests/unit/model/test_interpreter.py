"""Child processes of the product import nothing from the folder that their parent was started in."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from cachesvc.model.text import module_command

ROOT = Path(__file__).parents[3]
DECOY = "open('was_imported', 'w').close()"


@pytest.mark.parametrize(
    ("module", "arguments"),
    [("cachesvc.mover", ["--list"]), ("cachesvc", ["--version"]), ("cachesvc_lab.replay", ["{}"])],
)
def test_a_file_of_the_working_directory_is_not_imported(module: str, arguments: list[str], tmp_path: Path) -> None:
    for name in ("random", "nt", "socket", "json", "argparse", "numpy", "cachesvc"):
        (tmp_path / f"{name}.py").write_text(DECOY)
    subprocess.run(
        module_command(module, *arguments), cwd=tmp_path, capture_output=True, stdin=subprocess.DEVNULL, check=False
    )
    assert not (tmp_path / "was_imported").exists()


def test_every_child_of_the_product_is_started_that_way() -> None:
    product = [path for folder in ("cachesvc", "client") for path in (ROOT / folder).rglob("*.py")]
    starts = [path for path in product if "sys.executable" in path.read_text(encoding="utf-8")]
    unsafe = [path for path in starts if '[sys.executable, "-P"' not in path.read_text(encoding="utf-8")]
    assert not [str(path.relative_to(ROOT)) for path in unsafe]
