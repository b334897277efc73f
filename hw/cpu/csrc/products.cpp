// Matrix products of activations with weights as they lie in memory, sums in fp32.
//
// An element of a result is summed over the inner dimension in an order that depends on nothing but its length: not on how many rows
// there are, which thread it falls to, or where it stands in a tile. So a row's bits are the same in any batch.
#include <algorithm>
#include <type_traits>
#include <vector>

#include "calls.h"
#include "simd.h"
#include "threads.h"

namespace {

#ifdef __AVX512BF16__
constexpr int kTileRows = 6;  // 24 sums, 4 weights and a row's piece fill the 32 registers
constexpr int kSpreadSums = 16;
#else
constexpr int kTileRows = 2;
constexpr int kSpreadSums = 8;
#endif
constexpr int kTileColumns = 4;
constexpr int kBlockRows = 24;              // rows that stay in the first-level cache while weights pass
constexpr int64_t kAheadBytes = 32 << 10;   // of weights that are on their way
constexpr int kFewRows = 2;                 // nothing is done for them but reading
constexpr int64_t kNearBytes = 2 << 10;     // of weights that are on their way then
constexpr int64_t kAheadRows = 32;          // the same, where weights lie by inner rows
constexpr int64_t kNarrow = 128;            // columns whose sums stay in registers rather than in the cache
constexpr int kShortPieces = 8;             // registers that hold a short row of x
constexpr int64_t kShortRows = 4;           // more are better served by tiles
constexpr int64_t kShortBytes = 16 << 10;   // of weights that pass before the next two such rows come
constexpr int64_t kPanelBytes = 16 << 10;   // of a weight in FP8 that are dense at a time
constexpr int64_t kWorthSharing = 1 << 18;  // multiplications, about 4 us of them: cores that share no cache need 1 to hand results over
constexpr int64_t kGroupsWorthSharing = 1 << 16;  // the same for groups, whose weights come from farther: not all are used in every step

// Rows of x times rows of w: out[i, j] = sum over k of x[i, k] * w[j, k], for kRows rows and up to four columns. kAtOnce: columns that
// are worked on together; one, where there is nothing but to wait for weights, which come fastest from one end to the other. Meanwhile kAsked
// rows of weights to come are asked for, `soon` and those behind it: a CPU does so by itself, but neither far nor for four rows at once.
template <class T, int kRows, int kAtOnce, int kAsked>
void dot_tile(
    const T* x, int64_t x_row, const T* const* w, T* out, int64_t out_row, int64_t inner, int columns, const T* soon, int64_t w_row) {
  using E = Elem<T>;
  Vec acc[kRows][kTileColumns];
  const int64_t whole = inner / E::kSize * E::kSize;
  const int rest = static_cast<int>(inner - whole);
#pragma GCC unroll 4
  for (int left = 0; left < kTileColumns; left += kAtOnce) {
#pragma GCC unroll 6
    for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
      for (int j = left; j < left + kAtOnce; ++j) acc[i][j] = zero();
    for (int64_t k = 0; k < whole; k += E::kSize) {
      typename E::Reg b[kAtOnce];
#pragma GCC unroll 4
      for (int j = 0; j < kAtOnce; ++j) b[j] = E::read(w[left + j] + k);
#pragma GCC unroll 4
      for (int j = 0; j < kAsked; ++j) _mm_prefetch(reinterpret_cast<const char*>(soon + (left + j) * w_row + k), _MM_HINT_T1);
#pragma GCC unroll 6
      for (int i = 0; i < kRows; ++i) {
        const typename E::Reg a = E::read(x + i * x_row + k);
#pragma GCC unroll 4
        for (int j = 0; j < kAtOnce; ++j) acc[i][left + j] = E::dot(acc[i][left + j], a, b[j]);
      }
    }
    if (!rest) continue;
#pragma GCC unroll 4
    for (int j = left; j < left + kAtOnce; ++j) {
      const typename E::Reg b = E::read_part(w[j] + whole, rest);
#pragma GCC unroll 6
      for (int i = 0; i < kRows; ++i) acc[i][j] = E::dot(acc[i][j], E::read_part(x + i * x_row + whole, rest), b);
    }
  }
#pragma GCC unroll 6
  for (int i = 0; i < kRows; ++i) store_four(out + i * out_row, sums(acc[i][0], acc[i][1], acc[i][2], acc[i][3]), columns);
}

// One or two short rows of x, kPieces whole registers each, stay in registers while weights pass, one row of them after the other: then
// there is nothing to load but weights.
template <class T, int kRows, int kPieces>
void dot_short(const T* x, int64_t x_row, const T* w, int64_t w_row, T* out, int64_t out_row, int64_t begin, int64_t end) {
  using E = Elem<T>;
  typename E::Reg a[kRows][kPieces];
  const int64_t near = kNearBytes / static_cast<int64_t>(kPieces * E::kSize * sizeof(T)) * w_row;
#pragma GCC unroll 2
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 8
    for (int p = 0; p < kPieces; ++p) a[i][p] = E::read(x + i * x_row + p * E::kSize);
  for (int64_t j = begin; j < end; j += kTileColumns) {
    Vec acc[kRows][kTileColumns];
#pragma GCC unroll 4
    for (int c = 0; c < kTileColumns; ++c) {
      const T* column = w + std::min(j + c, end - 1) * w_row;
#pragma GCC unroll 2
      for (int i = 0; i < kRows; ++i) acc[i][c] = zero();
#pragma GCC unroll 8
      for (int p = 0; p < kPieces; ++p) {
        const typename E::Reg b = E::read(column + p * E::kSize);
        if (kRows == 1) _mm_prefetch(reinterpret_cast<const char*>(column + near + p * E::kSize), _MM_HINT_T1);
#pragma GCC unroll 2
        for (int i = 0; i < kRows; ++i) acc[i][c] = E::dot(acc[i][c], a[i][p], b);
      }
    }
    const int columns = static_cast<int>(std::min<int64_t>(kTileColumns, end - j));
#pragma GCC unroll 2
    for (int i = 0; i < kRows; ++i) store_four(out + i * out_row + j, sums(acc[i][0], acc[i][1], acc[i][2], acc[i][3]), columns);
  }
}

// Columns `begin .. end` of all rows of one group. near: they are in a cache.
template <class T>
void dot_columns(
    const T* x, int64_t x_row, const T* w, int64_t w_row, T* out, int64_t out_row, int64_t rows, int64_t inner, int64_t begin, int64_t end,
    bool near = false) {
  const int64_t row_bytes = inner * static_cast<int64_t>(sizeof(T));
  if (kLanes == 16 && rows <= kShortRows && inner % Elem<T>::kSize == 0 && inner <= kShortPieces * Elem<T>::kSize) {
    const int64_t step = rows > 2 ? std::max<int64_t>(1, kShortBytes / (kTileColumns * row_bytes)) * kTileColumns : end - begin;
    return with_count<kShortPieces>(inner / Elem<T>::kSize, [&](auto pieces) {
      for (int64_t j = begin; j < end; j += step)
        for (int64_t i = 0; i < rows; i += 2)
          with_count<2>(rows - i, [&](auto count) {
            constexpr auto tile = dot_short<T, decltype(count)::value, decltype(pieces)::value>;
            tile(x + i * x_row, x_row, w, w_row, out + i * out_row, out_row, j, std::min(end, j + step));
          });
    });
  }
  const bool few = rows <= kFewRows;
  const int64_t at_once = few ? 1 : kTileColumns, bytes = few ? kNearBytes : kAheadBytes;
  const int64_t ahead = std::max<int64_t>(1, bytes / (at_once * row_bytes)) * at_once;
  for (int64_t top = 0; top < rows; top += kBlockRows) {
    const int64_t bottom = std::min(rows, top + kBlockRows), tiles = (bottom - top + kTileRows - 1) / kTileRows;
    for (int64_t j = begin; j < end; j += kTileColumns) {
      const T* four[kTileColumns];
      for (int c = 0; c < kTileColumns; ++c) four[c] = w + std::min(j + c, end - 1) * w_row;
      const int columns = static_cast<int>(std::min<int64_t>(kTileColumns, end - j));
      for (int64_t i = top, tile = 0; i < bottom; i += kTileRows, ++tile)
        with_count<kTileRows>(std::min<int64_t>(kTileRows, bottom - i), [&](auto count) {
          constexpr int kRows = decltype(count)::value;
          auto multiply = dot_tile<T, kRows, kTileColumns, 0>;
          // Each tile asks for its part of the next four: more at once than a CPU can have on their way, and it stands still.
          const int64_t first = kTileColumns * tile / tiles, asked = kTileColumns * (tile + 1) / tiles - first;
          if (few && !near)
            multiply = dot_tile<T, kRows, 1, 1>;
          else if (top == 0 && asked && !near)
            multiply = asked == 4 ? dot_tile<T, kRows, kTileColumns, 4> : asked == 2 ? dot_tile<T, kRows, kTileColumns, 2>
                                                                                      : dot_tile<T, kRows, kTileColumns, 1>;
          const T* soon = four[0] + (ahead + first) * w_row;
          multiply(x + i * x_row, x_row, four, out + i * out_row + j, out_row, inner, columns, soon, w_row);
        });
    }
  }
}

// A weight that lies by inner rows, [inner, outer], in strips of as many columns as two Vecs hold: kInner of its rows at a time, and what
// of x goes with them. `both`: whether there are two rows left.
template <class T>
struct Strip;

template <>
struct Strip<float> {
  static constexpr int kInner = 1;
  using Reg = Vec;
  static Reg value(const float* x, bool) { return splat(*x); }
  static void read(const float* w, int64_t, bool, int columns, Reg& left, Reg& right) {
    left = load_part(w, std::min(columns, kLanes));
    right = columns > kLanes ? load_part(w + kLanes, columns - kLanes) : zero();
  }
  static Vec dot(Vec acc, Reg value, Reg w) { return fma(value, w, acc); }
  static void finish(Vec&, Vec&) {}
};

template <>
struct Strip<bf16> {
  static constexpr int kInner = 2;
  using Reg = Elem<bf16>::Reg;
  static Reg value(const bf16* x, bool both) {
    uint32_t bits = x->bits;
    if (both) std::memcpy(&bits, x, sizeof(bits));
    return splat_pair(bits);
  }
  static Reg row(const bf16* w, int columns) {
    return columns == Elem<bf16>::kSize ? Elem<bf16>::read(w) : Elem<bf16>::read_part(w, columns);
  }
  static void read(const bf16* w, int64_t w_row, bool both, int columns, Reg& left, Reg& right) {
    pair_up(row(w, columns), both ? row(w + w_row, columns) : Elem<bf16>::read_part(w, 0), left, right);
  }
  static Vec dot(Vec acc, Reg value, Reg w) { return Elem<bf16>::dot(acc, value, w); }
  static void finish(Vec& left, Vec& right) { in_order(left, right); }
};

// kRows rows of x times kStrips strips, of `columns` columns each. fresh: the weights come from memory.
template <class T, int kRows, int kStrips>
void spread_tile(const T* x, int64_t x_row, const T* w, int64_t w_row, T* out, int64_t out_row, int64_t inner, int columns, bool fresh) {
  using S = Strip<T>;
  Vec left[kRows][kStrips], right[kRows][kStrips];
  for (int i = 0; i < kRows; ++i)
    for (int s = 0; s < kStrips; ++s) left[i][s] = right[i][s] = zero();
  for (int64_t k = 0; k < inner; k += S::kInner) {
    const bool both = k + 1 < inner;
    typename S::Reg values[kRows];
#pragma GCC unroll 6
    for (int i = 0; i < kRows; ++i) values[i] = S::value(x + i * x_row + k, both);
#pragma GCC unroll 8
    for (int s = 0; s < kStrips; ++s) {
      const T* p = w + k * w_row + s * 2 * kLanes;
      // A strip is too narrow for the machine to see what comes next: further down, and at the end the strips beside these.
      const T* soon = p + (k + kAheadRows < inner ? kAheadRows * w_row : (kAheadRows - inner) * w_row + kStrips * 2 * kLanes);
      for (int row = 0; fresh && row < S::kInner; ++row)
        for (std::size_t byte = 0; byte < 2 * kLanes * sizeof(T); byte += 64)
          _mm_prefetch(reinterpret_cast<const char*>(soon + row * w_row) + byte, _MM_HINT_T1);
      typename S::Reg a, b;
      S::read(p, w_row, both, columns, a, b);
#pragma GCC unroll 6
      for (int i = 0; i < kRows; ++i) {
        left[i][s] = S::dot(left[i][s], values[i], a);
        right[i][s] = S::dot(right[i][s], values[i], b);
      }
    }
  }
#pragma GCC unroll 6
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 8
    for (int s = 0; s < kStrips; ++s) {
      S::finish(left[i][s], right[i][s]);
      T* to = out + i * out_row + s * 2 * kLanes;
      store_part(to, left[i][s], std::min(columns, kLanes));
      if (columns > kLanes) store_part(to + kLanes, right[i][s], columns - kLanes);
    }
}

// The same for one or two rows, `columns` columns each: weights pass from one end to the other, sums stay in the first-level cache.
template <class T, int kRows>
void spread_few(const T* x, int64_t x_row, const T* w, int64_t w_row, T* out, int64_t out_row, int64_t inner, int64_t columns) {
  using S = Strip<T>;
  constexpr int kAtOnce = 4, kStrip = 2 * kLanes;
  const int64_t num_strips = (columns + kStrip - 1) / kStrip;
  thread_local std::vector<float> sums;
  sums.assign(kRows * num_strips * kStrip, 0.0f);
  auto add = [&](int64_t k, auto at_once) {
    constexpr int kCount = decltype(at_once)::value;
    typename S::Reg values[kCount][kRows];
    for (int u = 0; u < kCount; ++u)
      for (int i = 0; i < kRows; ++i) values[u][i] = S::value(x + i * x_row + k + u * S::kInner, k + u * S::kInner + 1 < inner);
    for (int64_t s = 0; s < num_strips; ++s) {
      const int n = static_cast<int>(std::min<int64_t>(kStrip, columns - s * kStrip));
      const T* p = w + k * w_row + s * kStrip;
      float* to = sums.data() + s * kRows * kStrip;
      Vec left[kRows], right[kRows];
      for (int i = 0; i < kRows; ++i) left[i] = load(to + i * kStrip), right[i] = load(to + i * kStrip + kLanes);
      for (int u = 0; u < kCount; ++u, p += S::kInner * w_row) {
        for (int row = 0; row < S::kInner; ++row)
          for (std::size_t byte = 0; byte < kStrip * sizeof(T); byte += 64)
            _mm_prefetch(reinterpret_cast<const char*>(p + (kCount * S::kInner + row) * w_row) + byte, _MM_HINT_T1);
        typename S::Reg a, b;
        S::read(p, w_row, k + u * S::kInner + 1 < inner, n, a, b);
        for (int i = 0; i < kRows; ++i) left[i] = S::dot(left[i], values[u][i], a), right[i] = S::dot(right[i], values[u][i], b);
      }
      for (int i = 0; i < kRows; ++i) store(to + i * kStrip, left[i]), store(to + i * kStrip + kLanes, right[i]);
    }
  };
  int64_t k = 0;
  for (; k + kAtOnce * S::kInner <= inner; k += kAtOnce * S::kInner) add(k, std::integral_constant<int, kAtOnce>());
  for (; k < inner; k += S::kInner) add(k, std::integral_constant<int, 1>());
  for (int64_t s = 0; s < num_strips; ++s)
    for (int i = 0; i < kRows; ++i) {
      const int n = static_cast<int>(std::min<int64_t>(kStrip, columns - s * kStrip));
      const float* from = sums.data() + (s * kRows + i) * kStrip;
      Vec left = load(from), right = load(from + kLanes);
      S::finish(left, right);
      T* to = out + i * out_row + s * kStrip;
      store_part(to, left, std::min(n, kLanes));
      if (n > kLanes) store_part(to + kLanes, right, n - kLanes);
    }
}

template <class T>
void spread_columns(
    const T* x, int64_t x_row, const T* w, int64_t w_row, T* out, int64_t out_row, int64_t rows, int64_t inner, int64_t begin, int64_t end) {
  if (rows <= kFewRows && end - begin > kNarrow)
    return with_count<kFewRows>(rows, [&](auto count) {
      spread_few<T, decltype(count)::value>(x, x_row, w + begin, w_row, out + begin, out_row, inner, end - begin);
    });
  constexpr int kStrip = 2 * kLanes;
  const int64_t step = rows > kTileRows ? kStrip : end - begin;  // many rows: a strip stays in the first-level cache for all of them
  for (int64_t low = begin; low < end; low += step)
    for (int64_t i = 0; i < rows; i += kTileRows)
      with_count<kTileRows>(std::min<int64_t>(kTileRows, rows - i), [&](auto count) {
        constexpr int kRows = decltype(count)::value, kStrips = std::max(1, kSpreadSums / (2 * kRows));
        const int64_t high = std::min(end, low + step);
        int64_t j = low;
        for (; j + kStrips * kStrip <= high; j += kStrips * kStrip)
          spread_tile<T, kRows, kStrips>(x + i * x_row, x_row, w + j, w_row, out + i * out_row + j, out_row, inner, kStrip, i == 0);
        for (; j < high; j += kStrip) {
          const int columns = static_cast<int>(std::min<int64_t>(kStrip, high - j));
          spread_tile<T, kRows, 1>(x + i * x_row, x_row, w + j, w_row, out + i * out_row + j, out_row, inner, columns, i == 0);
        }
      });
}

struct Groups {
  int64_t count;
  const int64_t* starts;  // first row of each group in x and out; null: the steps say where it is
  const int32_t* counts;  // rows of each group; null: `rows`
  int64_t rows;
  int64_t x_step, w_step, out_step;  // elements from one group to the next

