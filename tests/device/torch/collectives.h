// A collective runs on a stream of the group, in the order of calls, through a group of Gloo. Waiting for it
// blocks the current stream, and not the caller: as with NCCL.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "device.h"
#include "operators.h"
#include "streams.h"

namespace later {

// A call of a group: the streams of the caller can wait for it.
class Call final : public c10d::Work {
 public:
  Call(c10d::OpType kind, c10::Device device, bool blocks)
      : c10d::Work(-1, kind), device_(device), blocks_(blocks) {}

  bool isCompleted() override { return end->is_set(); }
  bool isSuccess() const override { return end->is_set() && !error(); }
  std::exception_ptr exception() const override { return error(); }
  bool wait(std::chrono::milliseconds = kNoTimeout) override {
    if (blocks_) wait_on_host(*end);
    if (auto found = error()) std::rethrow_exception(found);
    synchronize();
    return true;
  }
  void synchronize() override { current_queue(device_).wait_for(end); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future;
  }
  void fail(std::exception_ptr error) {
    std::lock_guard lock(mutex_);
    exception_ = std::move(error);
  }

  MarkPointer end = std::make_shared<Mark>();
  c10::intrusive_ptr<c10::ivalue::Future> future;

 private:
  std::exception_ptr error() const {
    std::lock_guard lock(mutex_);
    return exception_;
  }

  c10::Device device_;
  bool blocks_;
};

// Collectives on a separate stream, by a group of Gloo. Waiting for one blocks the caller if its name is
// "gloo", as Gloo's own with tensors of a GPU; otherwise the caller's stream, as NCCL's. `abort` ends all of
// them.
class Group final : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;

  Group(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size,
        std::string name)
      : c10d::Backend(rank, size),
        gloo_(std::move(gloo)),
        name_(std::move(name)) {}

  const std::string getBackendName() const override { return name_; }
  void setSequenceNumberForGroup() override {}
  std::uint64_t getSequenceNumberForGroup() override { return 0; }
  void abort() override { is_aborted_ = true; }
  void shutdown() override { is_aborted_ = true; }

  c10::intrusive_ptr<c10d::Work> allreduce(
      Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return put_off(c10d::OpType::ALLREDUCE, tensors, tensors,
                   [this, options](Tensors host) {
                     finish(gloo_->allreduce(host, options));
                     return host;
                   });
  }
  c10::intrusive_ptr<c10d::Work> broadcast(
      Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return put_off(c10d::OpType::BROADCAST, tensors, tensors,
                   [this, options](Tensors host) {
                     finish(gloo_->broadcast(host, options));
                     return host;
                   });
  }
  c10::intrusive_ptr<c10d::Work> allgather(
      std::vector<Tensors>& outputs, Tensors& inputs,
      const c10d::AllgatherOptions&) override {
    return put_off(c10d::OpType::ALLGATHER, outputs[0], inputs,
                   [this](Tensors host) { return rows(host[0]); });
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& output, at::Tensor& input,
      const c10d::AllgatherOptions&) override {
    Tensors outputs = output.view({getSize(), -1}).unbind(),
            inputs = {input.view({-1})};
    return put_off(c10d::OpType::_ALLGATHER_BASE, outputs, inputs,
                   [this](Tensors host) { return rows(host[0]); });
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input,
      const c10d::ReduceScatterOptions& options) override {
    Tensors outputs = {output}, inputs = {input};
    c10d::AllreduceOptions sums;
    sums.reduceOp = options.reduceOp;
    return put_off(c10d::OpType::_REDUCE_SCATTER_BASE, outputs, inputs,
                   [this, sums](Tensors host) {
                     finish(gloo_->allreduce(host, sums));
                     return Tensors{host[0].view({getSize(), -1})[getRank()]};
                   });
  }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions&) override {
    Tensors one = {at::zeros({1}, at::TensorOptions().device(on(-1)))};
    return allreduce(one, {});
  }

 private:
  // The rows of all ranks, from this rank's.
  Tensors rows(const at::Tensor& own) {
    std::vector<Tensors> found(1);
    for (int rank = 0; rank < getSize(); ++rank)
      found[0].push_back(at::empty_like(own));
    Tensors sent = {own};
    finish(gloo_->allgather(found, sent, {}));
    return found[0];
  }

  // Polled, so that `abort` ends it.
  void finish(const c10::intrusive_ptr<c10d::Work>& work) {
    while (!work->isCompleted()) {
      TORCH_CHECK(!is_aborted_, "the group was aborted");
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    work->wait();
  }

  // After earlier work on the caller's stream: `call` computes the outputs from copies of the inputs.
  c10::intrusive_ptr<c10d::Work> put_off(c10d::OpType kind, Tensors outputs,
                                         Tensors inputs,
                                         std::function<Tensors(Tensors)> call) {
    auto device = inputs[0].device();
    auto own = stream(device);
    // One for all devices, as ranks make calls in one order.
    auto& queue = queue_of(first_stream());
    auto work = c10::make_intrusive<Call>(kind, device, name_ == "gloo");
    work->future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()),
        std::vector<c10::Device>{device});
    queue.wait_for(current_queue(device).mark());
    // The tensors are held until the call is over; it reads their values at that time.
    launch(queue, [this, work, outputs, inputs, call] {
      try {
        run(outputs, inputs, call);
      } catch (...) {
        work->fail(std::current_exception());
      }
      work->end->set();
    });
    queue_of(own).wait_for(work->end);
    // Waiting for the future waits for this stream.
    c10::StreamGuard guard(own);
    work->future->markCompleted(c10::IValue(outputs));
    return work;
  }

  void run(const Tensors& outputs, const Tensors& inputs,
           const std::function<Tensors(Tensors)>& call) {
    TORCH_CHECK(!is_aborted_, "the group was aborted");
    c10::InferenceMode no_autograd;
    Tensors host;
    for (const auto& each : inputs)
      host.push_back(Alias(each).on_host().clone());
    auto found = call(host);
    for (std::size_t at = 0; at < outputs.size(); ++at)
      Alias(outputs[at]).on_host().copy_(found[at]);
  }

  c10::Stream first_stream() {
    std::lock_guard lock(streams_mutex_);
    return streams_.front().second;
  }

  c10::Stream stream(c10::Device device) {
    // Autograd has a thread for each device.
    std::lock_guard lock(streams_mutex_);
    for (const auto& [index, stream] : streams_) {
      if (index == device.index()) return stream;
    }
    return streams_
        .emplace_back(device.index(), Guard().getNewStream(device, 0))
        .second;
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  std::string name_;
  std::mutex streams_mutex_;
  // One of each device that has made a call.
  std::vector<std::pair<c10::DeviceIndex, c10::Stream>> streams_;
  std::atomic<bool> is_aborted_{false};
};

}  // namespace later
