"""/metrics: llama-server's names, and the cache's size."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from runtime.serve.batching import Engine
from runtime.serve.prefixes import Prefixes
from runtime.serve.task import per

CONTENT_TYPE = "text/plain; version=0.0.4"


class EngineMetrics(Collector):
    """For prometheus_client.generate_latest, which asks nothing else of a registry."""

    def __init__(self, engine: Engine, n_waiting: Callable[[], int]) -> None:
        self.engine = engine
        self.n_waiting = n_waiting

    def collect(self) -> Iterable[Metric]:
        engine, totals, stats = self.engine, self.engine.totals, self.engine.llm.kv_stats()
        counters = {
            "prompt_tokens": ("Prompt tokens evaluated", totals.n_prompt),
            "prompt_tokens_cached": ("Prompt tokens found in a slot", totals.n_cached),
            "prompt_seconds": ("Seconds of prompt evaluation, summed over requests", totals.prompt_seconds),
            "tokens_predicted": ("Tokens generated", totals.n_predicted),
            "tokens_predicted_seconds": ("Seconds of generation, summed over requests", totals.predicted_seconds),
            "n_decode": ("Calls of llama_decode", totals.n_decode),
        }
        prompt_speed = per(totals.n_prompt, totals.prompt_seconds)
        speed = per(totals.n_predicted, totals.predicted_seconds)
        gauges = {
            "llamacpp:prompt_tokens_seconds": ("Prompt tokens per second of a request", prompt_speed),
            "llamacpp:predicted_tokens_seconds": ("Generated tokens per second of a request", speed),
            "llamacpp:requests_processing": ("Requests that have a slot", engine.n_busy),
            "llamacpp:requests_deferred": ("Requests that wait for one", self.n_waiting()),
            "llamacpp:n_tokens_max": ("Most tokens a slot has held", totals.n_tokens_max),
            "llamacpp:n_busy_slots_per_decode": ("Mean of busy slots", per(totals.n_busy, totals.n_decode)),
            "subkv:kv_bytes": ("Bytes of the KV cache as allocated", stats.bytes_kv),
            "subkv:kv_f16_bytes": ("Bytes that an f16 cache would take", stats.bytes_f16),
            "subkv:kv_bits_per_element": ("Bits per K/V element, everything counted", stats.bpe),
            "subkv:kv_tokens": ("Tokens that the slots hold", sum(len(slot.tokens) for slot in engine.slots)),
            "subkv:kv_chunks": ("Adaptive bases alive, all heads", stats.n_chunks),
        }
        if engine.recall is not None:
            yield from self._remembered(engine.recall.prefixes)
        yield from (CounterMetricFamily(f"llamacpp:{name}", text, value) for name, (text, value) in counters.items())
        yield from (GaugeMetricFamily(name, text, value) for name, (text, value) in gauges.items())

    @staticmethod
    def _remembered(prefixes: Prefixes) -> Iterable[Metric]:
        counts, tiers = prefixes.counts, {"ram": prefixes.ram, "disk": prefixes.disk}
        hits = CounterMetricFamily("subkv:prefix_hits", "Prompts that began with a restored prefix", labels=["from"])
        for where, n in counts.hits.items():
            hits.add_metric([where], n)
        held = GaugeMetricFamily("subkv:prefix_bytes", "Bytes of prefixes that are kept", labels=["in"])
        for where, tier in tiers.items():
            held.add_metric([where], 0 if tier is None else tier.n_bytes)
        yield from (hits, held)
        for name, text, value in (
            ("tokens_restored", "Prompt tokens restored in place of evaluating them", counts.n_restored),
            ("kept", "Prefixes taken in", counts.n_kept),
            ("dropped", "Prefixes that came too fast or did not fit", counts.n_dropped),
            ("damaged", "Prefixes that were refused when they were read", counts.n_damaged),
            ("disk_failures", "Reads and writes of the folder that failed or came too late", counts.n_failures),
        ):
            yield CounterMetricFamily(f"subkv:prefix_{name}", text, value)
