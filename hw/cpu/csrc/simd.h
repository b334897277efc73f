// Vectors of fp32 and bf16 for two kinds of CPU: AVX-512 with bf16 products, and AVX2. Kernels are written once, against this file.
//
// bf16 is carried as its 16 bits. `Vec` holds kLanes fp32 values. `Elem<T>` reads 64 (32) bytes of T as one register and adds the products
// of two such registers to a Vec; in which lane a product lands depends on its place in the register alone.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#define EXPORT extern "C" __attribute__((visibility("default")))

struct bf16 {
  uint16_t bits;
};
struct e4m3 {
  uint8_t bits;
};

#ifdef __AVX512BF16__

using Vec = __m512;
constexpr int kLanes = 16;

inline __mmask16 first(int n) { return static_cast<__mmask16>((1u << n) - 1); }
inline Vec zero() { return _mm512_setzero_ps(); }
inline Vec splat(float x) { return _mm512_set1_ps(x); }
inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline Vec load_part(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
inline void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
inline void store_part(float* p, Vec x, int n) { _mm512_mask_storeu_ps(p, first(n), x); }
inline Vec widen(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
inline Vec load(const bf16* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline Vec load_part(const bf16* p, int n) { return widen(_mm256_maskz_loadu_epi16(first(n), p)); }
// Its NaN aside, which no weight is: exponent and mantissa where fp32 has its last four and first three bits of them, and 2^120 too small.
inline Vec load(const e4m3* p) {
  __m512i wide = _mm512_slli_epi32(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 20);
  wide = _mm512_and_si512(wide, _mm512_set1_epi32(static_cast<int>(0x87f00000u)));
  return _mm512_mul_ps(_mm512_castsi512_ps(wide), _mm512_set1_ps(0x1p120f));
}
inline __m256i narrow(Vec x) { return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)); }
inline void store(bf16* p, Vec x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(x)); }
inline void store_part(bf16* p, Vec x, int n) { _mm256_mask_storeu_epi16(p, first(n), narrow(x)); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec round_even(Vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vec times_power(Vec x, Vec n) { return _mm512_scalef_ps(x, n); }
inline float sum(Vec x) { return _mm512_reduce_add_ps(x); }
inline float largest(Vec x) { return _mm512_reduce_max_ps(x); }

// The sums over lanes of four vectors, each added up in the same order.
inline __m128 sums(Vec a, Vec b, Vec c, Vec d) {
  Vec ab = add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)), cd = add(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  __m512d p = _mm512_castps_pd(ab), q = _mm512_castps_pd(cd);
  Vec all = add(_mm512_castpd_ps(_mm512_unpacklo_pd(p, q)), _mm512_castpd_ps(_mm512_unpackhi_pd(p, q)));
  __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

template <class T>
struct Elem;

template <>
struct Elem<float> {
  using Reg = __m512;
  static constexpr int kSize = 16;
  static Reg read(const float* p) { return load(p); }
  static Reg read_part(const float* p, int n) { return load_part(p, n); }
  static Vec dot(Vec acc, Reg a, Reg b) { return fma(a, b, acc); }
};

template <>
struct Elem<bf16> {
  using Reg = __m512bh;
  static constexpr int kSize = 32;
  static Reg read(const bf16* p) { return reinterpret_cast<Reg>(_mm512_loadu_si512(p)); }
  static Reg read_part(const bf16* p, int n) {
    return reinterpret_cast<Reg>(_mm512_maskz_loadu_epi16(static_cast<__mmask32>((1ull << n) - 1), p));
  }
  static Vec dot(Vec acc, Reg a, Reg b) { return _mm512_dpbf16_ps(acc, a, b); }
};

// Two rows side by side: `low` and `high` hold pairs (a[i], b[i]), in an order that `in_order` undoes once the pairs have become sums.
inline void pair_up(__m512bh a, __m512bh b, __m512bh& low, __m512bh& high) {
  low = reinterpret_cast<__m512bh>(_mm512_unpacklo_epi16(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
  high = reinterpret_cast<__m512bh>(_mm512_unpackhi_epi16(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
}
inline void in_order(Vec& low, Vec& high) {
  const __m512i first_half = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i second_half = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  Vec a = _mm512_permutex2var_ps(low, first_half, high), b = _mm512_permutex2var_ps(low, second_half, high);
  low = a, high = b;
}
inline __m512bh splat_pair(uint32_t bits) { return reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(bits))); }

#else  // AVX2

using Vec = __m256;
constexpr int kLanes = 8;

inline Vec zero() { return _mm256_setzero_ps(); }
inline Vec splat(float x) { return _mm256_set1_ps(x); }
inline __m256i first(int n) { return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)); }
inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline Vec load_part(const float* p, int n) { return _mm256_maskload_ps(p, first(n)); }
inline void store(float* p, Vec x) { _mm256_storeu_ps(p, x); }
inline void store_part(float* p, Vec x, int n) { _mm256_maskstore_ps(p, first(n), x); }
inline Vec widen(__m128i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }
inline __m128i narrow(Vec x) {  // to nearest, ties to even; NaN stays one
  __m256i bits = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
  return _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
}
inline Vec load(const bf16* p) { return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline Vec load_part(const bf16* p, int n) {
  __m128i x = _mm_setzero_si128();
  std::memcpy(&x, p, 2 * n);
  return widen(x);
}
inline Vec load(const e4m3* p) {  // see above
  __m256i wide = _mm256_slli_epi32(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))), 20);
  wide = _mm256_and_si256(wide, _mm256_set1_epi32(static_cast<int>(0x87f00000u)));
  return _mm256_mul_ps(_mm256_castsi256_ps(wide), _mm256_set1_ps(0x1p120f));
}
inline void store(bf16* p, Vec x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow(x)); }
inline void store_part(bf16* p, Vec x, int n) {
  __m128i bits = narrow(x);
  std::memcpy(p, &bits, 2 * n);
}
inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
inline Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec round_even(Vec x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vec times_power(Vec x, Vec n) {  // in two halves, so that neither power overflows
  __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1), bias = _mm256_set1_epi32(127);
  __m256i a = _mm256_slli_epi32(_mm256_add_epi32(half, bias), 23);
  __m256i b = _mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(whole, half), bias), 23);
  return mul(mul(x, _mm256_castsi256_ps(a)), _mm256_castsi256_ps(b));
}
inline __m128 sums(Vec a, Vec b, Vec c, Vec d) {
  Vec ab = add(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b)), cd = add(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
  __m256d p = _mm256_castps_pd(ab), q = _mm256_castps_pd(cd);
  Vec all = add(_mm256_castpd_ps(_mm256_unpacklo_pd(p, q)), _mm256_castpd_ps(_mm256_unpackhi_pd(p, q)));
  return _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
}
inline float sum(Vec x) { return _mm_cvtss_f32(sums(x, x, x, x)); }
inline float largest(Vec x) {
  float lanes[8];
  store(lanes, x);
  float best = lanes[0];
  for (int i = 1; i < 8; ++i) best = lanes[i] > best ? lanes[i] : best;
  return best;
}

