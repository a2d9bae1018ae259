"""The page of llama-server: cmake/programs/page_build.cmake with an npm that is a script of these tests."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import llama_source as s
import pytest

CMAKE = shutil.which("cmake")
SCRIPT = Path(__file__).resolve().parents[2] / "cmake" / "programs" / "page_build.cmake"

pytestmark = [
    pytest.mark.skipif(CMAKE is None, reason="no cmake on the PATH"),
    pytest.mark.skipif(os.name == "nt", reason="npm is a shell script here"),
]

INSTALL = """
mkdir -p node_modules/.bin node_modules/one/licenses node_modules/@two/two
echo "a;b [c]" > node_modules/one/LICENSE.md
echo "of two" > node_modules/@two/two/license
"""
BUILD = """
mkdir -p "$LLAMA_UI_OUT_DIR"
for name in index.html manifest.webmanifest sw.js build.json version.json bundle.1.js bundle.2.css workbox-3.js; do
    echo "$name $LLAMA_UI_VERSION" > "$LLAMA_UI_OUT_DIR/$name"
done
"""

Build = Callable[..., tuple[str, Path, list[str]]]


@pytest.fixture
def build(tmp_path: Path, pristine: s.Tree) -> Build:
    """build(view=…, ci=…, build=…) runs the script, with the commands that npm runs -> output, folder, npm's calls."""
    tree = tmp_path / "tree"
    for path, data in pristine.items():
        if path in ("scripts/ui-assets.cmake", "tools/ui/ui.cpp.in", "tools/ui/ui.h.in"):
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            (tree / path).write_bytes(data)

    def run(view: str = "", ci: str = INSTALL, build: str = BUILD, npm: bool = True) -> tuple[str, Path, list[str]]:
        assert CMAKE is not None
        program, calls = tmp_path / "npm", tmp_path / "calls"
        program.write_text(
            f'#!/bin/sh\nset -e\necho "$*" >> {calls}\ncase "$1" in\n'
            f"view)\n:{view}\n;;\nci)\n:{ci}\n;;\nrun)\n:{build}\n;;\nesac\n"
        )
        program.chmod(0o755)
        calls.write_text("")
        options = [f"-Dnpm={program if npm else ''}", f"-Dpage={tmp_path / 'page'}", f"-Dtree={tree}", "-Dnumber=7"]
        command = [CMAKE, *options, "-P", str(SCRIPT)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout, tmp_path / "page", calls.read_text().splitlines()

    return run


def has_page(page: Path) -> bool:
    """Whether the chat page is embedded; else no_page.html is."""
    assert "#define LLAMA_UI_HAS_ASSETS 1" in (page / "ui.h").read_text()
    assert '"index.html", asset_' in (page / "ui.cpp").read_text()
    found = (page / "page-licenses.txt").exists()
    assert found == ("no chat page" not in (page / "built" / "dist" / "index.html").read_text("utf-8"))
    return found


def test_page_and_its_licences(build: Build) -> None:
    logged, page, calls = build()
    assert logged == ""
    assert has_page(page)
    assert [call.split()[0] for call in calls] == ["view", "ci", "run"]
    assert "--ignore-scripts" in calls[1] and "--prefer-offline" in calls[1]
    assert (page / "built" / "dist" / "index.html").read_text() == "index.html b7\n"
    licenses = (page / "page-licenses.txt").read_text()
    assert "==== node_modules/one/LICENSE.md\n\na;b [c]\n" in licenses
    assert "==== node_modules/@two/two/license\n\nof two\n" in licenses
    assert not (page / "npm").exists(), "npm's 700 MB stay"


@pytest.mark.parametrize(
    ("failing", "command"),
    [
        ({"ci": "\necho no network >&2\nexit 1"}, "npm ci"),
        ({"build": "\nexit 1"}, "npm run build"),
        ({"build": ""}, "npm run build"),
        ({"build": BUILD + '\nrm "$LLAMA_UI_OUT_DIR/sw.js"'}, "embedding it"),
    ],
)
def test_failing_npm_leaves_the_page_out(build: Build, failing: dict[str, str], command: str) -> None:
    assert has_page(build()[1])
    logged, page, _ = build(**failing)
    assert logged == (
        f"-- llama-server gets no page: {command} failed, see {page}/npm.log; delete {page}/ui.cpp to try again\n"
    )
    assert not has_page(page)
    if "ci" in failing:
        assert "no network" in (page / "npm.log").read_text()
    assert has_page(build()[1])


def test_without_a_network_npm_looks_into_its_cache(build: Build) -> None:
    logged, page, calls = build(view="\nexit 1")
    assert logged == ""
    assert has_page(page)
    assert "--offline" in calls[1].split()


def test_no_npm(build: Build) -> None:
    logged, page, calls = build(npm=False)
    assert (logged, calls) == ("", [])
    assert not has_page(page)
