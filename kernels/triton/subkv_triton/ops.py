"""encode, attend and combine of kernels/include/subkv/ops.h as Triton kernels for PyTorch.

Codes are those of every other version; their order in a row is fields.Words'. Layouts may differ between heads. Without
a GPU, set TRITON_INTERPRET=1 before importing triton to run the kernels in Triton's interpreter.
"""

from subkv_triton.attend import Partial, attend, project_queries
from subkv_triton.codecs import Codecs
from subkv_triton.combine import Exact, combine
from subkv_triton.encode import encode_rows

__all__ = ["Codecs", "Exact", "Partial", "attend", "combine", "encode_rows", "project_queries"]
