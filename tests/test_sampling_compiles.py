"""The kernels of ``sampled`` compile for a GPU, on a machine without one."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import sys
import triton.language as tl
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from pamm.kernels import fp8, sample

dtype, k = sys.argv[1], int(sys.argv[2])
constants = {
    "ROWS": 64, "BLOCK": 128, "BLOCK_K": 64 if k > 16 else 16, "TAIL": 64,
    "OPERAND": {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}[dtype],
    "PRECISION": "ieee" if dtype == "fp32" else "tf32", "SLOTS": fp8._SLOTS,
    "ROUNDS": 4, "FLOOR": 1e-2, "TINY": 1e-30, "UNIT": 1 << 24, "MARGIN": 2.0, "LARGEST": 448.0,
    "OWN": sample._OWN,
} | ({"k": 1} if k == 1 else {})
wide = dict.fromkeys(("weight_ptr", "size_ptr", "most_ptr", "units_ptr"), "*fp32")
wide |= {"index_ptr": "*i64", "offset_ptr": "*fp64"}
narrow = {"x_rows_ptr": "*fp8e4nv", "g_rows_ptr": "*fp8e4nv"}
for kernel in (sample._draw_kernel, sample._rows_kernel, sample._rest_kernel, fp8._rows_kernel):
    types = wide | (narrow if kernel is fp8._rows_kernel else {})
    own = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature = {
        name: "constexpr" if name in own
        else types.get(name, f"*{dtype}" if name.endswith("_ptr") else "i32")
        for name in kernel.arg_names
    }
    places = {(kernel.arg_names.index(name),): value for name, value in own.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places)
    assert compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
"""


@pytest.mark.parametrize("k", [1, 64])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_kernels_compile_for_a_gpu(dtype: str, k: int) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", SCRIPT, dtype, str(k)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
