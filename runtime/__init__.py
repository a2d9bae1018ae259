"""Programs on top of subkv.Llama: chat, perplexity, bench, inspect. Contracts: README, flags named as in llama.cpp."""
