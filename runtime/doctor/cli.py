"""`subkv doctor`: prints a report for bugs, and clears the cache folder."""

from __future__ import annotations

import json
import os
from typing import Any

import click

from runtime import options
from subkv.base.command import command, show
from subkv.base.errors import SubkvError, system_reason
from subkv.base.text import printable

MIB = 1 << 20


@command()
@click.option("--clear-cache", "clearing", is_flag=True, help="clear the cache folder, except files in use")
@click.option("-y", "--yes", is_flag=True, help="with --clear-cache: do not ask for confirmation")
@options.form_option("text", "json")
@click.argument("program", required=False, metavar="[PROGRAM]")
def main(clearing: bool, yes: bool, form: str, program: str | None) -> None:
    """Report versions, libraries, processor, devices, memory, cache and formats, for a bug report.

    With PROGRAM, print instead how `subkv run` gives it the cache: by our libraries, or by the plug-in.

    The home folder is printed as ~, and the values of tokens and keys are hidden. Each problem is one sentence; with
    problems the exit code is 1.
    """
    if clearing:
        _clear(yes)
        return
    if yes:
        raise click.UsageError("-y: expected --clear-cache with it, found none")
    if program is not None:
        from runtime.launch.doors import plugin_variables
        from runtime.launch.start import find_program  # native libraries: not for a --help

        found = find_program(program, os.environ)
        if found.door.plugin:
            plugin_variables(found.door.plugin, os.environ)  # another backend of the user is an error
        show(f"{found.path} {found.door.why}")
        return
    from runtime.doctor.report import report

    facts, broken = report()
    click.echo(json.dumps(facts, indent=2) if form == "json" else "\n".join(map(printable, lines(facts))))
    if broken:
        raise click.exceptions.Exit(1)


def lines(facts: dict[str, Any]) -> list[str]:
    """The report as plain text."""
    processor, memory, cache = facts["processor"], facts["memory"], facts["cache"]
    libraries = facts["libraries"]
    out = ["versions"]
    out += [f"  {name:<19} {value or 'none'}" for name, value in facts["versions"].items()]
    out += ["libraries", f"  folder              {libraries['folder'] or 'none'}"]
    out += [f"  {name:<19} {', '.join(libraries[name]) or 'none'}" for name in ("files", "programs")]
    others = [name for name in processor["kernels"] if name != processor["kernel"]]
    out += ["processor", f"  {processor['name']}, {processor['cores_usable']} of {processor['cores']} cores usable"]
    out += [f"  kernel              {processor['kernel'] or 'none'}; also runs {', '.join(others) or 'no other'}"]
    out += [f"  features            {processor['features'] or 'unknown'}"]
    out += ["devices", f"  backends            {', '.join(facts['backends']) or 'none'}"]
    out += [f"  kernels of ours     {facts['device_kernels'] or 'none'}"]
    for device in facts["devices"]:
        size = f"{_mib(device['bytes_free'])} free of {_mib(device['bytes'])}"
        out.append(f"  {device['name']:<19} {device['description']} ({device['kind']}), {size}")
    if not facts["devices"]:
        out.append("  GPUs                none")
    out += ["memory", f"  machine             {_mib(memory['bytes'])}, available {_mib(memory['bytes_available'])}"]
    sizes = {name: str(n) if name == "files" else _mib(n) for name, n in memory["limits"].items()}
    out += [f"  limit               {name}: {size}" for name, size in sizes.items()]
    out += ["environment"]
    out += [f"  {name}={value}" for name, value in facts["environment"].items()] or ["  nothing set"]
    out += ["cache", f"  folder              {cache['folder'] or 'none'}"]
    out += [f"  {kind:<19} {of['files']} files, {_mib(of['bytes'])}" for kind, of in cache["kinds"].items()]
    out += ["formats"]
    for name, kind in facts["formats"].items():
        reads, writes = (" and ".join(map(str, kind[key])) for key in ("reads", "writes"))
        out.append(f"  {name:<19} reads {reads}, writes {writes} ({kind['files']})")
    out += ["broken", *(f"  {sentence}" for sentence in facts["broken"])] if facts["broken"] else ["all is well"]
    return out


def _mib(size: int | None) -> str:
    return "unknown" if size is None else f"{size / MIB:.0f} MiB"


def _clear(yes: bool) -> None:
    """Raises SubkvError about XDG_CACHE_HOME if the folder cannot be read."""
    from runtime.doctor.cache_folder import KINDS, cached, clear
    from runtime.doctor.report import hide_home
    from subkv.base.folders import cache_folder

    folder = cache_folder()
    try:
        files = cached(folder)
    except OSError as error:
        raise SubkvError("XDG_CACHE_HOME", f"cannot read {folder}: {system_reason(error)}") from error
    if not files:
        show(hide_home(f"nothing to remove in {folder}"))
        return
    show(hide_home(f"in {folder}:"))
    for file in files:
        name = file.path.relative_to(folder).as_posix()
        show(f"  {_mib(file.size):>9}  {name}  ({file.kind}: {KINDS[file.kind][0]})")
    if not yes:
        click.confirm(f"remove these {len(files)} files?", abort=True)
    removed, reasons = clear(files)
    click.echo(f"removed {len(removed)} files, {_mib(sum(file.size for file in removed))}")
    for sentence in reasons:
        options.note(hide_home(sentence))


if __name__ == "__main__":
    main()