  int64_t num_rows(int64_t g) const { return counts ? counts[g] : rows; }
};

// Each group's rows times its weight. Threads take runs of columns, so that every weight is read by one of them only.
template <class T, class W, class Columns>
void each_group(
    const T* x, int64_t x_row, const W* w, T* out, int64_t out_row, const Groups& groups, int64_t outer, int64_t inner, int align,
    int64_t num_threads, Columns&& columns) {
  thread_local std::vector<int64_t> busy;  // groups with rows; helpers look into the caller's
  busy.clear();
  int64_t rows = 0;
  for (int64_t g = 0; g < groups.count; ++g)
    if (const int64_t more = groups.num_rows(g)) busy.push_back(g), rows += more;
  if (busy.empty() || !outer) return;
  if (rows * outer * inner < (groups.counts ? kGroupsWorthSharing : kWorthSharing)) num_threads = 1;
  const int64_t* const of = busy.data();
  const int64_t count = static_cast<int64_t>(busy.size());
  // A few runs for each thread even out what the machine takes from one of them; shorter ones would only be counted.
  const int64_t wanted = (outer * count + 4 * num_threads - 1) / (4 * num_threads);
  const int64_t run = (std::clamp<int64_t>(wanted, 32, 512) + align - 1) / align * align;
  const int64_t runs = (outer + run - 1) / run;
  threads::share(num_threads, count * runs, [&, of](int64_t task) {
    const int64_t g = of[task % count], begin = task / count * run, end = std::min(outer, begin + run);
    const int64_t rows = groups.num_rows(g);
    const T* from = x + (groups.starts ? groups.starts[g] * x_row : g * groups.x_step);
    T* to = out + (groups.starts ? groups.starts[g] * out_row : g * groups.out_step);
    columns(g, from, w + g * groups.w_step, to, rows, begin, end);
  });
}

template <class T>
void products(
    const T* x, int64_t x_row, const T* w, int64_t w_row, T* out, int64_t out_row, const Groups& groups, int64_t outer, int64_t inner,
    bool by_inner, int64_t num_threads) {
  each_group(
      x, x_row, w, out, out_row, groups, outer, inner, by_inner ? 2 * kLanes : kTileColumns, num_threads,
      [&](int64_t, const T* from, const T* weight, T* to, int64_t rows, int64_t begin, int64_t end) {
        if (by_inner)
          spread_columns(from, x_row, weight, w_row, to, out_row, rows, inner, begin, end);
        else
          dot_columns(from, x_row, weight, w_row, to, out_row, rows, inner, begin, end);
      });
}

// Of a weight in block-FP8: one scale for each block of rows and inner columns.
struct Scales {
  const float* first;
  int64_t row, step;  // elements from one row of blocks to the next, from one group to the next
  int64_t block_rows, block_inner;
};

// A row of a weight as T, as if it had been so all along.
template <class T>
void widen_row(const e4m3* w, const float* scales, int64_t block, int64_t inner, T* out) {
  constexpr int kLine = 64;
  for (int64_t k = 0; k < inner; ++scales) {
    const int64_t end = std::min(inner, k + block);
    const Vec scale = splat(*scales);
    for (; k + kLine <= end; k += kLine) {
      _mm_prefetch(reinterpret_cast<const char*>(w + k + kNearBytes), _MM_HINT_T1);
#pragma GCC unroll 8
      for (int i = 0; i < kLine; i += kLanes) store(out + k + i, mul(load(w + k + i), scale));
    }
    for (; k < end; k = std::min(end, k + kLanes)) {
      const int n = static_cast<int>(std::min<int64_t>(kLanes, end - k));
      store_part(out + k, mul(load_part(w + k, n), scale), n);
    }
  }
}

// A few columns at a time become T, and are multiplied while they are near.
template <class T>
void quant_products(
    const T* x, int64_t x_row, const e4m3* w, int64_t w_row, T* out, int64_t out_row, const Groups& groups, int64_t outer, int64_t inner,
    const Scales& scales, int64_t num_threads) {
  const int64_t at_once = std::max<int64_t>(1, kPanelBytes / (kTileColumns * inner * static_cast<int64_t>(sizeof(T)))) * kTileColumns;
  each_group(
      x, x_row, w, out, out_row, groups, outer, inner, kTileColumns, num_threads,
      [&](int64_t g, const T* from, const e4m3* weight, T* to, int64_t rows, int64_t begin, int64_t end) {
        thread_local std::vector<T> panel;
        panel.resize(at_once * inner);
        for (int64_t low = begin; low < end; low += at_once) {
          const int64_t high = std::min(end, low + at_once);
          for (int64_t j = low; j < high; ++j) {
            const float* of_row = scales.first + g * scales.step + j / scales.block_rows * scales.row;
            widen_row(weight + j * w_row, of_row, scales.block_inner, inner, panel.data() + (j - low) * inner);
          }
          dot_columns(from, x_row, panel.data(), inner, to + low, out_row, rows, inner, 0, high - low, true);
        }
      });
}

}  // namespace

