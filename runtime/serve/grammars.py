"""Grammars of requests, each in a process of its own (grammar_worker) that a deadline and a memory limit can end."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from runtime.serve import grammar_worker
from runtime.serve.grammar_limits import N_BYTES, check_grammar
from runtime.serve.grammar_worker import LENGTH, READY, STEP
from runtime.serve.refusals import ApiError, bad_field
from runtime.serve.sampling import SamplingError

# isort: split
from llama_cpp import llama_grammar

START_SECONDS = 60.0  # for the process with the vocabulary, once
N_CACHED = 64  # schemas whose GBNF is remembered, if it has at most N_BYTES, and texts that are no grammar
MIB = 1024 * 1024

Allowed = npt.NDArray[np.bool_]


class SchemaText(str):
    """A JSON schema where llama_cpp expects GBNF: it is converted when a grammar is made of it. param: its field."""

    param = "tools"


class Grammar:
    """A grammar that follows one answer. Its process ends with close(), which any thread may call: it never waits.

    timeout: seconds for each step. Steps raise SamplingError when it is over, or the process has ended.
    """

    def __init__(self, sock: socket.socket, n_vocab: int, timeout: float) -> None:
        self._sock = sock
        self._n_vocab = n_vocab
        self._timeout = timeout
        self._deadline = 0.0
        self._received = bytearray()
        self._lock = threading.Lock()  # for the two below; nothing waits while it is held
        self._in_use = self._closed = False

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if not self._in_use:
                self._sock.close()
            else:  # who uses it wakes up and closes it: a closed descriptor's number may become another's
                with contextlib.suppress(OSError):  # the process has ended
                    self._sock.shutdown(socket.SHUT_RDWR)

    def compile(self, kind: str, text: str) -> tuple[bool, str]:
        """Whether it became a grammar, and its GBNF or why not. Waits; close() ends that, too."""
        data = json.dumps([kind, text, self._timeout]).encode()
        self._send(LENGTH.pack(len(data)) + data)
        n = LENGTH.unpack(self._wait(LENGTH.size))[0]
        reply = self._wait(n).decode()
        return reply[0] == "+", reply[1:]

    def ask(self, token: int | None) -> None:
        """May this token follow? If so, it has followed. None: what may?"""
        self._send(STEP.pack(b"t", -1 if token is None else token))

    def answer(self, wait: float) -> bool | Allowed | None:
        """Of ask(): True, or which tokens may follow [n_vocab]; None: not known after `wait` seconds."""
        if not self._receive(1, wait):
            return None
        if self._received[:1] == b"+":
            self._received.clear()
            return True
        n = 1 + (self._n_vocab + 7) // 8
        if not self._receive(n, wait):
            return None
        bits = np.frombuffer(bytes(self._received[1:n]), np.uint8)
        self._received.clear()
        return np.unpackbits(bits, count=self._n_vocab, bitorder="little").astype(bool)

    def accept(self, token: int) -> None:
        """This token has followed, one that the last answer allows."""
        self._send(STEP.pack(b"a", token))

    def _send(self, data: bytes) -> None:
        self._deadline = time.monotonic() + self._timeout
        try:
            with self._use() as sock:
                sock.settimeout(self._timeout)
                sock.sendall(data)
        except OSError as error:
            raise self._ended() from error

    def _wait(self, n: int) -> bytes:
        self._receive(n, math.inf)
        data = bytes(self._received[:n])
        del self._received[:n]
        return data

    def _receive(self, n: int, wait: float) -> bool:
        """Whether n bytes have come."""
        end = time.monotonic() + wait
        while len(self._received) < n:
            left = min(end, self._deadline) - time.monotonic()
            try:
                with self._use() as sock:
                    poll = select.poll()
                    poll.register(sock, select.POLLIN)
                    ready = poll.poll(1000 * max(left, 0))
                    data = sock.recv(n - len(self._received)) if ready else None
            except OSError as error:
                raise self._ended() from error
            if data == b"":
                raise self._ended()
            if data is None and time.monotonic() >= self._deadline:
                self.close()
                raise SamplingError(
                    "grammar",
                    f"expected one that takes at most {self._timeout:g} s (--grammar-timeout), found none then",
                )
            if data is None and time.monotonic() >= end:
                return False
            self._received += data or b""
        return True

    @contextlib.contextmanager
    def _use(self) -> Iterator[socket.socket]:
        """The socket, open until the end of this block. Raises OSError when it is closed."""
        with self._lock:
            if self._closed:
                raise ConnectionError("the grammar is closed")
            self._in_use = True
        try:
            yield self._sock
        finally:
            with self._lock:
                self._in_use = False
                if self._closed:
                    self._sock.close()

    @staticmethod
    def _ended() -> SamplingError:
        return SamplingError(
            "grammar", "expected one that fits in memory (--grammar-memory), found one that ended its process"
        )


class Grammars:
    """Grammars for a vocabulary. timeout: seconds for compiling one, and for each token; memory: bytes of each."""

    def __init__(self, model: str, n_vocab: int, timeout: float = 5.0, memory: int = 256 * MIB) -> None:
        self.timeout = timeout
        self._model, self._n_vocab, self._memory = model, n_vocab, memory
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._known: OrderedDict[bytes, tuple[bool, str]] = OrderedDict()

    def begin(self) -> Grammar:
        """A process for a grammar, which compile() gives it. Raises ApiError."""
        if not hasattr(os, "fork"):
            reason = "expected a server on a system that can fork a process for each grammar or schema"
            raise ApiError(501, f"grammar: {reason}, found {sys.platform}", "grammar")
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._send(theirs)
            except OSError as error:
                ours.close()
                raise ApiError(503, f"no process for a grammar: {error}", retry_after=10) from error
        return Grammar(ours, self._n_vocab, self.timeout)

    def compile(self, grammar: Grammar, text: str) -> None:
        """Make a grammar of GBNF, also a chat handler's, or of a SchemaText. Raises ApiError about its field."""
        kind, param = ("schema", text.param) if isinstance(text, SchemaText) else ("gbnf", "grammar")
        if kind == "gbnf":
            check_grammar(text)
        key = hashlib.sha256(f"{kind} {text}".encode("utf-8", "surrogatepass")).digest()
        with self._lock:
            good, found = self._known.get(key, (True, ""))
        if good:
            try:
                good, found = grammar.compile("gbnf", found) if found else grammar.compile(kind, text)
            except SamplingError as error:
                raise bad_field(param, error.reason) from error
            if not good or (kind == "schema" and len(found) <= N_BYTES):
                self._remember(key, good, found)
        if not good:
            raise bad_field(param, found)

    def _remember(self, key: bytes, good: bool, found: str) -> None:
        with self._lock:
            self._known[key] = good, found
            self._known.move_to_end(key)
            while len(self._known) > N_CACHED:
                self._known.popitem(last=False)

    def close(self) -> None:
        """End the process that holds the vocabulary; those of grammars end with their answers."""
        with self._lock:
            self._stop()

    def _send(self, sock: socket.socket) -> None:
        with self._lock:
            for last in (False, True):
                if self._control is None:
                    self._start()
                assert self._control is not None
                try:
                    socket.send_fds(self._control, [b"g"], [sock.fileno()])
                    return
                except OSError:  # the process has ended: another one, once
                    self._stop()
                    if last:
                        raise

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        paths = [os.path.abspath(path) for path in sys.path]
        # one thread: what forks must have no others
        quiet = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        with theirs:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", grammar_worker.__name__),
                    *(self._model, str(theirs.fileno()), str(self._memory)),
                ],
                env=os.environ | quiet | {"PYTHONPATH": os.pathsep.join(paths)},
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        self._control = ours
        ours.settimeout(START_SECONDS)
        ready = b""
        with contextlib.suppress(OSError):
            ready = ours.recv(1)
        if ready != READY:
            self._stop()
            raise ConnectionError("it did not start")

    def _stop(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._control = self._process = None


#
# schemas that llama_cpp's chat handlers convert on their way
#

_in_request = threading.local()
_convert = llama_grammar.json_schema_to_gbnf


def guard_thread() -> None:
    """Schemas that llama_cpp converts in this thread become SchemaText: they are converted where a deadline ends it."""
    _in_request.guarded = True


def _json_schema_to_gbnf(schema: str, prop_order: list[str] | None = None) -> Any:
    return SchemaText(schema) if getattr(_in_request, "guarded", False) else _convert(schema, prop_order)


llama_grammar.json_schema_to_gbnf = _json_schema_to_gbnf
