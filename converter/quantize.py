"""llama.cpp's quantizer as a program: python -m converter.quantize SOURCE TARGET TYPE N_THREADS

converter.hf runs it as a separate process, because the function cannot be interrupted, and Ctrl-C ends a process.
llama.cpp's log, with a line for every tensor, goes to stderr.
"""

from __future__ import annotations

import ctypes
import signal
import sys

# llama-quantize's names of the types that need only weights. Others need statistics of activations, or experts.
TYPES = (
    *("Q8_0", "Q6_K", "Q5_K_M", "Q5_K_S", "Q5_1", "Q5_0", "Q4_K_M", "Q4_K_S", "Q4_1", "Q4_0", "IQ4_NL", "IQ4_XS"),
    *("Q3_K_L", "Q3_K_M", "Q3_K_S", "IQ3_M", "IQ3_S", "Q2_K", "Q2_0", "TQ2_0", "TQ1_0", "Q1_0"),
)


def main(source: str, target: str, kind: str, n_threads: str) -> int:
    """kind is one of TYPES. The exit status is 0, or 1 with llama.cpp's reason on stderr."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a handler in Python would wait for the C function to return
    from subkv.native.binding import C  # A --help lists TYPES without the native libraries.

    C.llama_log_set(C.llama_log_callback(0), ctypes.c_void_p(0))  # llama.cpp then logs to stderr.
    params = C.llama_model_quantize_default_params()
    params.ftype = getattr(C, f"LLAMA_FTYPE_MOSTLY_{kind}")
    params.nthread = int(n_threads)
    status: int = C.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params))
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