// For each of `count` groups g and each of its rows: out = x @ w[g].T, or x @ w[g] if by_inner. All of one dtype, rows may be strided; with
// scales (else null) the weight is e4m3 and by outer rows.
EXPORT void product(
    int64_t is_bf16, const void* x, int64_t x_row, const void* w, int64_t w_row, void* out, int64_t out_row, int64_t count,
    const int64_t* starts, const int32_t* counts, int64_t rows, int64_t x_step, int64_t w_step, int64_t out_step, int64_t outer,
    int64_t inner, int64_t by_inner, const float* scales, int64_t scales_row, int64_t scales_step, int64_t block_rows, int64_t block_inner,
    int64_t num_threads) {
  const Groups groups{count, starts, counts, rows, x_step, w_step, out_step};
  const Scales quant{scales, scales_row, scales_step, block_rows, block_inner};
  if (scales && is_bf16)
    quant_products(
        static_cast<const bf16*>(x), x_row, static_cast<const e4m3*>(w), w_row, static_cast<bf16*>(out), out_row, groups, outer, inner, quant,
        num_threads);
  else if (scales)
    quant_products(
        static_cast<const float*>(x), x_row, static_cast<const e4m3*>(w), w_row, static_cast<float*>(out), out_row, groups, outer, inner, quant,
        num_threads);
  else if (is_bf16)
    products(
        static_cast<const bf16*>(x), x_row, static_cast<const bf16*>(w), w_row, static_cast<bf16*>(out), out_row, groups, outer, inner,
        by_inner != 0, num_threads);
  else
    products(
        static_cast<const float*>(x), x_row, static_cast<const float*>(w), w_row, static_cast<float*>(out), out_row, groups, outer, inner,
        by_inner != 0, num_threads);
}

REPEATABLE(product)
