#!/usr/bin/env python3
"""Writes wgmma.cuh: the widths of the warpgroup product that kernels use, in each type.

An instruction of width n names n / 2 accumulators, so that its wrapper cannot be written once for all widths.
With --print it prints the file instead: `cargo xtask tidy` compares.
"""

import os
import sys
import textwrap

HEADER = """\
// Warpgroup matrix products. Written by wgmma.py.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-instructions
//
// wgmma.mma_async.sync.aligned.m64nNkK.f32.TYPE.TYPE: d += a b for the 64 rows of a warpgroup, d =
// a b where `scale_d` is 0; k is 16 elements of 16 bits, or 32 of e4m3. Warp w of the group holds
// rows 16 w .. 16 w + 15 of d and, of 64 x k registers, of a: 16 bits as in m16n8k16 (ptx/mma.cuh),
// one 8-column tile after the other; e4m3 with four elements where 16 bits have two. `ss`: a and b
// in shared memory, both with k contiguous. `ss_trans_b`: the same, b with n contiguous;
// `ss_trans_ab`: a with m contiguous as well.
// `rs`: a in registers, b with n contiguous (trans-b), or
// with k contiguous for e4m3, which knows nothing else. Descriptors: tile/descriptor.cuh.
// Who executes: all four warps of a warpgroup, converged. Minimum sm_90a. Registers of d and a belong to the
// product until wgmma_wait_group says that it has ended.

#pragma once

#include "base/types.cuh"

namespace attn::ptx {

// wgmma.fence.sync.aligned: orders earlier accesses to registers of d and a before the products that follow.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// wgmma.commit_group.sync.aligned: the products since the last one form a group.
__device__ inline void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// wgmma.wait_group.sync.aligned N: all but the N latest groups have ended.
template <int N>
__device__ inline void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// The products of one width and type.
template <int N, DType TYPE>
struct Wgmma;
"""


def wrap(items, indent):
    text = ", ".join(items)
    lines = textwrap.wrap(text, 100 - indent - 4, break_long_words=False)
    return lines


def asm(n, dtype, is_rs, trans=""):
    count = n // 2
    k = 32 if dtype == "e4m3" else 16
    names = [f"%{i}" for i in range(count)]
    # No blanks between names: they would be a third of the file.
    lines = [line.replace(", ", ",") for line in wrap(names, -10)]
    quoted = "\n".join(f'        "{line}"' for line in lines)
    if is_rs:
        a = "{" + ", ".join(f"%{count + i}" for i in range(4)) + "}"
        b, flag = f"%{count + 4}", f"%{count + 5}"
        transposed = ", 1" if k == 16 else ""
        tail = f"}}, {a}, {b}, p, 1, 1{transposed}; }}"
        inputs = ['"r"(a[0])', '"r"(a[1])', '"r"(a[2])', '"r"(a[3])', '"l"(b)', '"r"(scale_d)']
        signature = f"static void rs(float (&d)[{count}], const u32 (&a)[4], u64 b, i32 scale_d)"
    else:
        a, b, flag = f"%{count}", f"%{count + 1}", f"%{count + 2}"
        transposed = "" if k != 16 else {"": ", 0, 0", "b": ", 0, 1", "ab": ", 1, 1"}[trans]
        tail = f"}}, {a}, {b}, p, 1, 1{transposed}; }}"
        inputs = ['"l"(a)', '"l"(b)', '"r"(scale_d)']
        name = f"ss_trans_{trans}" if trans else "ss"
        signature = f"static void {name}(float (&d)[{count}], u64 a, u64 b, i32 scale_d)"
    outputs = wrap([f'"+f"(d[{i}])' for i in range(count)], 10)
    outputs = ("\n" + " " * 10).join(outputs)
    return f"""\
  __device__ {signature} {{
    asm volatile(
        "{{ .reg .pred p; setp.ne.b32 p, {flag}, 0; "
        "wgmma.mma_async.sync.aligned.m64n{n}k{k}.f32.{dtype}.{dtype} {{"
{quoted}
        "{tail}"
        : {outputs}
        : {", ".join(inputs)});
  }}
"""


def main():
    out = [HEADER]
    for dtype in ("f16", "bf16", "e4m3"):
        widths = (8, 32, 64, 72, 96, 128, 192, 256)
        for n in widths:
            body = []
            if n in (8, 32, 72) and dtype == "e4m3":
                continue
            if n in (8, 32, 64, 96, 128):
                body.append(asm(n, dtype, False))
            if n in (72, 128) and dtype != "e4m3":
                body.append(asm(n, dtype, False, "b"))
            if n in (64, 128) and dtype != "e4m3":
                body.append(asm(n, dtype, False, "ab"))
            if n in (64, 128, 192, 256):
                body.append(asm(n, dtype, True))
            out.append(f"\ntemplate <>\nstruct Wgmma<{n}, DType::{dtype}> {{\n" + "\n".join(body) + "};\n")
    out.append("\n}  // namespace attn::ptx\n")
    if sys.argv[1:] == ["--print"]:
        sys.stdout.write("".join(out))
        return
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "wgmma.cuh")
    with open(path, "w", encoding="utf-8") as file:
        file.write("".join(out))


main()
