// Attention in one pass over the keys with a running maximum (FlashAttention, arXiv 2205.14135), softmax and sums in fp32.
//
// Keys come in blocks of 64 from the first one on, and a block that a query does not see leaves its sums as they are, to the bit. So what a
// query gets depends on nothing but itself and its keys.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "calls.h"
#include "simd.h"
#include "threads.h"

namespace {

constexpr int kBlock = 64;                    // keys at a time
constexpr int64_t kWorthSharing = 1 << 16;  // multiplications, about 2 us of them; fewer are done before others have come
constexpr float kNone = -std::numeric_limits<float>::infinity();

// Maximum and sum of one query so far; `decay` is what its older sums are to be multiplied by.
struct Running {
  float top = kNone, total = 0.0f, decay = 1.0f;

  // scores[keys] become weights, and what fills the last register of them 0; the first `seen` are of keys that the query sees.
  void take(float* scores, int64_t seen, float scale, int keys = kBlock) {
    const int end = (keys + kLanes - 1) / kLanes * kLanes;
    for (int64_t j = std::max<int64_t>(seen, 0); j < end; ++j) scores[j] = kNone;
    Vec most = splat(kNone);
    for (int j = 0; j < end; j += kLanes) {
      const Vec x = mul(load(scores + j), splat(scale));
      store(scores + j, x);
      most = max(most, x);
    }
    const float fresh = std::max(top, largest(most));
    const float safe = fresh == kNone ? 0.0f : fresh;
    float powers[kLanes];
    store(powers, exp(splat(top - safe)));
    decay = powers[0];
    Vec sums = zero();
    for (int j = 0; j < end; j += kLanes) {
      const Vec p = exp(sub(load(scores + j), splat(safe)));
      store(scores + j, p);
      sums = add(sums, p);
    }
    total = total * decay + sum(sums);
    top = fresh;
  }
  float lse() const { return total > 0.0f ? top + std::log(total) : kNone; }
  float share() const { return total > 0.0f ? 1.0f / total : 0.0f; }
};

// Products of kRows queries with four keys: scores[i * kBlock + j].
template <class T, int kRows>
void dots(const T* const* q, const T* const* keys, int64_t dim, float* scores) {
  using E = Elem<T>;
  Vec acc[kRows][4];
  for (auto& row : acc)
    for (Vec& one : row) one = zero();
  auto add_piece = [&](auto read) {
    typename E::Reg b[4];
    for (int j = 0; j < 4; ++j) b[j] = read(keys[j]);
    for (int i = 0; i < kRows; ++i) {
      const typename E::Reg a = read(q[i]);
      for (int j = 0; j < 4; ++j) acc[i][j] = E::dot(acc[i][j], a, b[j]);
    }
  };
  int64_t k = 0;
  for (; k + E::kSize <= dim; k += E::kSize) add_piece([k](const T* p) { return E::read(p + k); });
  if (int rest = static_cast<int>(dim - k)) add_piece([k, rest](const T* p) { return E::read_part(p + k, rest); });
  for (int i = 0; i < kRows; ++i) store_four(scores + i * kBlock, sums(acc[i][0], acc[i][1], acc[i][2], acc[i][3]), 4);
}

// acc[i] = acc[i] * decay[i] + sum over keys of weight[i][j] * values[j], for `count` columns of kRows queries. soon: values to be asked for
// meanwhile; none, if null.
template <class T, int kRows, int kVecs>
void add_values(
    float* acc, int64_t acc_row, const Running* running, const float* weights, const T* const* values, int keys, int count,
    const T* const* soon = nullptr, int64_t soon_from = 0) {
  Vec sums[kRows][kVecs];
  auto part = [count](int v) { return std::min(kLanes, count - v * kLanes); };
  const bool whole = count == kVecs * kLanes;
  for (int i = 0; i < kRows; ++i)
    for (int v = 0; v < kVecs; ++v) sums[i][v] = mul(load(acc + i * acc_row + v * kLanes), splat(running[i].decay));
  for (int j = 0; j < keys; ++j) {
    if (soon)
      for (std::size_t byte = 0; byte < kVecs * kLanes * sizeof(T); byte += 64)
        _mm_prefetch(reinterpret_cast<const char*>(soon[j] + soon_from) + byte, _MM_HINT_T1);
    Vec x[kVecs];
    for (int v = 0; v < kVecs; ++v)
      x[v] = whole ? load(values[j] + v * kLanes) : part(v) > 0 ? load_part(values[j] + v * kLanes, part(v)) : zero();
    for (int i = 0; i < kRows; ++i) {
      const Vec p = splat(weights[i * kBlock + j]);
      for (int v = 0; v < kVecs; ++v) sums[i][v] = fma(p, x[v], sums[i][v]);
    }
  }
  for (int i = 0; i < kRows; ++i)
    for (int v = 0; v < kVecs; ++v) store(acc + i * acc_row + v * kLanes, sums[i][v]);
}

template <class T>
void write_row(T* out, const float* acc, float share, int64_t dim) {
  int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) store(out + d, mul(load(acc + d), splat(share)));
  if (d < dim) store_part(out + d, mul(load(acc + d), splat(share)), static_cast<int>(dim - d));
}

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// -- latents in pages --

