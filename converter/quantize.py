"""llama.cpp's quantizer as a program: python -m converter.quantize SOURCE TARGET TYPE N_THREADS

A program of its own (converter.hf runs it) because the function cannot be stopped: ending the process is what Ctrl-C
does. llama.cpp's log, with a line for every tensor, goes to stderr.
"""

from __future__ import annotations

import ctypes
import signal
import sys

from converter import native

_PREFIX = "LLAMA_FTYPE_MOSTLY_"
_MEASURED = (
    "IQ1_S",
    "IQ1_M",
    "IQ2_XXS",
    "IQ2_XS",
    "IQ2_S",
    "IQ3_XXS",
    "IQ3_XS",
    "Q2_K_S",
)  # need activations' statistics


def types() -> dict[str, int]:
    """llama-quantize's names of the types that need the weights alone -> enum llama_ftype."""
    llama = native.llama()
    names = {name.removeprefix(_PREFIX): getattr(llama, name) for name in dir(llama) if name.startswith(_PREFIX)}
    return {name: value for name, value in names.items() if name not in (*_MEASURED, "F16", "BF16")}


def main(source: str, target: str, kind: str, n_threads: str) -> int:
    """Exit status: 0, or 1 with llama.cpp's reason on stderr."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a handler in Python would wait for the C function to return
    llama = native.llama()
    llama.llama_log_set(llama.llama_log_callback(0), ctypes.c_void_p(0))  # back to llama.cpp's own: stderr
    params = llama.llama_model_quantize_default_params()
    params.ftype = types()[kind]
    params.nthread = int(n_threads)
    status: int = llama.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params))
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
