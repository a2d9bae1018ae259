"""Downloads model files of the Hugging Face hub with package huggingface_hub (the extra `hub`).

`fetch("user/model:Q8_0")` is llama.cpp's -hf. Files are stored as huggingface_hub does (HF_TOKEN, HF_ENDPOINT, HF_HOME,
HF_HUB_OFFLINE), so programs share their downloads.
"""

from __future__ import annotations

import fnmatch
import glob
import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click

from subkv.base.errors import SubkvError, install
from subkv.base.text import printable

DEFAULT_QUANTS = ("Q4_K_M", "Q8_0")  # llama.cpp's order of preference, then the first file
NOT_MODELS = ("mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-")  # in names of other GGUF files
_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)

hf_option = click.option(
    "-hf",
    "-hfr",
    "--hf-repo",
    "hf_repo",
    envvar="LLAMA_ARG_HF_REPO",
    metavar="USER/MODEL[:QUANT]",
    help="model of the Hugging Face hub; default QUANT: Q4_K_M, else Q8_0, else the first [extra hub]",
)


def requested_model(model: Path | str | None, hf_repo: str | None) -> Path | None:
    """The model of -m, or that of -hf (downloaded); None without both. Raises click.UsageError, and as fetch()."""
    if model is not None and hf_repo is not None:
        raise click.UsageError(f"-hf: expected a model file or -hf, found both {model} and {hf_repo}")
    if hf_repo is not None:
        return fetch(hf_repo)
    return None if model is None else Path(model)


def fetch(
    repo: str,
    pattern: str | None = None,
    *,
    more: Sequence[str] = (),
    cache_dir: str | os.PathLike[str] | None = None,
    local_dir: str | os.PathLike[str] | None = None,
) -> Path:
    """Download a model of the hub if needed and return its path: for a split model, the first of its files.

    repo: USER/MODEL[:QUANT]; without QUANT Q4_K_M, else Q8_0, else the first GGUF. pattern: name or pattern of the
    file, instead of a quant. more: patterns of further files to download. cache_dir, local_dir: as in huggingface_hub.

    If the hub cannot be reached, it prints a line to stderr and uses an earlier download. Raises SubkvError about
    `hf_repo`, `pattern` or `more`.
    """
    name, _, quant = repo.partition(":")
    if not re.fullmatch(r"[^/\s:]+/[^/\s:]+", name) or (":" in repo and not quant):
        raise SubkvError("hf_repo", f"expected USER/MODEL or USER/MODEL:QUANT, found {repo!r}")
    if quant and pattern is not None:
        raise SubkvError("pattern", f"expected a pattern or the quant of {repo}, found both")
    if importlib.util.find_spec("huggingface_hub") is None:
        raise SubkvError("hf_repo", f"expected package huggingface_hub, found none: {install('hub')}")
    folders = {"cache_dir": cache_dir, "local_dir": local_dir}
    files, problem = _list_files(name, folders)
    where = f"the earlier download of {name} ({problem})" if problem else name
    chosen = _choose(files, where, quant) if pattern is None else _matching(files, where, pattern, "pattern")
    requested = [*_parts(files, chosen), *(_matching(files, where, each, "more") for each in more)]
    if problem:
        print(printable(f"{repo}: {problem}; using an earlier download of {chosen}"), file=sys.stderr)
    return _download(name, requested, folders, offline=bool(problem)) / chosen


def _list_files(repo: str, folders: dict[str, Any]) -> tuple[list[str], str]:
    """Names of the files of a repository, and the reason why only local ones are listed ("": the hub listed them)."""
    from huggingface_hub import HfApi  # an extra
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, OfflineModeIsEnabled, RepositoryNotFoundError

    try:
        return sorted(file.rfilename for file in HfApi().model_info(repo).siblings or []), ""
    except GatedRepoError as error:
        reason = f"{repo} is gated; request access there and set HF_TOKEN"
        raise SubkvError("hf_repo", reason) from error
    except RepositoryNotFoundError as error:
        reason = f"unknown repository {repo}; a private one needs HF_TOKEN"
        raise SubkvError("hf_repo", reason) from error
    except OfflineModeIsEnabled:
        problem = "HF_HUB_OFFLINE is set"
    except HfHubHTTPError as error:
        if error.response is not None and error.response.status_code < 500:
            raise SubkvError("hf_repo", f"expected the files of {repo}, found {_first_line(error)}") from error
        problem = f"the hub does not answer ({_first_line(error)})"
    except ValueError as error:  # an invalid name
        raise SubkvError("hf_repo", f"invalid repository name {repo}: {_first_line(error)}") from error
    except Exception as error:  # of the HTTP library, which differs between versions of huggingface_hub
        problem = f"the hub cannot be reached ({_first_line(error)})"
    try:
        folder = _snapshot(repo, [], folders, offline=True)
    except OSError as error:
        raise SubkvError("hf_repo", f"cannot list {repo}: {problem}, and there is no earlier download") from error
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()), problem


