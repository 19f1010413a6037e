// Limits of control groups, read from simulated machines.

#include "core/cgroup.h"

#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "check.h"

namespace paceline {
namespace {

constexpr uint64_t kNone = UINT64_MAX;

/// A folder that replaces the root of a machine; removed at the end.
class Machine {
 public:
  Machine() {
    char name[] = "/tmp/paceline-cgroup-XXXXXX";
    CHECK(mkdtemp(name) != nullptr);
    root_ = name;
  }
  ~Machine() { std::filesystem::remove_all(root_); }

  void write(const std::string& path, const std::string& text) {
    const std::filesystem::path file = root_ + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
  /// A group of version 2 at `folder` with this much memory and processor time.
  void limit(const std::string& folder, const std::string& memory,
             const std::string& used, const std::string& cpu) {
    write(folder + "/memory.max", memory + "\n");
    write(folder + "/memory.current", used + "\n");
    write(folder + "/cpu.max", cpu + "\n");
  }
  /// The same in version 1, where the controllers are mounted separately.
  void limit_v1(const std::string& group, const std::string& memory,
                const std::string& used, const std::string& quota) {
    write("/sys/fs/cgroup/memory" + group + "/memory.limit_in_bytes", memory);
    write("/sys/fs/cgroup/memory" + group + "/memory.usage_in_bytes", used);
    write("/sys/fs/cgroup/cpu,cpuacct" + group + "/cpu.cfs_quota_us", quota);
    write("/sys/fs/cgroup/cpu,cpuacct" + group + "/cpu.cfs_period_us",
          "100000");
  }
  void mount_v2(const std::string& group = "/",
                const std::string& point = "/sys/fs/cgroup") {
    write("/proc/self/mountinfo",
          "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n30 22 0:26 " + group + " " +
              point + " rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n");
  }
  void mount_v1(const std::string& group = "/") {
    write("/proc/self/mountinfo",
          "33 31 0:30 " + group +
              " /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
              "35 31 0:32 " +
              group +
              " /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n");
  }
  void be_in(const std::string& lines) { write("/proc/self/cgroup", lines); }
  CgroupLimits limits() const { return read_cgroup_limits(root_); }

 private:
  std::string root_;
};

TEST(no_control_groups_are_no_limit) {
  Machine machine;
  CHECK_EQ(machine.limits().memory_left, kNone);
  CHECK_EQ(machine.limits().cores, CgroupLimits::kNoCoreLimit);
  machine.be_in("0::/\n");
  machine.mount_v2();
  CHECK_EQ(machine.limits().memory_left, kNone);
  machine.limit("/sys/fs/cgroup", "max", "5000", "max 100000");
  CHECK_EQ(machine.limits().memory_left, kNone);
  CHECK_EQ(machine.limits().cores, CgroupLimits::kNoCoreLimit);
}

TEST(a_container_has_its_limits_at_the_root) {
  Machine machine;
  machine.be_in("0::/\n");
  machine.mount_v2();
  machine.limit("/sys/fs/cgroup", "10000", "4000", "150000 100000");
  machine.write("/sys/fs/cgroup/memory.stat",
                "anon 2500\nactive_file 300\ninactive_file 200\nshmem 500\n");
  CHECK_EQ(machine.limits().memory_left, uint64_t{6500});
  CHECK_EQ(machine.limits().cores, 1.5);
}

TEST(a_job_on_the_host_has_them_in_its_group_or_above_it) {
  Machine machine;
  machine.be_in("0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0\n");
  machine.mount_v2();
  const std::string scope = "/sys/fs/cgroup/system.slice/slurmstepd.scope";
  machine.limit(scope + "/job_7", "8000", "3000", "400000 100000");
  CHECK_EQ(machine.limits().memory_left, uint64_t{5000});
  CHECK_EQ(machine.limits().cores, 4.0);
  machine.limit(scope + "/job_7/step_0/user/task_0", "7000", "100",
                "max 100000");
  CHECK_EQ(machine.limits().memory_left, uint64_t{5000});
  // More is used above than there is: nothing is left.
  machine.limit("/sys/fs/cgroup/system.slice", "9000", "9500", "300000 100000");
  CHECK_EQ(machine.limits().memory_left, uint64_t{0});
  CHECK_EQ(machine.limits().cores, 3.0);
  // Another job's group does not count.
  machine.limit(scope + "/job_77", "1", "1", "1 100000");
  CHECK_EQ(machine.limits().cores, 3.0);
}

TEST(version_1_has_one_tree_for_each_controller) {
  Machine machine;
  machine.be_in(
      "9:memory:/slurm/uid_1000/job_7\n4:cpu,cpuacct:/slurm/uid_1000\n"
      "1:name=systemd:/system.slice\n0::/\n");
  machine.mount_v1();
  machine.limit_v1("/slurm", "9223372036854771712", "900000", "-1");
  machine.limit_v1("/slurm/uid_1000", "20000", "5000", "250000");
  machine.limit_v1("/slurm/uid_1000/job_7", "16000", "4000", "100000");
  machine.write("/sys/fs/cgroup/memory/slurm/uid_1000/job_7/memory.stat",
                "inactive_file 1\ntotal_inactive_file 500\n"
                "total_active_file 1500\n");
  CHECK_EQ(machine.limits().memory_left, uint64_t{14000});
  CHECK_EQ(machine.limits().cores, 2.5);  // the job's own tree ends above it
}

TEST(a_container_that_sees_the_names_of_the_host) {
  Machine machine;  // no cgroup namespace: Docker's default with version 1
  machine.be_in("9:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n");
  machine.mount_v1("/docker/abc");
  machine.limit_v1("", "6000", "1000", "50000");
  machine.limit_v1("/docker/abc", "1", "1", "1");  // not where it is
  CHECK_EQ(machine.limits().memory_left, uint64_t{5000});
  CHECK_EQ(machine.limits().cores, 0.5);
  machine.mount_v1("/docker/abcdef");  // another container's
  CHECK_EQ(machine.limits().memory_left, kNone);
}

TEST(groups_above_the_namespace_are_asked_as_far_as_they_are_visible) {
  Machine machine;
  machine.be_in("0::/../job_7\n");
  machine.mount_v2("/", "/mnt/control\\040groups");
  machine.limit("/mnt/control groups", "6000", "1000", "200000 100000");
  CHECK_EQ(machine.limits().memory_left, uint64_t{5000});
  machine.be_in("0::/\n");
  machine.mount_v2("/../..");
  machine.limit("/sys/fs/cgroup", "5000", "1000", "100000 100000");
  CHECK_EQ(machine.limits().memory_left, uint64_t{4000});
}

TEST(both_versions_side_by_side) {
  Machine machine;
  machine.be_in("9:memory:/job\n0::/job\n");
  machine.mount_v2("/", "/sys/fs/cgroup/unified");
  std::string mounts =
      "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
      "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";
  machine.write("/proc/self/mountinfo", mounts);
  machine.limit_v1("/job", "6000", "1000", "-1");
  machine.write("/sys/fs/cgroup/unified/job/cpu.max", "300000 100000");
  CHECK_EQ(machine.limits().memory_left, uint64_t{5000});
  CHECK_EQ(machine.limits().cores, 3.0);
}

TEST(this_machine_can_be_read) {
  const CgroupLimits limits = read_cgroup_limits();
  CHECK(limits.cores > 0);
}

}  // namespace
}  // namespace paceline
