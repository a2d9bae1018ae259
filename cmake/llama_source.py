"""Fetches, verifies, patches and writes the pinned llama.cpp source.

    python cmake/llama_source.py prepare --pin runtime/llama.cpp --tree DIR [--stock DIR] [--programs]
        [--source DIR [--merge]] [--without QUEUE|PATCH]
    python cmake/llama_source.py tree-hash [--programs] DIR

`--pin` is a folder with VERSION (the pinned release) and patches/QUEUE/, in each of which is one unified diff per
upstream file. `--without` leaves out a queue or a patch. `--programs` adds the files of llama.cpp's own programs. With
`--merge` the source may be another version (patch_merge.py). Needs only the standard library and pip; a merge needs
git.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from patch_merge import merge
from unified_diff import DiffError, FileDiff, apply, combined, parse

Tree = dict[str, bytes]
"""Path relative to the root of llama.cpp, with forward slashes -> content."""

KEEP_FILES = ("CMakeLists.txt", "LICENSE", "convert_hf_to_gguf.py")
KEEP_DIRS = ("cmake", "conversion", "ggml", "gguf-py", "include", "src", "vendor")
SKIP_DIRS = ("gguf-py/examples", "gguf-py/gguf/scripts", "gguf-py/tests", "vendor/cpp-httplib")
# only for SUBKV_PROGRAMS, so that a plain build does not write and hash these 900 files
PROGRAM_FILES = ("scripts/ui-assets.cmake",)
PROGRAM_DIRS = ("common", "vendor/cpp-httplib") + tuple(
    f"tools/{name}" for name in ("cli", "completion", "llama-bench", "mtmd", "perplexity", "server", "ui")
)
PROGRAM_SKIP = (
    "tools/mtmd/legacy-models",
    "tools/mtmd/test-1.jpeg",
    "tools/mtmd/test-2.mp3",
    "tools/mtmd/test-3.mp4",
    "tools/mtmd/tests",
    "tools/server/bench",
    "tools/server/tests",
    "tools/ui/dist",
    "tools/ui/node_modules",
    "tools/ui/tests",
)
STOCK_DIRS, STOCK_PROGRAM_DIRS = ("include", "src"), ("common", "tools")
QUEUES = ("cache", "gpu", "upstream")
STAMP = ".subkv.json"
VERSION_KEYS = ("package", "version", "sha256", "commit", "tree", "programs")


class SourceError(Exception):
    """The source cannot be used; one sentence with expected and actual content."""


def read_version(pin: Path) -> dict[str, str]:
    """Read VERSION: one `key value` pair per line, exactly the keys of VERSION_KEYS."""
    fields: dict[str, str] = {}
    for line in (pin / "VERSION").read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(" ")
        fields[key] = value.strip()
    if tuple(fields) != VERSION_KEYS:
        raise SourceError(f"{pin / 'VERSION'}: expected the keys {' '.join(VERSION_KEYS)}, found {' '.join(fields)}")
    return fields


def patch_files(pin: Path, without: Sequence[str] = ()) -> dict[str, Path]:
    """The patches by name, QUEUE/FILE.patch. without: queues and patches to leave out.

    Raises SourceError about a patch in no queue, and a name in `without` that does not exist.
    """
    files = {path.relative_to(pin / "patches").as_posix(): path for path in sorted((pin / "patches").rglob("*.patch"))}
    for name in files:
        if name.rpartition("/")[0] not in QUEUES:
            raise SourceError(f"{name}: expected patches in {', '.join(QUEUES)}, found one elsewhere")
    for name in without:
        if name not in files and name not in QUEUES:
            raise SourceError(f"--without: expected a queue ({', '.join(QUEUES)}) or a patch, found {name!r}")
    return {name: path for name, path in files.items() if not {name, name.partition("/")[0]} & set(without)}


def read_patches(pin: Path, without: Sequence[str] = ()) -> list[FileDiff]:
    """The patches, sorted by name. Raises SourceError if two of a queue change one file."""
    diffs = [parse(name, path.read_bytes()) for name, path in patch_files(pin, without).items()]
    owner: dict[tuple[str, str], str] = {}
    for diff in diffs:
        key = diff.name.partition("/")[0], diff.path
        if key in owner:
            raise SourceError(
                f"{diff.name}: expected one patch per upstream file in a queue, found {diff.path} in {owner[key]} too"
            )
        owner[key] = diff.name
    return diffs


def by_file(diffs: Iterable[FileDiff]) -> list[FileDiff]:
    """One diff per upstream file: the hunks of all queues. Raises DiffError if two hunks change one place."""
    files: dict[str, list[FileDiff]] = {}
    for diff in diffs:
        files.setdefault(diff.path, []).append(diff)
    return [combined(parts) for _, parts in sorted(files.items())]


def digest(pin: Path, without: Sequence[str] = ()) -> str:
    """Hex SHA-256 over the pin and its patches; identifies a patched tree."""
    h = hashlib.sha256(b"subkv patch digest 2\n")
    for key, value in read_version(pin).items():
        h.update(f"{key} {value}\n".encode())
    for name, path in patch_files(pin, without).items():
        h.update(f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return h.hexdigest()


def _below(path: str, folders: Iterable[str]) -> bool:
    return any(f"{path}/".startswith(f"{folder}/") for folder in folders)


def of_programs(path: str) -> bool:
    """Whether only llama.cpp's own programs use this file."""
    return path in PROGRAM_FILES or (_below(path, PROGRAM_DIRS) and not _below(path, PROGRAM_SKIP))


