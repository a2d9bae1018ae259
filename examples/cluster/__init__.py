"""llama-server with coded caches on many machines, by Ray Serve (README.md).

deployment.py  replicas on many machines      sessions.py  which replica gets a request
replica.py     one llama-server process       gateway.py   API keys and limits
die_with_parent.py  ends a server whose parent was killed
"""
