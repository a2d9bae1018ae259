"""llama-server on many machines, by Ray Serve.

README.md says how to run it. Each replica owns a llama-server. An ingress sends all requests of a conversation to
one replica. Ray routes, scales, checks and restarts replicas. A store keeps evaluated prompts, so that any replica can
resume a conversation.
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

from cluster.gateway import ApiError, disconnected, error_body, gateway, read_keys
from cluster.replica import STALL, LlamaServer, Request
from cluster.sessions import Load
from runtime.launch.arguments import PRINTS
from runtime.serve.cli import flags_context
from subkv.base.errors import SubkvError

ROUTER = "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"
N_TRIES = 2  # replicas to try for a request, if the first is lost before its answer starts
N_SLOTS = 4  # of llama-server without -np
END = 60.0  # seconds to finish answers and to store the prompts of slots
# options of llama-server that a replica rejects, and why
REFUSED = [
    (
        {"--host", "--port", "--reuse-port", "--api-prefix", "--ssl-key-file", "--ssl-cert-file"},
        "each replica listens on its own socket",
    ),
    ({"--api-key", "--api-key-file"}, "api_key_file is an argument of the cluster"),
    ({"--models-dir", "--models-preset"}, "a cluster serves one model"),
    (PRINTS, "it starts no server"),
]
PARALLEL = {"-np", "--parallel"}


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Arguments of build(), described in README.md. flags: those of `subkv serve`, without the address."""

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
        """Raises SubkvError, and click's errors about our own options."""
        flags = self.flag_list()
        for names, remedy in REFUSED:
            for name in [flag.partition("=")[0] for flag in flags]:
                if name in names:
                    raise SubkvError("flags", f"expected no {name}, found one: {remedy}")
        flags_context(flags)

    @staticmethod
    def _actor(resource: str, **more: float) -> dict[str, Any]:
        """Options of an actor that runs on machines with this resource, "": on any machine."""
        return {**more, "resources": {resource: 0.001} if resource else {}}

    def replica_options(self) -> dict[str, Any]:
        return self._actor(self.replica_resource, num_cpus=self.cpus, num_gpus=self.gpus)

    def ingress_options(self) -> dict[str, Any]:
        return self._actor(self.ingress_resource, num_cpus=0)

    @staticmethod
    def of(raw: dict[str, Any]) -> Arguments:
        """The arguments of a config file, or of `serve run`, whose values are strings. Raises SubkvError."""
        defaults = {field.name: field.default for field in dataclasses.fields(Arguments)}
        values: dict[str, Any] = {}
        for name, value in raw.items():
            if name not in defaults:
                raise SubkvError(name, f"unknown argument; expected one of {', '.join(defaults)}")
            default = defaults[name]
            try:
                values[name] = type(default)(value) if isinstance(default, (int, float)) else value
            except (TypeError, ValueError):
                raise SubkvError(name, f"expected a number, found {value!r:.80}") from None
        return Arguments(**values)

    def keys(self) -> list[str]:
        """Read api_key_file on this machine. Raises SubkvError."""
        return read_keys(None if self.api_key_file is None else Path(self.api_key_file))

    def flag_list(self) -> list[str]:
        return shlex.split(self.flags) if isinstance(self.flags, str) else [str(flag) for flag in self.flags]

    def n_slots(self) -> int:
        """Slots of each replica. Raises SubkvError."""
        flags = self.flag_list()
        values = [value for flag, value in zip(flags, flags[1:], strict=False) if flag in PARALLEL]
        try:
            n = int(values[-1]) if values else -1
        except ValueError:
            raise SubkvError("flags", f"-np: expected a number, found {values[-1]!r:.80}") from None
        return n if n > 0 else N_SLOTS


class Replica:
    """A llama-server on one machine, for requests that an ingress forwards."""

    async def __init__(self, arguments: Arguments) -> None:  # type: ignore[misc]  # Ray allows it
        self.load = Load()
        here = ray.get_runtime_context()
        self._name = f"{serve.get_replica_context().replica_id.unique_id}@{here.get_node_id()}".encode()
        self._closing = False
        self.server = await LlamaServer.started(arguments.flag_list(), arguments.stall_timeout)
        self._watch = asyncio.ensure_future(self._end_with_server())

    async def _end_with_server(self) -> None:
        """A replica ends at once when its server ends; Ray then retries elsewhere and starts a replacement."""
        code = await self.server.process.wait()
        if not self._closing:
            print(f"subkv cluster: llama-server ended with exit code {code}", file=sys.stderr, flush=True)
            self.server.forget()
            os._exit(1)

    async def answer(self, request: Request) -> AsyncGenerator[Message, None]:
        """The messages of an answer."""
        with self.load.waiting(request.body) as received:
            async with contextlib.aclosing(self.server.answer(request)) as messages:
                async for message in messages:
                    if message["type"] == "http.response.start":
                        message["headers"].append((b"x-replica", self._name))
                    else:
                        received(message["body"])
                    yield message

    async def check_health(self) -> None:  # async, because Ray calls ordinary functions in threads
        """Ray calls it, and replaces a replica that raises."""
        self.server.check()

    def record_autoscaling_stats(self) -> dict[str, float]:
        return {"queued_tokens": self.load.n_tokens}

    async def __del__(self) -> None:
        if hasattr(self, "server"):
            self._closing = True
            await self.server.close()


