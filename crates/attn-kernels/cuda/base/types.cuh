// Fixed-width types, because there is no standard header to take them from.
//
// The invariant: sizes are those that the host's mirror of the parameters assumes; a compiler that
// disagrees stops here.

#pragma once

namespace attn {

using u8 = unsigned char;
using u16 = unsigned short;
using i32 = int;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;

static_assert(sizeof(u16) == 2 && sizeof(u32) == 4 && sizeof(u64) == 8 && sizeof(void*) == 8);

// A 16-byte vector: the widest access of one thread.
struct alignas(16) Vec16 {
  u32 word[4];
};

// Stored element types, numbered as the host numbers them.
enum class DType : i32 { f32 = 0, f16 = 1, bf16 = 2, e4m3 = 3, e5m2 = 4 };

__host__ __device__ constexpr i32 size_of(DType type) {
  return type == DType::f32 ? 4 : type == DType::f16 || type == DType::bf16 ? 2 : 1;
}

constexpr int WARP = 32;

__host__ __device__ constexpr i32 min_of(i32 a, i32 b) { return a < b ? a : b; }
__device__ constexpr i32 max_of(i32 a, i32 b) { return a > b ? a : b; }
__device__ constexpr i32 clamp_of(i32 x, i32 lo, i32 hi) { return min_of(max_of(x, lo), hi); }
__host__ __device__ constexpr i32 ceil_div(i32 a, i32 b) { return (a + b - 1) / b; }

constexpr float NEG_INF = __builtin_bit_cast(float, 0xFF800000u);
constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;

}  // namespace attn