def is_needed(path: str, programs: bool = False) -> bool:
    """Whether the build uses this file of llama.cpp; with `programs`, a build with SUBKV_PROGRAMS."""
    if path in KEEP_FILES:
        return True
    if "__pycache__" in path.split("/"):
        return False
    if path.split("/")[0] in KEEP_DIRS and "/" in path and not _below(path, SKIP_DIRS):
        return True
    return programs and of_programs(path)


def tree_hash(tree: Tree) -> str:
    """Hex SHA-256 over the sorted list of paths and content hashes."""
    h = hashlib.sha256()
    for path in sorted(tree):
        h.update(f"{path}\0{hashlib.sha256(tree[path]).hexdigest()}\n".encode())
    return h.hexdigest()


def _walk(root: Path, programs: bool) -> Iterator[str]:
    for name in KEEP_FILES + PROGRAM_FILES:
        if is_needed(name, programs) and (root / name).is_file():
            yield name
    tops = KEEP_DIRS + tuple(top for top in PROGRAM_DIRS if programs and not _below(top, KEEP_DIRS))
    for top in tops:
        for folder, _, names in os.walk(root / top):
            for name in names:
                path = (Path(folder) / name).relative_to(root).as_posix()
                if is_needed(path, programs):
                    yield path


def read_dir(root: Path, programs: bool = False) -> Tree:
    """The files of a llama.cpp folder that the build uses."""
    return {path: (root / path).read_bytes() for path in _walk(root, programs)}


def read_sdist(archive: Path, programs: bool = False) -> Tree:
    """The files under vendor/llama.cpp of a llama-cpp-python archive that the build uses."""
    tree: Tree = {}
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            parts = member.name.split("/", 3)
            if len(parts) < 4 or parts[1:3] != ["vendor", "llama.cpp"] or not member.isfile():
                continue
            if not is_needed(parts[3], programs):
                continue
            stream = tar.extractfile(member)
            assert stream is not None
            tree[parts[3]] = stream.read()
    return tree


def patched(tree: Tree, diffs: Sequence[FileDiff], reverse: bool = False) -> Tree:
    """A copy of `tree` with all patches applied, or reverted."""
    out = dict(tree)
    for diff in diffs:
        if diff.path not in out:
            raise DiffError(f"{diff.name}: expected the file {diff.path}, found none")
        if not reverse:
            apply(diff, tree[diff.path])  # with its context
    for diff in by_file(diffs):
        out[diff.path] = apply(diff, out[diff.path], reverse)
    return out


