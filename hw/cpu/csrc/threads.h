// Tasks shared among threads of our own.
//
// Whoever has tasks does them himself; helpers take some if they happen to run. A helper that the machine has given to somebody else is
// not waited for, unless it stands in the middle of a task: on a busy machine that is the difference between a little slower and ten times.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

namespace threads {

// Runs task(context, i) for 0 <= i < count, on this thread and up to `wanted - 1` others, in any order. One caller at a time has helpers.
void run(int64_t wanted, int64_t count, void (*task)(void*, int64_t), void* context);

// Starts task(context, 0) on another thread and says what `finish` is to wait for, which does it itself if nobody has begun it by then; 0 if
// there is none, or somebody else has them. While it runs, whatever else wants threads does without.
uint64_t begin(void (*task)(void*, int64_t), void* context);
void finish(uint64_t begun);

// The same as `run` for a callable f(i).
template <class F>
void share(int64_t wanted, int64_t count, F&& f) {
  if (wanted <= 1 || count <= 1) {
    for (int64_t i = 0; i < count; ++i) f(i);
    return;
  }
  run(wanted, count, [](void* context, int64_t i) { (*static_cast<std::remove_reference_t<F>*>(context))(i); }, &f);
}

// f(begin, end) for pieces of 0 .. count, at most four for each thread. `work`: what it is in all, in elements; little is not worth sharing.
template <class F>
void share_range(int64_t wanted, int64_t count, int64_t work, F&& f) {
  constexpr int64_t kWorthSharing = 1 << 14;
  const int64_t pieces = wanted <= 1 || work < kWorthSharing ? 1 : std::min(count, 4 * wanted);
  if (pieces <= 1) {
    if (count) f(0, count);
    return;
  }
  share(wanted, pieces, [&](int64_t i) { f(count * i / pieces, count * (i + 1) / pieces); });
}

}  // namespace threads
