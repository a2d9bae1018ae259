"""`subkv serve`: llama-server on a cache of coefficients, on one machine or on many (Ray Serve).

cli.py         starts one llama-server        replica.py   one llama-server process behind a socket
cluster.py     replicas on many machines      sessions.py  which replica gets a request
gateway.py     API keys and limits            die_with_parent.py  ends a server whose parent was killed
"""