def _differences(tree: Tree, pristine: Tree) -> str:
    paths = sorted(p for p in tree.keys() | pristine.keys() if tree.get(p) != pristine.get(p))
    return ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")


def version_hash(version: dict[str, str], programs: bool) -> str:
    """The pinned hash of the pristine tree."""
    return version["programs" if programs else "tree"]


def applied_patches(pin: Path, programs: bool, without: Sequence[str] = ()) -> list[FileDiff]:
    """The patches of the files that the build uses; without `programs`, not those of the programs."""
    return [diff for diff in read_patches(pin, without) if programs or not of_programs(diff.path)]


def pristine_from_dir(root: Path, pin: Path, programs: bool = False, without: Sequence[str] = ()) -> Tree:
    """The pristine files of a folder that is unpatched, or patched with exactly the patches of `pin`.

    Raises SourceError for any other content.
    """
    if not (root / "src" / "llama.cpp").is_file():
        raise SourceError(f"SUBKV_LLAMA_CPP_SOURCE: expected a llama.cpp folder, found no src/llama.cpp in {root}")
    version = read_version(pin)
    expected = version_hash(version, programs)
    diffs = applied_patches(pin, programs, without)
    tree = read_dir(root, programs)
    if tree_hash(tree) == expected:
        return tree
    try:
        clean = patched(tree, diffs, reverse=True)
        if tree_hash(clean) == expected:
            return clean
    except DiffError:
        pass
    message = (
        f"SUBKV_LLAMA_CPP_SOURCE: expected llama.cpp {version['commit']}, pristine or with the patches of digest"
        f" {digest(pin, without)[:12]} (or any version with -DSUBKV_MERGE=ON), found another content in {root}"
        f" (tree {tree_hash(tree)[:12]}, expected {expected[:12]})"
    )
    archive = cache_dir() / archive_name(version)
    if archive.is_file() and file_hash(archive) == version["sha256"]:
        message += f"; differs from pristine in {_differences(tree, read_sdist(archive, programs))}"
    raise SourceError(message)


#
# the archive
#


def cache_dir() -> Path:
    """Folder for archives: $SUBKV_CACHE, else $XDG_CACHE_HOME/subkv, else ~/.cache/subkv."""
    if os.environ.get("SUBKV_CACHE"):
        return Path(os.environ["SUBKV_CACHE"])
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "subkv"
    except RuntimeError as error:
        raise SystemExit(
            "SUBKV_CACHE: expected a folder for archives, as there is no home folder, found none"
        ) from error


def archive_name(version: dict[str, str]) -> str:
    """File name of the source archive."""
    return f"{version['package'].replace('-', '_')}-{version['version']}.tar.gz"


def file_hash(path: Path) -> str:
    """Hex SHA-256 of a file."""
    h = hashlib.sha256()
    with path.open("rb") as f:
        while block := f.read(1 << 20):
            h.update(block)
    return h.hexdigest()


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def pip_download(version: dict[str, str], folder: Path) -> Path:
    """Download the source archive into `folder` with pip and the user's index settings; `sha256` may be missing.

    pip runs the archive's build backend for its metadata. If that backend (which is also ours) is installed, pip needs
    no isolated environment.
    """
    requirements = folder / "requirements.txt"
    pinned = f" --hash=sha256:{version['sha256']}" if "sha256" in version else ""
    requirements.write_text(f"{version['package']}=={version['version']}{pinned}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", version["package"]]
    command += ["--require-hashes"] if pinned else []
    command += ["--disable-pip-version-check", "--progress-bar", "off", "-d", str(folder), "-r", str(requirements)]
    if importlib.util.find_spec("scikit_build_core") is not None:
        command.append("--no-build-isolation")
    # An enclosing pip sets these variables.
    own = ("PIP_BUILD_TRACKER", "PIP_REQ_TRACKER", "PIP_REQUIRE_HASHES")
    env = {key: value for key, value in os.environ.items() if key not in own}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    archive = folder / archive_name(version)
    if done.returncode != 0 or not archive.is_file():
        tail = "\n".join(done.stdout.strip().splitlines()[-12:])
        raise SourceError(
            f"pip could not download {version['package']}=={version['version']} (exit status {done.returncode});"
            f" give its vendor/llama.cpp as -DSUBKV_LLAMA_CPP_SOURCE=DIR instead. pip said:\n{tail}"
        )
    return archive


