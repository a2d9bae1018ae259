"""The kernels of kernels/include/subkv/ops.h in Triton (ops), and rows as tables (fields), which needs no Triton."""
