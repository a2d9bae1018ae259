"""llama.cpp with a KV cache of calibrated, quantized coefficients."""