def fetch_archive(version: dict[str, str], fallback: Path) -> Path:
    """The pinned archive, verified, from the cache or by pip. fallback: folder to use if the cache is not writable."""
    name = archive_name(version)
    for folder in (cache_dir(), fallback):
        if (folder / name).is_file():
            if file_hash(folder / name) == version["sha256"]:
                return folder / name
            log(f"{folder / name} does not have the pinned SHA-256: downloading it again")
    folder = cache_dir()
    if not _writable(folder):
        log(f"cache {folder} is not writable: using {fallback}")
        folder = fallback
        folder.mkdir(parents=True, exist_ok=True)
    log(f"downloading {version['package']} {version['version']} (77 MB) into {folder}")
    with tempfile.TemporaryDirectory(prefix="download-", dir=folder) as tmp:
        archive = pip_download(version, Path(tmp))
        digest_of_file = file_hash(archive)
        if digest_of_file != version["sha256"]:
            raise SourceError(f"{name}: expected SHA-256 {version['sha256']}, found {digest_of_file}")
        os.replace(archive, folder / name)
    return folder / name


#
# the tree
#


def log(text: str) -> None:
    """Print a status line in CMake's style."""
    print(f"-- llama.cpp: {text}", flush=True)


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(data)
    os.replace(temporary, path)


