// A file descriptor of ours in a program that may close all descriptors, as a
// program does that becomes a daemon. The kernel may then give the number to
// another file.
#pragma once

#include <sys/stat.h>
#include <unistd.h>

namespace paceline {

struct Descriptor {
  int number = -1;
  dev_t device = 0;
  ino_t inode = 0;

  static Descriptor of(int number) {
    struct stat status = {};
    if (fstat(number, &status) != 0) return {};
    return {number, status.st_dev, status.st_ino};
  }
  /// Whether the number still refers to our file. Async-signal-safe, as is
  /// close().
  bool is_ours() const {
    struct stat status = {};
    return number >= 0 && fstat(number, &status) == 0 &&
           status.st_dev == device && status.st_ino == inode;
  }
  void close() const {
    if (is_ours()) ::close(number);
  }
};

}  // namespace paceline
