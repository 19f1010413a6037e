// Collectives of the device. Each runs on the stream that Paddle gives it, in turns of all ranks, through a
// file in memory that the ranks of one machine share. As with NCCL, the other ranks wait for a missing rank
// until the communicator is destroyed.
#pragma once

#include <fcntl.h>
#include <paddle/phi/backends/device_ext.h>
#include <paddle/phi/common/bfloat16.h>
#include <paddle/phi/common/float16.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>

#include "streams.h"

namespace later {

inline Queue& queue_of(C_Stream stream) {
  return *reinterpret_cast<Queue*>(stream);
}

inline C_Status status_of(const std::string& error) {
  if (error.empty()) return C_SUCCESS;
  std::fprintf(stderr, "the device of tests: %s\n", error.c_str());
  return C_INTERNAL_ERROR;
}

inline std::size_t width_of(C_DataType dtype) {
  switch (dtype) {
    case BOOL:
    case UINT8:
    case INT8:
      return 1;
    case UINT16:
    case INT16:
    case FLOAT16:
    case BFLOAT16:
      return 2;
    case UINT32:
    case INT32:
    case FLOAT32:
      return 4;
    case COMPLEX128:
      return 16;
    default:
      return 8;
  }
}

// The ranks of one group; each has a place for its data.
class Communicator {
 public:
  static constexpr std::size_t kMostRanks = 64;
  static constexpr std::size_t kIdBytes = 64;
  static constexpr std::size_t kPlaceBytes = 1 << 20;

  // The file's name, which is valid as long as this process lives and has it open.
  static void make_id(char* id) {
    int file = memfd_create("paceline-test-device", 0);
    if (file < 0 || ftruncate(file, kBytes) != 0)
      throw std::runtime_error("no memory for a communicator");
    std::snprintf(id, kIdBytes, "/proc/%d/fd/%d", getpid(), file);
  }

  Communicator(const char* id, int rank, int size) : rank_(rank), size_(size) {
    int file = open(id, O_RDWR);
    if (file < 0) throw std::runtime_error(std::string("cannot open ") + id);
    void* mapped =
        mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (mapped == MAP_FAILED) throw std::runtime_error("cannot map memory");
    turns_ = static_cast<std::atomic<std::uint64_t>*>(mapped);
    places_ = static_cast<char*>(mapped) + kPageBytes;
  }

  void destroy() { is_destroyed_ = true; }

  // Exchanges `nbytes` bytes of each rank, in chunks. `bring` copies a chunk of this rank's bytes to its
  // place; after all ranks have done so, `take` reads the places of all.
  void exchange(
      std::size_t nbytes,
      const std::function<void(char* place, std::size_t at, std::size_t count)>&
          bring,
      const std::function<void(std::size_t at, std::size_t count)>& take) {
    std::size_t at = 0;
    do {
      const auto count = std::min(kPlaceBytes, nbytes - at);
      bring(place_of(rank_), at, count);
      await_all();
      take(at, count);
      await_all();
      at += count;
    } while (at < nbytes);
  }

  char* place_of(int rank) { return places_ + rank * kPlaceBytes; }
  int rank() const { return rank_; }
  int size() const { return size_; }

 private:
  static constexpr std::size_t kPageBytes = 4096;
  static constexpr std::size_t kBytes = kPageBytes + kMostRanks * kPlaceBytes;

  void await_all() {
    const auto turn = ++turn_;
    turns_[rank_] = turn;
    for (int rank = 0; rank < size_; ++rank) {
      while (turns_[rank] < turn) {
        if (is_destroyed_)
          throw std::runtime_error("the communicator was destroyed");
        std::this_thread::sleep_for(std::chrono::microseconds(20));
      }
    }
  }

