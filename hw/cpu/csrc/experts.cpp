// The way of tokens through routed experts, but for the products: gate, sorting by expert, SwiGLU, weighted sum.
#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "calls.h"
#include "simd.h"
#include "threads.h"

namespace {

struct Rule {
  int64_t experts, top_k, softmax, groups, topk_groups, top2, normalize;
  float scaling;
};

void score(const float* logits, float* scores, const Rule& rule) {
  float top = -INFINITY, total = 0;
  for (int64_t e = 0; e < rule.experts; ++e) top = std::max(top, logits[e]);
  for (int64_t e = 0; e < rule.experts; e += kLanes) {
    const int n = static_cast<int>(std::min<int64_t>(kLanes, rule.experts - e));
    const Vec x = load_part(logits + e, n);
    store_part(scores + e, rule.softmax ? exp(sub(x, splat(top))) : sigmoid(x), n);
  }
  if (!rule.softmax) return;
  for (int64_t e = 0; e < rule.experts; ++e) total += scores[e];
  for (int64_t e = 0; e < rule.experts; ++e) scores[e] /= total;
}

// The `count` largest of n values, best first, of equal ones the first. `taken` says which are out of the question; these and what is picked
// become -inf, and `taken`.
void pick(float* values, int64_t n, int64_t count, std::vector<char>& taken, int64_t* picked) {
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  for (int64_t i = 0; i < n; ++i) values[i] = taken[i] ? kNone : values[i];
  for (int64_t k = 0; k < count; ++k) {
    Vec most = splat(kNone);
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) most = max(most, load(values + i));
    float top = largest(most);
    for (; i < n; ++i) top = std::max(top, values[i]);
    int64_t best = 0;
    while (best < n && (taken[best] || !(values[best] == top))) ++best;
    if (best == n) best = std::find(taken.begin(), taken.begin() + n, 0) - taken.begin();  // all that is left is no number
    taken[best] = 1;
    values[best] = kNone;
    picked[k] = best;
  }
}

class Gate {
 public:
  void use(const Rule& rule) {
    rule_ = rule;
    for (auto* one : {&scores_, &choice_}) one->resize(rule.experts);
    taken_.resize(rule.experts), group_scores_.resize(rule.groups), group_taken_.resize(rule.groups), kept_.resize(rule.topk_groups);
  }

  void row(const float* logits, const float* bias, int64_t* idx, float* weight) {
    score(logits, scores_.data(), rule_);
    for (int64_t e = 0; e < rule_.experts; ++e) choice_[e] = scores_[e] + (bias ? bias[e] : 0.0f);
    std::fill(taken_.begin(), taken_.end(), 0);
    if (rule_.groups > 1) drop_groups();
    pick(choice_.data(), rule_.experts, rule_.top_k, taken_, idx);
    float total = 0;
    for (int64_t k = 0; k < rule_.top_k; ++k) total += scores_[idx[k]];
    for (int64_t k = 0; k < rule_.top_k; ++k)
      weight[k] = (rule_.normalize ? scores_[idx[k]] / (total + 1e-20f) : scores_[idx[k]]) * rule_.scaling;
  }

 private:
  void drop_groups() {
    const int64_t size = rule_.experts / rule_.groups;
    for (int64_t g = 0; g < rule_.groups; ++g) {
      float best = -INFINITY, second = -INFINITY;
      for (int64_t e = g * size; e < (g + 1) * size; ++e) {
        second = std::max(second, std::min(best, choice_[e]));
        best = std::max(best, choice_[e]);
      }
      group_scores_[g] = rule_.top2 ? best + second : best;
    }
    std::fill(group_taken_.begin(), group_taken_.end(), 0);
    pick(group_scores_.data(), rule_.groups, rule_.topk_groups, group_taken_, kept_.data());
    for (int64_t e = 0; e < rule_.experts; ++e) taken_[e] = !group_taken_[e / size];
  }

  Rule rule_;
  std::vector<float> scores_, choice_, group_scores_;
  std::vector<char> taken_, group_taken_;
  std::vector<int64_t> kept_;
};

template <class T>
void silu_mul_row(const T* gate, const T* up, T* out, int64_t inner) {
  for (int64_t j = 0; j < inner; j += kLanes) {
    const int n = static_cast<int>(std::min<int64_t>(kLanes, inner - j));
    const Vec x = load_part(gate + j, n);
    const Vec silu = rounded(div(x, add(splat(1.0f), exp(sub(zero(), x)))), gate);
    store_part(out + j, mul(silu, load_part(up + j, n)), n);
  }
}

template <class T>
void silu_mul_rows(const T* x, T* out, const int32_t* counts, int64_t groups, int64_t rows, int64_t inner, int64_t num_threads) {
  if (!counts) rows *= groups, groups = 1;
  threads::share_range(num_threads, groups * rows, groups * rows * inner, [&](int64_t begin, int64_t end) {
    for (int64_t g = begin / std::max<int64_t>(rows, 1); g * rows < end; ++g) {
      const int64_t first = std::max(begin, g * rows), last = std::min(end, g * rows + (counts ? counts[g] : rows));
      for (int64_t row = first; row < last; ++row)
        silu_mul_row(x + row * 2 * inner, x + row * 2 * inner + inner, out + row * inner, inner);
    }
  });
}

