// A run of recorded calls, without anybody in between.
#include "calls.h"
#include "simd.h"
#include "threads.h"

// Each call in `words`: the address of a kernel's `_again`, the number of its arguments, the arguments.
EXPORT void repeat_calls(const uint64_t* words, int64_t count) {
  for (; count > 0; --count) {
    reinterpret_cast<void (*)(const uint64_t*)>(words[0])(words + 2);
    words += 2 + words[1];
  }
}

// The same on a helper, and until `finish_calls`; what is called has this one thread. begun: the number of calls, then the words; it stays
// where it is. False: no helper is to be had.
EXPORT bool begin_calls(uint64_t* begun) {
  auto task = [](void* context, int64_t) {
    const auto* words = static_cast<const uint64_t*>(context);
    repeat_calls(words + 1, static_cast<int64_t>(words[0]));
  };
  return threads::begin(task, begun);
}

EXPORT void finish_calls() { threads::finish(); }
