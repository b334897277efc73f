// Norms, rotation and cache write, row by row. They round where the ops in torch do, so that a row is the same alone and in a
// batch; only sums along a row are taken in another order.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "calls.h"
#include "simd.h"
#include "threads.h"

namespace {


// f(column, number of columns) for whole registers, then for what is left over.
template <class F>
inline void by_registers(int64_t dim, F&& f) {
  int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) f(d, std::integral_constant<int, kLanes>());
  if (d < dim) f(d, static_cast<int>(dim - d));
}
template <class T>
inline Vec load_some(const T* p, std::integral_constant<int, kLanes>) { return load(p); }
template <class T>
inline Vec load_some(const T* p, int n) { return load_part(p, n); }
template <class T>
inline void store_some(T* p, Vec x, std::integral_constant<int, kLanes>) { store(p, x); }
template <class T>
inline void store_some(T* p, Vec x, int n) { store_part(p, x, n); }

// out = x / sqrt(mean(x^2) + eps) * weight; out may be x.
template <class T>
void norm_row(const T* x, const T* weight, float eps, int64_t dim, T* out) {
  Vec squares = zero();
  by_registers(dim, [&](int64_t d, auto n) {
    const Vec v = load_some(x + d, n);
    squares = fma(v, v, squares);
  });
  const Vec factor = splat(1.0f / std::sqrt(sum(squares) / static_cast<float>(dim) + eps));
  by_registers(dim, [&](int64_t d, auto n) {
    store_some(out + d, mul(rounded(mul(load_some(x + d, n), factor), out), load_some(weight + d, n)), n);
  });
}

template <class T>
void add_norm(const T* x, const T* residual, const T* weight, float eps, int64_t rows, int64_t dim, T* normed, T* total, int threads) {
  threads::share_range(threads, rows, rows * dim, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* from = x + row * dim;
      if (residual) {
        T* to = total + row * dim;
        by_registers(dim, [&](int64_t d, auto n) {
          store_some(to + d, add(load_some(from + d, n), load_some(residual + row * dim + d, n)), n);
        });
        from = to;
      }
      norm_row(from, weight, eps, dim, normed + row * dim);
    }
  });
}

// Neighbouring pairs; out may be x.
template <class T>
void rotate(const T* x, const float* table, int64_t dim, T* out) {
  const float *cosine = table, *sine = table + dim / 2;
  for (int64_t i = 0; i < dim / 2; ++i) {
    const float a = to_float(x[2 * i]), b = to_float(x[2 * i + 1]);
    from_float(a * cosine[i] - b * sine[i], out[2 * i]);
    from_float(b * cosine[i] + a * sine[i], out[2 * i + 1]);
  }
}

template <class T>
void rotate_all(
    const T* x, int64_t x_row, int64_t x_head, const int64_t* positions, const float* table, int64_t rows, int64_t heads, int64_t dim, T* out,
    int64_t out_row, int64_t out_head, int threads) {
  threads::share_range(threads, rows, rows * heads * dim, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      for (int64_t head = 0; head < heads; ++head)
        rotate(x + row * x_row + head * x_head, table + positions[row] * dim, dim, out + row * out_row + head * out_head);
  });
}

template <class T>
void write_latents(
    const T* down, int64_t rows, const T* q_norm, int64_t q_dim, const T* kv_norm, int64_t latent, int64_t rope, float eps,
    const int64_t* positions, const float* table, const int64_t* slots, T* cache, T* q, T* entries, int threads) {
  const int64_t width = q_dim + latent + rope, entry = latent + rope;
  threads::share_range(threads, rows, rows * width, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* from = down + row * width;
      if (q_dim) norm_row(from, q_norm, eps, q_dim, q + row * q_dim);
      T* to = entries + row * entry;
      norm_row(from + q_dim, kv_norm, eps, latent, to);
      rotate(from + q_dim + latent, table + positions[row] * rope, rope, to + latent);
      if (slots[row] >= 0) std::memcpy(cache + slots[row] * entry, to, entry * sizeof(T));
    }
  });
}

}  // namespace

// See Ops.add_rms_norm and, with residual and total null, Ops.rms_norm.
EXPORT void add_rms_norm(
    int64_t is_bf16, const void* x, const void* residual, const void* weight, float eps, int64_t rows, int64_t dim, void* normed, void* total,
    int64_t threads) {
  auto run = [&](auto* as) {
    using T = std::remove_pointer_t<decltype(as)>;
    add_norm(
        static_cast<const T*>(x), static_cast<const T*>(residual), static_cast<const T*>(weight), eps, rows, dim, static_cast<T*>(normed),
        static_cast<T*>(total), static_cast<int>(threads));
  };
  is_bf16 ? run(static_cast<bf16*>(nullptr)) : run(static_cast<float*>(nullptr));
}

// See Ops.rope. Strides are in elements.
EXPORT void rope(
    int64_t is_bf16, const void* x, int64_t x_row, int64_t x_head, const int64_t* positions, const float* table, int64_t rows, int64_t heads,
    int64_t dim, void* out, int64_t out_row, int64_t out_head, int64_t threads) {
  auto run = [&](auto* as) {
    using T = std::remove_pointer_t<decltype(as)>;
    rotate_all(
        static_cast<const T*>(x), x_row, x_head, positions, table, rows, heads, dim, static_cast<T*>(out), out_row, out_head,
        static_cast<int>(threads));
  };
  is_bf16 ? run(static_cast<bf16*>(nullptr)) : run(static_cast<float*>(nullptr));
}

// See Ops.latent_write. q [rows, q_dim], entries [rows, latent + rope].
EXPORT void latent_write(
    int64_t is_bf16, const void* down, int64_t rows, const void* q_norm, int64_t q_dim, const void* kv_norm, int64_t latent, int64_t rope,
    float eps, const int64_t* positions, const float* table, const int64_t* slots, void* cache, void* q, void* entries, int64_t threads) {
  auto run = [&](auto* as) {
    using T = std::remove_pointer_t<decltype(as)>;
    write_latents(
        static_cast<const T*>(down), rows, static_cast<const T*>(q_norm), q_dim, static_cast<const T*>(kv_norm), latent, rope, eps, positions,
        table, slots, static_cast<T*>(cache), static_cast<T*>(q), static_cast<T*>(entries), static_cast<int>(threads));
  };
  is_bf16 ? run(static_cast<bf16*>(nullptr)) : run(static_cast<float*>(nullptr));
}

REPEATABLE(add_rms_norm)
REPEATABLE(rope)
REPEATABLE(latent_write)
