"""Reads what we need of the arguments of a llama.cpp program: models, cache types, a server's host.

The program gets its arguments as they are; it chooses the cache of each context.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from subkv.base.files import open_regular
from subkv.native.bases import AUTO, CODED

MODEL, REPO, REPO_FILE, FROM_URL, FOLDER = "model", "repo", "repo_file", "from_url", "folder"
TYPE_K, TYPE_V, DRAFT, DRAFT_TYPE_K, DRAFT_TYPE_V = "type_k", "type_v", "draft", "draft_type_k", "draft_type_v"
HOST, CONTEXT, PARALLEL, DEVICE = "host", "context", "parallel", "device"
# kind of value -> its flags, its environment variables without LLAMA_ARG_
_KINDS = {
    MODEL: ("-m --model", "MODEL"),
    REPO: ("-hf -hfr --hf-repo", "HF_REPO"),
    REPO_FILE: ("-hff --hf-file", "HF_FILE"),
    FROM_URL: ("-mu --model-url -dr --docker-repo", "MODEL_URL DOCKER_REPO"),
    FOLDER: ("--models-dir --models-preset", "MODELS_DIR MODELS_PRESET"),
    TYPE_K: ("-ctk --cache-type-k", "CACHE_TYPE_K"),
    TYPE_V: ("-ctv --cache-type-v", "CACHE_TYPE_V"),
    DRAFT: ("-md --model-draft --spec-draft-model", "SPEC_DRAFT_MODEL"),
    DRAFT_TYPE_K: ("-ctkd --cache-type-k-draft --spec-draft-type-k", "SPEC_DRAFT_CACHE_TYPE_K"),
    DRAFT_TYPE_V: ("-ctvd --cache-type-v-draft --spec-draft-type-v", "SPEC_DRAFT_CACHE_TYPE_V"),
    HOST: ("--host", "HOST"),
    CONTEXT: ("-c --ctx-size", "CTX_SIZE"),
    PARALLEL: ("-np --parallel", "N_PARALLEL"),
    DEVICE: ("-dev --device", "DEVICE"),
}
# flags without a value: the program prints something and exits; its model has no K/V cache, or reads it only once
PRINTS = {"-h", "--usage", "--version", "--license", "--list-devices", "-cl", "--cache-list", "--completion-bash"}
EMBEDS = {"--embedding", "--embeddings", "--rerank", "--reranking"}
FLAGS = {flag: kind for kind, (flags, _) in _KINDS.items() for flag in flags.split()}
VARIABLES = {f"LLAMA_ARG_{name}": kind for kind, (_, names) in _KINDS.items() for name in names.split()}
FORMER = {"--mlock": "--load-mode mlock", "--no-mmap": "--load-mode none"}  # flags that llama.cpp has renamed
_TYPES = (TYPE_K, TYPE_V, DRAFT_TYPE_K, DRAFT_TYPE_V)
MAGIC = b"GGUF"


def split_devices(value: str) -> tuple[str, ...]:
    """The names in a value of --device, as llama.cpp separates them."""
    return tuple(re.split("[,/]", value))


def is_coded(name: str) -> bool:
    """Whether a cache type is subkv or subkv:BITS."""
    return name.partition(":")[0] == CODED


def program_name(program: str) -> str:
    """A program's name without its folder."""
    return re.split(r"[/\\]", program)[-1].removesuffix(".exe")


def is_llama_cpp_program(program: str) -> bool:
    """Whether a name is that of a llama.cpp program: llama-server, llama-bench, llama."""
    return re.fullmatch(r"llama(-[\w.-]+)?", program_name(program)) is not None


def is_gguf(path: Path) -> bool:
    """Whether a file starts with GGUF's magic number."""
    try:
        with open_regular(path) as handle:
            return handle.read(len(MAGIC)) == MAGIC
    except (OSError, ValueError):  # a name with a zero byte
        return False


def _coded_type(types: Iterable[str]) -> str | None:
    """The first coded type, one with bits before one without."""
    return next(iter(sorted(filter(is_coded, types), key=lambda name: ":" not in name)), None)


@dataclass(frozen=True)
class ProgramArguments:
    """The models and the cache types that a command line and its environment name.

    models: files, as given. repos, repo_file: models of the Hugging Face hub, and the file in them. from_url: the
    program downloads its model. folder: a router's models. types: names of cache types of keys and values, without
    those not given. draft, draft_types: the same of a draft model. host: of a server. prints: as PRINTS. embeds: as
    EMBEDS. n_ctx, n_parallel: tokens and sequences of a context, None: not given. devices: those of the model's layers.
    """

    arguments: tuple[str, ...]
    environment: dict[str, str]
    models: tuple[Path, ...] = ()
    repos: tuple[str, ...] = ()
    repo_file: str | None = None
    from_url: bool = False
    folder: str | None = None
    types: tuple[str, ...] = ()
    draft: Path | None = None
    draft_types: tuple[str, ...] = ()
    host: str | None = None
    prints: bool = False
    embeds: bool = False
    n_ctx: int | None = None
    n_parallel: int | None = None
    devices: tuple[str, ...] = ()

    @property
    def names_model(self) -> bool:
        """Whether the user named a model in any way."""
        return bool(self.models or self.repos or self.from_url or self.folder is not None)

    def with_model(self, model: Path) -> ProgramArguments:
        """The same with -m, for arguments that name no model."""
        return replace(self, arguments=("-m", str(model), *self.arguments), models=(model,))

    @property
    def strict(self) -> bool:
        """Whether the user requested a coded cache by name; then no other cache may replace it."""
        return any(is_coded(name) for name in self.types)

    @property
    def coded_type(self) -> str | None:
        """The first of the types subkv and subkv:BITS."""
        return _coded_type(self.types)

    @property
    def draft_type(self) -> str | None:
        """The same of the draft model."""
        return _coded_type(self.draft_types)

    @property
    def ordinary(self) -> bool:
        """Whether the user requested llama.cpp's own cache types only."""
        return bool(self.types) and not any(is_coded(name) or name == AUTO for name in self.types)

    @property
    def codes_draft(self) -> bool:
        """Whether the user requested a coded cache for drafts, by name or if there are bases."""
        return any(is_coded(name) or name == AUTO for name in self.draft_types)