  int rank_, size_;
  std::uint64_t turn_ = 0;
  std::atomic<std::uint64_t>* turns_;  // of each rank
  char* places_;
  std::atomic<bool> is_destroyed_{false};
};

inline Communicator& communicator_of(C_CCLComm comm) {
  return *reinterpret_cast<Communicator*>(comm);
}

inline void copy_to(char* place, const void* from, std::size_t at,
                    std::size_t count) {
  std::memcpy(place, static_cast<const char*>(from) + at, count);
}

template <typename Element, typename Sum = Element>
void reduce_places(Communicator& all, C_CCLReduceOp op, char* to,
                   std::size_t nbytes) {
  for (std::size_t at = 0; at < nbytes; at += sizeof(Element)) {
    auto element = [&](int rank) {
      Element found;
      std::memcpy(&found, all.place_of(rank) + at, sizeof found);
      return static_cast<Sum>(found);
    };
    Sum result = element(0);
    for (int rank = 1; rank < all.size(); ++rank) {
      const Sum other = element(rank);
      if (op == MAX)
        result = std::max(result, other);
      else if (op == MIN)
        result = std::min(result, other);
      else if (op == PRODUCT)
        result = result * other;
      else
        result = result + other;
    }
    if (op == AVG) result = result / static_cast<Sum>(all.size());
    const auto rounded = static_cast<Element>(result);
    std::memcpy(to + at, &rounded, sizeof rounded);
  }
}

inline void reduce_places(Communicator& all, C_DataType dtype, C_CCLReduceOp op,
                          char* to, std::size_t nbytes) {
  switch (dtype) {
    case FLOAT32:
      return reduce_places<float>(all, op, to, nbytes);
    case FLOAT64:
      return reduce_places<double>(all, op, to, nbytes);
    case FLOAT16:
      return reduce_places<phi::dtype::float16, float>(all, op, to, nbytes);
    case BFLOAT16:
      return reduce_places<phi::dtype::bfloat16, float>(all, op, to, nbytes);
    case INT32:
      return reduce_places<std::int32_t>(all, op, to, nbytes);
    case INT64:
      return reduce_places<std::int64_t>(all, op, to, nbytes);
    case UINT8:
    case BOOL:
      return reduce_places<std::uint8_t>(all, op, to, nbytes);
    default:
      throw std::runtime_error("no sums of this dtype");
  }
}

inline void fill_collectives(C_DeviceInterface& device) {
  device.xccl_get_comm_name = [](C_CCLComm, char* name) {
    std::strcpy(name, "later");
    return C_SUCCESS;
  };
  device.xccl_get_unique_id_size = [](std::size_t* nbytes) {
    *nbytes = Communicator::kIdBytes;
    return C_SUCCESS;
  };
  device.xccl_get_unique_id = [](C_CCLRootId* id) {
    Communicator::make_id(static_cast<char*>(id->data));
    return C_SUCCESS;
  };
  device.xccl_comm_init_rank = [](std::size_t size, C_CCLRootId* id,
                                  std::size_t rank, C_CCLComm* comm) {
    try {
      *comm = reinterpret_cast<C_CCLComm>(
          new Communicator(static_cast<char*>(id->data), static_cast<int>(rank),
                           static_cast<int>(size)));
    } catch (const std::exception& error) {
      return status_of(error.what());
    }
    return C_SUCCESS;
  };
  // Never deleted: a stream may still be in one of its calls.
  device.xccl_destroy_comm = [](C_CCLComm comm) {
    communicator_of(comm).destroy();
    return C_SUCCESS;
  };
  device.xccl_group_start = device.xccl_group_end = [] { return C_SUCCESS; };
  device.xccl_all_reduce = [](void* from, void* to, std::size_t count,
                              C_DataType dtype, C_CCLReduceOp op,
                              C_CCLComm comm, C_Stream stream) {
    queue_of(stream).add([=, &all = communicator_of(comm)] {
      all.exchange(
          count * width_of(dtype),
          [&](char* place, std::size_t at, std::size_t nbytes) {
            copy_to(place, from, at, nbytes);
          },
          [&](std::size_t at, std::size_t nbytes) {
            reduce_places(all, dtype, op, static_cast<char*>(to) + at, nbytes);
          });
    });
    return C_SUCCESS;
  };
  device.xccl_broadcast = [](void* memory, std::size_t count, C_DataType dtype,
                             std::size_t root, C_CCLComm comm,
                             C_Stream stream) {
    queue_of(stream).add([=, &all = communicator_of(comm)] {
      const bool is_root = all.rank() == static_cast<int>(root);
      all.exchange(
          count * width_of(dtype),
          [&](char* place, std::size_t at, std::size_t nbytes) {
            if (is_root) copy_to(place, memory, at, nbytes);
          },
          [&](std::size_t at, std::size_t nbytes) {
            if (!is_root)
              std::memcpy(static_cast<char*>(memory) + at,
                          all.place_of(static_cast<int>(root)), nbytes);
          });
    });
    return C_SUCCESS;
  };
  device.xccl_all_gather = [](void* from, void* to, std::size_t count,
                              C_DataType dtype, C_CCLComm comm,
                              C_Stream stream) {
    queue_of(stream).add([=, &all = communicator_of(comm)] {
      const auto own = count * width_of(dtype);
      all.exchange(
          own,
          [&](char* place, std::size_t at, std::size_t nbytes) {
            copy_to(place, from, at, nbytes);
          },
          [&](std::size_t at, std::size_t nbytes) {
            for (int rank = 0; rank < all.size(); ++rank)
              std::memcpy(static_cast<char*>(to) + rank * own + at,
                          all.place_of(rank), nbytes);
          });
    });
    return C_SUCCESS;
  };
}

}  // namespace later
