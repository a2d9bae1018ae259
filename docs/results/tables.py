"""The tables: name, title, description, and the functions that measure and write them.

measure(lab) runs programs in a folder with M.gguf, calib.safetensors and the texts (`Lab` of make.py) and returns rows.
Documents show markdown(rows) and quote numbers(rows).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
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
    """minutes: an estimate for two idle cores of a Zen 4. picture: a file next to the page.

    group: tables with comparable numbers; one commit measures all tables of a group, on each machine.
    timed: other work on the machine changes the numbers. by_machine: one result per machine, side by side in the table.
    folder: of the page and the results, in the repository. model: a key of MODELS.
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
    timed: bool = True
    by_machine: bool = False
    folder: str = "docs/results"
    model: str = "demo"

    @property
    def files(self) -> str:
        """The files in the page's commands."""
        return f"{MODELS[self.model]}; `subkv` and `python` are those of the environment."


MODELS = {  # and the files in the folder of their tables
    "demo": "`M.gguf` is the demo model, `calib.safetensors` its calibration out of `models/`",
    "gemma": "`M.gguf` is the file of `models/gemma3.py`, `calib.safetensors` the calibration that `subkv convert "
    "M.gguf` has stored in the cache folder",
}
RESEARCH = "research/results"
MODEL = "SmolLM2-135M-Instruct Q4_1 with the calibration in models/ at this commit"
GEMMA = (
    "Gemma 3 270M Q4_K_M (extra `gemma`), calibrated by `convert` on the built-in texts. Bits are those of its 3 "
    "layers with full attention; the stock types also quantize the 15 layers with a sliding window"
)
FLOAT32 = "in a float32 model of transformers, without engine noise"


def _of_shapes(filled: str, flash: str) -> str:
    """The description of tables of research.shapes. filled: the cells in the caches; flash: the flash attention."""
    return (
        "`research.shapes` writes models with random weights (Q4_0, one type for all matrices) and random bases of a "
        "fixed layout, 8 to 3 bits per coefficient. Time and memory are those of real models of these shapes; quality "
        f"is not measured. `subkv bench` fills caches with {filled}. Medians ± standard deviation of interleaved "
        f"repetitions in one process, 2 threads{flash}."
    )


SHAPES = _of_shapes("copies of evaluated cells", "; the better of flash attention on and off")
EVALUATED = _of_shapes("evaluated tokens", ", flash attention on")
LEFT_OUT = f"{SHAPES} q8_0 and q4_0 are omitted: at depth they are slower than f16."
REPEATED = "Medians ± standard deviation of interleaved repetitions in one process, 2 threads, 4.5 bits"

