// Small steps between the large ones: where rows stand and what they came to (see hw.row_kernels), and copies of rows.
#include <algorithm>
#include <cstring>

#include "calls.h"
#include "simd.h"

namespace {

// An index as torch counts: from the end if it is negative.
inline int64_t place_of(const int64_t* idx, int64_t i, int64_t size) { return !idx ? i : idx[i] < 0 ? idx[i] + size : idx[i]; }

template <class T>
int64_t first_largest(const T* x, int64_t count) {
  int64_t best = 0, i = 0;
  Vec most = splat(to_float(x[0]));
  for (; i + kLanes <= count; i += kLanes) most = max(most, load(x + i));
  float top = largest(most);
  for (; i < count; ++i) top = std::max(top, to_float(x[i]));
  while (best < count - 1 && to_float(x[best]) != top) ++best;
  return best;
}

}  // namespace

// See RowKernels.lay_out. table [n, width], rows may be strided; token_ids, positions and slots [n, query_len].
EXPORT void lay_out(
    const int64_t* lens, const int64_t* ahead, int64_t ahead_row, int64_t num_rows, const int64_t* rows, int64_t n, const int32_t* table,
    int64_t table_row, int64_t width, const int64_t* num_pages, int64_t query_len, int64_t place, int64_t shift, int64_t page_size, int64_t max_len,
    int64_t* token_ids, int64_t* positions, int64_t* slots, int32_t* seq_lens) {
  for (int64_t i = 0; i < n; ++i) {
    const int64_t row = rows[i], first = row < num_rows ? lens[row] + shift : -query_len;
    for (int64_t j = 0, at = i * query_len; j < query_len; ++j, ++at) {
      const int64_t position = std::clamp<int64_t>(first + j, 0, max_len - 1), page = position / page_size;
      const bool owned = row < num_rows && page < std::min(num_pages[i], width);
      token_ids[at] = ahead[row * ahead_row + place + j];
      positions[at] = position;
      slots[at] = owned ? int64_t{table[i * table_row + page]} * page_size + position % page_size : -1;
    }
    seq_lens[i] = static_cast<int32_t>(first + query_len);
  }
}

// See RowKernels.settle.
EXPORT void settle(
    int64_t* lens, int64_t* ahead, int64_t ahead_row, const int64_t* rows, int64_t n, const int64_t* tokens, int64_t num_decode,
    int64_t query_len, int64_t* accepted, int64_t* latest) {
  for (int64_t i = 0, at = 0; i < n; ++i) {
    const int64_t num_draws = i < num_decode ? query_len : 1;
    int64_t* drafts = ahead + rows[i] * ahead_row;
    int64_t stand = 0;
    while (stand < num_draws - 1 && tokens[at + stand] == drafts[1 + stand]) ++stand;
    drafts[0] = tokens[at + stand];
    lens[rows[i]] += stand + 1;
    if (i < num_decode) accepted[i] = stand, latest[i] = at + stand;
    at += num_draws;
  }
}

// The first of the largest values of each row, x [rows, count].
EXPORT void argmax(const float* x, int64_t rows, int64_t count, int64_t* out) {
  for (int64_t r = 0; r < rows; ++r) out[r] = first_largest(x + r * count, count);
}

// to[to_idx[i]] = from[from_idx[i]], `bytes` of each; without indices i itself. Steps in bytes; sizes are what negative indices count from.
EXPORT void copy_rows(
    char* to, int64_t to_step, const int64_t* to_idx, int64_t to_size, const char* from, int64_t from_step, const int64_t* from_idx,
    int64_t from_size, int64_t rows, int64_t bytes) {
  for (int64_t i = 0; i < rows; ++i)
    std::memmove(to + place_of(to_idx, i, to_size) * to_step, from + place_of(from_idx, i, from_size) * from_step, bytes);
}

// out = x + value.
EXPORT void add_int(const int64_t* x, int64_t value, int64_t* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = x[i] + value;
}

REPEATABLE(lay_out)
REPEATABLE(settle)
REPEATABLE(argmax)
REPEATABLE(copy_rows)
REPEATABLE(add_int)
