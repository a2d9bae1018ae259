"""Where grammars live: a child process for each, forked from one that holds the model's vocabulary.

llama.cpp's grammars have no limits: compiling one, and every token that is checked against it, may take exponential
time and memory. Here both end with the process.

    python -m runtime.serve.grammar_worker MODEL DESCRIPTOR BYTES

The parent sends over the socket DESCRIPTOR one end of a new socket for each grammar; the child behind it ends when the
other end is closed or shut down, also in the middle of a step, or is out of CPU time for it. Over that socket, numbers
little-endian:

    ask   u32 n, n bytes of JSON [kind, text, seconds]; kind: "gbnf", "schema"; seconds: for each ask
    reply u32 n, n bytes: "+" and the GBNF, or "-" and a sentence
    ask   "t" i32 token: may it follow?  reply "+": yes, and it now has; "-" and a bit for each token of the vocabulary
    ask   "a" i32 token: it has followed, a token that such bits allow. No reply.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from subkv.native.binding import C, captured_log, internals

# isort: split
from llama_cpp.llama_grammar import json_schema_to_gbnf

from runtime.serve.grammar_limits import N_BYTES

with contextlib.suppress(ImportError):  # Windows, where nobody starts this program
    import resource

LENGTH = struct.Struct("<I")
STEP = struct.Struct("<ci")
READY = b"+"
N_GBNF = 16 * N_BYTES  # what a schema may become


class Rules:
    """A grammar at some point of a text. Raises ValueError for what llama.cpp cannot read."""

    def __init__(self, vocab: Any, text: str) -> None:
        sampler = C.llama_sampler_init_grammar(vocab, text.encode(), b"root")
        if not sampler:
            raise ValueError("expected GBNF that llama.cpp can read, found something else")
        self.sampler = sampler
        self.row = internals.LlamaTokenDataArray(n_vocab=C.llama_vocab_n_tokens(vocab))
        self.zeros = np.zeros(self.row.n_vocab, np.float32)
        self.allowed: bytes | None = self.mask()  # a grammar that takes too long is found before its first token

    def mask(self) -> bytes:
        """A bit for each token: whether it may follow."""
        self.row.copy_logits(self.zeros)
        C.llama_sampler_apply(self.sampler, ctypes.byref(self.row.candidates))
        return np.packbits(self.row.candidates_data.logit == 0, bitorder="little").tobytes()

    def admits(self, token: int) -> bool:
        if self.allowed is not None:
            return bool(self.allowed[token // 8] >> token % 8 & 1)
        alone = C.llama_token_data(id=token, logit=1.0, p=0.0)
        array = C.llama_token_data_array(data=ctypes.pointer(alone), size=1, selected=-1, sorted=False)
        C.llama_sampler_apply(self.sampler, ctypes.byref(array))
        return bool(np.isfinite(alone.logit))

    def accept(self, token: int) -> None:
        C.llama_sampler_accept(self.sampler, token)
        self.allowed = None


def received(sock: socket.socket, n: int) -> bytes:
    """Exactly n bytes. Raises EOFError when the other end has gone."""
    data = bytearray()
    while len(data) < n:
        piece = sock.recv(n - len(data))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


def compiled(vocab: Any, kind: str, text: str) -> tuple[Rules, str]:
    """A grammar and its GBNF. Raises ValueError with a sentence."""
    if kind == "schema":
        try:
            text = json_schema_to_gbnf(text)
        except Exception as error:  # llama_cpp's converter asserts, indexes and recurses without naming its errors
            raise ValueError(f"this JSON schema cannot become a grammar: {error!r:.300}") from error
        if len(text) > N_GBNF:
            raise ValueError(f"expected a schema whose grammar has at most {N_GBNF} bytes, found {len(text)}")
    return Rules(vocab, text), text


def serve(sock: socket.socket, vocab: Any) -> None:
    """One grammar, from its text to the end of the answer."""
    kind, text, seconds = json.loads(received(sock, LENGTH.unpack(received(sock, LENGTH.size))[0]))
    _limit_cpu(seconds)
    try:
        rules, text = compiled(vocab, kind, text)
        reply = b"+" + text.encode()
    except (ValueError, MemoryError) as error:
        reply = b"-" + (str(error) or "expected a grammar that fits in memory, found a larger one").encode()
    sock.sendall(LENGTH.pack(len(reply)) + reply)
    if reply[:1] == b"-":
        return
    while True:
        operation, token = STEP.unpack(received(sock, STEP.size))
        _limit_cpu(seconds)
        if operation == b"a" or (token >= 0 and rules.admits(token)):
            rules.accept(token)
            if operation == b"t":
                sock.sendall(b"+")
        else:
            sock.sendall(b"-" + (rules.allowed or rules.mask()))


def _limit(n_bytes: int) -> None:
    """At most n_bytes beyond what the process has; where the system cannot say what that is, the deadline must do."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    statm = Path("/proc/self/statm")
    if statm.exists():
        n_bytes += int(statm.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (n_bytes, n_bytes))


def _limit_cpu(seconds: float) -> None:
    """SIGXCPU ends the process 1 to 2 s of computing after the parent has given it up.

    For what _end_with cannot end: code that keeps Python's lock. seconds: how long the parent waits.
    """
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    soft = math.ceil(time.process_time() + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _end_with(sock: socket.socket) -> None:
    """End the process as soon as nobody waits for it. It needs Python's lock for that."""
    poll = select.poll()
    poll.register(sock, 0)  # hanging up is always reported
    poll.poll()
    os._exit(1)


def child(sock: socket.socket, vocab: Any, n_bytes: int) -> None:
    threading.Thread(target=_end_with, args=(sock,), daemon=True).start()
    _limit(n_bytes)
    with contextlib.suppress(EOFError, OSError, MemoryError):
        serve(sock, vocab)


def main(model: str, descriptor: str, n_bytes: str) -> None:
    control = socket.socket(fileno=int(descriptor))
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the server, with whose end this process ends
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how children end
    params = C.llama_model_default_params()
    params.vocab_only = True
    with captured_log(forward=False):
        handle = C.llama_model_load_from_file(os.fsencode(model), params)
    if not handle:
        sys.exit(f"grammars: cannot read the vocabulary of {model}")
    vocab = C.llama_model_get_vocab(handle)
    control.sendall(READY)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # llama.cpp prints every grammar that it cannot read
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            return
        with socket.socket(fileno=descriptors[0]) as sock, contextlib.suppress(OSError):
            if os.fork() == 0:
                control.close()
                try:
                    child(sock, vocab, int(n_bytes))
                finally:
                    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
