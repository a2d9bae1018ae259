"""`subkv cmake-dir`: prints the folder of the wheel's CMake package, for find_package(subkv CONFIG).

cmake -S . -B build -Dsubkv_DIR="$(subkv cmake-dir)"
"""

from __future__ import annotations

import click

from subkv.base.command import command
from subkv.base.errors import SubkvError
from subkv.base.folders import package_folders


@command()
def main() -> None:
    """Print the folder of the CMake package `subkv`: libraries and headers for C and C++ programs."""
    folders = package_folders("cmake")
    for folder in folders:
        if (folder / "subkvConfig.cmake").is_file():
            click.echo(folder.resolve())
            return
    raise SubkvError(
        "subkv",
        f"expected subkvConfig.cmake in {' or '.join(map(str, folders))}, found none; "
        "install the package with pip install .",
    )


if __name__ == "__main__":
    main()
