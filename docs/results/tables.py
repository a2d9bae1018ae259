"""The tables: name, title, what is measured, and the functions that measure and write them.

measure(lab) runs programs in a folder that holds M.gguf, calib.safetensors and the texts (`Lab` of make.py) and returns
rows; markdown(rows) and numbers(rows) are what documents show and quote.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cluster_tables as clusters
import prefix_tables as prefixes
import queue_tables as queues
import research_tables as research
import score_tables as scores
import shape_tables as shapes
import size_tables as size
import speed_tables as speed
import turn_tables as turns
from render import Numbers, Rows


@dataclass(frozen=True)
class Table:
    """minutes: an estimate for two quiet cores of a Zen 4. picture: a file beside the page.

    group: tables whose numbers are compared, so that one commit measures all of them: of the engine (time, memory and
    its rounding), of the engine under load and in depth, of models of other shapes, of the codec in float32, of bases
    from the weights alone, of other projects' codecs, of tasks, of the papers.
    """

    name: str
    title: str
    about: str
    minutes: float
    measure: Callable[[Any], Rows]
    markdown: Callable[[Rows], str]
    numbers: Callable[[Rows], Numbers] = lambda rows: {}
    picture: str = ""
    group: str = "engine"


MODEL = "SmolLM2-135M-Instruct Q4_1 with the calibration that models/ holds at this commit"
FLOAT32 = "in a float32 model of transformers, without engine noise"


def _of_shapes(filled: str, flash: str) -> str:
    """What stands above tables of research.shapes. filled: with what caches are."""
    return (
        "Random weights (Q4_0, one type for all matrices) and random bases of a fixed layout, 8 to 3 bits per "
        "coefficient, by `research.shapes`: time and memory are those of real models of these shapes, quality is not "
        f"there to be measured. Caches are filled with {filled} (`subkv bench`). Medians ± standard deviation of "
        f"interleaved repetitions in one process, 2 threads{flash}."
    )


SHAPES = _of_shapes("copies of evaluated cells", "; the better of flash attention on and off")
EVALUATED = _of_shapes("evaluated tokens", ", flash attention on")
LEFT_OUT = f"{SHAPES} q8_0 and q4_0 are left out: at depth they are slower than f16."
REPEATED = "Medians ± standard deviation of interleaved repetitions in one process, 2 threads, 4.5 bits"

ORDER = (  # what matters most comes first
    Table(
        "frontier_float32",
        "Bits against KLD, float32",
        f"{MODEL}; WikiText-2 test, the codec {FLOAT32}. KLD against the same model with exact keys and values, nats "
        "per token.",
        24,
        scores.frontier,
        scores.frontier_markdown,
        scores.frontier_numbers,
        "frontier.png",
        group="codec",
    ),
    Table(
        "frontier_short",
        "Bits against KLD in a short context, float32",
        f"{MODEL}; WikiText-2 test, two chunks of 2048 tokens, whose bytes are counted; the codec {FLOAT32}.",
        5,
        scores.frontier_short,
        scores.frontier_markdown,
        scores.klds_of,
        "frontier_short.png",
        group="codec",
    ),
    Table(
        "speed_decode",
        "Generation",
        f"{REPEATED} and the default; the better of flash attention on and off.",
        4,
        speed.decode,
        speed.by_depth,
        speed.numbers,
    ),
    Table(
        "memory",
        "Memory at 8192 tokens of context",
        "A chat that answers 8 tokens; peak resident memory of the whole process.",
        0.3,
        speed.memory,
        speed.memory_markdown,
        speed.memory_numbers,
    ),
    Table(
        "sizes",
        "Memory by the shape of a model",
        "Computed from shapes (layers whose cache grows, KV heads and head size, as in each model's config.json), not "
        "measured. subkv: 4.25 bits per element, with the exact window of one sequence and the bases.",
        0,
        size.sizes,
        size.sizes_markdown,
        size.sizes_numbers,
        group="sizes",
    ),
    Table(
        "sensitivity",
        "What errors cost where",
        "Measured by `subkv lab sensitivity`, drawn from the calibration.",
        0.1,
        research.sensitivity,
        lambda rows: "",
        picture="sensitivity.png",
        group="codec",
    ),
    Table(
        "speed_prefill",
        "Prompts of 512 tokens",
        f"{REPEATED}; the better of flash attention on and off.",
        4.5,
        speed.prefill,
        speed.by_depth,
        speed.numbers,
    ),
    Table(
        "engine_kld",
        "KLD in the engine",
        f"{MODEL}; WikiText-2 test. The engine computes with quantized weights and activations and amplifies every "
        "rounding; f16 with flash attention off is the floor below which nothing can be told apart.",
        3.5,
        scores.engine_kld,
        scores.engine_markdown,
    ),
    Table(
        "server_load",
        "Load on the server",
        "llama-server, 4 slots of 4096 tokens, 4.5 bits, 2 threads; the lines of clients are medians of interleaved "
        "repetitions.",
        4.5,
        speed.server_load,
        speed.server_markdown,
        speed.server_numbers,
        group="load",
    ),
    Table(
        "server_prefixes",
        "What the server remembers",
        f"{MODEL}; llama-server with one slot of 8192 tokens, 2 threads. Seconds until the first token of an answer to "
        "6,000 tokens: evaluated; after a restart, with the files out of the system's cache; evicted by another "
        "conversation and back, from memory (median of three). On disk: that prompt with its checkpoints. Ten "
        "conversations of 200 tokens after the same 1,000.",
        4,
        prefixes.server_prefixes,
        prefixes.markdown,
        prefixes.numbers,
        group="prefixes",
    ),
    Table(
        "server_handover",
        "A conversation that changes its server",
        f"{MODEL}; two llama-servers of one slot of 8192 tokens, 2 threads, one after the other, with one store in a "
        "folder, whose files are out of the system's cache. Moved: all of the store after 6,000 tokens. A turn of 200 "
        "tokens more: what the second server adds. Taken over: seconds until the first token of the answer to both. "
        "Break-even: at a slower link evaluating is faster.",
        4,
        prefixes.server_handover,
        prefixes.handover_markdown,
        group="handover",
    ),
    Table(
        "turns",
        "Tokens that are evaluated twice",
        "llama-server with one slot; tiny seeded models whose recurrent layers, sliding windows and heads are those of "
        f"the shapes. Ten turns to a depth of {turns.DEPTH} tokens; then turn 8 edited and gone on from; a branch "
        "behind turn 5; the way back to turn 10 and on; a restart; the turn before it edited. Tokens evaluated beyond "
        "the new ones. A restarted server has a store (`SUBKV_STORE`) with coefficients, and with f16 the file of its "
        "slot, saved and restored.",
        20,
        turns.turns,
        turns.markdown,
        turns.numbers,
        group="turns",
    ),
    Table(
        "cluster_load",
        "Replicas on one machine",
        f"{MODEL}, 4.5 bits; all on the same 2 cores, Ray's proxy, ingress and controller included. Medians of three.",
        4,
        clusters.cluster_load,
        clusters.markdown,
        group="cluster",
    ),
    Table(
        "cluster_queues",
        "Queues of a cluster",
        f"Simulated: {queues.N_USERS:,} users, a turn a minute each, of {queues.N_READ} new tokens and "
        f"{queues.N_WRITTEN} of an answer, at random times; for 20 minutes. Machines of {queues.N_SLOTS} slots as "
        "the tables of the server measured them, with work shared equally and the time of taking over a conversation "
        "from the store. Whom a request goes to says the ring of Ray's own router; where the first has twice as many "
        "requests as slots the next two are asked, and then all again.",
        0.5,
        queues.cluster_queues,
        queues.markdown,
        queues.numbers,
        group="queues",
    ),
    Table(
        "other_texts",
        "Texts of many kinds",
        f"{MODEL}; a novel, argparse.py of the Python that runs, and the built-in texts of seven kinds that no "
        f"calibration sees; the codec {FLOAT32}, one chunk of at most 2048 tokens each.",
        15,
        scores.other_texts,
        scores.by_text,
        group="codec",
    ),
    Table(
        "speed_parallel",
        "Sequences that generate together",
        f"{REPEATED}; tokens/s of all together.",
        4,
        speed.parallel,
        speed.by_test,
        speed.parallel_numbers,
        group="load",
    ),
    Table(
        "drafts",
        "Drafts",
        "A greedy answer of 64 tokens behind 2000 tokens of Python code: `copy` writes them once more, `go on` goes "
        "on. `lookup N`: N tokens that followed the last 3 when these stood in the text before. "
        f"{REPEATED}.",
        4,
        speed.drafts,
        speed.drafts_markdown,
        group="drafts",
    ),
    Table("speed_deep", "Deep contexts", f"{REPEATED}.", 4, speed.deep, speed.by_depth, speed.numbers, group="load"),
    Table(
        "speed_avx2",
        "AVX2 only",
        f"{REPEATED}; our kernels limited to AVX2, llama.cpp's own not.",
        2,
        speed.avx2,
        speed.by_test,
    ),
    Table(
        "shapes_decode",
        "Generation in models of other shapes",
        SHAPES,
        40,
        shapes.decode,
        shapes.markdown,
        shapes.shape_numbers,
        group="shapes",
    ),
    Table(
        "shapes_hybrids",
        "Generation in hybrids and with sliding windows",
        EVALUATED,
        30,
        shapes.hybrids,
        shapes.markdown,
        shapes.shape_numbers,
        group="shapes_hybrids",
    ),
    Table(
        "shapes_mla",
        "Generation with latent attention",
        SHAPES,
        4,
        shapes.latent,
        shapes.markdown,
        shapes.shape_numbers,
        group="shapes_mla",
    ),
    Table(
        "shapes_prefill",
        "Prompts of 512 tokens in models of other shapes",
        LEFT_OUT,
        11,
        shapes.prefill,
        shapes.markdown,
        shapes.shape_numbers,
        group="shapes_prefill",
    ),
    Table(
        "shapes_whole",
        "Generation in a whole model of 8 billion weights",
        LEFT_OUT,
        22,
        shapes.whole,
        shapes.markdown,
        shapes.shape_numbers,
        group="shapes_whole",
    ),
    Table(
        "shapes_deep",
        "Generation at 128000 tokens",
        LEFT_OUT,
        4,
        shapes.deep,
        shapes.markdown,
        shapes.shape_numbers,
        group="shapes_deep",
    ),
    Table(
        "rivals",
        "Other projects' codecs",
        f"{MODEL}; mean KLD of one chunk of 2048 tokens of WikiText-2 test, of a novel, and of argparse.py of the "
        f"Python that runs; the codecs {FLOAT32}. Bits are counted at 8192 tokens, every byte: scales, zeros, norms, "
        "tables, outliers, exact windows. (So long windows, other codecs' above all, look better than they are: at "
        "2048 tokens they hold a larger share.) The other codecs are defined in research/rivals; each stands here "
        "with its own exact window and with subkv's.",
        16,
        scores.rivals,
        scores.rivals_markdown,
        scores.klds_of,
        "rivals.png",
        group="rivals",
    ),
    Table(
        "uncalibrated",
        "Bases from the weights alone",
        f"WikiText-2 test, one chunk of 8192 tokens, the codec {FLOAT32}. Uncalibrated bases know the weights and no "
        "text; the first line has the demo's calibration.",
        18,
        scores.uncalibrated,
        scores.frontier_markdown,
        scores.klds_of,
        group="weights",
    ),
    Table(
        "tasks",
        "Tasks",
        f"{MODEL}; texts of 1024 tokens made by "
        "`research.tasks`, in the engine. f16: right answers and their standard error over texts; the others: what has "
        "changed against f16 on the same texts, in points; tools: f16's right calls, the others' share of calls that "
        "are f16's; −ln p: change per token of the right answers, nats, mean of the tasks.",
        10,
        scores.tasks,
        scores.tasks_markdown,
        group="tasks",
    ),
    Table(
        "kernels",
        "Kernels alone",
        "Nanoseconds (and GB/s of codes) of each op in each version.",
        1,
        speed.kernels,
        speed.kernels_markdown,
    ),
    Table(
        "experiments",
        "The papers' falsifiers",
        f"{MODEL}; float32, 4.25 bits, one chunk a text.",
        13,
        research.experiments,
        research.verdicts_markdown,
        group="papers",
    ),
    Table(
        "warm_start",
        "Warm start against the paper's criteria",
        "Trained on prompts of WikiText-2 valid, tested on its test split, f16 cache, pairs with a cosine above 0.9.",
        7,
        research.warm_start,
        research.warm_markdown,
        research.warm_numbers,
        group="warm",
    ),
)
TABLES = {table.name: table for table in ORDER}
