// Logits to guess from: inputs and a head in 8 bits, each row of either with its own scale. Half of the instructions for products, and half
// of the bytes, of bf16.
#include <algorithm>
#include <vector>

#include "calls.h"
#include "simd.h"
#include "threads.h"

namespace {

constexpr int kColumns = 64, kInner = 4;  // of the head lie together: column after column, `kInner` bytes of each
constexpr int64_t kTask = 512;            // columns
constexpr int kZero = 128;                // what a weight of 0 is stored as

// A row of x as 8 bits. Returns their scale; `too_large` is what the sums of products with any column come out too large by, since weights
// are stored without a sign.
template <class T>
float narrow_row(const T* x, int64_t inner, int8_t* out, int32_t& too_large) {
  Vec most = splat(0x1p-100f);  // so that zeros have a scale
  const auto part = [&](int64_t k) { return static_cast<int>(std::min<int64_t>(kLanes, inner - k)); };
  for (int64_t k = 0; k < inner; k += kLanes) {
    const Vec one = load_part(x + k, part(k));
    most = max(most, max(one, sub(zero(), one)));
  }
  const float scale = largest(most) / 127.0f;
  const Vec inverse = splat(1.0f / scale);
  int32_t total = 0;
  for (int64_t k = 0; k < inner; k += kLanes) {
    float values[kLanes];
    // What is no number becomes the second of two.
    store(values, min(max(round_even(mul(load_part(x + k, part(k)), inverse)), splat(-127.0f)), splat(127.0f)));
    for (int i = 0; i < part(k); ++i) {
      out[k + i] = static_cast<int8_t>(values[i]);
      total += out[k + i];
    }
  }
  too_large = kZero * total;
  return scale;
}

// `kColumns` columns times a row.
void dot_bytes(const int8_t* x, const uint8_t* w, int64_t steps, int32_t* sums) {
#ifdef __AVX512VNNI__
  constexpr int kRegs = kColumns / 16;
  __m512i acc[kRegs];
  for (auto& one : acc) one = _mm512_setzero_si512();
  for (int64_t k = 0; k < steps; ++k) {
    int32_t four;
    std::memcpy(&four, x + k * kInner, sizeof(four));
    const __m512i value = _mm512_set1_epi32(four);
#pragma GCC unroll 4
    for (int i = 0; i < kRegs; ++i) acc[i] = _mm512_dpbusd_epi32(acc[i], _mm512_loadu_si512(w + (k * kRegs + i) * 64), value);
  }
  for (int i = 0; i < kRegs; ++i) _mm512_storeu_si512(sums + i * 16, acc[i]);
#else
  std::fill(sums, sums + kColumns, 0);
  for (int64_t k = 0; k < steps; ++k)
    for (int i = 0; i < kColumns * kInner; ++i) sums[i / kInner] += x[k * kInner + i % kInner] * w[k * kColumns * kInner + i];
#endif
}

template <class T>
void guess_rows(
    const T* x, int64_t x_row, int64_t rows, const uint8_t* w, const float* scales, int64_t outer, int64_t inner, float* out,
    int64_t num_threads) {
  const int64_t steps = (inner + kInner - 1) / kInner, width = steps * kInner;
  thread_local std::vector<int8_t> narrow;
  thread_local std::vector<float> x_scales;
  thread_local std::vector<int32_t> extras;
  narrow.assign(rows * width, 0), x_scales.resize(rows), extras.resize(rows);
  for (int64_t i = 0; i < rows; ++i) x_scales[i] = narrow_row(x + i * x_row, inner, narrow.data() + i * width, extras[i]);
  const int8_t* const values = narrow.data();
  const float* const of_rows = x_scales.data();
  const int32_t* const too_large = extras.data();
  threads::share(num_threads, (outer + kTask - 1) / kTask, [=](int64_t task) {
    const int64_t end = std::min(outer, (task + 1) * kTask);
    for (int64_t j = task * kTask; j < end; j += kColumns)
      for (int64_t i = 0; i < rows; ++i) {
        int32_t sums[kColumns];
        dot_bytes(values + i * width, w + j * width, steps, sums);
        for (int64_t c = 0; c < std::min<int64_t>(kColumns, end - j); ++c)
          out[i * outer + j + c] = static_cast<float>(sums[c] - too_large[i]) * (of_rows[i] * scales[j + c]);
      }
  });
}

}  // namespace

// out [rows, outer] = x times the rows of a head [outer, inner], nearly. w: the head in bytes, 128 for 0, [outer / 64, inner / 4, 64, 4] with
// both rounded up; scales [outer].
EXPORT void guess(
    int64_t is_bf16, const void* x, int64_t x_row, int64_t rows, const uint8_t* w, const float* scales, int64_t outer, int64_t inner, float* out,
    int64_t num_threads) {
  if (is_bf16)
    guess_rows(static_cast<const bf16*>(x), x_row, rows, w, scales, outer, inner, out, num_threads);
  else
    guess_rows(static_cast<const float*>(x), x_row, rows, w, scales, outer, inner, out, num_threads);
}

REPEATABLE(guess)
