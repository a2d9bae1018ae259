"""Pictures: bits against KLD, and per-layer sensitivities. Needs the extra `plot`.

subkv plot RESULTS.json… -o frontier.png     from `subkv evaluate` and `subkv perplexity --compare`
subkv plot calib.safetensors -o layers.png   a calibration that `subkv sensitivity` has added to
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import click

from runtime import options
from subkv.base.command import command
from subkv.base.errors import SubkvError, concerning


def read_results(path: Path) -> list[dict[str, Any]]:
    """Results out of a JSON file.

    Raises SubkvError about `path`: no file, no JSON list, a row without what frontier() reads.
    """
    try:
        rows = json.loads(path.read_bytes())
    except OSError as error:
        raise SubkvError("path", f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise SubkvError("path", f"expected JSON, found text that does not parse in {path} ({error})") from error
    if not isinstance(rows, list):
        raise SubkvError(
            "path",
            f"expected a JSON list as converter.evaluate and runtime.perplexity --compare print it, "
            f"found {type(rows).__name__} in {path}",
        )
    for i, row in enumerate(rows):
        if not isinstance(row, dict):
            raise SubkvError("path", f"expected objects, found {json.dumps(row)[:40]} as row {i} of {path}")
        wanted = {
            "name": isinstance(row.get("name"), str),
            "bpe": _is_number(row.get("bpe")),
            "mean_kld": "mean_kld" in row and (row["mean_kld"] is None or _is_number(row["mean_kld"])),
            "mean_kld_stderr": row.get("mean_kld_stderr") is None or _is_number(row["mean_kld_stderr"]),
            "text": row.get("text") is None or isinstance(row["text"], str),
            "n_ctx": row.get("n_ctx") is None or type(row["n_ctx"]) is int,
        }
        for key, good in wanted.items():
            if not good:
                kind = "a string" if key in ("name", "text") else "a number"
                found = json.dumps(row[key])[:40] if key in row else "none"
                raise SubkvError("path", f"expected {kind} as {key} of row {i} of {path}, found {found}")
    return rows


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


@command()
@click.argument("files", metavar="RESULTS.json…", type=options.PATH, nargs=-1, required=True)
@click.option("-o", "--output", "plot", type=options.PATH, required=True, metavar="FILE.png", help="picture to write")
def main(files: tuple[Path, ...], plot: Path) -> None:
    """Draw bits against KLD from results that converter.evaluate and runtime.perplexity --compare printed with -o json,
    or the sensitivities of the layers from one calibration (calib.safetensors)."""
    calibrations = [path for path in files if path.suffix == ".safetensors"]
    if calibrations and len(files) > 1:
        raise click.UsageError(f"RESULTS.json: expected results or one calibration, found {len(files)} files with both")
    from converter.plots import figure, frontier, layers  # numpy: not for a --help
    from subkv.format.calibration import read_calibration

    figure.check(plot)
    if calibrations:
        with concerning(calibration="calib.safetensors"):
            figure.write_figure(layers.sensitivity_figure(read_calibration(files[0])), plot)
    else:
        with concerning(path="RESULTS.json"):
            results = [row for path in files for row in read_results(path)]
        frontier.frontier(results, plot)
    options.note(f"wrote {plot}")


if __name__ == "__main__":
    main()
