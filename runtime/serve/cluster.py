"""llama-server on many machines, by Ray Serve.

serve run runtime.serve.cluster:build flags="-m /srv/model.gguf -np 4 --store /mnt/prompts"
serve deploy examples/cluster.yaml

Each replica owns a llama-server; a thin ingress gives all requests of a conversation to one of them. Ray routes,
scales, watches and restarts. Evaluated prompts are in a store, from which any replica resumes.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import shlex
import sys
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import ray
from ray import serve
from ray.exceptions import RayActorError, RayError
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from runtime.serve.cli import ANSWERS, flags_context
from runtime.serve.gateway import ApiError, body, disconnected, gateway, keys_of
from runtime.serve.replica import STALL, LlamaServer, Request
from runtime.serve.sessions import Load
from subkv.base.errors import SubkvError

ROUTER = "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"
N_TRIES = 2  # replicas that a request is given to, where the first is lost before it answered anything
N_SLOTS = 4  # of llama-server without -np
END = 60.0  # seconds to finish answers and to store what slots hold
# options of llama-server that a replica cannot have, and why
REFUSED = [
    (
        {"--host", "--port", "--reuse-port", "--api-prefix", "--ssl-key-file", "--ssl-cert-file"},
        "replicas listen on a socket of their own",
    ),
    ({"--api-key", "--api-key-file"}, "api_key_file is an argument of the cluster"),
    ({"--models-dir", "--models-preset"}, "a cluster serves one model"),
    (ANSWERS, "it starts no server"),
]
PARALLEL = {"-np", "--parallel"}


@dataclasses.dataclass(frozen=True)
class Arguments:
    """What build() takes; docs/cluster.md has the table. flags: those of `subkv serve` but for where it listens."""

    flags: str | Sequence[str] = ()
    api_key_file: str | None = None
    max_body: int = 8 * 1024 * 1024
    timeout: float = 600.0
    stall_timeout: float = STALL
    min_replicas: int = 1
    max_replicas: int = 1
    tokens_per_replica: int = 8000
    requests_per_replica: int = 4
    max_queued_requests: int = 256
    cpus: float = 1.0
    gpus: float = 0.0
    ingresses: int = 1
    replica_resource: str = ""
    ingress_resource: str = ""

    def __post_init__(self) -> None:
        if not 1 <= self.min_replicas <= self.max_replicas:
            raise SubkvError(
                "max_replicas", f"expected at least min_replicas, {self.min_replicas}, and 1, found {self.max_replicas}"
            )
        for name in ("tokens_per_replica", "requests_per_replica", "max_queued_requests", "max_body", "ingresses"):
            if getattr(self, name) < 1:
                raise SubkvError(name, f"expected at least 1, found {getattr(self, name)}")
        for name in ("timeout", "stall_timeout"):
            if not getattr(self, name) > 0:
                raise SubkvError(name, f"expected more than 0 seconds, found {getattr(self, name):g}")
        self._check_flags()

    def _check_flags(self) -> None:
        """Raises SubkvError, and click's errors about options of ours."""
        flags = self.listed()
        for names, remedy in REFUSED:
            for name in [flag.partition("=")[0] for flag in flags]:
                if name in names:
                    raise SubkvError("flags", f"expected no {name}, found one: {remedy}")
        flags_context(flags)

    @staticmethod
    def _actor(resource: str, **more: float) -> dict[str, Any]:
        """Options of an actor on a machine that has a resource of that name, "": on any."""
        return {**more, "resources": {resource: 0.001} if resource else {}}

    def replica_options(self) -> dict[str, Any]:
        return self._actor(self.replica_resource, num_cpus=self.cpus, num_gpus=self.gpus)

    def ingress_options(self) -> dict[str, Any]:
        return self._actor(self.ingress_resource, num_cpus=0)

    @staticmethod
    def of(given: dict[str, Any]) -> Arguments:
        """From a config file, or from `serve run`, which gives texts. Raises SubkvError."""
        defaults = {field.name: field.default for field in dataclasses.fields(Arguments)}
        found: dict[str, Any] = {}
        for name, value in given.items():
            if name not in defaults:
                raise SubkvError(name, f"expected one of {', '.join(defaults)}, found another name")
            default = defaults[name]
            try:
                found[name] = type(default)(value) if isinstance(default, (int, float)) else value
            except (TypeError, ValueError):
                raise SubkvError(name, f"expected a number, found {value!r:.80}") from None
        return Arguments(**found)

    def keys(self) -> list[str]:
        """Of api_key_file, as it is on this machine. Raises SubkvError."""
        return keys_of(None if self.api_key_file is None else Path(self.api_key_file))

    def listed(self) -> list[str]:
        return shlex.split(self.flags) if isinstance(self.flags, str) else [str(flag) for flag in self.flags]

    def n_slots(self) -> int:
        """Of each replica. Raises SubkvError."""
        flags = self.listed()
        given = [value for flag, value in zip(flags, flags[1:], strict=False) if flag in PARALLEL]
        try:
            n = int(given[-1]) if given else -1
        except ValueError:
            raise SubkvError("flags", f"-np: expected a number, found {given[-1]!r:.80}") from None
        return n if n > 0 else N_SLOTS


