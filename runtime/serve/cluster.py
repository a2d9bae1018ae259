"""The server on many machines, by Ray Serve.

serve run runtime.serve.cluster:build flags="-m /srv/model.gguf -np 4 --cache-store s3://bucket/prefixes"
serve deploy examples/cluster.yaml

Replicas run the application of `subkv serve`; a thin ingress gives every conversation's requests to one of them. Ray
routes, scales, watches and restarts. What a replica has evaluated is in the store, for whoever goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import shlex
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayActorError, RayError
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from runtime import options
from runtime.serve.cli import serving_options
from runtime.serve.guard import disconnected
from runtime.serve.opened import Wanted
from runtime.serve.refusals import ApiError, body
from runtime.serve.sessions import Load, door, messages, scope_of
from runtime.serve.settings import Limits, Listening
from subkv.base.command import command
from subkv.base.errors import SubkvError

ROUTER = "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"
N_TRIES = 2  # replicas that a request is given to, where the first is lost before it said anything


@dataclasses.dataclass(frozen=True)
class Arguments:
    """What build() takes; docs/cluster.md has the table. flags: those of `subkv serve` but for where it listens."""

    flags: str | Sequence[str] = ()
    api_key_file: str | None = None
    log_format: str = "none"
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
        for name in ("tokens_per_replica", "requests_per_replica", "max_queued_requests", "ingresses"):
            if getattr(self, name) < 1:
                raise SubkvError(name, f"expected at least 1, found {getattr(self, name)}")

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
        return Listening("", 0, (), None if self.api_key_file is None else Path(self.api_key_file)).keys()

    def listed(self) -> list[str]:
        return shlex.split(self.flags) if isinstance(self.flags, str) else [str(flag) for flag in self.flags]


@command("replica")
@options.model_option(required=False, text="model file (GGUF) [default: the demo model]")
@serving_options
def wanted(**flags: Any) -> Wanted:
    """The flags of a replica."""
    return Wanted(**flags)


class Replica:
    """The application of `subkv serve` on one machine, for requests that an ingress passes on."""

    async def __init__(self, given: Arguments) -> None:  # type: ignore[misc]  # as Ray has it
        keys = given.keys()
        self._stack = contextlib.ExitStack()
        found: Wanted = wanted.main(given.listed(), prog_name="flags", standalone_mode=False)
        self.service = self._stack.enter_context(found.checked().opened())
        from runtime.serve.app import create_app  # the extra `server`, behind a check

        self.app = create_app(self.service, keys, log=given.log_format)
        self._life = self.app.router.lifespan_context(self.app)
        await self._life.__aenter__()
        self.load = Load()
        at = ray.get_runtime_context()
        self._name = f"{serve.get_replica_context().replica_id.unique_id}@{at.get_node_id()}".encode()

    async def answer(self, scope: Scope, asked: bytes) -> AsyncIterator[list[Message]]:
        """The messages of an answer, those together that were ready together."""
        with self.load.waiting(asked) as begun:
            async for batch in messages(self.app, scope, asked):
                for message in batch:
                    if message["type"] == "http.response.start":
                        message["headers"] = [*message["headers"], (b"x-replica", self._name)]
                    elif message.get("body"):
                        begun()
                yield batch

    def check_health(self) -> None:
        """Ray asks, and replaces a replica that raises."""
        if reason := self.service.engine.stuck:
            raise RuntimeError(reason)

    def record_autoscaling_stats(self) -> dict[str, float]:
        return {"queued_tokens": self.load.n_tokens}

    async def __del__(self) -> None:
        if hasattr(self, "_life"):
            await self._life.__aexit__(None, None, None)  # what slots hold goes to the store
        self._stack.close()


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
                    lost = ApiError(503, "the replica was lost; ask again, another one goes on", retry_after=1)
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
        answers = self.engines.remote(scope_of(scope), self.asked)
        try:
            async for batch in answers:
                for message in batch:
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
        data = f"data: {json.dumps(told)}\n\n".encode()
        await send({"type": "http.response.body", "body": data, "more_body": False})


async def _nothing() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


@serve.ingress()
class Ingress:
    """Gives every conversation's requests to one replica, by Ray's consistent hashing."""

    def __init__(self, engines: DeploymentHandle[Any], given: Arguments, limits: Limits) -> None:
        self.engines, self.limits, self.keys = engines, limits, given.keys()

    def __serve_build_asgi_app__(self) -> Starlette:
        return door(lambda key, asked: Forwarded(self.engines, key, asked), self.keys, self.limits)


def build(args: dict[str, Any]) -> serve.Application:
    """The application for `serve run` and config files. Raises SubkvError and click's errors for wrong arguments."""
    given = Arguments.of(args)
    context = wanted.make_context("flags", given.listed())
    limits = Limits(max_body=context.params["max_body"], timeout=context.params["timeout"])
    n_slots = context.params["parallel"]
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
        graceful_shutdown_timeout_s=30,
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
    )
    ingress = serve.deployment(
        Ingress,
        name="Ingress",
        num_replicas=given.ingresses,
        max_ongoing_requests=max(given.max_queued_requests + 2 * n_slots * given.max_replicas, 1000),
        ray_actor_options=given.ingress_options(),
    )
    return ingress.bind(replica.bind(given), given, limits)
