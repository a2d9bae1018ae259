"""The arguments of a llama.cpp program, as far as they say which model it opens and which cache that gets.

Nothing else is looked at: what is not understood here is the program's own, and stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from subkv.base.errors import CacheError
from subkv.base.files import open_regular

MODEL, REPO, REPO_FILE, FROM_URL, FOLDER = "model", "repo", "repo_file", "from_url", "folder"
TYPE_K, TYPE_V = "type_k", "type_v"
# flag -> what its value is; environment variable -> the same
FLAGS = {
    "-m": MODEL,
    "--model": MODEL,
    "-hf": REPO,
    "-hfr": REPO,
    "--hf-repo": REPO,
    "-hff": REPO_FILE,
    "--hf-file": REPO_FILE,
    "-mu": FROM_URL,
    "--model-url": FROM_URL,
    "-dr": FROM_URL,
    "--docker-repo": FROM_URL,
    "--models-dir": FOLDER,
    "--models-preset": FOLDER,
    "-ctk": TYPE_K,
    "--cache-type-k": TYPE_K,
    "-ctv": TYPE_V,
    "--cache-type-v": TYPE_V,
}
VARIABLES = {
    "LLAMA_ARG_MODEL": MODEL,
    "LLAMA_ARG_HF_REPO": REPO,
    "LLAMA_ARG_HF_FILE": REPO_FILE,
    "LLAMA_ARG_MODEL_URL": FROM_URL,
    "LLAMA_ARG_DOCKER_REPO": FROM_URL,
    "LLAMA_ARG_MODELS_DIR": FOLDER,
    "LLAMA_ARG_MODELS_PRESET": FOLDER,
    "LLAMA_ARG_CACHE_TYPE_K": TYPE_K,
    "LLAMA_ARG_CACHE_TYPE_V": TYPE_V,
}
OURS = ("subkv", "auto")  # cache types that upstream's parsers refuse
MAGIC = b"GGUF"


def program_name(program: str) -> str:
    """A program's name without its folder."""
    return re.split(r"[/\\]", program)[-1].removesuffix(".exe")


def is_llama_cpp_program(program: str) -> bool:
    """Whether a program's name is one of llama.cpp's: llama-server, llama-bench, llama."""
    return re.fullmatch(r"llama(-[\w.-]+)?", program_name(program)) is not None


def is_gguf(path: Path) -> bool:
    """Whether it is a file that begins as a GGUF does."""
    try:
        with open_regular(path) as handle:
            return handle.read(len(MAGIC)) == MAGIC
    except (OSError, ValueError):  # a name with a zero byte
        return False


@dataclass(frozen=True)
class ProgramArguments:
    """What a command line and its environment say.

    arguments, environment: what the program gets, without cache types that it would refuse. models: files, as given.
    repos, repo_file: models of the Hugging Face hub, and which file. from_url: the model comes from an address.
    folder: of a router's models. type_k, type_v: names of cache types, None where none was given.
    """

    arguments: tuple[str, ...]
    environment: dict[str, str]
    models: tuple[Path, ...] = ()
    repos: tuple[str, ...] = ()
    repo_file: str | None = None
    from_url: bool = False
    folder: str | None = None
    type_k: str | None = None
    type_v: str | None = None

    @property
    def strict(self) -> bool:
        """Whether coefficients were requested by name: no other cache will do."""
        return "subkv" in (self.type_k, self.type_v)

    @property
    def ordinary(self) -> bool:
        """Whether the program is to have a cache type of llama.cpp's own."""
        return {self.type_k, self.type_v} - {None, *OURS} != set()


@dataclass(frozen=True)
class _Flag:
    """A flag and its value: where they stand in the arguments, and how many these are."""

    kind: str
    value: str
    at: int
    n: int


def _flags(arguments: Sequence[str]) -> Iterator[_Flag]:
    i = 0
    while i < len(arguments):
        name, equals, value = arguments[i].partition("=")
        kind = FLAGS.get(name.replace("_", "-") if name.startswith("--") else name)
        n = 1 if equals else 2
        if kind is None or i + n > len(arguments):
            i += 1
            continue
        yield _Flag(kind, value if equals else arguments[i + 1], i, n)
        i += n


