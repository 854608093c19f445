"""The Helm chart gives the objects of the kustomize overlay, and each of its values changes them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from cachesvc import __version__
from cachesvc.config import load_config
from tests.deploy.manifests import load
from tools.helm_chart import CHART, EXPRESSION, NAMESPACE, SOURCE, VALUES, chart, rendered


def values() -> dict[str, Any]:
    """Values of the chart."""
    found = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


def by_name(objects: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """Objects by kind and name."""
    return {(each["kind"], each["metadata"]["name"]): each for each in objects}


def test_the_chart_is_fresh() -> None:
    for path, text in chart().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run python -m tools.helm_chart"
    assert {path for path in CHART.rglob("*") if path.is_file()} == set(chart())


def test_its_own_values_give_the_overlays_objects() -> None:
    overlay = {key: each for key, each in by_name(load(SOURCE)).items() if key[0] != "Namespace"}
    assert by_name(rendered(values())) == overlay


@pytest.mark.parametrize("name", [value.name for value in VALUES])
def test_each_value_changes_what_it_names(name: str) -> None:
    changed = rendered(values() | {name: "another"})
    assert changed != rendered(values())
    assert "another" in yaml.safe_dump_all(changed)


def test_objects_go_to_the_releases_namespace() -> None:
    text = yaml.safe_dump_all(rendered(values(), "elsewhere"))
    assert f"namespace: {NAMESPACE}" not in text
    assert "namespace: elsewhere" in text


def test_templates_have_no_expression_that_the_check_does_not_know() -> None:
    for path in (CHART / "templates").glob("*.yaml"):
        assert "{{" not in EXPRESSION.sub("", path.read_text(encoding="utf-8")), path.name


def test_the_chart_names_the_release_and_explains_each_value(tmp_path: Path) -> None:
    assert yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))["appVersion"] == __version__
    read_me = (CHART / "README.md").read_text(encoding="utf-8")
    assert set(values()) == {value.name for value in VALUES}
    assert all(f"| `{name}` |" in read_me for name in values())
    path = tmp_path / "config.toml"
    path.write_text(values()["config"], encoding="utf-8")
    assert load_config(str(path), {}).write_policy == "write_through"


def test_helm_takes_the_chart() -> None:
    if shutil.which("helm") is None:
        pytest.skip("this machine has no helm")
    for command in (["helm", "lint", "--strict", str(CHART)], ["helm", "template", "x", str(CHART)]):
        subprocess.run(command, check=True, capture_output=True)
