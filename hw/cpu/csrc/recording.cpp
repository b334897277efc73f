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

// All calls of `first`, and then those of `beside` on a helper, where what is called has this one thread; each is the number of calls, then
// their words, and stays where it is. Returns what `finish_calls` waits for; 0: those beside are done, for there are none, no helper is
// wanted, or none is to be had.
EXPORT uint64_t begin_calls(const uint64_t* first, uint64_t* beside, int64_t helped) {
  auto task = [](void* context, int64_t) {
    const auto* words = static_cast<const uint64_t*>(context);
    repeat_calls(words + 1, static_cast<int64_t>(words[0]));
  };
  task(const_cast<uint64_t*>(first), 0);
  const uint64_t begun = beside[0] && helped ? threads::begin(task, beside) : 0;
  if (!begun) task(beside, 0);
  return begun;
}

EXPORT void finish_calls(uint64_t begun) { threads::finish(begun); }
