"""PyTorch's CPU attention as a timed peer: one JSON request a line in, one JSON answer a line out.

A request names a case ({"kind": "prefill" | "decode", "dtype", "batch", "q_heads", "kv_heads", "q_len",
"kv_len", "dim", "causal"}) and how many calls to time; the answer holds the milliseconds of each. Inputs of
a case are made once, normally distributed, and kept until another case is asked for.
"""

import json
import sys
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def make(case):
    torch.manual_seed(1)
    dtype = DTYPES[case["dtype"]]

    def tensor(heads, length):
        # [batch, length, heads, dim] in memory, as a model's projections leave it.
        x = torch.randn(case["batch"], length, heads, case["dim"]).to(dtype)
        return x.transpose(1, 2)

    q = tensor(case["q_heads"], case["q_len"])
    return q, tensor(case["kv_heads"], case["kv_len"]), tensor(case["kv_heads"], case["kv_len"])


def main():
    torch.set_num_threads(int(sys.argv[1]))
    print(json.dumps({"ready": f"torch {torch.__version__}"}), flush=True)
    key, tensors = None, None
    for line in sys.stdin:
        request = json.loads(line)
        case = request["case"]
        if case != key:
            key, tensors = case, make(case)
        q, k, v = tensors
        grouped = case["q_heads"] != case["kv_heads"]
        millis = []
        with torch.inference_mode(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            for _ in range(request["calls"]):
                start = time.perf_counter()
                scaled_dot_product_attention(q, k, v, is_causal=case["causal"], enable_gqa=grouped)
                millis.append((time.perf_counter() - start) * 1e3)
        print(json.dumps({"ms": millis}), flush=True)


main()
