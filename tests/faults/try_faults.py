"""Does some test notice each seeded fault? Tries them in a copy of this checkout, one after the other.

    python tests/faults/try_faults.py [--only TEXT] [FOLDER]

FOLDER: where the copy and its build go (default: a temporary one); kept, a second run compiles only what differs.
Prints a line for each fault: `caught`, with the seconds and the first test that failed, or `MISSED`; a fault that does
not compile, which proves nothing, is missed, too. Exits with 1 if one was missed. Needs an environment in which the
test command of the README works. Takes 15 minutes on 2 cores, and the first build.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
from seeded import FAULTS, REPO, Fault

LIMIT = 900  # seconds of one fault's tests; a hang counts as caught
# Warnings are no errors: a change may leave a variable unused.
OPTIONS = ("-DSUBKV_STOCK=ON", "-DSUBKV_WERROR=OFF", "-DSUBKV_PROGRAMS=ON", "-DSUBKV_PAGE=OFF")


def copy_of_checkout(folder: Path) -> Path:
    """Copies the tracked files; unchanged files keep their modification times. Removes files of an earlier copy."""
    copy = folder / "checkout"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPO, capture_output=True, check=True).stdout
    names = {*listed.decode().split("\0")}
    for path in [path for path in copy.rglob("*") if path.is_file()]:
        name = path.relative_to(copy).as_posix()
        if name not in names and not name.startswith("build/"):
            path.unlink()
    for name in names:
        source, target = REPO / name, copy / name
        if not name or not source.is_file() or (target.is_file() and target.read_bytes() == source.read_bytes()):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)
    return copy


def build(copy: Path, log: Path) -> bool:
    """Whether it compiles."""
    where = copy / "build"
    with log.open("ab") as out:
        if not (where / "build.ninja").exists():
            configure = ["cmake", "-S", str(copy), "-B", str(where), "-G", "Ninja", *OPTIONS]
            subprocess.run(configure, stdout=out, stderr=out, check=True)
        return subprocess.run(["cmake", "--build", str(where)], stdout=out, stderr=out, check=False).returncode == 0


def first_failure(copy: Path, tests: str) -> str:
    """The first failed test; empty if none failed."""
    paths = [str(copy), str(copy / "python"), str(copy / "kernels" / "triton")]
    env = {**os.environ, "SUBKV_LIB_PATH": str(copy / "build" / "bin"), "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests.split()]
    try:
        done = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired:
        return f"more than {LIMIT} s"
    if done.returncode == 0:
        return ""
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].split(" - ")[0] if failed else f"pytest ended with {done.returncode}"


def tried(copy: Path, fault: Fault, log: Path) -> tuple[bool, str]:
    """Whether a test failed, and which."""
    path, changed = fault.changed(copy)
    text = path.read_bytes()
    path.write_bytes(changed)
    try:
        if path.suffix != ".py" and not build(copy, log):
            return False, "it does not compile"
        failure = first_failure(copy, fault.tests)
        return bool(failure), failure
    finally:
        path.write_bytes(text)


def main() -> None:
    parser = argparse.ArgumentParser(description="whether tests notice seeded faults")
    parser.add_argument("folder", nargs="?", type=Path, help="where the copy goes (default: a temporary folder)")
    parser.add_argument("--only", default="", help="faults with this text in their name or room")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="subkv-faults-"))
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "build.log"
    copy = copy_of_checkout(folder)
    if not build(copy, log):
        raise SystemExit(f"faults: expected a checkout that compiles, found errors: {log}")
    missed = []
    for fault in FAULTS:
        if arguments.only not in fault.name and arguments.only not in fault.room:
            continue
        start = time.monotonic()
        caught, by = tried(copy, fault, log)
        print(f"{'caught' if caught else 'MISSED'}  {time.monotonic() - start:5.0f} s  {fault.name}: {by}", flush=True)
        if not caught:
            missed.append(fault.name)
    if missed:
        raise SystemExit(f"faults: {len(missed)} missed: {', '.join(missed)}")


if __name__ == "__main__":
    main()