class Forwarded(Response):
    """Streams a replica's answer to the client."""

    def __init__(self, engines: DeploymentHandle[Any], key: str, body: bytes) -> None:
        super().__init__()
        self.engines = engines.options(method_name="answer", stream=True, session_id=key)
        self.request_body = body
        self.started = self.streams = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.ensure_future(self._pass_on(scope, send))
        disconnect = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait({work, disconnect}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            work.cancel()  # cancels the request in the replica, too
            disconnect.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await work

    async def _pass_on(self, scope: Scope, send: Send) -> None:
        for i in range(N_TRIES):
            try:
                await self._from_replica(scope, send)
                return
            except RayActorError:
                if self.started or i == N_TRIES - 1:
                    lost = ApiError(503, "the replica was lost; retry, another replica resumes", retry_after=1)
                    await self._refuse(lost, scope, send)
                    return
            except (BackPressureError, DeploymentUnavailableError) as error:
                busy = ApiError(503, f"every replica is busy ({error}); retry later", retry_after=1)
                await self._refuse(busy, scope, send)
                return
            except RayError as error:
                print(f"subkv cluster: {error}", file=sys.stderr)
                await self._refuse(ApiError(500, "the replica failed; see its log"), scope, send)
                return

    async def _from_replica(self, scope: Scope, send: Send) -> None:
        answers = self.engines.remote(
            Request(scope["method"], target(scope), list(scope["headers"]), self.request_body)
        )
        try:
            async for message in answers:
                if message["type"] == "http.response.start":
                    self.started = True
                    self.streams = any(value.startswith(b"text/event-stream") for _, value in message["headers"])
                await send(message)
        finally:
            answers.cancel()

    async def _refuse(self, error: ApiError, scope: Scope, send: Send) -> None:
        content = error_body(error)
        if not self.started:
            await JSONResponse(content, error.status_code, error.headers)(scope, _nothing, send)
            return
        if not self.streams:  # the length was sent already, so the connection must break
            raise ConnectionError(error.detail)
        event = ""
        if scope["path"].endswith("/messages"):  # Anthropic's streams have named events
            event, content = "event: error\n", {"type": "error", **content}
        data = f"{event}data: {json.dumps(content)}\n\n".encode()
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
    """Sends each conversation's requests to one replica, by Ray's consistent hashing."""

    def __init__(self, engines: DeploymentHandle[Any], arguments: Arguments) -> None:
        self.engines, self.arguments, self.keys = engines, arguments, arguments.keys()

    def __serve_build_asgi_app__(self) -> Starlette:
        def forward(key: str, body: bytes) -> Response:
            return Forwarded(self.engines, key, body)

        return gateway(forward, self.keys, self.arguments.max_body, self.arguments.timeout)


def build(args: dict[str, Any]) -> serve.Application:
    """The application for `serve run` and config files. Raises SubkvError and click's errors for wrong arguments."""
    arguments = Arguments.of(args)
    n_slots = arguments.n_slots()
    policy = AutoscalingPolicy(
        policy_function="cluster.sessions:QueuedTokens",
        policy_kwargs={"tokens": arguments.tokens_per_replica, "requests": arguments.requests_per_replica},
    )
    replica = serve.deployment(
        Replica,
        name="Replica",
        autoscaling_config=AutoscalingConfig(
            min_replicas=arguments.min_replicas, max_replicas=arguments.max_replicas, policy=policy
        ),
        max_ongoing_requests=2 * n_slots,  # further requests go to another replica
        max_queued_requests=arguments.max_queued_requests,
        ray_actor_options=arguments.replica_options(),
        health_check_period_s=5,
        graceful_shutdown_timeout_s=END,
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
    )
    ingress = serve.deployment(
        Ingress,
        name="Ingress",
        num_replicas=arguments.ingresses,
        max_ongoing_requests=max(arguments.max_queued_requests + 2 * n_slots * arguments.max_replicas, 1000),
        ray_actor_options=arguments.ingress_options(),
    )
    return ingress.bind(replica.bind(arguments), arguments)