constexpr int kWide = kLanes == 16 ? 2 : 1;  // registers of columns beside each of up to eight queries

struct Pages {
  const void* cache;
  const int32_t* table;  // [num_seqs, width]
  const int32_t* lens;
  int64_t page_size, width, q_len, heads, dim, latent;
  float scale;

  // Up to kBlock keys of a sequence from `low` on; behind the last of `count` it stands again.
  template <class T>
  void find(int64_t seq, int64_t low, int count, const T** keys) const {
    int64_t page_idx = low / page_size, offset = low % page_size;
    for (int j = 0; j < count; ++page_idx, offset = 0) {
      const T* page = static_cast<const T*>(cache) + std::max(table[seq * width + page_idx], 0) * page_size * dim;
      for (; offset < page_size && j < count; ++offset, ++j) keys[j] = page + offset * dim;
    }
    std::fill(keys + count, keys + kBlock, keys[count - 1]);
  }
};

// kRows of one sequence's q_len * heads queries. next: the sequence that follows; its first keys are asked for at the end.
template <class T, int kRows>
void attend_pages(const Pages& a, const T* q, int64_t seq, int64_t first, int64_t next, float* acc, T* out, float* lse) {
  const int64_t num_rows = a.q_len * a.heads, acc_row = round_up(a.latent, kWide * kLanes);
  const T* rows[kRows];
  int64_t sees[kRows];
  for (int i = 0; i < kRows; ++i) {
    const int64_t row = std::min(first + i, num_rows - 1);
    rows[i] = q + (seq * num_rows + row) * a.dim;
    sees[i] = std::max<int64_t>(0, a.lens[seq] - a.q_len + 1 + row / a.heads);
  }
  Running running[kRows];
  std::fill(acc, acc + kRows * acc_row, 0.0f);
  alignas(64) float scores[kRows * kBlock];
  const T *keys[kBlock], *soon[kBlock];
  const int64_t last = sees[kRows - 1];  // queries stand in order
  for (int64_t low = 0; low < last; low += kBlock) {
    const int count = static_cast<int>(std::min<int64_t>(kBlock, last - low));
    a.find(seq, low, count, keys);
    const bool ends = low + kBlock >= last;
    const int64_t to_come = ends ? next < 0 ? 0 : a.lens[next] : last - low - kBlock;
    if (to_come > 0) a.find(ends ? next : seq, ends ? 0 : low + kBlock, static_cast<int>(std::min<int64_t>(kBlock, to_come)), soon);
    for (int j = 0; j < count; j += 4) {
      if constexpr (kLanes == 16) {
        for (int i = 0; i < kRows; i += 4) dots<T, 4>(rows + i, keys + j, a.dim, scores + i * kBlock + j);
      } else {
        for (int i = 0; i < kRows; i += 2) dots<T, 2>(rows + i, keys + j, a.dim, scores + i * kBlock + j);
      }
    }
    for (int i = 0; i < kRows; ++i) running[i].take(scores + i * kBlock, std::min<int64_t>(sees[i] - low, kBlock), a.scale, count);
    for (int64_t d = 0; d < a.latent; d += kWide * kLanes) {
      const T* values[kBlock];
      for (int j = 0; j < count; ++j) values[j] = keys[j] + d;
      const int columns = static_cast<int>(std::min<int64_t>(kWide * kLanes, a.latent - d));
      add_values<T, kRows, kWide>(acc + d, acc_row, running, scores, values, count, columns, to_come > 0 ? soon : nullptr, d);
    }
  }
  for (int64_t i = 0; i < std::min<int64_t>(kRows, num_rows - first); ++i) {
    const int64_t row = seq * num_rows + first + i;
    write_row(out + row * a.latent, acc + i * acc_row, running[i].share(), a.latent);
    if (lse) lse[row] = running[i].lse();
  }
}

template <class T, int kRows>
void attend_all_pages(const Pages& a, const T* q, int64_t num_seqs, T* out, float* lse, int threads) {
  const int64_t groups = (a.q_len * a.heads + kRows - 1) / kRows, tasks = num_seqs * groups;
  threads::share(threads, tasks, [&](int64_t task) {
    thread_local std::vector<float> acc;
    acc.resize(kRows * round_up(a.latent, kWide * kLanes));
    const int64_t next = (task + 1) / groups;  // for the caller; helpers come from the other end
    attend_pages<T, kRows>(a, q, task / groups, task % groups * kRows, next < num_seqs ? next : -1, acc.data(), out, lse);
  });
}

