"""`subkv doctor`: versions, libraries, processor, devices, memory, cache folder and formats, for a bug report."""
