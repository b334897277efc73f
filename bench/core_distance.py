"""How long two cores take to hand each other a value and back: some 50 ns where they share a cache, several times that where they do not.

    python bench/core_distance.py [--times 20]

On a virtual machine that can change from one second to the next, as its host moves the cores about; threads that share small work between
them then take half as long again. Benchmarks of short steps say which it was.
"""

import argparse
import ctypes
import os
import shutil
import subprocess
import tempfile
import time
from functools import cache
from pathlib import Path

FAR_NS = 150.0  # from here on they share no cache
_SOURCE = """
#include <atomic>
#include <chrono>
#include <pthread.h>
#include <thread>
static void pin(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}
extern "C" double round_trip_ns(int first, int second) {
  alignas(128) std::atomic<long> value{0};
  double best = 1e9;
  std::thread one([&] {
    pin(second);
    for (long seen; (seen = value.load(std::memory_order_acquire)) >= 0;)
      if (seen % 2) value.store(seen + 1, std::memory_order_release);
  });
  std::thread other([&] {
    pin(first);
    for (int turn = 0; turn < 10; ++turn) {
      const auto begin = std::chrono::steady_clock::now();
      for (int i = 0; i < 300; ++i) {
        const long sent = value.load(std::memory_order_relaxed) + 1;
        value.store(sent, std::memory_order_release);
        while (value.load(std::memory_order_acquire) == sent) {
        }
      }
      const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - begin;
      if (took.count() / 300 < best) best = took.count() / 300;
    }
    value.store(-1);
  });
  one.join();
  other.join();
  return best;
}
"""


@cache
def _compiled() -> ctypes.CDLL | None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "distance.cpp"), Path(folder, "distance.so")
        source.write_text(_SOURCE)
        subprocess.run([compiler, "-O2", "-std=c++17", "-pthread", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
        found = ctypes.CDLL(str(library))
    found.round_trip_ns.restype = ctypes.c_double
    return found


def round_trip_ns() -> float | None:
    """Of the first two cores that this process may use, a few milliseconds' work; None without two cores or a compiler."""
    cores, library = sorted(os.sched_getaffinity(0)), _compiled()
    return library.round_trip_ns(*cores[:2]) if len(cores) > 1 and library is not None else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20)
    args = parser.parse_args()
    for _ in range(args.times):
        took = round_trip_ns()
        if took is None:
            raise SystemExit("there are no two cores, or no C++ compiler")
        print(f"{took:.0f} ns", flush=True)
        time.sleep(0.2)


if __name__ == "__main__":
    main()