template <class T>
void decode(const Pages& a, const T* q, int64_t num_seqs, T* out, float* lse, int threads) {
  int64_t num_keys = 0;
  for (int64_t seq = 0; seq < num_seqs; ++seq) num_keys += a.lens[seq];
  if (num_keys * a.q_len * a.heads * (a.dim + a.latent) < kWorthSharing) threads = 1;
  // Eight queries share what is read of a key; fewer, where threads would otherwise have nothing to do.
  if (num_seqs * (a.q_len * a.heads + 7) / 8 >= threads) return attend_all_pages<T, 8>(a, q, num_seqs, out, lse, threads);
  attend_all_pages<T, 4>(a, q, num_seqs, out, lse, threads);
}

// -- expanded keys and values --

constexpr int kQueries = kLanes == 16 ? 6 : 2, kColumns = 4;  // queries and registers of columns of a tile
constexpr int64_t kTask = 252;                                // queries that share one rearrangement of their keys; divisible by both

struct Ragged {
  const int64_t *q_starts, *k_starts;  // [num_seqs + 1]
  int64_t num_seqs, heads, key_dim, value_dim, q_row, q_head, k_row, k_head, v_row, v_head;
  float scale;
  bool causal;
};

// Keys are read as units of four bytes, one fp32 value or two of bf16: packed[u * kBlock + j] is unit u of key j.
template <class T>
void scores_of(const T* const* q, const uint32_t* packed, int64_t units, float* scores) {
  using E = Elem<T>;
  for (int c = 0; c < kBlock; c += kColumns * kLanes) {
    Vec acc[kQueries][kColumns];
    for (auto& row : acc)
      for (Vec& one : row) one = zero();
    for (int64_t u = 0; u < units; ++u) {
      typename E::Reg keys[kColumns];
      for (int v = 0; v < kColumns; ++v) keys[v] = E::read(reinterpret_cast<const T*>(packed + u * kBlock + c + v * kLanes));
      for (int i = 0; i < kQueries; ++i) {
        uint32_t unit;
        std::memcpy(&unit, reinterpret_cast<const char*>(q[i]) + 4 * u, 4);
        const typename E::Reg one = reinterpret_cast<typename E::Reg>(splat_pair(unit));
        for (int v = 0; v < kColumns; ++v) acc[i][v] = E::dot(acc[i][v], one, keys[v]);
      }
    }
    for (int i = 0; i < kQueries; ++i)
      for (int v = 0; v < kColumns; ++v) store(scores + i * kBlock + c + v * kLanes, acc[i][v]);
  }
}

struct Scratch {
  std::vector<uint32_t> keys;
  std::vector<float> values, acc;
  std::vector<Running> running;
};

// Queries `begin .. end` of one sequence and head; all pointers are at that sequence and head.
template <class T>
void attend_keys(
    const Ragged& a, const T* q, const T* k, const T* v, int64_t q_len, int64_t k_len, int64_t begin, int64_t end, Scratch& s, T* out,
    int64_t out_row, float* lse, int64_t lse_row) {
  const int64_t units = a.key_dim * sizeof(T) / 4, acc_row = round_up(a.value_dim, kColumns * kLanes);
  const int64_t rows = round_up(end - begin, kQueries);
  s.keys.resize(units * kBlock), s.values.resize(kBlock * acc_row);
  s.acc.assign(rows * acc_row, 0.0f), s.running.assign(rows, Running());
  auto sees = [&](int64_t i) { return std::max<int64_t>(0, a.causal ? k_len - q_len + 1 + std::min(i, end - 1) : k_len); };
  const float* values[kBlock];
  alignas(64) float scores[kQueries * kBlock];
  for (int64_t low = 0; low < sees(end - 1); low += kBlock) {
    const int count = static_cast<int>(std::min(kBlock + low, k_len) - low);
    for (int j = 0; j < kBlock; ++j) {
      const T* key = k + (low + std::min(j, count - 1)) * a.k_row;
      for (int64_t u = 0; u < units; ++u) std::memcpy(&s.keys[u * kBlock + j], reinterpret_cast<const char*>(key) + 4 * u, 4);
    }
    for (int j = 0; j < count; ++j)
      for (int64_t d = 0; d < a.value_dim; d += kLanes) {
        const int n = static_cast<int>(std::min<int64_t>(kLanes, a.value_dim - d));
        store(&s.values[j * acc_row + d], n == kLanes ? load(v + (low + j) * a.v_row + d) : load_part(v + (low + j) * a.v_row + d, n));
      }
    for (int64_t i = 0; i < rows; i += kQueries) {
      const int64_t seen = std::min<int64_t>(count, sees(begin + i + kQueries - 1) - low);
      if (seen <= 0) continue;
      const T* queries[kQueries];
      for (int r = 0; r < kQueries; ++r) queries[r] = q + std::min(begin + i + r, end - 1) * a.q_row;
      scores_of(queries, s.keys.data(), units, scores);
      for (int r = 0; r < kQueries; ++r) s.running[i + r].take(scores + r * kBlock, sees(begin + i + r) - low, a.scale);
      for (int64_t d = 0; d < acc_row; d += kColumns * kLanes) {
        for (int j = 0; j < seen; ++j) values[j] = &s.values[j * acc_row + d];
        add_values<float, kQueries, kColumns>(
            &s.acc[i * acc_row + d], acc_row, &s.running[i], scores, values, static_cast<int>(seen), kColumns * kLanes);
      }
    }
  }
  for (int64_t i = 0; i < end - begin; ++i) {
    write_row(out + (begin + i) * out_row, &s.acc[i * acc_row], s.running[i].share(), a.value_dim);
    lse[(begin + i) * lse_row] = s.running[i].lse();
  }
}

