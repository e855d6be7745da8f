"""Replica of a model: an engine and its service in a process of Ray Serve."""

import asyncio
import os
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from ray import serve

from jpaged.config import CPU, GPU
from jpaged.core.commands import Command
from jpaged.engine.async_engine import QueueFull
from jpaged.serving.codec import dumps
from jpaged.serving.endpoints import ENDPOINTS
from jpaged.serving.generate import EVENT_HEADERS, generate, timed_out
from jpaged.serving.info import model_list
from jpaged.serving.middleware import as_api_error, error_headers
from jpaged.serving.ray.config import RayConfig
from jpaged.serving.ray.messages import Description, Forwarded, Head
from jpaged.serving.serve import tune_interpreter
from jpaged.serving.service import ServerConfig, Service
from jpaged.serving.tool_parsers.format import tool_format

OPERATIONS = {path: each.operation for each in ENDPOINTS if each.operation is not None for path in each.paths}
DIALECTS = {path: each.dialect for each in ENDPOINTS for path in each.paths if path in OPERATIONS}
REPLICA_ID = "X-Replica-Id"  # header of a generated response
JSON = {"Content-Type": "application/json"}


class Replica:
    """Engine that answers forwarded requests with plain values.

    Args:
        num_gpus: GPUs of this process; 0: the model runs on CPUs.
    """

    def __init__(self, config: RayConfig, num_gpus: int):
        if num_gpus == 0:
            os.environ.setdefault("JAX_PLATFORMS", "cpu")
        # jax would take three quarters of a GPU's memory; a replica has it to itself.
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
        from jpaged.start.load import start_engine  # imports jax, which reads the variables
        from jpaged.start.setup import prepare

        setup = prepare(config.engine, chat_template=config.server.chat_template)
        self._service = Service(
            [start_engine(setup, progress=False)], setup.tokenizer, config.model_name, config.server,
            sampling_defaults=setup.sampling_defaults,
            tool_format=tool_format(config.tool_call_parser, setup.tokenizer, config.server.chat_template),
        )  # fmt: skip
        self._id = serve.get_replica_context().replica_id.unique_id
        tune_interpreter()
        self._service.engine.start()

    async def __del__(self) -> None:
        if service := getattr(self, "_service", None):
            await service.engine.stop()

    def check_health(self) -> None:
        """Check the engine. Ray Serve replaces a replica whose check fails.

        Raises:
            RuntimeError: the engine has failed.
        """
        if not self._service.engine.alive:
            raise RuntimeError("the engine has failed; the log of the replica has the reason")

    async def describe(self) -> Description:
        """Return the description of the model."""
        return Description(model_list(self._service), self._service.max_body_size)

    async def metrics(self) -> tuple[str, str]:
        """Return this replica's id, and its metrics in Prometheus's text format."""
        text = await asyncio.to_thread(self._service.metrics.render)
        return self._id, text.decode()

    async def control(self, command: Command) -> None:
        """Run a command in this replica's engine."""
        await self._service.engine.control(command)

    async def respond(self, forwarded: Forwarded) -> AsyncGenerator[Head | bytes]:
        """Yield the head of the response to a request and the parts of its body.

        Failures are responses, too; one in the middle of a stream is the last event of the stream.
        """
        start, begun, status = time.monotonic(), False, 499  # nginx's status: the client did not wait for the answer
        dialect = DIALECTS[forwarded.path]
        try:
            async with aclosing(self._response(forwarded)) as parts:
                async for part in parts:
                    if isinstance(part, Head):
                        begun, status = True, part.status
                    yield part
        except Exception as failure:
            error = timed_out(self._service) if isinstance(failure, TimeoutError) else as_api_error(failure)
            if begun:
                yield dialect.stream_end(error)
                return
            if isinstance(failure, QueueFull):
                self._service.metrics.rejected.inc()
            status = error.status
            yield Head(status, JSON | error_headers(error))
            yield dumps(dialect.error(error))
        finally:
            self._service.metrics.answered("POST", forwarded.path, status, time.monotonic() - start)

    async def _response(self, forwarded: Forwarded) -> AsyncGenerator[Head | bytes]:
        service, limit, turn = self._service, self._service.config.request_timeout, forwarded.client or ""
        result = await OPERATIONS[forwarded.path](service, forwarded.body, turn)
        if isinstance(result, bytes):
            yield Head(200, JSON)
            yield result
            return
        deadline = None if limit is None else asyncio.get_running_loop().time() + limit
        kind = EVENT_HEADERS if result.body.stream else JSON
        head: Head | None = Head(200, kind | {REPLICA_ID: self._id})
        async with aclosing(generate(service, result, turn, forwarded.client)) as parts:
            while True:
                async with asyncio.timeout_at(deadline):  # around a `yield` it would interrupt the consumer instead
                    part = await anext(parts, None)
                if part is None:
                    return
                if head is not None:
                    yield head
                    head = None
                if part:
                    yield part


def drain_timeout(config: ServerConfig) -> float:
    """Return the seconds that running requests have to finish before a replica ends."""
    return 7 * 86_400.0 if config.drain_timeout is None else config.drain_timeout  # without a limit: a week


def deployment_options(config: RayConfig, num_gpus: int) -> dict[str, Any]:
    """Return the options of the replicas' deployment, with `num_gpus` GPUs each."""
    seqs = config.engine.num_seqs((GPU if num_gpus else CPU).max_num_seqs)
    scaling: dict[str, Any] = {"num_replicas": config.max_replicas}
    if config.min_replicas != config.max_replicas:
        bounds = {"min_replicas": config.min_replicas, "max_replicas": config.max_replicas}
        target = config.target_ongoing_requests or seqs
        scaling = {"autoscaling_config": bounds | {"target_ongoing_requests": target}}
    return scaling | {
        "ray_actor_options": {"num_gpus": num_gpus, "num_cpus": config.num_cpus},
        "max_ongoing_requests": config.max_ongoing_requests or 2 * seqs,
        "max_queued_requests": config.server.max_queue,
        "health_check_period_s": config.health_check_period_s,
        "graceful_shutdown_timeout_s": drain_timeout(config.server),
        "max_constructor_retry_count": 3,
    }
