"""Runs a program that the kernel kills when the thread that started it ends (Linux; elsewhere it just runs).

python die_with_parent.py PARENT PATH NAME [ARGUMENT]...

A killed replica cannot end its llama-server itself. This file runs without any package.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, path, *arguments = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(parent):  # the parent ended before prctl
            sys.exit(1)
    for name in ("SIGPIPE", "SIGXFSZ"):  # Python ignores them; the program would inherit that
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    os.execv(path, arguments)


if __name__ == "__main__":
    main()
