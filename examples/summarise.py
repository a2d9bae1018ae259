"""Answers a question about a long text, with a context as long as the text, and prints the size of the cache.

python examples/summarise.py model.gguf book.txt [QUESTION]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import subkv


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="GGUF model")
    parser.add_argument("text", type=Path, help="UTF-8 text")
    parser.add_argument("question", nargs="?", default="Summarise the text in three sentences.")
    parser.add_argument("--max-tokens", type=int, default=200, help="maximum tokens of the answer")
    given = parser.parse_args()

    message = f"{given.text.read_text('utf-8')}\n\n{given.question}"
    with subkv.Llama(given.model, vocab_only=True, verbose=False) as llm:
        trained = int(llm.metadata[f"{llm.metadata['general.architecture']}.context_length"])
        needed = len(llm.tokenize(message.encode(), special=True)) + 100 + given.max_tokens  # 100: the chat template
    if needed > trained:
        sys.exit(f"{given.text}: expected at most {trained} tokens (the trained context), found {needed}")

    with subkv.Llama(given.model, kv_cache="subkv", n_ctx=needed, verbose=False) as llm:
        answer = llm.create_chat_completion(
            [{"role": "user", "content": message}], stream=True, max_tokens=given.max_tokens, temperature=0.0
        )
        for piece in answer:
            print(piece["choices"][0]["delta"].get("content", ""), end="", flush=True)
        stats = llm.kv_stats()
        print(
            f"\n\n{llm.n_tokens} tokens in {stats.bytes_kv / 2**20:.1f} MiB of KV cache, "
            f"{stats.bpe:.2f} bits per element, f16: {stats.bytes_f16 / 2**20:.1f} MiB",
            file=sys.stderr,
        )


if __name__ == "__main__":
    main()
