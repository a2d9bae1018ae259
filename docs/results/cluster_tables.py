"""Speed of replicas on Ray Serve on one machine."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
from statistics import median
from typing import Any

from prefix_tables import Client
from render import Column, Numbers, Rows, grid, text

# name, replicas, slots and threads per replica; 0 replicas: a plain server
LAYOUTS = (("one server, 2 slots", 0, 2, 2), ("1 replica, 2 slots", 1, 2, 2), ("2 replicas, 1 slot each", 2, 1, 1))


def cluster_load(lab: Any) -> Rows:
    if importlib.util.find_spec("ray") is None:
        lab.skipped.append("no package ray (extra `cluster`)")
        return []
    bases = lab.sidecar("4.5")
    lab.text("argparse.py")
    source = lab.read("argparse.py")
    rows = []
    for name, replicas, slots, threads in LAYOUTS:
        flags = ("-m", "M.gguf", "--bases", bases, "-c", str(4096 * slots), "-np", str(slots), "-t", str(threads))
        serve, port = (("subkv", "serve", *flags), None) if not replicas else _config(lab, flags, replicas, threads)
        with lab.server(*serve, port=port) as server:
            client = Client(server.port)
            tokens = client.tokens(source)
            n = lab.pick(2000, 500)
            read = [n / client.seconds(tokens[i : i + n])[0] for i in range(lab.pick(3, 1))]
            load = ("-r", lab.pick("12", "4"), "-j", "2", "-n", "64")
            loads = [server.load(*load) for _ in range(lab.pick(3, 1))]
        rows.append(
            {
                "name": name,
                "replicas": replicas,
                "errors": ", ".join(sorted({str(row["errors"]) for row in loads})),
                "p50 s": median(row["p50 s"] for row in loads),
                "tokens/s": median(row["tokens/s"] for row in loads),
                "read tokens/s": median(read),
            }
        )
    return rows


def _config(lab: Any, flags: tuple[str, ...], replicas: int, cpus: int) -> tuple[tuple[str, ...], int]:
    """A configuration for `serve run`, and its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    absolute = [str(lab.folder / flag) if (lab.folder / flag).is_file() else flag for flag in flags]
    args = {"flags": absolute, "min_replicas": replicas, "max_replicas": replicas, "cpus": cpus}
    app = {"name": "subkv", "route_prefix": "/", "import_path": "cluster.deployment:build", "args": args}
    config = {"http_options": {"host": "127.0.0.1", "port": port}, "applications": [app]}
    (lab.folder / f"cluster{replicas}.yaml").write_text(json.dumps(config), "utf-8")  # JSON is YAML
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    return ("serve", "run", f"cluster{replicas}.yaml"), port


def markdown(rows: Rows) -> str:
    columns: list[Column] = [
        ("two clients, 64 tokens each", text("name")),
        ("errors", text("errors")),
        ("p50 s", lambda row: f"{row['p50 s']:.2f}"),
        ("tokens/s", lambda row: f"{row['tokens/s']:.0f}"),
        ("prompt of 2000, tokens/s", lambda row: f"{row['read tokens/s']:.0f}"),
    ]
    return grid(rows, columns)


def numbers(rows: Rows) -> Numbers:
    plain, replica = (next(row["tokens/s"] for row in rows if row["replicas"] == n) for n in (0, 1))
    return {"cost": f"{100 * (1 - replica / plain):.0f}"}
