"""An OpenAI server on one model: parallel slots, continuous batching, llama-server's extra routes.

cli.py         flags, start, end                 app.py         routes
batching.py    the engine: one thread, all slots completion.py  one request's text, from the engine's tokens
slots.py       slots; their files                guard.py       keys, limits and timeouts around the routes
"""
