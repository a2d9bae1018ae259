"""What a user sets: where the server listens, what it offers, and the limits of requests."""

from __future__ import annotations

import dataclasses
import errno
import ipaddress
import os
import socket
from pathlib import Path
from typing import Any

from subkv.base.errors import SubkvError

# Four slots, as llama-server has: a second program, or the requests for titles that chat clients send in between, then
# do not drive a conversation out of its cells.
N_SLOTS = 4
N_CTX_SLOT = 4096
LOG_FORMATS = ("text", "json", "none")
POOLING = {"none": 0, "mean": 1, "cls": 2, "last": 3, "rank": 4}  # enum llama_pooling_type


@dataclasses.dataclass(frozen=True)
class Limits:
    """What requests may take, in bytes and seconds. docs/server.md has the table.

    n_predict: tokens per answer, negative: the context. n_queue: requests that wait. grammar_memory in MiB.
    """

    n_predict: int = -1
    n_queue: int = 256
    max_body: int = 8 * 1024 * 1024
    timeout: float = 600.0
    header_timeout: float = 20.0
    n_connections: int = 4096
    grammar_timeout: float = 5.0
    grammar_memory: int = 256
    stall_timeout: float = 600.0


@dataclasses.dataclass(frozen=True)
class Listening:
    """Where the server listens, and to whom."""

    host: str
    port: int
    api_key: tuple[str, ...]
    api_key_file: Path | None
    allow_host: tuple[str, ...] = ()
    log_format: str = "text"

    def keys(self) -> list[str]:
        """--api-key, several or separated by commas, and the lines of --api-key-file but for comments."""
        keys = [key for text in self.api_key for key in text.split(",")]
        if self.api_key_file is not None:
            try:
                lines = self.api_key_file.read_text("utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise SubkvError("api_key_file", f"cannot read {self.api_key_file}: {error}") from error
            keys += [line for line in lines if not line.startswith("#")]
        keys = [key.strip() for key in keys if key.strip()]
        if not keys and (self.api_key or self.api_key_file is not None):
            raise SubkvError("api_key", "expected at least one key, found none")
        return keys

    def names(self, address: str) -> list[str] | None:
        """Names to answer to, for a server that listens on `address`; None: to any.

        An address that others reach has names that only they know: it is left to the user to list them.
        """
        loopback = ipaddress.ip_address(address.partition("%")[0]).is_loopback
        if "*" in self.allow_host or not (loopback or self.allow_host):
            return None
        return [self.host, *self.allow_host]

    def listen(self, timeout: float, n_connections: int) -> socket.socket:
        """A listening socket, taken before the model is loaded so that a port in use costs no time."""
        host, port = self.host, self.port
        try:
            family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        except socket.gaierror as error:
            raise SubkvError(
                "host", f"expected an address of this machine, found {host!r} ({error.strerror})"
            ) from error
        sock = socket.socket(family, kind)
        try:
            # where a server has just ended; on Windows SO_REUSEADDR would let two of them listen on one port
            alone = getattr(socket, "SO_EXCLUSIVEADDRUSE", socket.SO_REUSEADDR)
            sock.setsockopt(socket.SOL_SOCKET, alone, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):  # connections inherit it: the kernel drops who never reads
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * timeout))
            sock.bind(address)
            sock.listen(n_connections)
        except OSError as error:
            sock.close()
            if error.errno == errno.EADDRINUSE:
                raise SubkvError("port", f"expected a free port, found {port} in use on {host}") from error
            raise SubkvError("host", f"cannot listen on {host} port {port}: {error.strerror}") from error
        return sock


@dataclasses.dataclass(frozen=True)
class Remembering:
    """What is kept of conversations beside the slots. Sizes in MiB."""

    cache_ram: int = 1024
    cache_disk: Path | None = None
    cache_disk_size: int = 8192
    shared_cache: bool = False
    cache_store: str | None = None

    @property
    def lower(self) -> Path | str | None:
        """What is behind the memory: a folder, or the URL of a store that other servers share."""
        return self.cache_disk or self.cache_store

    def check(self) -> None:
        """Refuse a folder that is none. What happens to it later costs time only. Raises SubkvError."""
        folder = self.cache_disk
        if folder is not None and self.cache_store is not None:
            raise SubkvError("cache_store", "expected no --cache-disk beside it, found one")
        if folder is not None and os.path.lexists(folder) and not folder.is_dir():
            raise SubkvError("cache_disk", f"expected a folder, found the file {folder}")


@dataclasses.dataclass(frozen=True)
class Offer:
    """What the server answers with. n_ctx in tokens, None: N_CTX_SLOT for each slot."""

    parallel: int
    n_ctx: int | None
    alias: str | None
    chat_format: str | None
    slot_save_path: Path | None
    embeddings: bool
    pooling: str | None

    @property
    def n_slots(self) -> int:
        return 1 if self.embeddings else self.parallel

    def model_arguments(self) -> dict[str, Any]:
        """Of SlotsLlama."""
        pooling = -1 if self.pooling is None else POOLING[self.pooling]
        more = {"embedding": True, "pooling_type": pooling} if self.embeddings else {}
        return {"n_slots": self.n_slots, "chat_format": self.chat_format} | more

    def folder(self) -> Path | None:
        """Where slots are saved. Raises SubkvError."""
        folder = self.slot_save_path
        if folder is not None and not (folder.is_dir() and os.access(folder, os.W_OK)):
            raise SubkvError("slot_save_path", f"expected a folder that can be written, found {folder}")
        return folder
