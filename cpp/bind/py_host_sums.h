// The Python class for HostSums.
#pragma once

#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "bind/py_host_group.h"
#include "reducer/host_sums.h"

namespace paceline {

/// A HostSums that keeps its group alive.
class PyHostSums {
 public:
  PyHostSums(nb::object group, size_t buffer_bytes,
             const std::vector<std::tuple<size_t, size_t, int>>& buckets,
             size_t num_slots, size_t slot_bytes);

  HostSums& sums() {
    group_->check_not_forked();
    return *sums_;
  }
  /// Runs `body`, which waits for no rank, without Python's lock if it
  /// processes many bytes.
  template <class Body>
  void work(size_t bytes, Body body) {
    group_->check_not_forked();
    group_->call_without_waiting([&](HostGroup&) {
      const nb::object no_callback = nb::none();
      CallHooks const hooks(nullptr, no_callback, nullptr,
                            bytes >= kUnlockBytes);
      body(*sums_);
    });
  }
  /// Runs `body`, which waits for other ranks of the host.
  template <class Body>
  void wait(Body body) {
    group_->call(0, [&](HostGroup&) { body(*sums_); });
  }
  size_t bytes(size_t bucket, size_t count) {
    return count * dtype_bytes(sums_->bucket(bucket).dtype);
  }

  nb::bytes read_slot(size_t index);
  nb::list read_slots();
  void write_slot(size_t index, nb::bytes payload);

 private:
  nb::object owner_;
  PyHostGroup* group_;
  std::unique_ptr<HostSums> sums_;
};

}  // namespace paceline