template <class T>
void combine_rows(
    const T* rows, const int64_t* home, const float* weight, const T* shared, T* out, int64_t tokens, int64_t top_k, int64_t dim,
    int64_t num_threads) {
  threads::share_range(num_threads, tokens, tokens * top_k * dim, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      for (int64_t j = 0; j < dim; j += kLanes) {
        const int n = static_cast<int>(std::min<int64_t>(kLanes, dim - j));
        Vec total = zero();
        for (int64_t k = 0; k < top_k; ++k) {
          const Vec part = mul(load_part(rows + home[t * top_k + k] * dim + j, n), splat(weight[t * top_k + k]));
          total = k ? add(total, part) : part;
        }
        if (shared) total = add(total, load_part(shared + t * dim + j, n));
        store_part(out + t * dim + j, total, n);
      }
  });
}

}  // namespace

// See Ops.gate_topk. bias may be null; slots [experts, width].
EXPORT void gate_topk(
    const float* logits, const float* bias, int64_t rows, int64_t experts, int64_t top_k, int64_t softmax, int64_t groups,
    int64_t topk_groups, int64_t top2, int64_t normalize, float scaling, const int64_t* slots, int64_t width, const int64_t* counts,
    int64_t* idx, int64_t* phy, float* weight, int64_t num_threads) {
  const Rule rule{experts, top_k, softmax, groups, topk_groups, top2, normalize, scaling};
  threads::share_range(num_threads, rows, rows * experts * top_k, [&](int64_t begin, int64_t end) {
    thread_local Gate gate;
    gate.use(rule);
    for (int64_t r = begin; r < end; ++r) {
      gate.row(logits + r * experts, bias, idx + r * top_k, weight + r * top_k);
      for (int64_t k = 0; k < top_k; ++k) {
        const int64_t e = idx[r * top_k + k];
        phy[r * top_k + k] = slots[e * width + r % counts[e]];
      }
    }
  });
}

// See Ops.silu_mul: x [groups * rows, 2 * inner]; of each group the first counts[g] rows, all if null.
EXPORT void silu_mul(
    int64_t is_bf16, const void* x, void* out, const int32_t* counts, int64_t groups, int64_t rows, int64_t inner, int64_t num_threads) {
  if (is_bf16)
    silu_mul_rows(static_cast<const bf16*>(x), static_cast<bf16*>(out), counts, groups, rows, inner, num_threads);
  else
    silu_mul_rows(static_cast<const float*>(x), static_cast<float*>(out), counts, groups, rows, inner, num_threads);
}

// Copy tokens' rows to their experts, in the order of the batch: those of expert e begin at row e * capacity, or, with capacity 0, behind
// those of the expert before. chosen [tokens, top_k]; home, as large, gets the row of each choice; counts [experts].
EXPORT void to_experts(
    const char* x, int64_t row_bytes, const int64_t* chosen, int64_t tokens, int64_t top_k, int64_t experts,
    int64_t capacity, int32_t* counts, int64_t* home, char* out, int64_t num_threads) {
  thread_local std::vector<int64_t> next;
  next.assign(experts + 1, 0);
  for (int64_t i = 0; i < tokens * top_k; ++i) ++next[chosen[i] + 1];
  for (int64_t e = 0; e < experts; ++e) counts[e] = static_cast<int32_t>(next[e + 1]);
  for (int64_t e = 0; e < experts; ++e) next[e + 1] = capacity ? (e + 1) * capacity : next[e] + next[e + 1];
  for (int64_t i = 0; i < tokens * top_k; ++i) home[i] = next[chosen[i]]++;
  threads::share_range(num_threads, tokens * top_k, tokens * top_k * row_bytes, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) std::memcpy(out + home[i] * row_bytes, x + i / top_k * row_bytes, row_bytes);
  });
}

// out[t] = sum over k of weight[t, k] * rows[home[t, k]], in this order, then shared[t], which may be null.
EXPORT void from_experts(
    int64_t is_bf16, const void* rows, const int64_t* home, const float* weight, const void* shared, void* out, int64_t tokens,
    int64_t top_k, int64_t dim, int64_t num_threads) {
  if (is_bf16)
    combine_rows(
        static_cast<const bf16*>(rows), home, weight, static_cast<const bf16*>(shared), static_cast<bf16*>(out), tokens, top_k, dim,
        num_threads);
  else
    combine_rows(
        static_cast<const float*>(rows), home, weight, static_cast<const float*>(shared), static_cast<float*>(out), tokens, top_k, dim,
        num_threads);
}

// bf16 values as fp32.
EXPORT void widen(const void* x, void* out, int64_t count) {
  const bf16* from = static_cast<const bf16*>(x);
  float* to = static_cast<float*>(out);
  for (int64_t i = 0; i < count; i += kLanes) {
    const int n = static_cast<int>(std::min<int64_t>(kLanes, count - i));
    store_part(to + i, load_part(from + i, n), n);
  }
}

REPEATABLE(widen)
REPEATABLE(gate_topk)
REPEATABLE(silu_mul)
REPEATABLE(to_experts)
REPEATABLE(from_experts)
