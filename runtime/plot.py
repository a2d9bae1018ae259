"""`subkv lab plot RESULTS.json… -o frontier.png`: bits against KLD. Needs the extra `plot`.

The results are of `subkv perplexity` and `python -m research.evaluate`.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import click

from runtime import options
from subkv.base.command import command
from subkv.base.errors import SubkvError, concerning, system_reason

NONE = type(None)
MEMBERS: dict[str, tuple[tuple[type, ...], str]] = {  # of a row that frontier() reads
    "name": ((str,), "a string"),
    "bpe": ((int, float), "a number"),
    "mean_kld": ((int, float, NONE), "a number"),
    "mean_kld_stderr": ((int, float, NONE), "a number"),
    "bound_bpe": ((int, float, NONE), "a number"),
    "text": ((str, NONE), "a string"),
    "n_ctx": ((int, NONE), "a number"),
}


def read_results(path: Path) -> list[dict[str, Any]]:
    """Read results from a JSON file.

    Raises SubkvError about `path` for a missing file, invalid JSON, or a row without the members for frontier().
    """
    try:
        rows = json.loads(path.read_bytes())
    except OSError as error:
        raise SubkvError("path", f"cannot read {path}: {system_reason(error)}") from error
    except (ValueError, RecursionError) as error:
        raise SubkvError("path", f"expected JSON, found text that does not parse in {path} ({error})") from error
    if not isinstance(rows, list):
        raise SubkvError(
            "path",
            f"expected a JSON list as research.evaluate and runtime.perplexity print it, "
            f"found {type(rows).__name__} in {path}",
        )
    for i, row in enumerate(rows):
        if not isinstance(row, dict):
            raise SubkvError("path", f"expected objects, found {json.dumps(row)[:40]} as row {i} of {path}")
        for key, (kinds, expected) in MEMBERS.items():
            value = row.get(key)
            good = type(value) in kinds and (type(value) is not float or math.isfinite(value))
            if not good or (key == "mean_kld" and key not in row):
                shown = json.dumps(value)[:40] if key in row else "none"
                raise SubkvError("path", f"expected {expected} as {key} of row {i} of {path}, found {shown}")
    return rows


@command()
@click.argument("files", metavar="RESULTS.json…", type=options.PATH, nargs=-1, required=True)
@click.option("-o", "--output", "plot", type=options.PATH, required=True, metavar="FILE.png", help="file to write")
def main(files: tuple[Path, ...], plot: Path) -> None:
    """Draw bits against KLD from results that research.evaluate and runtime.perplexity printed with -o json."""
    from converter.plots import figure, frontier  # matplotlib: not for a --help

    figure.check(plot)
    with concerning(path="RESULTS.json"):
        results = [row for path in files for row in read_results(path)]
    frontier.frontier(results, plot)
    options.note(f"wrote {plot}")


if __name__ == "__main__":
    main()
