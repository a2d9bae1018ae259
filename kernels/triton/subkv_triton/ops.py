"""encode, attend and combine of kernels/include/subkv/ops.h as Triton kernels for PyTorch.

The rows are those of every other version, byte for byte; layouts may differ between heads. Without a GPU the kernels
run in Triton's interpreter, with TRITON_INTERPRET=1 in the environment before triton is imported.
"""

from subkv_triton.attend import Partial, attend, project_queries
from subkv_triton.codecs import Codecs
from subkv_triton.combine import Exact, combine
from subkv_triton.encode import encode_rows

__all__ = ["Codecs", "Exact", "Partial", "attend", "combine", "encode_rows", "project_queries"]
