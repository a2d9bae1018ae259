"""Recipes of package managers name the version, the dependencies and the commands that pyproject.toml has."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

if sys.version_info < (3, 11):
    pytest.skip("tomllib came with Python 3.11", allow_module_level=True)
import tomllib

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ROOT / "cmake" / "packages"
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def test_conda() -> None:
    recipe = yaml.safe_load((PACKAGES / "recipe.yaml").read_text("utf-8"))
    context = recipe["context"]
    assert context["version"] == PROJECT["version"]
    run = [
        line.replace("${{ llama_cpp_python }}", context["llama_cpp_python"]) for line in recipe["requirements"]["run"]
    ]
    required = {f"python{PROJECT['requires-python']}", *PROJECT["dependencies"]}
    assert {line.replace(" ", "") for line in run} == required
    commands = dict(line.split(" = ") for line in recipe["build"]["python"]["entry_points"])
    assert commands == PROJECT["scripts"]
    assert (PACKAGES / recipe["source"]["path"]).resolve() == ROOT
    assert all((ROOT / name).is_file() for name in recipe["about"]["license_file"])
    assert recipe["about"]["license_file"] == PROJECT["license-files"]


def test_homebrew() -> None:
    formula = (PACKAGES / "subkv.rb").read_text("utf-8")
    assert re.findall(r'^  version "(.*)"$', formula, re.M) == [PROJECT["version"]]
    assert re.findall(r'^  license "(.*)"$', formula, re.M) == [PROJECT["license"]]
    least = tuple(map(int, PROJECT["requires-python"].removeprefix(">=").split(".")))
    assert tuple(map(int, re.findall(r'"python@([\d.]+)"', formula)[0].split("."))) >= least


def test_options_exist() -> None:
    """CMake ignores undeclared options."""
    declared = "\n".join(
        path.read_text("utf-8") for path in [ROOT / "CMakeLists.txt", *(ROOT / "cmake").glob("*")] if path.is_file()
    )
    for name in ("recipe.yaml", "subkv.rb"):
        used = re.findall(r"-D(SUBKV_\w+)=", (PACKAGES / name).read_text("utf-8"))
        assert used and all(option in declared for option in used)


def test_image() -> None:
    """It installs only wheels of the folder, and runs a command of the package as an unprivileged user."""
    lines = (PACKAGES / "Containerfile").read_text("utf-8").splitlines()
    (entry,) = (line for line in lines if line.startswith("ENTRYPOINT"))
    assert '"/opt/subkv/bin/subkv", "run", "llama-server"' in entry
    assert lines.index("USER subkv") < lines.index(entry)
    assert "subkv" in PROJECT["scripts"]
    (install,) = (line for line in lines if "pip install" in line)
    assert install.split("install ")[1] == "--no-cache-dir --no-index --find-links /wheels subkv"
