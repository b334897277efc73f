// Draws: see Ops.sample. Filters find the lowest score that stays; noise is worked out for those scores alone, and its logarithms only
// where they can matter.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "calls.h"
#include "simd.h"
#include "threads.h"

namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();
constexpr int64_t kWorthSharing = 1 << 16;  // logits of rows that are not drawn by chance
constexpr int kQuads = 16;  // runs of four tokens whose noise is drawn at once

// The largest value; -inf if there is none but NaN.
float largest_of(const float* x, int64_t count) {
  Vec most = splat(kNone);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) most = max(most, load(x + i));
  float top = largest(most);
  for (; i < count; ++i) top = std::max(top, x[i]);
  return top;
}

double sum_of_powers(const float* x, int64_t count, float top) {
  double total = 0.0;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) total += sum(exp(sub(load(x + i), splat(top))));
  for (; i < count; ++i) total += std::exp(x[i] - top);
  return total;
}

// The score of the token that crosses top_p, of `kept` scores in any order; what else is there is changed.
float nucleus_border(std::vector<float>& kept, float top, float top_p) {
  const double wanted = top_p * sum_of_powers(kept.data(), kept.size(), top);
  double before = 0.0;
  size_t begin = 0;
  for (size_t size = 128; begin < kept.size(); size *= 8) {  // most nuclei are small: only as many are sorted as it takes
    const size_t end = std::min(kept.size(), begin + size);
    if (end < kept.size()) std::nth_element(kept.begin() + begin, kept.begin() + end, kept.end(), std::greater<float>());
    std::sort(kept.begin() + begin, kept.begin() + end, std::greater<float>());
    for (; begin < end; ++begin) {
      before += std::exp(static_cast<double>(kept[begin] - top));
      if (before >= wanted) return kept[begin];
    }
  }
  return kept.back();
}

// The lowest score that min-p, top-k and top-p leave, in this order.
float border_of(const float* scores, int64_t vocab, float top, int64_t top_k, float top_p, float min_p, std::vector<float>& kept) {
  float border = min_p > 0.0f ? top + std::log(min_p) : kNone;
  if (top_k <= 0 && top_p >= 1.0f) return border;
  kept.clear();
  for (int64_t i = 0; i < vocab; ++i)
    if (scores[i] >= border) kept.push_back(scores[i]);
  if (top_k > 0 && top_k < static_cast<int64_t>(kept.size())) {
    std::nth_element(kept.begin(), kept.begin() + (top_k - 1), kept.end(), std::greater<float>());
    border = kept[top_k - 1];
    kept.erase(std::remove_if(kept.begin(), kept.end(), [border](float x) { return x < border; }), kept.end());
  }
  return top_p < 1.0f && !kept.empty() ? nucleus_border(kept, top, top_p) : border;
}

// Philox4x32-10 for kQuads consecutive counters: bits[4 * i + j] is word j of counter (first + i, position, sequence, 0).
void philox(uint32_t first, uint32_t position, uint32_t sequence, uint64_t seed, uint32_t* bits) {
  uint32_t c0[kQuads], c1[kQuads], c2[kQuads], c3[kQuads];
  for (int i = 0; i < kQuads; ++i) c0[i] = first + i, c1[i] = position, c2[i] = sequence, c3[i] = 0;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u)
    for (int i = 0; i < kQuads; ++i) {
      const uint64_t a = static_cast<uint64_t>(c0[i]) * 0xD2511F53u, b = static_cast<uint64_t>(c2[i]) * 0xCD9E8D57u;
      c0[i] = static_cast<uint32_t>(b >> 32) ^ c1[i] ^ k0, c1[i] = static_cast<uint32_t>(b);
      c2[i] = static_cast<uint32_t>(a >> 32) ^ c3[i] ^ k1, c3[i] = static_cast<uint32_t>(a);
    }
  for (int i = 0; i < kQuads; ++i) bits[4 * i] = c0[i], bits[4 * i + 1] = c1[i], bits[4 * i + 2] = c2[i], bits[4 * i + 3] = c3[i];
}

// The token with the largest sum of score and Gumbel noise, of those whose score is at least `border`.
int64_t noisy_best(const float* scores, int64_t vocab, float border, uint32_t position, uint32_t sequence, uint64_t seed) {
  int64_t token = 0;
  double best = -std::numeric_limits<double>::infinity();
  uint32_t bits[4 * kQuads];
  for (int64_t low = 0; low < vocab; low += 4 * kQuads) {
    const int count = static_cast<int>(std::min<int64_t>(4 * kQuads, vocab - low));
    if (!(largest_of(scores + low, count) >= border)) continue;
    philox(static_cast<uint32_t>(low / 4), position, sequence, seed, bits);
    for (int i = 0; i < count; ++i) {
      const float score = scores[low + i];
      // The noise -log(-log(u)) is at most -log(1 - u), and that at most log(2) times one more than the leading zeros of 1 - u.
      const uint32_t rest = ~bits[i];
      const double most = score + 0.6931472 * ((rest ? __builtin_clz(rest) : 32) + 1);
      if (!(score >= border) || most < best) continue;
      const double value = score - std::log(-std::log((bits[i] + 0.5) * 0x1p-32));
      if (value > best) best = value, token = low + i;
    }
  }
  return token;
}

}  // namespace

// logits [rows, vocab]; every other array has one entry for each row.
EXPORT void sample(
    const float* logits, int64_t rows, int64_t vocab, const float* temperature, const int64_t* top_k, const float* top_p, const float* min_p,
    const int64_t* seed, const int64_t* sequence, const int64_t* position, int64_t* tokens, int64_t threads) {
  // The largest of a few thousand is found before another core has come.
  const bool quick = rows * vocab < kWorthSharing && std::none_of(temperature, temperature + rows, [](float t) { return t > 0.0f; });
  threads::share(quick ? 1 : threads, rows, [&](int64_t row) {
    const float* from = logits + row * vocab;
    if (!(temperature[row] > 0.0f)) {
      tokens[row] = std::find(from, from + vocab - 1, largest_of(from, vocab)) - from;  // the first of the largest
      return;
    }
    thread_local std::vector<float> scores, kept;
    scores.resize(vocab);
    for (int64_t i = 0; i < vocab; ++i) scores[i] = from[i] / temperature[row];
    const float top = largest_of(scores.data(), vocab);
    const float border = border_of(scores.data(), vocab, top, top_k[row], top_p[row], min_p[row], kept);
    tokens[row] = noisy_best(
        scores.data(), vocab, border, static_cast<uint32_t>(position[row]), static_cast<uint32_t>(sequence[row]),
        static_cast<uint64_t>(seed[row]));
  });
}

REPEATABLE(sample)
