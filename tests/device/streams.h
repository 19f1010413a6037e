// Streams that are threads: work for the test device is put into a queue, and a caller that does not wait for
// it is ahead of it. Shared by the devices of both frameworks, and independent of both.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

namespace later {

// Microseconds before each task of a stream. Read with the first task of this process, not of the process
// that it was forked from.
inline int lag_us() {
  static const int found = [] {
    const char* us = std::getenv("PACELINE_TEST_DEVICE_LAG_US");
    return us ? std::atoi(us) : 300;
  }();
  return found;
}

// The first exception of a task, until it is taken: as with a GPU, a later call reports the error.
class FirstError {
 public:
  void note(const std::string& text) {
    std::lock_guard lock(mutex_);
    if (text_.empty()) text_ = text;
  }
  // Empty: there was none.
  std::string take() {
    std::lock_guard lock(mutex_);
    return std::exchange(text_, {});
  }

 private:
  std::mutex mutex_;
  std::string text_;
};

inline FirstError first_error;

// A place in a stream's queue, which others can wait for.
class Mark {
 public:
  void set() {
    std::lock_guard lock(mutex_);
    is_set_ = true;
    changed_.notify_all();
  }
  bool is_set() {
    std::lock_guard lock(mutex_);
    return is_set_;
  }
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return is_set_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_set_ = false;
};

using MarkPointer = std::shared_ptr<Mark>;

// One stream: tasks that run one after the other in a thread. The thread begins with the first task, so a
// process may fork as long as its streams have had none. Never deleted, as threads outlive main().
class Queue {
 public:
  void add(std::function<void()> task) {
    std::lock_guard lock(mutex_);
    if (!has_thread_) {
      has_thread_ = true;
      std::thread([this] { run(); }).detach();
    }
    tasks_.push_back(std::move(task));
    changed_.notify_one();
  }
  // Set once the stream has done all that was added before.
  MarkPointer mark() {
    auto made = std::make_shared<Mark>();
    add([made] { made->set(); });
    return made;
  }
  // Makes work that is added from now on wait for another stream.
  void wait_for(MarkPointer mark) {
    add([mark] { mark->wait(); });
  }
  bool is_idle() {
    std::lock_guard lock(mutex_);
    return tasks_.empty() && !is_running_;
  }

 private:
  void run() {
    for (;;) {
      std::function<void()> task;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return !tasks_.empty(); });
        task = std::move(tasks_.front());
        tasks_.pop_front();
        is_running_ = true;
      }
      if (int us = lag_us())
        std::this_thread::sleep_for(std::chrono::microseconds(us));
      try {
        task();
      } catch (const std::exception& error) {
        first_error.note(error.what());
      }
      task = nullptr;  // with the objects that it holds
      std::lock_guard lock(mutex_);
      is_running_ = false;
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool has_thread_ = false, is_running_ = false;
};

}  // namespace later