def _snapshot(repo: str, files: Iterable[str], folders: dict[str, Any], offline: bool) -> Path:
    """Download files of a repository; returns its folder. Raises as huggingface_hub."""
    from huggingface_hub import snapshot_download  # an extra
    from huggingface_hub.utils import tqdm

    class Bar(tqdm):
        """Shown only if stderr is a terminal, like our own bars."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.setdefault("disable", None)
            super().__init__(*args, **kwargs)

    names = [glob.escape(file) for file in files]
    return Path(snapshot_download(repo, allow_patterns=names, local_files_only=offline, tqdm_class=Bar, **folders))


def _download(repo: str, files: Sequence[str], folders: dict[str, Any], offline: bool) -> Path:
    try:
        folder = _snapshot(repo, files, folders, offline)
    except Exception as error:  # of the HTTP library or the disk
        raise SubkvError("hf_repo", f"cannot download {files[0]} of {repo}: {_first_line(error)}") from error
    for file in files:
        if not (folder / file).is_file():
            raise SubkvError("hf_repo", f"expected {file} of {repo} in {folder}, found none; download it again")
    return folder


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


#
# choice of the file
#


def _choose(files: Sequence[str], where: str, quant: str) -> str:
    """The model file with this quant, "" for the default. where: source of the list, for messages."""
    models = [file for file in files if _is_model(file)]
    if not models:
        raise SubkvError("hf_repo", f"expected GGUF files in {where}, found none")
    for candidate in [quant] if quant else DEFAULT_QUANTS:
        # unlike llama.cpp, do not match F16 in BF16
        form = re.compile(rf"(?<![A-Za-z0-9]){re.escape(candidate)}[.-]", re.IGNORECASE)
        for file in models:
            if form.search(file):
                return file
    if quant:
        available = sorted({_quant_of(file) for file in models})
        raise SubkvError("hf_repo", f"expected quant {quant} in {where}, found {', '.join(available)}")
    return models[0]


def _is_model(file: str) -> bool:
    """Whether a file is a model, or the first file of a split model."""
    split = _SPLIT.search(file)
    name = file.rsplit("/", 1)[-1]
    return file.endswith(".gguf") and not any(word in name for word in NOT_MODELS) and (not split or int(split[1]) == 1)


def _quant_of(file: str) -> str:
    """The quant in a file name, as llama.cpp reads it: Q4_K_M in model-Q4_K_M-00001-of-00002.gguf."""
    stem = _SPLIT.sub("", file).removesuffix(".gguf")
    match = re.search(r"[-.]([A-Za-z0-9_]+)$", stem)
    return match[1].upper() if match else file


def _parts(files: Sequence[str], first: str) -> list[str]:
    """All files of a model, given the first. Raises SubkvError if the repository lacks one."""
    split = _SPLIT.search(first)
    if not split:
        return [first]
    parts = [f"{first[: split.start()]}-{i + 1:05d}-of-{split[2]}.gguf" for i in range(int(split[2]))]
    for part in parts:
        if part not in files:
            raise SubkvError("hf_repo", f"expected all {len(parts)} files of a split model, found no {part}")
    return parts


def _matching(files: Sequence[str], where: str, pattern: str, key: str) -> str:
    """The one file that matches a pattern; of a split model the first file."""
    matches = [file for file in files if fnmatch.fnmatch(file, pattern)]
    firsts = [file for file in matches if not (split := _SPLIT.search(file)) or int(split[1]) == 1] or matches
    if len(firsts) != 1:
        others = ", ".join(firsts or [file for file in files if file.endswith(".gguf")]) or "no GGUF"
        raise SubkvError(key, f"expected one file like {pattern} in {where}, found {len(firsts)}: {others}")
    return firsts[0]