def read_stamp(root: Path) -> dict[str, str | None] | None:
    """The stamp of this program's last write to `root`, None if there is none. Its `tree` is None during a write."""
    try:
        stamp = json.loads((root / STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return stamp if isinstance(stamp, dict) else None


def is_current(root: Path, target_digest: str) -> bool:
    """Whether `root` contains the tree with digest `target_digest`.

    Raises SourceError if files in it were changed, or if this program did not write it.
    """
    stamp = read_stamp(root)
    if stamp is None:
        if root.is_dir() and any(root.iterdir()):
            raise SourceError(f"{root}: expected a tree written by this build, found other files; remove the folder")
        return False
    if stamp.get("tree") is None:
        return False
    digest_of_tree = tree_hash(read_dir(root, programs=True))
    if digest_of_tree != stamp["tree"]:
        raise SourceError(
            f"{root}: expected the tree as patched by digest {str(stamp.get('digest'))[:12]}, found edited files;"
            f" turn the edits into a patch and remove the folder"
        )
    return stamp.get("digest") == target_digest


def write_tree(root: Path, tree: Tree, target_digest: str) -> int:
    """Make the files of `root` equal to `tree`; returns the number of files written or removed.

    Unchanged files are not written, so that a build tool sees only real changes. After an interrupt, the stamp makes
    the next run write again.
    """
    root.mkdir(parents=True, exist_ok=True)
    _write(root / STAMP, json.dumps({"digest": target_digest, "tree": None}).encode())
    changed = 0
    for path in list(_walk(root, programs=True)):
        if path not in tree:
            (root / path).unlink()
            changed += 1
    for path, data in tree.items():
        target = root / path
        if not target.is_file() or target.read_bytes() != data:
            _write(target, data)
            changed += 1
    _write(root / STAMP, json.dumps({"digest": target_digest, "tree": tree_hash(tree)}).encode())
    return changed


def pinned_tree(pin: Path, fallback: Path, programs: bool) -> Tree:
    """The pristine pinned files from the archive, verified."""
    version = read_version(pin)
    tree = read_sdist(fetch_archive(version, fallback), programs)
    expected = version_hash(version, programs)
    if tree_hash(tree) != expected:
        raise SourceError(f"{archive_name(version)}: expected tree {expected}, found {tree_hash(tree)}")
    return tree


def stock_files(tree: Tree, programs: bool) -> Tree:
    """The files of an unpatched tree that are compiled again."""
    folders = STOCK_DIRS + (STOCK_PROGRAM_DIRS if programs else ())
    return {path: data for path, data in tree.items() if path.split("/")[0] in folders}


def prepare_merged(
    pin: Path, tree: Path, stock: Path | None, source: Path, programs: bool, without: Sequence[str] = ()
) -> None:
    """`prepare` for another version of llama.cpp. Raises SourceError that names every hunk that does not merge."""
    if not (source / "src" / "llama.cpp").is_file():
        raise SourceError(f"SUBKV_LLAMA_CPP_SOURCE: expected a llama.cpp folder, found no src/llama.cpp in {source}")
    theirs = read_dir(source, programs)
    other = tree_hash(theirs)
    diffs = applied_patches(pin, programs, without)
    merged, conflicts = merge(pinned_tree(pin, tree.parent / "sdist", programs), theirs, by_file(diffs))
    if conflicts:
        raise SourceError(
            f"SUBKV_MERGE: expected every hunk to merge onto {source}, found {len(conflicts)} that do not:\n"
            + "\n".join(f"  {conflict}" for conflict in conflicts)
        )
    target_digest = f"{digest(pin, without)} merged onto {other}" + (" programs" if programs else "")
    if not is_current(tree, target_digest):
        changed = write_tree(tree, merged, target_digest)
        log(f"{len(diffs)} patches merged onto tree {other[:12]}, not the pin: {changed} files written")
    if stock and not is_current(stock, f"stock {other}"):
        write_tree(stock, stock_files(theirs, programs), f"stock {other}")


def prepare(
    pin: Path,
    tree: Path,
    stock: Path | None,
    source: Path | None,
    programs: bool = False,
    without: Sequence[str] = (),
) -> None:
    """Bring `tree` (patched) and `stock` (pristine, optional) up to date."""
    version = read_version(pin)
    target_digest = digest(pin, without) + (" programs" if programs else "")
    diffs = applied_patches(pin, programs, without)
    clean = pristine_from_dir(source, pin, programs, without) if source else None
    stock_digest = "stock " + version_hash(version, programs)
    todo = [
        root for root, name in ((tree, target_digest), (stock, stock_digest)) if root and not is_current(root, name)
    ]
    if not todo:
        log(f"{version['commit']} is up to date, patch digest {target_digest[:12]}")
        return
    if clean is None:
        clean = pinned_tree(pin, tree.parent / "sdist", programs)
    if tree in todo:
        changed = write_tree(tree, patched(clean, diffs), target_digest)
        log(f"{version['commit']} with {len(diffs)} patches, digest {target_digest[:12]}: {changed} files written")
    if stock and stock in todo:
        write_tree(stock, stock_files(clean, programs), stock_digest)


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="fetch, verify and patch the pinned llama.cpp source")
    commands = parser.add_subparsers(dest="command", required=True)
    p = commands.add_parser("prepare")
    p.add_argument("--pin", type=Path, required=True)
    p.add_argument("--tree", type=Path, required=True)
    p.add_argument("--stock", type=Path)
    p.add_argument("--source", type=Path)
    p.add_argument("--merge", action="store_true")
    p.add_argument("--programs", action="store_true")
    p.add_argument("--without", action="append", default=[], metavar="QUEUE|PATCH")
    p = commands.add_parser("tree-hash")
    p.add_argument("folder", type=Path)
    p.add_argument("--programs", action="store_true")
    args = parser.parse_args(argv)
    try:
        if args.command == "prepare" and args.merge:
            if args.source is None:
                raise SourceError("SUBKV_MERGE: expected -DSUBKV_LLAMA_CPP_SOURCE=DIR of another version, found none")
            prepare_merged(args.pin, args.tree, args.stock, args.source, args.programs, args.without)
        elif args.command == "prepare":
            prepare(args.pin, args.tree, args.stock, args.source, args.programs, args.without)
        else:
            print(tree_hash(read_dir(args.folder, args.programs)))
    except (SourceError, DiffError, OSError, tarfile.TarError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
