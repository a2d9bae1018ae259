"""Package subkv-plugin: commands for a llama.cpp that others built, beside package subkv if that is installed, too.

In the wheel (cmake/plugin_wheel.py), our packages are in the folder of this file.
"""

import sys
from pathlib import Path


def main() -> None:
    """`subkv-plugin`."""
    sys.path.insert(0, str(Path(__file__).parent))
    from runtime.cli import main as command

    command(prog_name="subkv-plugin")
