"""Starts llama-server with a coded cache and calls it with OpenAI's client.

CMAKE_ARGS='-DLLAMA_BUILD=OFF -DSUBKV_PROGRAMS=ON' pip install --no-cache-dir . openai

python examples/serve_and_call.py model.gguf "Why is the sky blue?"
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import time
import urllib.request

from openai import OpenAI


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def wait_until_ready(server: subprocess.Popen[bytes], url: str) -> None:
    while server.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=1):
                return
        except OSError:  # not listening yet, or still loading the model
            time.sleep(0.1)
    sys.exit("the server ended before it was ready")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="GGUF model")
    parser.add_argument("question", help="question for the model")
    given = parser.parse_args()
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    server = subprocess.Popen([sys.executable, "-m", "runtime.serve", "-m", given.model, "--port", str(port)])
    try:
        wait_until_ready(server, url)
        client = OpenAI(base_url=f"{url}/v1", api_key="not needed")
        answer = client.chat.completions.create(
            model="any", messages=[{"role": "user", "content": given.question}], max_tokens=100, stream=True
        )
        for chunk in answer:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        print()
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
