// A run of recorded calls, without anybody in between.
#include "calls.h"
#include "simd.h"

// Each call in `words`: the address of a kernel's `_again`, the number of its arguments, the arguments.
EXPORT void repeat_calls(const uint64_t* words, int64_t count) {
  for (; count > 0; --count) {
    reinterpret_cast<void (*)(const uint64_t*)>(words[0])(words + 2);
    words += 2 + words[1];
  }
}
