"""Package subkv-plugin: commands for a llama.cpp that others built, beside package subkv if that is installed, too.

In the wheel (cmake/plugin_wheel.py), our packages are in the folder of this file.
"""

import sys
from pathlib import Path


def main() -> None:
    """`subkv-plugin`."""
    folder = Path(__file__).parent
    sys.path.insert(0, str(folder))
    import subkv

    if not Path(subkv.__file__).is_relative_to(folder):  # an editable install has a finder of its own
        sys.exit(f"subkv-plugin: expected its own modules, found {subkv.__file__}; use subkv run --plugin there")
    from runtime.cli import main as command

    command(prog_name="subkv-plugin")
