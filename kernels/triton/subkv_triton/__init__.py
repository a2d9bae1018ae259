"""The kernels of kernels/include/subkv/ops.h in Triton (ops); tables of a row's bits (fields), without Triton."""
