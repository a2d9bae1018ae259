"""What a server or a replica of a cluster answers with, from the flags to the service behind the routes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from runtime import options
from runtime.options import Drafts
from runtime.serve.settings import N_CTX_SLOT, Limits, Offer, Remembering
from subkv.base.errors import SubkvError, install
from subkv.base.files import remove_stale

if TYPE_CHECKING:
    from runtime.serve.service import Service
    from subkv.engine.cache import CacheOptions
    from subkv.engine.context import ContextOptions


@dataclasses.dataclass(frozen=True)
class Wanted:
    """All flags but those of where a server listens."""

    model: str | None
    offer: Offer
    remembering: Remembering
    limits: Limits
    cache: CacheOptions
    context: ContextOptions
    n_gpu_layers: int
    drafts: Drafts
    context_shift: bool

    def checked(self) -> Wanted:
        """Refuse what does not go together, before anything takes long, and fill in what follows from the rest.

        Raises SubkvError and click.UsageError.
        """
        try:
            import fastapi  # noqa: F401
            import prometheus_client  # noqa: F401
            import uvicorn  # noqa: F401
        except ImportError as error:
            raise SubkvError("serve", f"expected package {error.name}, found none; {install('server')}") from error

        offer, cache, context = self.offer, self.cache, self.context
        n_slots = offer.n_slots
        if context.n_batch < n_slots:
            raise click.UsageError(
                f"-b: expected at least one token for each of {n_slots} slots, found {context.n_batch}"
            )
        folder = offer.folder()
        self.remembering.check()
        if folder is not None:
            for own in (folder, *folder.glob("[0-9a-f]" * 64)):  # and what single keys have saved
                remove_stale(own)
        if offer.embeddings and cache.type_k is None:
            # a text is evaluated once and its cells are never read again: nothing to gain from coefficients
            cache = dataclasses.replace(cache, type_k="f16", type_v=cache.type_v or "f16")
        if offer.pooling is not None and not offer.embeddings:
            raise click.UsageError("--pooling: expected --embeddings beside it, found none")
        context = dataclasses.replace(context, n_ctx=n_slots * N_CTX_SLOT if offer.n_ctx is None else offer.n_ctx)
        return dataclasses.replace(self, cache=cache, context=context)

    @contextlib.contextmanager
    def opened(self) -> Iterator[Service]:
        """The service, its engine not started yet. Raises SubkvError."""
        # numpy, the native libraries and the extra `server`: not for a --help, and a port in use costs no time
        from runtime.opening import open_llama
        from runtime.serve.batching import Engine
        from runtime.serve.grammars import MIB, Grammars
        from runtime.serve.recall import prefixes_of
        from runtime.serve.service import Service
        from runtime.serve.slots_llama import SlotsLlama
        from subkv.base.heap import return_freed
        from subkv.native.binding import llama_cpp

        return_freed()
        offer, limits, remembering = self.offer, self.limits, self.remembering
        draft = self.drafts.model(self.n_gpu_layers)
        if draft is not None and offer.embeddings:
            raise click.UsageError("--embeddings: expected no --spec-type and no -md beside it, found one")
        more = offer.model_arguments() | {"draft_model": draft}
        with open_llama(self.model, self.n_gpu_layers, self.cache, self.context, SlotsLlama, **more) as llm:
            if not offer.embeddings and not llama_cpp.llama_get_memory(llm.ctx):
                raise SubkvError(
                    "model", "expected a model that generates text, found one that only encodes; use --embeddings"
                )
            options.note_cache(llm.kv_stats(), llm.cache_choice)
            grammars = Grammars(llm.model_path, llm.n_vocab(), limits.grammar_timeout, limits.grammar_memory * MIB)
            prefixes = None if offer.embeddings else prefixes_of(llm, remembering)
            engine = Engine(llm, limits.stall_timeout, grammars, self.context_shift, prefixes)
            name = offer.alias or Path(llm.model_path).name
            try:
                yield Service(engine, name, limits, offer.embeddings, offer.folder(), remembering.shared_cache)
            finally:
                engine.close()