def _one_type(key: str, values: Sequence[str], stock: Collection[str], lists: bool) -> str | None:
    """The cache type that counts: the last; one of llama-bench's lists. Raises CacheError about `key`."""
    named = [value.split(",") if lists else [value] for value in values]
    known = [types for types in named if set(types) <= {*OURS, *stock}]
    counting = sum(known, []) if lists else (known or [[]])[-1]
    if len(set(counting)) > 1 and not set(counting).isdisjoint(OURS):
        found = ",".join(counting)
        raise CacheError(key, f"expected subkv alone, since a process has coded or ordinary caches, found {found}")
    return counting[0] if counting else None


def read(
    program: str, arguments: Sequence[str], environment: Mapping[str, str], stock: Collection[str]
) -> ProgramArguments:
    """The meaning of the arguments of `program`; a flag goes before its variable. stock: llama.cpp's cache types.

    Another program than llama.cpp's may mean something else by -m: there only a file that is a GGUF is a model.
    Raises CacheError about `type_k` or `type_v`.
    """
    theirs = is_llama_cpp_program(program)
    lists = theirs and (program_name(program) == "llama-bench" or list(arguments[:1]) == ["bench"])
    flags = list(_flags(arguments))

    def values(kind: str) -> list[str]:
        found = [flag.value for flag in flags if flag.kind == kind]
        if not found and (theirs or kind in (TYPE_K, TYPE_V)):
            found = [environment[name] for name, what in VARIABLES.items() if what == kind and environment.get(name)]
        return found

    type_k, type_v = (_one_type(kind, values(kind), stock, lists) for kind in (TYPE_K, TYPE_V))
    if None not in (type_k, type_v) and type_k != type_v and {type_k, type_v} & set(OURS):
        raise CacheError(TYPE_V, f"expected the same cache for K and V with {type_k!r}, found {type_v!r}")
    models, repos = values(MODEL), values(REPO) if theirs else []
    from_url = theirs and bool(values(FROM_URL))
    if lists:
        models, repos = ([one for value in found for one in value.split(",")] for found in (models, repos))
    elif theirs:
        models, repos = models[-1:], repos[-1:]
        if from_url or repos:  # -m says where a download goes
            models = []
    else:
        models = [value for value in models if is_gguf(Path(value))]
    ours = type_k in OURS or type_v in OURS
    removed = {*OURS, *stock} if ours else set(OURS)
    left, kept = list(arguments), dict(environment)
    for flag in reversed(flags):
        if flag.kind in (TYPE_K, TYPE_V) and set(flag.value.split(",")) <= removed:
            del left[flag.at : flag.at + flag.n]
    for name, kind in VARIABLES.items():
        if kind in (TYPE_K, TYPE_V) and kept.get(name) in removed:
            del kept[name]
    files, folders = values(REPO_FILE), values(FOLDER)
    return ProgramArguments(
        tuple(left),
        kept,
        tuple(Path(model) for model in models if model),
        tuple(repo for repo in repos if repo),
        files[-1] if files else None,
        from_url,
        folders[-1] if folders else None,
        type_k,
        type_v,
    )


def with_hub_models(found: ProgramArguments) -> ProgramArguments:
    """With the hub's models as local files: `-m FILE` instead of -hf, as our builds of llama.cpp download nothing.

    Raises SubkvError about `hf_repo`.
    """
    from subkv.base import hub  # an extra

    files = [hub.fetch(repo, found.repo_file) for repo in found.repos]
    words = [word for file in files for word in ("-m", str(file))]
    left, placed = list(found.arguments), False
    for flag in reversed(list(_flags(left))):
        if flag.kind in (REPO, REPO_FILE) or (flag.kind == MODEL and not found.models):
            here = flag.kind == REPO and not placed
            left[flag.at : flag.at + flag.n] = words if here else []
            placed = placed or here
    if not placed:  # a variable named it
        left[:0] = words
    gone = (REPO, REPO_FILE, MODEL)
    environment = {name: value for name, value in found.environment.items() if VARIABLES.get(name) not in gone}
    return replace(found, arguments=tuple(left), environment=environment, models=(*found.models, *files), repos=())
