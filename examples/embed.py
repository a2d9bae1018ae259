"""Uses a model with a compressed cache in a program.

python examples/embed.py model.gguf "Why is the sky blue?"
"""

from __future__ import annotations

import argparse

import subkv


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="GGUF model")
    parser.add_argument("question", help="question for the model")
    given = parser.parse_args()
    with subkv.Llama(given.model, kv_cache="subkv", n_ctx=2048, verbose=False) as llm:
        answer = llm.create_chat_completion(
            [{"role": "user", "content": given.question}], max_tokens=100, temperature=0.0
        )
        print(answer["choices"][0]["message"]["content"])
        stats = llm.kv_stats()
        print(f"KV cache: {stats.bytes_kv} bytes, {stats.bpe:.2f} bits per element; f16: {stats.bytes_f16} bytes")


if __name__ == "__main__":
    main()