class Replica:
    """A llama-server on one machine, for requests that an ingress passes on."""

    async def __init__(self, given: Arguments) -> None:  # type: ignore[misc]  # as Ray has it
        self.load = Load()
        at = ray.get_runtime_context()
        self._name = f"{serve.get_replica_context().replica_id.unique_id}@{at.get_node_id()}".encode()
        self._closing = False
        self.server = await LlamaServer.started(given.listed(), given.stall_timeout)
        self._watch = asyncio.ensure_future(self._end_with_server())

    async def _end_with_server(self) -> None:
        """A replica without its server ends at once: Ray then asks another one, and starts one in its place."""
        code = await self.server.process.wait()
        if not self._closing:
            print(f"subkv cluster: llama-server ended with exit code {code}", file=sys.stderr, flush=True)
            self.server.forget()
            os._exit(1)

    async def answer(self, asked: Request) -> AsyncGenerator[Message, None]:
        """The messages of an answer."""
        with self.load.waiting(asked.body) as said:
            async with contextlib.aclosing(self.server.answer(asked)) as messages:
                async for message in messages:
                    if message["type"] == "http.response.start":
                        message["headers"].append((b"x-replica", self._name))
                    else:
                        said(message["body"])
                    yield message

    async def check_health(self) -> None:  # in the loop: Ray calls functions that do not wait in threads
        """Ray asks, and replaces a replica that raises."""
        self.server.check()

    def record_autoscaling_stats(self) -> dict[str, float]:
        return {"queued_tokens": self.load.n_tokens}

    async def __del__(self) -> None:
        if hasattr(self, "server"):
            self._closing = True
            await self.server.close()


class Forwarded(Response):
    """A replica's answer, as it comes."""

    def __init__(self, engines: DeploymentHandle[Any], key: str, asked: bytes) -> None:
        super().__init__()
        self.engines = engines.options(method_name="answer", stream=True, session_id=key)
        self.asked = asked
        self.started = self.streams = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.ensure_future(self._pass_on(scope, send))
        gone = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            work.cancel()  # and with it the replica's
            gone.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await work

    async def _pass_on(self, scope: Scope, send: Send) -> None:
        for i in range(N_TRIES):
            try:
                await self._from_replica(scope, send)
                return
            except RayActorError:
                if self.started or i == N_TRIES - 1:
                    lost = ApiError(503, "the replica was lost; ask again, another one resumes", retry_after=1)
                    await self._refuse(lost, scope, send)
                    return
            except (BackPressureError, DeploymentUnavailableError) as error:
                busy = ApiError(503, f"every replica is busy ({error}); come again later", retry_after=1)
                await self._refuse(busy, scope, send)
                return
            except RayError as error:
                print(f"subkv cluster: {error}", file=sys.stderr)
                await self._refuse(ApiError(500, "the replica failed; its log says why"), scope, send)
                return

    async def _from_replica(self, scope: Scope, send: Send) -> None:
        answers = self.engines.remote(Request(scope["method"], target(scope), list(scope["headers"]), self.asked))
        try:
            async for message in answers:
                if message["type"] == "http.response.start":
                    self.started = True
                    self.streams = any(value.startswith(b"text/event-stream") for _, value in message["headers"])
                await send(message)
        finally:
            answers.cancel()

    async def _refuse(self, error: ApiError, scope: Scope, send: Send) -> None:
        told = body(error)
        if not self.started:
            await JSONResponse(told, error.status_code, error.headers)(scope, _nothing, send)
            return
        if not self.streams:  # its length was promised: a cut answer must look like one
            raise ConnectionError(error.detail)
        event = ""
        if scope["path"].endswith("/messages"):  # Anthropic's streams name their events
            event, told = "event: error\n", {"type": "error", **told}
        data = f"{event}data: {json.dumps(told)}\n\n".encode()
        await send({"type": "http.response.body", "body": data, "more_body": False})


def target(scope: Scope) -> bytes:
    """Path and query of a request."""
    path: bytes = scope.get("raw_path") or quote(scope["path"]).encode()
    query: bytes = scope.get("query_string", b"")
    return path.partition(b"?")[0] + (b"?" + query if query else b"")


async def _nothing() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


@serve.ingress()
class Ingress:
    """Gives every conversation's requests to one replica, by Ray's consistent hashing."""

    def __init__(self, engines: DeploymentHandle[Any], given: Arguments) -> None:
        self.engines, self.given, self.keys = engines, given, given.keys()

    def __serve_build_asgi_app__(self) -> Starlette:
        def forward(key: str, asked: bytes) -> Response:
            return Forwarded(self.engines, key, asked)

        return gateway(forward, self.keys, self.given.max_body, self.given.timeout)


def build(args: dict[str, Any]) -> serve.Application:
    """The application for `serve run` and config files. Raises SubkvError and click's errors for wrong arguments."""
    given = Arguments.of(args)
    n_slots = given.n_slots()
    policy = AutoscalingPolicy(
        policy_function="runtime.serve.sessions:QueuedTokens",
        policy_kwargs={"tokens": given.tokens_per_replica, "requests": given.requests_per_replica},
    )
    replica = serve.deployment(
        Replica,
        name="Replica",
        autoscaling_config=AutoscalingConfig(
            min_replicas=given.min_replicas, max_replicas=given.max_replicas, policy=policy
        ),
        max_ongoing_requests=2 * n_slots,  # beyond these the conversation goes on elsewhere
        max_queued_requests=given.max_queued_requests,
        ray_actor_options=given.replica_options(),
        health_check_period_s=5,
        graceful_shutdown_timeout_s=END,
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
    )
    ingress = serve.deployment(
        Ingress,
        name="Ingress",
        num_replicas=given.ingresses,
        max_ongoing_requests=max(given.max_queued_requests + 2 * n_slots * given.max_replicas, 1000),
        ray_actor_options=given.ingress_options(),
    )
    return ingress.bind(replica.bind(given), given)