template <class T>
void prefill(const Ragged& a, const T* q, const T* k, const T* v, T* out, float* lse, int threads) {
  struct Task {
    int64_t seq, head, begin, end;
  };
  std::vector<Task> tasks;
  for (int64_t seq = 0; seq < a.num_seqs; ++seq) {
    const int64_t q_len = a.q_starts[seq + 1] - a.q_starts[seq];
    for (int64_t end = q_len; end > 0; end -= kTask)  // the longest work first
      for (int64_t head = 0; head < a.heads; ++head) tasks.push_back({seq, head, std::max<int64_t>(0, end - kTask), end});
  }
  threads::share(threads, static_cast<int64_t>(tasks.size()), [&](int64_t i) {
    thread_local Scratch scratch;
    const Task& task = tasks[i];
    const int64_t q_first = a.q_starts[task.seq], k_first = a.k_starts[task.seq];
    attend_keys(
        a, q + q_first * a.q_row + task.head * a.q_head, k + k_first * a.k_row + task.head * a.k_head,
        v + k_first * a.v_row + task.head * a.v_head, a.q_starts[task.seq + 1] - q_first, a.k_starts[task.seq + 1] - k_first, task.begin,
        task.end, scratch, out + (q_first * a.heads + task.head) * a.value_dim, a.heads * a.value_dim, lse + q_first * a.heads + task.head,
        a.heads);
  });
}

}  // namespace

// See Ops.mla_decode. q [num_seqs, q_len, heads, dim], out [num_seqs, q_len, heads, latent], lse may be null.
EXPORT void mla_decode(
    int64_t is_bf16, const void* q, const void* cache, const int32_t* table, int64_t width, const int32_t* lens, int64_t num_seqs, int64_t q_len,
    int64_t heads, int64_t dim, int64_t latent, int64_t page_size, float scale, void* out, float* lse, int64_t threads) {
  const Pages a{cache, table, lens, page_size, width, q_len, heads, dim, latent, scale};
  if (num_seqs * q_len == 0) return;
  if (is_bf16) return decode(a, static_cast<const bf16*>(q), num_seqs, static_cast<bf16*>(out), lse, static_cast<int>(threads));
  decode(a, static_cast<const float*>(q), num_seqs, static_cast<float*>(out), lse, static_cast<int>(threads));
}

// See Ops.mla_prefill. Strides are in elements; out [T, heads, value_dim], lse [T, heads]; key_dim is even in bf16.
EXPORT void mla_prefill(
    int64_t is_bf16, const void* q, int64_t q_row, int64_t q_head, const void* k, int64_t k_row, int64_t k_head, const void* v, int64_t v_row,
    int64_t v_head, const int64_t* q_starts, const int64_t* k_starts, int64_t num_seqs, int64_t heads, int64_t key_dim, int64_t value_dim,
    float scale, int64_t causal, void* out, float* lse, int64_t threads) {
  const Ragged a{q_starts, k_starts, num_seqs, heads, key_dim, value_dim, q_row, q_head, k_row, k_head, v_row, v_head, scale, causal != 0};
  if (is_bf16) {
    prefill(
        a, static_cast<const bf16*>(q), static_cast<const bf16*>(k), static_cast<const bf16*>(v), static_cast<bf16*>(out), lse,
        static_cast<int>(threads));
  } else {
    prefill(
        a, static_cast<const float*>(q), static_cast<const float*>(k), static_cast<const float*>(v), static_cast<float*>(out), lse,
        static_cast<int>(threads));
  }
}

REPEATABLE(mla_decode)
REPEATABLE(mla_prefill)