@dataclass(frozen=True)
class _Flag:
    """A flag and its value. index: the flag's place in the arguments; n: arguments that both take."""

    kind: str
    value: str
    index: int
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


def empty_model(arguments: Sequence[str]) -> str | None:
    """The first flag of a model with an empty name."""
    empty = (flag for flag in _flags(arguments) if flag.kind in (MODEL, REPO) and not flag.value)
    return next((arguments[flag.index].partition("=")[0] for flag in empty), None)


def read(
    program: str, arguments: Sequence[str], environment: Mapping[str, str], stock: Collection[str]
) -> ProgramArguments:
    """Read the arguments of `program`. A flag overrides its variable. stock: llama.cpp's cache types.

    Other programs may use -m for something else, so only a GGUF file counts as their model.
    """
    is_llama_cpp = is_llama_cpp_program(program)
    takes_lists = is_llama_cpp and (program_name(program) == "llama-bench" or list(arguments[:1]) == ["bench"])
    flags = list(_flags(arguments))

    def values(kind: str) -> list[str]:
        named = [flag.value for flag in flags if flag.kind == kind]
        if not named and (is_llama_cpp or kind in _TYPES):
            named = [environment[name] for name, of in VARIABLES.items() if of == kind and environment.get(name)]
        return named

    def number(kind: str) -> int | None:
        found = values(kind)
        return int(found[-1]) if found and found[-1].isdigit() else None

    def types(*kinds: str) -> tuple[str, ...]:
        lists = [",".join(values(kind)).split(",") if takes_lists else values(kind)[-1:] for kind in kinds]
        named = [(name, name.partition(":")[0]) for names in lists for name in names]
        return tuple(name for name, kind in named if name in (AUTO, *stock) or kind == CODED)

    models, repos = values(MODEL), values(REPO) if is_llama_cpp else []
    from_url = is_llama_cpp and bool(values(FROM_URL))
    if takes_lists:
        models, repos = ([name for value in lists for name in value.split(",")] for lists in (models, repos))
    elif is_llama_cpp:
        models, repos = models[-1:], repos[-1:]
        if from_url or repos:  # -m is the target of the download
            models = []
    else:
        models = [value for value in models if is_gguf(Path(value))]
    files, folders, drafts, hosts, devices = (values(kind) for kind in (REPO_FILE, FOLDER, DRAFT, HOST, DEVICE))
    return ProgramArguments(
        tuple(arguments),
        dict(environment),
        tuple(Path(model) for model in models if model),
        tuple(repo for repo in repos if repo),
        files[-1] if files else None,
        from_url,
        folders[-1] if folders else None,
        types(TYPE_K, TYPE_V),
        Path(drafts[-1]) if drafts and drafts[-1] else None,
        types(DRAFT_TYPE_K, DRAFT_TYPE_V),
        hosts[-1] if hosts else None,
        not PRINTS.isdisjoint(arguments),
        not EMBEDS.isdisjoint(arguments),
        number(CONTEXT),
        number(PARALLEL),
        split_devices(devices[-1]) if is_llama_cpp and devices else (),
    )


def with_hub_models(read: ProgramArguments) -> ProgramArguments:
    """Replace -hf by `-m FILE` and download the files, because our builds of llama.cpp cannot.

    Raises SubkvError about `hf_repo`.
    """
    from subkv.base import hub  # an extra

    files = [hub.fetch(repo, read.repo_file) for repo in read.repos]
    words = [word for file in files for word in ("-m", str(file))]
    rest, placed = list(read.arguments), False
    for flag in reversed(list(_flags(rest))):
        if flag.kind in (REPO, REPO_FILE) or (flag.kind == MODEL and not read.models):
            here = flag.kind == REPO and not placed
            rest[flag.index : flag.index + flag.n] = words if here else []
            placed = placed or here
    if not placed:  # the model came from a variable
        rest[:0] = words
    dropped = (REPO, REPO_FILE, MODEL)
    environment = {name: value for name, value in read.environment.items() if VARIABLES.get(name) not in dropped}
    return replace(read, arguments=tuple(rest), environment=environment, models=(*read.models, *files), repos=())
