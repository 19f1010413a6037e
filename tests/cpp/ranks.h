// Ranks as threads: ThreadSanitizer sees races between threads, but not between
// processes.
#pragma once

#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "check.h"

namespace paceline::testing {

/// Runs `program(rank)` on `world_size` threads. Ends the test if a rank
/// throws, or does not return in time.
inline void run_ranks(
    int world_size, const std::function<void(int)>& program,
    std::chrono::seconds deadline = std::chrono::seconds(120)) {
  std::mutex mutex;
  std::condition_variable ended;
  std::vector<bool> is_back(world_size, false);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        program(rank);
      } catch (const std::exception& error) {
        fail(__FILE__, __LINE__,
             "rank " + std::to_string(rank) + " threw: " + error.what());
      }
      const std::lock_guard lock(mutex);
      is_back[rank] = true;
      ended.notify_one();
    });
  }
  {
    std::unique_lock lock(mutex);
    // The system clock: GCC's ThreadSanitizer does not know the wait on the
    // steady one before GCC 11.
    const auto limit = std::chrono::system_clock::now() + deadline;
    const auto all_back = [&] {
      for (const bool is_one_back : is_back)
        if (!is_one_back) return false;
      return true;
    };
    if (!ended.wait_until(lock, limit, all_back)) {
      std::string late;
      for (int rank = 0; rank < world_size; ++rank) {
        if (is_back[rank]) continue;
        late += ' ';
        late += std::to_string(rank);
      }
      fail(__FILE__, __LINE__, "not back in time: rank" + late);
    }
  }
  for (auto& thread : threads) thread.join();
}

}  // namespace paceline::testing
