// Kernels by address, their arguments as one run of 64-bit words: what a recording of their calls consists of.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

template <class T>
inline T from_bits(uint64_t bits) {
  T value;
  static_assert(sizeof(T) <= sizeof(bits), "an argument is one word");
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}
template <class... Args, std::size_t... kPlaces>
inline void call_with(void (*kernel)(Args...), const uint64_t* args, std::index_sequence<kPlaces...>) {
  kernel(from_bits<Args>(args[kPlaces])...);
}
template <class... Args>
inline void call_with(void (*kernel)(Args...), const uint64_t* args) {
  call_with(kernel, args, std::index_sequence_for<Args...>());
}

#define REPEATABLE(kernel) \
  extern "C" __attribute__((visibility("default"))) void kernel##_again(const uint64_t* args) { call_with(kernel, args); }