ORDER = (  # the most important ones first
    Table(
        "frontier_float32",
        "Bits against KLD, float32",
        f"{MODEL}; WikiText-2 test, the codec {FLOAT32}. KLD against the same model with exact keys and values, nats "
        "per token.",
        15,
        scores.frontier,
        scores.frontier_markdown,
        scores.frontier_numbers,
        "frontier.png",
        group="codec",
        timed=False,
    ),
    Table(
        "frontier_short",
        "Bits against KLD in a short context, float32",
        f"{MODEL}; WikiText-2 test, two chunks of 2048 tokens; bits are counted at 2048 tokens; the codec {FLOAT32}.",
        5,
        scores.frontier_short,
        scores.frontier_markdown,
        scores.klds_of,
        group="codec",
        timed=False,
    ),
    Table(
        "speed_decode",
        "Generation",
        f"{REPEATED} and the default; the better of flash attention on and off.",
        4,
        speed.decode,
        speed.by_depth,
        speed.numbers,
        by_machine=True,
    ),
    Table(
        "memory",
        "Memory at 8192 tokens of context",
        "A chat with an answer of 8 tokens; peak resident memory of the whole process.",
        0.3,
        speed.memory,
        speed.memory_markdown,
        speed.memory_numbers,
        timed=False,
    ),
    Table(
        "sizes",
        "Memory by the shape of a model",
        "Computed, not measured, from each model's config.json: layers with a growing cache, KV heads and head size. "
        "subkv: 5.2 bits per element, the demo model's default (as good as q8_0), and 4.25 bits, including the exact "
        "window of one sequence and the bases.",
        0,
        size.sizes,
        size.sizes_markdown,
        size.sizes_numbers,
        group="sizes",
        timed=False,
    ),
    Table(
        "sizes_sliding",
        "Memory of models with sliding windows",
        "Computed as [sizes.md](sizes.md): the context is that of all slots of llama-server together, with its default "
        "of 512 tokens computed at once (`-ub`). Sliding layers are f16, q8_0, and beside coded ones q8_0. llama.cpp "
        "and subkv allocate these sizes (tests/test_results.py).",
        0,
        size.sliding_sizes,
        size.sizes_markdown,
        size.sizes_numbers,
        group="sizes",
        timed=False,
    ),
    Table(
        "sensitivity",
        "Sensitivity of layers to errors",
        "`subkv lab sensitivity` measured the values in the calibration; `python -m research.plot_sensitivities` draws "
        "them.",
        0.1,
        research.sensitivity,
        lambda rows: "",
        picture="sensitivity.png",
        group="codec",
        timed=False,
        folder=RESEARCH,
    ),
    Table(
        "speed_prefill",
        "Prompts of 512 tokens",
        f"{REPEATED}; the better of flash attention on and off.",
        4.5,
        speed.prefill,
        speed.by_depth,
        speed.numbers,
        by_machine=True,
    ),
    Table(
        "engine_kld",
        "KLD in the engine",
        f"{MODEL}; WikiText-2 test. Quantized weights and activations amplify every rounding. f16 with flash "
        "attention off is the noise floor: smaller differences are not significant.",
        3.5,
        scores.engine_kld,
        scores.engine_markdown,
        timed=False,
    ),
    Table(
        "server_load",
        "Load on the server",
        "llama-server, 4 slots of 4096 tokens, 4.5 bits, 2 threads; lines of clients are medians of interleaved "
        "repetitions.",
        4.5,
        speed.server_load,
        speed.server_markdown,
        speed.server_numbers,
        group="load",
    ),
    Table(
        "server_prefixes",
        "Prompts that the server restores",
        f"{MODEL}; llama-server with one slot of 8192 tokens, 2 threads. Seconds are times to the first token of an "
        "answer to 6,000 tokens. After an eviction by another conversation, the prompt comes from memory (median of "
        "three). After a restart it comes from files, which the system does not have cached. On disk: this prompt. "
        "The ten conversations have 200 tokens each, after the same 1,000.",
        4,
        prefixes.server_prefixes,
        prefixes.markdown,
        prefixes.numbers,
        group="prefixes",
    ),
    Table(
        "server_handover",
        "A conversation that moves to another server",
        f"{MODEL}; two llama-servers with one slot of 8192 tokens and 2 threads, one after the other. They share a "
        "store in a folder; the system does not have its files cached. Transferred: the whole store after 6,000 "
        "tokens. Next turn: the bytes that the second server adds for 200 more tokens. Takeover: time to the first "
        "token of the answer to both. Break-even: with a slower link, evaluating the prompt again is faster.",
        4,
        prefixes.server_handover,
        prefixes.handover_markdown,
        group="handover",
    ),
    Table(
        "turns",
        "Tokens that are evaluated twice",
        "llama-server with one slot; tiny models with random weights and the recurrent layers, sliding windows and "
        f"heads of the shapes. Ten turns to a depth of {turns.DEPTH} tokens; turn 8 edited; another turn after it; "
        "another text after turn 5; the first conversation continued after turn 10; a restart and another turn; the "
        "turn before the restart edited. Cells count the tokens evaluated in addition to new ones. After the restart, "
        "a server with coefficients reads a store (`SUBKV_STORE`); with f16 it restores the saved file of its slot.",
        20,
        turns.turns,
        turns.markdown,
        turns.numbers,
        group="turns",
        timed=False,
    ),
    Table(
        "cluster_load",
        "Replicas on one machine",
        f"{MODEL}, 4.5 bits; all on the same 2 cores, including Ray's proxy, ingress and controller. Medians of three.",
        4,
        clusters.cluster_load,
        clusters.markdown,
        clusters.numbers,
        group="cluster",
        timed=False,  # Ray's processes are not ours
    ),
    Table(
        "cluster_queues",
        "Queues of a cluster",
        f"Simulation of 20 minutes: {queues.N_USERS:,} users each send a turn per minute, at random times. A turn has "
        f"{queues.N_READ} new tokens and an answer of {queues.N_WRITTEN}. A machine has {queues.N_SLOTS} slots that "
        "share its time equally, with the speed and the time of a takeover from the server tables. The hash ring of "
        "Ray's own router selects the machine. If it has twice as many requests as slots, the router tries the next "
        "two machines, then all three again.",
        0.5,
        queues.cluster_queues,
        queues.markdown,
        queues.numbers,
        group="queues",
        timed=False,
    ),
    Table(
        "other_texts",
        "Other kinds of text",
        f"{MODEL}; a novel, argparse.py of the running Python, and the built-in held-out texts of seven kinds; the "
        f"codec {FLOAT32}, one chunk of at most 2048 tokens each.",
        9,
        scores.other_texts,
        scores.by_text,
        group="codec",
        timed=False,
    ),
    Table(
        "speed_parallel",
        "Parallel sequences",
        f"{REPEATED}; tokens/s of all sequences together.",
        4,
        speed.parallel,
        speed.by_test,
        speed.parallel_numbers,
        group="load",
    ),
    Table(
        "drafts",
        "Drafts",
        "A greedy answer of 64 tokens after 2000 tokens of Python code: `copy` repeats the code, `go on` continues "
        "it. `lookup N` proposes the N tokens that followed an earlier occurrence of the last 3. "
        f"{REPEATED}.",
        4,
        speed.drafts,
        speed.drafts_markdown,
        speed.drafts_numbers,
        group="drafts",
    ),
    Table(
        "speed_deep",
        "Deep contexts",
        f"{REPEATED}.",
        4,
        speed.deep,
        speed.by_depth,
        speed.numbers,
        group="load",
        by_machine=True,
    ),
    Table(
        "shapes_decode",
        "Generation in models of other shapes",
        SHAPES,
        25,
        shapes.decode,
        shapes.markdown,
        shapes.shape_numbers,
        group="shapes",
    ),
    Table(
        "shapes_hybrids",
        "Generation in hybrids and with sliding windows",
        EVALUATED,
        60,
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
        f"running Python; the codecs {FLOAT32}. Bits are counted at 8192 tokens and include scales, zeros, norms, "
        "tables, outliers and exact windows. (This favours long windows, mostly those of other codecs: at 2048 tokens "
        "a window holds a larger share.) research/rivals defines the other codecs; the table has each with its own "
        "exact window and with subkv's.",
        16,
        scores.rivals,
        scores.rivals_markdown,
        scores.klds_of,
        "rivals.png",
        group="rivals",
        timed=False,
        folder=RESEARCH,
    ),
    Table(
        "uncalibrated",
        "Bases from the weights alone",
        f"WikiText-2 test, one chunk of 8192 tokens, the codec {FLOAT32}. Uncalibrated bases are derived from the "
        "weights alone; the first line uses the demo's calibration.",
        18,
        scores.uncalibrated,
        scores.frontier_markdown,
        scores.klds_of,
        group="weights",
        timed=False,
    ),
    Table(
        "tasks",
        "Tasks",
        f"{MODEL}; generated texts of 1024 tokens (`research.tasks`), in the engine. f16: share of right answers, "
        "with the standard error over texts. Other caches: change from f16 on the same texts, in percentage points. "
        "tools: for f16 the share of right calls, for other caches the share of calls equal to f16's. −ln p: change "
        "per token of the right answers, in nats, mean of the tasks.",
        10,
        scores.tasks,
        scores.tasks_markdown,
        group="tasks",
        timed=False,
    ),
    Table(
        "kernels",
        "Kernels alone",
        "Nanoseconds (and GB/s of codes) per op and version of the kernels.",
        1,
        speed.kernels,
        speed.kernels_markdown,
    ),
    Table(
        "experiments",
        "Tests of the papers' claims",
        f"{MODEL}; float32, 4.25 bits, one chunk per text.",
        13,
        research.experiments,
        research.verdicts_markdown,
        group="papers",
        timed=False,
        folder=RESEARCH,
    ),
    Table(
        "warm_start",
        "Warm start: criteria of the paper",
        "Trained on prompts of WikiText-2 valid, tested on prompts of its test split, f16 cache; pairs of prompts with "
        "a cosine above 0.9.",
        7,
        research.warm_start,
        research.warm_markdown,
        research.warm_numbers,
        group="warm",
        folder=RESEARCH,
    ),
)
DEMO = {table.name: table for table in ORDER}


def _of_gemma(name: str, minutes: float, measure: Callable[[Any], Rows] | None = None) -> Table:
    """A table of the second trained model, like the demo model's."""
    table = DEMO[name]
    about = table.about.replace(MODEL, GEMMA)
    return replace(
        table,
        name=f"{name}_gemma",
        title=f"{table.title}: Gemma 3 270M",
        about=about if GEMMA in about else f"{GEMMA}. {about}",
        minutes=minutes,
        measure=measure or table.measure,
        picture="",
        group=f"{table.group}_gemma",
        model="gemma",
    )


SECOND = (
    _of_gemma("frontier_float32", 16, scores.frontier_gemma),
    replace(_of_gemma("frontier_short", 9, scores.frontier_short_gemma), group="short_gemma"),
    _of_gemma("other_texts", 18, scores.other_texts_gemma),
    _of_gemma("engine_kld", 6),
    _of_gemma("tasks", 15),
    _of_gemma("memory", 0.5),
    _of_gemma("speed_decode", 5),
    _of_gemma("speed_prefill", 6),
)
TABLES = {table.name: table for table in (*ORDER, *SECOND)}
