"""`subkv doctor`: reports versions, libraries, processor, devices, memory, cache folder and formats."""
