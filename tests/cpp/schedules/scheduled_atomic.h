// Atomic, as the tests of schedules see it: every operation is a step, before
// which another rank may continue.
//
// It has the size and the operations of std::atomic, so that the core compiles
// unchanged. Operations take effect one after the other, in the order of the
// schedule; clocks.h checks the guarantees of their memory orders.
#pragma once

#include <atomic>
#include <cstdint>
#include <source_location>
#include <type_traits>

namespace paceline::schedules {

/// The effect of an operation on its word, for the trace and for the clocks.
enum class Operation : uint8_t { kLoad, kStore, kExchange };

/// Lets another rank continue first. Does nothing outside of a schedule.
void before_step(const void* word);
/// Records the operation, and its memory order.
void after_step(const void* word, Operation operation, std::memory_order order,
                uint64_t value, const std::source_location& where);
/// Whether a weak compare-and-swap fails spuriously.
bool fails_spuriously();

}  // namespace paceline::schedules

namespace paceline {

template <class T>
class Atomic {
  using Order = std::memory_order;
  using Where = std::source_location;
  using Operation = schedules::Operation;

 public:
  constexpr Atomic() = default;
  constexpr Atomic(T value) : value_(value) {}
  Atomic(const Atomic&) = delete;
  Atomic& operator=(const Atomic&) = delete;

  T load(Order order = Order::seq_cst, Where where = Where::current()) const {
    schedules::before_step(this);
    return after(Operation::kLoad, order, value_, where);
  }
  /// Not a step: the core reads only words of its own rank like this.
  operator T() const { return value_; }
  void store(T value, Order order = Order::seq_cst,
             Where where = Where::current()) {
    schedules::before_step(this);
    value_ = value;
    after(Operation::kStore, order, value, where);
  }
  T operator=(T value) {
    store(value);
    return value;
  }
  T exchange(T value, Order order = Order::seq_cst,
             Where where = Where::current()) {
    return change([&](T) { return value; }, order, where);
  }
  T fetch_add(T value, Order order = Order::seq_cst,
              Where where = Where::current()) {
    return change([&](T old) { return static_cast<T>(old + value); }, order,
                  where);
  }
  T fetch_sub(T value, Order order = Order::seq_cst,
              Where where = Where::current()) {
    return change([&](T old) { return static_cast<T>(old - value); }, order,
                  where);
  }
  T fetch_or(T value, Order order = Order::seq_cst,
             Where where = Where::current()) {
    return change([&](T old) { return static_cast<T>(old | value); }, order,
                  where);
  }
  T fetch_and(T value, Order order = Order::seq_cst,
              Where where = Where::current()) {
    return change([&](T old) { return static_cast<T>(old & value); }, order,
                  where);
  }
  bool compare_exchange_strong(T& expected, T desired,
                               Order order = Order::seq_cst,
                               Where where = Where::current()) {
    return compare_exchange_strong(expected, desired, order, failing(order),
                                   where);
  }
  bool compare_exchange_strong(T& expected, T desired, Order success,
                               Order failure, Where where = Where::current()) {
    schedules::before_step(this);
    return swap_if(value_ == expected, expected, desired, success, failure,
                   where);
  }
  bool compare_exchange_weak(T& expected, T desired,
                             Order order = Order::seq_cst,
                             Where where = Where::current()) {
    return compare_exchange_weak(expected, desired, order, failing(order),
                                 where);
  }
  bool compare_exchange_weak(T& expected, T desired, Order success,
                             Order failure, Where where = Where::current()) {
    schedules::before_step(this);
    return swap_if(value_ == expected && !schedules::fails_spuriously(),
                   expected, desired, success, failure, where);
  }

 private:
  /// The order of a compare-and-swap that fails, if only one order was given.
  static constexpr Order failing(Order order) {
    if (order == Order::acq_rel) return Order::acquire;
    if (order == Order::release) return Order::relaxed;
    return order;
  }
  T after(Operation operation, Order order, T value, const Where& where) const {
    schedules::after_step(this, operation, order, number_of(value), where);
    return value;
  }
  static uint64_t number_of(T value) {
    if constexpr (std::is_pointer_v<T>)
      return reinterpret_cast<uintptr_t>(value);
    else
      return static_cast<uint64_t>(value);
  }
  template <class Change>
  T change(Change change, Order order, const Where& where) {
    schedules::before_step(this);
    const T old = value_;
    value_ = change(old);
    after(Operation::kExchange, order, value_, where);
    return old;
  }
  bool swap_if(bool succeeds, T& expected, T desired, Order success,
               Order failure, const Where& where) {
    if (!succeeds) {
      expected = after(Operation::kLoad, failure, value_, where);
      return false;
    }
    value_ = desired;
    after(Operation::kExchange, success, desired, where);
    return true;
  }

  T value_{};
};

}  // namespace paceline