template <class T>
struct Elem;

template <>
struct Elem<float> {
  using Reg = __m256;
  static constexpr int kSize = 8;
  static Reg read(const float* p) { return load(p); }
  static Reg read_part(const float* p, int n) { return load_part(p, n); }
  static Vec dot(Vec acc, Reg a, Reg b) { return fma(a, b, acc); }
};

template <>
struct Elem<bf16> {
  using Reg = __m256i;
  static constexpr int kSize = 16;
  static Reg read(const bf16* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static Reg read_part(const bf16* p, int n) {
    __m256i x = _mm256_setzero_si256();
    std::memcpy(&x, p, 2 * n);
    return x;
  }
  static Vec even(Reg x) { return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)); }
  static Vec odd(Reg x) { return _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(static_cast<int>(0xffff0000)))); }
  static Vec dot(Vec acc, Reg a, Reg b) { return fma(odd(a), odd(b), fma(even(a), even(b), acc)); }
};

inline void pair_up(__m256i a, __m256i b, __m256i& low, __m256i& high) {
  low = _mm256_unpacklo_epi16(a, b);
  high = _mm256_unpackhi_epi16(a, b);
}
inline void in_order(Vec& low, Vec& high) {
  Vec a = _mm256_permute2f128_ps(low, high, 0x20), b = _mm256_permute2f128_ps(low, high, 0x31);
  low = a, high = b;
}
inline __m256i splat_pair(uint32_t bits) { return _mm256_set1_epi32(static_cast<int>(bits)); }

#endif

inline Vec load_part(const e4m3* p, int n) {
  e4m3 whole[kLanes] = {};
  std::memcpy(whole, p, n);
  return load(whole);
}

// Four sums to memory, the first n of them.
inline void store_four(float* p, __m128 x, int n) {
  if (n == 4) {
    _mm_storeu_ps(p, x);
  } else {
    float four[4];
    _mm_storeu_ps(four, x);
    std::memcpy(p, four, 4 * n);
  }
}
inline uint16_t round_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline void store_four(bf16* p, __m128 x, int n) {
#ifdef __AVX512BF16__
  __m128i bits = reinterpret_cast<__m128i>(_mm_cvtneps_pbh(x));
#else
  __m128i bits = narrow(_mm256_castps128_ps256(x));
#endif
  if (n == 4) {
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), bits);
  } else {
    std::memcpy(p, &bits, 2 * n);
  }
}
inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
  uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, 4);
  return wide;
}
inline void from_float(float x, float& out) { out = x; }
inline void from_float(float x, bf16& out) { out.bits = round_bits(x); }

// What a Vec becomes on its way through memory as T.
inline Vec rounded(Vec x, const float*) { return x; }
inline Vec rounded(Vec x, const bf16*) { return widen(narrow(x)); }

// e^x within two units in the last place; exactly 0 from about -104 down, never beyond the largest number, NaN stays one.
inline Vec exp(Vec x) {
  x = min(splat(88.72f), max(splat(-105.0f), x));
  Vec n = round_even(mul(x, splat(1.44269504f)));
  Vec r = fma(n, splat(-0.693145752f), x);
  r = fma(n, splat(-1.42860677e-6f), r);
  Vec p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(mul(r, r), p, add(r, splat(1.0f)));
  return times_power(p, n);
}
inline Vec sigmoid(Vec x) { return div(splat(1.0f), add(splat(1.0f), exp(sub(zero(), x)))); }

// Call a generic lambda with n as a compile-time number, 1 <= n <= kMost.
template <int kMost, class F>
inline void with_count(int64_t n, F&& f) {
  if constexpr (kMost > 1) {
    if (n < kMost) return with_count<kMost - 1>(n, f);
  }
  f(std::integral_constant<int, kMost>());
}
