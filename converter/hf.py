"""Converts a Hugging Face folder to a GGUF with llama.cpp's converter and quantizer, after a check of the disk space.

The converter is the pinned llama.cpp's convert_hf_to_gguf.py. The build copies it beside the libraries, with the gguf
package that it needs. Both programs run as separate processes. Nothing is downloaded. Extra `torch`.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from subkv.base.errors import SubkvError, need_packages, system_reason
from subkv.base.progress import progress_bar
from subkv.native import library

OUTTYPES = {"auto": 2.0, "f16": 2.0, "bf16": 2.0, "f32": 4.0, "q8_0": 1.0625}  # bytes per weight
MIB = 1 << 20
# The converter prints its progress in percent, the quantizer as [tensor/tensors].
_POSITION = re.compile(r"^Writing: +(\d+)%|^\[ *(\d+)/ *(\d+)\]")
_REASON = re.compile(r"^(?:ERROR:[\w.-]+:|llama_model_quantize: )(.+)|^((?:\w+\.)*\w+(?:Error|Exception): .+)")


def converter_path() -> Path:
    """llama.cpp's converter in the folder of the libraries. Raises SubkvError if it is missing."""
    library.load()  # reports missing libraries
    path = library.lib_dir() / "llama.cpp" / "convert_hf_to_gguf.py"
    if not path.is_file():
        raise SubkvError("model", f"expected llama.cpp's converter at {path}, found none; build or install subkv again")
    return path


def count_weights(folder: Path) -> int:
    """The number of weights in a Hugging Face folder, or an upper bound for files of PyTorch's own format.

    Raises SubkvError if config.json or weights are missing, or a file is damaged.
    """
    if not (folder / "config.json").is_file():
        raise SubkvError("model", f"expected a Hugging Face folder with config.json, found none in {folder}")
    if files := sorted(folder.glob("model*.safetensors")):
        return sum(_count_safetensors(path) for path in files)
    if files := sorted(folder.glob("pytorch_model*.bin")):
        return sum(path.stat().st_size for path in files) // 2  # 2 bytes each, or 4
    raise SubkvError("model", f"expected weights (model*.safetensors or pytorch_model*.bin) in {folder}, found none")


def _count_safetensors(path: Path) -> int:
    from safetensors import SafetensorError, safe_open  # not for a --help, which lists OUTTYPES

    try:
        with open(path, "rb"), safe_open(path, framework="numpy") as file:
            return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118 (not a dict)
    except OSError as error:
        raise SubkvError("model", f"cannot read {path}: {system_reason(error)}") from error
    except SafetensorError as error:
        raise SubkvError("model", f"{path}: expected a safetensors file, found a damaged one: {error}") from error


def check_space(output: Path, n_weights: int, outtype: str, quantize: str | None, copy: bool) -> None:
    """Raises SubkvError if the files that exist at the same time do not fit on the disk.

    The files are in the folder of `output`. copy: `output` will be a copy of the last GGUF.
    """
    folder = output.parent
    whole = last = (f"as {outtype}", OUTTYPES[outtype] * n_weights)
    stages = []
    if quantize is not None:
        # A mixture of types is named by its most frequent one. Embeddings and some layers get more bits.
        bits = int(re.findall(r"\d", quantize)[0]) + 2
        last = (f"as {quantize}", bits / 8 * n_weights)
        stages.append([whole, last])
    stages.append([last, ("with bases", last[1])] if copy else [last])
    at_once = max(stages, key=lambda files: sum(size for _, size in files))
    needed = sum(size for _, size in at_once)
    free = shutil.disk_usage(folder).free
    if free < needed:
        terms = " + ".join(f"{size / MIB:.0f} MiB {name}" for name, size in at_once)
        raise SubkvError(
            "output",
            f"expected about {needed / MIB:.0f} MiB free in {folder} for {n_weights / 1e6:.1f} million weights "
            f"({terms}), found {free / MIB:.0f} MiB",
        )


def check(folder: Path, outtype: str, quantize: str | None, output: Path, copy: bool) -> None:
    """Detect errors of the folder, packages, libraries and disk space before the long run. copy is check_space()'s."""
    n_weights = count_weights(folder)
    sentencepiece = ["sentencepiece"] if (folder / "tokenizer.model").is_file() else []
    need_packages("torch", ["torch", "transformers", *sentencepiece])
    converter_path()
    if quantize is not None and OUTTYPES[outtype] < 2:
        raise SubkvError("quantize", f"expected weights of 16 or 32 bits to quantize, found --outtype {outtype}")
    check_space(output, n_weights, outtype, quantize, copy)


def convert(
    folder: Path, outtype: str, quantize: str | None, n_threads: int, work: Path, announce: Callable[[str], None]
) -> Path:
    """Write the folder's GGUF into the folder `work`. announce: called before each step.

    Raises SubkvError with the reason of llama.cpp's programs.
    """
    announce(f"llama.cpp's converter: {folder} to a GGUF, {outtype}")
    whole = work / "model.gguf"
    command = [sys.executable, str(converter_path()), str(folder), "--outfile", str(whole), "--outtype", outtype]
    _run(command, f"converting {folder.name}", "model", f"llama.cpp's converter refuses {folder}")
    if quantize is None:
        return whole
    announce(f"llama.cpp's quantizer: {quantize}")
    quantized = work / f"model-{quantize}.gguf"
    to_quantized(whole, quantize, n_threads, quantized)
    whole.unlink()
    return quantized


def to_quantized(source: Path, quantize: str, n_threads: int, target: Path) -> None:
    """Run llama.cpp's quantizer. Raises SubkvError with its reason."""
    command = [sys.executable, "-m", "converter.quantize", str(source), str(target), quantize, str(n_threads)]
    _run(command, f"quantizing to {quantize}", "quantize", f"llama.cpp's quantizer refuses {quantize}")


def _run(command: Sequence[str], step: str, key: str, refused: str) -> None:
    """Run a program and show the progress that it reports on stderr. An exception here, as by Ctrl-C, ends it.

    Raises SubkvError about `key`, with `refused` and the program's reason, if it fails.
    """
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    lines: deque[str] = deque(maxlen=200)  # in which the reason of a failure is searched
    process = subprocess.Popen(
        command,
        env=os.environ | offline,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
    )
    with process, progress_bar(step, 100, "%") as bar:
        try:
            assert process.stderr is not None
            for line in process.stderr:  # \r also ends a line
                lines.append(line.rstrip())
                if position := _POSITION.match(line):
                    percent, i, n = position.groups()
                    bar.update((int(percent) if percent else 100 * int(i) // int(n)) - bar.n)
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        status = process.returncode
        ended = f"it was ended by signal {-status}" if status < 0 else f"exit status {status} without a reason"
        reasons = (match[1] or match[2] for match in map(_REASON.match, reversed(lines)) if match)
        raise SubkvError(key, f"{refused}: {next(reasons, ended)}")
