"""Answers of the demo model to questions of beginners, to read and judge: python -m research.demo_answers

Takes the options of `subkv chat`, with its defaults for the demo model. Each answer is a line of values that tabs
separate: seed, question, why the answer ended, tokens, text.
"""

from __future__ import annotations

from typing import Any

import click

from runtime.chat.cli import chat_options
from subkv.base.command import command

QUESTIONS = """\
What is the capital of France?
What is the capital of Japan?
Who wrote Romeo and Juliet?
Why is the sky blue?
What is the largest planet in the solar system?
hi
Hello, how are you?
Who are you?
What can you do?
Tell me a joke.
Write a haiku about the sea.
Write a short poem about autumn.
Tell me a story about a dragon.
How do I boil an egg?
Give me a recipe for pancakes.
What is photosynthesis?
Explain gravity to a child.
What is machine learning?
What is a KV cache?
What is 2+2?
Write a Python function that adds two numbers.
How do I lose weight?
What is the meaning of life?
Give me three tips for better sleep.
How do airplanes fly?
What is the difference between a cat and a dog?
Translate 'good morning' to Spanish.
Name five animals.
What day is it today?
Help me write an email to my boss.""".splitlines()


@command()
@chat_options
@click.option("--seeds", type=int, default=1, show_default=True, help="answers per question, with seeds 1, 2, ...")
def main(seeds: int, chat_input: Any, n_predict: int, sampling: Any, **arguments: Any) -> None:
    """Ask the demo model thirty questions of beginners and print its answers."""
    import dataclasses

    from runtime.chat.conversation import Conversation, Turn
    from runtime.model import open_llama
    from subkv.engine.llama import Llama

    with open_llama(None, arguments["n_gpu_layers"], arguments["cache"], arguments["context"], Llama) as llm:
        for seed in range(1, seeds + 1):
            for question in QUESTIONS:
                conversation = Conversation(
                    llm, chat_input.system or "", dataclasses.replace(sampling, seed=seed), stop_loops=True
                )
                turn = Turn()
                text = "".join(conversation.ask(question, n_predict, lambda: False, turn))
                click.echo("\t".join([str(seed), question, turn.stopped, str(turn.n_answer), text.replace("\n", "⏎")]))


if __name__ == "__main__":
    main()
